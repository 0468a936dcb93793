"""Balanced cuts: worked examples, and every cut of small rows tried out."""

from __future__ import annotations

import tracemalloc
from fractions import Fraction
from itertools import combinations
from time import process_time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepwell_stage.exceptions import StageUsageError
from stepwell_stage.plan._balance import balance, check_starts


def parts_of(costs: list[int], starts: tuple[int, ...]) -> list[list[int]]:
    return [costs[a:b] for a, b in zip(starts, [*starts[1:], len(costs)], strict=True)]


@pytest.mark.parametrize(
    ("costs", "parts", "starts"),
    [
        ([5], 1, (0,)),
        ([1, 1, 1, 1], 2, (0, 2)),
        ([1, 1, 1, 1, 8, 1], 3, (0, 4, 5)),
        ([9, 1, 1, 1, 1, 1], 3, (0, 1, 3)),  # the limit is 9; the rest is even all the same
        ([4, 0, 4, 0], 2, (0, 2)),  # a layer without parameters stays behind the one before
        ([0, 0, 0, 0, 0, 0], 3, (0, 2, 4)),
        ([3, 0, 0], 3, (0, 1, 2)),
        ([0.5, 0.25, 0.25, 1.0], 2, (0, 3)),
    ],
)
def test_examples(costs: list[float], parts: int, starts: tuple[int, ...]) -> None:
    assert balance(costs, parts) == starts


def test_p156_thirty_layers_over_four_parts_stay_thirty() -> None:
    parts = parts_of(list(range(30)), balance([1] * 30, 4))
    assert [layer for part in parts for layer in part] == list(range(30))
    assert sorted(len(part) for part in parts) == [7, 7, 8, 8]


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 12), min_size=1, max_size=9), st.data())
def test_no_other_cut_is_better(costs: list[int], data: st.DataObject) -> None:
    parts = data.draw(st.integers(1, len(costs)))

    def worth(starts: tuple[int, ...]) -> tuple[int, int, int]:
        cut = parts_of(costs, starts)
        sums = [sum(part) for part in cut]
        return max(sums), sum(s * s for s in sums), sum(len(part) ** 2 for part in cut)

    found = balance(costs, parts)
    assert len(found) == parts
    assert found[0] == 0
    assert worth(found) == min(worth((0, *rest)) for rest in combinations(range(1, len(costs)), parts - 1))


def test_whole_numbers_beyond_floats_are_exact() -> None:
    large = 2**60
    assert balance([large, 1, 1, large], 2) == (0, 2)
    assert balance([large, 1, 2, large], 2) == (0, 2)
    assert balance([large, 2, 1, large], 2) == (0, 2)
    assert balance([large + 1, large, 1], 2) == (0, 1)


def test_memory_does_not_grow_with_the_runs_of_layers() -> None:
    """The sum of every run of layers was kept and sorted: of 4,000 layers eight million sums."""
    costs = [1 + number**0.5 for number in range(600)]
    tracemalloc.start()
    balance(costs, 64)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 3_000_000  # it was 16 million


def test_costs_that_can_be_halved_for_ever() -> None:
    """Between two fractions there is always another, so that the search for the least maximum among them never ended."""
    assert balance([Fraction(1, 3)] * 7, 3) == balance([1] * 7, 3)


def test_equal_floats_are_cut_as_equal_whole_numbers() -> None:
    """Sums of tenths differ in their last digits, and these, not the rule for ties, chose where to cut."""
    for count in range(1, 40):
        for parts in range(1, count + 1):
            assert balance([0.1] * count, parts) == balance([1] * count, parts)


@pytest.mark.parametrize("parts", [16, 256])
def test_a_long_model_takes_no_time(parts: int) -> None:
    """Time grew with the square of the number of layers: 4,000 of them took seconds."""
    costs = [round(1e6 * (1 + number**0.5)) for number in range(4000)]
    began = process_time()
    starts = balance(costs, parts)
    assert process_time() - began < 0.8
    assert max(sum(part) for part in parts_of(costs, starts)) <= sum(costs) / parts + max(costs)


@pytest.mark.parametrize(
    ("costs", "parts", "words"),
    [
        ([1, 2], 3, "2 layers cannot be cut into 3 parts"),
        ([1], 0, "at least 1 part, got 0"),
        ([1, -1], 1, "entry 1 is -1"),
        ([1, float("nan")], 1, "entry 1 is nan"),
        ([float("inf"), 1], 1, "entry 0 is inf"),
    ],
)
def test_what_cannot_be_cut_is_refused(costs: list[float], parts: int, words: str) -> None:
    with pytest.raises(StageUsageError, match=words):
        balance(costs, parts)


def test_given_boundaries_are_checked() -> None:
    assert check_starts([0, 2, 5], 6) == check_starts([2, 5], 6) == (0, 2, 5)
    assert check_starts([], 3) == (0,)
    for wrong in ([3, 2], [2, 2], [6], [-1, 2]):
        with pytest.raises(StageUsageError, match="must ascend within 1 to 5"):
            check_starts(wrong, 6)
