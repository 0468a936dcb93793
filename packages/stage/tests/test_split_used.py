"""Values that cross in several ways and are used in some: what nothing uses gets no gradient, as in one process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from split_support import check
from stage_support import Threads
from torch import Tensor, nn


class Optional(nn.Module):
    """Two branches, of which the second counts only sometimes; both are known before anybody can tell."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: Tensor, joined: bool = True) -> Tensor:
        one, two = self.first(x), self.second(x)
        y = self.layers[0](one).tanh()
        if joined:
            y = y * two
        for layer in self.layers[1:]:
            y = layer(y).tanh() + 0.1 * one
        return y


def inputs(rows: int, joined: bool) -> Mapping[str, Any]:
    return {"x": torch.randn(rows, 6).double(), "joined": joined}


@pytest.mark.parametrize("inputs_from", ["every", "first"])
@pytest.mark.parametrize(
    "name", ["gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "interleaved-zero-bubble", "zbv", "dualpipe-v"]
)
def test_what_no_way_of_a_step_uses_has_no_gradient(threads: Threads, name: str, inputs_from: str) -> None:
    """It got zeros, which momentum and weight decay take for a reason to move it."""
    torch.manual_seed(0)
    examples = [inputs(2, True), inputs(2, False)]
    without, both = [inputs(2, False)] * 6, [inputs(2, number % 2 == 0) for number in range(6)]
    check(threads, Optional().double(), examples, [without], name, inputs=inputs_from)
    check(threads, Optional().double(), examples, [both], name, inputs=inputs_from)
    check(threads, Optional().double(), examples, [without, both], name, inputs=inputs_from)
