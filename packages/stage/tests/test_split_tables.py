"""Tables that a unit makes when it is first called, and leaves where others find them."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from split_support import Block, check, make, numbers
from stage_support import Threads
from torch import Tensor, nn

from stepwell_stage import split
from stepwell_stage.exceptions import StageUsageError

STEPS = [[{"x": numbers(seed)} for seed in (1, 2)]]


@functools.lru_cache
def places(count: int) -> Tensor:
    return torch.arange(count).double().cos()


class OfAFunction(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + places(x.shape[-1]))


class OfAClass(Block):
    tables: dict[int, Tensor] = {}  # noqa: RUF012

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1] not in self.tables:
            self.tables[x.shape[-1]] = torch.arange(x.shape[-1]).double().cos()
        return super().forward(x + self.tables[x.shape[-1]])


class OfItsOwn(Block):
    table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.arange(x.shape[-1]).double().cos()
        return super().forward(x + self.table)


class Row(nn.Module):
    """Some of its blocks look for a table."""

    def __init__(self, kind: Callable[[], nn.Module], *, which: tuple[int, ...] = (0, 1, 2, 3)) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(kind() if number in which else Block() for number in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def forget() -> None:
    places.cache_clear()
    OfAClass.tables.clear()


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch's own, where data meet a tensor without
@pytest.mark.parametrize("kind", [OfAFunction, OfAClass])
def test_a_table_outside_of_the_model(threads: Threads, kind: Callable[[], nn.Module]) -> None:
    """What looked at the example left one without data there: the model itself gave tensors without data from then on."""
    forget()
    model = make(lambda: Row(kind, which=(1,)))
    with pytest.raises(StageUsageError, match=r"unit 'blocks.1' leaves a table that it makes outside of the model"):
        split(model, 2, example=numbers(0))
    with pytest.raises(StageUsageError, match=r"unit 'blocks.1' .* finds a table that was left in a class"):
        split(model, 2, example=numbers(0)).module(0)(numbers(0))
    forget()
    with pytest.raises(StageUsageError, match="if the model has run once before the first split"):
        split(make(lambda: Row(kind)), 2, example=numbers(0))
    forget()
    model(numbers(0))
    check(threads, model, STEPS[0][:1], STEPS)
    check(threads, make(lambda: Row(kind)), STEPS[0][:1], STEPS)


def test_a_table_within_a_unit(threads: Threads) -> None:
    check(threads, make(lambda: Row(OfItsOwn)), STEPS[0][:1], STEPS)


def test_what_hooks_collect_is_no_table(threads: Threads) -> None:
    """A list of the caller's own, in which values of each forward are kept, matters to nobody."""
    seen: list[Tensor] = []
    model = make(lambda: Row(Block))
    for block in model.blocks:  # type: ignore[union-attr]
        block.register_forward_hook(lambda module, inputs, output: seen.append(output.detach()))
    split(model, 2, example=numbers(0))
