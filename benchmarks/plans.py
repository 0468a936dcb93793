"""What it costs to make, lower, prove and simulate schedules, by their size. No process group, no device.

    python benchmarks/plans.py            # writes its table into benchmarks/README.md
    python benchmarks/plans.py --quick    # small sizes; prints, and writes nothing

Each row runs in a process of its own, so that the memory is that row's.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import subprocess
import sys
import time

from _table import Table, write_section

from stepwell_p2p import Rules
from stepwell_stage import Costs, lower, prove, simulate
from stepwell_stage.schedules import interleaved_1f1b

SIZES = [(8, 64), (64, 256), (256, 1024), (4096, 64)]
QUICK = [(8, 64), (32, 64)]
LARGEST_PROOF = 1_000_000  # actions; a proof of more is left out


def measure(num_ranks: int, num_microbatches: int) -> dict[str, float]:
    """CPU seconds of each part, and sizes."""
    clock = [time.process_time()]
    schedule = interleaved_1f1b(num_ranks, num_microbatches)
    clock.append(time.process_time())
    plan = lower(schedule)
    clock.append(time.process_time())
    simulation = simulate(plan, Costs.uniform(2 * num_ranks))
    clock.append(time.process_time())
    actions = sum(map(len, plan.actions))
    if actions <= LARGEST_PROOF:
        prove(plan, Rules(tagged=False, rendezvous=True))
    clock.append(time.process_time())
    parts = [later - earlier for earlier, later in itertools.pairwise(clock)]
    return {
        "compute": sum(map(len, schedule.actions)),
        "actions": actions,
        **dict(zip(("make", "lower", "simulate", "prove"), parts, strict=True)),
        "memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "bubble": simulation.bubble,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small sizes; prints, and writes nothing")
    parser.add_argument("--one", type=int, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(*options.one)))
        return
    columns = ["ranks x stages x M", "compute actions", "all actions", "make", "lower", "simulate", "prove", "memory"]
    table = Table("Interleaved 1F1B, two stages a rank: CPU seconds", columns)
    for num_ranks, num_microbatches in QUICK if options.quick else SIZES:
        command = [sys.executable, __file__, "--one", str(num_ranks), str(num_microbatches)]
        found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        proof = f"{found['prove']:.2f} s" if found["actions"] <= LARGEST_PROOF else "left out"
        table.add(
            f"{num_ranks} x 2 x {num_microbatches}",
            f"{found['compute']:,.0f}",
            f"{found['actions']:,.0f}",
            *(f"{found[part]:.2f} s" for part in ("make", "lower", "simulate")),
            proof,
            f"{found['memory'] / 2**30:.2f} GiB",
        )
    head = f"Python {sys.version.split()[0]}, {os.cpu_count()} cores. Memory is that of the whole process, torch's included."
    if not options.quick:
        write_section("plans", "Plans on paper", [head, "", *table.lines()])


if __name__ == "__main__":
    main()
