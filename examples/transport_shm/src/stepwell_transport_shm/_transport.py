"""The transport itself: stepwell_p2p.Transport over lanes of shared memory.

It has no thread. A rank reads what others wrote for it when it waits or posts, and sleeps in the kernel when there is nothing.
"""

from __future__ import annotations

import contextlib
import functools
import os
import select
import socket
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from stepwell_meta import MetadataError, decode, encode
from stepwell_p2p import Op, Recv, Rules, Send
from stepwell_p2p.exceptions import P2PUsageError, PeerFailure, TransportError

from ._lane import Inbox, Memory, Outbox
from ._meet import give, meet, take

_Failure = tuple[str, int, int | None, int | None, str | None]  # reason, rank, stage, microbatch, action
_LONGEST_REASON = 4000  # characters, so that a last word fits into a socket at once
_LONGEST_WORD = 1 << 16


class SharedMemoryTransport:
    """Carries tensors between processes of one host.

    Implements :class:`stepwell_p2p.Transport`: messages match by op, and a send is done when it is posted. One thread of each
    rank posts and waits; any thread may abort or close.

    A large value that was asked for without a buffer stays in the shared memory into which its sender copied it, and is the
    receiver's until nothing uses it any more.

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
        self._arrived: dict[bytes, deque[_Arrival]] = {}  # by key, in order
        self._wanted: dict[bytes, deque[_Ticket]] = {}
        self._failure: _Failure | None = None
        self._silent = {rank}  # ranks that write nothing while this one waits: itself, and those that have closed
        self._closed = False
        self._turn = threading.Lock()  # of whoever uses descriptors, which may not be closed meanwhile
        self._ending = threading.Lock()  # of whoever aborts or closes
        self._sockets: dict[int, socket.socket] = {}
        self._outboxes: dict[int, Outbox] = {}
        self._readers: dict[int, Callable[[], object]] = {}  # by descriptor: what to do when there is something to read
        with contextlib.ExitStack() as opened:
            self._poll = opened.enter_context(select.epoll())
            try:
                self._alarm = _owned(os.eventfd(0), opened)  # ends a wait of this rank
                self._watch(self._alarm, functools.partial(os.eventfd_read, self._alarm))
                self._connect(Path(directory), opened)
            except OSError as error:
                raise TransportError(
                    f"rank {rank} of {size} did not meet the others in {timeout:g} s: {error}"
                ) from error
            self._opened = opened.pop_all()
        _of_this_process.add(self)

    @classmethod
    def from_environment(cls, *, timeout: float = 300.0) -> SharedMemoryTransport:
        """For processes that torchrun started on one host."""
        names = ("MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
        run = "-".join(["stepwell-shm", *(os.environ.get(name, "none") for name in names)])
        directory = Path(tempfile.gettempdir(), run)
        return cls(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), directory, timeout=timeout)

    def post(self, batch: Sequence[Send | Recv]) -> _Handle:
        """Write what is sent into shared memory; remember what is received."""
        with self._turn:
            self._progress(0)
            self._check_alive()
            keys = [self._key_of(item) for item in batch]
            values = [_plain(item) if isinstance(item, Send) else None for item in batch]  # refuse all or nothing
            tickets, written = [], set()
            for item, key, value in zip(batch, keys, values, strict=True):
                if isinstance(item, Recv):
                    tickets.append(self._expect(key, item))
                elif value is not None:
                    outbox = self._outboxes[item.op.edge.destination]
                    outbox.write(key, _look_of(value.shape, value.dtype), value)
                    written.add(outbox)
            for outbox in written:
                outbox.ring()
        return _Handle(self, tickets)

    def abort(
        self, reason: str, *, stage: int | None = None, microbatch: int | None = None, action: str | None = None
    ) -> None:
        """Tell every rank. The first reason that a rank hears of is the one that it raises."""
        with self._ending:
            if self._failure is None and not self._closed:
                self._failure = (reason[:_LONGEST_REASON], self.rank, stage, microbatch, action)
                self._say(self._failure)

    def close(self) -> None:
        """Take leave of the other ranks. They can still read what was written for them, and received values stay."""
        with self._ending:
            if self._closed:
                return
            self._closed = True
            self._say(self._failure)  # for those that have not heard of it
        with self._turn:
            self._opened.close()
            self._arrived.clear()
            self._wanted.clear()

    # ---- meeting

    def _connect(self, directory: Path, opened: contextlib.ExitStack) -> None:
        deadline = time.monotonic() + self._timeout
        self._sockets = meet(self.rank, self.size, directory, deadline)
        for sock in self._sockets.values():
            opened.enter_context(sock)
        for other in range(self.size):  # messages to itself go the same way
            file = _owned(os.memfd_create("stepwell-transport-shm"), opened)
            self._outboxes[other] = Outbox(file, _owned(os.eventfd(0), opened))
        for other, sock in self._sockets.items():
            give(sock, [self._outboxes[other].file, self._outboxes[other].bell])
        own = self._outboxes[self.rank]
        self._read_from([os.dup(own.file), os.dup(own.bell)], opened)
        for other, sock in self._sockets.items():
            files = take(sock, 2, deadline)
            if not files:
                raise ConnectionError(f"rank {other} ended meanwhile")
            self._read_from(files, opened)
            self._watch(sock.fileno(), functools.partial(self._hear, other))

    def _read_from(self, files: Sequence[int], opened: contextlib.ExitStack) -> None:
        inbox = Inbox(*(_owned(file, opened) for file in files))
        self._watch(inbox.bell, functools.partial(self._receive, inbox))

    def _watch(self, file: int, reader: Callable[[], object]) -> None:
        self._poll.register(file, select.EPOLLIN)
        self._readers[file] = reader

    # ---- what others write and say

    def _progress(self, seconds: float) -> None:
        """Read all that is there; sleep for so long while there is nothing. In this thread's turn."""
        if not self._closed:
            for file, _ in self._poll.poll(seconds):
                self._readers[file]()

    def _receive(self, inbox: Inbox) -> None:
        for key, look, memory in inbox.read():
            arrival = _Arrival(look, memory)
            if wanted := self._wanted.get(key):
                wanted.popleft().arrival = arrival  # the first that came to the first that was asked for
                if not wanted:
                    del self._wanted[key]
            else:
                self._arrived.setdefault(key, deque()).append(arrival)

    def _expect(self, key: bytes, recv: Recv) -> _Ticket:
        ticket = _Ticket(recv)
        if arrived := self._arrived.get(key):
            ticket.arrival = arrived.popleft()
            if not arrived:
                del self._arrived[key]
        else:
            self._wanted.setdefault(key, deque()).append(ticket)
        return ticket

    def _say(self, failure: _Failure | None) -> None:
        """This rank's last word: why it fails, or that it does not."""
        word = encode(failure)
        for sock in self._sockets.values():
            with contextlib.suppress(OSError):  # has ended, or has had this rank's last word
                sock.send(word)
                sock.shutdown(socket.SHUT_WR)
        os.eventfd_write(self._alarm, 1)

    def _hear(self, other: int) -> None:
        """Another rank's last word; a rank that ends without one was killed."""
        sock = self._sockets[other]
        self._poll.unregister(sock)
        try:
            failure = decode(sock.recv(_LONGEST_WORD))
        except (OSError, MetadataError):
            failure = ("its process ended", other, None, None, None)
        if failure is None:
            self._silent.add(other)
        with self._ending:
            self._failure = self._failure or failure

    def _check_alive(self) -> None:
        if self._closed:
            raise P2PUsageError(f"rank {self.rank} uses a transport that it has closed")
        if self._failure is not None:
            reason, rank, stage, microbatch, action = self._failure
            raise PeerFailure(reason, rank=rank, stage=stage, microbatch=microbatch, action=action)

    # ---- one receive

    def _bring(self, ticket: _Ticket) -> None:
        """Wait until its value is here."""
        self._check_alive()
        deadline = time.monotonic() + self._timeout
        while ticket.arrival is None:
            op = ticket.recv.op
            silent = op.edge.source in self._silent
            left = 0.0 if silent else max(0.0, deadline - time.monotonic())
            with self._turn:
                self._progress(left)
            self._check_alive()
            if ticket.arrival is None and not left:
                if not silent:
                    raise TransportError(f"rank {self.rank} waited {self._timeout:g} s for {op}")
                why = "this rank has not sent it before" if op.edge.source == self.rank else "its sender has closed"
                raise TransportError(f"{op} will never come: {why}")

    def _take(self, ticket: _Ticket) -> torch.Tensor:
        """Its value, in the layout that was asked for."""
        recv, arrival = ticket.recv, ticket.arrival
        assert arrival is not None
        meta = recv.meta
        if arrival.look != _look_of(meta.shape, meta.dtype):
            shape, dtype = decode(arrival.look)
            raise TransportError(
                f"{recv.op}: expected {meta.dtype} of shape {meta.shape}, but rank {recv.op.peer} sent {dtype} of shape {shape}"
            )
        if not len(arrival.memory):
            value = torch.empty(meta.shape, dtype=meta.dtype)
        else:
            value = torch.frombuffer(arrival.memory, dtype=meta.dtype).view(meta.shape)
        if recv.buffer is not None:
            return recv.buffer.copy_(value)
        if value.stride() != meta.stride:
            return meta.without_grad().empty("cpu").copy_(value)
        return value

    def _key_of(self, item: Send | Recv) -> bytes:
        """What the messages of an op are known by.

        Raises:
            P2PUsageError: this rank cannot post it.
        """
        op = item.op
        if op.kind.is_send is not isinstance(item, Send):
            raise P2PUsageError(f"{type(item).__name__} with an op of the other kind: {op}")
        if not (0 <= op.edge.source < self.size and 0 <= op.edge.destination < self.size):
            raise P2PUsageError(f"{op} names a rank outside 0 to {self.size - 1}")
        if op.rank != self.rank:
            raise P2PUsageError(f"{op} is rank {op.rank}'s to post, and this is rank {self.rank}")
        if isinstance(item, Recv) and item.buffer is not None:
            look = (tuple(item.buffer.shape), item.buffer.dtype, item.buffer.requires_grad)
            if look != (item.meta.shape, item.meta.dtype, False):
                raise P2PUsageError(f"{op}: a buffer needs the value's shape and dtype, {item.meta}, and no grad")
        return _encode_op(op)


class _Arrival:
    """A value that has come."""

    __slots__ = ("look", "memory")

    def __init__(self, look: bytes, memory: Memory) -> None:
        self.look = look
        self.memory = memory


class _Ticket:
    """A receive that was posted."""

    __slots__ = ("arrival", "recv")

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
            for ticket in self._tickets:
                self._transport._bring(ticket)
            self._result = tuple([self._transport._take(ticket) for ticket in self._tickets])
            self._tickets = ()
        return self._result


def _plain(send: Send) -> torch.Tensor:
    """The value in row-major host memory: its own, or a copy.

    Raises:
        P2PUsageError: it is no plain tensor.
    """
    tensor = send.tensor
    is_memory = type(tensor) is torch.Tensor and tensor.layout is torch.strided and tensor.device.type == "cpu"
    if is_memory and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        return tensor
    try:
        return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())
    except (RuntimeError, TypeError) as error:
        raise P2PUsageError(
            f"{send.op}: only plain tensors can be sent, not {type(tensor).__qualname__}: {error}"
        ) from error


_of_this_process: weakref.WeakSet[SharedMemoryTransport] = weakref.WeakSet()


def _let_go_after_fork() -> None:
    """A forked process, such as a loader of data, keeps no socket open: it would look as if its rank still lived."""
    for transport in _of_this_process:
        for sock in transport._sockets.values():
            sock.close()


os.register_at_fork(after_in_child=_let_go_after_fork)


def _owned(file: int, opened: contextlib.ExitStack) -> int:
    opened.callback(os.close, file)
    return file


@functools.lru_cache(1 << 16)
def _encode_op(op: Op) -> bytes:
    return encode(op.message)


@functools.lru_cache(1 << 12)
def _look_of(shape: Sequence[int], dtype: torch.dtype) -> bytes:
    """What the two ends compare."""
    return encode((tuple(shape), dtype))
