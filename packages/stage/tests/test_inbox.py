"""The order in which receives are posted, where some are known and some are not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from stepwell_meta import TensorMeta, decode, encode
from stepwell_meta.exceptions import PipeliningMetadataError
from stepwell_p2p import Edge, LoopbackFabric, Op, OpKind, Packing, Rules, Send, Transport, send_values
from stepwell_stage.run._inbox import Coming, Expected, Inbox

EDGE = Edge(0, 1)
FOUR = TensorMeta((4,), (1,), torch.float32)


def op(kind: OpKind, microbatch: int) -> Op:
    return Op(kind, EDGE, 0, microbatch)


def pair(*, tagged: bool) -> tuple[Transport, Transport]:
    fabric = LoopbackFabric(2, rules=Rules(tagged=tagged, rendezvous=False), timeout=5)
    return fabric.transport(0), fabric.transport(1)


def expect(inbox: Inbox, microbatch: int, look: Callable[[], Any]) -> Expected:
    ticket = Expected(
        inbox, source=0, destination=1, microbatch=microbatch, op=op(OpKind.RECV_F, microbatch), look=look
    )
    inbox.expect(ticket)
    return ticket


def coming(microbatch: int, metas: Sequence[TensorMeta]) -> Coming:
    packing = Packing(metas)
    ops = [Op(OpKind.RECV_F, EDGE, 0, microbatch, index) for index in range(len(metas))]
    return Coming(packing.recvs(ops), packing)


@pytest.mark.parametrize("tagged", [True, False])
def test_what_a_header_says_lets_the_rest_of_the_line_be_received(*, tagged: bool) -> None:
    sender, receiver = pair(tagged=tagged)
    inbox = Inbox(receiver)
    looks: list[Any] = []
    first = expect(inbox, 0, lambda: lambda payload: looks.append(decode(payload)))
    second = expect(inbox, 1, lambda: coming(1, looks) if looks else None)
    third = expect(inbox, 2, lambda: coming(2, looks) if looks else None)
    send_values(sender, op(OpKind.SEND_F, 0), encode(FOUR), [torch.full((4,), 0.0)])
    for microbatch in (1, 2):
        sender.post([Send(op(OpKind.SEND_F, microbatch), torch.full((4,), float(microbatch)))])
    assert third.wait()[0].tolist() == [2.0] * 4  # asked for first, sent last
    assert first.wait()[0].tolist() == [0.0] * 4
    assert second.wait()[0].tolist() == [1.0] * 4


def test_nothing_is_received_where_nothing_crosses() -> None:
    _, receiver = pair(tagged=True)
    inbox = Inbox(receiver)
    assert expect(inbox, 0, lambda: coming(0, [])).wait() == ()


def test_small_values_come_as_one_message() -> None:
    sender, receiver = pair(tagged=True)
    ticket = expect(Inbox(receiver), 0, lambda: coming(0, [FOUR, FOUR]))
    ops = [Op(OpKind.SEND_F, EDGE, 0, 0, index) for index in range(2)]
    sender.post(Packing([FOUR, FOUR]).sends(ops, [torch.zeros(4), torch.ones(4)]))
    assert [value.tolist() for value in ticket.wait()] == [[0.0] * 4, [1.0] * 4]
    assert ticket.wait() is ticket.wait()


def test_what_is_never_known_is_an_error() -> None:
    _, receiver = pair(tagged=True)
    inbox = Inbox(receiver)
    ticket = expect(inbox, 3, lambda: None)
    with pytest.raises(PipeliningMetadataError, match="what stage 0 sends to stage 1 in microbatch 3 is not known yet"):
        ticket.wait()
