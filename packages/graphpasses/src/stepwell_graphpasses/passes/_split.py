"""Split: one train step becomes the pieces that the ranks of a pipeline run.

Each stage has up to six pieces, each a graph with named inputs and outputs::

    unshard → forward → (later stages) → backward_input → backward_weight → reduce
                                         └───────── backward ───────────┘

``backward_input`` computes what earlier stages wait for, ``backward_weight`` the rest; a zero-bubble schedule runs them apart,
any other the two as one, ``backward``.
The names at the boundaries are those of the values in the whole graph, so that the pieces put together are the whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import attrs
import torch
from torch import fx

from .._collectives import comm_of, is_start
from .._graph import JointGraph, is_random, mutated_arguments, phase_of, positions
from .._memory import memory_roots
from .._pass import PassContext, PassContract
from .._stages import assign, check_writes
from ..exceptions import SplitError

PieceKind = Literal["unshard", "forward", "backward", "backward_input", "backward_weight", "reduce"]
KINDS: tuple[PieceKind, ...] = ("unshard", "forward", "backward_input", "backward_weight", "reduce")

_PARTS: tuple[PieceKind, ...] = ("backward_input", "backward_weight")


@attrs.frozen(eq=False)
class Piece:
    """A part of a step that runs as one.

    Attributes:
        stage: index of its stage.
        kind: what part of the stage it is.
        inputs: names of the values it takes, in the order of the module's arguments.
        outputs: names of the values it gives, in order.
        module: the graph.
    """

    stage: int
    kind: PieceKind
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    module: fx.GraphModule


@attrs.frozen
class Crossing:
    """A value that one stage makes and another reads."""

    name: str
    source: int
    target: int
    phase: Literal["forward", "backward"]


@attrs.frozen(eq=False)
class SplitGraph:
    """All pieces of a step.

    Attributes:
        stages: number of stages.
        pieces: the pieces, in an order in which they can run, with each backward in its two parts.
        backwards: for each stage that has one, its backward as one piece.
        crossings: every value that crosses from stage to stage.
        inputs: names of the whole graph's inputs.
        outputs: names of its outputs.
    """

    stages: int
    pieces: tuple[Piece, ...]
    backwards: tuple[Piece, ...]
    crossings: tuple[Crossing, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    def piece(self, stage: int, kind: PieceKind) -> Piece | None:
        """One piece; None where the stage has nothing of the kind."""
        return next((p for p in (*self.pieces, *self.backwards) if (p.stage, p.kind) == (stage, kind)), None)

    def run(self, *values: Any, whole_backward: bool = False) -> tuple[Any, ...]:
        """Run all pieces after another in this process; takes and gives what the whole graph does.

        Args:
            values: the graph's inputs.
            whole_backward: whether each backward runs as one piece.
        """
        known = dict(zip(self.inputs, values, strict=True))
        wholes = {piece.stage: piece for piece in self.backwards}
        order: dict[Piece, None] = {}
        for piece in self.pieces:
            is_part = whole_backward and piece.kind in _PARTS
            order[wholes[piece.stage] if is_part else piece] = None
        with torch.no_grad():
            for piece in order:
                known |= zip(piece.outputs, piece.module(*(known[name] for name in piece.inputs)), strict=True)
        return tuple(known[name] for name in self.outputs)


class SplitPass:
    """Marks each node with its stage and piece; :func:`pieces` then takes the graph apart.

    Args:
        owners: the stage of each module that is not glue (see ``automatic_owners`` and ``planned_owners``).
    """

    name = "split"
    contract = PassContract(provides=frozenset({"split"}), conflicts=frozenset({"split"}))

    def __init__(self, owners: Mapping[str, int]) -> None:
        self.owners = dict(owners)

    def run(self, joint: JointGraph, context: PassContext) -> None:
        """Mark the graph.

        Raises:
            SplitError: data would flow against the order of the stages, or draws would happen in another order.
        """
        stage = assign(joint, self.owners)
        _check_draws(joint, stage)
        gathers = _gather_chains(joint)
        needed = _needed_by_earlier(joint, stage)
        for node, index in stage.items():
            comm = comm_of(node)
            kind: PieceKind
            if phase_of(node) == "forward":
                kind = "unshard" if comm is not None else "forward"
            elif comm is not None and node not in gathers:
                kind = "reduce"
            else:
                kind = "backward_input" if node in needed else "backward_weight"
            node.meta["stage"], node.meta["piece"] = index, kind
        joint.notes += [
            (name, f"in stage {index} of the pipeline")
            for name, index in sorted(self.owners.items(), key=lambda o: o[1])
        ]


def pieces(joint: JointGraph) -> SplitGraph:
    """Take a marked graph apart.

    Raises:
        SplitError: the graph was not marked by :class:`SplitPass`.
    """
    if "split" not in joint.facts:
        raise SplitError("the graph is not split yet; run SplitPass on it")
    graph = joint.graph
    members: dict[tuple[int, PieceKind], list[fx.Node]] = {}
    for node in graph.nodes:
        if node.op == "call_function":
            members.setdefault((node.meta["stage"], node.meta["piece"]), []).append(node)
    count = 1 + max(stage for stage, _ in members)
    order: list[tuple[int, PieceKind]] = [(s, kind) for s in range(count) for kind in KINDS[:2]]
    order += [(s, kind) for s in reversed(range(count)) for kind in KINDS[2:]]
    place = {key: index for index, key in enumerate(order)}
    check_writes(joint, {node: place[key] for key, nodes in members.items() for node in nodes})
    position = positions(graph)
    made = [_extract(joint, key, members[key], place, position) for key in order if key in members]
    wholes: list[Piece] = []
    for stage in reversed(range(count)):
        parts = [node for kind in _PARTS for node in members.get((stage, kind), ())]
        if parts:
            last = (stage, next(kind for kind in reversed(_PARTS) if (stage, kind) in members))
            parts.sort(key=position.__getitem__)
            wholes.append(attrs.evolve(_extract(joint, last, parts, place, position), kind="backward"))
    return SplitGraph(
        stages=count,
        pieces=tuple(made),
        backwards=tuple(wholes),
        crossings=_crossings(joint),
        inputs=tuple(node.name for node in joint.placeholders),
        outputs=tuple(node.name for node in joint.outputs),
    )


def _extract(
    joint: JointGraph,
    key: tuple[int, PieceKind],
    nodes: Sequence[fx.Node],
    place: Mapping[tuple[int, PieceKind], int],
    position: Mapping[fx.Node, int],
) -> Piece:
    inside = set(nodes)
    needed = {source for node in nodes for source in node.all_input_nodes if source not in inside}
    for source in needed:
        if source.op == "call_function":
            made_in = (source.meta["stage"], source.meta["piece"])
            if place[made_in] >= place[key]:
                raise SplitError(
                    f"{source} of {made_in[1]} of stage {made_in[0]} is needed by {key[1]} of stage {key[0]}, which runs before"
                )
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    inputs = sorted((n for n in needed if n.op != "get_attr"), key=position.__getitem__)
    for source in inputs:
        copies[source] = graph.placeholder(source.name)
        copies[source].meta = dict(source.meta)
    for node in sorted((n for n in needed if n.op == "get_attr"), key=position.__getitem__):
        copies[node] = graph.node_copy(node)
    for node in nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    outputs = [node for node in nodes if any(user not in inside for user in node.users)]
    graph.output(tuple(copies[node] for node in outputs))
    module = fx.GraphModule(joint.root, graph)
    return Piece(key[0], key[1], tuple(n.name for n in inputs), tuple(n.name for n in outputs), module)


def _crossings(joint: JointGraph) -> tuple[Crossing, ...]:
    found: dict[Crossing, None] = {}
    for node in joint.graph.nodes:
        if node.op != "call_function":
            continue
        for user in node.users:
            if user.op == "call_function" and user.meta["stage"] != node.meta["stage"]:
                found[Crossing(node.name, node.meta["stage"], user.meta["stage"], phase_of(user))] = None
    return tuple(found)


def _gather_chains(joint: JointGraph) -> set[fx.Node]:
    """Nodes of communication in backward that bring parameters back, not gradients away."""
    found: set[fx.Node] = set()
    for gather in joint.graph.nodes:
        if not is_start(gather, "gather") or phase_of(gather) == "forward":
            continue
        for step in ("all_input_nodes", "users"):
            waiting = [gather]
            while waiting:
                node = waiting.pop()
                found.add(node)
                waiting += [n for n in getattr(node, step) if n not in found and comm_of(n) is not None]
    return found


def _needed_by_earlier(joint: JointGraph, stage: Mapping[fx.Node, int]) -> set[fx.Node]:
    """Backward nodes on the way to what an earlier stage reads, also by writing into memory that is read."""
    needed: set[fx.Node] = set()
    roots = memory_roots(joint.graph)
    readers: dict[fx.Node, list[fx.Node]] = {}  # of each memory, those that come later
    for node in reversed(list(joint.graph.nodes)):
        if node not in stage or phase_of(node) == "forward":
            continue
        users = list(node.users)
        for written in mutated_arguments(node):
            users += (reader for root in roots[written] for reader in readers.get(root, ()))
        for user in users:
            other = stage.get(user)
            if other is not None and (other < stage[node] or (other == stage[node] and user in needed)):
                needed.add(node)
                break
        for root in {root for source in node.all_input_nodes for root in roots[source]}:
            readers.setdefault(root, []).append(node)
    return needed


def _check_draws(joint: JointGraph, stage: Mapping[fx.Node, int]) -> None:
    highest = 0
    for node in joint.graph.nodes:
        if not is_random(node) or phase_of(node) == "backward":
            continue
        if stage[node] < highest:
            raise SplitError(
                f"the draw {node.target} of stage {stage[node]} ({node.meta['fqn']}) comes after one of stage {highest}: run"
                " stage by stage they would take each other's random numbers. Order the stages as the step runs"
            )
        highest = stage[node]
