"""Numbers of ranks, stages and microbatches that are no whole numbers."""

from __future__ import annotations

import decimal
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from stepwell_p2p import Placement
from stepwell_stage import PipelineStage, Schedule, lower, split_sequential
from stepwell_stage.exceptions import ScheduleError, StageUsageError
from stepwell_stage.plan._count import whole
from stepwell_stage.schedules import BY_NAME, forward_only, gpipe, interleaved_1f1b


class Indexed:
    """A number of another library's, as those of numpy are."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __index__(self) -> int:
        return self.value


NONE = [2.0, "4", None, True, decimal.Decimal(4), [4]]


@pytest.mark.parametrize("make", BY_NAME.values(), ids=BY_NAME)
@pytest.mark.parametrize("bad", NONE, ids=repr)
def test_schedules_of_no_whole_number(make: Callable[..., Schedule], bad: Any) -> None:
    """They ended in errors of Python's from inside, or, with True, made a schedule of one rank."""
    for name, args in (("num_ranks", (bad, 4)), ("num_microbatches", (2, bad))):
        with pytest.raises(ScheduleError) as raised:
            make(*args)
        assert str(raised.value) == f"{name} must be a whole number, got {bad!r}, a {type(bad).__name__}"


def test_other_counts_of_no_whole_number() -> None:
    with pytest.raises(ScheduleError, match=r"stages_per_rank must be a whole number, got 1.5, a float"):
        interleaved_1f1b(2, 4, stages_per_rank=1.5)  # type: ignore[arg-type]
    with pytest.raises(ScheduleError, match="num_microbatches must be a whole number, got None"):
        forward_only(Placement.loop(2, 2), None)  # type: ignore[arg-type]
    with pytest.raises(ScheduleError, match=r"num_microbatches must be a whole number, got 1.0"):
        Schedule("mine", Placement.loop(1, 1), 1.0, gpipe(1, 1).actions)  # type: ignore[arg-type]
    with pytest.raises(ScheduleError, match=r"prefetch must be a whole number, got 1.5"):
        lower(gpipe(2, 4), prefetch=1.5)  # type: ignore[arg-type]
    with pytest.raises(StageUsageError, match="stage_index must be a whole number, got '0', a str"):
        PipelineStage(nn.Linear(2, 2), "0", 2, "cpu")  # type: ignore[arg-type]
    with pytest.raises(StageUsageError, match=r"num_stages must be a whole number, got 2.0, a float"):
        PipelineStage(nn.Linear(2, 2), 0, 2.0, "cpu")  # type: ignore[arg-type]
    with pytest.raises(StageUsageError, match="n must be a whole number, got '2', a str"):
        split_sequential(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), "2")  # type: ignore[arg-type]


def test_what_stands_for_a_whole_number_is_one() -> None:
    for two, four in ((Indexed(2), Indexed(4)), (torch.tensor(2), torch.tensor(4))):
        for make in BY_NAME.values():
            assert make(two, num_microbatches=four) == make(2, 4)  # type: ignore[arg-type]
        assert type(gpipe(two, four).num_microbatches) is int  # type: ignore[arg-type]
        assert type(whole(four, "M")) is int


@pytest.mark.parametrize("make", BY_NAME.values(), ids=BY_NAME)
def test_arguments_that_are_missing_or_too_many_are_named_with_their_function(make: Callable[..., Schedule]) -> None:
    """It said that an argument is missing, but not of what: of a table of schedules by name nobody could tell."""
    name = make.__name__
    for args, named, sentence in (
        ((2,), {}, rf"{name}\(\): missing a required argument: 'num_microbatches'"),
        ((2, 4, 6), {}, rf"{name}\(\): too many positional arguments"),
        ((2, 4), {"microbatches": 4}, rf"{name}\(\): got an unexpected keyword argument 'microbatches'"),
    ):
        with pytest.raises(TypeError, match=sentence):
            make(*args, **named)
