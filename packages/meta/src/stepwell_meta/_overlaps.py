"""Which tensors have memory in common.

A tensor's bytes begin at its first address plus any sum of whole steps, of which each dim has ``size - 1`` of its stride. Two
tensors meet where the difference of two such sums, of which the one's steps can be counted from its end, is within an interval:

    start + sum(i * stride) + u == start' + sum(j * stride') + v       with u, v < itemsize, itemsize'

So the question is whether some of the steps of both, taken together by stride, add up to a number within bounds. Steps no longer
than the interval only widen it, as those of a contiguous block do. The others are tried from the longest down, where most layouts
leave one or two counts each, since shorter steps seldom add up to a longer one. Nothing is allocated, however far tensors reach.

Strides can be made up that leave millions. How many there are at most is known beforehand, and where it takes less time to write
the bytes of the one into a mask, and to look up those of the other, that is done.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence

import torch

from ._compat import FakeTensor
from ._extract import to_local_if_dtensor

__all__ = ["overlaps"]

_START = operator.itemgetter(0)
_FEW = 1000  # tries, which always take less time than a mask
_BYTES_A_TRY = 256  # of a mask, in the time of one


def overlaps(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Which tensors have a byte of memory in common with others: the number of each, and of one of those.

    Exact for any strides and dtypes, and quick where tensors lie apart. DTensors stand for their local parts. Tensors without
    elements have no memory, nor have those on the meta device, fake, sparse and nested ones, and results that are on their way.

    Args:
        tensors: on any devices.

    Example:
        >>> x = torch.zeros(4, 6)
        >>> overlaps([x[:, :3], x[:, 3:], x[2]])
        {0: 2, 2: 0, 1: 2}
    """
    spans = []
    for number, tensor in enumerate(tensors):
        local = tensor if type(tensor) is torch.Tensor else to_local_if_dtensor(tensor).detach()
        start = local.data_ptr() if _may_have_memory(local) else 0
        if start:
            spans.append((start, number, local))
    spans.sort(key=_START)
    found: dict[int, int] = {}
    for at, (start, number, local) in enumerate(spans):
        end = start + _reach(local)
        for other_start, other, candidate in spans[at + 1 :]:
            if other_start >= end:
                break
            if not (number in found and other in found) and _meet(local, candidate, end - other_start):
                found.setdefault(number, other)
                found.setdefault(other, number)
    return found


def _may_have_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor may be asked for its address."""
    return not (
        not tensor.numel()
        or tensor.is_meta
        or tensor.is_nested
        or tensor.layout is not torch.strided
        or isinstance(tensor, FakeTensor)
    )


def _reach(tensor: torch.Tensor) -> int:
    """Bytes from a tensor's first to the end of its last element."""
    if tensor.is_contiguous():
        return tensor.nbytes
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (steps + 1) * tensor.itemsize


def _meet(one: torch.Tensor, other: torch.Tensor, behind: int) -> bool:
    """Whether two tensors have a byte in common, the end of the first of which lies so many bytes behind the other's start."""
    if one.device != other.device:
        return False
    if one.data_ptr() == other.data_ptr():
        return True
    counts: dict[int, int] = {}
    for tensor in (one, other):
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
            if size > 1 and stride:
                step = stride * tensor.itemsize
                counts[step] = counts.get(step, 0) + size - 1
    high = behind - 1
    low = high - (one.itemsize + other.itemsize - 2)
    steps = sorted(counts.items())
    while steps and steps[0][0] <= high - low + 1:
        step, most = steps.pop(0)
        low -= most * step
    tries, rest = 1, 0
    for step, most in steps:
        tries *= min(most, (rest + high - low) // step) + 1
        rest += step * most
    if tries > _FEW and tries > (span := _span(one, other)) // _BYTES_A_TRY:
        return _meet_in_mask(one, other, span)
    return _adds_up(steps, low, high)


def _span(one: torch.Tensor, other: torch.Tensor) -> int:
    """Bytes from where the first of two begins to where both have ended."""
    return max(_reach(one), other.data_ptr() - one.data_ptr() + _reach(other))


def _meet_in_mask(one: torch.Tensor, other: torch.Tensor, span: int) -> bool:
    taken = torch.zeros(span, dtype=torch.bool)

    def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
        size, strides = tensor.itemsize, tensor.stride()
        shape = [count if stride else 1 for count, stride in zip(tensor.shape, strides, strict=True)]
        offset = tensor.data_ptr() - one.data_ptr()
        return taken.as_strided((*shape, size), (*(size * stride for stride in strides), 1), offset)

    bytes_of(one).fill_(True)
    return bool(bytes_of(other).any())


def _adds_up(steps: Sequence[tuple[int, int]], low: int, high: int) -> bool:
    """Whether a sum of steps, each taken from 0 to so many times, is within bounds."""
    if low <= 0 <= high:
        return True
    if not steps or high // (divisor := math.gcd(*(step for step, _ in steps))) * divisor < low:
        return False
    *shorter, (step, most) = steps
    rest = sum(step * most for step, most in shorter)
    counts = range(max(0, -((rest - low) // step)), min(most, high // step) + 1)
    return any(_adds_up(shorter, low - count * step, high - count * step) for count in counts)
