"""Functions of a model that reach it through a closure: on every stage they reach the model itself, and not the stage's copy."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from split_support import Block, check
from torch import Tensor, nn

from stepwell_stage import split
from stepwell_stage.exceptions import StageUsageError

X = torch.ones(2, 8, dtype=torch.float64)


class Collecting(nn.Module):
    """Adds up what a hook, or a function of its own, has put into its list."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.kept: list[Any] = []
        self.note: Callable[[Any], None] | None = None
        kept = self.kept
        if how == "self":
            self.blocks[0].register_forward_hook(lambda module, inputs, output: self.kept.append(output.mean()))
        elif how == "list":
            self.blocks[0].register_forward_pre_hook(lambda module, inputs: kept.append(1.0))
        elif how == "attribute":
            self.note = lambda value: kept.append(value)
        elif how == "partial":
            self.note = functools.partial(put, self.kept)
        elif how == "method":
            self.note = self.put

    def put(self, value: Any) -> None:
        self.kept.append(value)

    def forward(self, x: Tensor) -> Tensor:
        self.kept.clear()
        for block in self.blocks:
            x = block(x)
            if self.note is not None:
                self.note(2.0)
        return x * (1 + sum(self.kept))


def put(kept: list[Any], value: Any) -> None:
    kept.append(value)


REFUSED = {
    "self": r"a hook of 'blocks\.0' is a function that reaches the model through a closure",
    "list": r"a hook of 'blocks\.0' is a function that reaches 'kept' through a closure",
    "attribute": r"'note' is a function that reaches 'kept' through a closure",
}


@pytest.mark.parametrize("how", REFUSED)
def test_refused(how: str) -> None:
    """What was kept went to the list of the model that had been split, and stages added up an empty one: another loss."""
    with pytest.raises(StageUsageError, match=REFUSED[how]):
        split(Collecting(how).double(), 2, example={"x": X})


@pytest.mark.parametrize("how", ["partial", "method"])
def test_what_is_copied_with_the_model(threads: Callable[..., Any], how: str) -> None:
    check(threads, Collecting(how).double(), [{"x": X}], [[{"x": X}, {"x": 2 * X}]] * 2)


model = Collecting("method").double()


class Settings:
    model = 2.0


def scaled(x: Tensor) -> Tensor:
    return x * Settings.model


def test_an_attribute_that_is_called_like_a_global() -> None:
    """A function that reads an attribute ``model`` was refused where a global variable of this name is the model."""
    model.scale = scaled  # type: ignore[assignment]
    split(model, 2, example={"x": X})
