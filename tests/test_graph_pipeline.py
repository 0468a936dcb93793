"""Stages that run as graphs, in a pipeline of stepwell-stage: the gradients are those of one process."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from stepwell_graphpasses import GraphProgram, PassConfig
from stepwell_meta.testing import WorkerPool
from stepwell_p2p import C10dTransport
from stepwell_stage import Executor, PipelineStage, StageProgram, schedules
from stepwell_stage.testing import PROGRAM_CHECKS, ProgramCheck, check_stage_program


class Block(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def stage_modules(count: int) -> list[nn.Module]:
    """Odd widths; the first stage embeds, the last has a head."""
    torch.manual_seed(0)
    stages: list[nn.Module] = [nn.Sequential(Block(7, 9), Block(7, 11)) for _ in range(count)]
    stages[0] = nn.Sequential(nn.Embedding(13, 7), stages[0])
    stages[-1] = nn.Sequential(stages[-1], nn.Linear(7, 13))
    return stages


def loss_fn(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(13, (8, 6), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


@pytest.mark.parametrize("check", PROGRAM_CHECKS, ids=lambda check: check.name)
def test_a_stage_as_graphs_keeps_every_promise_of_a_stage_program(check: ProgramCheck) -> None:
    assert isinstance(GraphProgram(nn.Linear(2, 2)), StageProgram)
    check_stage_program(GraphProgram, checks=[check])


def pipeline_of_graphs(name: str, data_parallel: int) -> dict[str, float]:
    """Largest differences from one process, relative to the largest gradient."""
    ranks = dist.get_world_size() // data_parallel
    mesh = init_device_mesh("cpu", (ranks, data_parallel), mesh_dim_names=("pp", "fsdp"))
    rank, replica = mesh.get_local_rank("pp"), mesh.get_local_rank("fsdp")
    schedule = {
        "1f1b": lambda: schedules.one_f_one_b(ranks, 4),
        "interleaved": lambda: schedules.interleaved_zero_bubble(ranks, 4, stages_per_rank=2),
        "zb-h1": lambda: schedules.zb_h1(ranks, 4),
    }[name]()
    modules = stage_modules(schedule.placement.num_stages)
    reference = copy.deepcopy(nn.Sequential(*modules))
    transport = C10dTransport(mesh.get_group("pp"))
    config = PassConfig(reduce_dtype=torch.float32)
    axis = mesh["fsdp"] if data_parallel > 1 else None
    stages = [
        PipelineStage(GraphProgram(modules[index], config, mesh=axis), index, len(modules), "cpu", transport=transport)
        for index in schedule.placement.stages_of(rank)
    ]
    executor = Executor(stages, schedule, loss_fn=loss_fn)
    found = {"loss": 0.0, "gradient": 0.0}
    for step in range(2):
        tokens, target = batch(10 * step + replica)
        losses: list[torch.Tensor] = []
        is_last = len(modules) - 1 in schedule.placement.stages_of(rank)
        executor.step(*((tokens,) if rank == 0 else ()), target=target if is_last else None, losses=losses)
        for other in range(data_parallel):
            inputs, wanted = batch(10 * step + other)
            loss = loss_fn(reference(inputs), wanted)
            (loss / data_parallel).backward()
            if other == replica and losses:
                found["loss"] = max(found["loss"], abs(float(torch.stack(losses).mean() - loss.detach())))
    for stage in stages:
        expected = dict(reference[stage.stage_index].named_parameters())
        for name, parameter in stage.program.module.named_parameters():
            whole = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
            error = (whole - expected[name].grad).abs().max() / expected[name].grad.abs().max()
            found["gradient"] = max(found["gradient"], float(error))
    found["sharded"] = float(all(isinstance(p, DTensor) for stage in stages for p in stage.program.module.parameters()))
    return found


@pytest.mark.parametrize(
    ("name", "ranks", "data_parallel"),
    [("1f1b", 2, 1), ("zb-h1", 2, 1), ("interleaved", 2, 1), ("zb-h1", 4, 2)],
)
def test_graphs_as_stages_of_a_pipeline_give_the_gradients_of_one_process(
    workers: WorkerPool, name: str, ranks: int, data_parallel: int
) -> None:
    for found in workers.run(pipeline_of_graphs, ranks, name, data_parallel, deadline=110):
        # Microbatches are summed in another order than one batch: a few roundings of the largest term.
        assert found["loss"] <= 1e-6
        assert found["gradient"] <= 1e-5
        assert found["sharded"] == float(data_parallel > 1)
