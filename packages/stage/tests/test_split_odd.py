"""Models that were once cut badly, or not at all."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from stepwell_stage import split


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
