"""What models and their units return, and what Python makes of it: right on every stage, or refused with a sentence."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import split_support as support
import torch
from torch import Tensor, nn
from torch.nn.utils import prune, rnn, weight_norm

from stepwell_p2p import Transport
from stepwell_stage import Executor, schedules, split
from stepwell_stage.exceptions import StageUsageError

Glue = Callable[[Any, Tensor], Any]
X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)).double()


class Row(nn.Module):
    """Layers in a row, with the glue that a test wants around them."""

    def __init__(self, glue: Glue, layer: Callable[[], nn.Module] = lambda: nn.Sequential(nn.Linear(4, 4))) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(4))
        self.glue = glue

    def forward(self, x: Tensor) -> Any:
        return self.glue(self, x)


def make(glue: Glue, layer: Callable[[], nn.Module] = lambda: nn.Sequential(nn.Linear(4, 4))) -> Row:
    return support.make(lambda: Row(glue, layer))


def right(
    threads: Callable[..., Any], model: Row, *, loss_of: Callable[[Any], Tensor] = lambda y: y.square().mean()
) -> None:
    """Two steps on two stages are those of one process: losses and gradients."""

    def on_rank(transport: Transport, mine: Row) -> Any:
        cut = split(mine, 2, example=X[:3])
        schedule = schedules.one_f_one_b(2, 2)
        executor = Executor(
            cut.stages(schedule.placement, transport.rank, "cpu", transport=transport), schedule, loss_of
        )
        for _ in range(2):
            executor.step(x=X, return_outputs=False)
        module = executor.stages[0].submodule
        assert isinstance(module, nn.Module)
        return executor.loss, {name: one.grad for name, one in module.named_parameters()}

    copies = [copy.deepcopy(model) for _ in range(2)]
    found = threads(lambda transport: on_rank(transport, copies[transport.rank]), 2)
    total = 0.0
    for step in range(2):
        for part in X.chunk(2):
            loss = loss_of(model(part)) / 2
            loss.backward()
            total += loss.item() if step else 0.0
    assert found[1][0].item() == pytest.approx(total, rel=1e-12)
    for name, parameter in model.named_parameters():
        (mine,) = [grads[name] for _, grads in found if name in grads]
        torch.testing.assert_close(mine, parameter.grad, rtol=1e-10, atol=1e-13)


class Giving(nn.Sequential):
    """Gives containers of its own, which hold no tensor."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), [], {"times": 1}


def test_containers_without_tensors_are_of_each_call(threads: Callable[..., Any]) -> None:
    """Stages without the unit gave all microbatches one list: the loss was that of a list twice as long."""

    def glue(self: Any, x: Tensor) -> Tensor:
        kept = []
        for layer in self.layers:
            x, some, named = layer(x)
            some.append(1)
            named["times"] += 1
            kept.append(len(some) * named["times"])
        return x * sum(kept)

    right(threads, make(glue, Giving))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.LSTM(1, 1, batch_first=True)

    def forward(self, x: Any) -> Any:
        return self.inner(x)[0]


def test_packed_sequences(threads: Callable[..., Any]) -> None:
    """A named tuple that looks at its fields when it is made: an AssertionError of torch's came when the model was cut."""

    def glue(self: Any, x: Tensor) -> Tensor:
        y = rnn.pack_padded_sequence(x[..., None], torch.full((len(x),), 4), batch_first=True)
        for layer in self.layers:
            y = layer(y)
        return rnn.pad_packed_sequence(y, batch_first=True)[0]

    right(threads, make(glue, Recurrent))


class Out:
    """What a model returns in a class of its own."""

    def __init__(self, **parts: Any) -> None:
        self.__dict__.update(parts)


def test_a_result_in_an_object_of_ones_own(threads: Callable[..., Any]) -> None:
    """What stage 0 makes did not cross, and an absent tensor came to the loss."""

    def glue(self: Any, x: Tensor) -> Any:
        first = y = self.layers[0](x)
        for layer in list(self.layers)[1:]:
            y = layer(y)
        return Out(inner=Out(first=first), y=y)

    right(threads, make(glue), loss_of=lambda out: (out.inner.first * out.y).sum())


def test_a_result_in_a_closure(threads: Callable[..., Any]) -> None:
    def glue(self: Any, x: Tensor) -> Any:
        first = y = self.layers[0](x)
        for layer in list(self.layers)[1:]:
            y = layer(y)
        return lambda: (first * y).sum()

    right(threads, make(glue), loss_of=lambda out: out())


def test_numbers_that_python_takes_from_values(threads: Callable[..., Any]) -> None:
    """With stages that do not have the value: a RuntimeError or TypeError about fake tensors, when the model was cut."""
    cases: list[Callable[[Tensor], Any]] = [
        lambda x: float(x.detach().numpy().mean()),
        lambda x: float(f"{x.mean():.6f}"),
        lambda x: len(repr(x.detach() * 0 + 1000)),
        lambda x: float(x.detach()[:, : 1 + (x.detach().mean() > 0).long()].mean()),
        lambda x: float(x.detach()[(x.detach().mean() > 0).long() :: 2].sum()),
    ]
    for number_of in cases:

        def glue(self: Any, x: Tensor, number_of: Callable[[Tensor], Any] = number_of) -> Tensor:
            for layer in self.layers:
                x = layer(x)
                x = x * (1 + number_of(x))
            return x

        right(threads, make(glue))


class Counts:
    def __init__(self, n: int) -> None:
        self.n = n


class Long(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 4))

    def forward(self, x: Tensor, counts: Counts) -> Any:
        return super().forward(x), torch.ones(counts.n)


def test_an_object_that_decides_a_shape(threads: Callable[..., Any]) -> None:
    """Stages without the unit took the shape to be that of the first call with an object of this class."""

    def glue(self: Any, x: Tensor) -> Tensor:
        for n, layer in enumerate(self.layers):
            x, ones = layer(x, Counts(n + self.steps))
            x = x * (1 + ones.shape[0])
        self.steps += 1
        return x

    model = make(glue, Long)
    model.steps = 0  # type: ignore[assignment]
    right(threads, model)


def refused(model: nn.Module, message: str) -> None:
    with pytest.raises(StageUsageError, match=message):
        split(model, 2, example=X[:3])


def in_a_row(self: Any, x: Tensor) -> Tensor:
    for layer in self.layers:
        x = layer(x)
    return x


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")  # by torch itself too
def test_modules_that_a_compiler_made() -> None:
    model = make(in_a_row)
    model.layers[1] = torch.jit.script(nn.Linear(4, 4).double())
    refused(model, r"'layers\.1' is a module of torch\.jit.*split the model that it was made of")
    model = make(in_a_row)
    model.layers[1] = torch.compile(model.layers[1])  # type: ignore[assignment]
    refused(model, r"'layers\.1' is wrapped by torch\.compile.*compile units of the stages' modules")


def test_what_is_made_of_parameters_and_kept() -> None:
    model = make(in_a_row, lambda: nn.Linear(4, 4))
    prune.l1_unstructured(model.layers[2], "weight", amount=0.5)
    refused(model, r"'layers\.2\.weight' is made of parameters and kept.*prune\.remove\(\)")
    model = make(in_a_row, lambda: nn.Linear(4, 4))
    with pytest.warns(FutureWarning):
        weight_norm(model.layers[1])
    refused(model, r"'layers\.1\.weight' is made of parameters and kept.*torch\.nn\.utils\.parametrizations")


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")  # by torch itself too
def test_a_transform_of_torch_func() -> None:
    """Tensors of the transform itself were to cross."""

    def glue(self: Any, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            y, tangent = torch.func.jvp(lambda a: a.tanh() * a.sum(), (x,), (x.detach(),))
            x = y + tangent
        return x

    model = make(glue)
    cut = split(model, 2, example=X[:3])
    sent = cut.module(0)(X)
    torch.testing.assert_close(cut.module(1)(*sent, x=X), model(X))
