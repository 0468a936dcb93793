"""Units that are called like operations of torch, and what is kept of the functions that they are given."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import torch
from torch import Tensor, nn

from stepwell_stage import split


class Means(nn.Module):
    """Its second call is ``Tensor.mean``, and a unit has the same name, and is given the same."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.mean, self.last = nn.Linear(4, 4), nn.Linear(4, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        shift = y.mean()
        z = self.mean(y)
        return self.last(z + shift) * (1 + z.dim())


def test_a_unit_and_an_operation_of_one_name() -> None:
    """A stage that has neither took the unit's result to look like the second operation's: a number for a table, and a third
    of the result came out.
    """
    torch.manual_seed(0)
    model, x = Means().double(), torch.randn(3, 4).double()
    cut = split(model, {"first": 0, "mean": 0, "last": 1}, example=x)
    sent = cut.module(0)(x)
    torch.testing.assert_close(cut.module(1)(*sent, x=x), model(x))


class Noting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, note: Callable[[Tensor], None]) -> Tensor:
        y = self.linear(x)
        note(y)
        return y * 2


class Notes(nn.Module):
    """Each forward has a list of its own, into which units put what they make."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Noting() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        notes: list[Tensor] = []
        for layer in self.layers:
            x = layer(x, notes.append)
        return x


def test_nothing_is_kept_of_a_list_that_units_fill() -> None:
    """Its ``append`` was what the unit's result was known by, so each microbatch's activations lived on with the stage."""
    stage, made = split(Notes(), 2, example=torch.ones(2, 4)).module(0), []
    stage.get_submodule("layers.0.linear").register_forward_hook(lambda _, __, out: made.append(weakref.ref(out)))
    for _ in range(3):
        stage(torch.ones(2, 4))
    gc.collect()
    assert [one() for one in made if type(one()) is Tensor] == []
    assert len(made) >= 3
