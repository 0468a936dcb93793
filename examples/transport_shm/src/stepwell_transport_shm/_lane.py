"""One direction between two ranks: a file in memory that one of them writes and the other reads, and a counter.

The file has no name, so a rank that is killed leaves nothing behind, and grows as needed, so nobody ever waits for room. It is
used in segments::

    a page      records, one behind the other; the last one says which page follows
    a value     that is too large for a record; the receiver has it where it lies

Each segment begins with a word that the sender sets when it takes the segment, and that the receiver clears when it needs it
no longer. Then the sender takes it again, so the file is as large as what was under way at once.

The counter is an eventfd: the sender adds the number of records that it wrote, the receiver reads how many there are to read, or
sleeps until there are some. The kernel sees to it that what was written before is read as it was written, on any processor.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
import weakref
from collections import deque
from collections.abc import Iterator
from typing import TypeAlias

import torch

from stepwell_p2p.exceptions import TransportError

_INLINE = 1 << 14  # bytes up to which a value lies in its record: a copy costs less than a segment
_PAGE = 1 << 18  # bytes of the smallest segment
_HEAD = mmap.ALLOCATIONGRANULARITY  # bytes before those of a segment, for its word; so that every segment can be mapped
_RECORD = struct.Struct("<IIQQ")  # bytes of key, look and value; where a large value, or the next page, is

Memory: TypeAlias = bytearray | ctypes.Array[ctypes.c_char]


class Outbox:
    """The sender's end.

    Args:
        file: the descriptor of the memory.
        bell: the descriptor of the counter.
    """

    def __init__(self, file: int, bell: int) -> None:
        self.file = file
        self.bell = bell
        self._length = 0
        self._segments: dict[int, deque[_Segment]] = {}
        self._page = self._take(_PAGE)
        self._at = _HEAD
        self._written = 0

    def write(self, key: bytes, look: bytes, tensor: torch.Tensor) -> None:
        """Write a message, which the receiver will find after :meth:`ring`.

        Args:
            key: which message it is; not empty.
            look: what its value looks like.
            tensor: the value, contiguous.

        Raises:
            TransportError: there is no more memory.
        """
        nbytes = tensor.nbytes
        segment = self._take(nbytes) if nbytes > _INLINE else None
        record = _RECORD.pack(len(key), len(look), nbytes, 0 if segment is None else segment.offset) + key + look
        inline = nbytes if segment is None else 0
        if self._at + len(record) + inline > _HEAD + _PAGE - _RECORD.size:  # what is left is for a last record
            page = self._take(_PAGE)
            _RECORD.pack_into(self._page.memory, self._at, 0, 0, 0, page.offset)
            self._page, self._at = page, _HEAD
        start = self._at + len(record)
        self._page.memory[self._at : start] = record
        place = self._page.address + start if segment is None else segment.address + _HEAD
        ctypes.memmove(place, tensor.data_ptr(), nbytes)
        self._at = start + inline
        self._written += 1

    def ring(self) -> None:
        """Let the receiver know of what was written."""
        os.eventfd_write(self.bell, self._written)
        self._written = 0

    def _take(self, nbytes: int) -> _Segment:
        size = _size_for(nbytes)
        segments = self._segments.setdefault(size, deque())
        for _ in range(len(segments)):  # from the one that was taken first
            segments.rotate(-1)
            if not segments[-1].taken:
                break
        else:
            segments.append(_Segment(self.file, self._length, size))
            self._length += _HEAD + size
        segments[-1].take()
        return segments[-1]


class Inbox:
    """The receiver's end.

    Args:
        file: the descriptor of the memory.
        bell: the descriptor of the counter, which can be read when there are records.
    """

    def __init__(self, file: int, bell: int) -> None:
        self.bell = bell
        self._file = file
        self._segments: dict[int, _Segment] = {}
        self._page = self._segment(0, _PAGE)
        self._at = _HEAD

    def read(self) -> Iterator[tuple[bytes, bytes, Memory]]:
        """The messages that the counter told of: key, look, and the memory of the value, which belongs to the caller.

        Raises:
            TransportError: there is no more memory.
        """
        for _ in range(os.eventfd_read(self.bell)):
            record = _RECORD.unpack_from(self._page.memory, self._at)
            if not record[0]:  # the page ends
                self._page.free()
                self._page, self._at = self._segment(record[3], _PAGE), _HEAD
                record = _RECORD.unpack_from(self._page.memory, self._at)
            key_size, look_size, nbytes, place = record
            memory, start = self._page.memory, self._at + _RECORD.size
            middle, end = start + key_size, start + key_size + look_size
            key, look = memory[start:middle], memory[middle:end]
            if nbytes > _INLINE:
                self._at = end
                yield key, look, self._segment(place, nbytes).lend(nbytes)
            else:
                self._at = end + nbytes
                yield key, look, bytearray(memory[end : self._at])

    def _segment(self, offset: int, nbytes: int) -> _Segment:
        segment = self._segments.get(offset)
        if segment is None:
            segment = self._segments[offset] = _Segment(self._file, offset, _size_for(nbytes))
        return segment


class _Segment:
    """A piece of the file, as one of the two ranks maps it."""

    def __init__(self, file: int, offset: int, size: int) -> None:
        self.offset = offset
        try:
            if os.fstat(file).st_size < offset + _HEAD + size:
                os.ftruncate(file, offset + _HEAD + size)
            self.memory = mmap.mmap(file, _HEAD + size, offset=offset)
        except OSError as error:
            raise TransportError(f"there is no more memory that ranks can share: {error}") from error
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self._word = memoryview(self.memory)[:8].cast("Q")
        self._lent: weakref.ref[object] | None = None

    @property
    def taken(self) -> bool:
        return bool(self._word[0])

    def take(self) -> None:
        self._word[0] = 1

    def free(self, _: object = None) -> None:
        self._word[0] = 0

    def lend(self, nbytes: int) -> ctypes.Array[ctypes.c_char]:
        """Its bytes. It is free when nobody uses them any more: no tensor, no view of it, no graph."""
        lent = (ctypes.c_char * nbytes).from_buffer(self.memory, _HEAD)
        self._lent = weakref.ref(lent, self.free)
        return lent


def _size_for(nbytes: int) -> int:
    """A power of two: few sizes, so that segments are used again; memory that is not touched costs nothing."""
    return max(_PAGE, 1 << (nbytes - 1).bit_length())
