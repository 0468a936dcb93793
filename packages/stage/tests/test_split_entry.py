"""How inputs enter the model's forward is decided once for all that look alike, and what they are is taken each time anew."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from split_support import check
from torch import Tensor, nn

from stepwell_stage.split._entry import Entries
from stepwell_stage.split._inputs import Inputs, Kinds
from stepwell_stage.split._leaves import Given


class Signed(nn.Module):
    """Layers whose inputs are alike at times, and a number that is equal to another with another sign."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, a: Tensor, b: Tensor, sign: float = 0.0) -> Tensor:
        x = a
        for layer in self.layers:
            x = layer(x).tanh() + b * math.copysign(1.0, sign)
        return x


def test_inputs_that_look_alike_are_still_those_of_the_step(threads: Callable[..., Any]) -> None:
    """First both are one tensor, then they are two; and 0.0 is equal to -0.0."""
    torch.manual_seed(0)
    one, *others = torch.randn(5, 2, 4).double()
    parts = [
        {"a": one, "b": one, "sign": 0.0},
        {"a": one, "b": others[0], "sign": -0.0},
        {"b": others[1], "sign": 0.0, "a": others[2]},
        {"a": others[3], "b": others[1], "sign": -0.0},
    ]
    check(threads, Signed().double(), [parts[1]], [parts] * 2)


def test_of_one_structure_only_the_first_inputs_are_looked_at_closely() -> None:
    x, model = torch.ones(1, 4), Signed()
    inputs = Inputs(model)
    kinds = Kinds(inputs, [{"a": x, "b": x, "sign": 0.0}], everywhere=True)
    asked = []
    like = kinds.like
    kinds.like = lambda *given: asked.append(given) or like(*given)  # type: ignore[method-assign,func-returns-value]
    entries = Entries(0, inputs, kinds)
    first, again = (entries.of(Given((one, one + 1), {})) for one in (x, torch.zeros(3, 4)))
    assert (first, len(asked)) == (again, 1)
    named = again.named(Given((x, 2 * x), {}))
    assert (list(named), named["b"].sum().item(), named["sign"]) == (["a", "b", "sign"], 8.0, 0.0)
    entries.of(Given((x,), {"b": x}))
    assert len(asked) == 2
    for _ in range(2):  # an object may be another one each time
        entries.of(Given((x, x), {"sign": object()}))
    assert len(asked) == 4
