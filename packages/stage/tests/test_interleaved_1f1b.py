"""Interleaved 1F1B's tables: microbatches in rounds through a rank's stages; forwards and backwards in turn."""

from __future__ import annotations

from stepwell_stage.schedules import interleaved_1f1b


def test_two_ranks_four_microbatches() -> None:
    assert interleaved_1f1b(2, 4).table() == "\n".join(
        [
            "rank 0: 0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1  .  2B2  .  2B3 0B2 0B3",
            "rank 1:  .  1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3  .",
        ]
    )


def test_three_stages_a_rank() -> None:
    assert interleaved_1f1b(2, 2, stages_per_rank=3).table() == "\n".join(
        [
            "rank 0: 0F0 0F1 2F0 2F1 4F0 4F1  .  4B0  .  4B1 2B0 2B1 0B0 0B1",
            "rank 1:  .  1F0 1F1 3F0 3F1 5F0 5B0 5F1 5B1 3B0 3B1 1B0 1B1  .",
        ]
    )


def test_microbatches_that_are_no_multiple_of_ranks() -> None:
    assert interleaved_1f1b(2, 5).table() == "\n".join(
        [
            "rank 0: 0F0 0F1 0F2 2F0 2F1 2F2 2B0 0F3 2B1 0F4 2B2 2F3 0B0 2F4 0B1  .  0B2  .  2B3 2B4 0B3 0B4",
            "rank 1:  .  1F0 1F1 1F2 3F0 3B0 3F1 3B1 3F2 3B2 1F3 1B0 1F4 1B1 3F3 1B2 3F4 3B3 3B4 1B3 1B4  .",
        ]
    )


def test_fewer_microbatches_than_ranks() -> None:
    assert interleaved_1f1b(4, 1).table() == "\n".join(
        [
            "rank 0: 0F0  .   .   .  4F0  .   .   .   .   .   .  4B0  .   .   .  0B0",
            "rank 1:  .  1F0  .   .   .  5F0  .   .   .   .  5B0  .   .   .  1B0  .",
            "rank 2:  .   .  2F0  .   .   .  6F0  .   .  6B0  .   .   .  2B0  .   .",
            "rank 3:  .   .   .  3F0  .   .   .  7F0 7B0  .   .   .  3B0  .   .   .",
        ]
    )
