"""Torch's own schedules over our stages: gradients and losses of the one-process model."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining
from torch.distributed.pipelining import microbatch
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime
from torch.nn import functional

from stepwell_meta.exceptions import PipeliningMetadataError
from stepwell_meta.testing import WorkerPool
from stepwell_p2p import C10dTransport, Placement
from stepwell_p2p.exceptions import PeerFailure
from stepwell_stage import Executor, PipelineStage, Plan, TensorChunkSpec, lower, tie
from stepwell_stage.exceptions import StageExecutionError
from stepwell_stage.schedules import gpipe, interleaved_1f1b, interleaved_zero_bubble, to_csv, zbv

WIDTH = 6
ROWS = 16


class Layer(nn.Module):
    """A layer that changes its input in place and has a buffer that moves with every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.linear(functional.leaky_relu(x, 0.5, inplace=True))


def layers(count: int) -> list[nn.Module]:
    generator = torch.Generator().manual_seed(0)
    made: list[nn.Module] = [nn.Linear(WIDTH, WIDTH), *(Layer() for _ in range(count - 1))]
    for module in made:
        for parameter in module.parameters():
            nn.init.uniform_(parameter, -0.5, 0.5, generator=generator)
    return made


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(ROWS, WIDTH, generator=generator), torch.randn(ROWS, WIDTH, generator=generator)


def plain(count: int, microbatches: int) -> tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor]:
    """Gradients, losses and outputs of the one-process loop over the same microbatches."""
    model = nn.Sequential(*layers(count))
    x, y = batch()
    losses, outputs = [], []
    for part, target in zip(x.tensor_split(microbatches), y.tensor_split(microbatches), strict=True):
        output = model(part)
        loss = functional.mse_loss(output, target)
        loss.backward()
        losses.append(loss.detach())
        outputs.append(output.detach())
    for parameter in model.parameters():
        parameter.grad.div_(microbatches)
    return [parameter.grad for parameter in model.parameters()], losses, torch.cat(outputs)


def check(
    schedule: Any, stages: Sequence[PipelineStage], microbatches: int, *, steps: int, scaled: bool = True
) -> None:
    """Steps and evaluations over this rank's stages, compared with the plain loop."""
    count = stages[0].num_stages
    grads, losses, outputs = plain(count, microbatches)
    grads = grads if scaled else [grad * microbatches for grad in grads]
    per_stage = [list(module.parameters()) for module in layers(count)]
    start = [sum(len(p) for p in per_stage[: stage.stage_index]) for stage in stages]
    x, y = batch()
    first, last = any(stage.is_first for stage in stages), any(stage.is_last for stage in stages)
    for step in range(steps):
        for stage in stages:
            stage.submod.zero_grad()
        found: list[torch.Tensor] = []
        result = schedule.step(*((x,) if first else ()), target=y if last else None, losses=found)
        for stage, offset in zip(stages, start, strict=True):
            for parameter, grad in zip(stage.submod.parameters(), grads[offset:], strict=False):
                torch.testing.assert_close(parameter.grad, grad)
            if stage.stage_index:  # what runs before the first step leaves no trace
                assert stage.submod.calls == microbatches * (step + 1)
        if last:
            torch.testing.assert_close(torch.stack(found).detach(), torch.stack(losses))
            torch.testing.assert_close(result, outputs)
    kept = [parameter.grad.clone() for stage in stages for parameter in stage.submod.parameters()]
    result = schedule.eval(*((x,) if first else ()), target=y if last else None, losses=[])
    if last:
        torch.testing.assert_close(result, outputs)
    assert all(
        torch.equal(parameter.grad, grad)
        for parameter, grad in zip((p for stage in stages for p in stage.submod.parameters()), kept, strict=True)
    )


def stages_on(ranks: Sequence[int], transport: C10dTransport, **options: Any) -> list[PipelineStage]:
    count = len(ranks)
    return [
        PipelineStage(module, index, count, "cpu", transport=transport, **options)
        for index, module in enumerate(layers(count))
        if ranks[index] == transport.rank
    ]


EXAMPLE = torch.zeros(ROWS // 4, WIDTH)


def every_schedule(steps: int) -> None:
    transport = C10dTransport()
    size = transport.size
    loop, v = Placement.loop(2 * size, size).ranks, Placement.v(2 * size, size).ranks
    declared = {"input_args": EXAMPLE.clone().requires_grad_(), "output_args": EXAMPLE.clone().requires_grad_()}
    for make, options in ((pipelining.ScheduleGPipe, {}), (pipelining.Schedule1F1B, declared)):
        (stage,) = stages_on(range(size), transport, **options)
        check(make(stage, 4, functional.mse_loss), [stage], 4, steps=steps)
    for kind, ranks, microbatches in (
        (pipelining.ScheduleLoopedBFS, loop, 4),
        (pipelining.ScheduleInterleaved1F1B, loop, 4),
        (pipelining.ScheduleInterleavedZeroBubble, loop, 4),
        (pipelining.ScheduleZBVZeroBubble, v, 8),
        (pipelining.ScheduleDualPipeV, v, 8),
    ):
        stages = stages_on(ranks, transport)
        check(kind(stages, microbatches, functional.mse_loss), stages, microbatches, steps=steps)
    transport.close()


@pytest.mark.parametrize(("ranks", "steps"), [(2, 2), (4, 1)])
def test_torchs_schedules_run_over_our_stages(workers: WorkerPool, ranks: int, steps: int) -> None:
    workers.run(every_schedule, ranks, steps, deadline=110)


class Breaks(nn.Module):
    """Raises in the forward, or the backward, of microbatch 2, or when it runs to show what crosses."""

    def __init__(self, module: nn.Module, where: str) -> None:
        super().__init__()
        self.module, self.where, self.calls = module, where, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.where == "interrupt" and self.calls == 4:
            raise KeyboardInterrupt
        if (self.where == "forward" and self.calls == 4) or (self.where == "beforehand" and self.calls == 1):
            raise ZeroDivisionError("a mistake in the model")
        y = self.module(x)
        if self.where == "backward" and self.calls == 4:
            y.register_hook(lambda grad: 1 // 0)
        return y


def failing() -> list[tuple[str, float]]:
    """Torch's schedules where one stage raises; what each rank got, and after how many seconds."""
    size = dist.get_world_size()
    found = []
    for kind, where in (
        (pipelining.ScheduleGPipe, "beforehand"),
        (pipelining.ScheduleGPipe, "forward"),
        (pipelining.Schedule1F1B, "backward"),
        (pipelining.ScheduleInterleaved1F1B, "forward"),
        (pipelining.ScheduleZBVZeroBubble, "backward"),
        (pipelining.Schedule1F1B, "interrupt"),
    ):
        looped = issubclass(kind, pipelining.schedules.PipelineScheduleMulti)
        place = Placement.v if kind is pipelining.ScheduleZBVZeroBubble else Placement.loop
        ranks = place(2 * size if looped else size, size).ranks
        transport = C10dTransport(dist.new_group())  # a failure ends the connections of its group
        stages = stages_on(ranks, transport)
        for stage in stages:
            if stage.stage_index == 1:
                stage.program.module = Breaks(stage.submodule, where)
        schedule = kind(stages if looped else stages[0], 8, functional.mse_loss)
        x, y = batch()
        first, last = any(stage.is_first for stage in stages), any(stage.is_last for stage in stages)
        start = time.monotonic()
        with pytest.raises((StageExecutionError, PeerFailure, KeyboardInterrupt)) as failure:
            schedule.step(*((x,) if first else ()), target=y if last else None)
        found.append((f"{failure.type.__name__}: {failure.value}", time.monotonic() - start))
        transport.close()
    return found


def test_p150_when_a_stage_raises_under_torchs_schedules_every_rank_hears_it_in_seconds(workers: WorkerPool) -> None:
    """The others do not wait for the backend's timeout, though nobody ends."""
    for rank, found in enumerate(workers.run(failing, 3, deadline=60)):
        words, seconds = found.pop()
        assert seconds < 8
        assert words.startswith("KeyboardInterrupt" if rank == 1 else "PeerFailure: rank 1")
        for (words, seconds), action in zip(found, ("1F0", "1F2", "1B2", "1F2", "1I2"), strict=True):
            assert seconds < 8, (rank, words, seconds)
            assert words.startswith("StageExecutionError" if rank == 1 else "PeerFailure: rank 1"), words
            assert f"stage 1, microbatch {action[-1]}, action {action}" in words
            assert "ZeroDivisionError" in words


def without_inputs() -> tuple[str, float]:
    transport = C10dTransport()
    (stage,) = stages_on(range(2), transport)
    schedule = pipelining.ScheduleGPipe(stage, 2, functional.mse_loss)
    start = time.monotonic()
    with pytest.raises((PipeliningMetadataError, PeerFailure)) as failure:
        schedule.step(target=None if stage.is_first else batch()[1])
    transport.close()
    return str(failure.value), time.monotonic() - start


def test_when_the_first_stage_gets_nothing_to_learn_from_every_rank_hears_it(workers: WorkerPool) -> None:
    """The others waited for its first values until the backend's timeout."""
    for words, seconds in workers.run(without_inputs, 2, deadline=40):
        assert "stage 0 got no arguments to learn from" in words
        assert seconds < 8


def with_ties() -> str:
    """A parameter that two stages hold, tied for the executor or not yet."""
    transport = C10dTransport()
    (stage,) = stages_on(range(2), transport)
    if stage.is_last:
        stage.to_tie = ("embedding",)
    with pytest.raises(PipeliningMetadataError) as failure:
        pipelining.ScheduleGPipe(stage, 2, functional.mse_loss).step(
            *((batch()[0],) if stage.is_first else ()), target=None if stage.is_first else batch()[1]
        )
    stage.to_tie = ()
    executor = Executor(stage, gpipe(2, 2), functional.mse_loss, transport=transport)
    tie(executor, {"shared": [(0, "weight"), (1, "linear.weight")]})
    with pytest.raises(PipeliningMetadataError) as other:
        pipelining.ScheduleGPipe(stage, 2, functional.mse_loss).step(
            *((batch()[0],) if stage.is_first else ()), target=None if stage.is_first else batch()[1]
        )
    transport.close()
    return f"{failure.value}; {other.value}"


def test_p081_ties_are_refused_on_every_rank_before_torchs_schedules_run(workers: WorkerPool) -> None:
    for words in workers.run(with_ties, 2, deadline=40):
        assert "stage 1: parameters are tied (embedding), and torch's schedules do not add up their gradients" in words
        assert "stage 0: parameters are tied (shared)" in words
        assert "run the stages with stepwell_stage.Executor" in words


def without_a_transport() -> None:
    """As with torch's stages: the default process group, or a group."""
    for group in (None, dist.group.WORLD):
        rank, size = dist.get_rank(), dist.get_world_size()
        stage = PipelineStage(layers(size)[rank], rank, size, "cpu", group=group)
        check(pipelining.ScheduleGPipe(stage, 4, functional.mse_loss), [stage], 4, steps=1)
        stage._pipe.close()


def test_the_default_group_serves(workers: WorkerPool) -> None:
    workers.run(without_a_transport, 2, deadline=60)


def specs() -> None:
    """Torch's specs under torch's schedules; ours and torch's under the executor."""
    transport = C10dTransport()
    x, y = batch()
    for make in ("torch", "ours"):
        modules = layers(2)
        stage = PipelineStage(_Transposed(modules[transport.rank]), transport.rank, 2, "cpu", transport=transport)
        first = stage.is_first
        spec = (TensorChunkSpec(1),) if make == "ours" else (microbatch.TensorChunkSpec(1),)
        runner = (
            pipelining.ScheduleGPipe(stage, 4, functional.mse_loss, args_chunk_spec=spec)
            if make == "torch"
            else Executor(stage, gpipe(2, 4), functional.mse_loss, transport=transport, args_chunk_spec=spec)
        )
        for _ in range(2):
            stage.submod.zero_grad()
            runner.step(*((x.T.contiguous(),) if first else ()), target=None if first else y)
        grads, _, _ = plain(2, 4)
        for parameter, grad in zip(stage.submod.parameters(), grads[2 * transport.rank :], strict=False):
            torch.testing.assert_close(parameter.grad, grad)
    transport.close()


class _Transposed(nn.Module):
    """Takes samples as columns where they enter."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x.T if x.shape[0] == WIDTH and isinstance(self.module, nn.Linear) else x)


def test_inputs_are_cut_along_the_dim_that_a_spec_says(workers: WorkerPool) -> None:
    workers.run(specs, 2, deadline=60)


def from_files() -> None:
    """Torch's runtime reads what we write: schedules, and plans with their communication."""
    transport = C10dTransport()
    for schedule, kind in (
        (interleaved_1f1b(transport.size, 4), "compute_only"),
        (zbv(transport.size, 4), "compute_only"),
        (lower(interleaved_zero_bubble(transport.size, 4)), "compute_comms"),
    ):
        stages = stages_on(schedule.placement.ranks, transport)
        runtime = _PipelineScheduleRuntime(stages, 4, functional.mse_loss)
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "plan.csv")
            to_csv(schedule, file, for_torch=True)
            runtime._load_csv(str(file), kind)
        check_without_scaling = isinstance(schedule, Plan)  # torch puts REDUCE_GRAD into schedules only
        runtime.scale_grads = not check_without_scaling
        check(runtime, stages, 4, steps=1, scaled=not check_without_scaling)
    transport.close()


def test_torchs_csv_runtime_runs_over_our_stages(workers: WorkerPool) -> None:
    workers.run(from_files, 2, deadline=80)
