"""Overlap: communication is started early and waited for late, within a bound on memory.

With a prefetch depth of 1 a gather starts when the one before it has arrived, so it runs while that one's module computes::

    start 0 · wait 0 · start 1 · compute 0 · wait 1 · start 2 · compute 1 · …

In backward, where memory is fullest when it begins and a module takes twice as long, it starts halfway through that computation:
the place that activations have left by then is enough for it.

A reduction is waited for when the next but one starts (or at the end), so at most two hold memory. Where a node goes depends on
the graph alone, hence is the same on every rank; a cost model, if there is one, is agreed on first.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import attrs
from torch import fx
from torch.utils.flop_counter import flop_registry

from .. import _compat as compat
from .._collectives import collective_bytes, comm_of, is_start, starts, waits_of
from .._graph import JointGraph, is_getitem, is_view, phase_of, positions, tensor_bytes, value_of
from .._order import is_free, rearrange
from .._pass import PassContext, PassContract
from .._signature import agree_on_numbers
from ..exceptions import ConfigError
from ._torch_backend import Backend, check_backend
from ._torch_backend_overlap import is_product, wishes_of_torch


class CostModel(Protocol):
    """How long nodes take, in finite seconds from 0 up. Ranks may measure differently: the largest that any rank names counts."""

    def compute(self, node: fx.Node) -> float:
        """Seconds of one node that computes."""
        ...

    def collective(self, kind: str, size: int, nbytes: int) -> float:
        """Seconds of one collective of ``size`` ranks to which each contributes ``nbytes``."""
        ...


@attrs.frozen(kw_only=True)
class RooflineCosts:
    """A cost model from sizes alone: the slower of computing and of moving bytes. The defaults are one accelerator of its time.

    Example::

        OverlapPass(costs=RooflineCosts(flops=4e14, memory=3e12, link=5e10, latency=2e-5))

    Attributes:
        flops: operations in a second, of products of matrices, convolutions and attention.
        memory: bytes in a second, read and written.
        link: bytes in a second that a rank sends.
        latency: seconds of the smallest collective.

    Raises:
        ConfigError: a number that is not positive.
    """

    flops: float = 1e14
    memory: float = 1e12
    link: float = 2.5e10
    latency: float = 2e-5

    def __attrs_post_init__(self) -> None:
        for name, value in attrs.asdict(self).items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
                raise ConfigError(f"{name} must be a positive number; got {value!r}", field=name, value=value)

    def compute(self, node: fx.Node) -> float:
        """Seconds of one node; views cost nothing."""
        if is_view(node) or is_getitem(node):
            return 0.0
        moved = sum(tensor_bytes(value_of(one)) for one in (*node.all_input_nodes, node))
        return max(_operations(node) / self.flops, moved / self.memory)

    def collective(self, kind: str, size: int, nbytes: int) -> float:
        """Seconds of one collective in a ring of ``size`` ranks."""
        rounds = {"gather": size - 1, "reduce_scatter": (size - 1) / size}.get(kind, 2 * (size - 1) / size)
        return self.latency + rounds * nbytes / self.link


def _operations(node: fx.Node) -> float:
    if not is_product(node):
        return 0.0
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), value_of)
    return float(flop_registry[node.target.overloadpacket](*args, **kwargs, out_val=value_of(node)))  # type: ignore[union-attr]


class OverlapPass:
    """Moves the starts of gathers up and the waits for reductions down.

    Args:
        reductions: most reductions that are under way at once; 0: each is waited for at once.
        max_bytes: a gather is not moved to where more than so many bytes of gathered parameters would wait to be used; None: the
            prefetch depth alone decides.
        costs: with a cost model, a gather starts no earlier than it takes to hide it.
        backend: who decides: ``stepwell``, or ``torch``, whose scheduler weighs costs (those given, else :class:`RooflineCosts`),
            of reductions too. There ``max_bytes`` bounds what is under way, and the prefetch depth does where it is None.

    Raises:
        ConfigError: the installed torch has no such scheduler, or ``reductions`` is given together with it.
    """

    name = "overlap"
    contract = PassContract(
        requires=frozenset({"collectives"}),
        provides=frozenset({"overlapped"}),
        conflicts=frozenset({"overlapped", "split"}),
    )

    def __init__(
        self,
        *,
        reductions: int = 1,
        max_bytes: int | None = None,
        costs: CostModel | None = None,
        backend: Backend = "stepwell",
    ) -> None:
        _check_count("reductions", reductions, 0)
        if max_bytes is not None:
            _check_count("max_bytes", max_bytes, 1)
        self.reductions = reductions
        self.max_bytes = max_bytes
        self.costs = costs
        self.backend = backend
        self._torch = check_backend(backend, compat.torch_overlap)
        if self._torch is not None:
            if reductions != 1:
                raise ConfigError(
                    f"reductions={reductions} with backend='torch', which decides by costs; leave reductions out, or use the"
                    " backend 'stepwell'",
                    field="reductions",
                    value=reductions,
                )
            self.costs = RooflineCosts() if costs is None else costs

    def run(self, joint: JointGraph, context: PassContext) -> None:
        """Rewrite the graph."""
        wishes: dict[fx.Node, float] = {}
        position = positions(joint.graph)
        self._sink_waits(joint, wishes, position)
        costs = None if self.costs is None else _agreed(joint, context, self.costs)
        if self._torch is not None:
            assert costs is not None
            prefetch = context.config.prefetch
            moved = wishes_of_torch(joint, costs, self._torch, max_bytes=self.max_bytes, prefetch=prefetch)
            packs = {part: moved[n] for n in starts(joint.graph, "gather") for part in _pack_of(n)}
            rearrange(joint.graph, wishes | packs | moved)
            return
        hidden = None if costs is None else _hiding_place(joint, costs, position)
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
        total = list(itertools.accumulate((_gathered_bytes(node) for node in gathers), initial=0))
        for index, node in enumerate(gathers):
            back = index - depth
            if self.max_bytes is not None:
                while back < index and total[index + 1] - total[max(back + 1, 0)] > self.max_bytes:
                    back += 1
            place = begin if back < 0 else uses[back] - 0.25
            if 0 <= back < index and phase_of(node) == "backward":
                place = (uses[back] + uses[back + 1]) / 2
            if back == index:
                place = uses[index] - 0.75
            if hidden is not None:
                place = max(place, min(hidden[node], uses[index] - 0.75))
            for part in (*_pack_of(node), node):
                wishes[part] = place


def _agreed(joint: JointGraph, context: PassContext, model: CostModel) -> dict[fx.Node, float]:
    """Costs of nodes that compute and of collectives, the largest that any data-parallel rank names; or this rank's, alone."""
    nodes = [node for node in joint.graph.nodes if node.op == "call_function"]
    named = []
    for node in nodes:
        comm = comm_of(node)
        if is_start(node):
            assert comm is not None
            named.append(_seconds(model.collective(comm.kind, comm.size, collective_bytes(node)), node))
        else:
            named.append(_seconds(model.compute(node), node) if comm is None else 0.0)
    return dict(zip(nodes, agree_on_numbers(None if context.alone else context.topology, named), strict=True))


def _seconds(value: Any, node: fx.Node) -> float:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or value < 0:
        raise ConfigError(
            f"a cost model must name seconds, from 0 up; it says {value!r} for {node} ({node.target})",
            field="costs",
            value=value,
        )
    return float(value)


def _hiding_place(
    joint: JointGraph, costs: Mapping[fx.Node, float], position: dict[fx.Node, int]
) -> dict[fx.Node, float]:
    """The latest place at which a gather may start and still be hidden by computation."""
    nodes = list(joint.graph.nodes)
    spent = [0.0]  # by the nodes before each place
    for node in nodes:
        spent.append(spent[-1] + (0.0 if is_start(node) else costs.get(node, 0.0)))
    places = {}
    for node in starts(joint.graph, "gather"):
        use = int(_first_reader(node, position))
        places[node] = max(bisect.bisect_right(spent, spent[use] - costs[node], hi=use + 1) - 1, 0) - 0.5
    return places


def _check_count(field: str, value: Any, lowest: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < lowest:
        raise ConfigError(f"{field} must be a whole number from {lowest} up; got {value!r}", field=field, value=value)


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
    found: dict[fx.Node, None] = {}
    waiting = [node]
    while waiting:
        for source in waiting.pop().all_input_nodes:
            if is_free(source) and source not in found:
                found[source] = None
                waiting.append(source)
    return list(found)


def _gathered_bytes(node: fx.Node) -> int:
    return tensor_bytes(value_of(node))
