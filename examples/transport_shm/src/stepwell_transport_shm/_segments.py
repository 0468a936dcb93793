"""Pieces of shared memory: nameless files that two processes map.

A file without a name lives as long as somebody has it open, so a rank that is killed leaves nothing behind.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from pathlib import Path

import torch

_SMALLEST = 1 << 16


class Segment:
    """A mapped file.

    Args:
        number: its number among those of its owner for one peer.
        descriptor: the file; stays open, and the map stays without it.
        size: in bytes.

    Attributes:
        number: its number among those of its owner for one peer.
        memory: all of it, as bytes.
    """

    def __init__(self, number: int, descriptor: int, size: int) -> None:
        self.number = number
        self.memory = torch.frombuffer(mmap.mmap(descriptor, size), dtype=torch.uint8)


class SegmentPool:
    """The segments through which one rank sends to one peer; used again when the peer has emptied them."""

    def __init__(self) -> None:
        self._free: dict[int, list[Segment]] = {}
        self._used: dict[int, Segment] = {}
        self._count = 0

    def take(self, nbytes: int) -> tuple[Segment, int | None]:
        """A segment with room, and, where it is new, the descriptor that the peer needs to map it (to be closed)."""
        size = max(_SMALLEST, 1 << (nbytes - 1).bit_length())
        descriptor = None
        if free := self._free.get(size):
            segment = free.pop()
        else:
            descriptor = _nameless_file(size)
            segment = Segment(self._count, descriptor, size)
            self._count += 1
        self._used[segment.number] = segment
        return segment, descriptor

    def give(self, number: int) -> None:
        """The peer has emptied it."""
        segment = self._used.pop(number)
        self._free.setdefault(segment.memory.numel(), []).append(segment)


def _nameless_file(size: int) -> int:
    in_memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryFile(dir=in_memory) as file:
        file.truncate(size)
        return os.dup(file.fileno())
