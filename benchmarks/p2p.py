"""What stepwell-p2p costs: against isend and irecv written by hand, in the same run, and against shared memory.

    python benchmarks/p2p.py            # writes its tables into benchmarks/README.md
    python benchmarks/p2p.py --quick    # fewer sizes and turns; prints, and writes nothing

Two processes on this host exchange the same tensors in both directions: over gloo by hand (``bare``), over ``C10dTransport`` with
``Packing``, as stages use it, and over the example's ``SharedMemoryTransport``. They take turns, so that what else the machine
does meets all of them; figures are medians of the slower rank.
"""

from __future__ import annotations

import argparse
import os
import platform
import resource
import statistics
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from _contestants import Step as Exchange
from _contestants import Times, ratio, shared_memory, slowest, spread, take_turns
from _table import Table, write_section

from stepwell_meta import TensorMeta
from stepwell_meta.testing import WorkerPool
from stepwell_p2p import (
    C10dTransport,
    Edge,
    Op,
    OpKind,
    Packing,
    Placement,
    Post,
    Rules,
    Step,
    Transport,
    Wait,
    prove_order,
)

SIZES = (1 << 10, 16 << 10, 256 << 10, 4 << 20, 16 << 20)
COUNTS = (1, 2, 4, 8)
PROOFS = (10_000, 100_000, 1_000_000)


def over(transport: Transport, tensors: Sequence[torch.Tensor]) -> Exchange:
    rank, peer = transport.rank, 1 - transport.rank
    packing = Packing([TensorMeta.from_tensor(tensor) for tensor in tensors])
    there = [Op(OpKind.SEND_F, Edge(rank, peer), 0, 0, index) for index in range(len(tensors))]
    back = packing.recvs([Op(OpKind.RECV_F, Edge(peer, rank), 0, 0, index) for index in range(len(tensors))])

    def exchange() -> None:
        packing.unpack(transport.post([*back, *packing.sends(there, tensors)])).wait()

    return exchange


def by_hand(tensors: Sequence[torch.Tensor]) -> Exchange:
    peer = 1 - dist.get_rank()

    def exchange() -> None:
        works = []
        for index, tensor in enumerate(tensors):
            works.append(dist.isend(tensor, peer, tag=index))
            works.append(dist.irecv(torch.empty_like(tensor), peer, tag=index))
        for work in works:
            work.wait()

    return exchange


def measure(sizes: Sequence[int], counts: Sequence[int], turns: int) -> dict[tuple[int, int], Times]:
    """By size and number of tensors."""
    gloo, shm = C10dTransport(placement=Placement.loop(2, 2)), shared_memory()
    results = {}
    for size in sizes:
        for count in counts:
            tensors = [torch.ones(size // 4) for _ in range(count)]
            ways = {"bare": by_hand(tensors), "stepwell": over(gloo, tensors), "shm": over(shm, tensors)}
            results[size, count] = take_turns(ways, turns, rounds=max(1, min(40, (4 << 20) // (size * count))))
    shm.close()
    gloo.close()
    return results


def exchanges(pool: WorkerPool, *, quick: bool) -> Table:
    sizes, counts = (SIZES[::2], (1, 8)) if quick else (SIZES, COUNTS)
    results = pool.run(measure, 2, sizes, counts, 5 if quick else 15, deadline=900.0)
    columns = ["tensors", "bare", "stepwell ÷ bare", "in CPU time", "shared memory ÷ bare", "in CPU time"]
    table = Table("Two ranks exchange", columns)
    for size, count in results[0]:
        by_rank = [result[size, count] for result in results]
        cells = [spread(slowest(by_rank, "bare"), 1e6, " µs", 0)]
        for way in ("stepwell", "shm"):
            cells += [ratio(slowest(by_rank, way, which), slowest(by_rank, "bare", which)) for which in (0, 1)]
        table.add(f"{count} x {size >> 10} KiB" if size < 1 << 20 else f"{count} x {size >> 20} MiB", *cells)
    return table


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


def proofs(*, quick: bool) -> Table:
    columns = ["ends of messages", "rules", "CPU seconds", "most memory of the process"]
    table = Table("Proving an order of 1F1B on 8 ranks", columns)
    for ends in PROOFS[:2] if quick else PROOFS:
        sequences = one_f_one_b(8, ends)
        for rules in (Rules(tagged=False, rendezvous=True), Rules(tagged=True, rendezvous=True)):
            times = []
            for _ in range(3):
                start = time.process_time()
                prove_order(sequences, "per-edge", rules)
                times.append(time.process_time() - start)
            memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20)
            name = "tagged" if rules.tagged else "first in, first out"
            table.add(f"{ends:,}", f"{name}, rendezvous", f"{statistics.median(times):.2f}", f"{memory:.2f} GiB")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer sizes and turns; prints, and writes nothing")
    quick = parser.parse_args().quick
    with WorkerPool() as pool:
        tables = [exchanges(pool, quick=quick), proofs(quick=quick)]
    head = (
        f"torch {torch.__version__}, Python {platform.python_version()}, {os.cpu_count()} cores. Medians, with the middle half;"
        " several small tensors travel as one message.",
        "Bare messages go over the default process group; stepwell's channels are made within `giving_way()`.",
    )
    if not quick:
        write_section("p2p", "stepwell-p2p", [*head, "", *(line for table in tables for line in table.lines())])


if __name__ == "__main__":
    main()
