"""Attributes of units that code between units sets, as in ``block.height = x.shape[1]``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from split_support import Block, check, make, numbers, refused
from torch import Tensor, nn


class Sized(Block):
    """A block that is told the size of what it is given, by whoever calls it."""

    def __init__(self, *, says: bool) -> None:
        super().__init__()
        if says:
            self.size: tuple[int, ...] | None = None

    def forward(self, x: Tensor) -> Tensor:
        assert self.size is not None
        return (
            super()
            .forward(x)
            .unflatten(1, self.size)
            .mean(2, keepdim=True)
            .expand(-1, -1, self.size[1], -1)
            .flatten(1, 2)
        )


class Tower(nn.Module):
    def __init__(self, *, says: bool = True) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Sized(says=says) for _ in range(4))

    def forward(self, x: Tensor, height: int = 2) -> Tensor:
        for layer in self.layers:
            layer.size = height, x.shape[1] // height
            x = layer(x) * x.shape[1]
        return x


@pytest.mark.parametrize("says", [True, False])
def test_attributes_that_glue_sets(threads: Callable[..., Any], says: bool) -> None:
    """The copy of a unit that stands for what other stages see had no such attribute: an AttributeError in the first step."""
    steps = [
        [{"x": numbers(seed, length=length), "height": height} for seed, height in ((1, 2), (2, 3))]
        for length in (6, 12)
    ]
    check(threads, make(lambda: Tower(says=says)), steps[0][:1], steps)


class Counts(Block):
    """Gives as many parts as it was called times."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        self.calls += 1
        return super().forward(x), self.calls


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Counts() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x, calls = layer(x)
            x = x * calls
        return x


def test_attributes_that_the_unit_sets_are_not_those_of_others(threads: Callable[..., Any]) -> None:
    """In the second step, of another length: other stages have not seen the calls before, and take the number to be another."""
    steps = [[{"x": numbers(1, length=length)}] for length in (4, 4, 4)]
    refused(threads, "gives Python another number", make(Counted), steps[0], steps)
    lengths = [[{"x": numbers(1, length=length)}] for length in (4, 5, 4)]
    refused(threads, "gives Python another number", make(Counted), lengths[0], lengths)
