"""Looped breadth-first tables: all microbatches through one stage before the next."""

from __future__ import annotations

from stepwell_stage.schedules import looped_bfs


def test_two_ranks_three_microbatches() -> None:
    assert looped_bfs(2, 3).table() == "\n".join(
        [
            "rank 0: 0F0 0F1 0F2 2F0 2F1 2F2  .   .  2B2 2B1 2B0 0B2 0B1 0B0",
            "rank 1:  .  1F0 1F1 1F2 3F0 3F1 3F2 3B2 3B1 3B0 1B2 1B1 1B0  .",
        ]
    )


def test_three_stages_a_rank() -> None:
    assert looped_bfs(2, 2, stages_per_rank=3).table() == "\n".join(
        [
            "rank 0: 0F0 0F1 2F0 2F1 4F0 4F1  .   .  4B1 4B0 2B1 2B0 0B1 0B0",
            "rank 1:  .  1F0 1F1 3F0 3F1 5F0 5F1 5B1 5B0 3B1 3B0 1B1 1B0  .",
        ]
    )


def test_fewer_microbatches_than_ranks() -> None:
    assert looped_bfs(3, 1).table() == "\n".join(
        [
            "rank 0: 0F0  .   .  3F0  .   .   .   .  3B0  .   .  0B0",
            "rank 1:  .  1F0  .   .  4F0  .   .  4B0  .   .  1B0  .",
            "rank 2:  .   .  2F0  .   .  5F0 5B0  .   .  2B0  .   .",
        ]
    )
