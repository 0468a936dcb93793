"""Making the communicators behind channels.

gloo: a ``ProcessGroupGloo`` of our own on the group's store. ``split_group`` refuses gloo, and ``new_group`` either wants every
process of the job to call it, also those of other pipelines, or numbers groups by how many each process already has, so that
ranks with unequal numbers of channels would wait for ever under different names. Ours leave no trace in torch's registry.

Other backends: one ``split_group`` of the parent for each round of disjoint channels where the backend can split and the default
group is bound to a device, else one ``new_group`` for each channel. Ranks that have no channel in a round make a group
of their own, so that all hold equally many.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from datetime import timedelta

import attrs
import torch.distributed as dist

from ._board import failure_in
from ._channels import Channel
from ._compat import gloo_groups
from .exceptions import PeerFailure, TransportError

_STILL_CONNECTING = timedelta(seconds=2)
_PAUSE, _LONGEST_PAUSE = 0.002, 0.02  # seconds between two looks for the members, at first and in the end


@attrs.frozen(eq=False)
class ChannelGroup:
    """One channel's communicator, as one of its members holds it.

    Attributes:
        channel: which channel.
        group: something with ``send`` and ``recv``; a registered ``ProcessGroup`` unless made of gloo.
        made_by: ``"gloo"``, ``"split_group"`` or ``"new_group"``.
        store: of a gloo group: where each member says that it is connected.
    """

    channel: Channel
    group: dist.ProcessGroup | dist.ProcessGroupGloo
    made_by: str
    store: dist.Store | None = None

    def peer(self, rank: int) -> int:
        """The number, within this group, of a rank of the pipeline."""
        return self.channel.ranks.index(rank)

    def close(self) -> None:
        """Release sockets and threads.

        A member that is connected may be done with all its work, or have none, before another has heard that they are: sockets
        that close then would look to that one like a peer that died.
        """
        if self.store is not None:
            with contextlib.suppress(RuntimeError):  # one that failed never comes, and the store may be gone
                self.store.wait([f"up/{rank}" for rank in self.channel.ranks], _STILL_CONNECTING)
        self.drop()

    def drop(self) -> None:
        """Release sockets and threads now, after a failure."""
        if isinstance(self.group, dist.ProcessGroup):
            if dist.is_initialized():
                dist.destroy_process_group(self.group)
        else:
            self.group.shutdown()


def open_gloo(channels: Sequence[Channel], *, rank: int, store: dist.Store, timeout: timedelta) -> list[ChannelGroup]:
    """This rank's gloo groups, connected one after the other in the order given, which is the same on all ranks.

    Args:
        channels: the channels of the pipeline.
        rank: this rank's number in the pipeline group.
        store: shared by the ranks of the pipeline, fresh for this use; where they report failures.
        timeout: how long to wait for a peer, now and in every later operation.

    Raises:
        PeerFailure: a rank reported a failure meanwhile, or a peer did not come in time.
        TransportError: a peer left while it connected.
    """
    make = gloo_groups(timeout)
    groups: list[ChannelGroup] = []
    try:
        for channel in channels:
            if rank in channel.ranks:
                inner = dist.PrefixStore(f"channel/{channel.name}", store)
                _wait_for_members(channel, rank, store, inner, timeout)
                group = make(inner, channel.ranks.index(rank), len(channel.ranks))
                inner.set(f"up/{rank}", "")
                groups.append(ChannelGroup(channel, group, "gloo", inner))
    except (RuntimeError, TransportError) as error:
        for made in groups:
            made.drop()
        if isinstance(error, TransportError):
            raise
        raise TransportError(f"rank {rank} could not open its channels: a peer left meanwhile ({error})") from error
    return groups


def _wait_for_members(channel: Channel, rank: int, board: dist.Store, store: dist.Store, timeout: timedelta) -> None:
    """Until every member is about to make its group: gloo, which waits for them too, would not hear of a failure."""
    store.set(f"here/{rank}", "")
    here = [f"here/{other}" for other in channel.ranks]
    deadline, pause = time.monotonic() + timeout.total_seconds(), _PAUSE
    while not store.check(here):
        failure = failure_in(board)
        if failure is not None:
            raise failure.error()
        if time.monotonic() > deadline:
            absent = [other for other in channel.ranks if not store.check([f"here/{other}"])]
            raise PeerFailure(
                f"rank {rank} could not open channel {channel.name}: rank {', '.join(map(str, absent))} did not connect within"
                f" {timeout.total_seconds():g} s; every rank of the group opens the same channels",
                rank=absent[0] if absent else None,
            )
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)


def open_registered(
    rounds: Sequence[Sequence[Channel]], *, parent: dist.ProcessGroup, timeout: timedelta
) -> list[ChannelGroup]:
    """This rank's groups on a backend other than gloo; every rank of ``parent`` calls it with the same rounds.

    Args:
        rounds: channels whose members are disjoint within a round.
        parent: the pipeline group.
        timeout: of every later operation.
    """
    rank, size = parent.rank(), parent.size()
    groups: list[ChannelGroup] = []
    for channels in rounds:
        taken = {member for channel in channels for member in channel.ranks}
        parts = [list(channel.ranks) for channel in channels] + [[other] for other in range(size) if other not in taken]
        group, made_by = _split(parent, parts, timeout), "split_group"
        if group is None:
            group, made_by = _new(parent, next(part for part in parts if rank in part), timeout), "new_group"
        mine = [channel for channel in channels if rank in channel.ranks]
        if mine:
            groups.append(ChannelGroup(mine[0], group, made_by))
    return groups


def rounds_of(channels: Sequence[Channel]) -> list[list[Channel]]:
    """The same channels in the same order, in rounds whose members are disjoint."""
    rounds: list[list[Channel]] = []
    for channel in channels:
        for members in rounds:
            if not any(set(channel.ranks) & set(other.ranks) for other in members):
                members.append(channel)
                break
        else:
            rounds.append([channel])
    return rounds


def _split(parent: dist.ProcessGroup, parts: list[list[int]], timeout: timedelta) -> dist.ProcessGroup | None:
    """None where the backend cannot, which all ranks find alike and before any of them has communicated."""
    world = dist.group.WORLD
    if world is None or world.bound_device_id is None:  # torch: "not safe to split any process groups"
        return None
    try:
        return dist.split_group(parent, parts, timeout=timeout, group_desc="stepwell-p2p channel")
    except RuntimeError as error:
        if "does not support splitting" in str(error) or "No backend type" in str(error):  # none for the accelerator
            return None
        raise


def _new(parent: dist.ProcessGroup, part: list[int], timeout: timedelta) -> dist.ProcessGroup:
    members = dist.get_process_group_ranks(parent)
    ranks = sorted(members[rank] for rank in part)
    group: dist.ProcessGroup = dist.new_group(
        ranks, timeout=timeout, use_local_synchronization=True, group_desc="stepwell-p2p channel"
    )
    return group
