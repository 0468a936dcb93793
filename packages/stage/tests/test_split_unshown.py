"""Ways that no example showed, or that stages cannot agree on, are refused."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from split_support import (
    WAYS,
    Block,
    Switches,
    Tasks,
    Vision,
    check,
    keeps,
    loss_of,
    make,
    numbers,
    of_way,
    refused,
    seen,
    task,
    words,
)
from torch import Tensor, nn

from stepwell_p2p import Transport
from stepwell_stage import Executor, schedules, split
from stepwell_stage.exceptions import StageUsageError


def test_a_way_that_no_example_showed(threads: Callable[..., Any]) -> None:
    model = make(lambda: Switches(keeps))
    examples = [of_way("all", 0), of_way("the last idle", 0), of_way("one in the middle idle", 0)]
    for way in ("the first idle", "only the first", "here and there"):
        refused(
            threads,
            r"another way than with any example: .* came there, and now .* split with an example for this way too \(ways=\)",
            model,
            examples,
            [[of_way("all", 1), of_way(way, 2)]],
            shapes="dynamic",
        )
    unseen = {"ids": words(1)["ids"], "pixels": seen(1)["pixels"]}
    message = (
        r"was given ids, pixels, and no example has these and no others: ids, labels; ids, labels, pixels; split with"
    )
    refused(threads, message, make(Vision), [words(0), seen(0)], [[words(1), unseen]])
    message = r"stage 0 was given task='c', or tensors .*unlike any example.* \(ways=\), or with inputs=\"every\""
    refused(
        threads,
        message,
        make(Tasks),
        [task(0), task(0, task="b")],
        [[task(1), task(2, task="c")]],
        inputs="first",
    )


def test_a_forward_that_ends_early(threads: Callable[..., Any]) -> None:
    """What was to be sent was looked up by name, and was not there."""

    class Early(Switches):
        def forward(self, x: Tensor, how: Any = None) -> Tensor:
            x = self.layers[0](x)
            return x if how else super().forward(x, WAYS["all"])

    message = (
        r"forward ended before 'layers\.0', which came next in the example: split with an example for this way too"
    )
    model, steps = make(lambda: Early(keeps)), [[{"x": numbers(1), "how": True}]]
    refused(threads, message, model, [{"x": numbers(0), "how": False}], steps)
    check(threads, model, [{"x": numbers(0), "how": False}, {"x": numbers(0), "how": True}], steps, ranks=3)


def test_ways_of_inputs_that_look_the_same(threads: Callable[..., Any]) -> None:
    """Static shapes are those of the first microbatch with such inputs; another way has others."""
    model = make(lambda: Switches(keeps))
    examples = [of_way("all", 0), of_way("the last idle", 0), of_way("only the last", 0)]
    steps = [[of_way("all", 1)] * 2, [of_way("all", 1), of_way("only the last", 2)]]
    refused(
        threads,
        r'(?s)stage 0: .*if these depend on the data, build the stages with shapes="dynamic"',
        model,
        examples,
        steps,
    )


def test_ranks_that_do_not_go_the_same_way(threads: Callable[..., Any]) -> None:
    """A stage took what another had made in another way for its own."""
    rank_of = {}

    def differs(how: Any, number: int, x: Tensor) -> bool:
        return number != 1 or rank_of.get(threading.get_ident(), how) == 0

    def one(transport: Transport) -> None:
        schedule = schedules.one_f_one_b(transport.size, 2)
        model = make(lambda: Switches(differs, 3))
        cut = split(model, {"layers.2": 1}, example={"x": numbers(0), "how": 0}, ways=[{"x": numbers(0), "how": 1}])
        executor = Executor(
            cut.stages(schedule.placement, transport.rank, "cpu", transport=transport), schedule, loss_of
        )
        rank_of[threading.get_ident()] = transport.rank
        executor.step(x=numbers(1), how=0, return_outputs=False)

    with pytest.raises(
        StageUsageError, match=r"stage 1 went another way than a stage before it: .* the same on every rank"
    ):
        threads(one, 2)


def test_what_cannot_be_known_is_refused() -> None:
    class Counted(Switches):
        """A layer says to Python by data what comes next."""

        def forward(self, x: Tensor, how: Any = None) -> Tensor:
            for layer in self.layers:
                x, is_large = layer(x)
                x = x * 2 if is_large else x.relu()
            return x

    class Says(Block):
        def forward(self, x: Tensor) -> Any:
            y = super().forward(x)
            return y, bool(y.detach().mean() > 0)

    model = make(lambda: Counted(keeps))
    model.layers = nn.ModuleList(Says().double() for _ in range(3))
    with pytest.raises(
        StageUsageError, match=r"unit 'layers\.0' gives Python another number, or structure, in one way"
    ):
        split(model, 2, example={"x": numbers(0) + 5}, ways=[{"x": numbers(0) - 5}])
    cut = split(make(Tasks), 2, example=task(0, task="b"), ways=[task(0, task="c")])
    with pytest.raises(StageUsageError, match="was given no task, which is another in one example than in the next"):
        cut.module(0)(x=numbers(0))


def test_what_is_said_of_ways() -> None:
    cut = split(make(Vision), 3, example=words(0), ways=[seen(0)])
    said = cut.describe()
    assert cut.parts[0] == ("embed", "tower.0", "tower.1")
    assert "a result of 'blocks.1', 640 bytes in the example; a result of 'blocks.1', 1,024 bytes in ways[0]" in said
    assert "from stage 0: a result of 'tower.1', 384 bytes in ways[0]" in said
    assert split(make(Vision), 2, example=seen(0), ways=[words(0)]).costs.keys() == cut.costs.keys()
    timed = split(make(Vision), 2, example=words(0), ways=[seen(0)], costs="time").costs
    assert min(timed[f"tower.{number}"] for number in range(3)) > 0
