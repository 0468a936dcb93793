"""Reports of users about losses, the scale of gradients, mixed precision and accumulation, each with the right behaviour."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from stage_support import Threads, assert_like, build, grads_of, seeded, step
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from stepwell_meta.testing import WorkerPool
from stepwell_p2p import C10dTransport, Transport, Wire
from stepwell_p2p.exceptions import PeerFailure
from stepwell_stage import Executor, Kind, PipelineStage
from stepwell_stage.exceptions import StageUsageError
from stepwell_stage.schedules import BY_NAME, gpipe, one_f_one_b, zb_h1

WIDTH = 4


def linears(count: int) -> list[nn.Module]:
    return seeded(*(nn.Linear(WIDTH, WIDTH) for _ in range(count)))


def batch(rows: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, WIDTH, generator=generator), torch.randn(rows, WIDTH, generator=generator)


# What the loss is, and where.


@pytest.mark.parametrize("rows", [8, 11])
def test_p108_p116_a_mean_loss_gives_the_gradient_of_the_whole_batch_whatever_m(threads: Threads, rows: int) -> None:
    x, y = batch(rows)
    modules = linears(2)
    loss = functional.mse_loss(nn.Sequential(*modules)(x), y)
    loss.backward()

    def run(transport: Transport, microbatches: int) -> tuple[dict[int, list[Any]], Any]:
        executor = build(transport, linears(2), one_f_one_b(2, microbatches))
        step(executor, x, y)
        return grads_of(executor), executor.loss

    for microbatches in (1, 2, 4, 5):
        results = threads(run, 2, microbatches)
        # The same sum of at most 11 * 4 terms in another order.
        assert_like([grads for grads, _ in results], modules, torch.testing.assert_close)
        assert results[1][1].item() == pytest.approx(loss.item(), rel=1e-6)


@pytest.mark.parametrize("name", sorted(BY_NAME))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_p111_p118_p134_every_rank_may_have_the_loss(threads: Threads, name: str, dtype: torch.dtype) -> None:
    """The same numbers on all ranks, in step and eval; nobody sees a placeholder, a zero, or bytes of another dtype."""
    x, y = batch(6)
    schedule = BY_NAME[name](2, 3)
    count = schedule.placement.num_stages

    def loss_fn(out: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"mse": functional.mse_loss(out, target), "size": 0.25 * out.pow(2).mean()}

    def run(transport: Transport) -> Any:
        modules = [module.to(dtype) for module in linears(count)]
        executor = build(transport, modules, schedule, loss_fn, share_loss=True)
        found = []
        for act in (executor.step, executor.eval, executor.step):
            act(*((x.to(dtype),) if executor.is_first else ()), target=y.to(dtype) if executor.is_last else None)
            assert executor.loss is not None
            named = {name: part.item() for name, part in executor.named_losses.items()}
            found.append((executor.loss.item(), named))
        return found

    first, second = threads(run, 2)
    assert first == second
    model = nn.Sequential(*(module.to(dtype) for module in linears(count)))
    parts = [
        loss_fn(model(a.to(dtype)), b.to(dtype)) for a, b in zip(x.tensor_split(3), y.tensor_split(3), strict=True)
    ]
    expected = {name: sum(part[name].double().item() for part in parts) / 3 for name in ("mse", "size")}
    for whole, named in first:
        assert named == pytest.approx(expected, rel=1e-12)
        # the sum of both is rounded to the loss's own dtype first
        assert whole == pytest.approx(sum(expected.values()), rel=1e-6 if dtype is torch.float32 else 1e-2)


def test_p111_without_it_only_the_last_rank_has_a_loss_and_ranks_must_agree(threads: Threads) -> None:
    x, y = batch(4)

    def run(transport: Transport) -> Any:
        executor = build(transport, linears(2), gpipe(2, 2))
        step(executor, x, y)
        return executor.loss

    first, last = threads(run, 2)
    assert first is None
    assert last is not None

    def disagreeing(transport: Transport) -> str:
        executor = build(transport, linears(2), gpipe(2, 2), share_loss=transport.rank == 0)

        def act() -> None:
            step(executor, x, y)
            step(executor, x, y)  # the first has only sent, and may be over before the other rank complains

        with pytest.raises((StageUsageError, PeerFailure)) as failure:
            act()
        return str(failure.value)

    for message in threads(disagreeing, 2):
        assert "rank 1 has share_loss=False, rank 0 share_loss=True" in message


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_p115_each_microbatch_has_a_loss_of_its_own(threads: Threads, name: str) -> None:
    x, y = batch(7)

    def run(transport: Transport) -> list[float]:
        losses: list[torch.Tensor] = []
        step(build(transport, linears(2), BY_NAME[name](2, 3)), x, y, losses=losses)
        return [loss.item() for loss in losses]

    first, last = threads(run, 2)
    model = nn.Sequential(*linears(2))
    pairs = zip(x.tensor_split(3), y.tensor_split(3), strict=True)
    assert first == []
    assert last == [functional.mse_loss(model(a), b).item() for a, b in pairs]


class Router(nn.Module):
    """A layer with a loss of its own, as an expert router has."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, *before: torch.Tensor) -> tuple[torch.Tensor, ...]:
        scores = self.linear(x)
        return torch.tanh(scores) + x, scores.pow(2).mean(), *before


@pytest.mark.parametrize("carried", [True, False], ids=["carried on", "by wires"])
@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_p110_a_loss_of_each_stage_counts_once_and_like_the_main_one(
    threads: Threads, name: str, *, carried: bool
) -> None:
    """A stage returns its loss; it travels from stage to stage, or by a wire to the last, where the loss function adds it."""
    schedule = BY_NAME[name](2, 3)
    count = schedule.placement.num_stages
    x, y = batch(7)
    wires = None
    if not carried:
        wires = [Wire(stage, 0, stage + 1, 0) for stage in range(count - 1)]
        wires += [Wire(stage, 1, count - 1, stage + 1) for stage in range(count - 1)]

    def loss_fn(outputs: tuple[torch.Tensor, ...], target: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"main": functional.mse_loss(outputs[0], target), "routers": 0.1 * torch.stack(outputs[1:]).sum()}

    def run(transport: Transport) -> Any:
        executor = build(
            transport, seeded(*(Router() for _ in range(count))), schedule, loss_fn, stage_options={"wires": wires}
        )
        step(executor, x, y, return_outputs=False)
        return grads_of(executor), {name: part.item() for name, part in executor.named_losses.items()}

    results = threads(run, 2)
    modules = seeded(*(Router() for _ in range(count)))
    routers = 0.0
    for part, target in zip(x.tensor_split(3), y.tensor_split(3), strict=True):
        values: tuple[torch.Tensor, ...] = (part,)
        for module in modules:
            values = module(*values)
        losses = loss_fn(values, target)
        (sum(losses.values()) * (len(part) / 7)).backward()
        routers += losses["routers"].item() * len(part) / 7
    assert_like([grads for grads, _ in results], modules, torch.testing.assert_close)
    named = next(named for _, named in results if named)
    assert named["routers"] == pytest.approx(routers, rel=1e-6)


# A loss that gives no gradient.


class Checkpointed(nn.Module):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.linear, torch.tanh(x), use_reentrant=self.reentrant)


@pytest.mark.filterwarnings("ignore:.*cannot be split:stepwell_stage.exceptions.SplitBackwardWarning")
@pytest.mark.parametrize("make", [gpipe, one_f_one_b, zb_h1])
@pytest.mark.parametrize("reentrant", [True, False])
def test_p074_p104_checkpoints_of_both_kinds(threads: Threads, make: Any, *, reentrant: bool) -> None:
    """The reentrant kind refuses a backward for chosen inputs, so such stages run whole backwards, also in split schedules."""

    def stages() -> list[nn.Module]:
        kinds = [Checkpointed(reentrant=False), *(Checkpointed(reentrant=reentrant) for _ in range(2))]
        return seeded(*kinds)

    x, y = batch(6)

    def run(transport: Transport) -> dict[int, list[Any]]:
        executor = build(transport, stages(), make(3, 3))
        step(executor, x, y)
        return grads_of(executor)

    modules = stages()
    for part, target in zip(x.tensor_split(3), y.tensor_split(3), strict=True):
        (functional.mse_loss(nn.Sequential(*modules)(part), target) / 3).backward()
    assert_like(threads(run, 3), modules)


class Counted(nn.Module):
    """A BatchNorm within a checkpoint: recomputed, it counts again, as it does in one process."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.norm, self.linear(x), use_reentrant=self.reentrant)


@pytest.mark.filterwarnings("ignore:.*cannot be split:stepwell_stage.exceptions.SplitBackwardWarning")
@pytest.mark.parametrize("make", [gpipe, one_f_one_b, zb_h1])
@pytest.mark.parametrize("reentrant", [True, False])
def test_p149_statistics_of_checkpointed_norms_are_those_of_one_process(
    threads: Threads, make: Any, *, reentrant: bool
) -> None:
    """Each microbatch counts in its forward and in its one recomputation, never in a second, nor beforehand."""
    x, y = batch(12)
    schedule = make(2, 4)

    def stages() -> list[nn.Module]:
        return seeded(*(Counted(reentrant=reentrant) for _ in range(2)))

    def run(transport: Transport) -> Any:
        module = stages()[transport.rank]
        step(build(transport, [module] * 2, schedule), x, y)
        return dict(module.named_buffers()), [parameter.grad for parameter in module.parameters()]

    modules = stages()
    outputs = {}
    # The order of the last rank's actions is that of one process; running means depend on it.
    for action in schedule.actions[1]:
        m = action.microbatch
        part, target = x.tensor_split(4)[m], y.tensor_split(4)[m]
        if action.kind is Kind.F:
            outputs[m] = functional.mse_loss(nn.Sequential(*modules)(part), target) / 4
        elif action.kind is not Kind.W:
            outputs.pop(m).backward()
    results = threads(run, 2)
    for (buffers, grads), module in zip(results, modules, strict=True):
        assert buffers["norm.num_batches_tracked"] == 2 * 4
        for grad, parameter in zip(grads, module.parameters(), strict=True):
            torch.testing.assert_close(grad, parameter.grad)
    for name, expected in modules[1].named_buffers():
        torch.testing.assert_close(results[1][0][name], expected)


def test_p074_a_loss_that_nothing_can_be_learned_from_is_an_error_with_a_hint(threads: Threads) -> None:
    """A reentrant checkpoint over inputs without grad gives outputs without grad. Nothing was learned, and nobody was told."""
    x, y = batch(4)

    def run(transport: Transport) -> str:
        modules = seeded(nn.Identity(), Checkpointed(reentrant=True))
        with pytest.raises((StageUsageError, PeerFailure)) as failure:
            # The first rank waits for the loss; without that it has only sent, and may be over before the last one complains.
            step(build(transport, modules, gpipe(2, 2), share_loss=True), x, y)
        return str(failure.value)

    with pytest.warns(UserWarning, match="None of the inputs have requires_grad=True"):
        results = threads(run, 2)
    for message in results:
        assert "the loss of microbatch 0 depends on nothing that requires grad" in message
        assert "use_reentrant=False" in message


# Mixed precision.


class Mixed(nn.Module):
    """Notes in which dtype it really computed; uses its weight twice, which autocast casts once."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.dtypes: set[torch.dtype] = set()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.linear(x)
        self.dtypes.add(h.dtype)
        return self.linear(torch.tanh(h))


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1"])
def test_p059_autocast_around_step_holds_inside_and_what_crosses_is_half_as_large(threads: Threads, name: str) -> None:
    """Also under one autocast for a whole loop, whose kept casts of weights went stale with the first optimizer step."""
    x, y = batch(6)

    def plain() -> list[nn.Module]:
        modules = seeded(Mixed(), Mixed())
        optimizer = torch.optim.SGD(nn.ModuleList(modules).parameters(), 0.5)
        for _ in range(2):
            optimizer.zero_grad()
            for part, target in zip(x.tensor_split(3), y.tensor_split(3), strict=True):
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = functional.mse_loss(nn.Sequential(*modules)(part), target.bfloat16())
                (loss / 3).backward()
            optimizer.step()
        return modules

    def run(transport: Transport) -> Any:
        modules = seeded(Mixed(), Mixed())
        executor = build(transport, modules, BY_NAME[name](2, 3))
        optimizer = torch.optim.SGD(executor.parameters(), 0.5)
        inputs, target = ((x,) if executor.is_first else ()), (y.bfloat16() if executor.is_last else None)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for _ in range(2):
                optimizer.zero_grad()
                executor.eval(*inputs)
                executor.step(*inputs, target=target)
                optimizer.step()
        assert modules[transport.rank].dtypes == {torch.bfloat16}
        return grads_of(executor)

    # bfloat16 has 8 bits, and three microbatches are added up.
    assert_like(threads(run, 2), plain(), lambda a, b: torch.testing.assert_close(a, b, rtol=2**-7, atol=2**-9))


# Gradients that are pending.


def test_p105_p113_p114_set_up_and_evaluation_leave_pending_gradients_alone(threads: Threads) -> None:
    """Shapes change, evaluations stand between, and nothing is zeroed, scaled or learned anew at the gradients' expense."""

    def run(transport: Transport) -> dict[int, list[Any]]:
        executor = build(transport, linears(2), one_f_one_b(2, 2))
        for rows in (4, 6, 4):
            x, y = batch(rows, seed=rows)
            inputs, target = ((x,) if executor.is_first else ()), (y if executor.is_last else None)
            step(executor, x, y)
            before = [(grad, grad.clone()) for grads in grads_of(executor).values() for grad in grads]
            executor.eval(*inputs, target=target)
            executor.eval(*((x[:1],) if executor.is_first else ()))
            after = [grad for grads in grads_of(executor).values() for grad in grads]
            assert all(grad is one and torch.equal(one, copy) for (one, copy), grad in zip(before, after, strict=True))
        return grads_of(executor)

    modules = linears(2)
    for rows in (4, 6, 4):
        for part, target in zip(*(t.tensor_split(2) for t in batch(rows, seed=rows)), strict=True):
            (functional.mse_loss(nn.Sequential(*modules)(part), target) / 2).backward()
    assert_like(threads(run, 2), modules)


def sharded_steps() -> list[Any]:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "pp"))
    (module,) = linears(1)
    fully_shard(module, mesh=mesh["dp"])
    transport = C10dTransport(mesh["pp"].get_group())
    executor = Executor(PipelineStage(module, 0, 1, "cpu"), gpipe(1, 2), functional.mse_loss, transport=transport)
    for rows in (4, 6, 4):
        executor.step(batch(rows, seed=rows)[0], target=batch(rows, seed=rows)[1])
        executor.eval(batch(3)[0])
    transport.close()
    return [parameter.grad.full_tensor() for parameter in executor.parameters()]


def test_p113_sharded_gradients_add_up_over_shapes_and_evaluations(workers: WorkerPool) -> None:
    (module,) = linears(1)
    for rows in (4, 6, 4):
        for part, target in zip(*(t.tensor_split(2) for t in batch(rows, seed=rows)), strict=True):
            (functional.mse_loss(module(part), target) / 2).backward()
    for grads in workers.run(sharded_steps, 2, deadline=60):
        for grad, parameter in zip(grads, module.parameters(), strict=True):
            torch.testing.assert_close(grad, parameter.grad)
