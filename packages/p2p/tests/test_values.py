"""Values behind a header: both ends agree, or raise."""

from __future__ import annotations

import struct

import pytest
import torch

from stepwell_meta import MetadataError, TensorMeta, encode
from stepwell_p2p import (
    Edge,
    LoopbackFabric,
    LoopbackTransport,
    Op,
    OpKind,
    Recv,
    Rules,
    Send,
    expect_values,
    receive_values,
    send_values,
)
from stepwell_p2p.exceptions import P2PUsageError, TransportError

THERE = Op(OpKind.SEND_F, Edge(0, 1), 0, -1)


def ends(**options: object) -> tuple[LoopbackTransport, LoopbackTransport]:
    fabric = LoopbackFabric(2, **options)  # type: ignore[arg-type]
    return fabric.transport(0), fabric.transport(1)


@pytest.mark.parametrize("tagged", [True, False])
def test_p033_a_value_arrives_with_the_senders_shape_layout_and_dtype(tagged: bool) -> None:
    first, second = ends(rules=Rules(tagged=tagged, rendezvous=False))
    for length in (2262, 2361, 0, 1):
        sent = torch.randn(2, length, 3).transpose(0, 1)
        handle = send_values(first, THERE, b"x" * length, [sent, sent.to(torch.bfloat16)])
        payload, (got, half) = receive_values(second, THERE.mirror)
        handle.wait()
        assert payload == b"x" * length
        assert torch.equal(got, sent)
        assert got.stride() == TensorMeta.from_tensor(sent).as_dense().stride
        assert half.dtype == torch.bfloat16


def test_requires_grad_does_not_travel() -> None:
    first, second = ends()
    send_values(first, THERE, tensors=[torch.ones(2, requires_grad=True)])
    assert not receive_values(second, THERE.mirror)[1][0].requires_grad


def test_expect_values_starts_at_once_and_can_be_asked_twice() -> None:
    first, second = ends(rules=Rules(tagged=True, rendezvous=True))
    expected = expect_values(second, THERE.mirror)
    assert len(second.pending()) == 1
    import threading

    thread = threading.Thread(target=lambda: send_values(first, THERE, b"abc").wait())
    thread.start()
    assert expected.wait() == expected.wait() == (b"abc", ())
    thread.join()


def test_too_much_is_refused_at_both_ends() -> None:
    first, second = ends()
    with pytest.raises(P2PUsageError, match="more than the 100"):
        send_values(first, THERE, b"x" * 101, most_bytes=100)
    send_values(first, THERE, b"x" * 101)
    with pytest.raises(TransportError, match="more than the 100 accepted"):
        receive_values(second, THERE.mirror, most_bytes=100)
    first, second = ends()
    send_values(first, THERE, tensors=[torch.ones(1000)])
    with pytest.raises(TransportError, match="more than the 200 accepted"):
        receive_values(second, THERE.mirror, most_bytes=200)


def test_what_has_no_meta_is_refused_before_anything_leaves() -> None:
    first, _ = ends()
    with pytest.raises(MetadataError):
        send_values(first, THERE, tensors=[torch.eye(3).to_sparse()])
    assert first.pending() == ()


def raw(header: bytes, *messages: bytes) -> LoopbackTransport:
    """A receiver whose peer has sent these bytes by hand."""
    first, second = ends()
    for data in (header, *messages):
        first.post([Send(THERE, torch.frombuffer(bytearray(data), dtype=torch.uint8))])
    return second


def test_a_header_that_is_none_is_refused() -> None:
    header = struct.Struct("<4sIQQI4x")
    table = encode((TensorMeta((2,), (1,), torch.float32),))
    import zlib

    good = zlib.crc32(table)
    cases = [
        (raw(bytes(32)), "expected the header of a value"),
        (raw(header.pack(b"SWV1", 0, 1 << 60, 1 << 60, 0)), "accepted"),
        (raw(header.pack(b"SWV1", 1, len(table), 0, good + 1 & 0xFFFFFFFF), table), "checksum"),
        (raw(header.pack(b"SWV1", 2, len(table), 0, good), table), "expected 2 tensor metas"),
        (raw(header.pack(b"SWV1", 0, 3, 0, zlib.crc32(b"abc")), b"abc"), "cannot be read"),
    ]
    for receiver, says in cases:
        with pytest.raises(TransportError, match=says):
            receive_values(receiver, THERE.mirror)


def test_a_plain_message_where_a_value_is_expected() -> None:
    first, second = ends()
    first.post([Send(THERE, torch.ones(3))])
    with pytest.raises(TransportError, match=r"expected torch\.uint8 of shape \(32,\)"):
        receive_values(second, THERE.mirror)
    first, second = ends()
    send_values(first, THERE, b"abc")
    with pytest.raises(TransportError, match=r"sent torch\.uint8 of shape \(32,\)"):
        second.post([Recv(THERE.mirror, TensorMeta((3,), (1,), torch.float32))]).wait()
