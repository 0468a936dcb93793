"""What `torch.distributed.pipelining.pipeline()` makes of a model, in words.

    python -m models._torch            # prints one line of JSON for each model

The model is traced once, with the loss outside of it (a label that has to get to the last stage is refused), and then
forks into its ranks, over gloo; a rank that is not done in time is ended.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import json
import multiprocessing
import re
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import Pipe, Schedule1F1B, SplitPoint, pipeline

from ._entry import Entry
from ._oracle import MICROBATCHES, Result, one_process, result_of, words_of
from ._zoo import ENTRIES

EVEN = 2 * MICROBATCHES  # samples: the trace is for one size of microbatch
PATIENCE = 40.0  # seconds for a step that takes less than one
RANKS = (2, 4)


def blocks(model: nn.Module) -> list[str]:
    """The items of the model's large containers, in order: where it would be cut by hand."""
    whole = sum(one.numel() for one in model.parameters())
    found: list[str] = []
    for name, module in model.named_modules():
        inside = any(f"{name}.".startswith(f"{one}.") for one in found)
        if inside or not isinstance(module, nn.ModuleList | nn.Sequential) or len(module) < 2:
            continue
        if sum(one.numel() for one in module.parameters()) > whole / 20:
            found += [f"{name}.{item}" for item, _ in module.named_children()]
    return found


def trace(entry: Entry, stages: int) -> Pipe:
    """Stages with as many blocks each."""
    model = entry.model()
    items = blocks(model)
    cuts = {items[len(items) * stage // stages]: SplitPoint.BEGINNING for stage in range(1, stages)}
    first = entry.example(EVEN).parts(MICROBATCHES)[0]
    return pipeline(model, first.args, dict(first.kwargs), split_spec=cuts)


def step(entry: Entry, pipe: Pipe, rank: int, ranks: int, store: str) -> Result:
    """One batch through this rank's stage."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    batch = entry.example(EVEN)
    stage = pipe.build_stage(rank, torch.device("cpu"))
    losses: list[torch.Tensor] = []
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_of_parts(entry))
    target = torch.zeros(EVEN) if batch.target is None else batch.target
    last = {"target": target, "losses": losses} if rank == ranks - 1 else {}
    named = dict(inspect.signature(entry.model().forward).bind(*batch.args, **batch.kwargs).arguments)
    named |= named.pop("kwargs", {})
    wanted = [
        node.target for node in stage.submod.graph.find_nodes(op="placeholder")
    ]  # each stage takes its own by name
    args = batch.args if rank == 0 else ()
    by_name = {
        name: one for name, one in named.items() if name in wanted and name in [*batch.kwargs, *wanted[len(args) :]]
    }
    schedule.step(*args, **by_name, **last)
    return result_of(stage.submod, sum(loss.item() for loss in losses) / MICROBATCHES if losses else None)


def loss_of_parts(entry: Entry) -> Callable[..., torch.Tensor]:
    """The loss from what the last stage returns: the model's outputs without their names."""
    model, batch = entry.model(), entry.example(EVEN)
    whole = model(*batch.args, **batch.kwargs)

    def loss_fn(output: Any, target: torch.Tensor) -> torch.Tensor:
        if isinstance(whole, Mapping) and not isinstance(output, Mapping):
            output = dict(zip(whole, output if isinstance(output, tuple | list) else (output,), strict=False))
        return entry.loss_fn(output) if batch.target is None else entry.loss_fn(output, target)

    return loss_fn


def answer(connection: Connection, work: Callable[..., Result], *args: Any) -> None:
    """Runs in a fork: sends what came out, or the error's first line."""
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            result: Result | str = work(*args)
    except BaseException as error:
        result = sentence(error)
        traceback.print_exc()
    buffer = io.BytesIO()
    torch.save(result, buffer)
    connection.send_bytes(buffer.getvalue())


def sentence(error: BaseException) -> str:
    """Its last paragraph's first line that says something."""
    causes = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None:
        causes.append(cause)
    text = next(line.strip() for line in [*str(causes[-1]).splitlines(), type(error).__name__] if line.strip())
    return text if len(text) < 130 else text[:125] + " …"


def in_forks(works: Sequence[Callable[[Connection], None]]) -> list[Result | str | None]:
    """What each sent; None for one that did not in time."""
    context = multiprocessing.get_context("fork")
    ends, processes = [], []
    for work in works:
        mine, others = context.Pipe()
        process = context.Process(target=work, args=(others,), daemon=True)
        process.start()
        others.close()
        ends.append(mine)
        processes.append(process)
    until = time.monotonic() + PATIENCE
    results: list[Result | str | None] = []
    for end in ends:
        result: Result | str | None = None
        if end.poll(max(0.0, until - time.monotonic())):
            try:
                result = torch.load(io.BytesIO(end.recv_bytes()), weights_only=False)
            except EOFError:
                result = "the process died"
        if isinstance(result, str):
            until = min(until, time.monotonic() + 3.0)  # the others cannot end well any more
        results.append(result)
    for process in processes:
        process.kill()
        process.join()
    return results


def outcome(entry: Entry, ranks: int) -> str:
    """Right, wrong, refused or hangs, in a few words."""
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            pipe = trace(entry, ranks)
    except Exception as error:
        return f"refused: {sentence(error)}"
    if pipe.num_stages != ranks:
        return f"refused: cut into {pipe.num_stages} stages"
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder, "store"))
        steps = [
            lambda end, rank=rank: answer(end, step, entry, pipe, rank, ranks, store)  # type: ignore[misc]
            for rank in range(ranks)
        ]
        *parts, expected = in_forks([*steps, lambda end: answer(end, one_process, entry, EVEN)])
    errors = [one for one in parts if isinstance(one, str)]
    if errors:
        own = [one for one in errors if "gloo" not in one]  # a rank whose peer failed says that of gloo
        return f"refused: {(own or errors)[0]}"
    if None in parts:
        return f"hangs (ended after {PATIENCE:.0f} s)"
    known = expected.result.buffers.keys()
    parts = [
        attrs.evolve(
            part,
            grads={re.sub(r"@\d+", "", name): one for name, one in part.grads.items()},  # its names for further uses
            buffers={name: one for name, one in part.buffers.items() if name in known},  # no constants of the trace
        )
        for part in parts
    ]
    try:
        difference = expected.difference(parts)
    except AssertionError as error:
        return f"wrong: {error}"
    return words_of(difference, expected.allowed)


def main(names: Sequence[str]) -> None:
    torch.set_num_threads(1)
    for entry in ENTRIES:
        if not names or entry.name in names:
            words = {str(ranks): outcome(entry.outside(), ranks) for ranks in RANKS}
            print(json.dumps({entry.name: words}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
