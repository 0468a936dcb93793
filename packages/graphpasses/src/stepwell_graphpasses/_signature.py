"""What ranks must have in common: their collectives, in order, with everything that decides who meets whom with what.

Two reductions of equal shape that are swapped on one rank, or a sum on one and a mean on another, give wrong numbers and
no error. So a signature holds, for each collective, not only operator, dtype and shape, but the members of the group, the
parameters, and a fingerprint of the computation that its data comes from.
"""

from __future__ import annotations

import ctypes
import hashlib
import operator
import pickle
import types
from collections.abc import Sequence
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import fx

from stepwell_mesh import DataParallelTopology

from . import _compat as compat
from ._collectives import comm_of, contributions
from ._config import PassConfig
from ._graph import JointGraph, OpOverload
from .exceptions import PeerMismatchError


@attrs.frozen
class Entry:
    """One collective as its peers must see it."""

    op: str
    dtype: str
    shape: str
    group: str = attrs.field(eq=False)  # torch's own names differ from rank to rank
    members: tuple[int, ...]
    params: tuple[str, ...]
    fingerprint: str

    def __str__(self) -> str:
        who = f" for {', '.join(self.params)}" if self.params else ""
        where = f"over ranks {list(self.members)}" if self.members else "over another group"
        return f"{self.op} of {self.dtype} {self.shape} {where}{who}"


def signature(joint: JointGraph) -> tuple[Entry, ...]:
    """The collectives of a graph in order."""
    prints: dict[fx.Node, bytes] = {}
    entries = []
    for node in joint.graph.nodes:
        comm = comm_of(node)
        prints[node] = _fingerprint(node, prints, exact=comm is not None)
        if node.op != "call_function" or not compat.is_functional_collective(node.target):
            continue
        sources = contributions(node)
        group = group_of(node) or ""
        words = [arg for arg in node.args if isinstance(arg, str) and arg != group]
        own = comm is not None
        shapes = [str(tuple(source.shape)) if own else "?" for source in sources]
        entries.append(
            Entry(
                op=" ".join([str(node.target), *words]),
                dtype=str(sources[0].dtype),
                shape=", ".join(shapes),
                group=group,
                members=group_members(group),
                params=comm.params if comm is not None else (),
                fingerprint=prints[node].hex()[:16],
            )
        )
    return tuple(entries)


def group_members(name: str) -> tuple[int, ...]:
    """Global ranks of a registered group; empty where it is not registered in this process."""
    try:
        return tuple(dist.get_process_group_ranks(compat.resolve_group(name)))
    except (RuntimeError, ValueError, KeyError):
        return ()


def group_of(node: fx.Node) -> str | None:
    """The group's name in a collective: its last argument that is a string."""
    if node.op != "call_function" or not compat.is_functional_collective(node.target):
        return None
    names = [arg for arg in (*node.args, *node.kwargs.values()) if isinstance(arg, str)]
    return names[-1] if names else None


def _fingerprint(node: fx.Node, prints: dict[fx.Node, bytes], *, exact: bool) -> bytes:
    """Of the operators behind a value. Sizes are left out of the model's own nodes: ranks may have batches of other sizes."""
    digest = hashlib.sha1(usedforsecurity=False)
    if node.op in ("placeholder", "get_attr"):
        digest.update(str(node.meta.get("input", node.target)).encode())
        return digest.digest()
    digest.update(_name(node.target).encode())
    counts, group = _counts(node), group_of(node)

    def visit(value: Any, *, size: bool) -> None:
        if isinstance(value, fx.Node):
            digest.update(prints[value])
        elif isinstance(value, list | tuple):
            digest.update(b"[")
            for item in value:
                visit(item, size=size)
        elif isinstance(value, int | float | slice) and not isinstance(value, bool):
            digest.update(b"," if size else f"{value},".encode())
        elif value != group and not (
            isinstance(value, str) and group_members(value)
        ):  # a group has another name elsewhere
            digest.update(f"{_alike(value)},".encode())

    for position, value in enumerate(node.args):
        visit(value, size=not exact and position not in counts)
    for name, value in node.kwargs.items():
        digest.update(name.encode())
        visit(value, size=not exact and name not in counts)
    return digest.digest()


def _name(target: Any) -> str:
    """An operator's name without an address, which a function of Python's has in every process another."""
    return f"{target.__module__}.{target.__qualname__}" if isinstance(target, types.FunctionType) else str(target)


def _alike(value: Any) -> Any:
    """What is the same of a value on all ranks: each has a device, and addresses, of its own."""
    if isinstance(value, torch.device):
        return value.type
    known = str | bool | None | complex | torch.dtype | torch.layout | torch.memory_format
    return value if isinstance(value, known) else type(value).__name__


def _counts(node: fx.Node) -> set[int | str]:
    """Arguments that count dims or results, by place and name: they say what an operator does, and no batch changes them."""
    if node.target is operator.getitem:
        return {1}
    if not isinstance(node.target, OpOverload):
        return set()
    found: set[int | str] = set()
    for position, argument in enumerate(node.target._schema.arguments):
        if argument.name in ("dim", "dims", "dim0", "dim1"):
            found |= {position, argument.name}
    return found


def first_difference(ours: Sequence[Entry], theirs: Sequence[Entry]) -> str | None:
    """Where two signatures differ first, in words; None where they agree."""
    for index, (mine, other) in enumerate(zip(ours, theirs, strict=False)):
        if mine != other:
            if str(mine) == str(other):
                return f"collective {index}: both {mine}, but on data that is computed otherwise"
            return f"collective {index}: {mine}, against {other}"
    if len(ours) != len(theirs):
        longer = ours if len(ours) > len(theirs) else theirs
        return f"{len(ours)} collectives against {len(theirs)}; the first that is over: {longer[min(len(ours), len(theirs))]}"
    return None


def compare(signatures: Sequence[tuple[int, Sequence[Entry]]]) -> None:
    """Check that all ranks of one group have the same collectives over that group.

    Args:
        signatures: ``(rank, signature)`` of each member.

    Raises:
        PeerMismatchError: they have not; says which rank differs where.
    """
    first_rank, first = signatures[0]
    wrong = []
    for rank, other in signatures[1:]:
        if (difference := first_difference(first, other)) is not None:
            wrong.append((rank, difference))
    if wrong:
        lines = "\n  ".join(f"rank {first_rank} against rank {rank}: {difference}" for rank, difference in wrong)
        raise PeerMismatchError(
            f"ranks would not run the same collectives in the same order:\n  {lines}\nGive every rank the same model, train"
            " function, configuration, plan and passes",
            ranks=[rank for rank, _ in wrong],
        )


@attrs.frozen
class Vote:
    """What one rank tells its peers before a compile takes effect, or while passes decide."""

    rank: int
    error: str | None
    signature: tuple[Entry, ...] = ()
    numbers: tuple[float, ...] = ()
    config: PassConfig | None = None


def agree(
    topology: DataParallelTopology | None,
    error: Exception | None,
    entries: tuple[Entry, ...],
    *,
    failed: str = "could not compile, so no rank does",
    config: PassConfig | None = None,
) -> None:
    """Let all data-parallel ranks decide together: all go on, or all raise.

    Args:
        topology: the axes; with None there is nobody to ask.
        error: why this rank cannot go on.
        entries: its signature.
        failed: what a rank with an error has done, for its peers.
        config: its configuration. It decides also what later graphs, such as those of accumulation, will communicate.

    Raises:
        PeerMismatchError: another rank failed, has another configuration, or would run other collectives.
    """
    if _is_joint(error):
        raise error  # type: ignore[misc]
    if topology is not None:
        why = None if error is None else f"{type(error).__name__}: {error}"
        votes = [Vote(dist.get_rank(), why, entries, config=config)]
        for axis in topology.axis_names:
            gathered, members = _exchange(topology, axis, votes)
            mine = {vote.rank: vote for part in gathered for vote in part if vote.rank in members}
            votes = [vote for part in gathered for vote in part]
            if error is None and any(vote.numbers for vote in votes):
                error = PeerMismatchError(
                    "some ranks agree on costs while others are done: give every rank the same passes",
                    ranks=[vote.rank for vote in votes if vote.numbers],
                )
                votes.append(Vote(dist.get_rank(), str(error)))
            if error is None and all(vote.error is None for vote in votes):
                own = [mine[rank] for rank in members if rank in mine]
                error = _difference(own, members) or _other_config(own)
                if error is not None:
                    votes.append(Vote(dist.get_rank(), str(error)))
        error = error or _failure(votes, failed)
    if error is not None:
        raise error


def agree_on_numbers(topology: DataParallelTopology | None, numbers: Sequence[float]) -> list[float]:
    """For each number the largest that any data-parallel rank named.

    Collective, and in step with :func:`agree`: a rank that has failed before says so there, and all the others raise here.

    Raises:
        PeerMismatchError: another rank failed, or has another number of numbers.
    """
    if topology is None:
        return list(numbers)
    votes = [Vote(dist.get_rank(), None, numbers=tuple(numbers))]
    for axis in topology.axis_names:
        votes = [vote for part in _exchange(topology, axis, votes)[0] for vote in part]
    if (error := _failure(votes, "could not compile, so no rank does")) is not None:
        raise error
    if strange := sorted({vote.rank for vote in votes if len(vote.numbers) != len(numbers)}):
        raise PeerMismatchError(
            f"rank {dist.get_rank()} has {len(numbers)} costs to agree on, and ranks {strange} have not as many: their graphs"
            " differ, or not all of them use a cost model",
            ranks=strange,
        )
    return [max(column) for column in zip(*(vote.numbers for vote in votes), strict=True)]


def _is_joint(error: BaseException | None) -> bool:
    """Whether an error comes from an exchange in which all ranks learnt of it: then nobody waits for this rank's vote."""
    while error is not None:
        if isinstance(error, PeerMismatchError):
            return True
        error = error.__cause__
    return False


def _failure(votes: Sequence[Vote], failed: str) -> PeerMismatchError | None:
    lost = [vote for vote in votes if vote.error is not None]
    if not lost:
        return None
    return PeerMismatchError(f"rank {lost[0].rank} {failed}: {lost[0].error}", ranks=[vote.rank for vote in lost])


def _exchange(
    topology: DataParallelTopology, axis: str, votes: Sequence[Vote]
) -> tuple[list[list[Vote]], tuple[int, ...]]:
    """Every rank's votes along one axis, and who these ranks are."""
    group = topology.mesh.get_group(axis)
    return _gather(votes, group, torch.device(topology.mesh.device_type)), tuple(dist.get_process_group_ranks(group))


def _gather(votes: Sequence[Vote], group: dist.ProcessGroup, device: torch.device) -> list[list[Vote]]:
    """Every rank's votes. torch's all_gather_object would do, if it did not need NumPy."""
    mine = torch.frombuffer(bytearray(pickle.dumps(list(votes))), dtype=torch.uint8).to(device)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, torch.tensor([len(mine)], device=device), group=group)
    longest = max(int(size) for size in sizes)
    rows = [torch.empty(longest, dtype=torch.uint8, device=device) for _ in sizes]
    dist.all_gather(rows, torch.nn.functional.pad(mine, (0, longest - len(mine))), group=group)
    found = []
    for row, size in zip(rows, sizes, strict=True):
        local = row.cpu()
        found.append(pickle.loads(ctypes.string_at(local.data_ptr(), int(size))))
    return found


def _difference(votes: Sequence[Vote], members: tuple[int, ...]) -> PeerMismatchError | None:
    """Ranks of one group have all collectives in the same order: those over other groups too, whose ranks are others.

    Backends may keep groups apart, or not: two groups whose collectives start in another order on another rank can wait for each
    other.
    """
    shared = [
        (vote.rank, [e if e.members == members else attrs.evolve(e, members=()) for e in vote.signature])
        for vote in votes
    ]
    try:
        compare(shared)
    except PeerMismatchError as error:
        return error
    return None


def _other_config(votes: Sequence[Vote]) -> PeerMismatchError | None:
    """Ranks whose configuration is not that of the first one of their group."""
    first = votes[0]
    others = [vote for vote in votes if vote.config != first.config]
    if not others:
        return None
    field = next(
        f.name for f in attrs.fields(PassConfig) if getattr(others[0].config, f.name) != getattr(first.config, f.name)
    )
    ours, theirs = (getattr(vote.config, field) for vote in (first, others[0]))
    return PeerMismatchError(
        f"rank {first.rank} has {field}={ours!r}, and rank {others[0].rank} has {field}={theirs!r}: give every rank the same"
        " configuration",
        ranks=[vote.rank for vote in others],
    )
