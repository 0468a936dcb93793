"""Plain values that units change, which stages without these units have as they were: whoever looks at one is refused."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from split_support import check, make, numbers
from torch import Tensor, nn

from stepwell_stage import split
from stepwell_stage.exceptions import StageUsageError

Change = Callable[[Any], object]
Use = Callable[[Any, Tensor], Tensor]


class Counting(nn.Linear):
    """Keeps what it remembers in attributes of every kind."""

    def __init__(self, change: Change) -> None:
        super().__init__(8, 8)
        self.change = change
        self.calls, self.mode = 0, "a"
        self.rows, self.named, self.queue, self.seen, self.pair = [0], {"calls": 0}, deque([0]), {0}, (0, 0)

    def forward(self, x: Tensor) -> Tensor:
        self.change(self)
        return super().forward(x)


class Model(nn.Module):
    def __init__(self, change: Change, use: Use) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Counting(change) for _ in range(3))
        self.use = use

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[1](self.layers[0](x))
        return self.layers[2](self.use(self.layers[0], x))  # type: ignore[no-any-return]


def count(layer: Any) -> None:
    layer.calls += 1


def rename(layer: Any) -> None:
    layer.mode += "b"


def pair_up(layer: Any) -> None:
    layer.pair = (layer.pair[0] + 1, 0)


def append(layer: Any) -> None:
    layer.rows.append(1)


def swap(layer: Any) -> None:
    layer.named["calls"] += 1


REFUSED: dict[str, tuple[Change, Use, str]] = {
    "a number among others": (count, lambda layer, x: x * layer.calls, "calls"),
    "a number in torch": (count, lambda layer, x: torch.mul(x, layer.calls), "calls"),
    "a number by its name": (count, lambda layer, x: torch.add(x, x, alpha=layer.calls), "calls"),
    "a number that fills": (count, lambda layer, x: x + torch.full((8,), layer.calls), "calls"),
    "a number in words": (count, lambda layer, x: x * len(repr(layer.calls)), "calls"),
    "a method of a string": (rename, lambda layer, x: x * 2 if layer.mode.endswith("bb") else x, "mode"),
    "a longer list": (append, lambda layer, x: x / len(layer.rows), "rows"),
    "a shorter list": (lambda layer: layer.rows.clear(), lambda layer, x: x / (1 + len(layer.rows)), "rows"),
    "a list that is walked": (append, lambda layer, x: x / sum(1 for _ in layer.rows), "rows"),
    "a dict's item": (swap, lambda layer, x: x / (1 + layer.named["calls"]), "calls"),
    "a dict's keys": (lambda layer: layer.named.update(more=1), lambda layer, x: x / len(layer.named), "named"),
    "a deque": (lambda layer: layer.queue.append(1), lambda layer, x: x / len(layer.queue), "queue"),
    "a set": (lambda layer: layer.seen.add(len(layer.seen)), lambda layer, x: x / len(layer.seen), "seen"),
    "another tuple": (pair_up, lambda layer, x: x / (1 + layer.pair[0]), "pair"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_unit_changes_is_not_looked_at(name: str) -> None:
    """The length of a list that a unit makes longer was another on each stage, and so was the loss; torch's own errors named a
    class of ours."""
    change, use, said = REFUSED[name]
    with pytest.raises(StageUsageError, match=rf"test_split_plain.* looks at '{said}', which unit 'layers\.0' changes"):
        split(make(lambda: Model(change, use)), 2, example=numbers(0))


def emptied(layer: Any, x: Tensor) -> Tensor:
    layer.rows = [0]
    return x / len(layer.rows)


def reset(layer: Any, x: Tensor) -> Tensor:
    layer.calls = 2
    return x * layer.calls


@pytest.mark.parametrize(
    ("change", "use"),
    [
        (count, lambda layer, x: x),
        (append, lambda layer, x: x),
        (append, emptied),
        (count, reset),
        (swap, lambda layer, x: x * len(layer.named)),
        (pair_up, lambda layer, x: x * len(layer.rows)),
    ],
    ids=["a counter", "a list", "a list made anew", "a number set anew", "another item", "another attribute"],
)
def test_what_glue_has_set_itself_and_what_nobody_changed(
    threads: Callable[..., Any], change: Change, use: Use
) -> None:
    """A counter that the forward sets anew was refused where it looked at what it had just set."""
    steps = [[{"x": numbers(1)}, {"x": numbers(2)}]]
    check(threads, make(lambda: Model(change, use)), [{"x": numbers(0)}], steps)


def test_what_glue_empties() -> None:
    """A list that a unit filled and the forward emptied was an IndexError when the unit was called again."""

    class Emptied(Model):
        def forward(self, x: Tensor) -> Tensor:
            x = super().forward(x)
            for layer in self.layers:
                vars(layer)["rows"].clear()
            return x

    with pytest.raises(StageUsageError, match=r"looks at 'rows', which unit 'layers\.0' changes"):
        split(make(lambda: Emptied(append, lambda layer, x: x)), 2, example=numbers(0))
