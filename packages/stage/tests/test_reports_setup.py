"""Reports of users about set-up, hangs and errors: the right behaviour, under the number of the report."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from stage_support import Threads, build, numbers, seeded
from stage_support import step as support_step
from torch import nn
from torch.nn import functional

from stepwell_meta.testing import WorkerPool
from stepwell_p2p import C10dTransport, LoopbackFabric, Placement, Transport, Wire
from stepwell_p2p.exceptions import PeerFailure, TransportError
from stepwell_p2p.testing import RecordingTransport
from stepwell_stage import Executor, PipelineStage, Schedule
from stepwell_stage.exceptions import StageUsageError
from stepwell_stage.schedules import gpipe, interleaved_1f1b, one_f_one_b, zbv

WIDTH = 4


def layers(*widths: int) -> list[nn.Module]:
    """Linear layers from each width to the next, with the same weights on every rank."""
    return seeded(*(nn.Linear(before, after) for before, after in itertools.pairwise(widths)))


def batch(rows: int, width: int = WIDTH, seed: int = 1) -> torch.Tensor:
    return numbers(rows, width, seed=seed)


def step(executor: Executor, x: torch.Tensor, y: torch.Tensor) -> list[Any]:
    """A step; the gradients after it."""
    support_step(executor, x, y)
    return [parameter.grad for parameter in executor.parameters()]


def plain_grads(modules: Sequence[nn.Module], x: torch.Tensor, y: torch.Tensor, microbatches: int) -> list[Any]:
    model = nn.Sequential(*modules)
    for part, target in zip(x.tensor_split(microbatches), y.tensor_split(microbatches), strict=True):
        (functional.mse_loss(model(part), target) * (len(part) / len(x))).backward()
    return [parameter.grad for parameter in model.parameters()]


def assert_equal(found: Sequence[Any], expected: Sequence[Any]) -> None:
    assert len(found) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


# Who talks to whom.


def two_pipelines() -> list[Any]:
    """Ranks 0 and 2 are one pipeline, 1 and 3 the other: no rank's number in its group is its number in the world."""
    rank = dist.get_rank()
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    number, index = rank % 2, rank // 2
    transport = C10dTransport(groups[number])
    executor = build(transport, layers(WIDTH, 7, WIDTH), one_f_one_b(2, 3), stage_options={"shapes": "dynamic"})
    for rows in (5 + number, 8):  # each pipeline has shapes of its own
        grads = step(executor, batch(rows), batch(rows, seed=2))
    transport.close()
    return [number, index, grads]


def test_p013_shapes_travel_on_the_group_of_the_pipeline(workers: WorkerPool) -> None:
    results = workers.run(two_pipelines, 4, deadline=60)
    for number in range(2):
        modules = layers(WIDTH, 7, WIDTH)
        for rows in (5 + number, 8):
            expected = plain_grads(modules, batch(rows), batch(rows, seed=2), 3)
        assert_equal([grad for n, _, grads in results if n == number for grad in grads], expected)


def test_p010_p011_two_ranks_that_are_each_others_next_and_previous(threads: Threads) -> None:
    """A width of its own at every boundary: a value that took another's place could not pass."""
    widths = (WIDTH, 5, 6, 7, WIDTH)

    def run(transport: Transport, options: dict[str, Any]) -> Any:
        executor = build(transport, layers(*widths), interleaved_1f1b(2, 4), stage_options=options)
        step(executor, batch(8), batch(8, seed=2))
        return {stage.stage_index: [p.grad for p in stage.submodule.parameters()] for stage in executor.stages}

    expected = plain_grads(layers(*widths), batch(8), batch(8, seed=2), 4)
    for options in ({}, {"shapes": "dynamic"}):
        found = {stage: grads for result in threads(run, 2, options) for stage, grads in result.items()}
        assert_equal([grad for stage in range(4) for grad in found[stage]], expected)


# Before the first step.


class Opening(RecordingTransport):
    """Notes when channels are opened."""

    def open(self, placement: Placement, wires: Sequence[Wire]) -> None:
        self.opened = (len(self.steps), placement.ranks, tuple(wires))


@pytest.mark.parametrize("declared", [True, False])
def test_p015_p016_channels_first_then_agreement_then_microbatches(threads: Threads, *, declared: bool) -> None:
    """With values declared and not: what is exchanged about them is exchanged before the module runs for the first time."""
    value = torch.zeros(2, WIDTH, requires_grad=True)
    options = {"input_args": value.detach(), "output_args": value} if declared else {}

    def run(transport: Transport) -> Any:
        recorder = Opening(transport)
        modules = layers(WIDTH, WIDTH, WIDTH)
        posted: list[int] = []
        modules[transport.rank].register_forward_pre_hook(lambda *_: posted.append(len(recorder.steps)))
        if declared and transport.rank == 1:
            options["input_args"] = value
        executor = build(recorder, modules, one_f_one_b(2, 4), stage_options=options)
        assert not recorder.steps  # making an executor sends nothing
        step(executor, batch(8), batch(8, seed=2))
        step(executor, batch(8), batch(8, seed=2))
        before = [op.microbatch for one in recorder.steps[: posted[0]] for op in getattr(one, "ops", ())]
        return recorder.opened, before, len(posted)

    for opened, before, calls in threads(run, 2):
        assert opened == (0, (0, 1), (Wire(0, 0, 1, 0),))
        assert {-2, -1} <= set(before)
        assert max(before) <= 1  # beside agreement at most values that may come next
        assert calls == 8


def test_p148_set_up_leaves_random_numbers_alone() -> None:
    """Nothing is run to learn shapes, so no generator is saved and restored, of whatever device."""
    executor = Executor(PipelineStage(nn.Linear(WIDTH, WIDTH), 0, 1, "cpu"), gpipe(1, 2), functional.mse_loss)
    before = torch.get_rng_state()
    executor.step(batch(4), target=batch(4, seed=2))
    executor.eval(batch(3))
    assert torch.equal(torch.get_rng_state(), before)
    dropping = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5))
    executor = Executor(PipelineStage(dropping, 0, 1, "cpu"), gpipe(1, 2), functional.mse_loss)
    torch.manual_seed(5)
    output = executor.step(batch(4), target=batch(4, seed=2))
    torch.manual_seed(5)
    assert torch.equal(output, torch.cat([dropping(part) for part in batch(4).tensor_split(2)]))


def build_one(stages: Any, schedule: Schedule) -> Executor:
    return Executor(stages, schedule, functional.mse_loss, transport=LoopbackFabric(2).transport(0))


def test_p100_stages_that_are_not_where_a_v_needs_them_are_refused_with_the_placement() -> None:
    """And the schedule says by itself which stages a rank holds."""
    stages = [PipelineStage(nn.Linear(1, 1), index, 4, "cpu") for index in (0, 2)]
    with pytest.raises(
        StageUsageError, match=r"places stages \[0, 3\] on rank 0, but it was given \[0, 2\]"
    ) as failure:
        build_one(stages, zbv(2, 4))
    assert "the placement is [0, 1, 1, 0] (the rank of each stage)" in str(failure.value)
    assert zbv(2, 4).placement.stages_of(0) == (0, 3)


def test_p024_a_schedule_of_one_stage_per_rank_over_stages_that_loop_is_refused() -> None:
    stage = PipelineStage(nn.Linear(1, 1), 0, 4, "cpu")
    with pytest.raises(StageUsageError, match="stage 0 says that there are 4 stages, the schedule has 2"):
        build_one(stage, one_f_one_b(2, 4))
    stages = [PipelineStage(nn.Linear(1, 1), index, 4, "cpu") for index in (0, 2)]
    with pytest.raises(StageUsageError, match=r"places stages \[0\] on rank 0, but it was given \[0, 2\]"):
        build_one(stages, one_f_one_b(2, 4))


@pytest.mark.parametrize("make", [gpipe, one_f_one_b, interleaved_1f1b])
def test_p155_the_number_of_microbatches_is_always_said(make: Any) -> None:
    with pytest.raises(TypeError, match="num_microbatches"):
        make(2)


# Messages of any size.


def all_sizes(widths: Sequence[int]) -> bool:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factor = nn.Parameter(torch.tensor(2.0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.factor

    transport = C10dTransport()
    rank = transport.rank
    stage = PipelineStage(Scale(), rank, 2, "cpu")
    executor = Executor(
        stage, one_f_one_b(2, 2), lambda out, y: (out * y).sum(), transport=transport, loss_weights="sum"
    )
    for width in widths:
        executor.parameters().__next__().grad = None
        x = torch.ones(2, width)
        executor.step(
            *((x,) if rank == 0 else ()), target=torch.full((2, 1), 0.5) if rank else None, return_outputs=False
        )
        (parameter,) = executor.parameters()
        assert parameter.grad is not None
        # Both directions at once in the second microbatch's forward; 2 * width values of 2 * 0.5, exact up to 2 ** 24 terms.
        assert parameter.grad.item() == 2 * width
    transport.close()
    return True


def test_p026_p028_the_size_of_a_message_does_not_matter(workers: WorkerPool) -> None:
    """From a few bytes to 64 MiB, where no transport sends ahead of the receive any more."""
    assert workers.run(all_sizes, 2, [1, 2**18, 2**24], deadline=90) == [True, True]


# Ranks that stop.


def ending_early(transport: Transport, *, short: int) -> tuple[str, float]:
    """One rank's data ends after two steps, the others' after four."""
    executor = build(transport, layers(WIDTH, WIDTH, WIDTH), one_f_one_b(2, 2))
    started = 0.0
    try:
        for number in range(4):
            if number == 2 and transport.rank == short:
                transport.close()
                return "closed", 0.0
            started = time.monotonic()
            step(executor, batch(4), batch(4, seed=2))
    except (PeerFailure, TransportError) as error:
        return str(error), time.monotonic() - started
    return "no error", 0.0


@pytest.mark.parametrize("short", [0, 1])
def test_p021_data_that_ends_on_one_rank_ends_the_others(threads: Threads, short: int) -> None:
    results = threads(ending_early, 2, short=short)
    assert results[short][0] == "closed"
    assert f"Closed already: rank {short}" in results[1 - short][0]
    assert results[1 - short][1] < 5


@pytest.mark.parametrize("short", [0, 1])
def test_p021_on_gloo(workers: WorkerPool, short: int) -> None:
    def run() -> tuple[str, float]:
        return ending_early(C10dTransport(), short=short)

    results = workers.run(run, 2, deadline=30)
    assert results[short][0] == "closed"
    assert results[1 - short][0] != "no error"
    assert results[1 - short][1] < 10


@pytest.mark.parametrize("side", ["inputs", "target"])
def test_p021_a_step_without_data_is_an_error_on_every_rank(threads: Threads, side: str) -> None:
    """A loader that yields nothing more, on the first or on the last rank, while the other calls step as before."""

    def run(transport: Transport) -> str:
        executor = build(transport, layers(WIDTH, WIDTH, WIDTH), one_f_one_b(2, 2))
        step(executor, batch(4), batch(4, seed=2))
        with pytest.raises(Exception) as failure:  # noqa: PT011 - which error on which rank is asserted below
            executor.step(
                *((batch(4),) if executor.is_first and side != "inputs" else ()),
                target=batch(4) if executor.is_last and side != "target" else None,
            )
        return f"{type(failure.value).__name__}: {failure.value}"

    at, other = (0, 1) if side == "inputs" else (1, 0)
    results = threads(run, 2)
    assert results[at].startswith("StageExecutionError"), results
    assert results[other].startswith(f"PeerFailure: rank {at}")


@pytest.mark.parametrize("weights", [lambda target: 0.0, lambda target: target.no_such_thing])
def test_loss_weights_that_cannot_be_computed_end_every_rank(threads: Threads, weights: Any) -> None:
    """The last rank alone knows of it, after the step has begun: the others waited for it until they timed out."""

    def run(transport: Transport) -> str:
        modules = layers(WIDTH, WIDTH, WIDTH)
        stage = PipelineStage(modules[transport.rank], transport.rank, 2, "cpu")
        executor = Executor(stage, gpipe(2, 2), functional.mse_loss, transport=transport, loss_weights=weights)
        with pytest.raises((StageUsageError, AttributeError, PeerFailure)) as failure:
            step(executor, batch(4), batch(4, seed=2))
        return f"{type(failure.value).__name__}: {failure.value}"

    first, last = threads(run, 2)
    assert first.startswith("PeerFailure: rank 1")
    assert last.split(": ", 1)[1] in first
