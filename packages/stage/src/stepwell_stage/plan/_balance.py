"""Cuts a row of costs into contiguous parts, as evenly as can be.

Two passes. The first finds the least maximum of any part: between a limit that is too little and one that is enough it tries the
one halfway, by filling parts greedily; the largest part of a filling is the next that is enough. The second, among all cuts that
keep to this limit, takes the one with the least sum of squares, so that parts which do not decide the maximum are even too; where
costs leave a choice (layers that cost nothing), it evens out the number of entries, and then cuts early.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import isfinite

from ..exceptions import StageUsageError


def balance(costs: Sequence[float], parts: int) -> tuple[int, ...]:
    """Where each part begins, so that the most expensive part is as cheap as possible.

    Example::

        balance([1, 1, 1, 1, 8, 1], 3)   # (0, 4, 5): costs 4, 8, 1

    Args:
        costs: what each entry costs, at least 0; any unit.
        parts: how many parts, none of them empty.

    Returns:
        The first entry of each part; the first number is 0.

    Raises:
        StageUsageError: fewer entries than parts, no part, or a cost that is negative or not finite.

    Source: the linear partition problem; exact.
    """
    if parts < 1:
        raise StageUsageError(f"a model is cut into at least 1 part, got {parts}")
    if len(costs) < parts:
        raise StageUsageError(f"{len(costs)} layers cannot be cut into {parts} parts; use fewer parts")
    for index, cost in enumerate(costs):
        if not isfinite(cost) or cost < 0:
            raise StageUsageError(f"costs must be finite and at least 0, but that of entry {index} is {cost}")
    sums = [0, *accumulate(costs)]
    return _even(sums, parts, _least_maximum(sums, parts))


def check_starts(starts: Sequence[int], entries: int) -> tuple[int, ...]:
    """Given first entries of each part, if they make contiguous parts of which none is empty.

    Args:
        starts: the first entry of each part; a leading 0 may be left out.
        entries: how many entries there are.

    Raises:
        StageUsageError: they do not ascend, or lie outside.
    """
    found = tuple(starts) if starts and starts[0] == 0 else (0, *starts)
    if list(found) != sorted(set(found)) or found[-1] >= entries or found[0] < 0:
        raise StageUsageError(f"boundaries must ascend within 1 to {entries - 1}, got {list(starts)}")
    return found


def _least_maximum(sums: Sequence[float], parts: int) -> float:
    """The least limit under which the entries fit into ``parts`` parts."""
    low: float = 0  # too little, unless nothing costs anything
    high = sums[-1]  # enough
    whole = isinstance(high, int)  # then so is every sum, and may be beyond what floats hold exactly
    # A float lies halfway of fractions too, for floats come to an end.
    while low < (middle := (low + high) // 2 if whole else float(low + high) / 2) < high:
        found = _largest(sums, parts, middle)
        if found is None:
            low = middle
        else:
            high = found
    return high


def _largest(sums: Sequence[float], parts: int, limit: float) -> float | None:
    """The largest part, if parts are filled one after the other under the limit; None if they are too few."""
    used, start = 1, 0
    largest: float = 0
    for end in range(1, len(sums)):
        if sums[end] - sums[start] > limit:
            used, start = used + 1, end - 1
            if used > parts or sums[end] - sums[start] > limit:
                return None
        largest = max(largest, sums[end] - sums[start])
    return largest


def _even(sums: Sequence[float], parts: int, limit: float) -> tuple[int, ...]:
    """Of the cuts under the limit, that with the least sum of squares, of costs and then of numbers of entries."""
    entries = len(sums) - 1
    # best[end]: squares of costs, squares of counts, and where the last part starts, of the first entries cut into so many parts.
    best: list[tuple[float, int] | None] = [(0, 0), *[None] * entries]
    begins: list[list[int]] = []
    for _ in range(parts):
        following: list[tuple[float, int] | None] = [None] * (entries + 1)
        begin = [0] * (entries + 1)
        for end in range(1, entries + 1):
            for start in range(end - 1, -1, -1):
                cost = sums[end] - sums[start]
                if cost > limit:
                    break
                before = best[start]
                if before is None:
                    continue
                total = (before[0] + cost * cost, before[1] + (end - start) ** 2)
                known = following[end]
                if known is None or total <= known:
                    following[end], begin[end] = total, start
        best = following
        begins.append(begin)
    starts = []
    end = entries
    for begin in reversed(begins):
        end = begin[end]
        starts.append(end)
    return tuple(reversed(starts))
