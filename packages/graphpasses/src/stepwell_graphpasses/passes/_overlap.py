"""Overlap: communication is started early and waited for late, within a bound on memory.

With a prefetch depth of 1 a gather starts when the one before it has arrived, so it runs while that one's module computes::

    start 0 · wait 0 · start 1 · compute 0 · wait 1 · start 2 · compute 1 · …

A reduction is waited for when the next but one starts (or at the end), so at most two hold memory. Where a node goes depends on
the graph alone, hence is the same on every rank; a cost model, if there is one, is agreed on first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import fx

from .._collectives import collective_bytes, comm_of, starts, waits_of
from .._graph import JointGraph, phase_of, positions, tensor_bytes, value_of
from .._order import is_free, rearrange
from .._pass import PassContext, PassContract


class CostModel(Protocol):
    """How long nodes take. Ranks may measure differently: the pass uses the largest cost that any rank names."""

    def compute(self, node: fx.Node) -> float:
        """Seconds of one node that computes."""
        ...

    def collective(self, kind: str, size: int, nbytes: int) -> float:
        """Seconds of one collective of ``size`` ranks to which each contributes ``nbytes``."""
        ...


class OverlapPass:
    """Moves the starts of gathers up and the waits for reductions down.

    Args:
        reductions: most reductions that are under way at once; 0: each is waited for at once.
        max_bytes: a gather is not moved to where more than so many bytes of gathered parameters would wait to be used; None: the
            prefetch depth alone decides.
        costs: with a cost model, a gather starts no earlier than it takes to hide it.
    """

    name = "overlap"
    contract = PassContract(
        requires=frozenset({"collectives"}),
        provides=frozenset({"overlapped"}),
        conflicts=frozenset({"overlapped", "split"}),
    )

    def __init__(self, *, reductions: int = 1, max_bytes: int | None = None, costs: CostModel | None = None) -> None:
        self.reductions = reductions
        self.max_bytes = max_bytes
        self.costs = costs

    def run(self, joint: JointGraph, context: PassContext) -> None:
        """Rewrite the graph."""
        wishes: dict[fx.Node, float] = {}
        position = positions(joint.graph)
        self._sink_waits(joint, wishes, position)
        hidden = self._hiding_place(joint, context, position) if self.costs is not None else None
        for phase in ("forward", "backward"):
            gathers = [node for node in starts(joint.graph, "gather") if phase_of(node) == phase]
            self._lift(joint, gathers, context.config.prefetch, wishes, position, hidden)
        rearrange(joint.graph, wishes)

    def _sink_waits(self, joint: JointGraph, wishes: dict[fx.Node, float], position: dict[fx.Node, int]) -> None:
        """Waits and what unpacks them go to the first reader; those of reductions behind the start of a later one."""
        reductions = starts(joint.graph, "reduce_scatter", "all_reduce")
        end = float(position[joint.output_node])
        begins = [min(position[part] for part in (*_pack_of(node), node)) for node in reductions]
        for index, node in enumerate(reductions):
            later = index + self.reductions
            wishes |= dict.fromkeys(waits_of(node), begins[later] - 0.5 if later < len(begins) else end)
        for node in starts(joint.graph, "gather"):
            wishes |= {wait: _first_reader(wait, position) - 0.5 for wait in waits_of(node)}
        for node in reversed(list(joint.graph.nodes)):
            comm = comm_of(node)
            if comm is None or node in wishes or comm.kind not in ("unpack", "unpad", "scale", "cast", "carry", "view"):
                continue
            if all(source.op != "placeholder" for source in node.all_input_nodes):
                wishes[node] = _first_reader(node, position) - 0.5

    def _lift(
        self,
        joint: JointGraph,
        gathers: Sequence[fx.Node],
        depth: int,
        wishes: dict[fx.Node, float],
        position: dict[fx.Node, int],
        hidden: dict[fx.Node, float] | None,
    ) -> None:
        if not gathers or depth == 0:
            return
        uses = [_first_reader(node, position) for node in gathers]
        begin = min(position[gathers[0]], uses[0]) - 0.5
        waiting: list[int] = []
        for index, node in enumerate(gathers):
            back = index - depth
            if self.max_bytes is not None:
                sizes = [*waiting, _gathered_bytes(node)]
                while back < index and sum(sizes[back + 1 if back >= 0 else 0 :]) > self.max_bytes:
                    back += 1
            waiting.append(_gathered_bytes(node))
            place = begin if back < 0 else uses[back] - 0.25
            if back == index:
                place = uses[index] - 0.75
            if hidden is not None:
                place = max(place, min(hidden[node], uses[index] - 0.75))
            for part in (*_pack_of(node), node):
                wishes[part] = place

    def _hiding_place(
        self, joint: JointGraph, context: PassContext, position: dict[fx.Node, int]
    ) -> dict[fx.Node, float]:
        """The latest place at which a gather may start and still be hidden by computation, by costs all ranks agree on."""
        assert self.costs is not None
        nodes = list(joint.graph.nodes)
        gathers = starts(joint.graph, "gather")
        costs = [self.costs.compute(n) if n.op == "call_function" and comm_of(n) is None else 0.0 for n in nodes]
        for node in gathers:
            comm = comm_of(node)
            assert comm is not None
            costs.append(self.costs.collective(comm.kind, comm.size, collective_bytes(node)))
        agreed = agree_on_costs(costs, context)
        places = {}
        for node, needed in zip(gathers, agreed[len(nodes) :], strict=True):
            place = int(_first_reader(node, position))
            left = needed
            while place > 0 and left > 0:
                place -= 1
                left -= agreed[place]
            places[node] = place - 0.5
        return places


def agree_on_costs(costs: Sequence[float], context: PassContext) -> list[float]:
    """For each cost the largest that any data-parallel rank named."""
    if context.topology is None:
        return list(costs)
    values = torch.tensor(costs, dtype=torch.float64, device=context.topology.mesh.device_type)
    for axis in context.topology.axis_names:
        dist.all_reduce(values, dist.ReduceOp.MAX, group=context.topology.mesh.get_group(axis))
    return [float(value) for value in values.tolist()]


def _first_reader(node: fx.Node, position: dict[fx.Node, int]) -> float:
    """Where the first node that computes with a value stands, seen through nodes that only unpack it."""
    best = float("inf")
    waiting, seen = [node], {node}
    while waiting:
        for user in waiting.pop().users:
            comm = comm_of(user)
            if (
                is_free(user)
                and comm is not None
                and comm.kind in ("wait", "unpack", "unpad", "scale", "cast", "carry", "view")
            ):
                if user not in seen:
                    seen.add(user)
                    waiting.append(user)
            else:
                best = min(best, position[user])
    return best


def _pack_of(node: fx.Node) -> list[fx.Node]:
    """What makes a gather's input, to be moved with it."""
    found: list[fx.Node] = []
    waiting = [node]
    while waiting:
        for source in waiting.pop().all_input_nodes:
            if is_free(source) and source not in found:
                found.append(source)
                waiting.append(source)
    return found


def _gathered_bytes(node: fx.Node) -> int:
    return tensor_bytes(value_of(node))
