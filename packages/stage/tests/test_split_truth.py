"""What Python asks of values that a stage does not have, and state that units keep: answered as in one process, or refused."""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from split_support import check
from stage_support import Threads
from torch import Tensor, nn

from stepwell_p2p import Transport
from stepwell_stage import Executor, schedules, split, tie
from stepwell_stage.exceptions import StageUsageError


class Layer(nn.Module):
    """Keeps a counter, a load and whatever it is given, if it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.calls, self.temperature = 0, 0.5
        self.register_buffer("load", torch.zeros(4), persistent=False)

    def forward(self, x: Tensor, how: str = "", given: Any = None) -> Any:
        y = self.inner(x).tanh() + 0.1
        if how == "counts":
            self.calls += 1
        elif how == "loads":
            with torch.no_grad():
                self.load += y.mean(0)
        elif how == "changes":
            given["depth"] = given.get("depth", 0) + 1
        elif how == "number":
            self.calls += 1
            return y, 1.0 / self.calls
        elif how == "marked":
            y.scale = 2.0  # type: ignore[attr-defined]
        return y


class Row(nn.Module):
    """Four layers, and glue that a test brings."""

    def __init__(self, glue: Callable[[Row, Tensor], Tensor], frozen: int = 0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.glue = glue
        self.busy, self.mode, self.log = False, {"steps": 0}, [0.0]
        self.memory = [torch.zeros(4, dtype=torch.float64) for _ in range(4)]
        self.cache: dict[int, Tensor] = {}
        self.register_buffer("mean", torch.zeros(4, dtype=torch.float64), persistent=False)
        self.layers[:frozen].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.glue(self, x)


def asks_requires_grad(self: Row, x: Tensor) -> Tensor:
    y = self.layers[1](self.layers[0](x))
    z = self.layers[2](x + y * 0)
    return self.layers[3](z * (2 if y.requires_grad else 3))


def asks_without_grad(self: Row, x: Tensor) -> Tensor:
    with torch.no_grad():
        y = self.layers[1](self.layers[0](x))
    return self.layers[3](self.layers[2](x) * (2 if y.requires_grad else 3)) + (y.detach().requires_grad + y.is_leaf)


def asks_for_a_function(self: Row, x: Tensor) -> Tensor:
    y = self.layers[0](x).detach()
    return self.layers[3](self.layers[2](self.layers[1](x)) * (2 if y.grad_fn is None else 3))


def asks_type_of_layers(self: Row, x: Tensor) -> Tensor:
    for layer in self.layers:
        x = x + layer(x) if type(layer) is Layer else layer(x)
    return x * (2 if type(self) is Row else 3)


def in_place(self: Row, x: Tensor, act: Callable[..., Tensor]) -> Tensor:
    x = self.layers[0](x)
    y = self.layers[1](act(x))
    return self.layers[3](self.layers[2](y + x)) + x


def adds_many(self: Row, x: Tensor) -> Tensor:
    one, two = self.layers[0](x), self.layers[1](x)
    torch._foreach_mul_([one, two], 0.5)
    return self.layers[3](self.layers[2](one)) + two


def counts_in_a_dict(self: Row, x: Tensor) -> Tensor:
    for layer in self.layers:
        x = layer(x)
    self.mode["steps"] += 1
    self.log.append(0.5)
    return x * self.mode["steps"] + sum(self.log)


def sets_and_resets(self: Row, x: Tensor) -> Tensor:
    x = x * (5.0 if self.busy else 1.0)
    self.busy = True
    for layer in self.layers:
        x = layer(x)
    self.busy = False
    return x


def fills_a_cache(self: Row, x: Tensor) -> Tensor:
    if len(x) not in self.cache:
        self.cache[len(x)] = torch.arange(4).double() / len(x)
    for layer in self.layers:
        x = layer(x + self.cache[len(x)])
    return x


def counts_in_units_alone(self: Row, x: Tensor) -> Tensor:
    for layer in self.layers:
        x = layer(x, "counts")
    return x


def gradient_of_glue(self: Row, x: Tensor) -> Tensor:
    x = self.layers[1](self.layers[0](x))
    x = self.layers[3](self.layers[2](x))
    (slope,) = torch.autograd.grad(x.square().sum(), x, create_graph=True)
    return x + slope


RIGHT = {
    "requires_grad": asks_requires_grad,
    "requires_grad under no_grad": asks_without_grad,
    "no grad_fn": asks_for_a_function,
    "type": asks_type_of_layers,
    "leaky_relu in place": functools.partial(in_place, act=functools.partial(F.leaky_relu, inplace=True)),
    "silu in place": functools.partial(in_place, act=nn.SiLU(inplace=True)),
    "many in place": adds_many,
    "counts in a dict": counts_in_a_dict,
    "sets and resets": sets_and_resets,
    "a cache": fills_a_cache,
    "counters of units": counts_in_units_alone,
    "a gradient": gradient_of_glue,
}


@pytest.mark.parametrize("frozen", [0, 2])
@pytest.mark.parametrize("glue", RIGHT)
def test_as_in_one_process(threads: Threads, glue: str, frozen: int) -> None:
    """Each went the other way, or on with another number, on stages that do not have the value that it is about."""
    torch.manual_seed(0)
    steps = [[{"x": torch.randn(rows, 4).double()} for rows in (2, 3, 2)] for _ in range(2)]
    check(threads, Row(RIGHT[glue], frozen).double(), [{"x": torch.randn(2, 4).double()}], steps)


def test_several_stages_on_a_rank(threads: Threads) -> None:
    torch.manual_seed(0)
    steps = [[{"x": torch.randn(2, 4).double()} for _ in range(4)] for _ in range(2)]
    for glue in ("requires_grad", "silu in place", "counts in a dict", "sets and resets"):
        check(threads, Row(RIGHT[glue]).double(), [steps[0][0]], steps, "zbv")


def asks(what: Callable[[Tensor], Any]) -> Callable[[Row, Tensor], Tensor]:
    def glue(self: Row, x: Tensor) -> Tensor:
        y = self.layers[1](self.layers[0](x))
        return self.layers[3](self.layers[2](x) * (2 if what(y) else 3)) + y

    return glue


def given(how: str) -> Callable[[Row, Tensor], Tensor]:
    def glue(self: Row, x: Tensor) -> Tensor:
        context: dict[str, int] = {}
        for layer in self.layers:
            x = layer(x, how, context)
        return x * (1 + context.get("depth", 0))

    return glue


def reads(name: str) -> Callable[[Row, Tensor], Tensor]:
    def glue(self: Row, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, {"calls": "counts", "load": "loads"}[name])
        return x * (1 + sum(getattr(layer, name) for layer in self.layers))

    return glue


def remembers(self: Row, x: Tensor) -> Tensor:
    new = []
    for layer, memory in zip(self.layers, self.memory, strict=True):
        new.append(x.detach().mean(0))
        x = layer(x + memory)
    self.memory = new
    return x


def moves_a_mean(self: Row, x: Tensor) -> Tensor:
    for layer in self.layers:
        x = layer(x)
    return F.batch_norm(x, self.mean, torch.ones_like(self.mean), training=True)


def moves_a_weight(self: Row, x: Tensor) -> Tensor:
    for layer in self.layers:
        x = layer(x)
    for layer in self.layers:
        layer.inner.weight.data.mul_(0.9)
    return x


def marks(self: Row, x: Tensor) -> Tensor:
    for layer in self.layers:
        x = layer(x, "marked")
    return x


def gradient_through_units(self: Row, x: Tensor) -> Tensor:
    y = self.layers[1](self.layers[0](x))
    z = self.layers[3](self.layers[2](y))
    return z + torch.autograd.grad(z.sum(), y, create_graph=True)[0]


REFUSED = {
    "grad_fn": (asks(lambda y: y.grad_fn is not None), r"grad_fn in .* asks for grad_fn of a value that units make"),
    "data_ptr": (asks(lambda y: y.data_ptr()), "asks for data_ptr of a value that units make"),
    "version": (asks(lambda y: y._version), "asks for _version of a value that units make"),
    "hooks": (asks(lambda y: y._backward_hooks), "asks for _backward_hooks of a value"),
    "storage": (asks(lambda y: y.untyped_storage().nbytes()), "asks for untyped_storage of a value"),
    "a counter of units": (reads("calls"), "looks at 'calls', which unit 'layers.0' changes"),
    "a buffer of units": (reads("load"), r"uses 'layers\.0\.load' outside of unit 'layers\.0', which changes it"),
    "what units are given": (given("changes"), "unit 'layers.0' changes a dict that it is given"),
    "memories": (remembers, "takes what an earlier forward has made of what units make"),
    "a running mean": (moves_a_mean, "takes what an earlier forward has made of what units make|changes 'mean'"),
    "weights of units": (moves_a_weight, r"changes 'layers\.0\.inner\.weight', which is a unit's, outside of the unit"),
    "attributes of tensors": (marks, "gives a tensor with an attribute 'scale'"),
    "gradients": (gradient_through_units, r"takes a gradient through unit 'layers\.3', whose graph no other stage has"),
}


@pytest.mark.parametrize("glue", REFUSED)
def test_refused_when_the_model_is_cut(glue: str) -> None:
    """Each was another number, or none, on stages that do not have the value, without a word."""
    function, message = REFUSED[glue]
    with pytest.raises(StageUsageError, match=message):
        split(Row(function).double(), 2, example={"x": torch.randn(2, 4).double()})


def numbered(self: Row, x: Tensor) -> Tensor:
    for layer in self.layers:
        x, number = layer(x, "number")
        x = x * number
    return x


def random_number(self: Row, x: Tensor) -> Tensor:
    share = random.random()
    x = x * share
    for layer in self.layers:
        x = layer(x)
    return x / share


@pytest.mark.parametrize(
    ("glue", "message"),
    [
        (numbered, "gives Python another number, or structure, than in the example or before"),
        (random_number, "such as a random number of Python's, must be the same on every rank"),
    ],
)
def test_refused_in_a_step(threads: Threads, glue: Any, message: str) -> None:
    """Each stage went on with a number of its own."""
    steps = [[{"x": torch.randn(2, 4).double()} for _ in range(3)]]
    with pytest.raises(StageUsageError, match=message):
        check(threads, Row(glue).double(), [steps[0][0]], steps)


def test_a_loss_function_that_uses_parameters_of_the_model_is_refused(threads: Threads) -> None:
    """The loss was right, and the gradients of all other stages lacked this part of it."""
    schedule, x = schedules.one_f_one_b(2, 2), torch.randn(4, 4).double()

    def on_rank(transport: Transport) -> None:
        model = Row(asks_type_of_layers).double()
        cut = split(model, 2, example={"x": x})
        stages = cut.stages(schedule.placement, transport.rank, "cpu", transport=transport)
        own = stages[0].submodule
        assert isinstance(own, nn.Module)

        def loss(y: Tensor, parameters: Callable[[], Any]) -> Tensor:
            return y.sum() + sum(one.square().sum() for one in parameters())

        with_own = Executor(stages, schedule, functools.partial(loss, parameters=own.parameters))
        with_own.step(x=x, return_outputs=False)
        stages = cut.stages(schedule.placement, transport.rank, "cpu", transport=transport)
        Executor(stages, schedule, functools.partial(loss, parameters=model.parameters)).step(x=x, return_outputs=False)

    with pytest.raises(
        StageUsageError, match=r"loss_fn uses 'layers\.[01]\.inner\..*' of the model, which other stages"
    ):
        threads(on_rank, 2)


class Normed(nn.Module):
    """Layers that share a norm, whose statistics are no part of the state."""

    def __init__(self) -> None:
        super().__init__()
        norm = nn.BatchNorm1d(4)
        norm.register_buffer("running_mean", torch.zeros(4), persistent=False)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), norm) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_statistics_that_units_share_are_refused() -> None:
    """Each stage had others of them."""
    with pytest.raises(
        StageUsageError, match=r"the buffer 'layers\.0\.1\.running_mean' of unit 'layers\.0', .* on stages 0, 1"
    ):
        split(Normed(), 2, example=torch.randn(3, 4))


def in_inference_mode(self: Row, x: Tensor) -> Tensor:
    with torch.inference_mode():
        y = self.layers[1](self.layers[0](x))
    return self.layers[3](self.layers[2](y.clone()))


def multiplies_by_a_weight(self: Row, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        y = self.layers[1](self.layers[0](x)) @ self.layers[1].inner.weight
    return self.layers[3](self.layers[2](y.float()))


@pytest.mark.parametrize("glue", [in_inference_mode, multiplies_by_a_weight])
def test_inference_mode_and_autocast(threads: Threads, glue: Any) -> None:
    """The one failed for versions of tensors, the other for a cast of a weight that was kept, and was absent."""
    schedule, x = schedules.one_f_one_b(2, 2), torch.randn(4, 4)
    model = Row(glue)
    whole = copy.deepcopy(model)

    def on_rank(transport: Transport) -> float | None:
        cut = split(copy.deepcopy(model), 2, example={"x": x})
        stages = cut.stages(schedule.placement, transport.rank, "cpu", transport=transport)
        executor = Executor(stages, schedule, Tensor.sum, loss_weights="sum")
        if cut.tied:
            tie(executor, cut.tied)
        executor.step(x=x, return_outputs=False)
        return None if executor.loss is None else executor.loss.item()

    losses = threads(on_rank, 2)
    assert losses[1] == pytest.approx(sum(whole(part).sum().item() for part in x.tensor_split(2)), rel=1e-5)


def test_freezing_after_the_split_is_refused_where_the_forward_asks(threads: Threads) -> None:
    """Other stages cannot know of it, and would go the old way."""

    class Freezing(Row):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)

    model = Freezing(asks_requires_grad).double()
    cut = split(model, 2, example={"x": torch.randn(2, 4).double()})
    stage = cut.module(0)
    model.layers[0].requires_grad_(False)
    model.layers[1].requires_grad_(False)
    with pytest.raises(StageUsageError, match="freeze and unfreeze parameters before the model is split"):
        stage(x=torch.randn(2, 4).double())


class Experts(nn.Module):
    """Multiplies groups of rows with a weight each, in a way that torch cannot try on absent tensors of this dtype on CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return torch._grouped_mm(x, self.weight, offs=torch.tensor([2, len(x)], dtype=torch.int32))


def test_what_fails_on_absent_tensors_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    """torch logged an error with a traceback for each operation that it cannot run so, though the example is run really then."""
    cut = split(nn.Sequential(Experts(), Experts(), Experts()), 2, example=torch.randn(4, 4))
    assert cut.num_stages == 2
    assert not [one for one in caplog.records if "fake_tensor" in one.name]


def test_the_model_is_left_as_it_is() -> None:
    model = Row(counts_in_a_dict).double()
    before: Mapping[str, Any] = {**model.mode}
    state = random.getstate()
    split(model, 2, example={"x": torch.randn(2, 4).double()})
    assert model.mode == before
    assert random.getstate() == state
