"""Values that do not fill their memory, such as slices and expanded tensors, are no others on the stage that takes them.

They came dense: ``reshape`` of one was a view of it there, and a copy in one process, so a change in place gave other numbers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from split_support import check, make, numbers
from torch import Tensor, nn

from stepwell_meta import TensorMeta
from stepwell_stage import split
from stepwell_stage.exceptions import StageUsageError
from stepwell_stage.run._laid_out import gaps_of, laid_out

KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "slice": lambda y: y[:, :2],
    "steps": lambda y: y[:, ::2],
    "expanded": lambda y: y.mean(1, keepdim=True).expand(-1, 2, -1),
    "both": lambda y: y[:, 1:2].expand(-1, 2, -1),
}


def mergeable(tensor: Tensor) -> list[bool]:
    """Of each dim and the next whether a view may make one of them."""
    dims = [(size, step) for size, step in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]
    return [step == size * inner for (_, step), (size, inner) in itertools.pairwise(dims)]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(shape=st.lists(st.integers(1, 4), min_size=1, max_size=4), data=st.data())
def test_what_is_a_copy_stays_one(shape: list[int], data: st.DataObject) -> None:
    """Of any slice of any permutation, expanded or not: with the same values, and without the memory of what it is a slice of."""
    whole = torch.arange(float(math.prod(shape))).view(shape).permute(data.draw(st.permutations(range(len(shape)))))
    slices = [data.draw(st.tuples(st.integers(0, size - 1), st.integers(1, 3))) for size in whole.shape]
    sent = whole[tuple(slice(start, None, step) for start, step in slices)]
    if data.draw(st.booleans()):
        sent = sent.unsqueeze(0).expand(3, *sent.shape)
    strides = gaps_of(TensorMeta.from_tensor(sent))
    assert (strides is None) == TensorMeta.from_tensor(sent).is_dense
    got = sent.contiguous() if strides is None else laid_out(sent.contiguous(), strides)
    assert torch.equal(got, sent)
    assert got.is_contiguous() == sent.is_contiguous() or strides is None
    if strides is not None:
        assert mergeable(got) == mergeable(sent)
        assert got.untyped_storage().nbytes() <= 2 * sent.untyped_storage().nbytes()


def test_a_part_of_a_large_tensor_takes_little_memory() -> None:
    sent = torch.empty(8, 4096, 1024, device="meta")[:, :1, ::2]
    strides = gaps_of(TensorMeta.from_tensor(sent))
    assert strides is not None
    assert laid_out(torch.empty(sent.shape), strides).untyped_storage().nbytes() < 3 * sent.numel() * sent.itemsize


def test_elements_that_overlap_stay_as_they_came() -> None:
    assert gaps_of(TensorMeta.from_tensor(torch.arange(6.0).unfold(0, 3, 1))) is None


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
        return self.linear(x + x.contiguous().mul_(3.0)) * (2.0 if x.is_contiguous() else 1.0)  # type: ignore[no-any-return]


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
