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
        self.act: Callable[[Tensor], Tensor] | None = None
        kept = self.kept
        if how == "self":
            self.blocks[0].register_forward_hook(lambda module, inputs, output: self.kept.append(output.mean()))
        elif how == "list":
            self.blocks[0].register_forward_pre_hook(lambda module, inputs: kept.append(1.0))
        elif how == "method of a hook":
            self.blocks[0].register_forward_hook(self.after)
        elif how == "attribute":
            self.note = lambda value: kept.append(value)
        elif how == "slope":
            self.slope = nn.Parameter(torch.tensor(0.5))
            self.act = lambda x: nn.functional.leaky_relu(x) * self.slope
        elif how == "default":
            self.note = lambda value, kept=self.kept: kept.append(value)
        elif how == "nested":
            inner = lambda value: kept.append(value)  # noqa: E731
            self.note = lambda value: inner(value / 2)
        elif how == "partial":
            self.note = functools.partial(put, self.kept)
        elif how == "method":
            self.note = self.put

    def after(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        self.kept.append(1.0)

    def put(self, value: Any) -> None:
        self.kept.append(value)

    def forward(self, x: Tensor) -> Tensor:
        self.kept.clear()
        for block in self.blocks:
            x = block(x)
            if self.note is not None:
                self.note(2.0)
        if self.act is not None:
            x = self.act(x)
        return x * (1 + sum(self.kept))


def put(kept: list[Any], value: Any) -> None:
    kept.append(value)


@pytest.mark.parametrize("how", ["attribute", "slope", "default", "nested", "partial", "method"])
def test_what_is_copied_with_the_model(threads: Callable[..., Any], how: str) -> None:
    """What was kept went to the list of the model that had been split, and stages added up an empty one: another loss."""
    check(threads, Collecting(how).double(), [{"x": X}], [[{"x": X}, {"x": 2 * X}]] * 2)


@pytest.mark.parametrize("how", ["self", "list", "method of a hook"])
def test_what_hooks_of_units_keep_is_refused(how: str) -> None:
    """A stage without the unit runs its hook at most once, for the first microbatch: it added up less, without a word."""
    with pytest.raises(StageUsageError, match=r"looks at 'kept', which unit 'blocks\.0' changes"):
        split(Collecting(how).double(), 2, example={"x": X})


def test_a_global_variable_is_refused() -> None:
    """A copy of the function would have the same one."""
    reaching = Collecting("method").double()
    reaching.scale = of_global  # type: ignore[assignment]
    globals()["reached"] = reaching
    with pytest.raises(StageUsageError, match="'scale' is a function that reaches the model through a global variable"):
        split(reaching, 2, example={"x": X})


def of_global(x: Tensor) -> Tensor:
    return x * len(reached.kept)  # type: ignore[name-defined]  # noqa: F821


model = Collecting("method").double()


class Settings:
    model = 2.0


def scaled(x: Tensor) -> Tensor:
    return x * Settings.model


def test_an_attribute_that_is_called_like_a_global() -> None:
    """A function that reads an attribute ``model`` was refused where a global variable of this name is the model."""
    model.scale = scaled  # type: ignore[assignment]
    split(model, 2, example={"x": X})
