"""Forward-only tables, on any placement."""

from __future__ import annotations

from stepwell_p2p import Placement
from stepwell_stage.schedules import forward_only


def test_chain() -> None:
    assert forward_only(Placement.loop(3, 3), 3).table() == "\n".join(
        [
            "rank 0: 0F0 0F1 0F2  .   .",
            "rank 1:  .  1F0 1F1 1F2  .",
            "rank 2:  .   .  2F0 2F1 2F2",
        ]
    )


def test_loop() -> None:
    assert forward_only(Placement.loop(4, 2), 4).table() == "\n".join(
        [
            "rank 0: 0F0 0F1 2F0 2F1 0F2 0F3 2F2 2F3  .",
            "rank 1:  .  1F0 1F1 3F0 3F1 1F2 1F3 3F2 3F3",
        ]
    )


def test_v() -> None:
    assert forward_only(Placement.v(4, 2), 3).table() == "\n".join(
        [
            "rank 0: 0F0 0F1 0F2 3F0  .  3F1  .  3F2",
            "rank 1:  .  1F0 2F0 1F1 2F1 1F2 2F2  .",
        ]
    )


def test_any() -> None:
    assert forward_only(Placement.custom([1, 0, 0, 1, 1]), 2).table() == "\n".join(
        [
            "rank 0:  .  1F0 2F0 1F1 2F1  .   .",
            "rank 1: 0F0 0F1  .  3F0 4F0 3F1 4F1",
        ]
    )
