"""Calls of a unit, and values between units, that look alike and are not the same."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from split_support import check, make, numbers
from torch import Tensor, nn


class Scale(nn.Module):
    """Keeps the strides of what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight.sum()


class Row(nn.Module):
    """A unit that is called twice, then others; ``how`` says by what these go on."""

    def __init__(self, how: Callable[[Tensor, Tensor], float]) -> None:
        super().__init__()
        self.first = Scale()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.first(x), self.first(x.mT)
        factor = self.how(a, b)
        y = self.layers[0](a + b.mT)
        for layer in self.layers[1:]:
            y = layer(y).tanh() * factor
        return y


def by_strides(a: Tensor, b: Tensor) -> float:
    return (0.5 if a.is_contiguous() else 2.0) * (3.0 if b.is_contiguous() else 5.0)


def by_identity(a: Tensor, b: Tensor) -> float:
    return 0.5 if a is b else {a: 2.0, b: 3.0}[a]


def by_attributes(a: Tensor, b: Tensor) -> float:
    factor = 2.0 if hasattr(a, "factor") else 0.5  # nobody has given it one yet
    a.factor, b.factor = 3.0, 5.0  # type: ignore[attr-defined]
    return factor * a.factor  # type: ignore[attr-defined, no-any-return]


STEPS = [[{"x": numbers(seed, 8, 8)[0, None]} for seed in (n, n + 1)] for n in (1, 3)]


@pytest.mark.parametrize("how", [by_strides, by_identity, by_attributes])
def test_one_unit_called_twice(threads: Callable[..., Any], how: Callable[[Tensor, Tensor], float]) -> None:
    """Stages without the unit took what it gives for one tensor, with the strides of the first: wrong numbers, without a word."""
    stages = {"first": 0, "layers.0": 0, "layers.1": 1, "layers.2": 1}
    check(threads, make(lambda: Row(how)), STEPS[0][:1], STEPS, stages=stages)


def test_microbatches_of_other_strides(threads: Callable[..., Any]) -> None:
    """What a unit gives in the first microbatch was taken for what it gives in all."""

    class Asks(Row):
        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x)
            factor = 0.5 if y.is_contiguous() else 2.0
            for layer in self.layers:
                y = layer(y).tanh() * factor
            return y

    steps = [[{"x": part["x"].mT if number else part["x"]} for number, part in enumerate(step)] for step in STEPS]
    check(threads, make(lambda: Asks(by_strides)), STEPS[0][:1], steps)


class Whole(Tensor):
    part = 8

    def __new__(cls, y: Tensor) -> Tensor:  # type: ignore[misc]
        return y[..., : cls.part]


class Half(Whole):
    part = 4


class Takes(nn.Module):
    """Gives as many columns as it is told, and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor, which: Any) -> Any:
        y = self.inner(x)
        if isinstance(which, dict):
            return (y if 0 in which else y.sum(-1)), float("nan")
        if isinstance(which, bytes):
            return (y if which == b"all" else y.sum(-1)), math.inf
        if callable(which):
            return which(y), math.nan
        return y[..., list(which)], math.nan


@pytest.mark.parametrize(
    ("every", "few"),
    [
        (range(8), range(2)),
        (b"all", b"sum"),
        (numpy.arange(8), numpy.arange(3)),
        ({0: "all"}, {"0": "sum"}),
        (frozenset(range(8)), frozenset({1, 4})),
        (torch.tanh, functools.partial(torch.sum, dim=-1)),
        (nn.Tanh(), nn.Flatten(0)),
        (lambda y: y.cos(), lambda y: y[..., :2]),
        (*((lambda y, end=end: y[..., :end]) for end in (8, 2)),),
        (Whole, Half),
    ],
)
def test_constants_that_differ(threads: Callable[..., Any], every: Any, few: Any) -> None:
    """Other constants of these kinds were one to stages without the unit, which refused what it gave; and so was a new nan."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Takes() for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                (y, _), (z, _) = layer(x, every), layer(x, few)
                x = y + z.mean() * z.shape[-1] * z.dim()
            return x

    check(threads, make(Model), STEPS[0][:1], STEPS)


@pytest.mark.parametrize("flag", [False, True])
def test_several_ways_that_change_what_came_in_place(threads: Callable[..., Any], flag: bool) -> None:
    """Torch refused it, in the first step: with several ways, what a stage takes was a view that a function of ours had made."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

        def forward(self, x: Tensor, flag: bool = False) -> Tensor:
            for layer in self.layers:
                x = layer(x)
                if flag:
                    x = x.sin()
                x += 0.5
                x = nn.functional.relu(x, inplace=True)
            return x

    examples = [{"x": STEPS[0][0]["x"], "flag": way} for way in (False, True)]
    steps = [[{**part, "flag": flag} for part in step] for step in STEPS]
    check(threads, make(Model), examples, steps)


def test_default_dtypes_that_differ(threads: Callable[..., Any]) -> None:
    """What an operation gave under one was taken for what it gives under another: wrong numbers, without a word."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

        def forward(self, x: Tensor, is_long: bool = False) -> Tensor:
            y = self.layers[0](x)
            torch.set_default_dtype(torch.float64 if is_long else torch.float32)
            half = y.argmax(-1) / 2
            torch.set_default_dtype(torch.float32)
            factor = 0.5 if half.dtype is torch.float64 else 2.0
            for layer in list(self.layers)[1:]:
                y = layer(y) * factor
            return y

    steps = [[{**part, "is_long": bool(number)} for part in step[:1]] for number, step in enumerate(STEPS)]
    check(threads, make(Model), steps[0], steps)


@pytest.mark.parametrize("compare", [operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.sub])
def test_what_is_here_compared_with_what_is_not(threads: Callable[..., Any], compare: Callable[..., Any]) -> None:
    """Python asked the absent side first, the other way round, and the step was refused: 'lt' came there, and now 'gt'."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                y = layer(x)
                x = y + compare(torch.arange(8) * 0.05, y) * 0.5 + compare(y, x) * 0.25
            return x

    check(threads, make(Model), STEPS[0][:1], STEPS)


@pytest.mark.parametrize(
    "write", [Tensor.copy_, lambda y, h: y[:, 0].copy_(h[:, 1]), lambda y, h: y.__setitem__(0, h[0])]
)
def test_whether_what_was_written_into_needs_a_gradient(threads: Callable[..., Any], write: Callable[..., Any]) -> None:
    """Stages that had no data of what was written took the tensor to need none, and went on with other numbers."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            h = self.layers[0](x)
            y = torch.zeros_like(h)
            write(y, h)
            factor = 0.5 if y.requires_grad and not y.is_leaf else 2.0
            for layer in list(self.layers)[1:]:
                y = layer(y) * factor
            return y

    check(threads, make(Model), STEPS[0][:1], STEPS)
