"""What any transport must do, as programs that run on its ranks.

Each program is one promise of :class:`stepwell_p2p.Transport`. It is written so that it neither blocks nor mixes messages up
under the weakest rules (first in, first out on one shared channel, sends that complete when received): what only matching by op
allows is behind ``transport.rules.tagged``.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import attrs
import torch

from stepwell_meta import TensorMeta

from ._fabrics import Fabric, die
from ._layout import bytes_of
from ._op import Op, OpKind
from ._placement import Edge
from ._transport import Handle, Recv, Send, Transport
from ._values import receive_values, send_values
from .exceptions import P2PUsageError, PeerFailure, TransportError

_ErrorT = TypeVar("_ErrorT", bound=Exception)
_Program = Callable[[Transport], None]

_DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128, torch.bool,
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64,
    torch.float8_e4m3fn, torch.float8_e5m2,
)  # fmt: skip


class TransportCheckError(AssertionError):
    """A transport does not do what :class:`stepwell_p2p.Transport` promises."""


@attrs.frozen
class Check:
    """One promise.

    Attributes:
        name: for test reports.
        size: how many ranks it takes.
        program: runs on every rank.
        dies: the rank that ends by SIGKILL in it, if one does.
    """

    name: str
    size: int
    program: _Program
    dies: int | None = None


TRANSPORT_CHECKS: list[Check] = []
"""The whole battery, for those who want one test for each check."""


def check_transport(
    make_fabric: Callable[[int], Fabric], *, checks: Iterable[Check] | None = None, deadline: float = 60.0
) -> None:
    """Try every promise of :class:`stepwell_p2p.Transport` on a transport of yours.

    Example::

        check_transport(lambda size: ThreadFabric(size, lambda: LoopbackFabric(size).transport))

    Args:
        make_fabric: from a number of ranks to something that runs a program on them; see :class:`ThreadFabric` and
            :class:`PoolFabric`, which do for most transports.
        checks: which promises; all of ``TRANSPORT_CHECKS`` by default.
        deadline: seconds for each.

    Raises:
        TransportCheckError: the first promise that is not kept, with how every rank ended.
    """
    for check in TRANSPORT_CHECKS if checks is None else checks:
        outcomes = make_fabric(check.size).run(check.program, deadline=deadline)
        wrong = [outcome for outcome in outcomes if outcome.ok is (outcome.rank == check.dies)]
        if wrong:
            report = "\n\n".join(outcome.describe() for outcome in outcomes)
            raise TransportCheckError(f"check {check.name!r} failed on rank {wrong[0].rank}.\n\n{report}")


def _check(size: int, *, dies: int | None = None) -> Callable[[_Program], _Program]:
    def register(program: _Program) -> _Program:
        TRANSPORT_CHECKS.append(Check(program.__name__, size, program, dies))
        return program

    return register


@_check(4)
def pairs(transport: Transport) -> None:
    """Every rank exchanges a value with every other, twice with the same ops, as steps of a training do."""
    for step in range(2):
        for peer in _peers(transport):
            meta = TensorMeta((16,), (1,), torch.float32)
            (got,) = _exchange(transport, peer, _filled(16, transport.rank * 10 + step), meta)
            _equal(got, _filled(16, peer * 10 + step))


@_check(4)
def many_channels(transport: Transport) -> None:
    """Values and gradients of many stages between all pairs, in one batch."""
    batch: list[Send | Recv] = []
    wanted = []
    for kind in (OpKind.SEND_F, OpKind.SEND_B):
        for source in range(transport.size):
            for destination in range(transport.size):
                for stage in (0, 5):
                    op = Op(kind, Edge(source, destination), stage, 0)
                    number = float(hash(op.message) % 10_007)
                    if source != destination and transport.rank == source:
                        batch.append(Send(op, _filled(3, number)))
                    elif source != destination and transport.rank == destination:
                        batch.append(Recv(op.mirror, TensorMeta((3,), (1,), torch.float32)))
                        wanted.append(number)
    for got, number in zip(transport.post(batch).wait(), wanted, strict=True):
        _equal(got, _filled(3, number))


@_check(2)
def ordering(transport: Transport) -> None:
    """Messages of one op keep their order; where messages match by op, receives may come in another order than sends."""
    meta = TensorMeta((2,), (1,), torch.float32)
    for handle, value in _one_way(transport, [(_op(0), _filled(2, value)) for value in range(20)], meta):
        _equal(handle.wait()[0], value)
    if transport.rules.tagged:
        ops = [_op(microbatch) for microbatch in range(20)]
        if transport.rank == 0:
            for handle in [transport.post([Send(op, _filled(2, op.microbatch))]) for op in ops]:
                handle.wait()
        else:
            handles = {op: transport.post([Recv(op.mirror, meta)]) for op in reversed(ops)}
            for op in ops:
                _equal(handles[op].wait()[0], _filled(2, op.microbatch))


@_check(2)
def large(transport: Transport) -> None:
    """64 MiB in both directions at once: nothing may rest on the transport's own buffers."""
    numel = 16 << 20
    peer = 1 - transport.rank
    mine = torch.arange(numel, dtype=torch.int32) + transport.rank
    (got,) = _exchange(transport, peer, mine, TensorMeta((numel,), (1,), torch.int32))
    _equal(got, torch.arange(numel, dtype=torch.int32) + peer)


@_check(2)
def sizes(transport: Transport) -> None:
    """Nothing at all, one number, and shapes with zeros in them."""
    for shape in [(0,), (), (0, 3), (3, 0, 2), (1, 1, 1), (7, 1, 5)]:
        value = torch.ones(shape) * 3
        (got,) = _exchange(transport, 1 - transport.rank, value, TensorMeta.from_tensor(value))
        _equal(got, value)


@_check(2)
def dtypes(transport: Transport) -> None:
    """Every dtype arrives bit for bit."""
    for dtype in _DTYPES:
        value = torch.arange(128, dtype=torch.uint8).fmod(2).view(dtype)
        (got,) = _exchange(transport, 1 - transport.rank, value, TensorMeta.from_tensor(value))
        _equal(got, value)


@_check(2)
def layouts(transport: Transport) -> None:
    """Values arrive whatever the sender's strides, in the strides that the receiver asks for."""
    base = torch.arange(120.0).reshape(2, 3, 4, 5)
    given = [
        base.transpose(1, 3),
        base[:, :, 1:3],
        base.to(memory_format=torch.channels_last),
        torch.arange(3.0).expand(4, 3),
        torch.tensor(2.0).expand(3, 3),
        (base + 1j * base).conj(),
        base.clone().requires_grad_(),
    ]
    for value in given:
        metas = [TensorMeta.from_tensor(value.detach()), TensorMeta.from_tensor(value.detach().contiguous())]
        for meta in metas:
            (got,) = _exchange(transport, 1 - transport.rank, value, meta)
            _equal(got, value.detach().resolve_conj())
            _expect(got.stride() == meta.as_dense().stride, f"stride {got.stride()}, asked for {meta}")
            _expect(not got.requires_grad, "a received tensor requires grad")


@_check(3)
def mixed_batches(transport: Transport) -> None:
    """One batch with sends and receives of several peers, shapes and dtypes; values in the order of the receives."""
    batch: list[Send | Recv] = []
    wanted = []
    for peer in _peers(transport):
        for index, dtype in enumerate((torch.float32, torch.int64, torch.bool)):
            mine, theirs = Edge(transport.rank, peer), Edge(peer, transport.rank)
            shape = (index + 1, transport.rank + 1)
            batch.append(Send(Op(OpKind.SEND_F, mine, 0, 0, index), torch.full(shape, transport.rank, dtype=dtype)))
            value = torch.full((index + 1, peer + 1), peer, dtype=dtype)
            batch.append(Recv(Op(OpKind.RECV_F, theirs, 0, 0, index), TensorMeta.from_tensor(value)))
            wanted.append(value)
    handle = transport.post(batch)
    got = handle.wait()
    _expect(len(got) == len(wanted), f"{len(got)} values of {len(wanted)}")
    for value, expected in zip(got, wanted, strict=True):
        _equal(value, expected)
    _expect(
        handle.wait() is got or all(a is b for a, b in zip(handle.wait(), got, strict=True)), "a second wait differs"
    )
    _expect(transport.post([]).wait() == (), "an empty batch has values")


@_check(2)
def self_sends(transport: Transport) -> None:
    """A rank may send to itself, the receive posted in the same batch or, where messages match by op, before or after."""
    edge = Edge(transport.rank, transport.rank)
    meta = TensorMeta((3,), (1,), torch.float32)
    send, recv = Op(OpKind.SEND_F, edge, 1, 0), Op(OpKind.RECV_F, edge, 1, 0)
    (got,) = transport.post([Send(send, _filled(3, 5)), Recv(recv, meta)]).wait()
    _equal(got, _filled(3, 5))
    if transport.rules.tagged:
        receiving = transport.post([Recv(recv, meta)])
        sending = transport.post([Send(send, _filled(3, 6))])
        _equal(receiving.wait()[0], _filled(3, 6))
        sending.wait()
        sending = transport.post([Send(send, _filled(3, 7))])
        _equal(transport.post([Recv(recv, meta)]).wait()[0], _filled(3, 7))
        sending.wait()


@_check(2)
def both_directions(transport: Transport) -> None:
    """Two ranks that send to each other at once, again and again, with posts that do not wait for the peer."""
    peer = 1 - transport.rank
    meta = TensorMeta((1 << 15,), (1,), torch.float32)
    handles = []
    for microbatch in range(8):
        send = Send(Op(OpKind.SEND_F, Edge(transport.rank, peer), 0, microbatch), _filled(1 << 15, microbatch))
        recv = Recv(Op(OpKind.RECV_F, Edge(peer, transport.rank), 0, microbatch), meta)
        if transport.rules.tagged:
            handles.append((transport.post([send]), transport.post([recv])))
        else:
            both = transport.post([send, recv])
            handles.append((both, both))
    for microbatch, (sending, receiving) in enumerate(handles):
        sending.wait()
        _equal(receiving.wait()[0], _filled(1 << 15, microbatch))


@_check(2)
def early_and_late(transport: Transport) -> None:
    """A receive may be posted long before its send, and long after it; posting never blocks."""
    meta = TensorMeta((4,), (1,), torch.float32)
    for microbatch, late in enumerate((0, 1)):
        if transport.rank == late:
            time.sleep(0.4)
        start = time.monotonic()
        if transport.rank == 0:
            handle = transport.post([Send(_op(microbatch), _filled(4, 1))])
        else:
            handle = transport.post([Recv(_op(microbatch).mirror, meta)])
        _expect(time.monotonic() - start < 0.3, "posting took as long as the peer did")
        for value in handle.wait():
            _equal(value, _filled(4, 1))


@_check(2)
def thousands(transport: Transport) -> None:
    """3,000 messages under way at once."""
    messages = [(_op(number % 500, number // 500), _filled(8, number)) for number in range(3000)]
    meta = TensorMeta((8,), (1,), torch.float32)
    for handle, value in _one_way(transport, messages, meta):
        _equal(handle.wait()[0], value)


@_check(2)
def buffered(transport: Transport) -> None:
    """Where a send is done when it is posted, it is so however much lies unread: both ranks send 48 MiB before they receive."""
    if transport.rules.rendezvous:
        return
    rank, peer = transport.rank, 1 - transport.rank
    numels = [1 << 20] * 8 + [1 << 11] * 2000
    for number, numel in enumerate(numels):
        send = Send(Op(OpKind.SEND_F, Edge(rank, peer), 0, number % 500, number // 500), _filled(numel, number))
        transport.post([send]).wait()
    for number, numel in enumerate(numels):
        op = Op(OpKind.RECV_F, Edge(peer, rank), 0, number % 500, number // 500)
        (got,) = transport.post([Recv(op, TensorMeta((numel,), (1,), torch.float32))]).wait()
        _equal(got, _filled(numel, number))


@_check(2)
def ownership(transport: Transport) -> None:
    """After its wait a sender may write to what it sent, and a receiver to what it got, and neither sees the other's writes."""
    peer = 1 - transport.rank
    meta = TensorMeta((64,), (1,), torch.float32)
    mine = _filled(64, transport.rank)
    (got,) = _exchange(transport, peer, mine, meta)
    mine.fill_(-1)
    _exchange(transport, peer, _filled(64, 0), meta)  # both have written now
    _equal(got, _filled(64, peer))
    got.add_(5)
    _exchange(transport, peer, _filled(64, 0), meta)
    _equal(mine, _filled(64, -1))
    buffer = torch.empty(64)
    receive = Recv(Op(OpKind.RECV_F, Edge(peer, transport.rank), 0, 0), meta, buffer)
    (got,) = transport.post([Send(Op(OpKind.SEND_F, Edge(transport.rank, peer), 0, 0), mine), receive]).wait()
    _expect(got is buffer, "a receive with a buffer did not return it")
    _equal(got, _filled(64, -1))
    (got,) = _exchange(transport, peer, _filled(64, transport.rank), meta, owned=True)
    got.add_(1)
    _equal(got, _filled(64, peer + 1))


@_check(2)
def values(transport: Transport) -> None:
    """Bytes and tensors that the receiver knows nothing about."""
    sent = (torch.arange(6.0).reshape(2, 3).t(), torch.tensor(True), torch.empty(0, 4, dtype=torch.int16))
    for payload, tensors in ((b"", ()), (b"hello", sent), (bytes(range(256)) * 300, sent[:1])):
        if transport.rank == 0:
            send_values(transport, _op(-1), payload, tensors).wait()
        else:
            bytes_got, got = receive_values(transport, _op(-1).mirror)
            _expect(bytes_got == payload and len(got) == len(tensors), "the value differs")
            for ours, theirs in zip(got, tensors, strict=True):
                _equal(ours, theirs)


@_check(2)
def refusals(transport: Transport) -> None:
    """Ops that cannot be posted here are refused when they are posted, and so is everything after close."""
    rank, peer, meta = transport.rank, 1 - transport.rank, TensorMeta((1,), (1,), torch.float32)
    one = torch.ones(1)
    wrong: list[Send | Recv] = [
        Send(Op(OpKind.SEND_F, Edge(peer, rank), 0, 0), one),  # starts elsewhere
        Recv(Op(OpKind.RECV_F, Edge(rank, peer), 0, 0), meta),  # ends elsewhere
        Send(Op(OpKind.SEND_F, Edge(rank, 7), 0, 0), one),  # there is no rank 7
        Send(Op(OpKind.RECV_F, Edge(peer, rank), 0, 0), one),  # a Send with a receive's op
        Recv(Op(OpKind.RECV_F, Edge(peer, rank), 0, 0), meta, torch.empty(2)),  # a buffer of another shape
    ]
    for item in wrong:
        _raises(P2PUsageError, functools.partial(transport.post, [item]))
    _exchange(transport, peer, one, meta)
    known = Send(Op(OpKind.RECV_F, Edge(peer, rank), 0, 0), one)  # posted before, as the receive that it is
    _raises(P2PUsageError, lambda: transport.post([known]))
    transport.close()
    transport.close()
    _raises(P2PUsageError, lambda: transport.post([Send(Op(OpKind.SEND_F, Edge(rank, peer), 0, 0), one)]))


@_check(2)
def disagreement(transport: Transport) -> None:
    """Ends that disagree about a message's shape learn it: nothing is cut, nothing is made up."""
    seen, meta = Op(OpKind.SEND_F, Edge(1, 0), 1, 0), TensorMeta((1,), (1,), torch.float32)
    if transport.rank == 0:
        with contextlib.suppress(TransportError):
            transport.post([Send(_op(0), torch.ones(9))]).wait()
            # a buffered send is done before anybody can compare: stay until the receiver has
            transport.post([Recv(seen.mirror, meta)]).wait()
    else:
        error = _raises(
            TransportError, lambda: transport.post([Recv(_op(0).mirror, TensorMeta((5,), (1,), torch.float32))]).wait()
        )
        _expect("(5,)" in str(error) and "(9,)" in str(error), f"the error does not name both shapes: {error}")
        with contextlib.suppress(TransportError):  # a transport may count such an end as a failure of all
            transport.post([Send(seen, torch.ones(1))]).wait()


@_check(4)
def abort(transport: Transport) -> None:
    """One rank aborts; every other one, wherever it waits, raises its reason, also at later posts. The first reason wins."""
    meta = TensorMeta((4,), (1,), torch.float32)
    if transport.rank == 1:
        time.sleep(0.3)
        transport.abort("the reason", stage=1, microbatch=2, action="F")
        transport.abort("another reason")
        time.sleep(0.5)  # it lives on: the others must not need its end
    else:
        source = (transport.rank + 1) % transport.size  # a chain of waits that leads to rank 1
        start = time.monotonic()
        failure = _raises(PeerFailure, functools.partial(_receive, transport, source, meta))
        _expect(time.monotonic() - start < 5.0, "the reason took longer than 5 s")
        known = (failure.rank, failure.stage, failure.microbatch, failure.action)
        _expect(known == (1, 1, 2, "F") and "the reason" in failure.reason, f"another cause: {failure}")
    again = Send(Op(OpKind.SEND_F, Edge(transport.rank, (transport.rank + 1) % transport.size), 0, 1), torch.ones(4))
    _raises(PeerFailure, lambda: transport.post([again]).wait())


@_check(4, dies=2)
def death(transport: Transport) -> None:
    """One rank ends without a word; every other one raises within seconds, also those that have no link to it."""
    meta = TensorMeta((4,), (1,), torch.float32)
    if transport.rank == 2:
        time.sleep(0.3)
        die()
    source = (transport.rank + 1) % transport.size
    start = time.monotonic()
    failure = _raises(PeerFailure, functools.partial(_receive, transport, source, meta))
    _expect(time.monotonic() - start < 5.0, "it took longer than 5 s")
    _expect(failure.rank == 2, f"rank 2 died, but this names another: {failure}")


def _peers(transport: Transport) -> list[int]:
    """Every other rank, in an order in which both ends of a pair come to each other at the same turn."""
    turns = [(turn - transport.rank) % transport.size for turn in range(transport.size)]
    return [peer for peer in turns if peer != transport.rank]


def _op(microbatch: int, index: int = 0) -> Op:
    """A send from rank 0 to rank 1."""
    return Op(OpKind.SEND_F, Edge(0, 1), 0, microbatch, index)


def _filled(numel: int, value: float) -> torch.Tensor:
    return torch.full((numel,), float(value))


def _exchange(
    transport: Transport, peer: int, value: torch.Tensor, meta: TensorMeta, *, owned: bool = False
) -> tuple[torch.Tensor, ...]:
    """Send to and receive from a peer that does the same."""
    mine, theirs = Edge(transport.rank, peer), Edge(peer, transport.rank)
    batch: list[Send | Recv] = [Send(Op(OpKind.SEND_F, mine, 0, 0), value, owned)]
    batch.append(Recv(Op(OpKind.RECV_F, theirs, 0, 0), meta))
    return transport.post(batch).wait()


def _receive(transport: Transport, source: int, meta: TensorMeta) -> None:
    """Wait for a message that does not come; on a slow machine the failure may be there before the post."""
    transport.post([Recv(Op(OpKind.RECV_F, Edge(source, transport.rank), 0, 0), meta)]).wait()


def _one_way(
    transport: Transport, messages: Sequence[tuple[Op, torch.Tensor]], meta: TensorMeta
) -> list[tuple[Handle, torch.Tensor]]:
    """From rank 0 to rank 1, all posted before the first is waited for; on rank 1, the handles and what they shall bring."""
    if transport.rank == 0:
        for handle in [transport.post([Send(op, value)]) for op, value in messages]:
            handle.wait()
        return []
    return [(transport.post([Recv(op.mirror, meta)]), value) for op, value in messages]


def _expect(condition: object, otherwise: str) -> None:
    if not condition:
        raise TransportCheckError(otherwise)


def _equal(got: torch.Tensor, expected: torch.Tensor) -> None:
    same = got.shape == expected.shape and got.dtype == expected.dtype
    same = same and torch.equal(bytes_of(got.contiguous()), bytes_of(expected.contiguous()))
    if not same:
        raise TransportCheckError(f"expected {expected}, got {got}")


def _raises(kind: type[_ErrorT], action: Callable[[], object]) -> _ErrorT:
    try:
        action()
    except kind as error:
        return error
    except Exception as error:
        raise TransportCheckError(f"expected {kind.__name__}, got {error!r}") from error
    raise TransportCheckError(f"expected {kind.__name__}, and nothing was raised")
