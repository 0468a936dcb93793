"""The gradient's norm over stages against torch's own in one process: the same number, to the last bit."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from stepwell_meta.testing import WorkerPool
from stepwell_p2p import C10dTransport, LoopbackFabric, Transport
from stepwell_stage import EagerProgram, Executor, PipelineStage, clip_grad_norm_, tie
from stepwell_stage.exceptions import NonFiniteNormError, StageUsageError
from stepwell_stage.schedules import one_f_one_b

Threads = Callable[..., list[Any]]
SIZES = [(5, 7), (7, 3), (3, 9), (9, 2)]


def build(seed: int = 0) -> nn.Sequential:
    """A model with gradients, some of them missing, and a piece without parameters."""
    model = nn.Sequential(*(nn.Linear(*size) for size in SIZES))
    model[1] = nn.Sequential(nn.LayerNorm(7), nn.Linear(7, 3))
    generator = torch.Generator().manual_seed(seed)
    for index, parameter in enumerate(model.parameters()):
        nn.init.uniform_(parameter, -1, 1, generator=generator)
        if index != 4:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
    return model


def cut(model: nn.Sequential, transport: Transport) -> list[PipelineStage]:
    """One piece of the model for each rank; the rest has none."""
    place, count = transport.rank, transport.size
    pieces = list(model)
    own = pieces[len(pieces) * place // count : len(pieces) * (place + 1) // count]
    return [PipelineStage(nn.Sequential(*own), place, count, "cpu")]


def clip(transport: Transport, max_norm: float, order: float, **options: Any) -> tuple[torch.Tensor, list[Any]]:
    stages = cut(build(), transport)
    norm = clip_grad_norm_(stages, max_norm, order, transport=transport, **options)
    return norm, [parameter.grad for stage in stages for parameter in stage.submodule.parameters()]


def assert_as_torch(results: list[tuple[torch.Tensor, list[Any]]], max_norm: float, order: float) -> None:
    model = build()
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm, order)
    assert all(torch.equal(found, norm) for found, _ in results)
    grads = [grad for _, grads in results for grad in grads]
    for found, parameter in zip(grads, model.parameters(), strict=True):
        assert (found is None) is (parameter.grad is None)
        assert found is None or torch.equal(found, parameter.grad)


@pytest.mark.parametrize("order", [1.0, 2.0, 3.5, inf])
@pytest.mark.parametrize("max_norm", [0.5, 1e6])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_p119_p120_bitwise_as_torch_in_one_process(threads: Threads, ranks: int, max_norm: float, order: float) -> None:
    assert_as_torch(threads(clip, ranks, max_norm, order), max_norm, order)


@pytest.mark.parametrize("ranks", [2, 4])
def test_on_gloo(workers: WorkerPool, ranks: int) -> None:
    def on_gloo() -> tuple[torch.Tensor, list[Any]]:
        return clip(C10dTransport(), 0.5, 2.0)

    assert_as_torch(workers.run(on_gloo, ranks, deadline=30), 0.5, 2.0)


def test_p121_a_rank_without_parameters_or_gradients_takes_part(threads: Threads) -> None:
    def run(transport: Transport) -> torch.Tensor:
        frozen = nn.Linear(2, 2).requires_grad_(False)
        module = (nn.Linear(2, 2, bias=False), nn.ReLU(), frozen)[transport.rank]
        if transport.rank == 0:
            module.weight.grad = torch.full((2, 2), 3.0)
        return clip_grad_norm_(PipelineStage(module, transport.rank, 3, "cpu"), 1.0, transport=transport)

    assert [norm.item() for norm in threads(run, 3)] == [6.0] * 3

    def nothing(transport: Transport) -> torch.Tensor:
        return clip_grad_norm_(PipelineStage(nn.ReLU(), transport.rank, 2, "cpu"), 1.0, transport=transport)

    assert [norm.item() for norm in threads(nothing, 2)] == [0.0] * 2


def test_several_stages_of_a_rank_are_taken_in_the_order_of_the_model(threads: Threads) -> None:
    """Four stages on two ranks in turn: 0, 1, 0, 1."""

    def run(transport: Transport) -> torch.Tensor:
        pieces = list(build())
        own = [PipelineStage(pieces[s], s, 4, "cpu") for s in (transport.rank + 2, transport.rank)]
        return clip_grad_norm_(own, inf, transport=transport)

    norm = nn.utils.get_total_norm([p.grad for p in build().parameters() if p.grad is not None])
    assert all(torch.equal(found, norm) for found in threads(run, 2))


def test_dtypes_may_differ(threads: Threads) -> None:
    def grads() -> list[nn.Module]:
        modules = [
            nn.Linear(3, 3).to(dtype) for dtype in (torch.bfloat16, torch.float32, torch.bfloat16, torch.float64)
        ]
        generator = torch.Generator().manual_seed(1)
        for module in modules:
            for parameter in module.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        return modules

    def run(transport: Transport) -> torch.Tensor:
        own = grads()[2 * transport.rank : 2 * transport.rank + 2]
        stage = PipelineStage(nn.Sequential(*own), transport.rank, 2, "cpu")
        return clip_grad_norm_(stage, 1.0, transport=transport)

    norm = nn.utils.get_total_norm([p.grad for module in grads() for p in module.parameters() if p.grad is not None])
    assert norm.dtype is torch.float64
    assert all(torch.equal(found, norm) for found in threads(run, 2))


def test_sparse_gradients_count_each_row_once() -> None:
    table = nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1, 1, 3])).sum().backward()
    norm = clip_grad_norm_(PipelineStage(table, 0, 1, "cpu"), 1.0)
    assert norm.item() == pytest.approx((4 + 4 + 1 + 1) ** 0.5)
    assert table.weight.grad is not None
    assert table.weight.grad.to_dense().norm().item() == pytest.approx(1.0, rel=1e-5)


def test_p081_p083_a_tied_parameter_counts_once_and_is_clipped_on_every_holder(threads: Threads) -> None:
    def run(transport: Transport) -> tuple[torch.Tensor, torch.Tensor]:
        module = nn.Linear(2, 2, bias=False)
        executor = Executor(
            PipelineStage(module, transport.rank, 2, "cpu"), one_f_one_b(2, 1), nn.MSELoss(), transport=transport
        )
        tie(executor, {"w": [(0, "weight"), (1, "weight")]})
        module.weight.grad = torch.full((2, 2), 5.0)
        norm = clip_grad_norm_(executor, 2.0)
        return norm, module.weight.grad

    plain = nn.Linear(2, 2, bias=False)
    plain.weight.grad = torch.full((2, 2), 5.0)
    nn.utils.clip_grad_norm_(plain.parameters(), 2.0)
    for norm, grad in threads(run, 2):
        assert norm.item() == 10.0
        assert torch.equal(grad, plain.weight.grad)


def test_p081_one_rank_with_two_holders_scales_their_gradient_once() -> None:
    stages = [PipelineStage(nn.Linear(2, 2, bias=False), index, 2, "cpu") for index in range(2)]
    stages[1].submodule.weight = stages[0].submodule.weight
    stages[0].submodule.weight.grad = torch.full((2, 2), 5.0)
    assert clip_grad_norm_(stages, 2.0).item() == 10.0
    assert stages[0].submodule.weight.grad[0, 0].item() == pytest.approx(1.0, rel=1e-5)


@pytest.mark.parametrize("order", [2.0, 3.0, inf])
def test_shards_of_all_ranks_count(workers: WorkerPool, order: float) -> None:
    """Two stages of two ranks: sharded (one shard empty), replicated and plain parameters, and one without gradient."""

    def on_gloo() -> tuple[torch.Tensor, list[torch.Tensor]]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
        transport = C10dTransport(mesh.get_group("pp"))
        module = nn.Module()
        for name, value in tensors(transport.rank).items():
            if name == "plain":
                parameter = nn.Parameter(torch.zeros_like(value))
                parameter.grad = value
            else:
                placement = [Replicate()] if name == "whole" else [Shard(0)]
                parameter = nn.Parameter(distribute_tensor(torch.zeros_like(value), mesh["tp"], placement))
                if name != "unused":
                    parameter.grad = distribute_tensor(value, mesh["tp"], placement)
            module.register_parameter(name, parameter)
        norm = clip_grad_norm_(PipelineStage(module, transport.rank, 2, "cpu"), 1.0, order, transport=transport)
        grads = [p.grad for p in module.parameters() if p.grad is not None]
        return norm, [grad.full_tensor() if isinstance(grad, DTensor) else grad for grad in grads]

    def tensors(stage: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(stage)
        names = {"sharded": (4, 3), "single": (1, 2), "whole": (3,), "plain": (2, 2), "unused": (2,)}
        return {name: torch.randn(shape, generator=generator) for name, shape in names.items()}

    parameters = []
    for stage in range(2):
        for name, value in tensors(stage).items():
            parameters.append(nn.Parameter(torch.zeros_like(value)))
            parameters[-1].grad = None if name == "unused" else value
    norm = nn.utils.clip_grad_norm_(parameters, 1.0, order)
    results = workers.run(on_gloo, 4, deadline=30)
    assert len({found.item() for found, _ in results}) == 1
    torch.testing.assert_close(results[0][0], norm)
    expected = [parameter.grad for parameter in parameters if parameter.grad is not None]
    for found in (results[0][1] + results[2][1], results[1][1] + results[3][1]):
        for grad, known in zip(found, expected, strict=True):
            torch.testing.assert_close(grad, known)


@pytest.mark.parametrize("value", [inf, float("nan")])
def test_a_norm_that_is_not_finite_is_seen_on_every_rank(threads: Threads, value: float) -> None:
    """So that a scaler's rule skips the step on all ranks or on none."""

    def run(transport: Transport, *, error: bool) -> Any:
        module = nn.Linear(2, 2)
        module.weight.grad = torch.full((2, 2), value if transport.rank == 1 else 1.0)
        stage = PipelineStage(module, transport.rank, 2, "cpu")
        if not error:
            return clip_grad_norm_(stage, 1.0, transport=transport).isfinite().item()
        with pytest.raises(NonFiniteNormError, match="skip this step on every rank") as failure:
            clip_grad_norm_(stage, 1.0, transport=transport, error_if_nonfinite=True)
        return failure.value.norm, module.weight.grad[0, 0].item()

    assert threads(run, 2, error=False) == [False, False]
    (norm, untouched), _ = threads(run, 2, error=True)
    assert untouched == 1.0
    assert not torch.tensor(norm).isfinite()


def test_what_is_wrong_is_said_on_every_rank(threads: Threads) -> None:
    class Program(EagerProgram):
        """Any program that is no module."""

    def run(transport: Transport) -> str:
        stage = PipelineStage(nn.Linear(2, 2) if transport.rank else Program(nn.ReLU()), transport.rank, 2, "cpu")
        with pytest.raises(StageUsageError) as failure:
            clip_grad_norm_(stage, 1.0, transport=transport)
        return str(failure.value)

    assert set(threads(run, 2)) == {
        "rank 0: stage 0 runs a test_what_is_wrong_is_said_on_every_rank.<locals>.Program, which has no named parameters: this"
        " works on stages that are modules"
    }
    stage = PipelineStage(nn.Linear(2, 2), 0, 2, "cpu")
    with pytest.raises(StageUsageError, match="pass the executor, or transport="):
        clip_grad_norm_(stage, 1.0)
    with pytest.raises(StageUsageError, match="norm_type must be greater than 0, or inf, got 0"):
        clip_grad_norm_(stage, 1.0, 0, transport=LoopbackFabric(1).transport(0))
