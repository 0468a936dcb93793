"""GPipe's tables, laid out as its paper draws them."""

from __future__ import annotations

import pytest

from stepwell_stage.exceptions import ScheduleError
from stepwell_stage.schedules import gpipe


def test_two_ranks_three_microbatches() -> None:
    assert gpipe(2, 3).table() == "\n".join(
        [
            "rank 0: 0F0 0F1 0F2  .   .  0B0 0B1 0B2",
            "rank 1:  .  1F0 1F1 1F2 1B0 1B1 1B2  .",
        ]
    )


def test_fewer_microbatches_than_ranks() -> None:
    assert gpipe(3, 1).table() == "\n".join(
        [
            "rank 0: 0F0  .   .   .   .  0B0",
            "rank 1:  .  1F0  .   .  1B0  .",
            "rank 2:  .   .  2F0 2B0  .   .",
        ]
    )


def test_one_rank() -> None:
    assert gpipe(1, 2).table() == "rank 0: 0F0 0F1 0B0 0B1"


@pytest.mark.parametrize(("num_ranks", "num_microbatches"), [(0, 1), (2, 0), (-1, 3)])
def test_sizes_below_one_are_refused(num_ranks: int, num_microbatches: int) -> None:
    with pytest.raises((ScheduleError, ValueError), match="at least 1"):
        gpipe(num_ranks, num_microbatches)
