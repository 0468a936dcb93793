"""Whether a simulated step takes as long as the real one: sleeping stages on four gloo processes, every schedule.

    python benchmarks/reality.py [--forward SECONDS] [--tries N]

Stages sleep, forward and backward, so that cores do not matter as long as there is one to wake up on. Prints for each schedule
the simulated makespan, the best of a few measured steps, and how far they are apart; ends with status 1 if any is more than 5 %
apart after a second look with sleeps of twice the length. A loaded machine makes steps longer, never shorter.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from _contestants import WIDTH, Sleeps, costs_of
from pipeline import RANKS
from torch import nn

from stepwell_meta.testing import WorkerPool
from stepwell_p2p import C10dTransport, Placement
from stepwell_stage import Costs, Executor, PipelineStage, Schedule, lower, schedules, simulate

MICROBATCHES = 8
LIMIT = 0.05


def all_schedules(forward: float) -> dict[str, tuple[Schedule, Costs]]:
    """Every schedule with what its stages are told to sleep; halves where a rank has two stages."""
    made = {name: make(RANKS, MICROBATCHES) for name, make in schedules.BY_NAME.items()}
    made["forward-only"] = schedules.forward_only(Placement.loop(RANKS, RANKS), MICROBATCHES)
    counts = {name: schedule.placement.num_stages for name, schedule in made.items()}
    found = {
        name: (schedule, costs_of(counts[name], forward * RANKS / counts[name])) for name, schedule in made.items()
    }
    costs = costs_of(RANKS, forward)
    found["zero-bubble"] = schedules.zero_bubble(Placement.loop(RANKS, RANKS), MICROBATCHES, costs), costs
    return found


def steps(name: str, forward: float, tries: int) -> list[float]:
    """Seconds of each of a few steps, begun together, on one rank."""
    schedule, costs = all_schedules(forward)[name]
    transport = C10dTransport()
    stages = [
        PipelineStage(Sleeps(costs.forward[index]), index, costs.num_stages, "cpu")
        for index in schedule.placement.stages_of(transport.rank)
    ]
    executor = Executor(stages, schedule, nn.functional.mse_loss, transport=transport)
    x = torch.randn(MICROBATCHES, WIDTH)
    run = executor.step if schedule.has_backward else executor.eval
    inputs, target = (x,) if executor.is_first else (), x if executor.is_last else None
    found = []
    for _ in range(tries + 1):  # the first agrees on what crosses
        dist.barrier()
        start = time.perf_counter()
        run(*inputs, target=target, return_outputs=False)
        found.append(time.perf_counter() - start)
    transport.close()
    return found[1:]


def look(pool: WorkerPool, name: str, forward: float, tries: int) -> tuple[float, float]:
    """Simulated and measured seconds of a step: of the best step, those of the rank that took longest."""
    schedule, costs = all_schedules(forward)[name]
    by_rank: list[Any] = pool.run(steps, RANKS, name, forward, tries, deadline=300)
    return simulate(lower(schedule), costs).makespan, min(map(max, zip(*by_rank, strict=True)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--forward", type=float, default=0.03, help="seconds that a rank's forward of a microbatch sleeps"
    )
    parser.add_argument("--tries", type=int, default=3, help="measured steps, of which the best counts")
    arguments = parser.parse_args()
    apart = []
    print(f"{'schedule':24} {'simulated':>10} {'measured':>10} {'apart':>8}")
    with WorkerPool(RANKS) as pool:
        for name in all_schedules(arguments.forward):
            for forward in (arguments.forward, 2 * arguments.forward):
                simulated, measured = look(pool, name, forward, arguments.tries)
                deviation = measured / simulated - 1
                print(f"{name:24} {simulated:8.3f} s {measured:8.3f} s {deviation:+8.1%}", flush=True)
                if abs(deviation) <= LIMIT:
                    break
            else:
                apart.append(name)
    if apart:
        print(f"more than {LIMIT:.0%} apart: {', '.join(apart)}")
    return 1 if apart else 0


if __name__ == "__main__":
    sys.exit(main())
