"""What all transports of one process over one process group share: channels, failure board, pending waits.

Looped schedules may build a transport for each stage of a rank, and ranks may hold different numbers of stages. Building is
collective, so it happens once per group: the first transport opens the link, the others join it, the last one to close
releases it. The table of links holds groups weakly, and so does a link: a destroyed group takes its link along, and a re-made
default group, which is another object, gets a fresh one.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ._board import FailureBoard, Note
from ._channels import Channel
from ._compat import end_wait, own_connection, timeout_of
from ._failure import Failure
from ._groups import ChannelGroup, open_gloo, open_registered, rounds_of
from ._meeting import agree_on_name
from ._op import Op
from .exceptions import P2PUsageError, PeerFailure

_WAKE = timedelta(milliseconds=1)

_links: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, Link]] = weakref.WeakKeyDictionary()
_links_lock = threading.Lock()


class Flight:
    """One message under way on a backend; mutable because it ends.

    A plain class with slots: two are made for every message.

    Attributes:
        op: which message.
        work: the backend's handle.
        tensor: what is being read or written.
        number: how many messages this rank had posted under the same op before: which of them this is, at both ends.
        done: whether it was waited for.
    """

    __slots__ = ("done", "number", "op", "tensor", "work")

    def __init__(self, op: Op, work: Any, tensor: torch.Tensor, number: int) -> None:
        self.op = op
        self.work = work
        self.tensor = tensor
        self.number = number
        self.done = False

    @property
    def form(self) -> str:
        return f"{self.tensor.dtype} of shape {tuple(self.tensor.shape)}"


class Link:
    """See the module. Use :func:`link_of`.

    Args:
        group: the pipeline's process group.
        device: where its tensors travel.
        timeout: how long every wait may take; None for the group's own.
        stall_after: seconds after which a wait is reported.
    """

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, timeout: timedelta | None, *, stall_after: float
    ) -> None:
        self._group = weakref.ref(group)
        self.rank = group.rank()
        self.size = group.size()
        self.device = device
        self.own_timeout = timeout
        self.timeout = timeout or timeout_of(group, device)
        self.gloo = backend_for(group, device) == "gloo"
        self.groups: dict[str, ChannelGroup] = {}
        self.open: dict[str, Channel] = {}  # those of other ranks too
        self.users = 0
        self.failure: Failure | None = None
        self.pending: dict[Any, None] = {}
        # Small values of the latest receive, let go of when this rank waits for the next. gloo's thread wakes whoever waits while
        # it still uses the receive itself; who lets go of it then must give way until that thread is done, which in the end takes
        # longer than the message did. For large values memory counts more than that: there the waiting thread takes a nap.
        self.received: list[Flight] = []
        self.counts: defaultdict[Op, itertools.count[int]] = defaultdict(itertools.count)  # messages posted under an op
        self._name = agree_on_name(group, device, self.timeout, gloo=self.gloo)
        self.board = FailureBoard(self._store(), self.rank, self.size, self, stall_after=stall_after)

    @property
    def group(self) -> dist.ProcessGroup:
        """The pipeline's process group.

        Raises:
            P2PUsageError: it was destroyed.
        """
        group = self._group()
        if group is None:
            raise P2PUsageError(
                "the process group of this transport was destroyed: close the transport and make a new one"
            )
        return group

    def missing(self, channels: Sequence[Channel]) -> list[Channel]:
        """Which of these are not open yet; the same on every rank, since all of them open the same.

        Raises:
            P2PUsageError: one of them is open between other ranks.
        """
        for channel in channels:
            if self.open.get(channel.name, channel) != channel:
                raise P2PUsageError(
                    f"channel {channel.name} of ranks {channel.ranks} is open already between ranks"
                    f" {self.open[channel.name].ranks}: give this transport a name of its own"
                )
        return [channel for channel in channels if channel.name not in self.open]

    def make(self, channels: Sequence[Channel]) -> list[ChannelGroup]:
        """This rank's groups, for :meth:`install`; every rank of the group makes them for the same channels.

        Raises:
            PeerFailure: a peer is absent, or a rank reported a failure meanwhile; every rank hears of the first one.
        """
        try:
            if self.gloo:
                return open_gloo(channels, rank=self.rank, store=self._store(), timeout=self.timeout)
            return open_registered(rounds_of(channels), parent=self.group, timeout=self.timeout)
        except Exception as error:
            culprit = Failure(error.reason, error.rank) if isinstance(error, PeerFailure) else Failure(str(error))
            self.failure = self.board.report(culprit)
            raise self.failure.error() from error

    def install(self, channels: Sequence[Channel], groups: Sequence[ChannelGroup]) -> None:
        """From now on these carry messages too."""
        self.groups |= {group.channel.name: group for group in groups}
        self.open |= {channel.name: channel for channel in channels}

    def failed(self, op: Op, error: Exception, waited: float) -> PeerFailure:
        """Turn a backend's error into the first cause that any rank knows, and let the others know."""
        failure = self.failure or self._look()
        if failure is None:
            seconds = self.timeout.total_seconds()
            if waited >= 0.95 * seconds:
                self.board.publish()
                rank, how = self.board.root_of(op.peer)
                failure = Failure(f"rank {self.rank} waited {waited:.1f} s for {op}; {how}", rank)
            else:
                words = str(error).partition(". This is typically")[0]
                failure = Failure(
                    f"it ended, or its connection to rank {self.rank} broke, during {op} ({words})", op.peer
                )
            failure = self.board.report(failure)
        self.failure = failure
        return failure.error()

    def abort(self, failure: Failure) -> None:
        """Report a failure; waits of this rank wake within a fraction of a second."""
        self.failure = self.board.report(failure)

    def wake(self, failure: Failure) -> None:
        """Make pending waits raise, from the board's thread, and let go of what was under way: nothing comes any more."""
        self.failure = failure
        if not self.gloo:
            for group in [self.group, *(made.group for made in self.groups.values())]:
                group.abort()
        else:
            for handle in list(self.pending):
                for flight in handle.flights:
                    if not flight.done:
                        with contextlib.suppress(RuntimeError):
                            flight.work.wait(_WAKE)  # runs out, which breaks the pair, which ends the other, long wait
                        end_wait(flight.work)  # where that does not: gloo forgets a message that it has begun to read
        self.pending.clear()

    def probe(self) -> Failure | None:
        """For the board: whether a peer that a receive waits for has ended.

        gloo forgets a message that it has begun to read: where its sender ends then, nobody wakes who waits for it. But on a
        broken connection nothing new can be posted.
        """
        for handle in list(self.pending) if self.gloo else ():
            for flight in handle.flights if handle.waiting_since is not None else ():
                if not flight.done and not flight.op.kind.is_send:
                    try:
                        handle.transport.probe(flight.op)
                    except RuntimeError as error:
                        return Failure(
                            f"it ended, or its connection to rank {self.rank} broke, during {flight.op} ({error})",
                            flight.op.peer,
                        )
                    break
        return None

    def notes(self, older_than: float) -> Sequence[Note]:
        """For the board: what this rank has not finished."""
        now = time.monotonic()
        notes = []
        for handle in list(self.pending):
            if now - handle.posted < older_than:
                continue
            for flight in handle.flights:
                if not flight.done:
                    op = flight.op
                    waiting = handle.waiting_since is not None
                    notes.append(
                        Note((*op.message, flight.number), str(op), op.peer, flight.form, now - handle.posted, waiting)
                    )
        return sorted(notes, key=lambda note: not note.waiting)

    def close(self) -> None:
        """Release groups and thread."""
        self.board.close()
        self.pending.clear()
        self.received.clear()
        for group in self.groups.values():
            group.close()
        self.groups.clear()

    def _store(self) -> dist.Store:
        """The link's own part of the group's store, over a connection that its user need not share."""
        return dist.PrefixStore(f"stepwell-p2p/{self._name}", own_connection(self.group.get_group_store()))

    def _look(self) -> Failure | None:
        try:
            return self.board.look()
        except RuntimeError:
            return self.board.failure


def link_of(
    group: dist.ProcessGroup, name: str, device: torch.device, timeout: timedelta | None, *, stall_after: float
) -> Link:
    """The link of that name over a group: opened by the first caller of a process, joined by later ones.

    Opening is collective over the group.
    """
    with _links_lock:
        links = _links.setdefault(group, {})
        link = links.get(name)
        if link is None:
            link = links[name] = Link(group, device, timeout, stall_after=stall_after)
        link.users += 1
        return link


def leave(link: Link, name: str) -> None:
    """Undo one :func:`link_of`; the last one closes the link."""
    with _links_lock:
        link.users -= 1
        if link.users:
            return
        for links in list(_links.values()):
            if links.get(name) is link:
                del links[name]
    link.close()


def backend_for(group: dist.ProcessGroup, device: torch.device) -> str:
    """The name of the backend that carries a device's tensors in a group."""
    config = dict(part.split(":", 1) for part in dist.get_backend_config(group).split(",") if ":" in part)
    return config.get(device.type, dist.get_backend(group))
