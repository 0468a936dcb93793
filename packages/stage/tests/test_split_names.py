"""Units that are called like operations of torch."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from stepwell_stage import split


class Means(nn.Module):
    """Its second call is ``Tensor.mean``, and a unit has the same name, and is given the same."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.mean, self.last = nn.Linear(4, 4), nn.Linear(4, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        shift = y.mean()
        z = self.mean(y)
        return self.last(z + shift) * (1 + z.dim())


def test_a_unit_and_an_operation_of_one_name() -> None:
    """A stage that has neither took the unit's result to look like the second operation's: a number for a table, and a third
    of the result came out.
    """
    torch.manual_seed(0)
    model, x = Means().double(), torch.randn(3, 4).double()
    cut = split(model, {"first": 0, "mean": 0, "last": 1}, example=x)
    sent = cut.module(0)(x)
    torch.testing.assert_close(cut.module(1)(*sent, x=x), model(x))
