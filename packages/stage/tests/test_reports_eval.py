"""Reports of users about evaluation, and about switching between it and training, each with the right behaviour."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from stage_support import Threads, grads_of, seeded
from stage_support import build as support_build
from torch import nn
from torch.nn import functional

from stepwell_meta.testing import WorkerPool
from stepwell_p2p import C10dTransport, Transport
from stepwell_p2p.exceptions import PeerFailure
from stepwell_stage import Executor, Schedule
from stepwell_stage.exceptions import StageUsageError
from stepwell_stage.schedules import BY_NAME, gpipe, one_f_one_b

WIDTH = 4


class Layer(nn.Module):
    """Behaves otherwise in evaluation, as dropout does, but the same in every thread."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.norm(self.linear(x)))


def layers(count: int) -> list[nn.Module]:
    return seeded(*(Layer() for _ in range(count)))


def batch(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    return torch.randn(rows, WIDTH, generator=generator), torch.randn(rows, WIDTH, generator=generator)


def build(transport: Transport, schedule: Schedule, *, share_loss: bool = False, **options: Any) -> Executor:
    modules = layers(schedule.placement.num_stages)
    return support_build(transport, modules, schedule, stage_options=options, share_loss=share_loss)


def alternate(transport: Transport, schedule: Schedule, order: str, **options: Any) -> Any:
    """Evaluations (e) of several batch sizes and steps (t), in this order, each in its module's mode."""
    executor = build(transport, schedule, **options)
    results: list[Any] = []
    sizes = iter((9, 4, 1, 3, 12, 2))
    for letter in order:
        rows = 8 if letter == "t" else next(sizes)
        x, y = batch(rows)
        for stage in executor.stages:
            stage.submodule.train(letter == "t")
        inputs, target = ((x,) if executor.is_first else ()), (y if executor.is_last else None)
        losses: list[torch.Tensor] = []
        out = (executor.step if letter == "t" else executor.eval)(*inputs, target=target, losses=losses)
        results.append((out, executor.loss, len(losses)))
    return results, grads_of(executor)


def plain(count: int, order: str, microbatches: int) -> tuple[list[Any], list[Any]]:
    model = nn.Sequential(*layers(count))
    results = []
    sizes = iter((9, 4, 1, 3, 12, 2))
    for letter in order:
        x, y = batch(8 if letter == "t" else next(sizes))
        model.train(letter == "t")
        parts = min(microbatches, len(x))
        outputs = []
        for part, target in zip(x.tensor_split(parts), y.tensor_split(parts), strict=True):
            with torch.set_grad_enabled(letter == "t"):
                outputs.append(model(part))
            if letter == "t":
                (functional.mse_loss(outputs[-1], target) * (len(part) / len(x))).backward()
        whole = torch.cat(outputs).detach()
        results.append((whole, functional.mse_loss(whole, y).item(), parts))
    return results, [[parameter.grad for parameter in module.parameters()] for module in model]


def assert_like(by_rank: Sequence[Any], expected: Any) -> None:
    results, grads = expected
    last = next(found for found, _ in by_rank if found[0][0] is not None)
    for (out, loss, count), (whole, plain_loss, parts) in zip(last, results, strict=True):
        assert out.shape == whole.shape
        assert torch.equal(out, whole)
        assert loss.item() == pytest.approx(plain_loss, rel=1e-5)
        assert count == parts
    found = {stage: own for _, stages in by_rank for stage, own in stages.items()}
    for stage, own in enumerate(grads):
        for grad, wanted in zip(found[stage], own, strict=True):
            torch.testing.assert_close(grad, wanted)


@pytest.mark.parametrize("order", ["tete", "etetee"])
@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_p041_p131_p133_any_batch_on_any_schedule_in_any_order(threads: Threads, name: str, order: str) -> None:
    """Nine samples, or one: fewer than there are microbatches run in as many microbatches as there are samples."""
    schedule = BY_NAME[name](2, 4)
    results = threads(alternate, 2, schedule, order)
    assert_like(results, plain(schedule.placement.num_stages, order, 4))


@pytest.mark.parametrize("options", [{}, {"shapes": "dynamic"}], ids=["static", "dynamic"])
def test_p041_p131_p133_on_gloo(workers: WorkerPool, options: dict[str, Any]) -> None:
    def run() -> Any:
        return alternate(C10dTransport(), one_f_one_b(2, 4), "etetee", **options)

    assert_like(workers.run(run, 2, deadline=60), plain(2, "etetee", 4))


def test_p041_one_rank_too() -> None:
    from stepwell_p2p import LoopbackFabric

    results = alternate(LoopbackFabric(1).transport(0), gpipe(1, 4), "eteete")
    assert_like([results], plain(1, "eteete", 4))


def test_p131_evaluation_of_microbatches_that_the_caller_cut(threads: Threads) -> None:
    parts = [(batch(rows)[0],) for rows in (3, 1)]

    def run(transport: Transport) -> Any:
        executor = build(transport, one_f_one_b(2, 4))
        for stage in executor.stages:
            stage.submodule.eval()
        return executor.eval(arg_mbs=parts if executor.is_first else None)

    model = nn.Sequential(*layers(2)).eval()
    with torch.no_grad():
        assert torch.equal(threads(run, 2)[1], torch.cat([model(part) for (part,) in parts]))


def test_p041_a_target_of_another_size_is_refused_on_every_rank(threads: Threads) -> None:
    """Three samples run in three microbatches; a target of two samples cannot be theirs."""

    def run(transport: Transport) -> str:
        executor = build(transport, gpipe(2, 4), share_loss=True)  # so the first rank waits for the last one
        for stage in executor.stages:
            stage.submodule.eval()
        with pytest.raises((StageUsageError, PeerFailure)) as failure:
            executor.eval(
                *((batch(3)[0],) if executor.is_first else ()), target=batch(2)[1] if executor.is_last else None
            )
        return str(failure.value)

    for message in threads(run, 2):
        assert "target: a batch of 2 cannot be cut into 3 microbatches" in message


def test_a_step_still_refuses_fewer_samples_than_microbatches(threads: Threads) -> None:
    """P043: gradients of microbatches without samples would be no mean of anything."""

    def run(transport: Transport) -> str:
        executor = build(transport, gpipe(2, 4))
        x, y = batch(3)
        with pytest.raises(StageUsageError) as failure:
            executor.step(*((x,) if executor.is_first else ()), target=y if executor.is_last else None)
        return str(failure.value)

    for message in threads(run, 2):
        assert "a batch of 3 cannot be cut into 4 microbatches" in message


def test_evaluation_without_a_target_where_weights_are_functions_of_it(threads: Threads) -> None:
    """A model trained with a count of its tokens for weights could not predict: eval asked for a target to count them in."""

    def main(transport: Transport) -> Any:
        executor = support_build(transport, layers(2), one_f_one_b(2, 2), loss_weights=torch.count_nonzero)
        inputs = batch(4)[:1] if executor.is_first else ()
        return executor.eval(*inputs), executor.loss

    (_, none), (outputs, loss) = threads(main, 2)
    assert outputs.shape == (4, WIDTH)
    assert none is loss is None
