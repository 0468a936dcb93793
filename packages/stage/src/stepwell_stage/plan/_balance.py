"""Cuts a row of costs into contiguous parts, as evenly as can be.

Two passes. The first finds the least maximum of any part: between a limit that is too little and one that is enough it tries the
one halfway, by filling parts greedily; the largest part of a filling is the next that is enough. The second, among all cuts that
keep to this limit, takes the one with the least sum of squares, so that parts which do not decide the maximum are even too; where
costs leave a choice (layers that cost nothing), it evens out the number of entries, and then cuts early.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate
from math import isfinite, lcm
from numbers import Rational

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
    sums = [0, *accumulate(_scaled(costs))]
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


def _scaled(costs: Sequence[float]) -> list[int]:
    """The costs as whole numbers of one small unit, exactly: sums of floats would differ by their rounding where costs do not."""
    exact = [Fraction(cost if isinstance(cost, Rational) else float(cost)) for cost in costs]
    unit = lcm(*(cost.denominator for cost in exact))
    return [cost.numerator * (unit // cost.denominator) for cost in exact]


def _least_maximum(sums: Sequence[int], parts: int) -> int:
    """The least limit under which the entries fit into ``parts`` parts."""
    low = -1  # too little
    high = sums[-1]  # enough
    while low < (middle := (low + high) // 2):
        found = _largest(sums, parts, middle)
        if found is None:
            low = middle
        else:
            high = found
    return high


def _largest(sums: Sequence[int], parts: int, limit: int) -> int | None:
    """The largest part, if parts are filled one after the other under the limit; None if they are too few."""
    start = largest = 0
    for _ in range(parts):
        end = bisect_right(sums, sums[start] + limit) - 1
        largest = max(largest, sums[end] - sums[start])
        start = end
    return largest if start + 1 == len(sums) else None


def _even(sums: Sequence[int], parts: int, limit: int) -> tuple[int, ...]:
    """Of the cuts under the limit, that with the least sum of squares, of costs and then of numbers of entries.

    Part by part, for each place where it may end, the best start. A later end never has an earlier best start, since both
    squares grow ever faster with a part: so the best start of the middle end halves what is left to try for the others.
    """
    entries = len(sums) - 1
    earliest, latest = [0] * (parts + 1), [0] * (parts + 1)  # where each part may end, so that all fit
    earliest[parts] = entries
    for part in range(parts - 1, 0, -1):
        earliest[part] = max(part, bisect_left(sums, sums[earliest[part + 1]] - limit))
    for part in range(parts):
        latest[part + 1] = min(entries - parts + part + 1, bisect_right(sums, sums[latest[part]] + limit) - 1)
    weight = entries * entries + 1  # of costs: no numbers of entries make up for it
    best, begins = [0], list[list[int]]()
    for part in range(1, parts + 1):
        before, low, first = best, earliest[part - 1], earliest[part]
        best, begin = ([0] * (latest[part] - first + 1) for _ in range(2))
        spans = [(first, latest[part], low, latest[part - 1])]  # ends to do, and the starts that may be theirs
        while spans:
            left, right, lowest, highest = spans.pop()
            end = (left + right) // 2
            here = sums[end]
            from_ = max(lowest, bisect_left(sums, here - limit))
            total, start = min(
                (before[start - low] + (here - sums[start]) ** 2 * weight + (end - start) ** 2, start)
                for start in range(from_, min(highest, end - 1) + 1)
            )
            best[end - first], begin[end - first] = total, start
            if left < end:
                spans.append((left, end - 1, lowest, start))
            if end < right:
                spans.append((end + 1, right, start, highest))
        begins.append(begin)
    starts, end = list[int](), entries
    for part in range(parts, 0, -1):
        end = begins[part - 1][end - earliest[part]]
        starts.append(end)
    return tuple(reversed(starts))
