"""The transport itself: stepwell_p2p.Transport over sockets and shared memory.

A value is copied twice: by its sender into a segment, by its receiver out of it. A thread reads the sockets; everything that it
shares with the rank's own thread stands behind one condition.
"""

from __future__ import annotations

import os
import selectors
import struct
import tempfile
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from stepwell_meta import TensorMeta, decode, encode
from stepwell_p2p import Recv, Rules, Send
from stepwell_p2p.exceptions import P2PUsageError, PeerFailure, TransportError

from ._segments import Segment, SegmentPool
from ._sockets import Peer, connect_all

_Message = tuple[int, int, bool, int, int, int]  # stepwell_p2p.Op.message
_INLINE = 1 << 12  # bytes up to which a value travels in its frame
_HEAD = struct.Struct("<BI")  # kind of frame, bytes of its table; then the table, then a value
_DATA, _FREE, _FAILED, _GOODBYE = range(4)


class SharedMemoryTransport:
    """Carries tensors between processes of one host.

    Implements :class:`stepwell_p2p.Transport`: messages match by op, and a send is done when it is posted.

    Args:
        rank: this rank's number.
        size: how many ranks there are.
        directory: where they meet; the same for all ranks, and for no other run.
        timeout: seconds that a wait may take, also the first one for all ranks to come.

    Raises:
        TransportError: a rank did not come.
    """

    def __init__(self, rank: int, size: int, directory: Path | str, *, timeout: float = 300.0) -> None:
        self.rank = rank
        self.size = size
        self.rules = Rules(tagged=True, rendezvous=False)
        self._timeout = timeout
        self._changed = threading.Condition()
        self._arrived: dict[_Message, deque[_Arrival]] = {}
        self._wanted: dict[_Message, deque[_Ticket]] = {}
        self._segments: dict[tuple[int, int], Segment] = {}  # of other ranks, by rank and number
        self._pools = [SegmentPool() for _ in range(size)]
        self._failure: tuple[str, int, int | None, int | None, str | None] | None = None
        self._left: set[int] = set()
        self._closed = False
        try:
            self._peers = connect_all(rank, size, Path(directory), timeout)
        except TimeoutError as error:
            raise TransportError(str(error)) from error
        self._wakened, self._waker = os.pipe()
        self._thread = threading.Thread(target=self._serve, name=f"shm-{rank}", daemon=True)
        self._thread.start()

    @classmethod
    def from_environment(cls, *, timeout: float = 300.0) -> SharedMemoryTransport:
        """For processes that torchrun started on one host."""
        run = f"stepwell-shm-{os.environ['MASTER_PORT']}-{os.environ.get('TORCHELASTIC_RUN_ID', 'none')}"
        directory = Path(tempfile.gettempdir(), run)
        return cls(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), directory, timeout=timeout)

    def post(self, batch: Sequence[Send | Recv]) -> _Handle:
        """Write what is sent into shared memory; remember what is received."""
        for item in batch:
            self._check(item)
        tickets = []
        for item in batch:
            if isinstance(item, Send):
                self._send(item)
                continue
            ticket = _Ticket(item)
            tickets.append(ticket)
            with self._changed:
                self._check_alive()
                self._wanted.setdefault(item.op.message, deque()).append(ticket)
                self._match(item.op.message)
        return _Handle(self, tickets)

    def abort(
        self, reason: str, *, stage: int | None = None, microbatch: int | None = None, action: str | None = None
    ) -> None:
        """Tell every rank. The first reason that a rank hears of is the one that it raises."""
        failure = (reason, self.rank, stage, microbatch, action)
        with self._changed:
            if self._failure is None and not self._closed:
                self._fail(failure)
                self._tell_all(_frame(_FAILED, failure))

    def close(self) -> None:
        """Take leave of the other ranks, and end the thread."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._tell_all(_frame(_GOODBYE, ()))
            os.write(self._waker, b"x")
        self._thread.join()

    # ---- sending

    def _send(self, send: Send) -> None:
        tensor = send.tensor.detach().resolve_conj().resolve_neg().contiguous()
        value = tensor.view(-1).view(torch.uint8)
        look = (tuple(tensor.shape), tensor.dtype)
        if send.op.peer == self.rank:
            with self._changed:
                self._check_alive()
                self._arrive(send.op.message, _Arrival(*look, value.clone()))
            return
        number = descriptor = None
        if value.numel() > _INLINE:
            with self._changed:
                self._check_alive()
                segment, descriptor = self._pools[send.op.peer].take(value.numel())
            segment.memory[: value.numel()].copy_(value)
            number = segment.number
        table = (send.op.message, *look, number, segment.memory.numel() if descriptor is not None else 0)
        inline = b"" if number is not None else bytes(value.tolist())
        with self._changed:
            try:
                self._check_alive()
                self._put(self._peers[send.op.peer], _frame(_DATA, table, inline), descriptor)
            finally:
                if descriptor is not None:
                    os.close(descriptor)

    def _put(self, peer: Peer, frame: bytes, descriptor: int | None = None) -> None:
        peer.put(frame, None if descriptor is None else os.dup(descriptor))
        if peer.has_unsent:  # the socket is full: the thread goes on when there is room
            os.write(self._waker, b"x")

    def _tell_all(self, frame: bytes) -> None:
        for peer in self._peers.values():
            self._put(peer, frame)

    # ---- receiving; under the lock

    def _arrive(self, message: _Message, arrival: _Arrival) -> None:
        self._arrived.setdefault(message, deque()).append(arrival)
        self._match(message)

    def _match(self, message: _Message) -> None:
        """The first that came goes to the first that was asked for."""
        arrived, wanted = self._arrived.get(message), self._wanted.get(message)
        while arrived and wanted:
            wanted.popleft().arrival = arrived.popleft()
        if not arrived:
            self._arrived.pop(message, None)
        if not wanted:
            self._wanted.pop(message, None)
        self._changed.notify_all()

    def _fail(self, failure: tuple[str, int, int | None, int | None, str | None]) -> None:
        self._failure = self._failure or failure
        self._changed.notify_all()

    def _check_alive(self) -> None:
        if self._closed:
            raise P2PUsageError(f"rank {self.rank} uses a transport that it has closed")
        if self._failure is not None:
            reason, rank, stage, microbatch, action = self._failure
            raise PeerFailure(reason, rank=rank, stage=stage, microbatch=microbatch, action=action)

    def _wait_for(self, tickets: Sequence[_Ticket]) -> None:
        deadline = time.monotonic() + self._timeout
        with self._changed:
            while True:
                self._check_alive()
                missing = next((ticket.recv.op for ticket in tickets if ticket.arrival is None), None)
                if missing is None:
                    return
                if missing.peer in self._left:
                    raise TransportError(f"rank {missing.peer} closed its transport; {missing} will never come")
                if missing.peer == self.rank:
                    raise TransportError(f"{missing} waits for its own rank, which has not posted the send")
                if time.monotonic() > deadline:
                    raise TransportError(f"rank {self.rank} waited {self._timeout:g} s for {missing}")
                self._changed.wait(max(0.0, deadline - time.monotonic()))

    def _take(self, ticket: _Ticket) -> torch.Tensor:
        """Copy a value out, in the layout that was asked for, and let the sender have its segment again."""
        recv, arrival = ticket.recv, ticket.arrival
        assert arrival is not None
        if arrival.shape != recv.meta.shape or arrival.dtype != recv.meta.dtype:
            raise TransportError(
                f"{recv.op}: expected {recv.meta.dtype} of shape {recv.meta.shape}, but rank {recv.op.peer} sent"
                f" {arrival.dtype} of shape {arrival.shape}"
            )
        result = recv.buffer if recv.buffer is not None else recv.meta.without_grad().empty("cpu")
        result.copy_(arrival.value.view(arrival.dtype).view(arrival.shape))
        if arrival.segment is not None:
            with self._changed:
                if not self._closed:
                    self._put(self._peers[recv.op.peer], _frame(_FREE, (arrival.segment,)))
        return result

    # ---- the thread

    def _serve(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._wakened, selectors.EVENT_READ)
            for peer in self._peers.values():
                selector.register(peer.sock, selectors.EVENT_READ, peer)
            while True:
                ready = selector.select()
                with self._changed:
                    for key, _ in ready:
                        if key.data is None:
                            os.read(self._wakened, 1 << 12)
                        else:
                            self._serve_peer(key.data)
                    if self._closed and not any(peer.has_unsent for peer in self._peers.values()):
                        break
                    for peer in [key.data for key in selector.get_map().values() if key.data is not None]:
                        self._watch(selector, peer)
        for peer in self._peers.values():
            peer.close()
        os.close(self._waker)
        os.close(self._wakened)

    def _watch(self, selector: selectors.BaseSelector, peer: Peer) -> None:
        if not peer.open:
            selector.unregister(peer.sock)
            return
        writing = selectors.EVENT_WRITE if peer.has_unsent else 0
        selector.modify(peer.sock, selectors.EVENT_READ | writing, peer)

    def _serve_peer(self, peer: Peer) -> None:
        peer.flush()
        for frame in peer.read():
            kind, length = _HEAD.unpack_from(frame)
            at = _HEAD.size + length
            self._handle(peer, kind, decode(frame[_HEAD.size : at]), frame[at:])
        if not peer.open and peer.rank not in self._left:
            self._fail(("its process ended", peer.rank, None, None, None))

    def _handle(self, peer: Peer, kind: int, table: tuple[Any, ...], inline: bytes) -> None:
        if kind == _FREE:
            self._pools[peer.rank].give(table[0])
        elif kind == _FAILED:
            self._fail(table)
        elif kind == _GOODBYE:
            self._left.add(peer.rank)
            self._changed.notify_all()
        else:
            message, shape, dtype, number, new_size = table
            if new_size:
                descriptor = peer.descriptors.popleft()
                self._segments[peer.rank, number] = Segment(number, descriptor, new_size)
                os.close(descriptor)
            if number is None:
                value = (
                    torch.frombuffer(bytearray(inline), dtype=torch.uint8)
                    if inline
                    else torch.empty(0, dtype=torch.uint8)
                )
            else:
                count = TensorMeta(shape, tuple(0 for _ in shape), dtype).nbytes
                value = self._segments[peer.rank, number].memory[:count]
            self._arrive(message, _Arrival(shape, dtype, value, number))

    def _check(self, item: Send | Recv) -> None:
        op = item.op
        if op.kind.is_send is not isinstance(item, Send):
            raise P2PUsageError(f"{type(item).__name__} with an op of the other kind: {op}")
        if not (0 <= op.edge.source < self.size and 0 <= op.edge.destination < self.size):
            raise P2PUsageError(f"{op} names a rank outside 0 to {self.size - 1}")
        if op.rank != self.rank:
            raise P2PUsageError(f"{op} is rank {op.rank}'s to post, and this is rank {self.rank}")
        if isinstance(item, Recv) and item.buffer is not None:
            look = (tuple(item.buffer.shape), item.buffer.dtype)
            if look != (item.meta.shape, item.meta.dtype):
                raise P2PUsageError(f"{op}: a buffer needs the value's shape and dtype, {item.meta}")


class _Arrival:
    """A value that has come: its bytes, in memory of ours or in a segment of its sender's."""

    def __init__(
        self, shape: tuple[int, ...], dtype: torch.dtype, value: torch.Tensor, segment: int | None = None
    ) -> None:
        self.shape = shape
        self.dtype = dtype
        self.value = value
        self.segment = segment


class _Ticket:
    """A posted receive."""

    def __init__(self, recv: Recv) -> None:
        self.recv = recv
        self.arrival: _Arrival | None = None


class _Handle:
    """A batch: its sends are done, its receives are waited for."""

    def __init__(self, transport: SharedMemoryTransport, tickets: Sequence[_Ticket]) -> None:
        self._transport = transport
        self._tickets = tickets
        self._result: tuple[torch.Tensor, ...] | None = None

    def wait(self) -> tuple[torch.Tensor, ...]:
        if self._result is None:
            self._transport._wait_for(self._tickets)
            self._result = tuple(self._transport._take(ticket) for ticket in self._tickets)
        return self._result


def _frame(kind: int, table: tuple[Any, ...], value: bytes = b"") -> bytes:
    encoded = encode(table)
    return _HEAD.pack(kind, len(encoded)) + encoded + value
