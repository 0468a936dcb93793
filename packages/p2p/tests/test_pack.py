"""Small values as one message."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stepwell_meta import TensorMeta
from stepwell_p2p import Edge, LoopbackFabric, Op, OpKind, Packing, Transport, plan_packs
from stepwell_p2p.exceptions import P2PUsageError
from stepwell_p2p.testing import RecordingTransport

EDGE = Edge(0, 1)
VALUES = (
    torch.arange(6.0).reshape(2, 3).t(),
    torch.tensor(True),
    torch.randn(1 << 15),  # 128 KiB: not small
    torch.empty(0, 4, dtype=torch.int16),
    torch.randn(3, dtype=torch.complex64).conj(),
)
METAS = [TensorMeta.from_tensor(value) for value in VALUES]


def ops(count: int = len(VALUES)) -> list[Op]:
    return [Op(OpKind.SEND_F, EDGE, 0, 0, index) for index in range(count)]


def ends() -> tuple[RecordingTransport, Transport]:
    fabric = LoopbackFabric(2)
    return RecordingTransport(fabric.transport(0)), fabric.transport(1)


def cross(packing: Packing, values: list[torch.Tensor]) -> tuple[list[torch.Tensor], list[int]]:
    """The values at the other end, and the sizes of the messages."""
    sender, receiver = ends()
    names = ops(len(values))
    sender.post(packing.sends(names, values)).wait()
    handle = packing.unpack(receiver.post(packing.recvs([op.mirror for op in names])))
    got = handle.wait()
    assert got is handle.wait()
    return list(got), sender.sizes


def test_small_values_travel_as_one_message_and_large_ones_alone() -> None:
    got, sizes = cross(Packing(METAS), list(VALUES))
    assert sorted(sizes) == [32 + 16 + 32, 1 << 17]  # 24 and 1 bytes, nothing, 24 bytes, each from a multiple of 16 on
    for ours, theirs in zip(got, VALUES, strict=True):
        assert torch.equal(ours, theirs)
        assert ours.stride() == theirs.stride()
        assert ours.dtype == theirs.dtype


def test_a_write_to_one_value_is_no_write_to_another() -> None:
    """They share memory, not version counters: autograd must not think that a saved value has changed."""
    got, _ = cross(Packing(METAS), list(VALUES))
    leaf = got[0].requires_grad_()
    loss = (leaf * leaf).sum()
    got[1].fill_(False)
    got[4].mul_(2)
    loss.backward()
    assert torch.equal(leaf.grad, 2 * VALUES[0])


def test_what_needs_no_copy_is_not_copied() -> None:
    """A value alone, and a large one, are sent from their own memory."""
    packing = Packing(METAS)
    by_index = {send.op.index: send for send in packing.sends(ops(), VALUES)}
    assert by_index[2].tensor is VALUES[2]
    alone = torch.ones(2)
    (send,) = Packing([TensorMeta.from_tensor(alone)]).sends(ops(1), [alone], owned=True)
    assert (send.tensor, send.owned) == (alone, True)
    assert packing.messages[0] == (0, TensorMeta((80,), (1,), torch.uint8))


def test_other_values_than_planned_are_refused_before_anything_leaves() -> None:
    packing = Packing(METAS)
    with pytest.raises(P2PUsageError, match="expected 5 values to pack, got 4"):
        packing.sends(ops(4), VALUES[:4])
    wrong = (*VALUES[:1], torch.ones(2), *VALUES[2:])
    with pytest.raises(
        P2PUsageError, match=r"value 1 is planned as torch\.bool of shape \(\) in a pack, but is torch\.flo"
    ):
        packing.sends(ops(), wrong)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.one_of(st.none(), st.integers(0, 200)), max_size=12))
def test_packs_hold_each_small_value_once_without_overlap(sizes: list[int | None]) -> None:
    metas = [None if size is None else TensorMeta((size,), (1,), torch.uint8) for size in sizes]
    small = [index for index, size in enumerate(sizes) if size is not None and size <= 100]
    packs = plan_packs(metas, small=100)
    assert [index for pack in packs for index in pack.indices] == (small if len(small) > 1 else [])
    for pack in packs:
        ends_at = [offset + meta.nbytes for offset, meta in zip(pack.offsets, pack.metas, strict=True)]
        assert all(offset % 16 == 0 for offset in pack.offsets)
        assert all(end <= start for end, start in zip(ends_at, [*pack.offsets[1:], pack.nbytes], strict=True))


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 200), max_size=8))
def test_any_values_arrive(sizes: list[int]) -> None:
    values = [torch.randint(255, (size,), dtype=torch.uint8) for size in sizes]
    packing = Packing([TensorMeta.from_tensor(value) for value in values], small=100)
    got, messages = cross(packing, values)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(got, values, strict=True))
    small = sum(size <= 100 for size in sizes)
    assert len(messages) == len(packing.messages) == len(sizes) - max(0, small - 1)


def test_one_element_with_a_stride_is_packed_as_any_other() -> None:
    """A column of a batch of one row counts as contiguous, and torch did not show its bytes."""
    values = [torch.arange(4.0).reshape(1, 4)[:, 1], torch.arange(6.0).reshape(2, 1, 3)[:1, :, 2], torch.ones(2)]
    assert values[0].is_contiguous()
    (pack,) = plan_packs([TensorMeta.from_tensor(value) for value in values])
    got = pack.unload(pack.load(values))
    assert [value.tolist() for value in got] == [[1.0], [[2.0]], [1.0, 1.0]]
