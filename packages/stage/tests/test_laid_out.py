"""Values that do not fill their memory, such as slices and expanded tensors, are no others on the stage that takes them.

They came dense: ``reshape`` of one was a view of it there, and a copy in one process, so a change in place gave other numbers;
and code that asked for strides was told others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from split_support import check, make, numbers
from torch import Tensor, nn

from stepwell_stage import split
from stepwell_stage.exceptions import StageUsageError
from stepwell_stage.run._laid_out import laid_out

KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "slice": lambda y: y[:, :2],
    "steps": lambda y: y[:, ::2],
    "expanded": lambda y: y.mean(1, keepdim=True).expand(-1, 2, -1),
    "both": lambda y: y[:, 1:2].expand(-1, 2, -1),
}


@pytest.mark.parametrize("kind", KINDS)
def test_strides_are_those_of_the_sender(kind: str) -> None:
    sent = KINDS[kind](numbers(0))
    got = laid_out(sent.contiguous(), sent.stride())
    assert torch.equal(got, sent)
    assert got.stride() == sent.stride()


def test_elements_that_overlap_stay_as_they_came() -> None:
    dense = torch.arange(6.0).unfold(0, 3, 1).contiguous()
    assert laid_out(dense, (1, 1)) is dense


class Makes(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear, self.kind = nn.Linear(8, 8), kind

    def forward(self, x: Tensor) -> Tensor:
        return KINDS[self.kind](self.linear(x))


class Writes(nn.Module):
    """In a unit, or between units, writes to what is a copy only where there are gaps."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x.reshape(-1).mul_(2.0)
        return self.linear(x + x.contiguous().mul_(3.0)) * (2.0 if x.stride(0) == 32 else 1.0)  # type: ignore[no-any-return]


class Model(nn.Module):
    def __init__(self, kind: str, *, between: bool) -> None:
        super().__init__()
        self.first, self.makes, self.writes, self.last = nn.Linear(8, 8), Makes(kind), Writes(), nn.Linear(8, 8)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        x = self.makes(self.first(x))
        if self.between:
            x.reshape(-1).mul_(2.0)
            x = x + x.contiguous().mul_(3.0) * (2.0 if x.is_contiguous() else 1.0)
        return self.last(self.writes(x))  # type: ignore[no-any-return]


@pytest.mark.parametrize(("schedule", "ranks"), [("1f1b", 4), ("zbv", 2)])
@pytest.mark.parametrize("between", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_who_writes_to_a_copy_of_one(
    threads: Callable[..., Any], kind: str, between: bool, schedule: str, ranks: int
) -> None:
    model = make(lambda: Model(kind, between=between))
    stages = {"first": 0, "makes": 1, "writes": 2, "last": 3}  # of zbv, 1 and 2 are on one rank
    check(
        threads, model, [{"x": numbers(0)}], [[{"x": numbers(n)} for n in range(2)]] * 2, schedule, ranks, stages=stages
    )


class Looks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.makes, self.last = Makes("slice"), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.makes(x)
        return self.last(y) + y.as_strided((len(y), 2, 8), (32, 16, 1), 0)  # type: ignore[no-any-return]


def test_memory_between_the_elements_does_not_cross() -> None:
    with pytest.raises(StageUsageError, match="as_strided looks at the memory between its elements"):
        split(make(Looks), 2, example={"x": numbers(0)})
