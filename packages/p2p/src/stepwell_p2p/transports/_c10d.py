"""Any backend of torch.distributed."""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from numbers import Real
from typing import Any

import attrs
import torch
import torch.distributed as dist

from stepwell_meta import TensorMeta

from .._batch import PendingOp, check_op
from .._buffers import BufferPool
from .._channels import ChannelPolicy, channels_for
from .._failure import Failure
from .._kinds import check_kinds
from .._layout import check_buffer, place, row_major
from .._link import Flight, Link, backend_for, leave, link_of
from .._meeting import meet, open_together, probe_tag
from .._op import MEETING, Op
from .._own import OwnMessages, OwnReceive
from .._pack import SMALL
from .._placement import Placement, Wire, chain_wires
from .._require import require
from .._tags import check_of, tag_of
from .._transport import Recv, Rules, Send
from ..exceptions import P2PUsageError

_SHORTEST = 0.001  # seconds; what rounds to no milliseconds is no limit at all to torch
_AT_ONCE = 20e-6  # seconds in which a wait ends whose messages have come already
_NAP = 1e-6  # seconds; the kernel makes some fifty times as much of it


class C10dTransport:
    """Carries tensors over a process group of torch.distributed: gloo, NCCL, HCCL, or any other backend.

    Every rank of the group makes one at the same point of the program. Without an initialised process group, or in a group of
    one, only messages to oneself are possible, and they work.

    Example::

        transport = C10dTransport(placement=Placement.loop(8, 4), wires=chain_wires(8))

    Until :meth:`open` knows placement and wires, and for messages between ranks that no wire joins (set-up, gathering),
    the group itself carries the messages.

    Implements :class:`stepwell_p2p.Transport`.

    Args:
        group: the pipeline group; None for the default group.
        channels: how messages are spread over channels, see :class:`~stepwell_p2p.ChannelPolicy`.
        placement: with ``wires``, opens the channels at once; else call :meth:`open`.
        wires: what crosses; by default each stage hands one value to the next.
        timeout: seconds that a wait may take; None for the group's own timeout.
        device: where received tensors shall be; None for the accelerator if the group serves it, else the CPU.
        name: transports of one name over one group share channels, and with them failures.
        stall_after: seconds after which a wait says in the log what it waits for.

    Attributes:
        buffers: memory of received values in host memory that are large enough for it to matter; it is used again when nobody
            uses the value any more.

    Raises:
        P2PUsageError: an argument is wrong.
        TransportError: another rank did not come within the timeout.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        channels: ChannelPolicy | str = ChannelPolicy.PER_EDGE,
        placement: Placement | None = None,
        wires: Sequence[Wire] | None = None,
        timeout: float | None = None,
        device: torch.device | str | None = None,
        name: str = "",
        stall_after: float = 30.0,
    ) -> None:
        self.policy = ChannelPolicy.of(channels)
        require(timeout, (Real, type(None)), "timeout is a number of seconds, or None for the group's own")
        require(stall_after, Real, "stall_after is a number of seconds")
        if timeout is not None and not _SHORTEST <= timeout <= threading.TIMEOUT_MAX:
            raise P2PUsageError(
                f"a wait may take {_SHORTEST} s or more, got timeout={timeout}; None stands for the group's own timeout"
            )
        if placement is None and wires is not None:
            raise P2PUsageError("wires join the stages of a placement: pass that too, or call open with both")
        if group is None and dist.is_available() and dist.is_initialized():
            group = dist.group.WORLD
        if group is not None and not isinstance(group, dist.ProcessGroup):
            raise P2PUsageError(
                f"group must be a process group that this rank is in, got {group!r}; new_group gives"
                " GroupMember.NON_GROUP_MEMBER to ranks outside: they make no transport"
            )
        self.rank = group.rank() if group is not None else 0
        self.size = group.size() if group is not None else 1
        self.device = torch.device(device) if device is not None else _default_device(group)
        self.name = name
        self.buffers = BufferPool("cpu")
        self._own = OwnMessages()
        self._channels: frozenset[str] | None = None  # that this transport uses; None: all that are open
        self._routes: tuple[dict[Op, _Route], dict[Op, _Route]] = ({}, {})  # of receives and of sends
        self._closed = False
        self._failure: Failure | None = None
        self._link: Link | None = None
        self._group = group
        self._wire_device = self.device
        if group is not None and self.size > 1:
            if backend_for(group, self.device) == "gloo":
                self._wire_device = torch.device("cpu")  # gloo's point-to-point messages live in host memory
            limit = timedelta(seconds=timeout) if timeout is not None else None
            self._link = link_of(group, name, self._wire_device, limit, stall_after=stall_after)
        tagged = self._link is None or self._link.gloo
        self.rules = Rules(tagged=tagged, rendezvous=self._link is not None)
        if placement is not None:
            self.open(placement, wires if wires is not None else chain_wires(placement.num_stages))

    def open(self, placement: Placement, wires: Sequence[Wire]) -> None:
        """Make and connect the channels of a pipeline: collective, in one order on all ranks.

        Call it again as often as you like: for the same pipeline, which opens nothing, or for another, whose channels join those
        that are open.

        Raises:
            P2PUsageError: the placement needs more ranks than the group has, one channel would have other ranks than before, or
                the transport is closed.
            PeerFailure: a rank of the group did not come within the timeout, or has ended.
        """
        if self._closed:
            raise P2PUsageError(f"rank {self.rank} opens channels on a transport that it has closed: make a new one")
        if placement.num_ranks > self.size:
            raise P2PUsageError(f"the placement needs {placement.num_ranks} ranks, the group has {self.size}")
        link = self._link
        if link is not None:
            channels = channels_for(placement, wires, self.policy).channels
            missing = link.missing(channels)
            if missing:
                if link.gloo:
                    meet(self.post, self.rank, self.size)
                    link.install(missing, open_together(self.post, link, missing))
                else:
                    link.install(missing, link.make(missing))
            self._channels = (self._channels or frozenset()) | {channel.name for channel in channels}
            self._forget_routes()

    def post(self, batch: Sequence[Send | Recv]) -> _Batch:
        """Start every message of the batch; see :meth:`stepwell_p2p.Transport.post`."""
        if self._closed:
            raise P2PUsageError(f"rank {self.rank} posts on a transport that it has closed")
        link = self._link
        failure = self._failure if link is None else link.failure
        if failure is not None:
            raise failure.error()
        handle = _Batch(self)
        try:
            if link is None or link.gloo:
                self._post_tagged(batch, handle, link)
            else:
                self._post_fifo(batch, handle, link)
        except (AttributeError, TypeError) as error:
            check_kinds(batch, error)
            raise
        if link is not None and handle.flights:
            link.pending[handle] = None
        return handle

    def abort(
        self, reason: str, *, stage: int | None = None, microbatch: int | None = None, action: str | None = None
    ) -> None:
        """Make every rank's waits raise :class:`PeerFailure`; see :meth:`stepwell_p2p.Transport.abort`."""
        failure = Failure(reason, self.rank, stage, microbatch, action)
        if self._link is not None:
            self._link.abort(failure)
        else:
            self._failure = self._failure or failure

    def pending(self) -> tuple[PendingOp, ...]:
        """What this rank has posted and not finished waiting for, oldest first. May be asked from any thread."""
        now = time.monotonic()
        handles = list(self._link.pending) if self._link is not None else []
        return tuple(
            PendingOp(flight.op, now - handle.posted, handle.waiting_since is not None)
            for handle in handles
            if handle.transport is self
            for flight in handle.flights
            if not flight.done
        )

    def describe(self) -> Description:
        """What this transport holds now."""
        groups = tuple(self._link.groups.values()) if self._link is not None else ()
        return Description(
            rank=self.rank,
            size=self.size,
            rules=self.rules,
            policy=self.policy,
            groups=tuple((made.channel.name, made.channel.ranks, made.made_by) for made in groups),
            timeout=self._link.timeout.total_seconds() if self._link is not None else None,
        )

    def as_p2p_ops(self, batch: Sequence[Send | Recv]) -> list[dist.P2POp]:
        """The same messages for torch's own ``batch_isend_irecv`` and schedules, on the pipeline group.

        The values of a receive stand, after its work is done, in its op's ``tensor``, contiguous.

        Raises:
            P2PUsageError: no process group, or a message to oneself.
        """
        if self._link is None:
            raise P2PUsageError("torch's P2P ops need an initialised process group of at least 2 ranks")
        try:
            len(batch)  # as in post
            return [self._as_p2p_op(item) for item in batch]
        except (AttributeError, TypeError) as error:
            check_kinds(batch, error)
            raise

    def close(self) -> None:
        """Release channels; see :meth:`stepwell_p2p.Transport.close`."""
        if not self._closed:
            self._closed = True
            self._own.clear()
            self._forget_routes()
            self.buffers.clear()
            if self._link is not None:
                for handle in [handle for handle in self._link.pending if handle.transport is self]:
                    self._link.pending.pop(handle, None)
                leave(self._link, self.name)

    def probe(self, op: Op) -> None:
        """For the link: post a receive of what is never sent where ``op`` is received; a broken connection raises."""
        route = self._routes[False].get(op)
        if route is not None:
            route.start([torch.empty(1)], route.peer, probe_tag(op))

    def _forget_routes(self) -> None:
        for routes in self._routes:
            routes.clear()

    def _as_p2p_op(self, item: Send | Recv) -> dist.P2POp:
        check_op(item.op, self.rank, self.size, is_send=isinstance(item, Send))
        if item.op.peer == self.rank:
            raise P2PUsageError(f"{item.op} stays on its rank: hand the value over instead")
        tensor = self._outgoing(item) if isinstance(item, Send) else self._incoming(item)
        form = (tuple(tensor.shape), tensor.dtype)
        tag = tag_of(item.op) + check_of(*form) if self.rules.tagged else 0
        verb = dist.isend if isinstance(item, Send) else dist.irecv
        return dist.P2POp(verb, tensor, group=self._group, tag=tag, group_peer=item.op.peer)

    def _find_route(self, item: Send | Recv) -> _Route:
        op, is_send = item.op, isinstance(item, Send)
        check_op(op, self.rank, self.size, is_send=is_send)
        link = self._link
        if op.peer == self.rank or link is None:
            route = _Route(None, 0, 0, 0, itertools.count(), is_send=is_send)
        else:
            tag = tag_of(op) if link.gloo else 0
            name = self.policy.channel_of(op)
            # Both ends have opened the same with this transport; what others of this link open meanwhile moves no message.
            made = link.groups.get(name) if self._channels is None or name in self._channels else None
            # No wire joins these ranks, or the channels are yet to be opened.
            if made is None or op.peer not in made.channel.ranks or op.microbatch == MEETING:
                route = _Route(self._group, op.peer, tag, -1, link.counts[op], is_send=is_send)
            else:
                number = list(link.groups).index(made.channel.name)
                route = _Route(made.group, made.peer(op.peer), tag, number, link.counts[op], is_send=is_send)
        self._routes[is_send][op] = route
        return route

    def _outgoing(self, item: Send) -> torch.Tensor:
        tensor = row_major(item.tensor)
        return tensor if tensor.device == self._wire_device else tensor.to(self._wire_device)

    def _incoming(self, item: Recv, pooled: TensorMeta | None = None) -> torch.Tensor:
        buffer = item.buffer
        if not isinstance(item.meta, TensorMeta):
            raise TypeError(item)
        if buffer is not None:
            check_buffer(buffer, item.meta)
            if buffer.is_contiguous() and buffer.device == self._wire_device:
                return buffer
        if pooled is not None and self._wire_device.type == "cpu":
            return self.buffers.take(pooled)
        return torch.empty(item.meta.shape, dtype=item.meta.dtype, device=self._wire_device)

    def _check_own(self, item: Send | Recv) -> None:
        if isinstance(item, Send):
            row_major(item.tensor)
        elif not isinstance(item.meta, TensorMeta):
            raise TypeError(item)
        elif item.buffer is not None:
            check_buffer(item.buffer, item.meta)

    def _post_own(self, item: Send | Recv, handle: _Batch) -> None:
        if isinstance(item, Send):
            self._own.send(item)
        else:
            handle.received.append((item, self._own.recv(item)))

    def _post_tagged(self, batch: Sequence[Send | Recv], handle: _Batch, link: Link | None) -> None:
        """Receives first: a send whose receive is there already needs one message less between the ranks.

        What is wrong with any item is found before the first one starts.
        """
        ready: list[tuple[Send | Recv, _Route, torch.Tensor | None, int]] = []
        for item in batch if len(batch) == 1 else sorted(batch, key=_is_send):
            route = self._routes[isinstance(item, Send)].get(item.op) or self._find_route(item)
            if link is None or route.channel is None:
                self._check_own(item)
                ready.append((item, route, None, 0))
            elif isinstance(item, Send):
                tensor = self._outgoing(item)
                ready.append((item, route, tensor, route.tag_for(tensor.shape, tensor.dtype)))
            else:
                tag = route.tag_for(item.meta.shape, item.meta.dtype)
                ready.append((item, route, self._incoming(item, route.pooled), tag))
        for item, route, value, tag in ready:
            if link is None or value is None:
                self._post_own(item, handle)
                continue
            if isinstance(item, Recv):
                handle.received.append((item, value))
            try:
                work = route.start([value], route.peer, tag)
            except RuntimeError as error:  # the connection is broken already
                raise link.failed(item.op, error, 0.0) from error
            handle.flights.append(Flight(item.op, work, value, next(route.counter)))

    def _post_fifo(self, batch: Sequence[Send | Recv], handle: _Batch, link: Link) -> None:
        """Channel by channel, in the one order in which all ranks made them, each as one group call."""
        len(batch)  # what can be read only once has none
        ready: list[tuple[Send | Recv, _Route, torch.Tensor | None]] = []
        for item in batch:  # what is wrong with any is found before the first one starts
            route = self._routes[isinstance(item, Send)].get(item.op) or self._find_route(item)
            if route.channel is None:
                self._check_own(item)
                ready.append((item, route, None))
            else:
                ready.append((item, route, self._outgoing(item) if isinstance(item, Send) else self._incoming(item)))
        per_channel: dict[int, list[tuple[Op, torch.Tensor, dist.P2POp, _Route]]] = {}
        for item, route, tensor in ready:
            if tensor is None:
                self._post_own(item, handle)
                continue
            if isinstance(item, Recv):
                handle.received.append((item, tensor))
            verb = dist.isend if isinstance(item, Send) else dist.irecv
            call = dist.P2POp(verb, tensor, group=route.channel, group_peer=route.peer)
            per_channel.setdefault(route.number, []).append((item.op, tensor, call, route))
        for _, members in sorted(per_channel.items()):
            try:
                works = dist.batch_isend_irecv([call for _, _, call, _ in members])
            except RuntimeError as error:
                raise link.failed(members[0][0], error, 0.0) from error
            for number, (op, tensor, _, route) in enumerate(members):
                # a backend that coalesces answers with one work for all
                handle.flights.append(Flight(op, works[min(number, len(works) - 1)], tensor, next(route.counter)))


@attrs.frozen
class Description:
    """What a :class:`C10dTransport` holds.

    Attributes:
        rank: this rank.
        size: how many ranks the group has.
        rules: what may be relied on about order.
        policy: how messages are spread over channels.
        groups: name, ranks and way of making of each communicator that this rank made for channels.
        timeout: seconds that a wait may take; None where nothing can be waited for.
    """

    rank: int
    size: int
    rules: Rules
    policy: ChannelPolicy
    groups: tuple[tuple[str, tuple[int, ...], str], ...]
    timeout: float | None

    def __str__(self) -> str:
        made = ", ".join(f"{name} ({how})" for name, _, how in self.groups) or "none"
        return (
            f"rank {self.rank} of {self.size}, {self.policy.value} channels, {len(self.groups)} groups: {made};"
            f" {'matched by tag' if self.rules.tagged else 'first in, first out'}"
        )


class _Route:
    """Where one op goes: resolved once, because the same ops come in every step; what its value looks like changes seldom."""

    __slots__ = ("_dtype", "_shape", "_tag", "_tag_base", "channel", "counter", "number", "peer", "pooled", "start")

    def __init__(
        self, channel: Any, peer: int, tag_base: int, number: int, counter: Iterator[int], *, is_send: bool
    ) -> None:
        self.channel = channel  # None: a message to oneself
        self.start: Any = None if channel is None else channel.send if is_send else channel.recv
        self.peer = peer
        self.number = number
        self.counter = counter  # shared by the transports of one link
        self.pooled: TensorMeta | None = None  # what a receive buffer looks like, if it is worth keeping
        self._tag_base = tag_base
        self._shape: tuple[int, ...] | None = None
        self._dtype: torch.dtype | None = None
        self._tag = 0

    def tag_for(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        if shape != self._shape or dtype is not self._dtype:
            self._shape, self._dtype = tuple(shape), dtype
            self._tag = self._tag_base | check_of(self._shape, dtype)
            self.pooled = None
            if math.prod(shape) * dtype.itemsize > SMALL:
                self.pooled = TensorMeta.from_tensor(torch.empty(shape, dtype=dtype, device="meta"))
        return self._tag


def _is_send(item: Send | Recv) -> bool:
    return isinstance(item, Send)


class _Batch:
    """A handle: what one ``post`` started."""

    __slots__ = ("flights", "lock", "posted", "received", "result", "transport", "waiting_since")

    def __init__(self, transport: C10dTransport) -> None:
        self.transport = transport
        self.flights: list[Flight] = []
        self.received: list[tuple[Recv, torch.Tensor | OwnReceive]] = []
        self.result: tuple[torch.Tensor, ...] | None = None
        self.posted = time.monotonic()
        self.waiting_since: float | None = None
        self.lock = threading.Lock()

    def wait(self) -> tuple[torch.Tensor, ...]:
        with self.lock:  # another thread may wait for the same handle, and a backend wakes one of them only
            if self.result is None:
                if self.flights:
                    self._block()
                device = self.transport.device
                self.result = tuple(
                    [
                        place(value.take() if isinstance(value, OwnReceive) else value, recv.meta, device, recv.buffer)
                        for recv, value in self.received
                    ]
                    if self.received
                    else ()
                )
                self.received = []
            return self.result

    def _block(self) -> None:
        link = self.transport._link
        assert link is not None
        if link.failure is not None:
            raise link.failure.error()
        if self not in link.pending:
            raise P2PUsageError(f"rank {self.transport.rank} waits on a transport that it has closed")
        self.waiting_since = start = time.monotonic()
        if self.received:
            link.received = []
        timeout = link.own_timeout
        try:
            for flight in self.flights:
                if link.failure is not None:
                    raise link.failure.error()
                try:
                    if timeout is None:
                        flight.work.wait()  # as long as its group says
                    else:
                        flight.work.wait(timeout)
                except RuntimeError as error:
                    raise link.failed(flight.op, error, time.monotonic() - start) from error
                flight.done = True
            if link.failure is not None:
                raise link.failure.error()
            if self.received and link.gloo:
                link.received = [flight for flight in self.flights if flight.tensor.nbytes <= SMALL]
                if len(link.received) < len(self.flights) and time.monotonic() - start > _AT_ONCE:
                    time.sleep(_NAP)  # gloo's thread, which has just woken this one, is done with the rest then
            self.flights = []  # the backend's handles hold the tensors
        finally:
            self.waiting_since = None
            link.pending.pop(self, None)


def _default_device(group: dist.ProcessGroup | None) -> torch.device:
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None or (group is not None and backend_for(group, accelerator) == "gloo"):
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())
