"""Tags tell all messages of a pair of ranks apart."""

from __future__ import annotations

import itertools

import pytest

from stepwell_p2p import Edge, Op, OpKind
from stepwell_p2p._op import MEETING
from stepwell_p2p._tags import check_of, tag_of
from stepwell_p2p.exceptions import P2PUsageError


def test_every_message_has_its_own_tag() -> None:
    kinds, stages, microbatches, indices = (
        [OpKind.SEND_F, OpKind.SEND_B],
        [0, 1, 255],
        [-256, -1, 0, 1, 3839],
        [0, 1, 63],
    )
    ops = [Op(kind, Edge(0, 1), *numbers) for kind, *numbers in itertools.product(kinds, stages, microbatches, indices)]
    tags = {tag_of(op) for op in ops}
    assert len(tags) == len(ops)
    assert all(0 <= tag < 2**31 for tag in tags)
    assert all(tag_of(op) == tag_of(op.mirror) for op in ops)


def test_the_check_bits_are_free() -> None:
    tag = tag_of(Op(OpKind.SEND_F, Edge(0, 1), 3, 4, 5))
    checks = {check_of((size,), "torch.float32") for size in range(200)}
    assert tag & 15 == 0
    assert checks == set(range(16))
    assert check_of((2, 3), "torch.float32") != check_of((2, 3), "torch.float16")


@pytest.mark.parametrize(
    ("stage", "microbatch", "index"), [(256, 0, 0), (0, 3840, 0), (0, -257, 0), (0, 0, 64), (-1, 0, 0)]
)
def test_numbers_without_a_tag_are_refused(stage: int, microbatch: int, index: int) -> None:
    with pytest.raises(P2PUsageError, match="has no tag on this backend"):
        tag_of(Op(OpKind.SEND_F, Edge(0, 1), stage, microbatch, index))


def test_messages_outside_microbatches_are_named_without_their_numbers() -> None:
    """Whoever waited for the others at the start was told of "microbatch -256"."""
    meeting, setup = (str(Op(OpKind.RECV_F, Edge(2, 1), 0, number)) for number in (MEETING, -1))
    assert meeting == "the meeting of all ranks at the opening of channels (rank 2 to rank 1)"
    assert setup == "RECV_F of stage 0, outside microbatches, value 0 (rank 2 to rank 1)"
