"""How the work of cutting grows with a model."""

from __future__ import annotations

import pytest
from split_support import Block, make, numbers
from torch import Tensor, nn

from stepwell_meta.testing import count_calls
from stepwell_stage import split


class Joined(nn.Module):
    """Blocks in a row; if wanted each of the second half takes what its counterpart in the first made."""

    def __init__(self, layers: int, *, skips: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.skips = skips

    def forward(self, x: Tensor) -> Tensor:
        made: list[Tensor] = []
        for number, block in enumerate(self.blocks):
            is_late = 2 * number >= len(self.blocks)
            x = block(x + made.pop() * 0.5 if self.skips and is_late else x)
            if not is_late:
                made.append(x)
        return x


@pytest.mark.parametrize("skips", [False, True])
def test_the_work_grows_with_the_layers_and_no_faster(skips: bool) -> None:
    """To cut four times as many layers, and to make all stages of them, is about four times the work."""
    few, many = make(lambda: Joined(8, skips=skips)), make(lambda: Joined(32, skips=skips))

    def cut(model: nn.Module) -> None:
        found = split(model, 4, example=numbers(0))
        for stage in range(4):
            found.module(stage)

    cut(few)  # what is done but once in a process
    assert count_calls(lambda: cut(many)) < 4.5 * count_calls(lambda: cut(few))
