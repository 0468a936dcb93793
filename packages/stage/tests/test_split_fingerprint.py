"""Ranks that cut a model otherwise: refused before anything crosses, whatever the difference is."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stepwell_meta.exceptions import PipeliningMetadataError
from stepwell_meta.testing import WorkerPool
from stepwell_p2p import C10dTransport, Transport
from stepwell_stage import Executor, schedules, split

X = torch.ones(4, 4)


class Row(nn.Module):
    """What one rank's model does that another's does not, with the same operations."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.kind = kind

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        if self.kind == "draws":
            random.random()
        first = x = self.layers[0](x)
        for layer in list(self.layers)[1:]:
            x = layer(x)
        if self.kind == "counts":
            self.count = getattr(self, "count", 0) + 1
        if self.kind == "asks" and x.requires_grad:
            pass
        return x * (first if self.kind == "skips" else x)


OPTIONS: dict[str, dict[str, Any]] = {
    "another cut": {"stages": {"layers.3": 1}},
    "other ways": {"ways": [{"x": X, "y": X}]},
    "other inputs": {"inputs": "first"},
}


def run(transport: Transport, kind: str) -> str:
    odd = kind if transport.rank else ""
    options = {"stages": 2, **(OPTIONS.get(odd, {}))}
    cut = split(Row(odd), example={"x": X[:2]}, **options)
    schedule = schedules.one_f_one_b(2, 2)
    stages = cut.stages(schedule.placement, transport.rank, "cpu", transport=transport)
    with pytest.raises(PipeliningMetadataError) as error:
        Executor(stages, schedule, Tensor.sum).step(x=X, return_outputs=False)
    return str(error.value)


@pytest.mark.parametrize("kind", ["draws", "counts", "asks", "skips", *OPTIONS])
def test_plans_that_differ(threads: Callable[..., Any], kind: str) -> None:
    """One rank's plan had a value more than the other's, in the same operations: an IndexError in the first forward."""
    for said in threads(run, 2, kind):
        assert "the rank of stage 0 cut the model otherwise than that of stage 1" in said or "other wires" in said


def over_gloo(kind: str) -> str:
    transport = C10dTransport()
    try:
        return run(transport, kind)
    finally:
        transport.close()


def test_plans_that_differ_between_processes(workers: WorkerPool) -> None:
    for said in workers.run(over_gloo, 2, "draws"):
        assert "cut the model otherwise" in said


def test_examples_of_other_sizes_give_the_same_plan(threads: Callable[..., Any]) -> None:
    def one(transport: Transport) -> float | None:
        torch.manual_seed(0)
        cut = split(Row("skips"), 2, example={"x": X[: 2 + transport.rank]})
        schedule = schedules.one_f_one_b(2, 2)
        executor = Executor(
            cut.stages(schedule.placement, transport.rank, "cpu", transport=transport), schedule, Tensor.sum
        )
        executor.step(x=X, return_outputs=False)
        return None if executor.loss is None else executor.loss.item()

    assert threads(one, 2)[1] is not None
