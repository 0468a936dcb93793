"""Forward hooks of the model itself see what it takes and returns, on every stage, as they do in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from split_support import check
from torch import Tensor, nn

from stepwell_p2p import Transport
from stepwell_stage import Executor, schedules, split

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)).double()


class Row(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        first = self.layers[0](x)
        y = first
        for layer in list(self.layers)[1:]:
            y = layer(y).tanh()
        return y, first


def joins(module: nn.Module, inputs: Any, output: Any) -> Tensor:
    return output[0].shape[0] * output[0] + output[1]  # type: ignore[no-any-return]


def scales(module: nn.Module, inputs: Any, output: Any) -> tuple[Tensor, Tensor]:
    return output[0] * 3, output[1]


def scales_inputs(module: nn.Module, inputs: Any, named: dict[str, Tensor]) -> Any:
    return tuple(one * 3 for one in inputs), {name: one * 3 for name, one in named.items()}


def with_hooks(*kinds: str) -> nn.Module:
    torch.manual_seed(0)
    model = Row().double()
    if "pre" in kinds:
        model.register_forward_pre_hook(scales_inputs, with_kwargs=True)
    if "scales" in kinds:
        model.register_forward_hook(scales, always_call=True)
    model.register_forward_hook(joins)
    return model


@pytest.mark.parametrize("kinds", [(), ("pre",), ("scales",), ("pre", "scales")])
@pytest.mark.parametrize("name", ["1f1b", "zbv"])
def test_hooks_of_the_model(threads: Callable[..., Any], kinds: tuple[str, ...], name: str) -> None:
    """They were given what a stage takes and sends: an IndexError, or another loss without a word."""
    steps = [[{"x": one} for one in X.chunk(3)]] * 2
    check(threads, with_hooks(*kinds), [{"x": X[:2]}], steps, name)


@pytest.mark.parametrize("inputs", ["every", "first"])
def test_a_hook_that_goes_by_position(threads: Callable[..., Any], inputs: Any) -> None:
    """It was given nothing by position, for stages call the model by names; or what a stage before had sent."""
    torch.manual_seed(0)
    model = Row().double()
    model.register_forward_pre_hook(lambda module, args: (args[0] * 3,))
    schedule = schedules.one_f_one_b(2, 3)
    models = [copy.deepcopy(model) for _ in range(2)]

    def on_rank(transport: Transport) -> float | None:
        cut = split(models[transport.rank], 2, example=X[:2], inputs=inputs)
        stages = cut.stages(schedule.placement, transport.rank, "cpu", transport=transport)
        executor = Executor(stages, schedule, lambda output: output[0].sum() + output[1].sum(), loss_weights="sum")
        given = (X,) if executor.is_first else ()
        named = {"x": X} if inputs == "every" and not executor.is_first else {}
        executor.step(*given, return_outputs=False, **named)
        return None if executor.loss is None else executor.loss.item()

    assert threads(on_rank, 2)[1] == pytest.approx(sum(one.sum().item() for one in model(X)), rel=1e-10)


def test_a_hook_on_a_stage() -> None:
    """One that is put on a stage's module afterwards sees what the stage takes and sends."""
    seen = []
    stage = split(with_hooks("scales"), 2, example=X).module(0)
    stage.register_forward_hook(lambda module, inputs, output: seen.append(output))
    sent = stage(X)
    assert seen == [sent]
    assert isinstance(sent, tuple)
