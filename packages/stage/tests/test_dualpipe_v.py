"""DualPipeV tables: pairs of a forward and a backward in the steady state, split backwards at the end."""

# ruff: noqa: E501 - tables are as wide as they are

from __future__ import annotations

from stepwell_stage.schedules import dualpipe_v


def test_two_ranks_five_microbatches() -> None:
    assert dualpipe_v(2, 5).table() == "\n".join(
        [
            "rank 0:   0F0     0F1     0F2     3F0     3I0     3W0     3F1   0F3+3B1 3F2+0B0 0F4+3B2 3F3+0B1   3B3   3F4+0B2   3B4     0I3     0W3     0I4     0W4",
            "rank 1:    .      1F0     2F0     1F1     2F1     1F2     2B0   2F2+1B0 1F3+2B1 2F3+1B1 1F4+2B2 2F4+1B2   2B3     1B3     2I4     1I4     2W4     1W4",
        ]
    )


def test_fewer_microbatches_than_stages() -> None:
    assert dualpipe_v(2, 2).table() == "\n".join(
        [
            "rank 0: 0F0 0F1  .  3F0 3I0 3W0 3F1 3B1 0B0  .  0B1",
            "rank 1:  .  1F0 2F0 1F1 2F1 2B0 1B0  .  2B1 1B1  .",
        ]
    )
