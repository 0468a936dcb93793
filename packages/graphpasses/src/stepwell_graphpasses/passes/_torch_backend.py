"""torch's own bucketing in place of ours: its planner chooses which neighbours go together, its functions write the merged ones.

What torch writes has none of our marks, so they are put back: the members of a bucket and the order of its results say which
parameters each new node serves. And its gathers write into a row of this rank's own, so that each rank would have another graph;
they become gathers of packed shards, which are the same bytes and the same text everywhere::

    empty → slice(rank) → copy_(cat(shards)) → gather into empty        becomes        cat(shards) [→ cast] → gather
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Literal

import torch
from torch import fx

from .. import _compat as compat
from .._collectives import Comm, Writer, comm_of, starts, wait_of
from .._graph import JointGraph, phase_of, value_of
from .._order import rearrange
from ..exceptions import ConfigError, GraphError

Backend = Literal["stepwell", "torch"]

MERGES = {
    "gather": "merge_all_gather_bucket",
    "reduce_scatter": "merge_reduce_scatter_bucket",
    "all_reduce": "merge_all_reduce_bucket",
}
MERGEABLE = (compat.ALL_GATHER, compat.REDUCE_SCATTER, compat.ALL_REDUCE)


def check_backend(backend: str, load: Any) -> Any:
    """What ``load`` gives for torch's back end, None for ours.

    Raises:
        ConfigError: there is no such back end, or the installed torch has not what it needs.
    """
    if backend == "stepwell":
        return None
    if backend != "torch":
        raise ConfigError(
            f"a pass's backend is 'stepwell' or 'torch'; got {backend!r}", field="pass_backend", value=backend
        )
    try:
        return load()
    except ImportError as error:
        raise ConfigError(
            f"the 'torch' backend needs private functions of torch that torch {torch.__version__} has not: {error}."
            " It is known to work with torch 2.13; install that, or use the backend 'stepwell'",
            field="pass_backend",
            value=backend,
        ) from error


def bucket_with_torch(
    joint: JointGraph,
    keys: Mapping[fx.Node, Hashable],
    limit: float,
    functions: ModuleType,
    *,
    unit_of: Callable[[str], str],
) -> list[tuple[fx.Node, tuple[str, ...]]]:
    """Let torch merge collectives of equal key; gives each merged collective with its parameters.

    Args:
        joint: rewritten.
        keys: what may go together, for each collective; the rest stays alone.
        limit: most bytes that one rank contributes to a bucket.
        functions: torch's.
        unit_of: the module that a parameter's bucket belongs to.
    """
    merged = []
    for kind in MERGES:
        nodes = [node for node in starts(joint.graph, kind) if node in keys and node.target in MERGEABLE]
        for size in dict.fromkeys(_mark(node).size for node in nodes):
            chosen = {node: keys[node] for node in nodes if _mark(node).size == size}
            # torch counts what a gather brings, we what each rank gives.
            cap = limit * (size if kind == "gather" else 1) / 2**20
            plan = functions.greedy_bucket_collective_by_mb(
                joint, lambda _, cap=cap: cap, chosen.__contains__, chosen.__getitem__
            )
            merged += [_merge(joint, bucket, getattr(functions, MERGES[kind]), unit_of) for bucket in plan]
        rearrange(joint.graph)
    return merged


def _merge(
    joint: JointGraph, nodes: Sequence[fx.Node], merge: Any, unit_of: Callable[[str], str]
) -> tuple[fx.Node, tuple[str, ...]]:
    comms = [_mark(node) for node in nodes]
    waits = [wait_of(node) for node in nodes]
    phase = phase_of(nodes[0])
    with _examples_apart(joint, nodes):
        made, results = merge(joint.graph, list(nodes), "default")
    begins = [node for node in made if compat.is_functional_collective(node.target)]
    if len(begins) != 1 or any(wait not in results for wait in waits):
        raise GraphError(
            f"torch {torch.__version__} merges collectives in another way than 2.13 does; use the backend 'stepwell'"
        )
    params = tuple(name for comm in comms for name in comm.params)
    like, place = comms[0], made.index(begins[0])
    served = {results[wait]: comm.params for wait, comm in zip(waits, comms, strict=True)}
    for node in reversed(made[place + 1 :]):  # what only unwraps serves those whose results come from it
        for source in node.all_input_nodes:
            served[source] = served[node] + served.get(source, ())
    for index, node in enumerate(made):
        if index == place:
            comm = Comm(like.kind, params, like.group, like.size, like.op)
        elif node.target is compat.WAIT:
            comm = Comm("wait", params, like.group, like.size, waits_for=like.kind)
        else:
            comm = Comm("pack", params) if index < place else Comm("unpack", served[node])
        node.meta = {"val": value_of(node), "fqn": unit_of(params[0]), "phase": phase, "comm": comm}
    return _alike_on_all_ranks(joint, begins[0]), params


@contextmanager
def _examples_apart(joint: JointGraph, nodes: Sequence[fx.Node]) -> Iterator[None]:
    """Within, no two sources have the same example value: torch traces with them, and would take equal ones for one source."""
    sources: dict[fx.Node, Any] = {}
    for node in nodes:
        source: Any = node.args[0]
        sources |= {one: value_of(one) for one in (source, *source.all_input_nodes)}  # torch may look through a cast
    with joint.mode:
        for source, value in sources.items():
            if isinstance(value, torch.Tensor):
                source.meta["val"] = torch.empty_strided(
                    value.shape, value.stride(), dtype=value.dtype, device=value.device
                )
    yield
    for source, value in sources.items():
        source.meta["val"] = value


def _alike_on_all_ranks(joint: JointGraph, begin: fx.Node) -> fx.Node:
    """A gather of what is packed, for torch's gather into a row of this rank's own; others stay as they are."""
    if begin.target is not compat.ALL_GATHER_OUT:
        return begin
    filled: Any = begin.args[0]
    if filled.target is not torch.ops.aten.copy_.default:
        raise GraphError(
            f"torch {torch.__version__} packs a gather in another way than 2.13 does; use the backend 'stepwell'"
        )
    row, packed = filled.args
    comm = _mark(begin)
    writer = Writer(
        joint.mode, joint.graph, like=begin, params=comm.params, phase=phase_of(begin), fqn=begin.meta["fqn"]
    )
    with joint.graph.inserting_before(begin):
        packed = writer.cast(packed, value_of(begin).dtype)
        node = writer.call("gather", compat.ALL_GATHER, packed, comm.size, comm.group, group=comm.group, size=comm.size)
    begin.replace_all_uses_with(node)
    for stale in (begin, filled, row, row.args[0]):
        joint.graph.erase_node(stale)
    return node


def _mark(node: fx.Node) -> Comm:
    comm = comm_of(node)
    assert comm is not None
    return comm
