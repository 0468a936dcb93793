"""Zero-bubble tables: W steps stand in the gaps of 1F1B."""

from __future__ import annotations

from stepwell_stage.schedules import interleaved_zero_bubble, zb_h1


def test_zb_h1_four_ranks_eight_microbatches() -> None:
    assert zb_h1(4, 8).table() == "\n".join(
        [
            "rank 0: 0F0 0F1 0F2 0F3  .   .   .  0I0 0W0 0F4 0I1 0W1 0F5 0I2 0W2 0F6 0I3 0W3 0F7 0I4 0W4 0I5 0W5 0I6 0W6 0I7 0W7",
            "rank 1:  .  1F0 1F1 1F2  .   .  1I0 1F3 1I1 1W0 1F4 1I2 1W1 1F5 1I3 1W2 1F6 1I4 1W3 1F7 1I5 1W4 1I6 1W5 1I7 1W6 1W7",
            "rank 2:  .   .  2F0 2F1  .  2I0 2F2 2I1 2F3 2I2 2W0 2F4 2I3 2W1 2F5 2I4 2W2 2F6 2I5 2W3 2F7 2I6 2W4 2I7 2W5 2W6 2W7",
            "rank 3:  .   .   .  3F0 3I0 3F1 3I1 3F2 3I2 3F3 3I3 3W0 3F4 3I4 3W1 3F5 3I5 3W2 3F6 3I6 3W3 3F7 3I7 3W4 3W5 3W6 3W7",
        ]
    )


def test_zb_h1_with_fewer_microbatches_than_ranks() -> None:
    assert zb_h1(4, 2).table() == "\n".join(
        [
            "rank 0: 0F0 0F1  .   .   .   .   .  0I0 0W0 0I1 0W1",
            "rank 1:  .  1F0 1F1  .   .   .  1I0  .  1I1 1W0 1W1",
            "rank 2:  .   .  2F0 2F1  .  2I0  .  2I1 2W0 2W1  .",
            "rank 3:  .   .   .  3F0 3I0 3F1 3I1 3W0 3W1  .   .",
        ]
    )


def test_interleaved() -> None:
    assert interleaved_zero_bubble(2, 4).table() == "\n".join(
        [
            "rank 0: 0F0 0F1 2F0 2F1  .  2I0 2W0 0F2 2I1 2W1 0F3 0I0 0W0 2F2 0I1 0W1 2F3 2I2 2W2 2I3 2W3 0I2 0W2 0I3 0W3",
            "rank 1:  .  1F0 1F1 3F0 3I0 3F1 3I1 3W0 1F2 1I0 3W1 1F3 1I1 1W0 3F2 3I2 1W1 3F3 3I3 3W2 1I2 3W3 1I3 1W2 1W3",
        ]
    )


def test_interleaved_microbatches_that_are_no_multiple_of_ranks() -> None:
    assert interleaved_zero_bubble(2, 3).table() == "\n".join(
        [
            "rank 0: 0F0 0F1 0F2 2F0 2F1  .  2I0 2W0 2F2 2I1 2W1 2I2 2W2 0I0 0W0 0I1 0W1 0I2 0W2",
            "rank 1:  .  1F0 1F1 1F2 3F0 3I0 3F1 3I1 3W0 3F2 3I2 3W1 1I0 3W2 1I1 1W0 1I2 1W1 1W2",
        ]
    )
