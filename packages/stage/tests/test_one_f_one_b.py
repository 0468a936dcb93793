"""1F1B's tables: a warm-up, then one forward and one backward in turn, then the rest of the backwards."""

from __future__ import annotations

import pytest

from stepwell_stage import Kind
from stepwell_stage.schedules import one_f_one_b


def test_four_ranks_five_microbatches() -> None:
    assert one_f_one_b(4, 5).table() == "\n".join(
        [
            "rank 0: 0F0 0F1 0F2 0F3  .   .   .  0B0 0F4 0B1  .  0B2  .  0B3  .  0B4",
            "rank 1:  .  1F0 1F1 1F2  .   .  1B0 1F3 1B1 1F4 1B2  .  1B3  .  1B4  .",
            "rank 2:  .   .  2F0 2F1  .  2B0 2F2 2B1 2F3 2B2 2F4 2B3  .  2B4  .   .",
            "rank 3:  .   .   .  3F0 3B0 3F1 3B1 3F2 3B2 3F3 3B3 3F4 3B4  .   .   .",
        ]
    )


def test_fewer_microbatches_than_ranks() -> None:
    assert one_f_one_b(4, 2).table() == "\n".join(
        [
            "rank 0: 0F0 0F1  .   .   .   .   .  0B0  .  0B1",
            "rank 1:  .  1F0 1F1  .   .   .  1B0  .  1B1  .",
            "rank 2:  .   .  2F0 2F1  .  2B0  .  2B1  .   .",
            "rank 3:  .   .   .  3F0 3B0 3F1 3B1  .   .   .",
        ]
    )


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 7])
@pytest.mark.parametrize("num_microbatches", [1, 3, 16])
def test_a_rank_holds_no_more_activations_than_stages_follow(num_ranks: int, num_microbatches: int) -> None:
    for rank, row in enumerate(one_f_one_b(num_ranks, num_microbatches).actions):
        held = peak = 0
        for action in row:
            held += 1 if action.kind is Kind.F else -1
            peak = max(peak, held)
        assert peak == min(num_ranks - rank, num_microbatches)
