"""ZB-V tables: down the V and up again, no gap between a rank's first and last action."""

from __future__ import annotations

from stepwell_stage.schedules import zbv


def test_two_ranks_four_microbatches() -> None:
    assert zbv(2, 4).table() == "\n".join(
        [
            "rank 0: 0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0F3 0I0 0W0 3F2 3I2 3W2 0I1 0W1 3F3 3I3 3W3 0I2 0W2 0I3 0W3  .",
            "rank 1:  .  1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1F3 1I1 1W1 2F3 2I2 2W2 1I2 2I3 1I3 1W2 2W3 1W3",
        ]
    )


def test_fewer_microbatches_than_the_pattern_needs() -> None:
    assert zbv(3, 2).table() == "\n".join(
        [
            "rank 0: 0F0 0F1  .   .   .  5F0 5I0 5W0 5F1 5I1 5W1  .   .  0I0 0W0  .  0I1 0W1",
            "rank 1:  .  1F0 1F1  .  4F0  .  4F1 4I0 4W0  .  4I1 4W1 1I0 1W0  .  1I1 1W1  .",
            "rank 2:  .   .  2F0 3F0 2F1 3F1  .   .  3I0 3W0 2I0 2W0 3I1 3W1 2I1 2W1  .   .",
        ]
    )
