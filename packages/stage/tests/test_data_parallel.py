"""Data-parallel stages on real ranks, two pipeline ranks by two replicas, against the plain model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from stepwell_meta.testing import WorkerPool
from stepwell_p2p import C10dTransport, Placement
from stepwell_stage import Action, Executor, Kind, PipelineStage, Schedule
from stepwell_stage.schedules import (
    dualpipe_v,
    gpipe,
    interleaved_1f1b,
    interleaved_zero_bubble,
    one_f_one_b,
    zb_h1,
    zbv,
)

WIDTH, LAYERS, ROWS = 6, 4, 12
Wrap = Callable[[nn.Module, Any], nn.Module]


class Layer(nn.Module):
    """What a stage is made of: residual, norm, two linear layers, one of them checkpointed."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.up(self.norm(x)))
        return x + checkpoint(self.down, hidden, use_reentrant=False)


def build_layers() -> list[nn.Module]:
    generator = torch.Generator().manual_seed(0)
    layers = [Layer() for _ in range(LAYERS)]
    for layer in layers:
        for parameter in layer.parameters():
            nn.init.uniform_(parameter, -0.5, 0.5, generator=generator)
    return layers


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2 * ROWS, WIDTH, generator=generator), torch.randn(2 * ROWS, WIDTH, generator=generator)


def backwards_reversed(ranks: int, microbatches: int) -> Schedule:
    """The last forward's backward runs first."""
    rows = [
        [Action(rank, Kind.F, m) for m in range(microbatches)]
        + [Action(rank, Kind.B, m) for m in reversed(range(microbatches))]
        for rank in range(ranks)
    ]
    return Schedule("reversed", Placement.loop(ranks, ranks), microbatches, rows)


def mixed_backwards(ranks: int, microbatches: int) -> Schedule:
    """Whole backwards for even microbatches, split ones for odd, whose W come last and in reverse."""
    rows = []
    for rank in range(ranks):
        row = [Action(rank, Kind.F, m) for m in range(microbatches)]
        row += [Action(rank, Kind.I if m % 2 else Kind.B, m) for m in range(microbatches)]
        rows.append(row + [Action(rank, Kind.W, m) for m in reversed(range(microbatches)) if m % 2])
    return Schedule("mixed", Placement.loop(ranks, ranks), microbatches, rows)


SCHEDULES: list[Callable[[int, int], Schedule]] = [
    gpipe,
    one_f_one_b,
    zb_h1,
    interleaved_1f1b,
    interleaved_zero_bubble,
    zbv,
    dualpipe_v,
    backwards_reversed,
    mixed_backwards,
]


def wrap_ddp(module: nn.Module, mesh: Any) -> nn.Module:
    return DistributedDataParallel(module, process_group=mesh.get_group())


def wrap_ddp_buckets(module: nn.Module, mesh: Any) -> nn.Module:
    """Gradients that are views of many small buckets, and parameters that may be unused."""
    return DistributedDataParallel(
        module,
        process_group=mesh.get_group(),
        bucket_cap_mb=0.0002,
        gradient_as_bucket_view=True,
        find_unused_parameters=True,
    )


def wrap_ddp_inside(module: nn.Module, mesh: Any) -> nn.Module:
    return nn.Sequential(*(wrap_ddp(layer, mesh) for layer in module))


def wrap_fsdp(module: nn.Module, mesh: Any) -> nn.Module:
    for layer in module:
        fully_shard(layer, mesh=mesh)
    return fully_shard(module, mesh=mesh)


def wrap_fsdp_layers(module: nn.Module, mesh: Any) -> nn.Module:
    """Each layer a root of its own."""
    for layer in module:
        fully_shard(layer, mesh=mesh)
    return module


def wrap_replicate(module: nn.Module, mesh: Any) -> nn.Module:
    for layer in module:
        replicate(layer, mesh=mesh)
    return replicate(module, mesh=mesh)


def executor_on(
    mesh: Any, wrap: Wrap, schedule: Schedule | Any, layers: list[nn.Module], transport: C10dTransport | None = None
) -> Executor:
    placement = schedule.placement
    count = placement.num_stages
    stages = []
    for s in placement.stages_of(mesh.get_local_rank("pp")):
        part = nn.Sequential(*layers[LAYERS * s // count : LAYERS * (s + 1) // count])
        stages.append(PipelineStage(wrap(part, mesh["dp"]), s, count, "cpu"))
    return Executor(stages, schedule, functional.mse_loss, transport=transport or C10dTransport(mesh.get_group("pp")))


def own_half(mesh: Any, executor: Executor) -> tuple[tuple[torch.Tensor, ...], torch.Tensor | None]:
    x, y = (part[mesh.get_local_rank("dp") * ROWS :][:ROWS] for part in batch())
    return ((x,) if executor.is_first else ()), (y if executor.is_last else None)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def all_schedules(wrap: Wrap) -> dict[str, list[dict[str, Any]]]:
    """Gradients after one step and after a second on top of it, by schedule and name of the parameter in the plain model."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    found = {}
    for make in SCHEDULES:
        transport = C10dTransport(mesh.get_group("pp"))
        layers = build_layers()
        names = {id(layer): f"{i}." for i, layer in enumerate(layers)}
        executor = executor_on(mesh, wrap, make(2, 4), layers, transport)
        inputs, target = own_half(mesh, executor)
        steps = []
        for _ in range(2):
            executor.step(*inputs, target=target)
            executor.eval(*inputs, target=target)
            grads = {}
            for layer in layers:
                for stage in executor.stages:
                    if layer in stage.submodule.modules():
                        grads |= {names[id(layer)] + n: whole(p.grad).clone() for n, p in layer.named_parameters()}
            steps.append(grads)
        found[executor.plan.schedule.name] = steps
        transport.close()
    return found


def plain_grads() -> dict[str, torch.Tensor]:
    model = nn.Sequential(*build_layers())
    x, y = batch()
    functional.mse_loss(model(x), y).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(
    "wrap", [wrap_ddp, wrap_ddp_buckets, wrap_ddp_inside, wrap_fsdp, wrap_fsdp_layers, wrap_replicate]
)
def test_gradients_equal_the_plain_model_on_every_replica_and_schedule(workers: WorkerPool, wrap: Wrap) -> None:
    """P095, P099, P108, P113, P125, P126: split backwards too, and steps that add up."""
    results = workers.run(all_schedules, 4, wrap, deadline=90)
    expected = plain_grads()
    for name in results[0]:
        for step in (0, 1):
            for replica in (0, 1):
                found = results[replica][name][step] | results[2 + replica][name][step]
                assert found.keys() == expected.keys()
                for parameter, grad in expected.items():
                    torch.testing.assert_close(found[parameter], (step + 1) * grad, msg=f"{name}, {parameter}")
                    assert torch.equal(found[parameter], (results[0][name][step] | results[2][name][step])[parameter])
