"""Cutting and joining by specs, beside torch's own functions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from stage_support import Threads, build, step
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import microbatch as torchs
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.attention.flex_attention import create_block_mask

from stepwell_meta.exceptions import StepwellError
from stepwell_meta.testing import WorkerPool
from stepwell_p2p import Transport
from stepwell_stage import Executor, TensorChunkSpec, merge_chunks, split_args_kwargs_into_chunks
from stepwell_stage.exceptions import StageUsageError
from stepwell_stage.run._chunks import BY_RULE, with_specs
from stepwell_stage.run._microbatch import split
from stepwell_stage.schedules import gpipe


def assert_same(ours: Any, theirs: Any) -> None:
    """The same values in the same containers."""
    assert type(ours) is type(theirs)
    if isinstance(ours, dict):
        assert ours.keys() == theirs.keys()
        ours, theirs = list(ours.values()), list(theirs.values())
    if isinstance(ours, tuple | list):
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            assert_same(one, other)
    elif isinstance(ours, torch.Tensor):
        assert torch.equal(ours, theirs)
    else:
        assert ours == theirs


ARGS = (torch.arange(24.0).reshape(8, 3), [torch.arange(16).reshape(2, 8), {"scale": 2.0}])
KWARGS = {"mask": torch.arange(8), "name": "x"}


@pytest.mark.parametrize("chunks", [1, 2, 3, 8])
def test_the_default_is_torchs(chunks: int) -> None:
    args = (ARGS[0], [torch.arange(16).reshape(8, 2), {"scale": 2.0}])
    ours = split_args_kwargs_into_chunks(args, KWARGS, chunks)
    theirs = torchs.split_args_kwargs_into_chunks(args, KWARGS, chunks)
    assert_same(ours[0], theirs[0])
    assert_same(ours[1], theirs[1])
    assert_same(merge_chunks([part[0] for part in ours[0]]), args[0])


def test_no_more_chunks_than_rows_as_in_torch() -> None:
    ours, _ = split_args_kwargs_into_chunks((torch.zeros(3, 2),), None, 5)
    theirs, _ = torchs.split_args_kwargs_into_chunks((torch.zeros(3, 2),), None, 5)
    assert len(ours) == len(theirs) == 3


def test_specs_are_torchs_own_or_ours() -> None:
    args_spec = (torchs.TensorChunkSpec(0), [torchs.TensorChunkSpec(1), {"scale": torchs._Replicate()}])
    kwargs_spec = {"mask": torchs._Replicate(), "name": torchs._Replicate()}
    theirs = torchs.split_args_kwargs_into_chunks(ARGS, KWARGS, 4, args_spec, kwargs_spec)
    ours = split_args_kwargs_into_chunks(
        ARGS,
        KWARGS,
        4,
        (TensorChunkSpec(0), [TensorChunkSpec(1), None]),
        {"mask": None, "name": None},
    )
    assert_same(ours, split_args_kwargs_into_chunks(ARGS, KWARGS, 4, args_spec, kwargs_spec))
    assert_same(ours[0], theirs[0])
    assert_same(ours[1], theirs[1])


def test_specs_from_dims() -> None:
    assert TensorChunkSpec.from_tuple((0, 1)) == (TensorChunkSpec(0), TensorChunkSpec(1))
    assert TensorChunkSpec.from_dict({"ids": 1}) == {"ids": TensorChunkSpec(1)}


def test_a_step_cuts_by_the_same_specs() -> None:
    value, spec = with_specs((ARGS[0],), dict(KWARGS), None, {"mask": None, "not_here": TensorChunkSpec(0)})
    parts = split(value, 4, what="inputs", spec=spec)
    assert [part[0][0].shape for part in parts] == [(2, 3)] * 4
    assert all(part[1]["mask"] is KWARGS["mask"] for part in parts)


@pytest.mark.parametrize(
    ("value", "spec", "words"),
    [
        (torch.zeros(3, 2), TensorChunkSpec(2), "has no dim 2"),
        (torch.zeros(3, 2), TensorChunkSpec(-1), "a batch of 2 cannot be cut into 3"),
        (5, TensorChunkSpec(0), "only tensors are cut, got int"),
        (torch.zeros(3), torchs.sum_reducer, "says how results are put together"),
        (
            torch.zeros(3, 2).to_sparse(),
            TensorChunkSpec(0),
            "layout torch.sparse_coo cannot be cut along dim 0: cut it yourself",
        ),
        (torch.zeros(3), "batch", "a spec is a TensorChunkSpec or None"),
        ([torch.zeros(3)], [TensorChunkSpec(0), None], "do not have the structure"),
    ],
)
def test_a_spec_that_does_not_fit_is_refused(value: Any, spec: Any, words: str) -> None:
    with pytest.raises(StageUsageError, match=words):
        split(value, 3, what="inputs", spec=spec)


def test_there_is_one_spec_for_each_positional_argument() -> None:
    with pytest.raises(StageUsageError, match="1 specs, but there are 2 positional"):
        with_specs((1, 2), {}, (None,), None)
    assert with_specs((), {"a": 1}, (None,), None) == (((), {"a": 1}), ((), {"a": BY_RULE}))  # a rank without inputs


def test_merging_by_specs_as_torch_does() -> None:
    chunks = [{"x": torch.full((2, 3), float(n)), "loss": torch.tensor(float(n)), "tag": "t"} for n in range(3)]
    reducer = torchs._CustomReducer(torch.tensor(0.0), lambda one, other: one + other)
    theirs = torchs.merge_chunks(chunks, {"x": torchs.TensorChunkSpec(1), "loss": reducer, "tag": None})
    ours = merge_chunks(chunks, {"x": TensorChunkSpec(1), "loss": reducer, "tag": None})
    assert_same(ours["x"], theirs["x"])
    assert_same(ours["loss"], theirs["loss"])
    assert ours["tag"] == theirs["tag"] == "t"


def test_what_cannot_be_merged_is_refused() -> None:
    with pytest.raises(StageUsageError, match="no chunks"):
        merge_chunks([])
    with pytest.raises(StageUsageError, match="must be the same in every chunk, but microbatch 1 has 2"):
        merge_chunks([(1,), (2,)], (None,))
    with pytest.raises(StageUsageError, match="microbatch 1 has the structure"):
        merge_chunks([torch.zeros(1), [torch.zeros(1)]])
    with pytest.raises(StageUsageError, match=r"shapes \[\(1, 2\), \(1, 3\)\] cannot be joined along dim 0"):
        merge_chunks([torch.zeros(1, 2), torch.zeros(1, 3)])


def test_a_batch_that_cannot_be_cut_is_an_error_on_every_rank(threads: Threads) -> None:
    """Only the rank that was to cut it heard of it; the others waited for the step to begin."""

    def run(transport: Transport) -> str:
        executor = build(transport, [nn.Linear(2, 2), nn.Linear(2, 2)], gpipe(2, 2))
        with pytest.raises(StageUsageError) as raised:
            step(executor, torch.ones(4, 2).to_sparse(), torch.ones(4, 2))
        return str(raised.value)

    first, second = threads(run, 2)
    assert second == f"the first stage's rank refused the step: {first}"


class Widens(nn.Module):
    """Each microbatch's output has one more column than the one before."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.columns = nn.Linear(2, 8), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.columns += 1
        result: torch.Tensor = self.linear(x)[:, : self.columns]
        return result


def two_steps(executor: Executor) -> None:
    for _ in range(2):
        step(executor, torch.ones(4, 2), torch.ones(4, 2))


@pytest.mark.parametrize("late", [False, True], ids=["wrong from the first", "wrong from the second"])
def test_outputs_that_cannot_be_joined_end_the_step_on_every_rank(threads: Threads, late: bool) -> None:
    """Only the last rank heard of it, after all had run; the others' next step waited for a rank that was gone."""

    def run(transport: Transport) -> tuple[str, bool]:
        modules = [nn.Linear(2, 2), Widens() if late else nn.Linear(2, 2)]
        spec = None if late else TensorChunkSpec(3)
        executor = build(transport, modules, gpipe(2, 2), loss_fn=lambda y, _: y.sum(), output_merge_spec=spec)
        with pytest.raises(StepwellError) as raised:
            two_steps(executor)
        return str(raised.value), any(parameter.grad is not None for parameter in executor.parameters())

    (first, has_grad), (second, also) = threads(run, 2)
    words = "cannot be joined along dim 0" if late else "has no dim 3"
    assert words in first
    assert words in second
    assert late or not (has_grad or also)  # what can be found early is, before anything runs backward


def test_p044_a_block_mask_is_cut_with_its_function() -> None:
    """Each part of a mask that looks at the batch index must look at that of the whole batch."""

    def own_row(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (q >= kv) & (q < 32 * (b + 1))

    mask = create_block_mask(own_row, 4, None, 128, 128, device="cpu", BLOCK_SIZE=32)
    parts = [kwargs["mask"] for kwargs in split_args_kwargs_into_chunks((), {"mask": mask}, 3)[1]]
    parts_of_step = split({"x": torch.zeros(4, 1), "mask": mask}, 3, what="inputs")
    dense = mask.to_dense()
    start = 0
    for part, other in zip(parts, parts_of_step, strict=True):
        rows = part.shape[0]
        assert torch.equal(part.to_dense(), dense[start : start + rows])
        assert torch.equal(other["mask"].to_dense(), part.to_dense())
        index = torch.tensor
        for b in range(rows):
            seen = part.mask_mod(index(b), index(0), index(40), index(3))
            assert bool(seen) is bool(own_row(start + b, 0, 40, 3))
        start += rows
    shared = create_block_mask(own_row, None, None, 128, 128, device="cpu", BLOCK_SIZE=32)
    assert all(part["m"] is shared for part in split({"x": torch.zeros(4, 1), "m": shared}, 2, what="inputs"))


def cut_dtensors() -> None:
    mesh = init_device_mesh("cpu", (2,))
    for placement, dim, chunks in [(Shard(0), 0, 2), (Shard(0), 0, 3), (Shard(1), 0, 3), (Replicate(), 1, 2)]:
        full = torch.arange(48.0).reshape(8, 6)
        whole = DTensor.from_local(
            full.chunk(2, placement.dim)[mesh.get_local_rank()] if isinstance(placement, Shard) else full,
            mesh,
            [placement],
        )
        parts, _ = split_args_kwargs_into_chunks((whole,), None, chunks, (TensorChunkSpec(dim),))
        values = [part[0] for part in parts]
        for value in values:
            # the sizes that a chunk says are those that it has: gathering it needs both
            assert value.full_tensor().shape == value.shape
        assert sum(value.shape[dim] for value in values) == full.shape[dim]
        merged = merge_chunks(values, TensorChunkSpec(dim))
        assert merged.placements == whole.placements
        assert torch.equal(merged.full_tensor(), full)
    odd = DTensor.from_local(torch.zeros(3 - mesh.get_local_rank(), 1), mesh, [Shard(0)], shape=(5, 1), stride=(1, 1))
    assert [part[0].shape[0] for part in split_args_kwargs_into_chunks((odd,), None, 2)[0]] == [3, 2]


def test_dtensors_are_cut_and_joined_shard_by_shard(workers: WorkerPool) -> None:
    """torch's own function says wrong sizes where a shard's rows do not divide: 8 rows on 2 ranks in 3 chunks are 4, 2, 2."""
    workers.run(cut_dtensors, 2, deadline=40)
