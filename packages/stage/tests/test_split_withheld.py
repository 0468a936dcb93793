"""Objects that units fill and the model returns, such as a cache of keys and values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from split_support import check, draw, make
from torch import Tensor, nn

from stepwell_p2p import Transport
from stepwell_stage import Executor, schedules, split
from stepwell_stage.exceptions import StageUsageError

X = torch.randn(6, 4, generator=draw(1)).double()


class Cache:
    def __init__(self) -> None:
        self.rows: dict[int, Tensor] = {}
        self.window = torch.tensor(3)  # glue's, as in a cache with a window

    def put(self, number: int, row: Tensor) -> int:
        self.rows[number] = row * 1.0
        return len(self.rows)


class Layer(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self.inner, self.keeps = number, nn.Linear(4, 4), True

    def forward(self, x: Tensor, cache: Cache | None) -> Tensor:
        y = self.inner(x)
        if cache is not None and self.keeps:
            cache.put(self.number, y)
        return x + y.tanh()


class Row(nn.Module):
    """As models of transformers do by default, which were refused in the first step for it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(number) for number in range(4))

    def forward(self, x: Tensor, keeps: bool = True) -> dict[str, Any]:
        cache = Cache() if keeps else None
        for layer in self.layers:
            x = layer(x, cache)
        found = {"loss": x.square().mean(), "cache": cache, "others": ["both", {"inner": cache}]}
        return found if keeps else {"loss": found["loss"]}


@pytest.mark.parametrize("name", ["1f1b", "zbv", "interleaved-1f1b"])
def test_what_the_loss_does_not_need_is_no_reason_to_refuse(threads: Callable[..., Any], name: str) -> None:
    parts = [{"x": part, "keeps": True} for part in X.chunk(3)]
    check(threads, make(Row), parts[:1], [parts, parts], name)


def test_some_of_the_ways_return_one(threads: Callable[..., Any]) -> None:
    parts = [{"x": part, "keeps": number != 1} for number, part in enumerate(X.chunk(3))]
    check(threads, make(Row), parts[:2], [parts, parts[::-1]])


def test_it_is_not_shown_where_a_stage_has_some_of_it_alone(threads: Callable[..., Any]) -> None:
    """The second microbatch's had what the last stage's units put there and nothing of the others, without a word."""
    schedule = schedules.one_f_one_b(2, 3)

    def step(transport: Transport) -> Any:
        cut = split(make(Row), 2, example={"x": X[:2]})
        stages = cut.stages(schedule.placement, transport.rank, "cpu", transport=transport)
        return Executor(stages, schedule, lambda output: output["loss"]).step(x=X)

    output = threads(step, 2)[1]
    assert output["loss"].shape == (3,)
    assert output["others"][0] == "both"
    for withheld in (output["cache"], output["others"][1]["inner"]):
        for look in (lambda it: it.rows, len, bool, list, lambda it: it[0], lambda it: it + 1):
            with pytest.raises(
                StageUsageError, match=r"the Cache that the model returns is filled by units.*use_cache=False"
            ):
                look(withheld)
    assert "Withheld" in repr(output["cache"])


def test_it_is_whole_where_one_stage_has_all_units() -> None:
    cut = split(make(Row), 1, example={"x": X[:2]})
    assert sorted(cut.module(0)(x=X)["cache"].rows) == [0, 1, 2, 3]


def test_it_is_whole_where_units_of_the_last_stage_alone_fill_it(threads: Callable[..., Any]) -> None:
    model = make(Row)
    for layer in list(model.layers)[:3]:
        layer.keeps = False
    schedule = schedules.one_f_one_b(2, 3)

    def step(transport: Transport) -> Any:
        cut = split(model, 2, example={"x": X[:2]})
        stages = cut.stages(schedule.placement, transport.rank, "cpu", transport=transport)
        executor = Executor(stages, schedule, lambda output: output["loss"] + output["cache"].rows[3].sum())
        executor.step(x=X, return_outputs=False)
        return executor.loss

    parts = [model(part) for part in X.chunk(3)]
    expected = sum(part["loss"].item() + part["cache"].rows[3].sum().item() for part in parts) / 3
    assert threads(step, 2)[1].item() == pytest.approx(expected, rel=1e-12)


def test_a_loss_that_needs_it_is_refused(threads: Callable[..., Any]) -> None:
    schedule = schedules.one_f_one_b(2, 3)

    def step(transport: Transport) -> Any:
        cut = split(make(Row), 2, example={"x": X[:2]})
        stages = cut.stages(schedule.placement, transport.rank, "cpu", transport=transport)
        executor = Executor(stages, schedule, lambda output: output["loss"] + output["cache"].rows[3].sum())
        executor.step(x=X)

    with pytest.raises(StageUsageError, match="the Cache that the model returns is filled by units"):
        threads(step, 2)
