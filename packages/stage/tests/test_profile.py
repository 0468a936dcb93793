"""Costs measured on the real stages."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from stepwell_p2p import LoopbackFabric, Transport
from stepwell_stage import Costs, Executor, Kind, PipelineStage, Schedule, lower, profile_stages, simulate
from stepwell_stage.exceptions import StageUsageError
from stepwell_stage.schedules import dualpipe_v, forward_only, one_f_one_b, zb_h1

Threads = Callable[..., list[Any]]
WIDTH, ROWS = 4, 3
SECONDS = (0.004, 0.016)


class Sleeps(nn.Module):
    """Takes a known time forward at least, moves a buffer, and draws random numbers."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("table", torch.zeros(1, WIDTH).expand(ROWS, WIDTH))  # cannot be written to as it is
        self.seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds)
        self.calls += 1
        return self.linear(x) + torch.rand(()) + self.table[0]


def profiled(transport: Transport, schedule: Schedule, repeats: int = 2) -> tuple[Costs, bool]:
    """What was measured, and whether all is as before: gradients that were pending, buffers, and no gradients made."""
    count, microbatches = schedule.placement.num_stages, schedule.num_microbatches
    own = schedule.placement.stages_of(transport.rank)
    stages = [PipelineStage(Sleeps(SECONDS[index % 2]), index, count, "cpu", transport=transport) for index in own]
    executor = Executor(stages, schedule, functional.mse_loss)
    pending = [torch.ones_like(parameter) for parameter in executor.parameters()]
    for parameter, grad in zip(executor.parameters(), pending, strict=True):
        parameter.grad = grad
    x = torch.ones(microbatches * ROWS, WIDTH)
    inputs, target = (x,) if executor.is_first else (), x if executor.is_last and schedule.has_backward else None
    costs = profile_stages(executor, *inputs, target=target, repeats=repeats)
    same = all(p.grad is grad and (grad == 1).all() for p, grad in zip(executor.parameters(), pending, strict=True))
    return costs, same and all(stage.submodule.calls == 0 for stage in stages)


@pytest.mark.parametrize("make", [one_f_one_b, zb_h1, dualpipe_v])
def test_what_the_real_stages_take(threads: Threads, make: Callable[[int, int], Schedule]) -> None:
    schedule = make(2, 4)
    results = threads(profiled, 2, schedule)
    assert results[0] == results[1]
    costs, same = results[0]
    assert same
    for stage, forward in enumerate(costs.forward):
        assert forward >= SECONDS[stage % 2]
        assert costs.backward[stage] > 0
        assert costs.input_costs[stage] > 0
    size = ROWS * WIDTH * 4
    assert costs.output_bytes == (size,) * (costs.num_stages - 1) + (0,)
    # A linear layer saves its input; the first one's is the caller's, a part of one tensor; the last also for the loss.
    assert all(saved >= size for saved in costs.activation_bytes)
    assert costs.activation_bytes[1] == size or costs.num_stages == 2


def test_of_a_schedule_without_backward(threads: Threads) -> None:
    costs, same = threads(profiled, 2, forward_only(one_f_one_b(2, 3).placement, 3))[0]
    assert same
    assert costs.forward[1] >= SECONDS[1]
    assert costs.backward == (0.0, 0.0)
    assert costs.activation_bytes == (0, 0)


def test_on_one_rank_and_for_a_simulation() -> None:
    transport = LoopbackFabric(1).transport(0)
    costs, same = profiled(transport, one_f_one_b(1, 2))
    assert same
    assert math.isclose(simulate(lower(one_f_one_b(1, 2)), costs).makespan, 2 * (costs.forward[0] + costs.backward[0]))
    with pytest.raises(StageUsageError, match="repeats must be at least 1, got 0"):
        profiled(transport, one_f_one_b(1, 2), repeats=0)


@pytest.mark.parametrize("has_handler", [False, True])
def test_what_overlapped_pairs_save_is_measured_where_a_handler_runs_them(threads: Threads, has_handler: bool) -> None:
    """It was left out, so that the simulation of such an executor took its pairs apart."""
    schedule = dualpipe_v(2, 6)
    handlers = {Kind.OVERLAP: lambda call: call.run()} if has_handler else None

    def run(transport: Transport) -> Costs:
        own = schedule.placement.stages_of(transport.rank)
        stages = [PipelineStage(nn.Linear(WIDTH, WIDTH), index, 4, "cpu", transport=transport) for index in own]
        executor = Executor(stages, schedule, functional.mse_loss, handlers=handlers)
        x = torch.ones(6 * ROWS, WIDTH)
        inputs, target = (x,) if executor.is_first else (), x if executor.is_last else None
        return profile_stages(executor, *inputs, target=target)

    first, second = threads(run, 2)
    assert first == second
    assert (first.overlap_gain is not None) is has_handler
    assert 0 <= (first.overlap_gain or 0) <= 1
