"""Stages of a model that torch.distributed.pipelining.pipeline has cut, against the model itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import pipelining
from torch.nn import functional

from stepwell_meta.testing import WorkerPool
from stepwell_p2p import C10dTransport, Placement, Transport
from stepwell_stage import Executor, PipelineStage, build_stage
from stepwell_stage.schedules import gpipe, interleaved_1f1b, one_f_one_b, zbv

Threads = Callable[..., list[Any]]
WIDTH = 4
ROWS = 2
MICROBATCHES = 4


class Chain(nn.Module):
    """Every stage takes what the one before made: two values at the first boundary, one at the second, with a shared mask."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor, *, mask: torch.Tensor) -> torch.Tensor:
        h = self.layers[0](x)
        g = torch.tanh(h)
        pipelining.pipe_split()
        h = self.layers[1](h) + g
        pipelining.pipe_split()
        h = self.layers[2](h) * mask
        pipelining.pipe_split()
        return self.layers[3](h)


class Skips(Chain):
    """Values pass stages by, have several takers, and one output of the model is made by a middle stage."""

    def forward(self, x: torch.Tensor, *, mask: torch.Tensor) -> Any:
        h = self.layers[0](x)
        g = torch.tanh(h)
        pipelining.pipe_split()
        k = self.layers[1](h) + g
        pipelining.pipe_split()
        m = self.layers[2](k) * mask + g
        pipelining.pipe_split()
        return {"out": self.layers[3](m) + h, "middle": k}


def build(kind: type[Chain]) -> Chain:
    model = kind()
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        nn.init.uniform_(parameter, -0.5, 0.5, generator=generator)
    return model


def batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randn(ROWS * MICROBATCHES, WIDTH, generator=generator) for _ in range(3))


def cut(kind: type[Chain]) -> Any:
    x, mask, _ = batch()
    return pipelining.pipeline(build(kind), (x[:ROWS],), {"mask": mask[:ROWS]})


def loss_of(value: Any, target: torch.Tensor) -> torch.Tensor:
    leaves = list(value.values()) if isinstance(value, dict) else value if isinstance(value, tuple | list) else [value]
    return sum(functional.mse_loss(leaf, target) for leaf in leaves)


def plain(kind: type[Chain]) -> dict[str, torch.Tensor]:
    """Gradients of the whole model over the microbatches."""
    model = build(kind)
    for x, mask, y in zip(*(whole.chunk(MICROBATCHES) for whole in batch()), strict=True):
        (loss_of(model(x, mask=mask), y) / MICROBATCHES).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def check_grads(kind: type[Chain], stages: list[PipelineStage]) -> None:
    expected = plain(kind)
    for stage in stages:
        for name, parameter in stage.submod.named_parameters():
            torch.testing.assert_close(parameter.grad, expected[name], msg=lambda m, n=name: f"{n}: {m}")


def run_executor(transport: Transport, kind: type[Chain], pipe: Any, make: Callable[..., Any]) -> int:
    """Steps and an evaluation of one rank; how many numbers its parameters have."""
    x, mask, y = batch()
    placement = Placement.v(4, transport.size) if make is zbv else Placement.loop(4, transport.size)
    stages = [
        build_stage(pipe.get_stage_module(index), index, pipe.info(), "cpu", transport=transport)
        for index in placement.stages_of(transport.rank)
    ]
    executor = Executor(stages, make(transport.size, MICROBATCHES), loss_of, transport=transport)
    kwargs = {"mask": mask}  # stages that do not take it let it pass
    for _ in range(2):
        for stage in stages:
            stage.submod.zero_grad()
        executor.step(*((x,) if executor.is_first else ()), target=y if executor.is_last else None, **kwargs)
    check_grads(kind, stages)
    outputs = executor.eval(*((x,) if executor.is_first else ()), **kwargs)
    if executor.is_last:
        with torch.no_grad():
            whole = build(kind)(x, mask=mask)
        leaves = list(whole.values()) if isinstance(whole, dict) else whole
        torch.testing.assert_close(outputs, tuple(leaves) if isinstance(leaves, list) else leaves)
    return sum(parameter.numel() for stage in stages for parameter in stage.submod.parameters())


@pytest.mark.parametrize("kind", [Chain, Skips])
def test_under_the_executor(threads: Threads, kind: type[Chain]) -> None:
    whole = sum(parameter.numel() for parameter in kind().parameters())
    pipe = cut(kind)  # each rank uses its own parts of it
    for make, ranks in ((gpipe, 4), (one_f_one_b, 4), (zbv, 2), (interleaved_1f1b, 2)):
        assert sum(threads(run_executor, ranks, kind, pipe, make)) == whole


def torchs_gpipe() -> None:
    transport = C10dTransport()
    x, mask, y = batch()
    pipe = cut(Skips)
    stage = build_stage(pipe.get_stage_module(transport.rank), transport.rank, pipe.info(), "cpu", transport=transport)
    schedule = pipelining.ScheduleGPipe(stage, MICROBATCHES, loss_of)
    for _ in range(2):
        stage.submod.zero_grad()
        schedule.step(*((x,) if stage.is_first else ()), target=y if stage.is_last else None, mask=mask)
    check_grads(Skips, [stage])
    transport.close()


def test_under_torchs_schedules(workers: WorkerPool) -> None:
    """Torch's own stage refuses a value with two takers, and arguments of the model behind the first stage."""
    workers.run(torchs_gpipe, 4, deadline=100)
