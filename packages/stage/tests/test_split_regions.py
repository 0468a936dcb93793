"""Checkpoints that enclose a part of a model's units each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from split_support import Block, check
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

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


class Asking(nn.Module):
    """Every unit in a checkpoint of its own, and a question that lets absent tensors need gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        first = x = self.blocks[0](x)
        for block in self.blocks[1:]:
            x = checkpoint(lambda y, block=block: block(y) * 2, x, use_reentrant=False)
        return x + first if first.requires_grad else first


@pytest.mark.parametrize("stages", [2, 4])
def test_absent_tensors_are_in_no_checkpoint(threads: Callable[..., Any], stages: int) -> None:
    """What a unit would give elsewhere was found out within its checkpoint, which counted what that saved, and then missed it in
    backward."""
    torch.manual_seed(0)
    x = torch.randn(2, 8).double()
    check(
        threads,
        Asking().double(),
        [{"x": x}],
        [[{"x": torch.randn(2, 8).double()} for _ in range(3)]] * 2,
        ranks=stages,
    )
