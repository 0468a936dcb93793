"""Models of many shapes, cut as they are, train as they do in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stepwell_p2p import Transport
from stepwell_stage import Executor, Schedule, schedules, split, tie

Batch = Mapping[str, Tensor]
MICROBATCHES = 3


def reference(model: nn.Module, batch: Batch, loss_fn: Callable[..., Tensor]) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients in one process, microbatch by microbatch, as the pipeline weighs them."""
    model = copy.deepcopy(model)
    parts = [
        dict(zip(batch, values, strict=True))
        for values in zip(*(v.tensor_split(MICROBATCHES) for v in batch.values()), strict=True)
    ]
    size = len(next(iter(batch.values())))
    total = 0.0
    for part in parts:
        loss = loss_fn(model(**part))
        weight = len(next(iter(part.values()))) / size
        (loss * weight).backward()
        total += loss.item() * weight
    return total, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def on_rank(
    transport: Transport,
    model: nn.Module,
    batch: Batch,
    loss_fn: Callable[..., Tensor],
    schedule: Schedule,
    options: Any,
) -> tuple[float | None, dict[str, Tensor], str]:
    options = dict(options)
    shapes = options.pop("shapes", "static")
    cut = split(model, options.pop("stages", schedule.placement.num_stages), example=batch, **options)
    first_only = options.get("inputs") == "first"
    stages = cut.stages(schedule.placement, transport.rank, "cpu", transport=transport, shapes=shapes)
    executor = Executor(stages, schedule, loss_fn)
    if cut.tied:
        tie(executor, cut.tied)
    inputs = batch if not first_only or executor.is_first else {}
    executor.step(**inputs, return_outputs=False)
    grads = {}
    for stage in stages:
        assert isinstance(stage.submodule, nn.Module)
        grads |= {name: p.grad for name, p in stage.submodule.named_parameters() if p.grad is not None}
    return None if executor.loss is None else executor.loss.item(), grads, cut.describe(schedule.placement)


def check(
    threads: Callable[..., Any],
    model: nn.Module,
    batch: Batch,
    schedule: Schedule,
    loss_fn: Callable[..., Tensor] = lambda output: output,
    **options: Any,
) -> str:
    model = model.double()
    batch = {name: value.double() if value.is_floating_point() else value for name, value in batch.items()}
    loss, grads = reference(model, batch, loss_fn)
    models = [copy.deepcopy(model) for _ in range(schedule.placement.num_ranks)]
    found = threads(
        lambda transport: on_rank(transport, models[transport.rank], batch, loss_fn, schedule, options),
        schedule.placement.num_ranks,
    )
    losses = [one for one, _, _ in found if one is not None]
    assert losses == [pytest.approx(loss, rel=1e-12)]
    together = {name: grad for _, mine, _ in found for name, grad in mine.items()}
    assert together.keys() == grads.keys()
    for name, grad in grads.items():
        torch.testing.assert_close(
            together[name], grad, rtol=1e-10, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}"
        )
    return str(found[0][2])


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.feed = nn.Sequential(nn.Linear(width, 16), nn.GELU(), nn.Linear(16, width))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y = self.norm(x)
        x = x + self.attention(y, y, y, attn_mask=mask, need_weights=False)[0]
        return x + self.feed(x)


class Gpt(nn.Module):
    """Tied embedding and head, mask and positions made in glue, the loss inside."""

    def __init__(self, layers: int = 4, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, width)
        self.position = nn.Parameter(torch.randn(6, width))
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position[: tokens.shape[1]]
        mask = torch.full((tokens.shape[1],) * 2, float("-inf"), device=x.device, dtype=x.dtype).triu(1)
        for block in self.blocks:
            x = block(x, mask)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


def tokens(size: int = 7, length: int = 6) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randint(11, (size, length), generator=generator) for name in ("tokens", "labels")}


ALL = [
    *(name for name, make in schedules.BY_NAME.items() if make(2, MICROBATCHES).has_backward),
]


@pytest.mark.parametrize("name", ALL)
def test_gpt_on_every_schedule(threads: Callable[..., Any], name: str) -> None:
    check(threads, Gpt(), tokens(), schedules.BY_NAME[name](2, MICROBATCHES))
