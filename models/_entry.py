"""What the grid needs to know of a model."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch
from torch import Tensor, nn

BATCH = 10  # cut into 4 microbatches of 3, 3, 2 and 2
VOCABULARY = 96
LENGTH = 12
WIDTH = 32
LAYERS = 8


@attrs.frozen(eq=False)
class Batch:
    """One batch as a user would pass it; every tensor has the samples along dim 0."""

    args: tuple[Tensor, ...] = ()
    kwargs: Mapping[str, Tensor] = attrs.field(factory=dict)
    target: Tensor | None = None

    def parts(self, count: int) -> list[Batch]:
        """The same in microbatches, cut as :class:`stepwell_stage.Executor` cuts."""

        def cut(tensor: Tensor) -> tuple[Tensor, ...]:
            return tensor.tensor_split(count)

        return [
            Batch(
                tuple(cut(one)[part] for one in self.args),
                {name: cut(one)[part] for name, one in self.kwargs.items()},
                None if self.target is None else cut(self.target)[part],
            )
            for part in range(count)
        ]

    def named(self, model: nn.Module) -> dict[str, Tensor]:
        """All inputs by name."""
        names = inspect.signature(model.forward).parameters
        return {**dict(zip(names, self.args, strict=False)), **self.kwargs}

    @property
    def size(self) -> int:
        """How many samples."""
        return len(next(iter((*self.args, *self.kwargs.values()))))


def loss_inside(output: Any) -> Tensor:
    """The loss that a model computes itself when it is given labels."""
    return output["loss"]


def loss_of_scores(output: Any, target: Tensor) -> Tensor:
    """A loss outside of the model: from its scores for each class or each place's tokens."""
    return nn.functional.cross_entropy(output["logits"].flatten(0, -2), target.flatten())


def labels_outside(batch: Batch) -> Batch:
    """The same samples with what was given as labels as the target."""
    return Batch(
        batch.args, {name: one for name, one in batch.kwargs.items() if name != "labels"}, batch.kwargs["labels"]
    )


@attrs.frozen(eq=False)
class Entry:
    """One model of the table.

    Attributes:
        name: as the table says it.
        make: builds the model on the CPU, in training mode; called under a fixed seed.
        batch: that many samples.
        loss_fn: from the model's output (and a target, where the batch has one) to the loss.
        double: whether the model is run in float64.
        refused: for a number of stages, words of the sentence with which it is refused.
    """

    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[int], Batch]
    loss_fn: Callable[..., Tensor] = loss_inside
    double: bool = True
    refused: Mapping[int, str] = attrs.field(factory=dict)

    def outside(self) -> Entry:
        """The same with the loss outside of the model."""
        if self.loss_fn is not loss_inside:
            return self
        return attrs.evolve(self, batch=lambda size: labels_outside(self.batch(size)), loss_fn=loss_of_scores)

    def model(self) -> nn.Module:
        """The model; the same weights at every call."""
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = self.make().train()
        return model.double() if self.double else model

    def example(self, size: int = BATCH) -> Batch:
        """A batch in the model's precision; the same at every call."""
        with torch.random.fork_rng():
            torch.manual_seed(1)
            batch = self.batch(size)
        if not self.double:
            return batch

        def double(tensor: Tensor) -> Tensor:
            return tensor.double() if tensor.is_floating_point() else tensor

        return Batch(
            tuple(map(double, batch.args)),
            {name: double(one) for name, one in batch.kwargs.items()},
            None if batch.target is None else double(batch.target),
        )


def tokens(size: int, length: int = LENGTH) -> Tensor:
    return torch.randint(3, VOCABULARY, (size, length))
