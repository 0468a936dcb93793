"""The order in which receives are posted, where some are known and some are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from stepwell_meta import TensorMeta, decode, encode
from stepwell_meta.exceptions import PipeliningMetadataError
from stepwell_p2p import Edge, LoopbackFabric, Op, OpKind, Rules, Send, Transport, send_values
from stepwell_stage.run._inbox import Expected, Inbox, Key

EDGE = Edge(0, 1)
FOUR = TensorMeta((4,), (1,), torch.float32)


def op(kind: OpKind, microbatch: int) -> Op:
    return Op(kind, EDGE, 0, microbatch)


def key(microbatch: int) -> Key:
    return (True, 1, 0, microbatch)


def pair(*, tagged: bool) -> tuple[Transport, Transport]:
    fabric = LoopbackFabric(2, rules=Rules(tagged=tagged, rendezvous=False), timeout=5)
    return fabric.transport(0), fabric.transport(1)


def expected(microbatch: int, look: Callable[[], Any]) -> Expected:
    return Expected(key(microbatch), lambda count: [op(OpKind.RECV_F, microbatch)] * count, look)


@pytest.mark.parametrize("tagged", [True, False])
def test_what_a_header_says_lets_the_rest_of_the_line_be_received(*, tagged: bool) -> None:
    sender, receiver = pair(tagged=tagged)
    inbox = Inbox(receiver)
    looks: list[Any] = []
    inbox.expect(expected(0, lambda: lambda payload: looks.append(decode(payload))))
    inbox.expect(expected(1, lambda: [looks[0]] if looks else None))
    inbox.expect(expected(2, lambda: [looks[0]] if looks else None))
    send_values(sender, op(OpKind.SEND_F, 0), encode(FOUR), [torch.full((4,), 0.0)])
    for microbatch in (1, 2):
        sender.post([Send(op(OpKind.SEND_F, microbatch), torch.full((4,), float(microbatch)))])
    assert inbox.take(key(2))[0].tolist() == [2.0] * 4  # asked for first, sent last
    assert inbox.take(key(0))[0].tolist() == [0.0] * 4
    assert inbox.take(key(1))[0].tolist() == [1.0] * 4


def test_nothing_is_received_where_nothing_crosses() -> None:
    _, receiver = pair(tagged=True)
    inbox = Inbox(receiver)
    inbox.expect(expected(0, list))
    assert inbox.take(key(0)) == ()


def test_what_is_never_known_is_an_error() -> None:
    _, receiver = pair(tagged=True)
    inbox = Inbox(receiver)
    inbox.expect(expected(3, lambda: None))
    with pytest.raises(PipeliningMetadataError, match="what stage 0 sends to stage 1 in microbatch 3 is not known yet"):
        inbox.take(key(3))
