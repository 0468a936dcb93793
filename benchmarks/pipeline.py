"""What the executor adds to a schedule, beside a hand-written loop and torch.distributed.pipelining in the same run.

    python benchmarks/pipeline.py [--quick]

Four gloo processes on this machine. Each figure is a median over steps that the contestants take in turn, so that all meet the
same disturbances; the spread beside it is the middle half. Ratios compare; seconds depend on the machine.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from _table import Table, write_section
from torch import nn

from stepwell_meta.testing import WorkerPool
from stepwell_p2p import C10dTransport, LoopbackFabric
from stepwell_stage import Costs, Executor, PipelineStage, lower, schedules, simulate

RANKS = 4
WIDTH = 16

Step = Callable[[], None]


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


def ours(modules: Sequence[nn.Module], schedule: Any, x: torch.Tensor, y: torch.Tensor, transport: Any) -> Step:
    """The executor."""
    count = schedule.placement.num_stages
    own = schedule.placement.stages_of(transport.rank)
    stages = [PipelineStage(module, index, count, "cpu") for index, module in zip(own, modules, strict=True)]
    executor = Executor(stages, schedule, nn.functional.mse_loss, transport=transport)
    inputs = (x,) if executor.is_first else ()
    target = y if executor.is_last else None
    return lambda: executor.step(*inputs, target=target, return_outputs=False)


def torchs(modules: Sequence[nn.Module], name: str, microbatches: int, x: torch.Tensor, y: torch.Tensor) -> Step:
    """torch.distributed.pipelining's runtime, same schedule."""
    from torch.distributed import pipelining

    rank = dist.get_rank()
    single = name in ("gpipe", "1f1b")
    count = RANKS if single else 2 * RANKS
    second = 2 * RANKS - 1 - rank if name in ("zbv", "dualpipe-v") else rank + RANKS
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
    runner = cls(stages[0] if single else stages, microbatches, loss_fn=nn.functional.mse_loss)
    inputs = (x,) if 0 in own else ()
    target = y if count - 1 in own else None

    def step() -> None:
        runner.step(*inputs, target=target, return_outputs=False)

    return step


def measure(contestants: dict[str, Step], steps: int) -> dict[str, tuple[list[float], list[float]]]:
    """Wall and CPU seconds of each step of each contestant, taken in turn."""
    for step in contestants.values():
        step()
        step()
    found: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in contestants}
    for _ in range(steps):
        for name, step in contestants.items():
            dist.barrier()
            wall, cpu = time.perf_counter(), time.process_time()
            step()
            found[name][0].append(time.perf_counter() - wall)
            found[name][1].append(time.process_time() - cpu)
    return found


# What each rank runs.


def trivial(microbatches: int, steps: int) -> Any:
    torch.manual_seed(0)
    x, y = torch.randn(microbatches, WIDTH), torch.randn(microbatches, WIDTH)

    def module() -> nn.Module:
        return nn.Linear(WIDTH, WIDTH)

    return measure(
        {
            "by hand": by_hand(module(), microbatches, x, y),
            "stepwell": ours([module()], schedules.one_f_one_b(RANKS, microbatches), x, y, C10dTransport()),
            "torch": torchs([module()], "1f1b", microbatches, x, y),
        },
        steps,
    )


def sleeping(name: str, microbatches: int, steps: int, forward: float) -> Any:
    x, y = torch.randn(microbatches, WIDTH), torch.randn(microbatches, WIDTH)
    schedule = schedules.BY_NAME[name](RANKS, microbatches)
    per_rank = schedule.placement.num_stages // RANKS

    def modules() -> list[nn.Module]:
        return [Sleeps(forward / per_rank, 2 * forward / per_rank) for _ in range(per_rank)]

    contestants = {"stepwell": ours(modules(), schedule, x, y, C10dTransport())}
    if name != "zb-h1":  # torch has no such schedule
        contestants["torch"] = torchs(modules(), name, microbatches, x, y)
    return measure(contestants, steps)


def growth(microbatches: int, steps: int) -> Any:
    x, y = torch.randn(microbatches, WIDTH), torch.randn(microbatches, WIDTH)
    schedule = schedules.one_f_one_b(RANKS, microbatches)
    return measure({"stepwell": ours([nn.Linear(WIDTH, WIDTH)], schedule, x, y, C10dTransport())}, steps)


def loopback(microbatches: int, steps: int) -> tuple[float, float]:
    """CPU seconds per action of one rank with four stages, and of the same modules called in a plain loop."""
    x, y = torch.randn(microbatches, WIDTH), torch.randn(microbatches, WIDTH)
    modules = [nn.Linear(WIDTH, WIDTH)]
    step = ours(modules, schedules.one_f_one_b(1, microbatches), x, y, LoopbackFabric(1).transport(0))
    parts, targets = x.tensor_split(microbatches), y.tensor_split(microbatches)

    def plain() -> None:
        for part, target in zip(parts, targets, strict=True):
            (nn.functional.mse_loss(modules[0](part), target) / microbatches).backward()

    times: dict[str, list[float]] = {"ours": [], "plain": []}
    step()
    plain()
    for _ in range(steps):
        for name, run in (("ours", step), ("plain", plain)):
            start = time.process_time()
            run()
            times[name].append(time.process_time() - start)
    actions = 2 * microbatches
    return statistics.median(times["ours"]) / actions, statistics.median(times["plain"]) / actions


def slowest(by_rank: list[Any], name: str, which: int = 0) -> list[float]:
    """Per step the time of the rank that took longest."""
    return [max(times) for times in zip(*(found[name][which] for found in by_rank), strict=True)]


def total(by_rank: list[Any], name: str) -> list[float]:
    """Per step the CPU time of all ranks."""
    return [sum(times) for times in zip(*(found[name][1] for found in by_rank), strict=True)]


def spread(times: Sequence[float]) -> str:
    low, _, high = statistics.quantiles(times, n=4)
    return f"{statistics.median(times) * 1e3:.1f} ms ({low * 1e3:.1f} to {high * 1e3:.1f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few steps, for a look")
    quick = parser.parse_args().quick
    lines = [
        f"torch {torch.__version__}, Python {platform.python_version()}, {os.cpu_count()} cores, {RANKS} gloo processes"
        f"{', few steps (--quick)' if quick else ''}.",
        "",
    ]
    with WorkerPool(RANKS) as pool:
        count = 64
        found = pool.run(trivial, RANKS, count, 5 if quick else 40, deadline=300)
        limit, limit_cpu = (statistics.median(f(found, "by hand")) for f in (slowest, total))
        table = Table("1F1B, trivial stages, M = 64", ["", "step", "÷ by hand", "CPU of all ranks", "÷ by hand"])
        for name in ("by hand", "stepwell", "torch"):
            wall, cpu = slowest(found, name), total(found, name)
            ratios = (statistics.median(wall) / limit, statistics.median(cpu) / limit_cpu)
            table.add(name, spread(wall), f"{ratios[0]:.2f}", spread(cpu), f"{ratios[1]:.2f}")
        lines += table.lines()

        table = Table("Sleeping stages: step ÷ ideal makespan of that schedule", ["schedule", "M", "stepwell", "torch"])
        forward = 0.012
        for name in schedules.BY_NAME:
            for microbatches in (8,) if quick else (8, 32):
                found = pool.run(sleeping, RANKS, name, microbatches, 3 if quick else 9, forward, deadline=300)
                schedule = schedules.BY_NAME[name](RANKS, microbatches)
                stages = schedule.placement.num_stages
                share = forward * RANKS / stages
                # A custom Function runs backward once: its I does all, and W nothing.
                costs = Costs([share] * stages, [2 * share] * stages, [2 * share] * stages, [0.0] * stages)
                ideal = simulate(lower(schedule), costs).makespan
                ratios = [
                    f"{statistics.median(slowest(found, who)) / ideal:.3f}" if who in found[0] else "none"
                    for who in ("stepwell", "torch")
                ]
                table.add(name, str(microbatches), *ratios)
        lines += table.lines()

        table = Table("Growth: 1F1B, trivial stages, stepwell", ["M", "step", "per action"])
        for microbatches in (8, 64) if quick else (8, 64, 512):
            wall = slowest(pool.run(growth, RANKS, microbatches, 5 if quick else 15, deadline=300), "stepwell")
            per_action = statistics.median(wall) / (2 * microbatches)
            table.add(str(microbatches), spread(wall), f"{per_action * 1e6:.0f} µs")
        lines += table.lines()

        (mine, plain), *_ = pool.run(loopback, 1, 256, 5 if quick else 30, deadline=120, init_group=False)
        table = Table("One rank, no transport: CPU per action", ["stepwell", "plain loop", "added"])
        table.add(*(f"{seconds * 1e6:.1f} µs" for seconds in (mine, plain, mine - plain)))
        lines += table.lines()
    write_section("pipeline", "The executor", lines)


if __name__ == "__main__":
    main()
