"""Models whose forward goes another way for some batches, with an example for each: as in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from split_support import (
    WAYS,
    Block,
    Either,
    Switches,
    Tasks,
    Vision,
    any_set,
    check,
    far_from_zero,
    keeps,
    make,
    numbers,
    of_way,
    seen,
    task,
    words,
)
from torch import Tensor, nn

from stepwell_stage import schedules, split
from stepwell_stage.exceptions import StageUsageError

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


@pytest.mark.parametrize(("name", "ranks"), [("1f1b", 4), ("interleaved-1f1b", 2), ("zbv", 2), ("1f1b", 1)])
def test_the_second_way_first_and_inputs_on_the_first_rank(threads: Callable[..., Any], name: str, ranks: int) -> None:
    """Stages that are not given the inputs are told of what kind they are."""
    steps = [[words(1, 3), words(2, 3)], [seen(3, 1), words(4, 2)]]
    examples = [seen(0), words(0)]
    check(threads, make(Vision), examples, steps, name, ranks, inputs="first")
    check(threads, make(Vision), examples, [[words(1, 3)], [seen(5)]], "gpipe", ranks)


@pytest.mark.parametrize(
    ("way", "name", "ranks", "inputs"),
    [
        ("all", "1f1b", 3, "every"),
        ("the first idle", "zbv", 2, "every"),
        ("the first idle", "gpipe", 3, "first"),
        ("the last idle", "1f1b", 3, "every"),
        ("the last idle", "zb-h1", 3, "first"),
        ("one in the middle idle", "interleaved-1f1b", 2, "every"),
        ("only the first", "1f1b", 3, "every"),
        ("only the last", "zbv", 2, "first"),
        ("here and there", "gpipe", 4, "every"),
    ],
)
def test_layers_that_are_left_out(threads: Callable[..., Any], way: str, name: str, ranks: int, inputs: str) -> None:
    """What decides is no tensor, so all ways have inputs that look the same; stages without any unit pass on what they must."""
    steps = [[of_way(way, 1), of_way(way, 2)], [of_way("all", 3), of_way(way, 4)]]
    examples = [of_way(one, 0) for one in WAYS]
    check(threads, make(lambda: Switches(keeps)), examples, steps, name, ranks, shapes="dynamic", inputs=inputs)


def test_every_way_in_one_batch(threads: Callable[..., Any]) -> None:
    step = [of_way(name, number, 1 + number % 3) for number, name in enumerate(WAYS)]
    for name in ("1f1b", "zbv"):
        check(
            threads, make(lambda: Switches(keeps)), [of_way(name, 0) for name in WAYS], [step], name, shapes="dynamic"
        )


def test_a_branch_on_data_that_every_stage_has(threads: Callable[..., Any]) -> None:
    def masked(seed: int, *columns: int) -> dict[str, Tensor]:
        mask = torch.zeros(2, 6, dtype=torch.bool)
        mask[seed % 2, list(columns)] = True
        return {"x": numbers(seed), "how": mask}

    sets = ((0, 1, 2, 3, 4, 5), (2, 3, 4, 5), (0, 1, 5))
    examples = [masked(0, *columns) for columns in sets]
    steps = [[masked(n, *columns) for n, columns in enumerate(sets)], [masked(5, *sets[1])] * 3]
    for options in ({}, {"inputs": "first"}):
        check(threads, make(lambda: Switches(any_set)), examples, steps, "1f1b", 3, shapes="dynamic", **options)


def test_a_branch_on_data_that_layers_make(threads: Callable[..., Any]) -> None:
    """The value that decides crosses, and stages that are done by then do not care."""
    model = make(lambda: Switches(far_from_zero))
    examples = [{"x": numbers(0).abs() + 5}, {"x": -numbers(0).abs() - 5}]
    parts = [{"x": numbers(n) * 0.1 + 5 * (-1) ** n} for n in range(4)]
    for name, ranks in (("1f1b", 3), ("zbv", 2), ("1f1b", 2)):
        check(threads, model, examples, [parts], name, ranks, shapes="dynamic")


def test_tasks_by_name(threads: Callable[..., Any]) -> None:
    """What crosses differs by the task's name, so shapes may be static; the norm is tied."""
    model = make(Tasks)
    examples = [task(0), task(0, task="b"), task(0, second=True)]
    parts = [task(1), task(2, task="b"), task(3, second=True, task="a")]
    steps = [parts[:2], parts[1:], [parts[1], parts[1]], parts[:2]]
    said = check(threads, model, examples, steps)
    assert "tied: 'norm.weight' on stages 0, 1" in said
    assert "from stage 0: a result of 'blocks.1', 512 bytes in every way" in said
    for name in ("zbv", "interleaved-1f1b"):
        for shapes in ("static", "dynamic"):
            said = check(threads, model, examples, steps, name, shapes=shapes)
            assert "from stage 0: a result of 'norm', 512 bytes in ways[0]" in said
    check(threads, model, examples, [parts, parts[1:] * 2][:1], "gpipe", 3, inputs="first")


def test_one_that_left_out_an_input_may_pass_its_default(threads: Callable[..., Any]) -> None:
    parts = [task(1, task="a", second=False), task(2, task="b", second=False)]
    for options in ({}, {"inputs": "first"}):
        check(threads, make(Tasks), [task(0, task="b"), task(0)], [parts], **options)


class Long(nn.Module):
    """An encoder that short inputs skip, and a unit of which no stage knows beforehand whether the next part takes its result."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.encoder = nn.ModuleList(Block() for _ in range(3))
        self.last = nn.BatchNorm1d(8)
        self.register_buffer("seen", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        if x.shape[1] > 4:
            self.seen += 1
            for block in self.encoder:
                y = block(y) * (1 + self.seen)
        return self.last(y.mean(1) + x[:, 0])


def test_an_encoder_for_long_inputs_only(threads: Callable[..., Any]) -> None:
    """A size decides, and glue counts how often."""
    lengths = [[3, 6, 4], [6, 6, 6], [2, 2, 2], [9, 3, 5]]
    steps = [[{"x": numbers(n, 3, length)} for n, length in enumerate(row)] for row in lengths]
    examples = [{"x": numbers(0, 2, 4)}, {"x": numbers(0, 2, 6)}]
    for name, ranks in (("1f1b", 3), ("zb-h1", 2)):
        check(threads, make(Long), examples, steps, name, ranks)


def test_ways_that_cannot_be_told_apart_by_what_runs(threads: Callable[..., Any]) -> None:
    examples = [{"x": numbers(0), "left": True}, {"x": numbers(0), "left": False}]
    steps = [[{"x": numbers(n), "left": n % 3 > 0} for n in range(3)]] * 2
    for name, ranks in (("1f1b", 4), ("1f1b", 6), ("zbv", 2)):
        check(threads, make(Either), examples, steps, name, ranks)


def test_an_example_that_goes_a_way_again(threads: Callable[..., Any]) -> None:
    check(threads, make(Vision), [words(0), words(1, 3, 4), words(2)], [[words(3, 1), words(4)]])


def test_a_unit_that_one_way_calls_early_and_another_late(threads: Callable[..., Any]) -> None:
    """Where its stage is given, it is enough that one way can call it there."""
    examples = [task(0), task(0, task="b")]
    where = {"norm": 0, "adapter": 0, "blocks.2": 1}
    said = check(threads, make(Tasks), examples, [[task(1), task(2, task="b")]], stages=where, shapes="dynamic")
    assert "tied: 'norm.weight' on stages 0, 1" in said
    with pytest.raises(StageUsageError, match=r"unit 'norm' is to be on stage 0, but takes what stage 1 makes"):
        split(make(Tasks), {"norm": 0, "blocks.1": 1}, example=task(0), ways=[task(0, second=True)])
