"""A plan found for a limit of memory keeps to it when it really runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from stepwell_p2p import Transport
from stepwell_stage import Executor, Layer, PipelineStage, PlanChoice, plan_search

Threads = Callable[..., list[Any]]
RANKS, LAYERS, WIDTH, BATCH = 3, 6, 8, 24
SAVED = 2 * 4 * WIDTH  # bytes that a layer saves of one sample: what it takes, and what it makes


class Books:
    """Bytes that autograd holds of one rank, now and at most; mutable: they change as it goes."""

    def __init__(self) -> None:
        self.now = self.most = 0


class Saved:
    """A tensor in autograd's keeping; books its bytes as long as it lives."""

    def __init__(self, tensor: torch.Tensor, books: Books) -> None:
        self.tensor, self.books = tensor, books
        self.size = 0 if isinstance(tensor, nn.Parameter) or tensor.shape == (WIDTH, WIDTH) else tensor.nbytes
        books.now += self.size
        books.most = max(books.most, books.now)

    def __del__(self) -> None:
        self.books.now -= self.size


class Booked(nn.Module):
    """Layers of which it is known what they save."""

    def __init__(self, layers: list[nn.Linear], books: Books) -> None:
        super().__init__()
        self.layers, self.books = nn.ModuleList(layers), books

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: Saved(t, self.books), lambda saved: saved.tensor):
            for layer in self.layers:
                x = layer(x).tanh()
        return x


def model() -> list[nn.Linear]:
    generator = torch.Generator().manual_seed(0)
    made = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
    for layer in made:
        nn.init.uniform_(layer.weight, -0.5, 0.5, generator=generator)
    return made


def most_held(transport: Transport, choice: PlanChoice) -> int:
    """Bytes that one rank held at most in a step, the second of two; its gradients are right."""
    plan, books, layers = choice.plan, Books(), model()
    bounds = (*choice.cuts, LAYERS)
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(BATCH, WIDTH, generator=generator) for _ in range(2))
    stages = [
        PipelineStage(Booked(layers[bounds[index] : bounds[index + 1]], books), index, len(choice.cuts), "cpu")
        for index in plan.placement.stages_of(transport.rank)
    ]
    executor = Executor(stages, plan, functional.mse_loss, transport=transport)
    for _ in range(2):
        books.most = 0
        executor.step(
            *((x,) if executor.is_first else ()), target=y if executor.is_last else None, return_outputs=False
        )
    assert books.now == 0
    plain = nn.ModuleList(model())
    out = x
    for layer in plain:
        out = layer(out).tanh()
    functional.mse_loss(out, y).backward()
    for stage in stages:
        first = bounds[stage.stage_index]
        for number, layer in enumerate(stage.submodule.layers, first):
            torch.testing.assert_close(layer.weight.grad, 2 * plain[number].weight.grad)
    return books.most


@pytest.mark.parametrize("samples", [3, 6, 12, 24])
def test_the_executor_holds_no_more_than_the_limit(threads: Threads, samples: int) -> None:
    """As many samples as a rank with the layers of one stage of three may hold."""
    limit = samples * 2 * SAVED
    layers = [Layer(1.0 + number % 2, 2.0 + number % 3, activation_bytes=SAVED) for number in range(LAYERS)]
    found = plan_search(layers, RANKS, batch_size=BATCH, memory_limit=limit, stages_per_rank=(1, 2))
    assert max(found.best.peak_bytes) <= limit
    for choice in found.choices:
        most = threads(most_held, RANKS, choice)
        assert max(most) <= limit, choice.schedule.name
        assert all(real <= said for real, said in zip(most, choice.peak_bytes, strict=True)), choice.schedule.name
        if choice.schedule.name in ("gpipe", "1f1b", "interleaved-1f1b", "looped-bfs"):  # a W may need less than its F
            assert tuple(most) == choice.peak_bytes
    freely = plan_search(layers, RANKS, batch_size=BATCH, stages_per_rank=(1, 2))
    assert any(max(choice.peak_bytes) > limit for choice in freely.choices) or samples == BATCH
