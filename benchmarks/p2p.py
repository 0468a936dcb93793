"""What stepwell-p2p costs: against isend and irecv written by hand, in the same run, and against shared memory.

    python benchmarks/p2p.py            # writes its table into benchmarks/README.md
    python benchmarks/p2p.py --quick    # a tenth of the repetitions, for a look

Two processes on this host exchange the same tensors in both directions, over gloo by hand (``bare``), over ``C10dTransport``,
with several tensors also over ``PackingTransport``, and over the example's ``SharedMemoryTransport``. The ways take turns, so
that what else the machine does meets all of them; a figure is the best of all turns, of the slower rank.
"""

from __future__ import annotations

import argparse
import os
import platform
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from stepwell_meta import TensorMeta
from stepwell_meta.testing import WorkerPool
from stepwell_p2p import (
    C10dTransport,
    Edge,
    Op,
    OpKind,
    PackingTransport,
    Placement,
    Post,
    Recv,
    Route,
    Rules,
    Send,
    Step,
    Transport,
    Wait,
    plan_packs,
    prove_order,
)

HERE = Path(__file__).parent
SIZES = [1 << 10, 16 << 10, 256 << 10, 4 << 20, 16 << 20]
COUNTS = [1, 2, 4, 8]
Exchange = Callable[[], None]


def over(transport: Transport, tensors: list[torch.Tensor]) -> Exchange:
    rank, peer = transport.rank, 1 - transport.rank
    meta = TensorMeta.from_tensor(tensors[0])
    batch: list[Send | Recv] = []
    for index, tensor in enumerate(tensors):
        batch.append(Send(Op(OpKind.SEND_F, Edge(rank, peer), 0, 0, index), tensor))
        batch.append(Recv(Op(OpKind.RECV_F, Edge(peer, rank), 0, 0, index), meta))

    def exchange() -> None:
        transport.post(batch).wait()

    return exchange


def by_hand(tensors: list[torch.Tensor]) -> Exchange:
    peer = 1 - dist.get_rank()

    def exchange() -> None:
        works = []
        for index, tensor in enumerate(tensors):
            works.append(dist.isend(tensor, peer, tag=index))
            works.append(dist.irecv(torch.empty_like(tensor), peer, tag=index))
        for work in works:
            work.wait()

    return exchange


def measure(example: str, sizes: list[int], turns: int) -> dict[tuple[int, int], dict[str, tuple[float, float]]]:
    """Seconds of wall and CPU time for one exchange, by size, number of tensors, and way."""
    sys.path.insert(0, example)
    from stepwell_transport_shm import SharedMemoryTransport

    rank, store = dist.get_rank(), dist.group.WORLD.get_group_store()
    if rank == 0:
        store.set("folder", tempfile.mkdtemp(prefix="bench-shm-"))
    gloo = C10dTransport(placement=Placement.loop(2, 2))
    shared = SharedMemoryTransport(rank, 2, store.get("folder").decode())
    results = {}
    for size in sizes:
        for count in COUNTS:
            tensors = [torch.ones(size // 4) for _ in range(count)]
            metas = [TensorMeta.from_tensor(tensor) for tensor in tensors]
            table = {Route(Edge(source, 1 - source), 0, is_forward=True): plan_packs(metas) for source in range(2)}
            ways = {"bare": by_hand(tensors), "stepwell": over(gloo, tensors), "shm": over(shared, tensors)}
            if any(table.values()):
                ways["packed"] = over(PackingTransport(gloo, table), tensors)
            rounds = max(1, min(20, (4 << 20) // (size * count)))
            results[size, count] = take_turns(ways, turns, rounds)
    shared.close()
    gloo.close()
    return results


def take_turns(ways: dict[str, Exchange], turns: int, rounds: int) -> dict[str, tuple[float, float]]:
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for turn in range(turns + 1):
        for name, exchange in ways.items():
            dist.barrier()
            wall, cpu = time.perf_counter(), time.process_time()
            for _ in range(rounds):
                exchange()
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            if turn > 0:  # the first is for warming up
                samples[name].append((wall / rounds, cpu / rounds))
    return {name: (min(wall for wall, _ in taken), min(cpu for _, cpu in taken)) for name, taken in samples.items()}


def one_f_one_b(ranks: int, ends: int) -> list[list[Step]]:
    """A plain order of about so many ends of messages."""
    sequences: list[list[Step]] = []
    for rank in range(ranks):
        steps: list[Step] = []
        for microbatch in range(ends // (4 * (ranks - 1))):
            ops = []
            if rank > 0:
                ops.append(Op(OpKind.RECV_F, Edge(rank - 1, rank), rank - 1, microbatch))
            if rank < ranks - 1:
                ops.append(Op(OpKind.SEND_F, Edge(rank, rank + 1), rank, microbatch))
                ops.append(Op(OpKind.RECV_B, Edge(rank + 1, rank), rank + 1, microbatch))
            if rank > 0:
                ops.append(Op(OpKind.SEND_B, Edge(rank, rank - 1), rank, microbatch))
            for op in ops:
                steps += [Post([op]), Wait(len(steps))]
        sequences.append(steps)
    return sequences


def prove() -> list[str]:
    rows = ["| ends of messages | rules | CPU seconds | most memory of the process |", "| ---: | --- | ---: | ---: |"]
    for ends in (10_000, 100_000, 1_000_000):
        sequences = one_f_one_b(8, ends)
        for rules in (Rules(tagged=False, rendezvous=True), Rules(tagged=True, rendezvous=True)):
            start = time.process_time()
            prove_order(sequences, "per-edge", rules)
            seconds = time.process_time() - start
            memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20)
            name = "tagged" if rules.tagged else "first in, first out"
            rows.append(f"| {ends:,} | {name}, rendezvous | {seconds:.2f} | {memory:.2f} GiB |")
    return rows


def table(results: list[dict[tuple[int, int], dict[str, tuple[float, float]]]]) -> list[str]:
    rows = [
        "| tensors | bare, µs | stepwell ÷ bare, wall | CPU | packed ÷ bare, wall | CPU | shm ÷ bare, wall |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for key in results[0]:
        size, count = key
        slower = {
            way: tuple(max(result[key][way][what] for result in results) for what in range(2))
            for way in results[0][key]
        }
        bare = slower["bare"]
        ratios = {way: tuple(ours / theirs for ours, theirs in zip(slower[way], bare, strict=True)) for way in slower}
        packed = [f"{ratio:.2f}" for ratio in ratios["packed"]] if "packed" in ratios else ["", ""]
        name = f"{count} x {size >> 10} KiB" if size < 1 << 20 else f"{count} x {size >> 20} MiB"
        wall, cpu = ratios["stepwell"]
        rows.append(
            f"| {name} | {bare[0] * 1e6:,.0f} | {wall:.2f} | {cpu:.2f} | {packed[0]} | {packed[1]} | {ratios['shm'][0]:.2f} |"
        )
    return rows


def write(text: str) -> None:
    """Put the text between this benchmark's marks, which it makes where they are missing."""
    first, last = "<!-- p2p -->", "<!-- /p2p -->"
    page = HERE / "README.md"
    before = page.read_text() if page.exists() else "# Benchmarks\n"
    if first not in before:
        before = f"{before.rstrip()}\n\n{first}\n{last}\n"
    head, rest = before.split(first, 1)
    page.write_text(f"{head}{first}\n{text}\n{last}{rest.split(last, 1)[1]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer repetitions; prints, and writes nothing")
    parser.add_argument("--small", action="store_true", help="tensors up to 16 KiB only; prints, and writes nothing")
    options = parser.parse_args()
    example = str(HERE.parent / "examples/transport_shm/src")
    sizes = [size for size in SIZES if size <= 16 << 10 or not options.small]
    with WorkerPool() as pool:
        results = pool.run(measure, 2, example, sizes, 4 if options.quick else 12, deadline=900.0)
    load = os.getloadavg()[0]
    text = "\n".join(
        [
            "## stepwell-p2p",
            "",
            f"`python benchmarks/p2p.py`, torch {torch.__version__}, Python {platform.python_version()}, {os.cpu_count()} cores,"
            f" load {load:.1f}. Two processes exchange tensors in both directions; the best of many turns taken in one run.",
            "",
            *table(results),
            "",
            "Proving an order of 1F1B on 8 ranks:",
            "",
            *prove(),
        ]
    )
    print(text)
    if not (options.quick or options.small):
        write(text)


if __name__ == "__main__":
    main()
