"""What any transport must do about order and waiting: programs that run on its ranks, one for each promise."""

from __future__ import annotations

import time

import torch

from stepwell_meta import TensorMeta

from ._check import Check, collect, equal, expect, filled, message, one_way
from ._op import Op, OpKind
from ._placement import Edge
from ._transport import Recv, Send, Transport

CHECKS: list[Check] = []
_promise = collect(CHECKS)


@_promise(2)
def ordering(transport: Transport) -> None:
    """Messages of one op keep their order, large and small ones too, in whatever order their handles are waited for."""
    alternating = [filled(1 << 18 if number % 2 else 2, number) for number in range(20)]
    for messages in ([filled(2, number) for number in range(20)], alternating):
        for handle, value in one_way(transport, [(message(0), value) for value in messages]):
            equal(handle.wait()[0], value)
        for handle, value in reversed(one_way(transport, [(message(0), value) for value in messages])):
            equal(handle.wait()[0], value)


@_promise(2)
def matching(transport: Transport) -> None:
    """Where messages match by op, they do so by all of it, in whatever order either end posts them."""
    if not transport.rules.tagged:
        return
    there = Edge(0, 1)
    ops = [Op(OpKind.SEND_F, there, 0, 1, 1), Op(OpKind.SEND_B, there, 0, 1, 1), Op(OpKind.SEND_F, there, 2, 1, 1)]
    ops += [message(microbatch, index) for microbatch in (-2, 0, 1, 2, 3) for index in (0, 2)]
    if transport.rank == 0:
        for handle in [transport.post([Send(op, filled(2, number))]) for number, op in enumerate(ops)]:
            handle.wait()
    else:
        meta = TensorMeta((2,), (1,), torch.float32)
        handles = {op: transport.post([Recv(op.mirror, meta)]) for op in reversed(ops)}
        for number, op in enumerate(ops):
            equal(handles[op].wait()[0], filled(2, number))


@_promise(3)
def sources(transport: Transport) -> None:
    """A value comes from the rank that its op names, whoever sends first."""
    meta = TensorMeta((2,), (1,), torch.float32)
    if transport.rank == 2:
        handles = [transport.post([Recv(Op(OpKind.RECV_F, Edge(source, 2), 0, 0), meta)]) for source in (1, 0)]
        for source, handle in zip((1, 0), handles, strict=True):
            equal(handle.wait()[0], filled(2, source))
    else:
        time.sleep(0.2 * transport.rank)
        transport.post([Send(Op(OpKind.SEND_F, Edge(transport.rank, 2), 0, 0), filled(2, transport.rank))]).wait()


@_promise(2)
def starting(transport: Transport) -> None:
    """Messages start when they are posted: the peer's wait for one ends although this rank waits for another."""
    rank, meta = transport.rank, TensorMeta((2,), (1,), torch.float32)
    answer = Op(OpKind.SEND_F, Edge(1, 0), 1, 0)
    if rank == 0:
        sending = transport.post([Send(message(0), filled(2, 1))])
        equal(transport.post([Recv(answer.mirror, meta)]).wait()[0], filled(2, 2))
        sending.wait()
        for microbatch in (1, 2):
            transport.post([Send(message(microbatch), filled(2, microbatch))]).wait()
    else:
        transport.post([Recv(message(0).mirror, meta)]).wait()
        transport.post([Send(answer, filled(2, 2))]).wait()
        first, second = [transport.post([Recv(message(microbatch).mirror, meta)]) for microbatch in (1, 2)]
        equal(second.wait()[0], filled(2, 2))
        equal(first.wait()[0], filled(2, 1))


@_promise(2)
def self_sends(transport: Transport) -> None:
    """A rank may send to itself, the receive posted in the same batch or, where messages match by op, before or after."""
    edge = Edge(transport.rank, transport.rank)
    meta = TensorMeta((3,), (1,), torch.float32)
    send, recv = Op(OpKind.SEND_F, edge, 1, 0), Op(OpKind.RECV_F, edge, 1, 0)
    (got,) = transport.post([Send(send, filled(3, 5)), Recv(recv, meta)]).wait()
    equal(got, filled(3, 5))
    if transport.rules.tagged:
        receiving = transport.post([Recv(recv, meta)])
        sending = transport.post([Send(send, filled(3, 6))])
        equal(receiving.wait()[0], filled(3, 6))
        sending.wait()
        sending = transport.post([Send(send, filled(3, 7))])
        equal(transport.post([Recv(recv, meta)]).wait()[0], filled(3, 7))
        sending.wait()


@_promise(2)
def both_directions(transport: Transport) -> None:
    """Two ranks that send to each other at once, again and again, with posts that do not wait for the peer."""
    peer = 1 - transport.rank
    meta = TensorMeta((1 << 15,), (1,), torch.float32)
    handles = []
    for microbatch in range(8):
        send = Send(Op(OpKind.SEND_F, Edge(transport.rank, peer), 0, microbatch), filled(1 << 15, microbatch))
        recv = Recv(Op(OpKind.RECV_F, Edge(peer, transport.rank), 0, microbatch), meta)
        if transport.rules.tagged:
            handles.append((transport.post([send]), transport.post([recv])))
        else:
            both = transport.post([send, recv])
            handles.append((both, both))
    for microbatch, (sending, receiving) in enumerate(handles):
        sending.wait()
        equal(receiving.wait()[0], filled(1 << 15, microbatch))


@_promise(2)
def early_and_late(transport: Transport) -> None:
    """A receive may be posted long before its send, and long after it; posting never blocks. A sent tensor is free after wait."""
    meta = TensorMeta((4,), (1,), torch.float32)
    for microbatch, late in enumerate((0, 1)):
        if transport.rank == late:
            time.sleep(0.4)
        start = time.monotonic()
        value = filled(4, 1)
        if transport.rank == 0:
            handle = transport.post([Send(message(microbatch), value)])
        else:
            handle = transport.post([Recv(message(microbatch).mirror, meta)])
        expect(time.monotonic() - start < 0.3, "posting took as long as the peer did")
        got = handle.wait()
        expect(len(got) == transport.rank, f"{len(got)} values of {transport.rank}")
        if transport.rank == 1:
            equal(got[0], value)
        value.fill_(-1)


@_promise(2)
def thousands(transport: Transport) -> None:
    """3,000 messages under way at once."""
    messages = [(message(number % 500, number // 500), filled(8, number)) for number in range(3000)]
    for handle, value in one_way(transport, messages):
        equal(handle.wait()[0], value)


@_promise(2)
def buffered(transport: Transport) -> None:
    """Where a send is done when it is posted, it is so however much lies unread: both ranks send 48 MiB before they receive."""
    if transport.rules.rendezvous:
        return
    rank, peer = transport.rank, 1 - transport.rank
    numels = [1 << 20] * 8 + [1 << 11] * 2000
    for number, numel in enumerate(numels):
        send = Send(Op(OpKind.SEND_F, Edge(rank, peer), 0, number % 500, number // 500), filled(numel, number))
        transport.post([send]).wait()
    for number, numel in enumerate(numels):
        op = Op(OpKind.RECV_F, Edge(peer, rank), 0, number % 500, number // 500)
        (got,) = transport.post([Recv(op, TensorMeta((numel,), (1,), torch.float32))]).wait()
        equal(got, filled(numel, number))
