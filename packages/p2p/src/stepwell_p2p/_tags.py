"""A message's number on backends that match by tag."""

from __future__ import annotations

import zlib

from ._op import MEETING, Op
from .exceptions import P2PUsageError

# 31 bits, the positive numbers of a C int, from the lowest:
#   4 check | 6 index | 12 microbatch, from MEETING on | 8 stage | 1 direction
# Source and destination need no room: a backend matches within one pair of ranks.
CHECK_BITS = 4
_INDICES = 1 << 6
_MICROBATCHES = 1 << 12
_STAGES = 1 << 8


def tag_of(op: Op) -> int:
    """The tag of an op whose check bits are still zero: the same at both ends, another for every other message of a pair.

    Raises:
        P2PUsageError: a number is too large for its field.
    """
    microbatch = op.microbatch - MEETING
    _fits("stage", op.stage, 0, _STAGES)
    _fits("microbatch", op.microbatch, MEETING, _MICROBATCHES)
    _fits("value index", op.index, 0, _INDICES)
    number = int(op.kind.is_forward)
    number = number * _STAGES + op.stage
    number = number * _MICROBATCHES + microbatch
    number = number * _INDICES + op.index
    return number << CHECK_BITS


def check_of(shape: tuple[int, ...], dtype: object) -> int:
    """Four bits of a value's shape and dtype.

    Backends that match by tag do not compare sizes: a message that is too short would be delivered in part, one that is too long
    ends the process. With these bits in the tag, ends that disagree (all but one in sixteen) do not meet, and the stall that
    follows is explained by comparing notes.
    """
    return zlib.crc32(f"{dtype}{tuple(shape)}".encode()) & ((1 << CHECK_BITS) - 1)


def _fits(what: str, value: int, first: int, count: int) -> None:
    if not first <= value < first + count:
        raise P2PUsageError(
            f"{what} {value} has no tag on this backend, which carries {first} to {first + count - 1};"
            " send several values as one message, or accumulate over several steps"
        )
