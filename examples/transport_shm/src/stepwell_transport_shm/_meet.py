"""How the ranks of one host meet: by sockets in a folder that all of them name.

The sockets carry the descriptors of what two ranks share. They stay open, for one that ends says that its rank did.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from collections.abc import Sequence
from pathlib import Path

_RANK = struct.Struct("<I")
_PAUSE = 0.01  # seconds between two calls of a rank that is not there yet


def meet(rank: int, size: int, directory: Path, deadline: float) -> dict[int, socket.socket]:
    """A stream socket to every other rank; higher ranks call lower ones.

    Args:
        rank: this rank.
        size: how many there are.
        directory: where they meet; the first one makes it, the last one removes it.
        deadline: until when, by ``time.monotonic()``.

    Raises:
        TimeoutError: some did not come; the message names them.
        OSError: there can be no sockets in this folder.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = directory / str(rank)
    path.unlink(missing_ok=True)  # of a run that was killed
    sockets: dict[int, socket.socket] = {}
    with contextlib.ExitStack() as opened, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(size)
        try:
            for other in range(rank):
                sockets[other] = opened.enter_context(_call(directory / str(other), rank, deadline))
            while len(sockets) < size - 1:
                other, sock = _answer(listener, deadline)
                sockets[other] = opened.enter_context(sock)
        except TimeoutError:
            others = [other for other in range(size) if other != rank and other not in sockets]
            absent = [other for other in others if not (directory / str(other)).exists()]
            names = ", ".join(map(str, absent or others))
            raise TimeoutError(f"rank {names} did not come to {directory}") from None
        finally:
            path.unlink(missing_ok=True)
        opened.pop_all()
    with contextlib.suppress(OSError):  # for all but the last one it is not empty
        directory.rmdir()
    return sockets


def give(sock: socket.socket, files: Sequence[int]) -> None:
    """Send descriptors to the other rank."""
    with contextlib.suppress(ConnectionError):  # it has ended: who takes from it will know
        socket.send_fds(sock, [b"."], files)


def take(sock: socket.socket, count: int, deadline: float) -> Sequence[int]:
    """Descriptors from the other rank; none if it ended, or did not give them in time."""
    sock.settimeout(_left(deadline))
    with contextlib.suppress(ConnectionError, TimeoutError):
        _, files, _, _ = socket.recv_fds(sock, 1, count, socket.MSG_CMSG_CLOEXEC)
        sock.setblocking(False)
        return files
    return ()


def _call(path: Path, rank: int, deadline: float) -> socket.socket:
    """Try until the other rank is there."""
    while True:
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.connect(str(path))
            sock.sendall(_RANK.pack(rank))
            return sock
        except (FileNotFoundError, ConnectionError):
            sock.close()
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(_PAUSE)


def _answer(listener: socket.socket, deadline: float) -> tuple[int, socket.socket]:
    """The next rank that calls."""
    while True:
        listener.settimeout(_left(deadline))
        sock, _ = listener.accept()
        sock.settimeout(_left(deadline))
        with contextlib.suppress(ConnectionError):
            if rank := sock.recv(_RANK.size, socket.MSG_WAITALL):
                return _RANK.unpack(rank)[0], sock
        sock.close()  # that one has gone already


def _left(deadline: float) -> float:
    return max(0.001, deadline - time.monotonic())
