"""Tied buffers that forwards replace by others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from stepwell_p2p import Transport
from stepwell_stage import Executor, PipelineStage, tie
from stepwell_stage.schedules import interleaved_1f1b


class Counted(nn.Module):
    """Puts another buffer in place of the one that is tied."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = self.seen + 1
        return self.linear(x)


@pytest.mark.parametrize("ranks", [1, 2])
def test_broadcast_reaches_each_stages_copy_of_a_replaced_buffer(threads: Callable[..., Any], ranks: int) -> None:
    """Only that of the first of a rank's stages got the values; and where no other rank has any, none did."""

    def load(transport: Transport) -> list[float]:
        schedule = interleaved_1f1b(ranks, 2)
        places = schedule.placement.stages_of(transport.rank)
        stages = [PipelineStage(Counted(), index, schedule.placement.num_stages, "cpu") for index in reversed(places)]
        executor = Executor(stages, schedule, functional.mse_loss, transport=transport)
        tied = tie(executor, {"seen": [(index, "seen") for index in range(schedule.placement.num_stages)]})
        x = torch.ones(2, 3)
        executor.step(*((x,) if executor.is_first else ()), target=x if executor.is_last else None)
        if executor.is_first:
            stages[-1].submodule.seen.fill_(7.0)
        tied.broadcast()
        return [stage.submodule.seen.item() for stage in stages]

    assert threads(load, ranks) == [[7.0, 7.0]] * ranks
