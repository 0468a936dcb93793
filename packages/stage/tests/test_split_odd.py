"""Models that were once cut badly, or not at all."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from stage_support import Threads
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from stepwell_meta import PipeliningMetadataError
from stepwell_meta.exceptions import StepwellError
from stepwell_p2p import Transport
from stepwell_stage import Executor, schedules, split, split_sequential
from stepwell_stage.exceptions import StageUsageError


class Scaled(nn.Module):
    """Two layers, of which the second is scaled by what glue makes of a parameter in many steps."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.scale = nn.Parameter(torch.ones(4))
        self.steps = steps

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        scale = self.scale
        for _ in range(self.steps):
            scale = scale * 0.5 + scale * 0.5
        return self.layers[1](x * scale)


def test_glue_of_many_steps_is_followed_back_once() -> None:
    """Each value was followed back once for every path to it, twice as many with each step: a cut of SqueezeBert never ended."""
    cut = split(Scaled(60), 2, example=torch.ones(2, 4))
    assert dict(cut.module(1).named_parameters()).keys() == {"layers.1.weight", "layers.1.bias", "scale"}


class ByForward(nn.Module):
    """Calls its layers' forward by name, and one through a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:3]:
            x = layer.forward(x).tanh()
        return checkpoint(self.layers[3].forward, x, use_reentrant=False)


def test_units_whose_forward_is_called_by_name(threads: Threads) -> None:
    """They were taken for glue, so that one stage computed all of them: the encoder of SqueezeBert."""
    model, x = ByForward().double(), torch.randn(6, 4).double()
    whole = copy.deepcopy(model)
    cut = split(model, 2, example=x)
    assert cut.parts == (("layers.0", "layers.1"), ("layers.2", "layers.3"))
    schedule = schedules.one_f_one_b(2, 3)

    def on_rank(transport: Transport) -> None:
        stages = cut.stages(schedule.placement, transport.rank, "cpu", transport=transport)
        Executor(stages, schedule, Tensor.sum, loss_weights="sum").step(x=x, return_outputs=False)

    threads(on_rank, 2)
    for part in x.tensor_split(3):
        whole(part).sum().backward()
    for mine, plain in zip(model.parameters(), whole.parameters(), strict=True):
        assert mine.grad is not None
        assert plain.grad is not None
        assert torch.equal(mine.grad, plain.grad)


class Clamped(nn.Module):
    """Clamps a gradient between its layers, if there is one."""

    def __init__(self, asks: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.asks = asks

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            if x.requires_grad if self.asks == "the tensor" else torch.is_grad_enabled():
                x.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
        return x


@pytest.mark.parametrize("asks", ["the tensor", "torch"])
def test_hooks_that_are_put_where_a_tensor_needs_a_gradient(threads: Threads, asks: str) -> None:
    """They were lost without a word, and gradients wrong: the stage that made the tensor had stopped before them."""
    schedule, x = schedules.one_f_one_b(2, 3), torch.randn(6, 4).double()

    def on_rank(transport: Transport, model: nn.Module) -> None:
        cut = split(model, 2, example=x)
        stages = cut.stages(schedule.placement, transport.rank, "cpu", transport=transport)
        Executor(stages, schedule, Tensor.sum, loss_weights="sum").step(x=x, return_outputs=False)

    model = Clamped(asks).double()
    whole = copy.deepcopy(model)
    threads(on_rank, 2, model)
    for part in x.tensor_split(3):
        whole(part).sum().backward()
    for mine, plain in zip(model.parameters(), whole.parameters(), strict=True):
        assert mine.grad is not None
        assert plain.grad is not None
        torch.testing.assert_close(mine.grad, plain.grad, rtol=1e-12, atol=1e-14)


class Between(nn.Module):
    """A function between two layers."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.function(self.first(x)))


twice: Callable[[Tensor], Tensor] = torch.compile(lambda x: x * 2, backend="eager")


def test_what_is_compiled_between_units_is_refused() -> None:
    """It failed within the compiler, which went through the function mode that sees glue."""
    x = torch.zeros(2, 8)
    with pytest.raises(StageUsageError, match=r"twice: .* leave torch\.compile out there"):
        split(Between(twice), 2, example=x)
    split(nn.Sequential(Between(twice), Between(twice)), 2, example=x, units=["0", "1"])


class Named(nn.Module):
    """Takes tensors by name."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, given: dict[str, Tensor]) -> Tensor:
        return self.layers[1](self.layers[0](given["one"]) + given["two"])


def test_tensors_in_another_structure_are_named() -> None:
    """The sentence began with nothing: stage 0 was given , or tensors in another structure."""
    one, two = torch.ones(2, 4), torch.ones(2, 4)
    cut = split(Named(), 2, example={"given": {"one": one, "two": two}}, inputs="first")
    with pytest.raises(StageUsageError, match="stage 0 was given tensors in another structure, unlike any example"):
        cut.module(0)(given={"two": two, "one": one})


@pytest.mark.parametrize("how", ["split", "split_sequential"])
def test_ranks_that_cut_the_model_otherwise_are_refused(threads: Threads, how: str) -> None:
    """Their wires looked alike, so a layer ran on no rank or on two, and the loss was another without a word."""
    x, schedule = torch.randn(4, 4), schedules.one_f_one_b(2, 2)

    def on_rank(transport: Transport) -> str:
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
        costs = {str(layer): 1.0 for layer in range(4)} | {"0": 1.0 + 9 * transport.rank}
        cut: Any = (
            split(model, 2, example=x, costs=costs) if how == "split" else split_sequential(model, 2, costs=costs)
        )
        stages = cut.stages(schedule.placement, transport.rank, "cpu", transport=transport)
        executor = Executor(stages, schedule, Tensor.sum)
        with pytest.raises(PipeliningMetadataError, match="cut the model otherwise") as refusal:
            executor.step(*((x,) if executor.is_first else ()), return_outputs=False)
        return str(refusal.value)

    assert len(set(threads(on_rank, 2))) == 1


class Switch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor, sign: int = 1) -> Tensor:
        return self.layers[1](self.layers[0](x) * sign)


@pytest.mark.parametrize("inputs", ["every", "first"])
def test_an_input_that_is_left_out_is_what_the_model_takes_it_for(threads: Threads, inputs: Any) -> None:
    """It was what it had been in the example, and the loss another than the model's without a word."""
    x, schedule = torch.randn(4, 4), schedules.one_f_one_b(2, 2)

    def on_rank(transport: Transport) -> str:
        cut = split(Switch(), 2, example={"x": x, "sign": -1}, inputs=inputs)
        stages = cut.stages(schedule.placement, transport.rank, "cpu", transport=transport)
        executor = Executor(stages, schedule, Tensor.sum)
        with pytest.raises(StepwellError) as refusal:
            executor.step(**({"x": x} if inputs == "every" or executor.is_first else {}), return_outputs=False)
        return str(refusal.value)

    words = threads(on_rank, 2)
    assert all(
        "was given no sign, which is -1 in the example and 1 where the model is called without it" in one
        for one in words
    )
