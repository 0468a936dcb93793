"""Small values as one message."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stepwell_meta import TensorMeta
from stepwell_p2p import Edge, LoopbackFabric, Op, OpKind, PackingTransport, Recv, Route, Send, plan_packs
from stepwell_p2p.exceptions import P2PUsageError
from stepwell_p2p.testing import TRANSPORT_CHECKS, RecordingTransport, ThreadFabric, check_transport

EDGE = Edge(0, 1)
VALUES = (
    torch.arange(6.0).reshape(2, 3).t(),
    torch.tensor(True),
    torch.randn(1 << 15),  # 128 KiB: not small
    torch.empty(0, 4, dtype=torch.int16),
    torch.randn(3, dtype=torch.complex64),
)


def op(index: int, microbatch: int = 0) -> Op:
    return Op(OpKind.SEND_F, EDGE, 0, microbatch, index)


def ends(values: tuple[torch.Tensor, ...] = VALUES) -> tuple[PackingTransport, PackingTransport, RecordingTransport]:
    fabric = LoopbackFabric(2)
    recorder = RecordingTransport(fabric.transport(0))
    table = {Route(EDGE, 0, is_forward=True): plan_packs([TensorMeta.from_tensor(value) for value in values])}
    return PackingTransport(recorder, table), PackingTransport(fabric.transport(1), table), recorder


def test_small_values_travel_as_one_message_and_large_ones_alone() -> None:
    sender, receiver, recorder = ends()
    sender.post([Send(op(index), value) for index, value in enumerate(VALUES)]).wait()
    assert len(recorder.sizes) == 2
    handle = receiver.post(
        [Recv(op(index).mirror, TensorMeta.from_tensor(value)) for index, value in enumerate(VALUES)]
    )
    got = handle.wait()
    assert got is handle.wait()
    for ours, theirs in zip(got, VALUES, strict=True):
        assert torch.equal(ours, theirs)
        assert ours.stride() == theirs.stride()
        assert ours.dtype == theirs.dtype


def test_a_write_to_one_value_is_no_write_to_another() -> None:
    """They share memory, not version counters: autograd must not think that a saved value has changed."""
    sender, receiver, _ = ends()
    sender.post([Send(op(index), value) for index, value in enumerate(VALUES)]).wait()
    got = receiver.post(
        [Recv(op(index).mirror, TensorMeta.from_tensor(value)) for index, value in enumerate(VALUES)]
    ).wait()
    leaf = got[0].requires_grad_()
    loss = (leaf * leaf).sum()
    got[1].fill_(False)
    got[4].mul_(2)
    loss.backward()
    assert torch.equal(leaf.grad, 2 * VALUES[0])


def test_members_come_in_one_batch_and_as_planned() -> None:
    sender, receiver, _ = ends()
    with pytest.raises(P2PUsageError, match=r"\[3, 4\] are not in the same batch"):
        sender.post([Send(op(index), VALUES[index]) for index in (0, 1, 2)])
    with pytest.raises(P2PUsageError, match=r"planned as torch\.bool of shape \(\) in a pack, but is torch\.float32"):
        receiver.post([Recv(op(1).mirror, TensorMeta((2,), (1,), torch.float32))])


def test_other_stages_edges_and_single_values_are_left_alone() -> None:
    sender, receiver, recorder = ends()
    other = Op(OpKind.SEND_F, EDGE, 1, 0)
    sender.post([Send(other, torch.ones(2))]).wait()
    assert torch.equal(
        receiver.post([Recv(other.mirror, TensorMeta((2,), (1,), torch.float32))]).wait()[0], torch.ones(2)
    )
    assert recorder.sizes == [8]
    assert plan_packs([TensorMeta((2,), (1,), torch.float32), None]) == ()


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


def test_it_is_a_transport() -> None:
    def make(size: int) -> ThreadFabric:
        return ThreadFabric(size, lambda: in_pack(LoopbackFabric(size)))

    check_transport(make, checks=[check for check in TRANSPORT_CHECKS if check.name != "thousands"])


def in_pack(fabric: LoopbackFabric) -> object:
    return lambda rank: PackingTransport(fabric.transport(rank), {})
