"""Sizes that change from call to call, and from rank to rank."""

from __future__ import annotations

from typing import Any

import graphpasses_support as support
import pytest
import torch.distributed as dist
from graphpasses_support import XY, compiler

from stepwell_graphpasses import PassConfig
from stepwell_graphpasses.exceptions import (
    CaptureError,
    ConfigError,
    GuardError,
)
from stepwell_meta.testing import WorkerPool


def s38() -> list[float]:
    rank = dist.get_rank()
    c = compiler(
        PassConfig(bucket_by="bytes"),
        lambda: support.TinyGPT(layers=1),
        support.gpt_loss,
        dynamic_arg_dims={"tokens": [0, 1]},
    )
    reference = support.seeded(lambda: support.TinyGPT(layers=1))
    results = []
    for step in range(3):
        inputs = {"tokens": support.tokens(step, batch=2 + rank + step, length=4 + 2 * rank + step)}
        c.forward_backward(**inputs)
        expected = support.averaged(support.local_gradients(reference, support.gpt_loss, inputs))
        results.append(support.difference(support.gradients(c.model), expected))
        c.model.zero_grad()
    assert len(c._captures) == 1
    return results


def test_s38_one_graph_for_other_sizes_also_on_each_rank(workers: WorkerPool) -> None:
    assert max(max(results) for results in workers.run(s38, 2, deadline=60)) <= 1e-7


def s39() -> Any:
    c = compiler()
    c.forward_backward(**support.pair((4, 3)))
    before = support.gradients(c.model)
    bad = support.pair((4, 3), batch=3) if dist.get_rank() else support.pair((4, 3), batch=5)
    try:
        c.forward_backward(**bad)
    except GuardError as error:
        message = str(error)
    after = support.gradients(c.model)  # collective: nobody is stuck in another one
    c.compile(**bad)
    c.forward_backward(**bad)
    return message, support.difference(before, after)


def test_s39_a_size_the_graph_was_not_made_for_raises_before_any_collective(workers: WorkerPool) -> None:
    for message, difference in workers.run(s39, 2, deadline=60):
        assert "x: expected shape (4, 4), got" in message
        assert "Call compile with such inputs" in message
        assert difference == 0.0


def test_s38_sizes_that_get_a_graph_of_their_own() -> None:
    def batch(size: int) -> dict[str, Any]:
        return support.pair((4, 3), rank=0, batch=size)

    c = compiler(
        dynamic_arg_dims={"x": [0], "y": [0]},
        compile_sizes=[4, 8, 16],
        compile_size_input="x",
        compile_size_dim=0,
        max_specializations=2,
    )
    for size in (5, 4, 4, 8, 16, 4, 6):
        loss, _ = c.forward_backward(**batch(size))
        assert loss.item() == pytest.approx(support.mse_loss(c.model, **batch(size)).item(), rel=1e-6)
    stats = c.specialization_stats
    assert (stats.compiled, stats.hits, stats.fallbacks) == (2, 4, 1)
    with pytest.raises(ConfigError, match="compile_sizes needs compile_size_input"):
        compiler(compile_sizes=[3])
    with pytest.raises(CaptureError, match="there is no such dim of such an input; inputs are x, y"):
        compiler(compile_sizes=[3], compile_size_input="z").forward_backward(**XY)


def test_dynamic_sizes_also_work_with_dynamic_true() -> None:
    c = compiler(dynamic=True)
    for size in (5, 9):
        inputs = support.pair((4, 3), rank=0, batch=size)
        loss, _ = c.forward_backward(**inputs)
        assert loss.item() == pytest.approx(support.mse_loss(c.model, **inputs).item(), rel=1e-6)
