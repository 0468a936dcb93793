"""A plan with pairs apart says what the executor does with pairs. No plan did: steps were shorter than their simulated ideal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from stepwell_p2p import Transport
from stepwell_stage import Action, Executor, Kind, PipelineStage, Plan, lower
from stepwell_stage.schedules import dualpipe_v

Threads = Callable[..., list[Any]]
Grads = dict[int, torch.Tensor]  # by stage
SENDS = (Kind.SEND_F, Kind.SEND_B)
MICROBATCHES = 6


def modules() -> list[nn.Linear]:
    generator = torch.Generator().manual_seed(0)
    made = [nn.Linear(4, 4, bias=False) for _ in range(4)]
    for module in made:
        nn.init.uniform_(module.weight, -0.5, 0.5, generator=generator)
    return made


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(MICROBATCHES, 4, generator=generator), torch.randn(MICROBATCHES, 4, generator=generator)


def run(transport: Transport, plan: Plan) -> tuple[list[Action], Grads]:
    """What one rank computed and sent, in order, and its gradients."""
    made, (x, y) = modules(), batch()
    mine = plan.placement.stages_of(transport.rank)
    stages = [PipelineStage(made[index], index, 4, "cpu") for index in mine]
    executor = Executor(stages, plan, functional.mse_loss, transport=transport, trace=True)
    executor.step(*((x,) if executor.is_first else ()), target=y if executor.is_last else None)
    done = [event.action for event in executor.events if event.action.kind.is_compute or event.action.kind in SENDS]
    gradients = {index: made[index].weight.grad for index in mine}
    return done, {index: gradient for index, gradient in gradients.items() if gradient is not None}


@pytest.mark.parametrize("apart", [False, True])
def test_the_executor_does_what_the_plan_with_pairs_apart_says(threads: Threads, apart: bool) -> None:
    paired = lower(dualpipe_v(2, MICROBATCHES))
    said = paired.with_pairs_apart()
    assert said.actions != paired.actions
    assert said.with_pairs_apart() == said
    found = threads(lambda transport: run(transport, said if apart else paired), 2)
    for row, (done, _) in zip(said.actions, found, strict=True):
        assert done == [action for action in row if action.kind.is_compute or action.kind in SENDS]
    gradients: Grads = {index: gradient for _, some in found for index, gradient in some.items()}
    model, (x, y) = modules(), batch()
    functional.mse_loss(nn.Sequential(*model)(x), y).backward()
    for index, module in enumerate(model):
        torch.testing.assert_close(gradients[index], module.weight.grad)
