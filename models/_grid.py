"""A model through `split`: the same batch as in one process, in any number of stages, on any schedule."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

import stepwell
from stepwell_p2p import C10dTransport, Transport
from stepwell_stage import Executor, ModelSplit, Schedule, schedules, split, tie

from ._entry import Batch, Entry
from ._oracle import MICROBATCHES, Result, result_of

STAGES = (2, 4, 8)
SCHEDULES: dict[str, Callable[[int], Schedule]] = {
    "1F1B": lambda stages: schedules.one_f_one_b(stages, MICROBATCHES),
    "Interleaved": lambda stages: schedules.interleaved_1f1b(stages // 2, MICROBATCHES),
    "ZBV": lambda stages: schedules.zbv(stages // 2, MICROBATCHES),
}


def cut(entry: Entry, stages: int) -> ModelSplit:
    """The model, cut with one microbatch as the example."""
    model = entry.model()
    first = entry.example().parts(MICROBATCHES)[0]
    return split(model, stages, example=first.named(model))


def step(entry: Entry, whole: ModelSplit, batch: Batch, schedule: Schedule, transport: Transport) -> list[Result]:
    """One batch through this rank's stages; of each stage what it came to. Called on every rank."""
    stages = whole.stages(schedule.placement, transport.rank, "cpu", transport=transport)
    executor = Executor(stages, schedule, entry.loss_fn, transport=transport)
    if whole.tied:
        tie(executor, whole.tied)
    target = batch.target if executor.is_last else None
    executor.step(**whole.keywords(*batch.args, **batch.kwargs), target=target, return_outputs=False)
    loss = None if executor.loss is None else executor.loss.item()
    return [result_of(stage.submodule, loss if stage.is_last else None) for stage in stages]


def on_threads(entry: Entry, stages: int, schedule: str) -> list[Result]:
    """On ranks that are threads of this process, with stages of one split."""
    plan = SCHEDULES[schedule](stages)
    with quiet():
        whole, batch = cut(entry, stages), entry.example()
        parts = stepwell.launch(
            lambda world: step(entry, whole, batch, plan, world.transport), ranks=plan.placement.num_ranks, device="cpu"
        )
    return [result for part in parts for result in part]


def on_processes(entry: Entry, schedule: str) -> list[Result]:
    """On ranks that are processes, each with a split of its own; called as one of them."""
    torch.set_num_threads(1)
    ranks = dist.get_world_size()
    plan = SCHEDULES[schedule](ranks if schedule == "1F1B" else 2 * ranks)
    transport = C10dTransport()
    try:
        with quiet():
            return step(entry, cut(entry, plan.placement.num_stages), entry.example(), plan, transport)
    finally:
        transport.close()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without what a model's authors say about their own code."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
