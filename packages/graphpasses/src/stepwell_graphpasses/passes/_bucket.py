"""Buckets: several small collectives become one.

A bucket of gathers packs the shards of its parameters into one row; every rank's row arrives, and a parameter is some columns::

    shards  a b c  → pack →  [a b c]  → gather →  rank 0 [a b c]   → columns of a, of b, of c
                                                  rank 1 [a b c]

Over gloo, which copies what it gathers in and out of a buffer of its own, members travel in one message without being packed
first: one collective that gives each parameter in memory of its own.

A bucket of reduce-scatters packs gradients the same way, and each rank gets its row of the sum. One of all-reduces is summed
where it is packed, and gradients are views of it. The bits of each member are those that it would have alone: nothing is cast, so
members have one dtype, and they are of one kind, phase and group.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence

import attrs
import torch
from torch import fx

from .. import _compat as compat
from .._collectives import Comm, Kind, Writer, collective_bytes, comm_of, starts, wait_of
from .._config import PassConfig
from .._graph import JointGraph, Phase, phase_of, positions, value_of
from .._order import rearrange
from .._pass import PassContext, PassContract
from ..exceptions import ConfigError
from ._torch_backend import Backend, bucket_with_torch, check_backend

aten = torch.ops.aten


@attrs.frozen
class Member:
    """What the plan of buckets needs to know about one collective."""

    index: int
    params: tuple[str, ...]
    key: tuple[str, ...]  # kind, phase, group, dtype, operator, whether it is gathered again
    unit: str
    bytes: int


@attrs.frozen
class Bucket:
    """Collectives that become one, and why no more of them."""

    members: tuple[Member, ...]
    reason: str


class BucketPass:
    """Merges gathers, reduce-scatters and all-reduces; the graph is sorted once, after the last bucket.

    Args:
        pack: whether members of gathers are packed into one row; None: unless the backend copies them anyway (on CPU).
        backend: who chooses and merges: ``stepwell``, or ``torch``, whose own bucketing only merges neighbours, and always packs.

    Raises:
        ConfigError: the installed torch has no such bucketing, or ``pack`` is given together with it.
    """

    name = "bucket"
    contract = PassContract(
        requires=frozenset({"collectives"}),
        provides=frozenset({"bucketed"}),
        conflicts=frozenset({"bucketed", "split"}),
    )

    def __init__(self, *, pack: bool | None = None, backend: Backend = "stepwell") -> None:
        self.pack = pack
        self.backend = backend
        self._torch = check_backend(backend, compat.torch_bucketing)
        if self._torch is not None and pack is not None:
            raise ConfigError(
                f"pack={pack} with backend='torch', which always packs; leave pack out, or use the backend 'stepwell'",
                field="pack",
                value=pack,
            )

    def run(self, joint: JointGraph, context: PassContext) -> None:
        """Rewrite the graph."""
        if self._torch is not None:
            self._run_torch(joint, context.config)
            return
        on_cpu = context.topology is not None and context.topology.mesh.device_type == "cpu"
        pack = not on_cpu if self.pack is None else self.pack
        nodes = starts(joint.graph)
        members = [_member(joint, index, node) for index, node in enumerate(nodes)]
        buckets = plan_buckets(members, context.config)
        position = positions(joint.graph)
        for number, bucket in enumerate(buckets):
            kind, phase = bucket.members[0].key[:2]
            names = ", ".join(name for member in bucket.members for name in member.params)
            joint.notes.append(
                (f"bucket {number}", f"{kind} in {phase} of {names}; it ends there because {bucket.reason}")
            )
            if len(bucket.members) > 1:
                _merge(joint, [nodes[member.index] for member in bucket.members], position, pack=pack)
        rearrange(joint.graph)

    def _run_torch(self, joint: JointGraph, config: PassConfig) -> None:
        if config.bucket_by == "none":
            return
        keys = {}
        for index, node in enumerate(starts(joint.graph)):
            member = _member(joint, index, node)
            keys[node] = (*member.key, member.unit) if config.bucket_by == "module" else member.key
        merged = bucket_with_torch(
            joint, keys, config.bucket_mb * 2**20, self._torch, unit_of=functools.partial(bucket_unit, joint)
        )
        for number, (node, params) in enumerate(merged):
            what = f"{_mark(node).kind} in {phase_of(node)} of {', '.join(params)}"
            joint.notes.append((f"bucket {number}", f"{what}; chosen and merged by torch"))


def plan_buckets(members: Sequence[Member], config: PassConfig) -> list[Bucket]:
    """Which collectives go together: in graph order, by module or by bytes, never unlike ones."""
    limit = config.bucket_mb * 2**20
    groups: dict[tuple[str, ...], list[Member]] = {}
    for member in members:
        key = (*member.key, member.unit) if config.bucket_by == "module" else member.key
        groups.setdefault(key, []).append(member)
    buckets: list[tuple[int, Bucket]] = []
    for group in groups.values():
        current: list[Member] = []
        size = 0
        for member in group:
            if current and (config.bucket_by == "none" or size + member.bytes > limit):
                reason = (
                    "bucket_by is 'none'"
                    if config.bucket_by == "none"
                    else f"{', '.join(member.params)} would make it {size + member.bytes} bytes, more than {limit:.0f}"
                )
                buckets.append((current[0].index, Bucket(tuple(current), reason)))
                current, size = [], 0
            current.append(member)
            size += member.bytes
        buckets.append((current[0].index, Bucket(tuple(current), _why_last(current[-1], members, config))))
    return [bucket for _, bucket in sorted(buckets, key=lambda item: item[0])]


def _why_last(member: Member, members: Sequence[Member], config: PassConfig) -> str:
    if config.bucket_by == "module":
        return f"module {member.unit!r} has no more of this kind, phase, group, dtype and reshard_after_forward"
    following = [other for other in members if other.index > member.index and other.key[0] == member.key[0]]
    if not following:
        return f"it was the last {member.key[0]}"
    names = ("kind", "phase", "group", "dtype", "operator", "reshard_after_forward")
    differs = [n for n, a, b in zip(names, member.key, following[0].key, strict=True) if a != b]
    return f"{', '.join(following[0].params)} has another {' and '.join(differs)}"


def _member(joint: JointGraph, index: int, node: fx.Node) -> Member:
    comm = comm_of(node)
    assert comm is not None
    value = value_of(node.args[0])  # type: ignore[arg-type]
    stays = str(comm.kind == "gather" and joint.kept.issuperset(comm.params))
    return Member(
        index=index,
        params=comm.params,
        key=(comm.kind, phase_of(node), comm.group, str(value.dtype), comm.op or "", stays),
        unit=bucket_unit(joint, comm.params[0]),
        bytes=collective_bytes(node),
    )


def bucket_unit(joint: JointGraph, parameter: str) -> str:
    """The module whose parameters travel together: that of the plan, or below it where that is a mere container."""
    unit = joint.units.get(parameter, parameter)
    while unit in joint.containers and parameter.startswith(unit + "."):
        unit += "." + parameter[len(unit) + 1 :].split(".")[0]
    return unit


def _merge(
    joint: JointGraph,
    nodes: Sequence[fx.Node],
    position: dict[fx.Node, int],
    *,
    pack: bool,
) -> None:
    """Replace collectives of one kind by one: gathers at the first of them, reductions at the last."""
    graph = joint.graph
    comms = [_mark(node) for node in nodes]
    comm = comms[0]
    params = tuple(name for item in comms for name in item.params)
    waits = [wait_of(node) for node in nodes]
    sources: list[fx.Node] = [node.args[0] for node in nodes]  # type: ignore[misc]
    place = nodes[0] if comm.kind == "gather" else max(nodes, key=position.__getitem__)
    if comm.kind == "gather":
        for source in sources:  # a cast of a stored shard can be made at any time
            if (mark := comm_of(source)) is not None and mark.kind == "cast":
                place.prepend(source)
    phase: Phase = phase_of(place)
    writer = Writer(joint.mode, graph, like=place, params=params, phase=phase, fqn=bucket_unit(joint, params[0]))
    with graph.inserting_before(place):
        if comm.kind == "gather" and pack:
            results = _gather(writer, sources, comms)
        elif comm.kind == "gather":
            results = writer.gather_apart(sources, comm.group, comm.size)
        elif comm.kind == "all_reduce":
            results = _all_reduce(writer, sources, comms)
        else:
            results = _reduce_scatter(writer, sources, comms)
    for wait, result in zip(waits, results, strict=True):
        wait.replace_all_uses_with(result)
        graph.erase_node(wait)
    for node in nodes:
        graph.erase_node(node)


def _gather(writer: Writer, sources: Sequence[fx.Node], comms: Sequence[Comm]) -> list[fx.Node]:
    group, size = comms[0].group, comms[0].size
    lengths = [value_of(source).numel() for source in sources]
    flat = [_flat(writer, source, "pack") for source in sources]
    packed = writer.call("pack", aten.cat.default, flat, 0)
    rows = writer.call("unpack", aten.view.default, writer.gather(packed, group, size), [size, sum(lengths)])
    results = []
    columns = _split(writer, rows, lengths, 1)
    for source, comm, part in zip(sources, comms, columns, strict=True):
        dense = writer.call(
            "unpack", aten.clone.default, part, kwargs={"memory_format": torch.contiguous_format}, params=comm.params
        )
        shape = list(value_of(source).shape)
        results.append(
            writer.call("unpack", aten.view.default, dense, [size * shape[0], *shape[1:]], params=comm.params)
        )
    return results


def _reduce_scatter(writer: Writer, sources: Sequence[fx.Node], comms: Sequence[Comm]) -> list[fx.Node]:
    comm = comms[0]
    rows = []
    for source in sources:
        dense = _dense(writer, source)
        rows.append(writer.call("pack", aten.view.default, dense, [comm.size, -1]))
    packed = _flat(writer, writer.call("pack", aten.cat.default, rows, 1), "pack")
    assert comm.op is not None
    whole = writer.reduce_scatter(packed, comm.op, comm.group, comm.size)
    shapes = [[value_of(source).shape[0] // comm.size, *value_of(source).shape[1:]] for source in sources]
    return _parts(writer, whole, shapes, comms)


def _all_reduce(writer: Writer, sources: Sequence[fx.Node], comms: Sequence[Comm]) -> list[fx.Node]:
    comm = comms[0]
    packed = writer.call("pack", aten.cat.default, [_flat(writer, _dense(writer, s), "pack") for s in sources], 0)
    assert comm.op is not None
    whole = writer.all_reduce(packed, comm.op, comm.group, comm.size, in_place=True)
    return _parts(writer, whole, [list(value_of(source).shape) for source in sources], comms)


def _parts(writer: Writer, whole: fx.Node, shapes: Sequence[list[int]], comms: Sequence[Comm]) -> list[fx.Node]:
    parts = _split(writer, whole, [torch.Size(shape).numel() for shape in shapes], 0)
    return [
        writer.call("unpack", aten.view.default, part, shape, params=comm.params)
        for part, shape, comm in zip(parts, shapes, comms, strict=True)
    ]


def _split(writer: Writer, node: fx.Node, lengths: Sequence[int], dim: int) -> list[fx.Node]:
    """Consecutive parts of a value, one for each parameter of the writer."""
    parts = writer.call("unpack", aten.split_with_sizes.default, node, list(lengths), dim)
    return [
        writer.call("unpack", operator.getitem, parts, index, params=(name,))
        for index, name in enumerate(writer.params)
    ]


def _dense(writer: Writer, node: fx.Node) -> fx.Node:
    if value_of(node).is_contiguous():
        return node
    return writer.call("pack", aten.clone.default, node, kwargs={"memory_format": torch.contiguous_format})


def _flat(writer: Writer, node: fx.Node, kind: Kind) -> fx.Node:
    return writer.call(kind, aten.view.default, node, [-1])


def _mark(node: fx.Node) -> Comm:
    comm = comm_of(node)
    assert comm is not None
    return comm
