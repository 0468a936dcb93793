"""What a step holds at most, against eager FSDP2."""

from __future__ import annotations

from typing import Any

import graphpasses_support as support
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from stepwell_graphpasses import GraphCompiler, PassConfig
from stepwell_graphpasses.testing import LiveBytes
from stepwell_meta.testing import WorkerPool


def make() -> nn.Module:
    return support.TinyGPT(vocab=64, width=64, hidden=256, layers=6)


def peaks() -> dict[str, Any]:
    tokens = support.tokens(batch=4, length=33, vocab=64)
    eager = support.seeded(make)
    for layer in eager.layers:
        fully_shard(layer)
    fully_shard(eager)
    compiler = GraphCompiler(support.seeded(make), support.gpt_loss, PassConfig()).compile(tokens=tokens)
    found: dict[str, Any] = {}
    for name, model, run in (
        ("eager", eager, lambda: support.gpt_loss(eager, tokens)[0].backward()),
        ("graph", compiler.model, lambda: compiler.forward_backward(tokens=tokens)),
    ):
        run()  # whatever is made once is made
        model.zero_grad()
        with LiveBytes() as live:
            run()
        found[name] = live.peak
    torch.testing.assert_close(support.gradients(compiler.model), support.gradients(eager), rtol=1e-5, atol=1e-7)
    return found


def test_a_step_holds_no_more_than_eager_fsdp2_although_its_collectives_are_bucketed(workers: WorkerPool) -> None:
    # The parameters of the next module were gathered when backward of a module began, which is when memory is fullest.
    for found in workers.run(peaks, 2, deadline=60):
        assert found["graph"] <= 1.03 * found["eager"], found
