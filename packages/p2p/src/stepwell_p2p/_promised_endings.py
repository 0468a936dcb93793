"""What any transport must refuse, and how all ranks end: programs that run on its ranks, one for each promise."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable

import torch

from stepwell_meta import TensorMeta

from ._check import Check, collect, equal, exchange, expect, filled, message, raises, receive
from ._fabrics import die
from ._op import Op, OpKind
from ._placement import Edge
from ._transport import Recv, Send, Transport
from .exceptions import P2PUsageError, PeerFailure, TransportError

CHECKS: list[Check] = []
_promise = collect(CHECKS)


@_promise(2)
def refusals(transport: Transport) -> None:
    """Ops that cannot be posted here are refused when they are posted, with all of their batch; so is everything after close."""
    rank, peer, meta = transport.rank, 1 - transport.rank, TensorMeta((1,), (1,), torch.float32)
    one = torch.ones(1)
    wrong: list[Send | Recv] = [
        Send(Op(OpKind.SEND_F, Edge(peer, rank), 0, 0), one),  # starts elsewhere
        Recv(Op(OpKind.RECV_F, Edge(rank, peer), 0, 0), meta),  # ends elsewhere
        Send(Op(OpKind.SEND_F, Edge(rank, 7), 0, 0), one),  # there is no rank 7
        Recv(Op(OpKind.RECV_F, Edge(-1, rank), 0, 0), meta),  # nor one below 0
        Send(Op(OpKind.RECV_F, Edge(peer, rank), 0, 0), one),  # a Send with a receive's op
        Recv(Op(OpKind.RECV_F, Edge(peer, rank), 0, 0), meta, torch.empty(2)),  # a buffer of another shape
    ]
    for item in wrong:
        raises(P2PUsageError, functools.partial(transport.post, [item]))
        good = Send(Op(OpKind.SEND_F, Edge(rank, peer), 0, 0), -one)
        raises(P2PUsageError, functools.partial(transport.post, [good, item]))
    (got,) = exchange(transport, peer, one, meta)
    equal(got, one)
    known = Send(Op(OpKind.RECV_F, Edge(peer, rank), 0, 0), one)  # posted before, as the receive that it is
    raises(P2PUsageError, lambda: transport.post([known]))
    transport.close()
    transport.close()
    raises(P2PUsageError, lambda: transport.post([Send(Op(OpKind.SEND_F, Edge(rank, peer), 0, 0), one)]))


@_promise(2)
def too_much(transport: Transport) -> None:
    """Of a message that is larger than its receive, nothing is cut off: both ends' shapes are named."""
    _disagree(transport, sent=9, expected=5)


@_promise(2)
def too_little(transport: Transport) -> None:
    """Of a message that is smaller than its receive, nothing is made up: both ends' shapes are named."""
    _disagree(transport, sent=3, expected=5)


@_promise(4)
def abort(transport: Transport) -> None:
    """One rank aborts; every one, wherever it waits, raises its reason, also at later waits and posts. The first reason wins."""
    meta = TensorMeta((4,), (1,), torch.float32)
    source = (transport.rank + 1) % transport.size  # a chain of waits that leads to rank 1
    pending = transport.post([Recv(Op(OpKind.RECV_F, Edge(source, transport.rank), 0, 5), meta)])
    start = time.monotonic()
    if transport.rank == 1:
        time.sleep(0.3)
        transport.abort("the reason", stage=1, microbatch=2, action="F")
        transport.abort("another reason")
        expect(time.monotonic() - start < 2.5, "abort blocked")
    else:
        _expect_the_reason(functools.partial(receive, transport, source, meta))
        transport.abort("a reason of another rank", stage=3)
    expect(time.monotonic() - start < 5.0, "it took longer than 5 s")
    _expect_the_reason(pending.wait)
    again = Send(Op(OpKind.SEND_F, Edge(transport.rank, source), 0, 1), torch.ones(4))
    _expect_the_reason(lambda: transport.post([again]).wait())
    if transport.rank == 1:
        time.sleep(0.5)  # it lives on: the others must not need its end


@_promise(3)
def leaving(transport: Transport) -> None:
    """A rank that is done closes its transport, and the others go on."""
    meta = TensorMeta((4,), (1,), torch.float32)
    if transport.rank == 2:
        exchange(transport, 0, filled(4, 2), meta)
        transport.close()
        return
    if transport.rank == 0:
        exchange(transport, 2, filled(4, 0), meta)
    time.sleep(0.3)
    for number in range(3):
        (got,) = exchange(transport, 1 - transport.rank, filled(4, number), meta)
        equal(got, filled(4, number))


@_promise(4, dies=2)
def death(transport: Transport) -> None:
    """One rank ends without a word; every other one raises within seconds, also those that have no link to it."""
    meta = TensorMeta((4,), (1,), torch.float32)
    if transport.rank == 2:
        time.sleep(0.3)
        die()
    source = (transport.rank + 1) % transport.size
    start = time.monotonic()
    failure = raises(PeerFailure, functools.partial(receive, transport, source, meta))
    expect(time.monotonic() - start < 5.0, "it took longer than 5 s")
    expect(failure.rank == 2, f"rank 2 died, but this names another: {failure}")


def _disagree(transport: Transport, *, sent: int, expected: int) -> None:
    seen, meta = Op(OpKind.SEND_F, Edge(1, 0), 1, 0), TensorMeta((1,), (1,), torch.float32)
    if transport.rank == 0:
        with contextlib.suppress(TransportError):
            transport.post([Send(message(0), torch.ones(sent))]).wait()
            # a buffered send is done before anybody can compare: stay until the receiver has
            transport.post([Recv(seen.mirror, meta)]).wait()
    else:
        wanted = TensorMeta((expected,), (1,), torch.float32)
        error = raises(TransportError, lambda: transport.post([Recv(message(0).mirror, wanted)]).wait())
        named = f"({sent},)" in str(error) and f"({expected},)" in str(error)
        expect(named, f"the error does not name both shapes: {error}")
        with contextlib.suppress(TransportError):  # a transport may count such an end as a failure of all
            transport.post([Send(seen, torch.ones(1))]).wait()


def _expect_the_reason(action: Callable[[], object]) -> None:
    failure = raises(PeerFailure, action)
    known = (failure.rank, failure.stage, failure.microbatch, failure.action)
    expect(known == (1, 1, 2, "F") and "the reason" in failure.reason, f"another cause: {failure}")
