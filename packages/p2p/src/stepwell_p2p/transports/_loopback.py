"""Ranks as threads of one process: no launcher, no process group, no network.

Besides running pipelines in one process, the fabric *imitates*: it can be told to deliver first-in-first-out per channel, to
complete a send only when its receive is there, or both, so that what ``prove_order`` says of an order can be checked against what
really blocks. Where every rank of a fabric waits and nothing is on its way, it says so at once instead of hanging.

Who may write when: a sent tensor is copied while it is posted, so both ends may write theirs after ``wait``. A tensor sent with
``owned=True`` that is the only user of its memory is handed over itself: the receiver then gets the very same tensor, may
write to it, and the sender must not touch it again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Hashable, Sequence
from numbers import Real
from types import NoneType

import attrs
import torch

from stepwell_meta import TensorMeta

from .._batch import PendingOp, check_op, describe, misfit, out_of_order
from .._channels import ChannelPolicy
from .._failure import Failure
from .._kinds import check_kinds
from .._layout import check_buffer, place, row_major, row_major_copy
from .._op import Op
from .._require import require
from .._transport import Recv, Rules, Send
from ..exceptions import P2PUsageError, TransportError

_log = logging.getLogger(__name__)


class LoopbackFabric:
    """The network between the ranks of one process: one object, shared by their threads.

    Each rank is meant to be one thread. Others may wait for its handles too, but a rank counts as waiting as soon as one does.

    Example::

        fabric = LoopbackFabric(2)
        first, second = fabric.transport(0), fabric.transport(1)   # one for each thread

    Args:
        size: number of ranks.
        rules: which promises to keep and which to withhold.
        channels: for rules that are not tagged, which messages share a channel.
        timeout: seconds after which a wait gives up.
        stall_after: seconds after which a wait says in the log what it waits for.

    Raises:
        P2PUsageError: an argument is wrong.
    """

    def __init__(
        self,
        size: int,
        *,
        rules: Rules | None = None,
        channels: ChannelPolicy | str = ChannelPolicy.PER_EDGE,
        timeout: float = 300.0,
        stall_after: float = 30.0,
    ) -> None:
        if not isinstance(size, int) or size < 1:
            raise P2PUsageError(f"a fabric needs at least 1 rank, got {size!r}")
        if not isinstance(timeout, int | float) or not 0 < timeout <= threading.TIMEOUT_MAX:
            raise P2PUsageError(
                f"a wait may take more than 0 s and at most {threading.TIMEOUT_MAX:.0f} s, got timeout={timeout!r}"
            )
        require(rules, (Rules, NoneType), "the rules of a fabric are Rules, or None for the usual ones")
        require(stall_after, Real, "stall_after is a number of seconds")
        self.size = size
        self.rules = rules or Rules(tagged=True, rendezvous=False)
        self.channels = ChannelPolicy.of(channels)
        self.timeout = timeout
        self.stall_after = stall_after
        self._lock = threading.Lock()
        # Per rank, for each thread that sleeps: the handle it waits for, and a lock that is taken, and let go of once to wake it:
        # a third of the cost of a Condition. Who is woken is off the list, for it may post before it sleeps again.
        self._asleep: list[list[tuple[_Batch, threading.Lock]]] = [[] for _ in range(size)]
        self._results = [threading.Lock() for _ in range(size)]  # held while a thread of the rank takes what came
        self._taken = [False] * size
        self._closed = [False] * size
        self._pending: list[dict[_Batch, None]] = [{} for _ in range(size)]
        self._failure: Failure | None = None
        self._sends: dict[Hashable, deque[_Piece]] = {}
        self._recvs: dict[Hashable, deque[_Piece]] = {}
        self._lanes: dict[Hashable, deque[_Group]] = {}  # per rank and channel: posted, not yet done
        self._moved: list[Hashable] = []  # lanes in which a message was completed

    def transport(self, rank: int, *, device: torch.device | str = "cpu") -> LoopbackTransport:
        """The end of one rank; each can be taken once.

        Args:
            rank: which rank.
            device: where its received tensors shall be.

        Raises:
            P2PUsageError: there is no such rank, or it is taken.
        """
        if not isinstance(rank, int) or not 0 <= rank < self.size:
            raise P2PUsageError(f"this fabric has ranks 0 to {self.size - 1}, got {rank!r}")
        with self._lock:
            if self._taken[rank]:
                raise P2PUsageError(f"rank {rank} of this fabric is taken; make a new LoopbackFabric for a new run")
            self._taken[rank] = True
        return LoopbackTransport(self, rank, torch.device(device))

    # What follows runs under the lock.

    def _start(self, batch: _Batch, pieces: Sequence[_Piece]) -> None:
        if batch.missing:
            self._pending[batch.rank][batch] = None
        if self.rules.tagged:
            for piece in pieces:
                self._activate(piece, piece.message)
            return
        groups: dict[Hashable, list[_Piece]] = {}
        for piece in pieces:
            piece.lane = (batch.rank, self.channels.channel_of(piece.item.op))
            groups.setdefault(piece.lane, []).append(piece)
        for key, members in groups.items():
            lane = self._lanes.setdefault(key, deque())
            lane.append(_Group(members))
            if len(lane) == 1:
                self._activate_group(lane[0])
        self._settle()

    def _activate_group(self, group: _Group) -> None:
        for piece in group.pieces:
            op = piece.item.op
            self._activate(piece, (self.channels.channel_of(op), op.edge))

    def _activate(self, piece: _Piece, key: Hashable) -> None:
        """Meet the other end if it is there already, else wait for it."""
        ours, theirs = (self._sends, self._recvs) if piece.is_send else (self._recvs, self._sends)
        waiting = theirs.get(key)
        if waiting:
            other = waiting.popleft()
            if not waiting:
                del theirs[key]
            self._meet(*((piece, other) if piece.is_send else (other, piece)))
            return
        if key in ours:
            ours[key].append(piece)
        else:
            ours[key] = deque((piece,))
        if piece.is_send and not self.rules.rendezvous:
            self._complete(piece)

    def _meet(self, send: _Piece, recv: _Piece) -> None:
        wrong = None if send.message == recv.message else out_of_order(send.item.op, recv.item.op)
        wrong = wrong or misfit(send.item, recv.item)  # type: ignore[arg-type]  # a send is a Send, a receive a Recv
        if wrong is not None:
            send.batch.error = recv.batch.error = wrong
        recv.value, send.value = send.value, None
        self._complete(send)
        self._complete(recv)

    def _complete(self, piece: _Piece) -> None:
        batch = piece.batch
        if piece.done and batch.error is None:  # a send that was done when it was posted
            return
        if not piece.done:
            piece.done = True
            batch.missing -= 1
            if piece.lane is not None:
                self._moved.append(piece.lane)
        if batch.missing == 0 or batch.error:
            self._pending[batch.rank].pop(batch, None)
            self._wake(batch.rank)

    def _wake(self, rank: int) -> None:
        """Wake the rank's waiting threads, to look again."""
        asleep = self._asleep[rank]
        while asleep:
            asleep.pop()[1].release()

    def _settle(self) -> None:
        """Let each channel's next batch start where the one before it is done, until nothing moves any more."""
        while self._moved:
            lane = self._lanes[self._moved.pop()]
            while lane and lane[0].done:
                lane.popleft()
                if lane:
                    self._activate_group(lane[0])

    def _check_stuck(self) -> None:
        """End every wait if no rank is left that could still post something. No thread of a closed rank is asleep."""
        if self._asleep.count([]) > sum(self._closed):
            return
        waiting = [batch for asleep in self._asleep for batch in dict.fromkeys(batch for batch, _ in asleep)]
        stuck = "; ".join(f"rank {batch.rank} waits for {describe(batch.open_ops())}" for batch in waiting)
        gone = [str(rank) for rank, closed in enumerate(self._closed) if closed]
        also = f" Closed already: rank {', '.join(gone)}." if gone else ""
        for batch in waiting:
            batch.error = (
                f"every rank waits, each with one thread at least, and no message is on its way. {stuck}.{also} (prove_order"
                " explains a bad order)"
            )
            self._wake(batch.rank)

    def _fail(self, failure: Failure) -> None:
        if self._failure is None:
            self._failure = failure
            for rank in range(self.size):
                self._wake(rank)

    def _close(self, rank: int) -> None:
        self._closed[rank] = True
        self._pending[rank].clear()
        self._wake(rank)
        self._check_stuck()
        if all(self._closed):  # nobody is left to take what was sent and not received
            self._sends.clear()
            self._recvs.clear()
            self._lanes.clear()


class _Piece:
    """One message of one batch, at one end; mutable because it progresses.

    A plain class with slots: two are made for every message.
    """

    __slots__ = ("batch", "done", "is_send", "item", "lane", "message", "value")

    def __init__(
        self, item: Send | Recv, batch: _Batch, message: Hashable, value: torch.Tensor | None, *, is_send: bool
    ) -> None:
        self.item = item
        self.batch = batch
        self.message = message
        self.value = value  # a send's until it meets its receive, then the receive's
        self.is_send = is_send
        self.done = False
        self.lane: Hashable = None


@attrs.frozen(eq=False)
class _Group:
    """The messages of one batch on one channel, which start together."""

    pieces: list[_Piece]

    @property
    def done(self) -> bool:
        return all(piece.done for piece in self.pieces)


class _Batch:
    """A handle: what one ``post`` started."""

    __slots__ = ("_result", "device", "error", "fabric", "missing", "pieces", "posted", "rank", "receives")

    def __init__(self, fabric: LoopbackFabric, rank: int, device: torch.device) -> None:
        self.fabric = fabric
        self.rank = rank
        self.device = device
        self.pieces: list[_Piece] = []
        self.receives = False
        self.missing = 0
        self.error: str | None = None
        self.posted = time.monotonic()
        self._result: tuple[torch.Tensor, ...] | None = None

    def open_ops(self) -> list[Op]:
        return [piece.item.op for piece in self.pieces if not piece.done]

    def wait(self) -> tuple[torch.Tensor, ...]:
        if self._result is None:
            if self.missing or self.error is not None or self.fabric._failure is not None:
                self._block()
            if self.receives:
                with self.fabric._results[self.rank]:  # another thread may wait for the same handle
                    if self._result is None:
                        self._result = tuple(
                            [
                                place(piece.value, piece.item.meta, self.device, piece.item.buffer)  # type: ignore[arg-type, union-attr]
                                for piece in self.pieces
                                if not piece.is_send  # each is done, so it has its value
                            ]
                        )
            else:
                self._result = ()
            self.pieces = []
        return self._result

    def _block(self) -> None:
        fabric, start = self.fabric, time.monotonic()
        asleep = fabric._asleep[self.rank]
        while self.missing or self.error is not None or fabric._failure is not None:
            bell = threading.Lock()  # a new one each time: whoever still has the old one may ring it
            bell.acquire()
            try:
                with fabric._lock:
                    if not self._may_come():
                        return
                    asleep.append((self, bell))
                    fabric._check_stuck()
                self._sleep(bell, start)
            except BaseException:
                with fabric._lock:
                    if (self, bell) in asleep:
                        asleep.remove((self, bell))
                raise

    def _sleep(self, bell: threading.Lock, start: float) -> None:
        """Until the bell rings; a warning on the way, where it takes long."""
        fabric, now = self.fabric, time.monotonic()
        stall, end = start + fabric.stall_after, start + fabric.timeout
        if now < stall < end:
            if bell.acquire(timeout=stall - now):
                return
            now = time.monotonic()
            _log.warning("rank %d has waited %.0f s for %s", self.rank, now - start, describe(self.open_ops()))
        if bell.acquire(timeout=max(0.0, end - now)):
            return
        with fabric._lock:
            if self._may_come():  # and did not in the last moment
                raise TransportError(f"rank {self.rank} waited {fabric.timeout:g} s for {describe(self.open_ops())}")

    def _may_come(self) -> bool:
        """Whether what is missing may still come; False where all is there."""
        if self.fabric._failure is not None:
            raise self.fabric._failure.error()
        if self.error is not None:
            raise TransportError(self.error)
        if self.missing and self.fabric._closed[self.rank]:
            raise P2PUsageError(
                f"rank {self.rank} closed its transport while it waited for {describe(self.open_ops())}"
            )
        return self.missing > 0


class LoopbackTransport:
    """One rank's end of a :class:`LoopbackFabric`; made by :meth:`LoopbackFabric.transport`.

    Implements :class:`stepwell_p2p.Transport`.
    """

    def __init__(self, fabric: LoopbackFabric, rank: int, device: torch.device) -> None:
        self.fabric = fabric
        self.rank = rank
        self.size = fabric.size
        self.rules = fabric.rules
        self.policy = fabric.channels
        self.device = device
        # By op that was looked at, of which kind each may be posted: what both ends agree on.
        self._sends: dict[Op, Hashable] = {}
        self._recvs: dict[Op, Hashable] = {}

    def post(self, batch: Sequence[Send | Recv]) -> _Batch:
        """Start every message of the batch; see :meth:`stepwell_p2p.Transport.post`."""
        fabric = self.fabric
        handle = _Batch(fabric, self.rank, self.device)
        try:
            for item in batch:
                is_send = isinstance(item, Send)
                known = self._sends if is_send else self._recvs
                message = known.get(item.op)
                if message is None:
                    check_op(item.op, self.rank, self.size, is_send=is_send)
                    message = known[item.op] = item.op.message
                value = None
                if isinstance(item, Send):
                    value = _hand_over(item)
                else:
                    handle.receives = True
                    if item.buffer is not None:
                        check_buffer(item.buffer, item.meta)
                    elif not isinstance(item.meta, TensorMeta):
                        raise TypeError(item)
                handle.pieces.append(_Piece(item, handle, message, value, is_send=is_send))
            handle.missing = len(batch)  # what can be read only once has none
        except (AttributeError, TypeError) as error:
            check_kinds(batch, error)
            raise
        with fabric._lock:
            if fabric._closed[self.rank]:
                raise P2PUsageError(f"rank {self.rank} posts on a transport that it has closed")
            if fabric._failure is not None:
                raise fabric._failure.error()
            fabric._start(handle, handle.pieces)
        return handle

    def abort(
        self, reason: str, *, stage: int | None = None, microbatch: int | None = None, action: str | None = None
    ) -> None:
        """Wake every rank with :class:`PeerFailure`; see :meth:`stepwell_p2p.Transport.abort`."""
        with self.fabric._lock:
            self.fabric._fail(Failure(reason, self.rank, stage, microbatch, action))

    def pending(self) -> tuple[PendingOp, ...]:
        """What this rank has posted and is not done, oldest first. May be asked from any thread."""
        now = time.monotonic()
        with self.fabric._lock:
            waiting = [batch for batch, _ in self.fabric._asleep[self.rank]]
            return tuple(
                PendingOp(op, now - batch.posted, batch in waiting)
                for batch in self.fabric._pending[self.rank]
                for op in batch.open_ops()
            )

    def close(self) -> None:
        """Leave the fabric; see :meth:`stepwell_p2p.Transport.close`."""
        with self.fabric._lock:
            if not self.fabric._closed[self.rank]:
                self.fabric._close(self.rank)


def _hand_over(send: Send) -> torch.Tensor:
    """The memory that the receiver will own: the sent tensor's own where it was given away whole, else a copy."""
    given = send.tensor
    if not send.owned:
        return row_major_copy(given)
    tensor = row_major(given)
    copied = tensor is not given and tensor.data_ptr() != given.data_ptr()
    if copied or tensor.untyped_storage().nbytes() == tensor.nbytes:
        return tensor
    return tensor.clone()
