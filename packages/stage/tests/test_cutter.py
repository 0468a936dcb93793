"""Batches that look like the one before are cut as that one was, and in no other way than by being looked through."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import stepwell_stage.run._cutter as cutter_module
from stepwell_stage import TensorChunkSpec
from stepwell_stage.exceptions import StageUsageError
from stepwell_stage.run._cutter import Cutter
from stepwell_stage.run._microbatch import Batch

COUNT = 4


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape).to(dtype)


BATCHES = {
    "one tensor": lambda: Batch((numbers(8, 3),)),
    "a batch that M does not divide": lambda: Batch((numbers(11, 3), numbers(11))),
    "one for all": lambda: Batch((numbers(8, 3), numbers(1, 3), numbers())),
    "another dtype": lambda: Batch((numbers(8, 3, dtype=torch.float64),)),
    "by name": lambda: Batch((numbers(8, 3),), {"mask": numbers(8, 5), "scale": numbers(1)}),
    "by name alone": lambda: Batch((), {"ids": numbers(8, 3)}),
    "by other names": lambda: Batch((), {"tokens": numbers(8, 3)}),
    "with words": lambda: Batch((numbers(8, 3),), {"mode": "mean"}),
    "nested": lambda: Batch((numbers(8, 3), [numbers(8), {"a": numbers(8, 2)}])),
    "cut by the caller": lambda: Batch(arg_mbs=[(numbers(size, 3),) for size in (3, 1, 2, 2)]),
    "names cut by the caller": lambda: Batch((numbers(8, 3),), kwarg_mbs=[{"a": numbers(2)} for _ in range(COUNT)]),
}


def flat(values: Any) -> list[Any]:
    leaves, structure = torch.utils._pytree.tree_flatten(values)
    return [structure, *leaves]


def assert_same(ours: Any, theirs: Any) -> None:
    for mine, their in zip(flat(ours), flat(theirs), strict=True):
        assert torch.equal(mine, their) if isinstance(mine, torch.Tensor) else mine == their
        assert not isinstance(mine, torch.Tensor) or mine.dtype is their.dtype


@pytest.mark.parametrize("names", list(itertools.permutations(BATCHES, 2)), ids=" then ".join)
def test_a_batch_is_cut_alike_whatever_came_before(names: tuple[str, str]) -> None:
    """Each step looked through its batch three times, which took as long as twenty actions of a small model."""
    cutter = Cutter(COUNT, None, None)
    for name in (names[0], *[names[1]] * 3):
        batch = BATCHES[name]()
        args, kwargs, cut = cutter.inputs(batch, fewer=False)
        fresh_args, fresh_kwargs, fresh_cut = Cutter(COUNT, None, None).inputs(batch, fewer=False)
        assert_same((args, kwargs), (fresh_args, fresh_kwargs))
        assert_same((args, kwargs), tuple(map(list, zip(*batch.inputs(COUNT, None, None), strict=True))))
        assert cut == fresh_cut
        if batch.kwargs and not batch.is_cut:
            assert_same(cutter.keywords(batch, cut.sizes), Cutter(COUNT, None, None).keywords(batch, cut.sizes))


def test_a_batch_like_the_one_before_is_not_looked_through(monkeypatch: pytest.MonkeyPatch) -> None:
    cutter = Cutter(COUNT, (TensorChunkSpec(1), None), {"mask": TensorChunkSpec(-1)})

    def batch() -> Batch:
        return Batch((numbers(2, 10), numbers(7)), {"mask": numbers(3, 10)}, target=numbers(10, 2))

    _, _, cut = cutter.inputs(batch(), fewer=False)
    cutter.targets(batch(), cut.sizes)
    monkeypatch.setattr(cutter_module, "signature", None)
    monkeypatch.setattr(Batch, "inputs", None)
    second = batch()
    args, kwargs, again = cutter.inputs(second, fewer=False)
    assert again is cut
    assert [tuple(one.shape) for one, _ in args] == [(2, 3), (2, 3), (2, 2), (2, 2)]
    assert all(shared is second.args[1] for _, shared in args)
    assert [tuple(one["mask"].shape) for one in kwargs] == [(3, 3), (3, 3), (3, 2), (3, 2)]
    assert torch.equal(torch.cat([one for one, _ in args], 1), second.args[0])
    monkeypatch.setattr(Batch, "targets", None)
    targets = cutter.targets(second, cut.sizes)
    assert targets is not None
    assert torch.equal(torch.cat(targets), second.target)
    assert [len(one) for one in targets] == [3, 3, 2, 2]


def test_an_evaluations_smaller_batch_does_not_make_a_step_take_one() -> None:
    cutter, batch = Cutter(COUNT, None, None), Batch((numbers(2, 3),), target=numbers(2))
    args, _, cut = cutter.inputs(batch, fewer=True)
    assert len(args) == len(cut.sizes) == 2
    assert len(cutter.targets(batch, cut.sizes) or ()) == 2
    for _ in range(2):
        with pytest.raises(StageUsageError, match="a batch of 2 cannot be cut into 4 microbatches"):
            cutter.inputs(batch, fewer=False)


def test_targets_are_looked_at_again_where_the_samples_lie_otherwise() -> None:
    cutter, batch = Cutter(COUNT, None, None), Batch(target=numbers(8))
    assert [len(one) for one in cutter.targets(batch, (2, 2, 2, 2)) or ()] == [2, 2, 2, 2]
    with pytest.raises(StageUsageError, match="do not go with the inputs' microbatches of 3, 1, 2, 2 samples"):
        cutter.targets(batch, (3, 1, 2, 2))
