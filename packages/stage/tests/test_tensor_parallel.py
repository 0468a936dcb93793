"""Tensor- and sequence-parallel stages, four pipeline ranks by two, against the plain model."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn import functional

from stepwell_meta.testing import WorkerPool
from stepwell_p2p import C10dTransport
from stepwell_stage import Executor, PipelineStage
from stepwell_stage.schedules import interleaved_1f1b, one_f_one_b, zb_h1

STAGES, ROWS, LENGTH, WIDTH, HIDDEN = 4, 4, 4, 4, 6
# What crosses from each stage to the next, and how the gradients come back: a partial sum's are whole.
VALUES = (Shard(1), Partial(), Shard(1))
GRADS = (Shard(1), Replicate(), Shard(1))


def weights(count: int = STAGES) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        (0.5 * torch.randn(WIDTH, HIDDEN, generator=generator), 0.5 * torch.randn(HIDDEN, WIDTH, generator=generator))
        for _ in range(count)
    ]


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(ROWS, LENGTH, WIDTH, generator=generator), torch.randn(ROWS, LENGTH, WIDTH, generator=generator)


class Feed(nn.Module):
    """Two products, the first by columns and the second by rows, as tensor parallelism cuts them.

    The sequence is cut between blocks, or the sum over the ranks is left to the next one.
    """

    def __init__(self, mesh: Any, up: torch.Tensor, down: torch.Tensor, placement: Any) -> None:
        super().__init__()
        self.up = nn.Parameter(distribute_tensor(up, mesh, [Shard(1)]))
        self.down = nn.Parameter(distribute_tensor(down, mesh, [Shard(0)]))
        self.mesh, self.placement = mesh, placement

    def forward(self, x: Any) -> Any:
        if not isinstance(x, DTensor):
            x = DTensor.from_local(x, self.mesh, [Replicate()], run_check=False)
        partial = torch.tanh(x.redistribute(placements=[Replicate()]) @ self.up) @ self.down
        if self.placement is None:
            return partial.redistribute(placements=[Replicate()]).to_local()
        return partial if self.placement.is_partial() else partial.redistribute(placements=[self.placement])


def example(mesh: Any, placement: Any, *, grad: bool) -> DTensor:
    """One microbatch's value, as it crosses."""
    length = LENGTH // 2 if placement == Shard(1) else LENGTH
    local = torch.zeros(1, length, WIDTH)
    return DTensor.from_local(local, mesh, [placement], run_check=False).requires_grad_(grad)


def declared(mesh: Any, index: int) -> dict[str, Any]:
    options: dict[str, Any] = {"input_args": torch.zeros(1, LENGTH, WIDTH), "input_grads": (None,)}
    if index:
        options["input_args"] = example(mesh, VALUES[index - 1], grad=True)
        options["input_grads"] = example(mesh, GRADS[index - 1], grad=False)
    if index < STAGES - 1:
        options["output_args"] = example(mesh, VALUES[index], grad=True)
        options["output_grads"] = example(mesh, GRADS[index], grad=False)
    else:
        options["output_args"] = torch.zeros(1, LENGTH, WIDTH, requires_grad=True)
        options["output_grads"] = torch.zeros(1, LENGTH, WIDTH)
    return options


def steps() -> dict[str, Any]:
    """By run: the gradients of this rank's stages, whole, by stage."""
    mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("pp", "tp"))
    rank, tp = mesh.get_local_rank("pp"), mesh["tp"]
    transport, for_loops = (C10dTransport(mesh.get_group("pp"), name=name) for name in ("", "loops"))
    x, y = batch()
    found: dict[str, Any] = {}

    def module(index: int, count: int) -> Feed:
        last = index == count - 1
        return Feed(tp, *weights(count)[index], None if last else VALUES[index % len(VALUES)])

    def note(name: str, stages: list[PipelineStage]) -> None:
        found[name] = {
            stage.stage_index: [parameter.grad.full_tensor() for parameter in stage.submodule.parameters()]
            for stage in stages
        }

    for name, make, options in (
        ("learned", one_f_one_b, {}),
        ("declared", one_f_one_b, declared(tp, rank)),
        ("split", zb_h1, {}),
        ("dynamic", one_f_one_b, {"shapes": "dynamic"}),
        ("looped", interleaved_1f1b, {}),
    ):
        schedule = make(4, ROWS)
        count = schedule.placement.num_stages
        stages = [
            PipelineStage(module(index, count), index, count, "cpu", **options)
            for index in schedule.placement.stages_of(rank)
        ]
        carries = for_loops if name == "looped" else transport
        executor = Executor(stages, schedule, functional.mse_loss, transport=carries)
        for _ in range(2):
            executor.step(*((x,) if executor.is_first else ()), target=y if executor.is_last else None)
        note(name, stages)
    for name, options in (("torch's, learned", {}), ("torch's, declared", declared(tp, rank))):
        stage = PipelineStage(module(rank, STAGES), rank, STAGES, "cpu", transport=transport, **options)
        schedule = pipelining.Schedule1F1B(stage, ROWS, functional.mse_loss)
        schedule.step(*((x,) if stage.is_first else ()), target=y if stage.is_last else None)
        assert stage._torch.verdict.item() == (name == "torch's, declared")
        note(name, [stage])
    dist.barrier()
    transport.close()
    for_loops.close()
    return found


def plain(count: int, times: int) -> list[list[torch.Tensor]]:
    pairs = [[weight.requires_grad_() for weight in pair] for pair in weights(count)]
    x, y = batch()
    for _ in range(times):
        h = x
        for up, down in pairs:
            h = torch.tanh(h @ up) @ down
        functional.mse_loss(h, y).backward()
    return [[weight.grad for weight in pair] for pair in pairs]


def test_a13_p128_p129_p130_eight_ranks_four_stages_of_two(workers: WorkerPool) -> None:
    """Sequence-parallel and partial values, learned and declared, whole and split backward, own schedules and torch's."""
    results = workers.run(steps, 8, deadline=110)
    for name in results[0]:
        count, times = (8 if name == "looped" else STAGES), (1 if name.startswith("torch") else 2)
        expected = plain(count, times)
        seen: set[int] = set()
        for found in results:
            for index, grads in found[name].items():
                seen.add(index)
                for grad, right in zip(grads, expected[index], strict=True):
                    # Halves are multiplied apart and then added, so sums are rounded in another order.
                    torch.testing.assert_close(grad, right, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
        assert seen == set(range(count))
