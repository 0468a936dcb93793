"""Values whose size the receiver does not know: bytes and tensors behind a fixed-size header.

::

    header   32 bytes: b"SWV1", number of tensors, bytes of metas, bytes of payload, CRC-32 of both, zeros
    body     the metas of the tensors (stepwell_meta.encode), then the payload
    tensors  small ones as one message, each other alone

All of it travels under one op: messages with equal ops keep their order. On a transport that is first in, first out, the
receiver must come for such a value when it is next on its channel, since only the header says what follows.
"""

from __future__ import annotations

import ctypes
import struct
import zlib
from collections.abc import Sequence

import attrs
import torch

from stepwell_meta import MetadataError, TensorMeta, decode, encode

from ._op import Op
from ._pack import Packing
from ._require import require, whole
from ._transport import Handle, Recv, Send, Transport
from .exceptions import P2PUsageError, TransportError

_HEADER = struct.Struct("<4sIQQI4x")
_MAGIC = b"SWV1"
_HEADER_META = TensorMeta((_HEADER.size,), (1,), torch.uint8)

MOST_BYTES = 1 << 34
"""What a receiver accepts in one value unless told otherwise: 16 GiB."""


def send_values(
    transport: Transport,
    op: Op,
    payload: bytes = b"",
    tensors: Sequence[torch.Tensor] = (),
    *,
    most_bytes: int = MOST_BYTES,
) -> Handle:
    """Start to send bytes and tensors to a peer that does not know how many and how large they are.

    The peer calls :func:`receive_values` or :func:`expect_values` with the op's mirror.

    Args:
        transport: this rank's transport.
        op: a send; see its ``microbatch`` for numbers that no schedule uses.
        payload: any bytes.
        tensors: any plain tensors; the rules of :class:`~stepwell_p2p.Send` hold for each.
        most_bytes: refuse to send more than this.

    Raises:
        P2PUsageError: more bytes than ``most_bytes``, or a tensor that cannot be sent.
        stepwell_meta.MetadataError: a tensor that has no meta (sparse, nested, an unknown subclass).
    """
    require(payload, (bytes, bytearray, memoryview), "the payload of values is bytes")
    most_bytes = whole(most_bytes, "most_bytes")
    require(tensors, Sequence, "tensors are several, in a list")  # one alone would be taken for its rows
    metas = tuple(attrs.evolve(TensorMeta.from_tensor(tensor).as_dense(), requires_grad=False) for tensor in tensors)
    table = encode(metas)
    total = len(table) + len(payload) + sum(meta.nbytes for meta in metas)
    if total > most_bytes:
        raise P2PUsageError(f"{op} carries {total} bytes, more than the {most_bytes} that its receiver accepts")
    body = table + payload
    header = _HEADER.pack(_MAGIC, len(metas), len(table), len(payload), zlib.crc32(body))
    handles = [transport.post([Send(op, _to_tensor(header))]), transport.post([Send(op, _to_tensor(body))])]
    if tensors:
        handles.append(transport.post(Packing(metas).sends([op] * len(metas), tensors)))
    return _All(handles)


def receive_values(
    transport: Transport, op: Op, *, most_bytes: int = MOST_BYTES
) -> tuple[bytes, tuple[torch.Tensor, ...]]:
    """Wait for what a peer sends with :func:`send_values`.

    Args:
        transport: this rank's transport.
        op: a receive, the mirror of the sender's op.
        most_bytes: refuse to make room for more than this.

    Returns:
        The payload, and the tensors on the transport's device in the sender's layout, without grad.

    Raises:
        TransportError: the peer sent something else, or more than ``most_bytes``.
        PeerFailure: another rank failed.
    """
    return expect_values(transport, op, most_bytes=most_bytes).wait()


def expect_values(transport: Transport, op: Op, *, most_bytes: int = MOST_BYTES) -> ExpectedValues:
    """Like :func:`receive_values`, but starts to receive the header and returns at once.

    For transports that match messages by op. On one that is first in, first out nothing starts before ``wait``.
    """
    return ExpectedValues(transport, op, most_bytes)


class ExpectedValues:
    """A value of unknown size under way; made by :func:`expect_values`."""

    def __init__(self, transport: Transport, op: Op, most_bytes: int) -> None:
        self._transport = transport
        self._op = op
        self._most_bytes = whole(most_bytes, "most_bytes")
        self._header = self._post_header() if transport.rules.tagged else None
        self._result: tuple[bytes, tuple[torch.Tensor, ...]] | None = None

    def wait(self) -> tuple[bytes, tuple[torch.Tensor, ...]]:
        """Payload and tensors; a second call returns the same again. Raises like :func:`receive_values`."""
        if self._result is None:
            self._result = self._receive()
        return self._result

    def _post_header(self) -> Handle:
        return self._transport.post([Recv(self._op, _HEADER_META)])

    def _receive(self) -> tuple[bytes, tuple[torch.Tensor, ...]]:
        (header,) = (self._header or self._post_header()).wait()
        count, table_size, payload_size, check = self._read_header(_to_bytes(header))
        body_meta = TensorMeta((table_size + payload_size,), (1,), torch.uint8)
        (raw,) = self._transport.post([Recv(self._op, body_meta)]).wait()
        body = _to_bytes(raw)
        if zlib.crc32(body) != check:
            raise TransportError(f"{self._op}: the value's bytes do not have the checksum that its header gives")
        metas = self._read_metas(body[:table_size], count, payload_size)
        if not metas:
            return body[table_size:], ()
        packing = Packing(metas)
        batch = packing.recvs([self._op] * len(metas))
        return body[table_size:], packing.unpack(self._transport.post(batch)).wait()

    def _read_header(self, data: bytes) -> tuple[int, int, int, int]:
        magic, count, table_size, payload_size, check = _HEADER.unpack(data)
        if magic != _MAGIC:
            raise TransportError(
                f"{self._op}: expected the header of a value, got {data[:8]!r}…; send it with send_values"
            )
        if table_size + payload_size > self._most_bytes:
            raise TransportError(
                f"{self._op}: the peer announces {table_size + payload_size} bytes, more than the {self._most_bytes} accepted"
            )
        return count, table_size, payload_size, check

    def _read_metas(self, table: bytes, count: int, payload_size: int) -> tuple[TensorMeta, ...]:
        try:
            metas = decode(table)
        except MetadataError as error:
            raise TransportError(f"{self._op}: the metas of the value cannot be read: {error}") from error
        if not isinstance(metas, tuple) or not all(type(meta) is TensorMeta for meta in metas) or len(metas) != count:
            raise TransportError(f"{self._op}: expected {count} tensor metas, got {metas!r:.200}")
        total = len(table) + payload_size + sum(meta.nbytes for meta in metas)
        if total > self._most_bytes:
            raise TransportError(
                f"{self._op}: the peer announces {total} bytes, more than the {self._most_bytes} accepted"
            )
        return metas


class _All:
    """Several handles as one."""

    def __init__(self, handles: Sequence[Handle]) -> None:
        self._handles = handles

    def wait(self) -> tuple[torch.Tensor, ...]:
        return tuple(tensor for handle in self._handles for tensor in handle.wait())


def _to_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _to_bytes(tensor: torch.Tensor) -> bytes:
    host = tensor.cpu()
    return ctypes.string_at(host.data_ptr(), host.numel())
