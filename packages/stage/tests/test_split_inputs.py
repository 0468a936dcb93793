"""What a split is given and keeps: inputs by odd names, inputs that require a gradient, costs, and stages that are gone."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from split_support import make
from torch import Tensor, nn

from stepwell_p2p import Transport
from stepwell_stage import Executor, schedules, split
from stepwell_stage.exceptions import StageUsageError

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)).double()


class Row(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4)) for _ in range(4))
        self.extra = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for layer in self.layers:
            y = layer(y)
        if self.training:
            y = self.extra(y)
        return (y + x).square().mean()


class Targets(Row):
    def forward(self, target_: Tensor, target: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(target_ + 2 * target)


def test_an_input_that_ends_like_an_argument_of_the_executor() -> None:
    """One that was called ``target_`` came to the model as ``target``."""
    model = make(Targets)
    cut = split(model, 2, example={"target_": X, "target": X})
    named = cut.keywords(target_=X, target=-X)
    assert sorted(named) == ["target_", "target__"]
    sent = cut.module(0)(**named)
    torch.testing.assert_close(cut.module(1)(*sent, **named), model(X, -X))


def step(transport: Transport, model: nn.Module, x: Tensor, inputs: Any) -> None:
    schedule = schedules.one_f_one_b(2, 2)
    cut = split(model, 2, example=X[:3], inputs=inputs)
    executor = Executor(
        cut.stages(schedule.placement, transport.rank, "cpu", transport=transport), schedule, lambda loss: loss
    )
    executor.step(**({"x": x} if inputs == "every" or executor.is_first else {}), return_outputs=False)


def test_inputs_that_require_a_gradient(threads: Callable[..., Any]) -> None:
    """Each rank's input had a part of the gradient, and none of them the sum."""
    given = [X.clone().requires_grad_() for _ in range(3)]
    with pytest.raises(StageUsageError, match=r"'x' requires a gradient.* split with inputs=\"first\""):
        threads(lambda transport: step(transport, make(Row), given[0], "every"), 2)
    threads(lambda transport: step(transport, make(Row), given[1], "first"), 2)
    model = make(Row)
    for part in given[2].chunk(2):
        (model(part) / 2).backward()
    torch.testing.assert_close(given[1].grad, given[2].grad)


def test_costs_of_a_model_that_trains_with_more_units_than_it_evaluates() -> None:
    """Time was measured in evaluation alone, and asked for in training: a KeyError. And these could not be given again."""
    model = make(Row).eval()
    cut = split(model, 2, example=X, costs="time")
    assert "extra" in cut.costs
    assert split(model, 2, example=X, costs=cut.costs).costs == cut.costs
    assert split(make(Row), 2, example=X, costs=cut.costs).costs == cut.costs
    with pytest.raises(StageUsageError, match="costs must name every unit"):
        split(model, 2, example=X, costs={**cut.costs, "other": 1.0})


def test_stages_that_are_gone() -> None:
    """The cut kept every stage's module, with its parameters, as long as it lived."""
    cut = split(make(Row), 2, example=X)
    stage = cut.module(0)
    stage(X)
    stage(X)  # the first finds out what others return, and does not count
    assert "glue:" in cut.describe()
    kept = weakref.ref(stage)
    del stage
    gc.collect()
    assert kept() is None
    assert "glue:" not in cut.describe()
