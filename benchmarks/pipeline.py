"""What the executor adds to a schedule, beside a hand-written loop and torch.distributed.pipelining in the same run.

    python benchmarks/pipeline.py            # writes its tables into benchmarks/README.md; about nine minutes
    python benchmarks/pipeline.py --quick    # a look, in two; prints, and writes nothing

Four gloo processes on this machine. Each figure is a median over steps that the contestants take in turn, so that all meet the
same disturbances; the spread beside it is the middle half. Ratios compare; seconds depend on the machine.
"""

from __future__ import annotations

import argparse
import functools
import os
import platform
import resource
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import attrs
import torch
import torch.distributed as dist
from _contestants import (
    EXAMPLES,
    WIDTH,
    Sleeps,
    Times,
    by_hand,
    costs_of,
    ours,
    ratio,
    rest,
    shared_memory,
    slowest,
    spread,
    take_turns,
    torchs,
    total,
)
from _table import Table, write_section
from torch import nn

from stepwell_meta.testing import WorkerPool
from stepwell_p2p import C10dTransport, LoopbackFabric, giving_way
from stepwell_stage import lower, schedules, simulate

RANKS = 4
TRIVIAL = 64  # microbatches of the comparison with the hand-written loop
FORWARD = 0.03  # seconds that a rank's stages rest in one forward; a backward takes twice as long


@attrs.frozen
class Size:
    """How much to measure."""

    trivial: int
    names: tuple[str, ...]
    sleeping: tuple[tuple[int, int], ...]  # microbatches, turns
    model: int
    growth: tuple[int, ...]
    per_rank: tuple[int, ...]
    turns: int
    memory: int


FULL = Size(40, tuple(schedules.BY_NAME), ((8, 4), (32, 3)), 15, (8, 64, 512), (1, 2, 4, 8), 11, 256)
QUICK = Size(7, ("1f1b", "interleaved-1f1b", "zbv"), ((8, 3),), 3, (8, 64), (1, 4), 5, 64)


# What each rank runs.


def numbers(rows: int, width: int = WIDTH) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(rows, width, generator=generator), torch.randn(rows, width, generator=generator)


def trivial(microbatches: int, turns: int) -> Times:
    x, y = numbers(microbatches)
    schedule, gloo, shm = schedules.one_f_one_b(RANKS, microbatches), C10dTransport(), shared_memory()
    with giving_way():
        group = dist.new_group()
    found = take_turns(
        {
            "by hand": by_hand([nn.Linear(WIDTH, WIDTH)], schedule, x, y),
            "by hand, giving way": by_hand([nn.Linear(WIDTH, WIDTH)], schedule, x, y, group=group),
            "stepwell": ours([nn.Linear(WIDTH, WIDTH)], schedule, x, y, gloo),
            "torch": torchs([nn.Linear(WIDTH, WIDTH)], "1f1b", microbatches, x, y),
            "stepwell, shared memory": ours([nn.Linear(WIDTH, WIDTH)], schedule, x, y, shm),
        },
        turns,
    )
    gloo.close()
    shm.close()
    return found


def rests() -> list[list[float]]:
    """While all ranks rest: what rests of half and whole ``FORWARD`` took, and what a stage takes beyond, with and without."""
    found: list[list[float]] = []
    for seconds in (FORWARD / 2, FORWARD):
        times = []
        for _ in range(20):
            start = time.perf_counter()
            rest(seconds)
            times.append(time.perf_counter() - start)
        found.append(times)
    for seconds in (FORWARD, 0.0):
        module, times = Sleeps(seconds), []
        for _ in range(20):
            x = torch.zeros(1, WIDTH, requires_grad=True)
            start = time.perf_counter()
            module(x).sum().backward()
            times.append(time.perf_counter() - start - 3 * seconds)
        found.append(times)
    return found


def sleeping(name: str, microbatches: int, turns: int) -> Times:
    x, y = numbers(microbatches)
    schedule = schedules.BY_NAME[name](RANKS, microbatches)
    per_rank = schedule.placement.num_stages // RANKS

    def modules() -> list[nn.Module]:
        return [Sleeps(FORWARD / per_rank) for _ in range(per_rank)]

    transport = C10dTransport()
    contestants = {
        "by hand": by_hand(modules(), schedule, x, y),
        "stepwell": ours(modules(), schedule, x, y, transport),
    }
    if name != "zb-h1":  # torch has no such schedule
        contestants["torch"] = torchs(modules(), name, microbatches, x, y)
    found = take_turns(contestants, turns, before=1)
    transport.close()
    return found


def model(name: str, microbatches: int, sequences: int, turns: int) -> Times:
    """The example's GPT, cut into equal numbers of layers."""
    sys.path.insert(0, str(EXAMPLES))
    import train_text

    options, _ = train_text.parse([])
    schedule = schedules.BY_NAME[name](RANKS, microbatches)
    gloo, shm = C10dTransport(), shared_memory()
    count = schedule.placement.num_stages
    generator = torch.Generator().manual_seed(0)
    shape = (microbatches * sequences, options.seq_len)
    x, y = (torch.randint(train_text.VOCABULARY, shape, generator=generator) for _ in range(2))

    def modules() -> list[nn.Module]:
        whole = train_text.build(options)
        size = len(whole) // count
        return [whole[index * size : (index + 1) * size] for index in schedule.placement.stages_of(gloo.rank)]

    contestants = {
        "stepwell": ours(modules(), schedule, x, y, gloo, train_text.loss_fn),
        "stepwell, shared memory": ours(modules(), schedule, x, y, shm, train_text.loss_fn),
    }
    if name != "zb-h1":
        contestants["torch"] = torchs(modules(), name, microbatches, x, y, train_text.loss_fn)
    found = take_turns(contestants, turns)
    gloo.close()
    shm.close()
    return found


def growth(microbatches: tuple[int, ...], per_rank: tuple[int, ...], turns: int) -> Times:
    """By size, and "by hand" of that size; contestants of one run, so that what else the machine does meets all of them."""
    made = {f"M = {count}": schedules.one_f_one_b(RANKS, count) for count in microbatches}
    made |= {f"{n} stages": schedules.interleaved_1f1b(RANKS, 16, stages_per_rank=n) for n in per_rank}
    contestants, transports = {}, []
    for name, schedule in made.items():
        transport = C10dTransport(name=name)  # each has channels of its own
        transports.append(transport)
        batch = numbers(schedule.num_microbatches)
        stages = range(schedule.placement.num_stages // RANKS)
        contestants[name] = ours([nn.Linear(WIDTH, WIDTH) for _ in stages], schedule, *batch, transport)
        contestants[f"{name} by hand"] = by_hand([nn.Linear(WIDTH, WIDTH) for _ in stages], schedule, *batch)
    found = take_turns(contestants, turns)
    for transport in transports:
        transport.close()
    return found


def memory(microbatches: int) -> float:
    """MiB by which a step of so many microbatches needs more than one of 8, on a rank that holds no batch."""
    width, rows, transport = 512, 64, C10dTransport()
    holds_batch = transport.rank in (0, RANKS - 1)
    steps, peaks = [], []
    for count in (8, microbatches):  # plans and their proofs take memory too: made before
        module = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))
        schedule = schedules.one_f_one_b(RANKS, count)
        steps.append(ours([module], schedule, *numbers(count * rows if holds_batch else 0, width), transport))
    for step in steps:
        step()
        peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    transport.close()
    return peaks[1] - peaks[0]


def alone(microbatches: tuple[int, ...], per_rank: tuple[int, ...], turns: int) -> Times:
    """The sizes of ``growth`` on one rank, where no message and no other rank takes time; also with a trace."""
    made = {f"M = {count}": schedules.one_f_one_b(1, count) for count in microbatches}
    made |= {f"{n} stages": schedules.interleaved_1f1b(1, 16, stages_per_rank=n) for n in per_rank}
    contestants = {}
    for name, schedule in made.items():
        batch = numbers(schedule.num_microbatches)
        modules = [nn.Linear(WIDTH, WIDTH) for _ in range(schedule.placement.num_stages)]
        contestants[name] = ours(modules, schedule, *batch, LoopbackFabric(1).transport(0))
        contestants[f"{name} traced"] = ours(modules, schedule, *batch, LoopbackFabric(1).transport(0), trace=True)
        contestants[f"{name} by hand"] = by_hand(modules, schedule, *batch)
    return take_turns(contestants, turns)


def on_loopback(microbatches: int, turns: int) -> tuple[list[float], list[float]]:
    """CPU seconds a step of ranks that are threads, and of as many forwards and backwards without a pipeline.

    On one core: on several, threads fight for the interpreter, and what a module takes by itself doubles. Short steps are taken
    several in a row, as in training, so that what it takes to hand them to threads is not in it.
    """
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    schedule, fabric, module = (
        schedules.one_f_one_b(RANKS, microbatches),
        LoopbackFabric(RANKS),
        nn.Linear(WIDTH, WIDTH),
    )
    steps = [
        ours([nn.Linear(WIDTH, WIDTH)], schedule, *numbers(microbatches), fabric.transport(rank))
        for rank in range(RANKS)
    ]
    in_a_row = max(1, TRIVIAL // microbatches)

    def train(step: Callable[[], None]) -> None:
        for _ in range(in_a_row):
            step()

    found: tuple[list[float], list[float]] = ([], [])
    with ThreadPoolExecutor(RANKS) as threads:
        for _ in range(turns + 2):
            start = time.process_time()
            list(threads.map(train, steps))
            middle = time.process_time()
            for _ in range(RANKS * microbatches * in_a_row):
                module(torch.zeros(1, WIDTH, requires_grad=True)).sum().backward()
            found[0].append((middle - start) / in_a_row)
            found[1].append((time.process_time() - middle) / in_a_row)
    return found[0][2:], found[1][2:]


# The tables. Each is filled row by row, so that what was measured is there when something fails.


def trivial_table(table: Table, pool: WorkerPool, size: Size) -> None:
    table.note = (
        "By hand and torch send over the default process group. stepwell's channels are made within giving_way(), so that gloo's"
        " threads take no core from a rank that is just sending; what that alone does shows by hand over such a group."
    )
    found = pool.run(trivial, RANKS, TRIVIAL, size.trivial, deadline=300)
    for name in found[0]:
        cells = []
        for times in (functools.partial(slowest, found), functools.partial(total, found)):
            cells += [spread(times(name)), *(ratio(times(name), times(other)) for other in ("by hand", "torch"))]
        table.add(name, *cells)


def sleeping_table(table: Table, pool: WorkerPool, size: Size) -> None:
    took = zip(*pool.run(rests, RANKS, deadline=60), strict=True)
    half, whole, cold, warm = (spread([s for times in by_rank for s in times], digits=2) for by_rank in took)
    table.note = (
        "Stages rest, on no core, in F, in I and in W; B does what I and W do, and the first stage's I nothing. Told to rest"
        f" {FORWARD / 2 * 1e3:.0f} ms they took {half}, told {FORWARD * 1e3:.0f} ms {whole}. A stage's forward and backward, with"
        f" no messages, took {cold} more than their rests, though only {warm} without rests: {RANKS} ranks that come back from a"
        f" rest at once find {os.cpu_count()} cores, and probably caches with other things in them. That is in every column: by"
        " hand is the limit, and the ratio to it is what a runtime adds."
    )
    for name in size.names:
        for microbatches, turns in size.sleeping:
            found = pool.run(sleeping, RANKS, name, microbatches, turns, deadline=300)
            schedule = schedules.BY_NAME[name](RANKS, microbatches)
            stages = schedule.placement.num_stages
            ideal = simulate(lower(schedule), costs_of(stages, FORWARD * RANKS / stages)).makespan
            hand, mine, theirs = (
                spread(slowest(found, who), 1 / ideal, "", 3) if who in found[0] else "none"
                for who in ("by hand", "stepwell", "torch")
            )
            over = statistics.median(slowest(found, "stepwell")) / statistics.median(slowest(found, "by hand"))
            table.add(name, str(microbatches), hand, mine, f"{over:.3f}", theirs)


def model_table(table: Table, pool: WorkerPool, size: Size) -> None:
    microbatches, sequences, length = 8, 2, 64
    tokens = microbatches * sequences * length
    for name in size.names:
        found = pool.run(model, RANKS, name, microbatches, sequences, size.model, deadline=300)
        cells = []
        for who in ("stepwell", "stepwell, shared memory"):
            times = slowest(found, who)
            cells.append(f"{tokens / statistics.median(times):,.0f}")
            cells.append(ratio(slowest(found, "torch"), times) if "torch" in found[0] else "none")
        has_torch = "torch" in found[0]
        cells.append(f"{tokens / statistics.median(slowest(found, 'torch')):,.0f}" if has_torch else "none")
        table.add(name, *cells)


def growth_table(table: Table, pool: WorkerPool, size: Size) -> None:
    found = pool.run(growth, RANKS, size.growth, size.per_rank, size.turns, deadline=500)
    table.note = (
        "Wall per action is the step's, divided by one rank's actions. A slot is an action of one rank, or one of those for which"
        f" it waits while the pipeline fills and drains: {2 * (RANKS - 1)} whatever the size, so that an action of a short step"
        " seems dear. Where all cores are busy, those slots cost less than others, since fewer ranks work in them. More stages"
        " per rank mean more messages for each action, since the first and the last stage have one neighbour, all others two."
    )
    for name in found[0]:
        if name.endswith(" by hand"):
            continue
        microbatches, stages = _size_of(name)
        actions = 2 * microbatches * stages
        slots = actions + 2 * (RANKS - 1)
        walls, cpus = ([times(found, who) for who in (name, f"{name} by hand")] for times in (slowest, total))
        table.add(
            _row_of(name),
            f"{1 - 1 / (RANKS * stages):.2f}",
            spread(walls[0]),
            ratio(*walls),
            *(f"{statistics.median(wall) / per * 1e6:.0f} µs" for per in (actions, slots) for wall in walls),
            *(f"{statistics.median(cpu) / (actions * RANKS) * 1e6:.0f} µs" for cpu in cpus),
        )


def _size_of(name: str) -> tuple[int, int]:
    """Microbatches, and stages of a rank."""
    number = int(name.removeprefix("M = ").removesuffix(" stages"))
    return (number, 1) if name.startswith("M") else (16, number)


def _row_of(name: str) -> str:
    return name if name.startswith("M") else f"{name} per rank"


def memory_table(table: Table, pool: WorkerPool, size: Size) -> None:
    extra = pool.run(memory, RANKS, size.memory, deadline=300)
    table.add(str(size.memory), *(f"{extra[rank]:.1f} MiB" for rank in (1, 2)))


def alone_table(table: Table, pool: WorkerPool, size: Size) -> None:
    found = pool.run(alone, 1, size.growth, size.per_rank, 3 * size.turns, deadline=300)
    for name in found[0]:
        if name.endswith((" by hand", " traced")):
            continue
        microbatches, stages = _size_of(name)
        mine, traced, hand = (
            statistics.median(total(found, who)) / (2 * microbatches * stages) * 1e6
            for who in (name, f"{name} traced", f"{name} by hand")
        )
        table.add(_row_of(name), *(f"{one:.1f} µs" for one in (mine, hand, mine - hand, traced)))


def loopback_table(table: Table, pool: WorkerPool, size: Size) -> None:
    table.note = (
        "Ranks are threads, whose Python runs one at a time whatever there is of cores. On one core that costs nothing more; on"
        " several, they hand the interpreter to one another at every operator, and the module's own forwards and backwards take"
        f" two to three times as long. Steps shorter than {TRIVIAL} microbatches are taken several in a row, as in training."
    )
    for microbatches in size.growth:
        (found,) = pool.run(on_loopback, 1, microbatches, size.turns, deadline=120)
        whole, own = (statistics.median(times) / (2 * microbatches * RANKS) * 1e6 for times in found)
        table.add(f"M = {microbatches}", f"{whole:.1f} µs", f"{own:.1f} µs", f"{whole - own:.1f} µs")


Fill = Callable[[Table, WorkerPool, Size], None]
TABLES: tuple[tuple[Fill, str, tuple[str, ...]], ...] = (
    (
        memory_table,
        "Memory: most that a step of 1F1B needs beyond one with M = 8, where an activation is 128 KiB",
        ("M", "second rank", "third rank"),
    ),
    (
        trivial_table,
        f"1F1B, trivial stages, M = {TRIVIAL}",
        ("", "step", "÷ by hand", "÷ torch", "CPU of all ranks", "÷ by hand", "÷ torch"),
    ),
    (
        sleeping_table,
        "Sleeping stages: step ÷ ideal makespan of that schedule",
        ("schedule", "M", "by hand", "stepwell", "÷ by hand", "torch"),
    ),
    (
        model_table,
        "The example's GPT, M = 8: tokens per second",
        ("schedule", "stepwell", "÷ torch", "stepwell, shared memory", "÷ torch", "torch"),
    ),
    (
        growth_table,
        "Growth: 1F1B, and interleaved 1F1B with M = 16, trivial stages, stepwell",
        (
            "size",
            "messages per action",
            "step",
            "÷ by hand",
            "wall per action",
            "by hand",
            "wall per slot",
            "by hand",
            "CPU per action",
            "by hand",
        ),
    ),
    (
        alone_table,
        "The same sizes on one rank, without messages: CPU per action",
        ("size", "stepwell", "by hand", "added", "stepwell with a trace"),
    ),
    (
        loopback_table,
        f"1F1B on loopback, {RANKS} threads on one core, trivial stages: CPU per action",
        ("size", "stepwell", "the module's own forward or backward", "added by executor and transport"),
    ),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer steps and schedules; prints, and writes nothing")
    quick = parser.parse_args().quick
    size = QUICK if quick else FULL
    lines = [
        f"torch {torch.__version__}, Python {platform.python_version()}, {os.cpu_count()} cores, {RANKS} gloo processes.",
        "Times are medians, with the middle half.",
        "",
    ]
    failed = 0
    for fill, title, columns in TABLES:
        table = Table(title, columns)
        try:
            with WorkerPool(RANKS) as pool:  # its own for each table: one that fails leaves no process to the next
                fill(table, pool, size)
        except Exception as error:
            traceback.print_exc()
            failed += 1
            table.note = f"{table.note} Not complete: {type(error).__name__}.".lstrip()
        print(table.note, flush=True)
        lines += table.lines()
    if not quick:
        write_section("pipeline", "The executor", lines)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
