"""A stream socket between each two ranks of one host; frames in both directions, file descriptors along with them.

The sockets carry what is small: which message comes, where its bytes are, that a rank gives up or leaves. A socket that ends
without a goodbye means that its rank died.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

_LENGTH = struct.Struct("<I")
_RANK = struct.Struct("<I")
_MOST_DESCRIPTORS = 16  # that one read can bring


class Peer:
    """This rank's end of the socket to one other rank."""

    def __init__(self, rank: int, sock: socket.socket) -> None:
        self.rank = rank
        self.sock = sock
        self.descriptors: deque[int] = deque()  # received, not yet asked for
        self.open = True
        self._unsent: deque[tuple[memoryview, int | None]] = deque()
        self._unread = bytearray()
        sock.setblocking(False)

    @property
    def has_unsent(self) -> bool:
        """Whether frames wait for room in the socket."""
        return bool(self._unsent)

    def put(self, frame: bytes, descriptor: int | None = None) -> None:
        """Queue a frame, with a descriptor that is ours to close, and send as much as goes without waiting."""
        self._unsent.append((memoryview(_LENGTH.pack(len(frame)) + frame), descriptor))
        self.flush()

    def flush(self) -> None:
        """Send queued frames until the socket is full. A peer that is gone takes them all."""
        if not self.open:
            self._drop_unsent()
        while self._unsent:
            data, descriptor = self._unsent[0]
            try:
                sent = socket.send_fds(self.sock, [data], [] if descriptor is None else [descriptor])
            except BlockingIOError:
                return
            except OSError:  # the peer is gone; reading will tell
                self._drop_unsent()
                return
            self._unsent.popleft()
            if descriptor is not None:
                os.close(descriptor)  # the peer has its own now
            if sent < len(data):
                self._unsent.appendleft((data[sent:], None))

    def read(self) -> Iterator[bytes]:
        """The frames that have come; afterwards ``open`` says whether more may."""
        while self.open:
            try:
                data, descriptors, _, _ = socket.recv_fds(self.sock, 1 << 16, _MOST_DESCRIPTORS)
            except BlockingIOError:
                break
            except OSError:
                data, descriptors = b"", []
            self.descriptors.extend(descriptors)
            self._unread += data
            self.open = bool(data)
        while len(self._unread) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._unread)
            end = _LENGTH.size + length
            if len(self._unread) < end:
                break
            frame = bytes(self._unread[_LENGTH.size : end])
            del self._unread[:end]
            yield frame

    def close(self) -> None:
        """Close everything that is open."""
        self.sock.close()
        self._drop_unsent()
        while self.descriptors:
            os.close(self.descriptors.popleft())

    def _drop_unsent(self) -> None:
        for _, descriptor in self._unsent:
            if descriptor is not None:
                os.close(descriptor)
        self._unsent.clear()


def connect_all(rank: int, size: int, directory: Path, timeout: float) -> dict[int, Peer]:
    """Meet every other rank in a directory that all of them name: higher ranks call lower ones.

    Raises:
        TimeoutError: some did not come; the message names them.
    """
    deadline = time.monotonic() + timeout
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = directory / str(rank)
    peers: dict[int, Peer] = {}
    with socket.socket(socket.AF_UNIX) as listener:
        path.unlink(missing_ok=True)
        listener.bind(str(path))
        listener.listen(size)
        try:
            for other in range(rank):
                peers[other] = Peer(other, _call(directory / str(other), rank, deadline))
            while len(peers) < size - 1:
                listener.settimeout(max(0.001, deadline - time.monotonic()))
                sock, _ = listener.accept()
                sock.settimeout(max(0.001, deadline - time.monotonic()))
                other = _RANK.unpack(sock.recv(_RANK.size, socket.MSG_WAITALL))[0]
                peers[other] = Peer(other, sock)
        except TimeoutError:
            absent = ", ".join(str(other) for other in range(size) if other not in peers and other != rank)
            raise TimeoutError(f"rank {rank} waited {timeout:g} s for rank {absent} in {directory}") from None
        finally:
            path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # the last one removes it; for the others it is not empty
        directory.rmdir()
    return peers


def _call(path: Path, rank: int, deadline: float) -> socket.socket:
    while True:
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.connect(str(path))
            sock.sendall(_RANK.pack(rank))
            return sock
        except (FileNotFoundError, ConnectionRefusedError):
            sock.close()
            if time.monotonic() > deadline:
                raise TimeoutError from None
            time.sleep(0.01)
