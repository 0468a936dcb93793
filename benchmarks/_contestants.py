"""The same training step by several runtimes, and how their times are taken: for the benchmarks of pipelines."""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stepwell_p2p import Transport
from stepwell_stage import Executor, PipelineStage, Schedule

EXAMPLES = Path(__file__).parent.parent / "examples"
WIDTH = 16

Step = Callable[[], None]
LossFn = Callable[[Tensor, Tensor], Tensor]


class Sleeps(nn.Module):
    """Takes as long as it is told, forward and backward, on no core: so stages of four ranks run at once on any machine."""

    def __init__(self, forward: float, backward: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(WIDTH))
        self.seconds = (forward, backward)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Sleep.apply(x, self.weight, *self.seconds)


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, forward: float, backward: float) -> torch.Tensor:
        ctx.seconds = backward
        time.sleep(forward)
        return x + weight

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        time.sleep(ctx.seconds)
        return grad, grad.sum(0), None, None


def by_hand(module: nn.Module, microbatches: int, x: torch.Tensor, y: torch.Tensor) -> Step:
    """1F1B with the same messages and nothing else: the limit to approach."""
    rank, size = dist.get_rank(), dist.get_world_size()
    parts, targets = x.tensor_split(microbatches), y.tensor_split(microbatches)
    warm_up = min(size - 1 - rank, microbatches)

    def step() -> None:
        kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        sent: list[Any] = []

        def forward(m: int) -> None:
            if rank:
                value = torch.empty_like(parts[m])
                dist.irecv(value, rank - 1, tag=2 * m).wait()
                value.requires_grad_()
            else:
                value = parts[m]
            output = module(value)
            if rank < size - 1:
                sent.append(dist.isend(output.detach(), rank + 1, tag=2 * m))
            else:
                output = nn.functional.mse_loss(output, targets[m]) / microbatches
            kept[m] = (value, output)

        def backward(m: int) -> None:
            value, output = kept.pop(m)
            if rank < size - 1:
                grad = torch.empty_like(output)
                dist.irecv(grad, rank + 1, tag=2 * m + 1).wait()
                output.backward(grad)
            else:
                output.backward()
            if rank:
                sent.append(dist.isend(value.grad, rank - 1, tag=2 * m + 1))

        for m in range(warm_up):
            forward(m)
        for m in range(microbatches):
            if m + warm_up < microbatches:
                forward(m + warm_up)
            backward(m)
        for work in sent:
            work.wait()

    return step


def ours(
    modules: Sequence[nn.Module],
    schedule: Schedule,
    x: torch.Tensor,
    y: torch.Tensor,
    transport: Transport,
    loss_fn: LossFn = nn.functional.mse_loss,
) -> Step:
    """The executor."""
    count = schedule.placement.num_stages
    own = schedule.placement.stages_of(transport.rank)
    stages = [PipelineStage(module, index, count, "cpu") for index, module in zip(own, modules, strict=True)]
    executor = Executor(stages, schedule, loss_fn, transport=transport)
    inputs = (x,) if executor.is_first else ()
    target = y if executor.is_last else None
    return lambda: executor.step(*inputs, target=target, return_outputs=False)


def torchs(
    modules: Sequence[nn.Module],
    name: str,
    microbatches: int,
    x: torch.Tensor,
    y: torch.Tensor,
    loss_fn: LossFn = nn.functional.mse_loss,
) -> Step:
    """torch.distributed.pipelining's runtime, same schedule."""
    from torch.distributed import pipelining

    rank, size = dist.get_rank(), dist.get_world_size()
    single = name in ("gpipe", "1f1b")
    count = size if single else 2 * size
    second = 2 * size - 1 - rank if name in ("zbv", "dualpipe-v") else rank + size
    own = [rank] if single else [rank, second]
    device = torch.device("cpu")
    stages = [pipelining.PipelineStage(m, i, count, device) for i, m in zip(own, modules, strict=True)]
    cls = {
        "gpipe": pipelining.ScheduleGPipe,
        "1f1b": pipelining.Schedule1F1B,
        "interleaved-1f1b": pipelining.ScheduleInterleaved1F1B,
        "looped-bfs": pipelining.ScheduleLoopedBFS,
        "interleaved-zero-bubble": pipelining.ScheduleInterleavedZeroBubble,
        "zbv": pipelining.ScheduleZBVZeroBubble,
        "dualpipe-v": pipelining.ScheduleDualPipeV,
    }[name]
    runner = cls(stages[0] if single else stages, microbatches, loss_fn=loss_fn)
    inputs = (x,) if 0 in own else ()
    target = y if count - 1 in own else None

    def step() -> None:
        runner.step(*inputs, target=target, return_outputs=False)

    return step


def shared_memory() -> Transport:
    """The example's transport, for the ranks of the process group."""
    sys.path.insert(0, str(EXAMPLES / "transport_shm/src"))
    from stepwell_transport_shm import SharedMemoryTransport

    folder = [tempfile.mkdtemp(prefix="bench-shm-")]
    dist.broadcast_object_list(folder, src=0)
    return SharedMemoryTransport(dist.get_rank(), dist.get_world_size(), folder[0])


Times = dict[str, tuple[list[float], list[float]]]
"""By contestant the wall and CPU seconds of each turn."""


def take_turns(contestants: dict[str, Step], turns: int, *, rounds: int = 1) -> Times:
    """Wall and CPU seconds of each contestant's step, taken in turn, so that all meet the same disturbances."""
    for step in contestants.values():
        step()
        step()
    found: Times = {name: ([], []) for name in contestants}
    for _ in range(turns):
        for name, step in contestants.items():
            dist.barrier()
            wall, cpu = time.perf_counter(), time.process_time()
            for _ in range(rounds):
                step()
            found[name][0].append((time.perf_counter() - wall) / rounds)
            found[name][1].append((time.process_time() - cpu) / rounds)
    return found


def slowest(by_rank: Sequence[Times], name: str, which: int = 0) -> list[float]:
    """Per turn the time of the rank that took longest."""
    return [max(times) for times in zip(*(found[name][which] for found in by_rank), strict=True)]


def total(by_rank: Sequence[Times], name: str) -> list[float]:
    """Per turn the CPU time of all ranks."""
    return [sum(times) for times in zip(*(found[name][1] for found in by_rank), strict=True)]


def spread(times: Sequence[float], scale: float = 1e3, unit: str = " ms", digits: int = 1) -> str:
    """The median, and the middle half."""
    low, middle, high = (f"{time * scale:,.{digits}f}" for time in statistics.quantiles(times, n=4))
    return f"{middle}{unit} ({low} to {high})"


def ratio(times: Sequence[float], base: Sequence[float]) -> str:
    """Of the medians."""
    return f"{statistics.median(times) / statistics.median(base):.2f}"
