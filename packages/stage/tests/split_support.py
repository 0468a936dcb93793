"""Models whose forward goes several ways, and steps of them on stages and in one process, for several files of tests."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stepwell_meta.exceptions import StepwellError
from stepwell_p2p import Transport
from stepwell_stage import Executor, ModelSplit, Schedule, schedules, split, tie

Inputs = Mapping[str, Any]


def loss_of(output: Any) -> Tensor:
    return output["loss"] if isinstance(output, Mapping) else output.square().mean()


def rows_of(part: Inputs) -> int:
    return len(next(value for value in part.values() if isinstance(value, Tensor)))


def plain(model: nn.Module, steps: Sequence[Sequence[Inputs]]) -> tuple[list[float], dict[str, Tensor | None]]:
    """The loss of each step in one process, microbatch by microbatch, and the gradients of all of them."""
    model, losses = copy.deepcopy(model), []
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
    cut: ModelSplit,
    steps: Sequence[Sequence[Inputs]],
    schedule: Schedule,
    shapes: Literal["static", "dynamic"],
) -> tuple[list[float], dict[str, Tensor | None]]:
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
    return losses, grads


def check(
    threads: Callable[..., Any],
    model: nn.Module,
    examples: Sequence[Inputs],
    steps: Sequence[Sequence[Inputs]],
    name: str = "1f1b",
    ranks: int = 2,
    shapes: Literal["static", "dynamic"] = "static",
    stages: int | Mapping[str, int] | None = None,
    **options: Any,
) -> str:
    """Steps of microbatches on stages, and in one process: losses, every gradient, and which parameters have none."""
    schedule = schedules.BY_NAME[name](ranks, len(steps[0]))
    losses, grads = plain(model, steps)
    count = schedule.placement.num_stages if stages is None else stages
    cut = split(copy.deepcopy(model), count, example=examples[0], ways=examples[1:], **options)
    found = threads(lambda transport: on_rank(transport, cut, steps, schedule, shapes), ranks)
    assert [mine for mine, _ in found if mine] == [[pytest.approx(loss, rel=1e-12) for loss in losses]]
    together = [(key, grad) for _, mine in found for key, grad in mine.items()]
    assert dict(model.named_parameters()).keys() <= {key for key, _ in together}
    for key, grad in together:
        wanted = grads[key]
        if wanted is None:
            assert grad is None, key
        else:
            assert grad is not None, key
            torch.testing.assert_close(grad, wanted, rtol=1e-10, atol=1e-13)
    return cut.describe(schedule.placement)


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


def make(kind: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """The same model on every rank: ranks that are threads share the global generator, and drew each other's weights."""
    model, generator = kind().double(), draw(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            bound = parameter.size(-1) ** -0.5 if parameter.dim() else 1.0
            parameter.uniform_(-bound, bound, generator=generator)
    return model


class Switches(nn.Module):
    """Layers in a row; which of them run, and what joins them, is decided by ``decide`` at each."""

    def __init__(self, decide: Callable[[Any, int, Tensor], bool], layers: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.decide = decide

    def forward(self, x: Tensor, how: Any = None) -> Tensor:
        kept = x
        for number, layer in enumerate(self.layers):
            if self.decide(how, number, x):
                x = layer(x)
                kept = kept + x
            else:
                x = x * 0.5
        return x + kept


def numbers(seed: int, size: int = 2, length: int = 4) -> Tensor:
    return torch.randn(size, length, 8, generator=draw(seed)).double()


def keeps(how: Any, number: int, x: Tensor) -> bool:
    return bool(how[number])


def switched(*keep: int) -> tuple[bool, ...]:
    return tuple(map(bool, keep))


WAYS = {
    "all": switched(1, 1, 1, 1, 1, 1),
    "the first idle": switched(0, 0, 1, 1, 1, 1),
    "the last idle": switched(1, 1, 1, 1, 0, 0),
    "one in the middle idle": switched(1, 1, 0, 0, 1, 1),
    "only the first": switched(1, 0, 0, 0, 0, 0),
    "only the last": switched(0, 0, 0, 0, 0, 1),
    "here and there": switched(0, 1, 0, 1, 0, 1),
}


def of_way(name: str, seed: int, size: int = 2) -> dict[str, Any]:
    return {"x": numbers(seed, size), "how": WAYS[name]}


def any_set(how: Tensor, number: int, x: Tensor) -> bool:
    return bool(how[:, number].any())


def far_from_zero(how: Any, number: int, x: Tensor) -> bool:
    """Of what the layers before make."""
    return number not in (2, 4) or float(x.detach().mean()) > 0


class Either(nn.Module):
    """The same calls and operations in both ways, on other values."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))

    def forward(self, x: Tensor, left: bool = True) -> Tensor:
        first = self.layers[0](x)
        second = self.layers[1](x)
        third = self.layers[2](second if left else first)
        y = self.layers[3]((first if left else second) * 2 + third)
        return self.layers[5](self.layers[4](y + (third if left else second).sin()) + (x if left else first))


def refused(threads: Callable[..., Any], message: str, *args: Any, **options: Any) -> None:
    with pytest.raises(StepwellError, match=message):
        check(threads, *args, **options)


class Tasks(nn.Module):
    """An adapter for one task; a second head that is there if it is asked for; one norm used in two places, by task."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.adapter = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 3)
        self.second = nn.Linear(8, 2)

    def forward(self, x: Tensor, task: str = "a", second: bool = False) -> Any:
        x = self.blocks[0](x)
        if task == "b":
            x = x + self.adapter(self.norm(x))
        for block in list(self.blocks)[1:]:
            x = block(x)
        if task == "a":
            x = self.norm(x)
        loss = self.head(x).square().mean()
        if second:
            loss = loss + self.second(x).tanh().square().mean()
        return {"loss": loss}


def task(seed: int, size: int = 2, **how: Any) -> dict[str, Any]:
    return {"x": numbers(seed, size), **how}
