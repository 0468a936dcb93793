"""Models whose forward goes another way for some batches, with an example for each: as in one process, or refused."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stepwell_p2p import Transport
from stepwell_stage import Executor, Schedule, schedules, split, tie

Inputs = Mapping[str, Any]


def loss_of(output: Any) -> Tensor:
    return output["loss"] if isinstance(output, Mapping) else output.square().mean()


def rows_of(part: Inputs) -> int:
    return len(next(value for value in part.values() if isinstance(value, Tensor)))


def plain(model: nn.Module, steps: Sequence[Sequence[Inputs]]) -> tuple[list[float], dict[str, Tensor | None]]:
    """The loss of each step in one process, microbatch by microbatch, and the gradients of all of them."""
    losses = []
    for parts in steps:
        total, size = 0.0, sum(map(rows_of, parts))
        for part in parts:
            loss = loss_of(model(**part))
            (loss * (rows_of(part) / size)).backward()
            total += loss.item() * rows_of(part) / size
        losses.append(total)
    return losses, {name: parameter.grad for name, parameter in model.named_parameters(remove_duplicate=False)}


def on_rank(
    transport: Transport,
    model: nn.Module,
    examples: Sequence[Inputs],
    steps: Sequence[Sequence[Inputs]],
    schedule: Schedule,
    options: Mapping[str, Any],
) -> tuple[list[float], dict[str, Tensor | None], str]:
    options = dict(options)
    shapes, stages = options.pop("shapes", "static"), options.pop("stages", schedule.placement.num_stages)
    cut = split(model, stages, example=examples[0], ways=examples[1:], **options)
    parts = cut.stages(schedule.placement, transport.rank, "cpu", transport=transport, shapes=shapes)
    executor = Executor(parts, schedule, loss_of)
    if cut.tied:
        tie(executor, cut.tied)
    given = cut.inputs == "every" or executor.is_first
    losses = []
    for step in steps:
        executor.step(kwarg_mbs=[dict(part) if given else {} for part in step], return_outputs=False)
        if executor.loss is not None:
            losses.append(executor.loss.item())
    grads: dict[str, Tensor | None] = {}
    for stage in executor.stages:
        assert isinstance(stage.submodule, nn.Module)
        for name, parameter in stage.submodule.named_parameters():
            grads[name] = parameter.grad
    return losses, grads, cut.describe(schedule.placement)


def check(
    threads: Callable[..., Any],
    model: nn.Module,
    examples: Sequence[Inputs],
    steps: Sequence[Sequence[Inputs]],
    name: str = "1f1b",
    ranks: int = 2,
    **options: Any,
) -> str:
    """Steps of microbatches on stages, and in one process: losses, every gradient, and which parameters have none."""
    schedule = schedules.BY_NAME[name](ranks, len(steps[0]))
    models = [copy.deepcopy(model) for _ in range(ranks)]
    losses, grads = plain(model, steps)
    found = threads(lambda t: on_rank(t, models[t.rank], examples, steps, schedule, options), ranks)
    assert [mine for mine, _, _ in found if mine] == [[pytest.approx(loss, rel=1e-12) for loss in losses]]
    together = [(key, grad) for _, mine, _ in found for key, grad in mine.items()]
    assert dict(model.named_parameters()).keys() <= {key for key, _ in together}
    for key, grad in together:
        wanted = grads[key]
        if wanted is None:
            assert grad is None, key
        else:
            assert grad is not None, key
            torch.testing.assert_close(grad, wanted, rtol=1e-10, atol=1e-13)
    return str(found[0][2])


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(self.norm(x)).tanh()


class Vision(nn.Module):
    """A tower for images, which not all batches have; the loss inside, where there are labels; a weight used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.tower = nn.ModuleList(Block() for _ in range(3))
        self.join = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, pixels: Tensor | None = None, labels: Tensor | None = None) -> Any:
        x = self.embed(ids)
        if pixels is not None:
            y = pixels
            for block in self.tower:
                y = block(y)
            x = torch.cat([self.join(y), x], 1)
        for block in self.blocks:
            x = block(x)
        scores = self.head(x[:, -ids.shape[1] :])
        if labels is None:
            return {"loss": scores.square().mean(), "scores": scores}
        return {"loss": F.cross_entropy(scores.flatten(0, 1), labels.flatten()), "scores": scores}


def draw(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def words(seed: int, size: int = 2, length: int = 5) -> dict[str, Tensor]:
    return {
        name: torch.randint(11, (size, length), generator=draw(seed + n)) for n, name in enumerate(("ids", "labels"))
    }


def seen(seed: int, size: int = 2, length: int = 5) -> dict[str, Tensor]:
    return {**words(seed, size, length), "pixels": torch.randn(size, 3, 8, generator=draw(seed + 7)).double()}


def make(kind: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return kind().double()


ALL = [name for name, schedule in schedules.BY_NAME.items() if schedule(2, 3).has_backward]


@pytest.mark.parametrize("name", ALL)
def test_a_tower_for_some_batches(threads: Callable[..., Any], name: str) -> None:
    """Steps of one way alone, of the other, and of both within one batch."""
    steps = [
        [seen(1), seen(2), seen(3)],
        [words(4), words(5), words(6)],
        [words(7, 1), seen(8, 3), words(9, 2)],
    ]
    check(threads, make(Vision), [words(0), seen(0)], steps, name)
