"""What reaches units by other ways than as a tensor among their arguments: functions, properties that are kept, other modes."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from split_support import Block, check, loss_of, make, numbers
from stage_support import Threads
from torch import Tensor, nn
from torch.nn.utils import parametrize

from stepwell_p2p import Transport
from stepwell_stage import Executor, schedules, split
from stepwell_stage.exceptions import StageUsageError

STEPS = [[{"x": numbers(seed)} for seed in (1, 2, 3)], [{"x": numbers(seed)} for seed in (4, 5, 6)]]


class Acts(Block):
    """Ends with a function that it is given."""

    def forward(self, x: Tensor, act: Callable[[Tensor], Tensor] = torch.tanh) -> Tensor:
        return act(super().forward(x))


class Early(nn.Module):
    """The last block is given a function that remembers what the first one, or glue behind it, made."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Acts() for _ in range(4))
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        first = self.blocks[0](x)
        x = self.blocks[1](first)
        made = first + x
        acts: dict[str, Callable[[Tensor], Tensor]] = {
            "closure": lambda y: y * first,
            "default": lambda y, first=first: y * first,  # type: ignore[misc]
            "of glue": lambda y: y * made,
            "partial": functools.partial(torch.mul, first),
            "method": first.mul,
        }
        return self.blocks[3](self.blocks[2](x), acts[self.how])  # type: ignore[no-any-return]


@pytest.mark.parametrize("how", ["closure", "default", "of glue", "partial", "method"])
def test_functions_that_remember_what_earlier_units_make(threads: Threads, how: str) -> None:
    """They were given to the unit without what they remember, and the first step was refused as if it went another way."""
    check(threads, make(lambda: Early(how)), STEPS[0][:1], STEPS, ranks=3)
    check(threads, make(lambda: Early(how)), STEPS[0][:1], STEPS, "zbv", ranks=2)


class Skips(nn.Module):
    """In evaluation the same calls and operations as in training, of another value."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        first = self.blocks[0](x)
        second = self.blocks[1](first)
        third = self.blocks[2](second)
        third = third + (second if self.training else first)
        return self.blocks[3](nn.functional.dropout(third, 0.0 if self.training else 0.5, self.training))  # type: ignore[no-any-return]


def test_other_operands_in_evaluation(threads: Threads) -> None:
    """By the names of what it calls evaluation went the way of training, so it was refused when it came."""
    model, x, schedule = make(Skips), numbers(0, 4), schedules.one_f_one_b(2, 2)
    cut = split(copy.deepcopy(model), {"blocks.3": 1}, example=x)

    def on_rank(transport: Transport) -> Any:
        stages = cut.stages(schedule.placement, transport.rank, "cpu", transport=transport)
        executor = Executor(stages, schedule, loss_of)
        executor.step(x=x, return_outputs=False)
        for stage in stages:
            assert isinstance(stage.submodule, nn.Module)
            stage.submodule.eval()
        return executor.eval(x=x)

    found = threads(on_rank, 2)[1]
    with torch.no_grad():
        torch.testing.assert_close(found, model.eval()(x), rtol=1e-12, atol=1e-12)
    (loss_of(model.train()(x[:2])) / 2 + loss_of(model(x[2:])) / 2).backward()
    for mine, plain in zip(cut.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, plain.grad, rtol=1e-10, atol=1e-12)


def test_a_dropout_between_units_is_not_another_way() -> None:
    """In evaluation it gives what it is given: one way, of which stages need not tell one another."""

    class Drops(Skips):
        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = nn.functional.dropout(block(x), 0.1, self.training)
            return x

    cut = split(make(Drops), 2, example=numbers(0))
    assert len(cut.wires()) == 1


class Kept(Block):
    @functools.cached_property
    def scale(self) -> float:
        return float(self.inner.in_features) ** -0.5


class Scaled(nn.Module):
    """Between units it is scaled by what a unit finds out once and keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Kept() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x * block.scale) * self.blocks[0].scale
        return x


class Uses(Kept):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


class ScaledWithin(Scaled):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Uses() for _ in range(4))


@pytest.mark.parametrize("kind", [Scaled, ScaledWithin])
def test_cached_properties_of_units(threads: Threads, kind: Callable[[], nn.Module]) -> None:
    """A property that a unit had kept was taken for what it had changed, and refused."""
    check(threads, make(kind), STEPS[0][:1], STEPS, ranks=3)


class ByData(Kept):
    """Looks at data, so that stages that do not have it cannot run it."""

    @functools.cached_property
    def scale(self) -> float:
        return float(self.inner.weight.detach().abs().max())

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


def test_a_cached_property_of_weights_is_not_known_elsewhere() -> None:
    class Model(Scaled):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(ByData() for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x) * self.blocks[0].scale
            return x

    with pytest.raises(StageUsageError, match=r"looks at 'scale', which unit 'blocks.0' changes"):
        split(make(Model), 2, example=numbers(0))


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight + weight.mT


class Parametrized(nn.Module):
    """Weights are made once for all calls of a unit."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        for block in self.blocks:
            parametrize.register_parametrization(block, "weight", Symmetric())

    def forward(self, x: Tensor) -> Tensor:
        with parametrize.cached():
            for block in self.blocks:
                x = block(block(x).tanh())
        return x


def test_weights_that_are_kept_for_all_units() -> None:
    """torch keeps them under the identity of the module that was copied: stages got absent weights, and refused the step."""
    with pytest.raises(
        StageUsageError, match=r"unit 'blocks.0' is called within torch.nn.utils.parametrize.cached\(\)"
    ):
        split(make(Parametrized), 2, example=numbers(0))


class Recursive(nn.Module):
    """Its forward calls itself."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(Block() for _ in range(2))
        self.up = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor, depth: int = 0) -> Tensor:
        if depth == 2:
            return x
        return x + self.up[depth](self.forward(self.down[depth](x), depth + 1))  # type: ignore[no-any-return]


def test_a_forward_that_calls_itself(threads: Threads) -> None:
    """The stage took that for another step, and refused inputs that the example did not have."""
    check(threads, make(Recursive), STEPS[0][:1], STEPS, ranks=3)


class Slope(nn.Module):
    """A derivative between units, of a function that remembers what a unit makes."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.blocks[1](self.blocks[0](x))
        slope = torch.func.grad(lambda z: (z.sin() * y).sum())(y.detach())
        return self.blocks[3](self.blocks[2](y + slope))  # type: ignore[no-any-return]


def test_a_derivative_that_remembers_what_a_unit_makes(threads: Threads) -> None:
    """On a stage that has neither, a tensor within the transform met an absent one: an error of torch's in the first step."""
    check(threads, make(Slope), STEPS[0][:1], STEPS, ranks=3)


class Borrows(nn.Module):
    """Computes with the weights of its layers, and calls none of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            assert isinstance(layer, nn.Linear)
            x = nn.functional.linear(x, layer.weight, layer.bias)
        return x


def test_layers_that_are_not_called() -> None:
    """It was said that they are reached through a closure."""
    with pytest.raises(
        StageUsageError, match="a unit is a module that is called, not one whose weights alone are used"
    ):
        split(make(Borrows), 2, example=numbers(0))
