"""Stages made by split() under every schedule of torch's own: the numbers of one process, or a sentence before the first step."""

from __future__ import annotations

import functools
import importlib.util
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.pipelining as theirs
from torch import Tensor, nn
from torch.distributed.pipelining.schedules import ScheduleDualPipeV, ScheduleZBVZeroBubble
from torch.nn import functional

from stepwell_meta.exceptions import PipeliningMetadataError
from stepwell_meta.testing import WorkerPool
from stepwell_p2p import C10dTransport, Placement
from stepwell_stage import ModelSplit, split

WIDTH, ROWS, VOCABULARY, MICROBATCHES = 4, 16, 11, 8

SCHEDULES: dict[str, Any] = {
    "gpipe": theirs.ScheduleGPipe,
    "1f1b": theirs.Schedule1F1B,
    "interleaved": theirs.ScheduleInterleaved1F1B,
    "looped_bfs": theirs.ScheduleLoopedBFS,
    "interleaved_zb": theirs.ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
    "dualpipe_v": ScheduleDualPipeV,
}
SINGLE, V = ("gpipe", "1f1b"), ("zbv", "dualpipe_v")


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).tanh() + x


class Row(nn.Module):
    """One layer after the other, with code of its own around them."""

    def __init__(self, layers: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.embed = nn.Linear(1, WIDTH)
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for number, layer in enumerate(self.layers):
            x = layer(x * (1 + number / 8))
        return self.head(x).squeeze(-1)


class Skips(Row):
    """What the first layer makes is used again by the last."""

    def forward(self, x: Tensor) -> Tensor:
        x = first = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x * first.sigmoid()).squeeze(-1)


class Tied(Row):
    """One parameter is used by the first stage and the last."""

    def __init__(self, layers: int = 8) -> None:
        super().__init__(layers)
        self.embed = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x.expand(-1, WIDTH))
        for layer in self.layers:
            x = layer(x)
        return self.head(x).sum(-1)


KINDS: dict[str, type[Row]] = {"row": Row, "skips": Skips, "tied": Tied}


def make(kind: str) -> Row:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return KINDS[kind]().double()


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(ROWS, 1, generator=generator), torch.randn(ROWS, generator=generator)
    return x.double(), y.double()


def plain(kind: str) -> tuple[float, dict[str, Tensor]]:
    model, (x, y) = make(kind), batch()
    loss = functional.mse_loss(model(x), y)
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@functools.cache
def cut_of(kind: str, count: int) -> ModelSplit:
    return split(make(kind), count, example={"x": batch()[0][:2]})


def under_torch(name: str, kind: str) -> tuple[float | None, dict[str, Tensor]]:
    """This rank's loss and gradients after one step of torch's schedule."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    count = ranks if name in SINGLE else 2 * ranks
    placement = Placement.v(count, ranks) if name in V else Placement.loop(count, ranks)
    x, y = batch()
    transport = C10dTransport()
    try:
        cut = cut_of(kind, count)
        cut.model.zero_grad()
        stages = cut.stages(placement, rank, "cpu", transport=transport)
        schedule = SCHEDULES[name](stages[0] if name in SINGLE else stages, MICROBATCHES, loss_fn=functional.mse_loss)
        losses: list[Tensor] = []
        is_last = any(stage.is_last for stage in stages)
        schedule.step(x=x, losses=losses, **({"target": y} if is_last else {}))
        modules = [stage.submodule for stage in stages]
        grads = {n: p.grad for module in modules for n, p in module.named_parameters() if p.grad is not None}
        return torch.stack(losses).mean().item() if is_last else None, grads
    finally:
        transport.close()


def outcomes(path: str, kind: str) -> dict[str, Any]:
    """By schedule what this rank got, or why it got nothing. The file is loaded by its path: glue is read from its source."""
    spec = importlib.util.spec_from_file_location("models_for_torch", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["models_for_torch"] = module
    spec.loader.exec_module(module)
    found: dict[str, Any] = {}
    for name in module.SCHEDULES:
        try:
            found[name] = module.under_torch(name, kind)
        except PipeliningMetadataError as error:
            found[name] = str(error)
    return found


def assert_like_one_process(kind: str, name: str, ranks: list[Any]) -> None:
    loss, wanted = plain(kind)
    (found,) = (own for own, _ in ranks if own is not None)
    assert found == pytest.approx(loss, rel=1e-12), name
    grads = {parameter: grad for _, own in ranks for parameter, grad in own.items()}
    assert grads.keys() == wanted.keys()
    for parameter, grad in grads.items():
        torch.testing.assert_close(grad, wanted[parameter], rtol=1e-10, atol=1e-10, msg=f"{name}: {parameter}")


@pytest.mark.parametrize("ranks", [2, 4])
def test_layers_in_a_row_run_under_every_schedule(workers: WorkerPool, ranks: int) -> None:
    found = workers.run(outcomes, ranks, __file__, "row", deadline=60)
    for name in SCHEDULES:
        assert_like_one_process("row", name, [own[name] for own in found])


@pytest.mark.parametrize("ranks", [2, 4])
def test_values_that_skip_stages_run_where_each_rank_has_one_stage(workers: WorkerPool, ranks: int) -> None:
    """Torch's 1F1B waited for the value to the last stage to be taken, which came after a gradient that nobody was to take: on
    four ranks all waited for one another. Its schedules of several stages refused on some ranks while others waited for them.
    """
    found = workers.run(outcomes, ranks, __file__, "skips", deadline=60)
    for name in SCHEDULES:
        if name in SINGLE:
            assert_like_one_process("skips", name, [own[name] for own in found])
            continue
        (why,) = {own[name] for own in found}  # the same on every rank
        assert why == (
            f"stage {2 * ranks - 1} takes values of stage 0, and torch's schedules of several stages a rank carry values only to"
            " the next stage: run such wires with stepwell_stage.Executor"
        )


def test_tied_parameters_are_refused_on_every_rank(workers: WorkerPool) -> None:
    """Where a rank has several stages it raised at the first of them, and the ranks of the others waited for it."""
    found = workers.run(outcomes, 4, __file__, "tied", deadline=60)
    for name in SCHEDULES:
        (why,) = {own[name] for own in found}
        assert why.startswith("stage 0: parameters are tied (embed.weight), and torch's schedules do not add up")
