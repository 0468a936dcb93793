"""What crosses: the fewest bytes, and nothing that can be computed from other values that cross."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import Any

import pytest
from split_support import check, make, numbers
from torch import Tensor, nn

from stepwell_stage import split
from stepwell_stage.split._least import least
from stepwell_stage.split._ways import Place

Layers = Sequence[Callable[[Tensor], Tensor]]

HALF = {"layers.0": 0, "layers.1": 0, "layers.2": 1, "layers.3": 1}
THIRDS = {"layers.0": 0, "layers.1": 1, "layers.2": 2, "layers.3": 2}


class Joined(nn.Module):
    def __init__(self, join: Callable[[Layers, Tensor], Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.join = join

    def forward(self, x: Tensor) -> Tensor:
        return self.join([*self.layers], x)


def value_and_its_half(layers: Layers, x: Tensor) -> Tensor:
    y = layers[1](layers[0](x))
    half = y * 0.5
    return layers[3](layers[2](y) + half)


def half_first(layers: Layers, x: Tensor) -> Tensor:
    y = layers[1](layers[0](x))
    half = y * 0.5
    return layers[3](layers[2](half) + y)


def residual_sum(layers: Layers, x: Tensor) -> Tensor:
    y = layers[0](x)
    y = y + layers[1](y)
    y = y + layers[2](y)
    return y + layers[3](y)


def skip_connection(layers: Layers, x: Tensor) -> Tensor:
    first = layers[0](x)
    return layers[3](layers[2](layers[1](first)) + first)


def sum_and_its_parts(layers: Layers, x: Tensor) -> Tensor:
    first = layers[0](x)
    second = layers[1](first)
    return layers[3](layers[2](first + second) + first.sin()) + second.sin()


def chain(layers: Layers, x: Tensor) -> Tensor:
    first = layers[1](layers[0](x)) * 2
    second = first.sin()
    third = second + 1
    return layers[3](layers[2](third) * second) + first


def mean_alone(layers: Layers, x: Tensor) -> Tensor:
    return layers[3](layers[2](layers[1](layers[0](x)).mean(1, keepdim=True)))


def mean_and_all(layers: Layers, x: Tensor) -> Tensor:
    y = layers[1](layers[0](x))
    return layers[3](layers[2](y) - y.mean(1, keepdim=True))


def used_in_both(layers: Layers, x: Tensor) -> Tensor:
    first = layers[0](x)
    half = first * 0.5
    return layers[3](layers[2](layers[1](half) + first) + half)


FIRST, SECOND, ADD, HALVED, MEAN = ("layers.0", "layers.1", "add", "mul", "mean")

CASES: list[tuple[Callable[[Layers, Tensor], Tensor], dict[str, int], list[tuple[int, str]]]] = [
    (value_and_its_half, HALF, [(0, SECOND)]),
    (half_first, HALF, [(0, SECOND)]),
    (residual_sum, HALF, [(0, ADD)]),
    (residual_sum, THIRDS, [(0, FIRST), (1, ADD)]),
    (skip_connection, HALF, [(0, FIRST), (0, SECOND)]),
    (skip_connection, THIRDS, [(0, FIRST), (1, FIRST), (1, SECOND)]),
    (sum_and_its_parts, HALF, [(0, FIRST), (0, SECOND)]),
    (chain, HALF, [(0, HALVED)]),
    (mean_alone, HALF, [(0, MEAN)]),
    (mean_and_all, HALF, [(0, SECOND)]),
    (used_in_both, THIRDS, [(0, HALVED), (0, FIRST), (1, SECOND)]),
]


@pytest.mark.parametrize(("join", "stages", "wires"), CASES, ids=lambda one: getattr(one, "__name__", None))
def test_what_crosses(
    threads: Callable[..., Any],
    join: Callable[[Layers, Tensor], Tensor],
    stages: dict[str, int],
    wires: list[tuple[int, str]],
) -> None:
    """Where glue makes ``y * 0.5`` of ``y`` and the next stage needs both, both crossed."""
    model = make(lambda: Joined(join))
    said = split(model, stages, example=numbers(0)).describe()
    found = re.findall(r"from stage (\d): a result of '(.*)',", said)
    assert [(int(source), name) for source, name in found] == wires
    steps = [[{"x": numbers(1)}, {"x": numbers(2)}]]
    check(threads, model, [{"x": numbers(0)}], steps, ranks=max(stages.values()) + 1, stages=stages)


def possible(parents: Mapping[Place, Sequence[Place] | None], wanted: set[Place], moved: set[Place]) -> int | None:
    """How many values are computed where these move; None if that is not all that is wanted."""
    computed: set[Place] = set()
    todo = list(wanted)
    while todo:
        one = todo.pop()
        if one in moved or one in computed:
            continue
        before = parents[one]
        if before is None:
            return None
        computed.add(one)
        todo += before
    return len(computed)


@pytest.mark.parametrize("seed", range(200))
def test_the_least_of_all_that_could_move(seed: int) -> None:
    """Against every set of values of a small graph: none is smaller, and of those as small none computes less again."""
    draw = random.Random(seed)
    count = draw.randint(1, 9)
    places = [(draw.randrange(2), number) for number in range(count)]
    parents: dict[Place, list[Place] | None] = {}
    sizes: dict[Place, float] = {}
    for number, place in enumerate(places):
        before = draw.sample(places[:number], min(number, draw.randint(0, 3)))
        parents[place] = before if before and draw.random() < 0.8 else None
        may_stay = parents[place] is not None and draw.random() < 0.2
        sizes[place] = inf if may_stay else draw.randint(1, 4)
    wanted = set(draw.sample(places, draw.randint(1, count)))
    found = least(parents, sizes, wanted)
    sets = (set(one) for size in range(count + 1) for one in itertools.combinations(places, size))
    every = [(sum(map(sizes.__getitem__, moved)), possible(parents, wanted, moved)) for moved in sets]
    best = min((size, computed) for size, computed in every if computed is not None)
    assert (sum(map(sizes.__getitem__, found)), possible(parents, wanted, found)) == best


def test_many_values_take_no_longer_than_they_must() -> None:
    """A row of layers, each joined with its counterpart: what moves grows with the model, and the search with it."""
    places = [(0, number) for number in range(400)]
    parents = {place: None if number % 2 == 0 else [places[number - 1]] for number, place in enumerate(places)}
    assert least(parents, dict.fromkeys(places, 4), places) == set(places[::2])
