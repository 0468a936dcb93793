"""Collectives in a graph: how they are written, marked and found again."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import attrs
import torch
from torch import fx

from . import _compat as compat
from ._graph import Phase, emit, is_getitem, phase_of, value_of
from .exceptions import ConfigError

Kind = Literal[
    "gather", "reduce_scatter", "all_reduce", "wait", "cast", "pad", "unpad", "scale", "carry", "pack", "unpack", "view"
]
# What every backend carries. Others travel as bytes: gloo knows no small integers, and no complex numbers in coalesced gathers.
CARRIED = frozenset(
    {torch.float64, torch.float32, torch.float16, torch.bfloat16}
    | {torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool}
)
STARTS: frozenset[str] = frozenset({"gather", "reduce_scatter", "all_reduce"})

aten = torch.ops.aten


@attrs.frozen
class Comm:
    """What a node that a pass added is there for; in ``node.meta["comm"]``.

    Attributes:
        kind: a collective, the wait for one, or what prepares or unwraps its data.
        params: the parameters it serves.
        group: registered name of the process group; empty where no communication happens.
        size: ranks in that group.
        op: ``sum`` or ``avg`` for a reduction.
        waits_for: for a wait, the kind of collective it waits for.
    """

    kind: Kind
    params: tuple[str, ...]
    group: str = ""
    size: int = 1
    op: str | None = None
    waits_for: str | None = None


def comm_of(node: fx.Node) -> Comm | None:
    """The mark of a node that a pass added; None for the model's own."""
    return node.meta.get("comm")


def is_start(node: fx.Node, *kinds: str) -> bool:
    """Whether a node starts a collective of data parallelism (of one of the kinds, where some are given)."""
    comm = comm_of(node)
    return comm is not None and comm.kind in (kinds or STARTS)


def starts(graph: fx.Graph, *kinds: str) -> list[fx.Node]:
    """The collectives of data parallelism in graph order."""
    return [node for node in graph.nodes if is_start(node, *kinds)]


def results_of(node: fx.Node) -> list[fx.Node]:
    """What a collective gives: itself, or each of its results where it gives several."""
    several = isinstance(value_of(node), list | tuple)
    return [user for user in node.users if is_getitem(user)] if several else [node]


def waits_of(node: fx.Node) -> list[fx.Node]:
    """The waits for a collective, one for each result."""
    return [user for result in results_of(node) for user in result.users if user.target is compat.WAIT]


def wait_of(node: fx.Node) -> fx.Node:
    """The wait for a collective with one result."""
    (wait,) = waits_of(node)
    return wait


class Writer:
    """Writes marked nodes at one place of a graph, each after the one before.

    Args:
        joint_mode: the mode of the graph's example values.
        graph: the graph.
        like: node whose module and phase the new ones get.
        params: parameters they serve.
        phase: another phase.
    """

    def __init__(
        self,
        joint_mode: compat.ExampleMode,
        graph: fx.Graph,
        *,
        like: fx.Node,
        params: tuple[str, ...],
        phase: Phase | None = None,
        fqn: str | None = None,
    ) -> None:
        self._mode = joint_mode
        self._graph = graph
        self._like = like
        self._fqn = like.meta.get("fqn", "") if fqn is None else fqn
        self._phase: Phase = phase or phase_of(like)
        self.params = params

    def call(self, kind: Kind, target: Any, *args: Any, kwargs: dict[str, Any] | None = None, **marks: Any) -> fx.Node:
        """One marked operator at the insert point."""
        node = emit(
            self._graph,
            target,
            args,
            kwargs,
            like=self._like,
            phase=self._phase,
            mode=self._mode,
            comm=Comm(kind, marks.pop("params", self.params), **marks),
        )
        node.meta["fqn"] = self._fqn
        return node

    def cast(self, node: fx.Node, dtype: torch.dtype) -> fx.Node:
        """``node`` in ``dtype``; the node itself where it has it."""
        if value_of(node).dtype == dtype:
            return node
        return self.call("cast", compat.CAST, node, kwargs={"dtype": dtype})

    def wait(self, node: fx.Node, waits_for: str, group: str, size: int) -> fx.Node:
        """The wait for a collective."""
        return self.call("wait", compat.WAIT, node, group=group, size=size, waits_for=waits_for)

    def gather(self, node: fx.Node, group: str, size: int) -> fx.Node:
        """Shards of equal shape from all ranks, one after another in dim 0, and the wait for them."""
        dtype = value_of(node).dtype
        if dtype not in CARRIED:
            node = self.call("cast", aten.view.dtype, node, torch.uint8)
        started = self.call("gather", compat.ALL_GATHER, node, size, group, group=group, size=size)
        whole = self.wait(started, "gather", group, size)
        return whole if dtype in CARRIED else self.call("unpack", aten.view.dtype, whole, dtype)

    def gather_apart(self, nodes: Sequence[fx.Node], group: str, size: int) -> list[fx.Node]:
        """The same for several shards with one collective, each in memory of its own."""
        started = self.call("gather", compat.ALL_GATHER_APART, list(nodes), size, group, group=group, size=size)
        return self._wait_apart(started, "gather", group, size)

    def _wait_apart(self, started: fx.Node, waits_for: str, group: str, size: int) -> list[fx.Node]:
        results = []
        for index, name in enumerate(self.params):
            member = self.call("unpack", operator.getitem, started, index, params=(name,))
            marks: dict[str, Any] = {"params": (name,), "group": group, "size": size, "waits_for": waits_for}
            results.append(self.call("wait", compat.WAIT, member, **marks))
        return results

    def reduce_scatter(self, node: fx.Node, op: str, group: str, size: int) -> fx.Node:
        """This rank's part of dim 0 of the reduction, and the wait for it."""
        self._check_dtype(node, op)
        started = self.call(
            "reduce_scatter", compat.REDUCE_SCATTER, node, op, size, group, group=group, size=size, op=op
        )
        return self.wait(started, "reduce_scatter", group, size)

    def all_reduce(self, node: fx.Node, op: str, group: str, size: int, *, in_place: bool = False) -> fx.Node:
        """The reduction, whole on every rank, and the wait for it; in the memory of ``node`` where nobody else reads that."""
        self._check_dtype(node, op)
        target = compat.ALL_REDUCE_IN_PLACE if in_place else compat.ALL_REDUCE
        started = self.call("all_reduce", target, node, op, group, group=group, size=size, op=op)
        return self.wait(started, "all_reduce", group, size)

    def pad_rows(self, node: fx.Node, rows: int) -> fx.Node:
        """``node`` with rows of zeros up to ``rows``."""
        value = value_of(node)
        missing = rows - value.shape[0]
        if missing == 0:
            return node
        return self.call("pad", aten.constant_pad_nd.default, node, [*[0, 0] * (value.dim() - 1), 0, missing])

    def first_rows(self, node: fx.Node, rows: int) -> fx.Node:
        """``node`` without the rows from ``rows`` on."""
        if value_of(node).shape[0] == rows:
            return node
        return self.call("unpad", aten.slice.Tensor, node, 0, 0, rows)

    def scale(self, node: fx.Node, divisor: float | None) -> fx.Node:
        """``node`` divided by a number; the node itself for None."""
        return node if divisor is None else self.call("scale", aten.div.Tensor, node, divisor)

    def _check_dtype(self, node: fx.Node, op: str) -> None:
        dtype = value_of(node).dtype
        if op == "avg" and not (dtype.is_floating_point or dtype.is_complex):
            raise ConfigError(
                f"the mean of {dtype} values ({', '.join(self.params)}) is no {dtype} value; reduce with 'sum'",
                field="reduce",
                value=op,
            )


@attrs.frozen
class Scaling:
    """How a reduction over several ranks is scaled.

    Attributes:
        op: what the collectives do.
        before: what a gradient is divided by before the first collective; None: nothing.
        after: what the result is divided by after the last; None: nothing.
    """

    op: Literal["avg", "sum"]
    before: float | None = None
    after: float | None = None


def scaling(reduce: str | float, dtype: torch.dtype, ranks: int) -> Scaling:
    """Where to divide: inside the collective if possible; for float16 half before and half after it.

    A float16 sum over N ranks can overflow, and a float16 gradient divided by N underflow. So it is divided by about the square
    root of the factor first and by the rest at the end: by p, the smallest power of two for which factor / p ≤ p, as far as
    it divides the factor evenly.

    Source: the rule of eager FSDP2.
    """
    if reduce == "sum":
        return Scaling("sum")
    if dtype != torch.float16:
        return Scaling("avg") if reduce == "avg" else Scaling("sum", after=float(reduce))
    factor = float(ranks) if reduce == "avg" else float(reduce)
    before = 1.0
    while factor % before == 0 and factor / before > before:
        before *= 2
    after = factor / before
    return Scaling("sum", before=None if before == 1.0 else before, after=None if after == 1.0 else after)


def collective_bytes(node: fx.Node) -> int:
    """Bytes that one rank contributes to a collective."""
    return sum(int(value.numel()) * int(value.element_size()) for value in contributions(node))


def contributions(node: fx.Node) -> list[torch.Tensor]:
    """The example values of what one rank contributes to a collective."""
    source = node.args[0]
    return [value_of(item) for item in (source if isinstance(source, list | tuple) else [source])]  # type: ignore[arg-type]


def describe(graph: fx.Graph) -> Iterator[str]:
    """One line for each collective: what, of which dtype and shape, in which group, for which parameters."""
    for node in starts(graph):
        comm = comm_of(node)
        assert comm is not None
        values = contributions(node)
        shapes = ", ".join(str(tuple(value.shape)) for value in values)
        op = f" {comm.op}" if comm.op else ""
        names = ", ".join(comm.params)
        yield f"{comm.kind}{op} {values[0].dtype} {shapes} over {comm.group} ({comm.size} ranks) for {names}"
