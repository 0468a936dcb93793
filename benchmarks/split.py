"""What it costs to cut a model with ``stepwell_stage.split``, beside the same layers as hand-made stages in the same run.

    python benchmarks/split.py            # writes its tables into benchmarks/README.md; about two minutes
    python benchmarks/split.py --quick    # a look, in half of one; prints, and writes nothing

The model is the example's GPT, written as its layers in a loop and cut into four stages: on four gloo processes with 1F1B, a
stage on each, and on one process with all four. Glue is what a stage's forward takes beside its own layers, as ``describe()``
reports it.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import attrs
import torch
import torch.distributed as dist
from _contestants import EXAMPLES, Times, ours, ratio, slowest, spread, take_turns
from _table import Table, write_section
from torch import Tensor, nn

from stepwell_meta.testing import WorkerPool
from stepwell_p2p import C10dTransport
from stepwell_stage import Executor, Schedule, schedules, split

STAGES = 4
MICROBATCHES = 8


@attrs.frozen
class Size:
    """How much to measure."""

    turns: int
    windows: int
    steps: int  # in each window
    layers: tuple[int, ...]
    tries: int


FULL = Size(25, 5, 20, (8, 32, 128), 3)
QUICK = Size(5, 2, 5, (8, 32), 1)


class Layers(nn.Module):
    """A model as somebody wrote it."""

    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, tokens: Tensor) -> Tensor:
        x = tokens
        for layer in self.layers:
            x = layer(x)
        return x


def example(*arguments: str) -> tuple[Any, argparse.Namespace]:
    """The example as a module, and its options."""
    if str(EXAMPLES) not in sys.path:
        sys.path.insert(0, str(EXAMPLES))
    import train_text

    return train_text, train_text.parse(list(arguments))[0]


def schedule_for(ranks: int) -> Schedule:
    if ranks == STAGES:
        return schedules.one_f_one_b(STAGES, MICROBATCHES)
    return schedules.interleaved_1f1b(ranks, MICROBATCHES, stages_per_rank=STAGES // ranks)


def glue_in(description: str) -> list[float]:
    """Seconds of each stage's glue in a forward, of stages that have run here."""
    return [float(found) * 1e-6 for found in re.findall(r"glue: (\d+) µs", description)]


# What each rank runs.


def model(turns: int, windows: int, steps: int) -> tuple[Times, list[float], list[list[float]]]:
    """Step times; of this rank's stages glue in a forward; and in each window of further steps."""
    train_text, options = example()
    schedule, transport = schedule_for(dist.get_world_size()), C10dTransport()
    generator = torch.Generator().manual_seed(0)
    shape = (options.batch, options.seq_len)
    x, y = (torch.randint(train_text.VOCABULARY, shape, generator=generator) for _ in range(2))
    cut = split(Layers(train_text.build(options)), STAGES, example=x[: options.batch // MICROBATCHES])
    stages = cut.stages(schedule.placement, transport.rank, "cpu", transport=transport)
    executor = Executor(stages, schedule, train_text.loss_fn)
    target, inputs = y if executor.is_last else None, cut.keywords(x)

    def step() -> None:
        executor.step(**inputs, target=target, return_outputs=False)

    whole, by_hand = train_text.build(options), C10dTransport(name="by hand")
    size = len(whole) // STAGES
    modules = [whole[index * size : (index + 1) * size] for index in schedule.placement.stages_of(transport.rank)]
    contestants = {"split": step, "hand-made": ours(modules, schedule, x, y, by_hand, train_text.loss_fn)}
    found = take_turns(contestants, turns)
    glue = glue_in(cut.describe(schedule.placement))
    taken, means = 2 + turns, [glue]
    per_window = []
    for _ in range(windows):
        for _ in range(steps):
            step()
        means.append(glue_in(cut.describe(schedule.placement)))
        before, after = (
            [mean * count for mean in row] for row, count in zip(means[-2:], (taken, taken + steps), strict=True)
        )
        per_window.append([(b - a) / steps for a, b in zip(before, after, strict=True)])
        taken += steps
    transport.close()
    by_hand.close()
    return found, glue, per_window


# The tables.


def glue_tables(tables: tuple[Table, Table], pool: WorkerPool, size: Size) -> None:
    cost, growth = tables
    for ranks, name in ((STAGES, "4 processes"), (1, "1 process")):
        found = pool.run(model, ranks, size.turns, size.windows, size.steps, deadline=300)
        times = [one for one, _, _ in found]
        glue = [seconds for _, mine, _ in found for seconds in mine]
        steps = slowest(times, "split")
        shares = [sum(mine) * MICROBATCHES / statistics.median(steps) for _, mine, _ in found]
        cost.add(
            name,
            f"{statistics.mean(glue) * 1e6:.0f} µs ({min(glue) * 1e6:.0f} to {max(glue) * 1e6:.0f})",
            f"{statistics.mean(shares):.1%}",
            f"{max(shares):.1%}",
            spread(steps),
            ratio(steps, slowest(times, "hand-made")),
        )
        for window in range(size.windows):
            every = [seconds for _, _, windows in found for seconds in windows[window]]
            first = 3 + size.turns + window * size.steps
            growth.add(name, f"{first} to {first + size.steps - 1}", f"{statistics.mean(every) * 1e6:.0f} µs")


def split_table(table: Table, size: Size) -> None:
    for count in size.layers:
        train_text, options = example("--layers", str(count - 2), "--width", "64")
        whole, tokens = Layers(train_text.build(options)), torch.zeros(2, options.seq_len, dtype=torch.long)
        seconds: tuple[list[float], list[float]] = [], []
        for _ in range(size.tries):
            start = time.process_time()
            cut = split(whole, STAGES, example=tokens)
            middle = time.process_time()
            for stage in range(STAGES):
                cut.module(stage)
            seconds[0].append(middle - start)
            seconds[1].append(time.process_time() - middle)
        whole_cut, modules = map(min, seconds)
        table.add(str(count), f"{whole_cut:.2f} s", f"{whole_cut / count * 1e3:.1f} ms", f"{modules:.2f} s")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer steps and layers; prints, and writes nothing")
    quick = parser.parse_args().quick
    size = QUICK if quick else FULL
    cost = Table(
        f"Glue of the example's GPT in {STAGES} stages, M = {MICROBATCHES}",
        ("", "a microbatch and stage", "of the step", "largest rank's", "step", "÷ hand-made stages"),
    )
    growth = Table("The same in later steps", ("", "steps", "a microbatch and stage"))
    cutting = Table(
        f"Cutting it into {STAGES} stages: CPU time", ("layers", "split()", "a layer", f"module() of {STAGES} stages")
    )

    def measure() -> None:
        with WorkerPool(STAGES) as pool:
            glue_tables((cost, growth), pool, size)

    fills: tuple[Callable[[], None], ...] = (measure, lambda: split_table(cutting, size))
    failed = 0
    for fill in fills:
        try:
            fill()
        except Exception:
            traceback.print_exc()
            failed += 1
    lines = [
        f"torch {torch.__version__}, Python {platform.python_version()}, {os.cpu_count()} cores, gloo.",
        "Times of steps are medians, with the middle half; of glue means, with the stages that take least and most.",
        "",
    ]
    for table in (cost, growth, cutting):
        lines += table.lines()
    if not quick and not failed:
        write_section("split", "Models that are cut", lines)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
