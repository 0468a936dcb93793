"""Values that do not fill their memory, such as slices and expanded tensors, are no others on the stage that takes them.

They came dense: ``reshape`` of one was a view of it there, and a copy in one process, so a change in place gave other numbers.
"""

from __future__ import annotations

import copy
import itertools
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from split_support import check, make, numbers
from torch import Tensor, nn

from stepwell_meta import TensorMeta
from stepwell_meta.exceptions import StepwellError
from stepwell_p2p import Transport
from stepwell_stage import Executor, PipelineStage, split
from stepwell_stage.exceptions import StageUsageError
from stepwell_stage.run._laid_out import gaps_of, laid_out
from stepwell_stage.schedules import one_f_one_b

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
    check_laid_out(sent)


def check_laid_out(sent: Tensor) -> None:
    strides = gaps_of(TensorMeta.from_tensor(sent))
    assert (strides is None) == TensorMeta.from_tensor(sent).is_dense
    if strides is not None:
        got = laid_out(sent.contiguous(), strides)
        assert torch.equal(got, sent)
        assert mergeable(got) == mergeable(sent)
        assert not got.is_contiguous()
        assert not got.is_contiguous(memory_format=torch.channels_last) or got.dim() != 4
        assert got.untyped_storage().nbytes() <= 2 ** sent.dim() * sent.nbytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool])
def test_narrow_rows_have_narrow_gaps(dtype: torch.dtype) -> None:
    sent = torch.zeros(100, 8, dtype=dtype)[:, :2]
    strides = gaps_of(TensorMeta.from_tensor(sent))
    assert strides is not None
    assert laid_out(sent.contiguous(), strides).untyped_storage().nbytes() < 2 * sent.nbytes
    check_laid_out(sent)


def test_a_part_of_a_large_tensor_takes_little_memory() -> None:
    sent = torch.empty(8, 4096, 1024, device="meta")[:, :1, ::2]
    strides = gaps_of(TensorMeta.from_tensor(sent))
    assert strides is not None
    assert laid_out(torch.empty(sent.shape), strides).untyped_storage().nbytes() < 3 * sent.numel() * sent.itemsize


def test_overlapping_elements_lie_apart_but_copies_stay_copies() -> None:
    check_laid_out(torch.arange(6.0).unfold(0, 3, 1))


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


class Crops(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[:, :, 1:-1, 1:-1]


class Reads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.last = nn.Conv2d(1, 3, 3, padding=1).double(), nn.Linear(3 * 16, 2).double()

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv(x)
        return self.last(h.view(len(h), -1))  # type: ignore[no-any-return]


def test_a_cropped_image_of_one_channel_is_not_taken_for_channels_last(threads: Callable[..., Any]) -> None:
    """Its one channel had a stride that made the next stage's convolution answer in channels-last."""
    reads = make(Reads)
    x = torch.randn(4, 1, 6, 6, dtype=torch.float64)

    def main(transport: Transport) -> Any:
        module = [Crops(), copy.deepcopy(reads)][transport.rank]
        stage = PipelineStage(module, transport.rank, 2, "cpu")
        executor = Executor(stage, one_f_one_b(2, 2), lambda out: out.sum(), transport=transport)
        return executor.eval(*([x] if executor.is_first else []))

    _, found = threads(main, 2)
    assert torch.equal(found, reads(x[:, :, 1:-1, 1:-1]).detach())


class Differs(nn.Module):
    """Returns a slice in every second microbatch, or in all."""

    def __init__(self, every: int) -> None:
        super().__init__()
        self.linear, self.count, self.every = nn.Linear(8, 8), 0, every

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        part = self.linear(x)[:, :4]
        return part if self.count % self.every == 0 else part.contiguous()


class Doubles(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x.reshape(-1).mul_(2.0)
        return x.sum(1)


def step_of(transport: Transport, every: int, *, declared: bool) -> Any:
    module = [Differs(every), Doubles()][transport.rank]
    looks = [((2, 8), (2, 4)), ((2, 4), (2,))][transport.rank]
    given = dict(
        zip(
            ("input_args", "output_args"),
            (torch.zeros(s, requires_grad=len(s) < 2 or s[1] == 4) for s in looks),
            strict=True,
        )
    )
    stage = PipelineStage(module, transport.rank, 2, "cpu", **(given if declared else {}))
    executor = Executor(stage, one_f_one_b(2, 2), lambda out: out.sum(), transport=transport)
    return executor.step(*([torch.randn(4, 8)] if executor.is_first else []))


def test_outputs_with_gaps_in_some_microbatches_only_are_refused(threads: Callable[..., Any]) -> None:
    def main(transport: Transport) -> str:
        with pytest.raises(StepwellError) as raised:
            step_of(transport, 2, declared=False)
        return str(raised.value)

    for message in threads(main, 2):
        assert "in an earlier microbatch (4, 1)" in message


def test_outputs_with_gaps_where_none_were_declared_bring_a_warning(threads: Callable[..., Any]) -> None:
    def main(transport: Transport) -> int:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            step_of(transport, 1, declared=True)
        return sum("was declared with (4, 1)" in str(one.message) for one in found)

    assert sum(threads(main, 2)) > 0
