"""What any transport must do with values: programs that run on its ranks, one for each promise."""

from __future__ import annotations

import torch

from stepwell_meta import TensorMeta

from ._check import Check, collect, equal, exchange, expect, filled, message, peers
from ._op import Op, OpKind
from ._placement import Edge
from ._transport import Recv, Send, Transport
from ._values import receive_values, send_values

CHECKS: list[Check] = []
_promise = collect(CHECKS)

_DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128, torch.bool,
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64,
    torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz, torch.float8_e8m0fnu,
)  # fmt: skip


@_promise(4)
def pairs(transport: Transport) -> None:
    """Every rank exchanges a value with every other, twice with the same ops, as steps of a training do."""
    expect(transport.size == 4 and 0 <= transport.rank < 4, f"of 4 ranks, this is {transport.rank} of {transport.size}")
    for step in range(2):
        for peer in peers(transport):
            meta = TensorMeta((16,), (1,), torch.float32)
            (got,) = exchange(transport, peer, filled(16, transport.rank * 10 + step), meta)
            equal(got, filled(16, peer * 10 + step))


@_promise(4)
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
                        batch.append(Send(op, filled(3, number)))
                    elif source != destination and transport.rank == destination:
                        batch.append(Recv(op.mirror, TensorMeta((3,), (1,), torch.float32)))
                        wanted.append(number)
    for got, number in zip(transport.post(batch).wait(), wanted, strict=True):
        equal(got, filled(3, number))


@_promise(2)
def large(transport: Transport) -> None:
    """64 MiB in both directions at once: nothing may rest on the transport's own buffers."""
    numel = 16 << 20
    peer = 1 - transport.rank
    mine = torch.arange(numel, dtype=torch.int32) + transport.rank
    (got,) = exchange(transport, peer, mine, TensorMeta((numel,), (1,), torch.int32))
    equal(got, torch.arange(numel, dtype=torch.int32) + peer)


@_promise(2)
def sizes(transport: Transport) -> None:
    """Nothing at all, one number, and shapes with zeros in them."""
    for shape in [(0,), (), (0, 3), (3, 0, 2), (1, 1, 1), (7, 1, 5)]:
        value = torch.ones(shape) * 3
        (got,) = exchange(transport, 1 - transport.rank, value, TensorMeta.from_tensor(value))
        equal(got, value)


@_promise(2)
def dtypes(transport: Transport) -> None:
    """Every dtype arrives bit for bit."""
    for dtype in _DTYPES:
        every = torch.arange(256, dtype=torch.uint8)  # among them numbers that are none, in all their forms
        value = (every.fmod(2) if dtype is torch.bool else every).view(dtype)
        (got,) = exchange(transport, 1 - transport.rank, value, TensorMeta.from_tensor(value))
        equal(got, value)


@_promise(2)
def layouts(transport: Transport) -> None:
    """Values arrive whatever the sender's strides, in those that the receiver asks for or its buffer has; without grad."""
    base = torch.arange(120.0).reshape(2, 3, 4, 5)
    given = [
        base.transpose(1, 3),
        base[:, :, 1:3],
        base.to(memory_format=torch.channels_last),
        torch.arange(3.0).expand(4, 3),
        torch.tensor(2.0).expand(3, 3),
        (base + 1j * base).conj(),
        (base + 1j * base).conj().imag,  # negated, but not in its memory
        base.clone().requires_grad_(),
    ]
    for value in given:
        expected = value.detach().resolve_conj().resolve_neg()
        for meta in (TensorMeta.from_tensor(value), TensorMeta.from_tensor(value.detach().contiguous())):
            (got,) = exchange(transport, 1 - transport.rank, value, meta)
            equal(got, expected)
            expect(got.stride() == meta.as_dense().stride, f"stride {got.stride()}, asked for {meta}")
            expect(not got.requires_grad, "a received tensor requires grad")
        buffer = torch.empty((*value.shape[::-1], 2), dtype=value.dtype)[..., 0].permute(*reversed(range(value.ndim)))
        (got,) = exchange(transport, 1 - transport.rank, value, meta, buffer=buffer)
        expect(got is buffer, "a receive with a buffer did not return it")
        equal(got, expected)


@_promise(3)
def mixed_batches(transport: Transport) -> None:
    """One batch with sends and receives of several peers, shapes and dtypes; values in the order of the receives."""
    batch: list[Send | Recv] = []
    wanted = []
    for peer in peers(transport):
        for index, dtype in enumerate((torch.float32, torch.int64, torch.bool)):
            mine, theirs = Edge(transport.rank, peer), Edge(peer, transport.rank)
            shape = (index + 1, transport.rank + 1)
            batch.append(Send(Op(OpKind.SEND_F, mine, 0, 0, index), torch.full(shape, transport.rank, dtype=dtype)))
            value = torch.full((index + 1, peer + 1), peer, dtype=dtype)
            batch.append(Recv(Op(OpKind.RECV_F, theirs, 0, 0, index), TensorMeta.from_tensor(value)))
            wanted.append(value)
    handle = transport.post(batch)
    got = handle.wait()
    expect(len(got) == len(wanted), f"{len(got)} values of {len(wanted)}")
    for value, expected in zip(got, wanted, strict=True):
        equal(value, expected)
    expect(
        handle.wait() is got or all(a is b for a, b in zip(handle.wait(), got, strict=True)), "a second wait differs"
    )
    expect(transport.post([]).wait() == (), "an empty batch has values")


@_promise(2)
def ownership(transport: Transport) -> None:
    """After its wait a sender may write to what it sent, and a receiver to what it got, and neither sees the other's writes."""
    peer = 1 - transport.rank
    meta = TensorMeta((64,), (1,), torch.float32)
    mine = filled(64, transport.rank)
    (got,) = exchange(transport, peer, mine, meta)
    mine.fill_(-1)
    exchange(transport, peer, filled(64, 0), meta)  # both have written now
    equal(got, filled(64, peer))
    got.add_(5)
    exchange(transport, peer, filled(64, 0), meta)
    equal(mine, filled(64, -1))
    buffer = torch.empty(64)
    (got,) = exchange(transport, peer, mine, meta, buffer=buffer)
    expect(got is buffer, "a receive with a buffer did not return it")
    equal(got, filled(64, -1))
    (got,) = exchange(transport, peer, filled(64, transport.rank), meta, owned=True)
    got.add_(1)
    equal(got, filled(64, peer + 1))
    kept = [exchange(transport, peer, filled(64, number), meta)[0] for number in range(20)]
    for number, value in enumerate(kept):
        equal(value, filled(64, number))


@_promise(2)
def values(transport: Transport) -> None:
    """Bytes and tensors that the receiver knows nothing about."""
    sent = (torch.arange(6.0).reshape(2, 3).t(), torch.tensor(True), torch.empty(0, 4, dtype=torch.int16))
    for payload, tensors in ((b"", ()), (b"hello", sent), (bytes(range(256)) * 300, sent[:1])):
        if transport.rank == 0:
            send_values(transport, message(-1), payload, tensors).wait()
        else:
            bytes_got, got = receive_values(transport, message(-1).mirror)
            expect(bytes_got == payload and len(got) == len(tensors), "the value differs")
            for ours, theirs in zip(got, tensors, strict=True):
                equal(ours, theirs)
