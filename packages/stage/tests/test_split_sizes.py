"""Units that decide by data: how large their results are elsewhere, where the example's sizes are equal by chance."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from stepwell_stage import split


class Deciding(nn.Module):
    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.inner = nn.Linear(width, 8)

    def forward(self, x: Tensor) -> Any:
        y = self.inner(x)
        if y.sum() > 1e9:
            y = y * 2
        return y


class Model(nn.Module):
    """The second stage does not get what the first unit makes, and asks for its shape."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = Deciding(), nn.Linear(8, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return self.third(self.second(y)) / y.size(-1) / y.size(0)


def test_sizes_that_are_equal_by_chance() -> None:
    """A width of 8 was taken to be the example's 8 rows, and one row for what is always 1: wrong, and then refused."""
    for rows in (8, 1):
        torch.manual_seed(0)
        model = Model().double()
        cut = split(model, {"first": 0, "second": 0, "third": 1}, example=torch.randn(rows, 5).double())
        for size in (8, 4, 1):
            x = torch.randn(size, 5).double()
            sent = cut.module(0)(x)
            torch.testing.assert_close(cut.module(1)(*sent, x=x), model(x))
