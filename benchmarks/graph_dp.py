"""Graph data parallelism against eager FSDP2 and DDP on gloo: step time, collectives, memory, compile and pass time.

    python benchmarks/graph_dp.py            # pass time against layers, then 2 and 4 ranks; writes benchmarks/README.md
    python benchmarks/graph_dp.py --quick    # a small model on 2 ranks; prints, and writes nothing

All variants run in the same processes, interleaved step by step, so that a busy machine slows them alike; a figure is the median
over the steps, on the slowest rank.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from _table import Table, write_section
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from stepwell_graphpasses import GraphCompiler, PassConfig, trace
from stepwell_graphpasses._collectives import starts
from stepwell_graphpasses.testing import LiveBytes, fake_world
from stepwell_meta.testing import WorkerPool

LIMIT = 45.0  # seconds of steps with one number of ranks


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, c = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, c))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, layers: int, width: int, vocab: int = 512) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(Block(width, max(1, width // 64)) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def make(layers: int, width: int) -> GPT:
    torch.manual_seed(0)
    return GPT(layers, width)


def compare(layers: int, width: int, batch: int, length: int, steps: int) -> dict[str, Any]:
    """One rank's figures."""
    torch.manual_seed(dist.get_rank())
    tokens = torch.randint(512, (batch, length))
    runs: dict[str, tuple[Any, nn.Module]] = {}
    found: dict[str, Any] = {}

    alone = make(layers, width)
    runs["compute"] = (lambda: loss_of(alone, tokens).backward(), alone)
    ddp = DistributedDataParallel(make(layers, width))
    runs["ddp"] = (lambda: loss_of(ddp, tokens).backward(), ddp)
    fsdp = make(layers, width)
    for block in fsdp.blocks:
        fully_shard(block)
    fully_shard(fsdp)
    runs["fsdp2"] = (lambda: loss_of(fsdp, tokens).backward(), fsdp)
    for name, config in {
        "graph ddp": PassConfig(dp_mode="ddp", bucket_by="bytes", bucket_mb=8),
        "graph ddp, torch's passes": PassConfig(dp_mode="ddp", bucket_by="bytes", bucket_mb=8, pass_backend="torch"),
        "graph fsdp": PassConfig(),
        "graph fsdp, torch's passes": PassConfig(pass_backend="torch"),
        "graph fsdp, one each": PassConfig(bucket_by="none"),
    }.items():
        start = time.perf_counter()
        compiler = GraphCompiler(make(layers, width), loss_of, config).compile(tokens=tokens)
        found[name, "compile"] = time.perf_counter() - start
        found[name, "collectives"] = len(starts(compiler.graph().graph))
        runs[name] = (lambda compiler=compiler: compiler.forward_backward(tokens=tokens), compiler.model)

    times: dict[str, list[float]] = {name: [] for name in runs}
    busy: dict[str, list[float]] = {name: [] for name in runs}
    begin = time.perf_counter()
    for step in range(steps + 2):
        spent = torch.tensor(time.perf_counter() - begin)
        dist.all_reduce(spent, dist.ReduceOp.MAX)
        if step >= 5 and spent > LIMIT:  # on a busy machine fewer steps must do
            break
        for name, (run, model) in runs.items():
            model.zero_grad()
            dist.barrier()
            start, busy_start = time.perf_counter(), time.process_time()
            run()
            elapsed, worked = time.perf_counter() - start, time.process_time() - busy_start
            if step >= 2:
                times[name].append(elapsed)
                busy[name].append(worked)
    for name, (run, model) in runs.items():
        model.zero_grad()
        with LiveBytes() as live:
            run()
        found[name, "peak"] = live.peak
        found[name, "time"] = statistics.median(times[name])
        found[name, "cpu"] = statistics.median(busy[name])
    return found


def pass_time(layers: int) -> dict[str, float]:
    """Seconds to trace, and for all passes, on fake ranks."""
    with fake_world(8):
        tokens = torch.randint(512, (2, 17))
        compiler = GraphCompiler(make(layers, 64), loss_of)
        start = time.perf_counter()
        trace(compiler.model, loss_of, {"tokens": tokens})
        traced = time.perf_counter() - start
        compiler.compile(tokens=tokens)
        return {
            "layers": layers,
            "trace": traced,
            "passes": sum(report.seconds for report in compiler.reports),
            "nodes": compiler.reports[-1].nodes,
            **{report.name: report.seconds for report in compiler.reports},
        }


def report(ranks: int, results: list[dict[str, Any]]) -> Table:
    """Of the slowest rank, against the peers of the same run."""
    slowest = {key: max(result[key] for result in results) for key in results[0]}
    against = ("fsdp2", "ddp", "compute")
    shares = [f"÷ {other}" for other in against]
    columns = ["", "step ms", *shares, "CPU ms", *shares, "collectives", "peak MiB", "÷ fsdp2", "compile s"]
    table = Table(f"{ranks} ranks", columns)
    for name in [name for name, what in slowest if what == "time"]:
        cells = []
        for what in ("time", "cpu"):
            seconds = slowest[name, what]
            cells.append(f"{seconds * 1e3:.0f}")
            cells += [f"{seconds / slowest[other, what]:.2f}" for other in against]
        peak, compiling = slowest[name, "peak"], slowest.get((name, "compile"))
        cells += [str(slowest.get((name, "collectives"), "-")), f"{peak / 2**20:.1f}"]
        cells.append(f"{peak / slowest['fsdp2', 'peak']:.2f}")
        table.add(name, *cells, "-" if compiling is None else f"{compiling:.1f}")
    return table


def growth(sizes: Sequence[int]) -> Table:
    """Pass time against layers."""
    names = ("data_parallel", "reshard", "bucket", "overlap")
    columns = ["layers", "nodes", "trace s", "all passes s", *(name.replace("_", " ") for name in names)]
    table = Table("Pass time on 8 fake ranks", columns)
    for layers in sizes:
        row = pass_time(layers)
        parts = [f"{row[name]:.1f}" for name in names]
        table.add(str(layers), str(row["nodes"]), f"{row['trace']:.1f}", f"{row['passes']:.1f}", *parts)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small model on 2 ranks; prints, and writes nothing")
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--passes", type=int, nargs="*", default=[4, 16, 64, 256], help="layers to time the passes for")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--steps", type=int, default=8)
    options = parser.parse_args()
    if options.quick:
        options.ranks, options.passes, options.layers, options.width, options.steps = [2], [4, 8], 2, 64, 4
    busy = os.getloadavg()[0]
    lines = [
        f"torch {torch.__version__}, Python {platform.python_version()}, {os.cpu_count()} cores, gloo.",
        f"A GPT of {options.layers} layers of width {options.width}, 4 x 64 tokens a rank.",
        f"Medians over 3 to {options.steps} interleaved steps, as time allowed, on the slowest rank.",
        "CPU is that of one rank with all of its threads, which a busy machine disturbs least.",
        "Compute is the step without any communication: the limit.",
        "Peak is what a step holds beyond what was there before.",
        f"Before the run {busy:.1f} other processes were running or waiting: the less, the more the times mean.",
        "",
    ]
    lines += growth(options.passes).lines()
    with WorkerPool() as pool:
        for ranks in options.ranks:
            shape = (options.layers, options.width, 4, 65, options.steps)
            lines += report(ranks, pool.run(compare, ranks, *shape, deadline=1200.0)).lines()
    if not options.quick:
        write_section("graph_dp", "Graph data parallelism", lines)


if __name__ == "__main__":
    main()
