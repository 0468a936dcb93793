"""Schedules written as tables."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepwell_stage import Action, Kind
from stepwell_stage.exceptions import ScheduleError
from stepwell_stage.plan._random import random_schedule
from stepwell_stage.schedules import BY_NAME, custom


def test_a_table() -> None:
    schedule = custom(
        """
        rank 0: 0F0 0F1  .  0B0 0B1
        rank 1:  .  1F0 1B0 1F1 1B1
        """
    )
    assert schedule.placement.ranks == (0, 1)
    assert schedule.num_microbatches == 2
    assert schedule.actions[1] == tuple(map(Action.parse, ["1F0", "1B0", "1F1", "1B1"]))


def test_lines_without_ranks_and_overlapped_pairs() -> None:
    schedule = custom(["0F0 1F0 0F1+1B0 0B0 1F1 1B1 0B1"], name="mine")
    assert schedule.name == "mine"
    assert schedule.actions[0][2] == Action.overlap(Action(0, Kind.F, 1), Action(1, Kind.B, 0))


@pytest.mark.parametrize("name", BY_NAME)
def test_every_printed_table_is_read_back(name: str) -> None:
    schedule = BY_NAME[name](3, 7)
    assert custom(schedule.table(), name=schedule.name) == schedule


@given(seed=st.integers(0, 2**32))
@settings(max_examples=40, deadline=None, derandomize=True)
def test_any_printed_table_is_read_back(seed: int) -> None:
    schedule = random_schedule(random.Random(seed), custom=True)
    assert custom(schedule.table(), name=schedule.name) == schedule


@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        (["0F0 0X0"], "line 1 of the table: '0X0' is no action"),
        (["0F0", "1F0 1F"], "line 2 of the table: '1F' is no action: F needs a microbatch number"),
        (["rank 1: 0F0"], "line 1 of the table is rank 1, expected rank 0"),
        (["0F0", "0F1"], "0F1 is on rank 1, but stage 0 is on rank 0"),
        (["0F0 2F0"], "stage 2 is there, but no rank computes stage 1"),
        (["0F0", " . . "], "rank 1 computes nothing"),
        ("", "there are no actions"),
        (["0F0 0F2"], "microbatch 2 is there, but no rank computes microbatch 1; numbers start at 0"),
        # A mistyped number once made room for so many microbatches, 1 GB for this one.
        (["0F0 0F999999999"], "microbatch 999999999 is there, but no rank computes microbatch 1"),
        (["1F0"], "stage 1 is there, but no rank computes stage 0"),
        (["0F0+0B0"], "0B0 needs 0F0, so the two cannot overlap"),
        # These ended in errors of Python's from inside.
        (
            [["0F0", "0B0"]],
            r"line 1 of the table: a table is text, or .*, for example '0F0 0F1 0B0 0B1', got \['0F0', '0B0'\]",
        ),
        (["0F0 0B0", None], "line 2 of the table: a table is text"),
        (None, "a table is text, or several texts, one for each rank"),
        (b"0F0", "a table is text, or several texts"),
    ],
)
def test_a_wrong_table_says_where(table: Any, sentence: str) -> None:
    with pytest.raises(ScheduleError, match=sentence):
        custom(table)
