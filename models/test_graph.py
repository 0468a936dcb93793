"""The same models as one graph: the plain model's loss, bit for bit, and its gradients; or refused, with the line that cannot be.

Gradients may differ by roundings where a real operator lays its result out otherwise than torch's fake ones say.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stepwell_graphpasses import GraphCompiler, PassConfig
from stepwell_graphpasses.exceptions import CaptureError

from ._entry import Entry
from ._grid import quiet
from ._more import MORE
from ._zoo import ENTRIES

BY_DATA = "it reads a number out of a tensor"
WITHOUT_BFLOAT16 = (
    "Expected inputs of BF16 type"  # torch's fake grouped product takes nothing else, and these are float32
)
REFUSED = {
    "Longformer": BY_DATA,
    "LED": BY_DATA,
    "DETR": BY_DATA,
    "Wav2Vec2": BY_DATA,
    "XLM": BY_DATA,
    "Mixtral": WITHOUT_BFLOAT16,
    "Mixtral with a loss of its router": WITHOUT_BFLOAT16,
    "Qwen2 MoE": WITHOUT_BFLOAT16,
    "Qwen3 MoE": WITHOUT_BFLOAT16,
    "DeepSeek-V3": WITHOUT_BFLOAT16,
    "gpt-oss": WITHOUT_BFLOAT16,
    "Jamba": WITHOUT_BFLOAT16,
}
torch.set_num_threads(1)


@pytest.mark.parametrize("entry", [*ENTRIES, *MORE], ids=lambda entry: entry.name)
def test_a_model_as_one_graph_is_the_plain_model(entry: Entry) -> None:
    def step(model: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor], rest: tuple[Tensor, ...]) -> Tensor:
        return entry.loss_fn(model(*args, **kwargs), *rest)

    plain, model, batch = entry.model(), entry.model(), entry.example(4)
    rest = () if batch.target is None else (batch.target,)
    given: dict[str, Any] = {"args": batch.args, "kwargs": dict(batch.kwargs), "rest": rest}
    compiler = GraphCompiler(model, step, PassConfig(dp_mode="ddp"))
    with quiet():
        if entry.name in REFUSED:
            with pytest.raises(CaptureError, match=REFUSED[entry.name]):
                compiler.compile(**given)
            return
        loss, _ = compiler.forward_backward(**given)
        expected = step(plain, **given)
    expected.backward()
    assert torch.equal(loss, expected)
    for (name, mine), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        if theirs.grad is None:
            assert mine.grad is None or not mine.grad.any(), name
        else:
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-12, atol=1e-13)
