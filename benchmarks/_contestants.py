"""The same training step by several runtimes, and how their times are taken: for the benchmarks of pipelines."""

from __future__ import annotations

import functools
import os
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
from stepwell_stage import Costs, Executor, Kind, PipelineStage, Schedule, lower

EXAMPLES = Path(__file__).parent.parent / "examples"
WIDTH = 16

Step = Callable[[], None]
LossFn = Callable[[Tensor, Tensor], Tensor]


class Sleeps(nn.Module):
    """Takes as long as it is told, on no core: so stages of four ranks run at once on any machine.

    Forward once, and backward once for the gradient of the input, where that is wanted, and once for that of the weight. The
    two are apart in the graph, so that a split backward does one in its I and the other in its W.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(WIDTH))
        self.weight.register_hook(self._rest)
        self.seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rest(self.seconds)
        if x.requires_grad:
            x = x.view_as(x)  # a receive buffer may come again, and would bring the hook along
            x.register_hook(self._rest)
        return x + self.weight

    def _rest(self, _: torch.Tensor) -> None:
        rest(self.seconds)


def costs_of(num_stages: int, share: float) -> Costs:
    """What stages that sleep so long take; the first makes no gradient of its input."""
    once = [share] * num_stages
    inputs = [0.0, *once[1:]]
    return Costs(once, [first + share for first in inputs], inputs, once)


def rest(seconds: float) -> None:
    """Give the core away for exactly so long: ``time.sleep`` ends late, and so is told to end earlier by the least of that."""
    if not seconds:
        return
    end = time.perf_counter() + seconds
    time.sleep(max(0.0, seconds - lateness()))
    while time.perf_counter() < end:
        os.sched_yield()


@functools.cache
def lateness() -> float:
    """The least of seconds by which a sleep ends late, on this machine."""
    found = []
    for _ in range(20):
        start = time.perf_counter()
        time.sleep(0.005)
        found.append(time.perf_counter() - start - 0.005)
    return min(found)


def by_hand(
    modules: Sequence[nn.Module],
    schedule: Schedule,
    x: torch.Tensor,
    y: torch.Tensor,
    loss_fn: LossFn | None = None,
    *,
    group: dist.ProcessGroup | None = None,
) -> Step:
    """The same schedule with the same messages, posted in the same order, and nothing else: the limit to approach.

    Every value looks like a microbatch of ``x``. An I and a W each walk through the graph: right where the two share no work.
    """
    rank, count, loss_fn = dist.get_rank(), schedule.num_microbatches, loss_fn or nn.functional.mse_loss
    ranks, last = schedule.placement.ranks, schedule.placement.num_stages - 1
    module_of = dict(zip(schedule.placement.stages_of(rank), modules, strict=True))
    parts, targets = x.tensor_split(count), y.tensor_split(count)
    actions = lower(schedule).with_pairs_apart().actions[rank]
    group = group or dist.group.WORLD

    def step() -> None:
        inputs: dict[tuple[int, int], torch.Tensor] = {}
        outputs: dict[tuple[int, int], torch.Tensor] = {}
        grads: dict[tuple[int, int], torch.Tensor] = {}
        left: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor | None]] = {}
        # Works are kept until the next is waited for: gloo's thread still uses one that has just ended.
        coming: dict[tuple[int, int, int], tuple[torch.Tensor, Any]] = {}
        sent: list[Any] = []

        def recv(stage: int, m: int, source: int) -> None:
            value = torch.empty_like(parts[m])
            coming[stage, m, source] = value, group.recv([value], ranks[source], 2 * (source * count + m))

        def send(value: torch.Tensor, stage: int, m: int, destination: int) -> None:
            sent.append(group.send([value], ranks[destination], 2 * (stage * count + m)))

        def take(stage: int, m: int, source: int) -> torch.Tensor:
            nonlocal work
            value, work = coming.pop((stage, m, source))
            work.wait()
            return value

        work = None
        for action in actions:
            kind, stage, m = action.kind, action.stage, action.microbatch
            if kind is Kind.RECV_F:
                recv(stage, m, stage - 1)
            elif kind is Kind.RECV_B:
                recv(stage, m, stage + 1)
            elif kind is Kind.F:
                if stage == 0:
                    inputs[stage, m] = parts[m]
                else:
                    if (stage, m) not in inputs:
                        inputs[stage, m] = take(stage, m, stage - 1)
                    inputs[stage, m].requires_grad_()
                output = module_of[stage](inputs[stage, m])
                if stage == last:
                    output = loss_fn(output, targets[m]) / count
                elif ranks[stage + 1] == rank:
                    inputs[stage + 1, m] = output.detach().clone()
                outputs[stage, m] = output
            elif kind is Kind.SEND_F:
                send(outputs[stage, m].detach(), stage, m, stage + 1)
            elif kind in (Kind.B, Kind.I):
                output, value, grad = outputs.pop((stage, m)), inputs.pop((stage, m)), None
                if stage < last:
                    grad = grads.pop((stage, m)) if (stage, m) in grads else take(stage, m, stage + 1)
                if kind is Kind.B:
                    output.backward(grad)
                else:
                    left[stage, m] = output, grad
                    if stage:
                        output.backward(grad, retain_graph=True, inputs=[value])
                if stage:
                    assert value.grad is not None
                    grads[stage - 1, m] = value.grad
            elif kind is Kind.W:
                output, grad = left.pop((stage, m))
                output.backward(grad, inputs=list(module_of[stage].parameters()))
            elif kind is Kind.SEND_B:
                send(grads.pop((stage - 1, m)), stage, m, stage - 1)
        for ended in sent:
            ended.wait()

    return step


def ours(
    modules: Sequence[nn.Module],
    schedule: Schedule,
    x: torch.Tensor,
    y: torch.Tensor,
    transport: Transport,
    loss_fn: LossFn = nn.functional.mse_loss,
    *,
    trace: bool = False,
) -> Step:
    """The executor."""
    count = schedule.placement.num_stages
    own = schedule.placement.stages_of(transport.rank)
    stages = [PipelineStage(module, index, count, "cpu") for index, module in zip(own, modules, strict=True)]
    executor = Executor(stages, schedule, loss_fn, transport=transport, trace=trace)
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

    folder = [tempfile.mkdtemp(prefix="bench-shm-") if dist.get_rank() == 0 else ""]  # the last to come removes it
    dist.broadcast_object_list(folder, src=0)
    return SharedMemoryTransport(dist.get_rank(), dist.get_world_size(), folder[0])


Times = dict[str, tuple[list[float], list[float]]]
"""By contestant the wall and CPU seconds of each turn."""


def take_turns(contestants: dict[str, Step], turns: int, *, rounds: int = 1, before: int = 2) -> Times:
    """Wall and CPU seconds of each contestant's step, taken in turn, so that all meet the same disturbances.

    Before that each makes a few steps that do not count.
    """
    for step in contestants.values():
        for _ in range(before):
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
