"""Checkpoints that enclose a part of a model's units each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from split_support import Block, check
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint_sequential

from stepwell_stage import split


class Segments(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(6)))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint_sequential(self.blocks, 3, x, use_reentrant=False)  # type: ignore[no-any-return]


def test_segments_of_checkpoint_sequential(threads: Callable[..., Any]) -> None:
    """All of them were taken for one, as the function that makes them is in torch's file of checkpoints."""
    torch.manual_seed(0)
    model, x = Segments().double(), torch.randn(2, 8).double()
    assert split(model, 3, example={"x": x}).parts == tuple(
        (f"blocks.{number}", f"blocks.{number + 1}") for number in (0, 2, 4)
    )
    check(threads, model, [{"x": x}], [[{"x": torch.randn(2, 8).double()} for _ in range(3)]] * 2)
