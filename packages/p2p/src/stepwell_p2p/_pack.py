"""Small values of one (edge, microbatch) as one message.

A message costs tens of microseconds however small it is. Both ends know beforehand what every value looks like, so both can
decide alike, from sizes only, which values travel together and where in the message each one stands.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import attrs
import torch

from stepwell_meta import TensorMeta

from ._layout import bytes_of, check_buffer, place, row_major
from ._op import Op
from ._transport import Handle, Recv, Rules, Send, Transport
from .exceptions import P2PUsageError

if TYPE_CHECKING:
    from ._placement import Edge

_ALIGNMENT = 16  # bytes; every dtype may start there
SMALL = 1 << 16
"""Up to how many bytes a value counts as small: beyond it a copy costs more than a message."""


@attrs.frozen
class Route:
    """All messages of one stage on one edge in one direction, whatever their microbatch.

    Attributes:
        edge: from which rank to which.
        stage: the sender's stage.
        is_forward: whether values, or gradients, travel.
    """

    edge: Edge
    stage: int
    is_forward: bool


@attrs.frozen
class Pack:
    """Values that travel as one message.

    Attributes:
        indices: their ops' indices, ascending; the message goes under the first.
        metas: what they look like.
        offsets: where each one starts, in bytes.
        nbytes: how long the message is.
    """

    indices: tuple[int, ...]
    metas: tuple[TensorMeta, ...]
    offsets: tuple[int, ...]
    nbytes: int


def plan_packs(metas: Sequence[TensorMeta | None], *, small: int = SMALL) -> tuple[Pack, ...]:
    """Which values of one microbatch travel together: all small ones, if there are two or more.

    Pure: both ends compute the same from the same metas.

    Args:
        metas: the value of each op index; None where nothing crosses.
        small: up to how many bytes a value counts as small.
    """
    chosen = [(index, meta) for index, meta in enumerate(metas) if meta is not None and meta.nbytes <= small]
    if len(chosen) < 2:
        return ()
    offsets, at = [], 0
    for _, meta in chosen:
        offsets.append(at)
        at += -(-meta.nbytes // _ALIGNMENT) * _ALIGNMENT
    indices, looks = zip(*chosen, strict=True)
    return (Pack(indices, looks, tuple(offsets), at),)


class PackingTransport:
    """Carries small values together over another transport.

    Both ends make one with the same table. All members of a pack are posted in one batch, at either end.

    Example::

        table = {Route(Edge(0, 1), stage=0, is_forward=True): plan_packs(metas_that_cross)}
        transport = PackingTransport(C10dTransport(), table)

    Implements :class:`stepwell_p2p.Transport`.

    Args:
        inner: what carries the messages.
        packs: what travels together, see :func:`plan_packs`.
        device: where received values shall be; that of the inner transport.
    """

    def __init__(
        self, inner: Transport, packs: Mapping[Route, Sequence[Pack]], *, device: torch.device | str = "cpu"
    ) -> None:
        self.inner = inner
        self.device = torch.device(device)
        self._packs = {(lane, index): pack for lane, group in packs.items() for pack in group for index in pack.indices}
        self._seats: dict[Op, _Seat | None] = {}

    @property
    def rank(self) -> int:
        """This rank's number."""
        return self.inner.rank

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self.inner.size

    @property
    def rules(self) -> Rules:
        """Those of the inner transport."""
        return self.inner.rules

    def post(self, batch: Sequence[Send | Recv]) -> Handle:
        """Start every message; see :meth:`stepwell_p2p.Transport.post`.

        Raises:
            P2PUsageError: members of a pack are missing from the batch, or look otherwise than the table says.
        """
        messages: list[Send | Recv] = []
        parcels: list[_Parcel] = []  # one for each receive of the batch
        open_packs: dict[Op, _Open] = {}
        received = 0
        for item in batch:
            seat = self._seat_of(item.op)
            if seat is None:
                messages.append(item)
                if isinstance(item, Recv):
                    parcels.append(_Parcel(received, item, None))
                    received += 1
                continue
            begun = open_packs.get(seat.head)
            if begun is None:
                begun = open_packs[seat.head] = _Open(seat.pack, set(seat.pack.indices), received)
                messages.append(self._message(item, seat, begun))
                received += isinstance(item, Recv)
            _check_member(item, seat)
            if isinstance(item, Send):
                _load(begun.memory, item, seat)
            else:
                parcels.append(_Parcel(begun.number, item, seat))
            begun.missing.discard(item.op.index)
            if not begun.missing:
                del open_packs[seat.head]
        for head, begun in open_packs.items():
            raise P2PUsageError(
                f"{head} travels with values {begun.pack.indices} of its stage and microbatch as one message,"
                f" but {sorted(begun.missing)} are not in the same batch"
            )
        return _Unpacking(self.inner.post(messages), parcels, self.device)

    def abort(
        self, reason: str, *, stage: int | None = None, microbatch: int | None = None, action: str | None = None
    ) -> None:
        """See :meth:`stepwell_p2p.Transport.abort`."""
        self.inner.abort(reason, stage=stage, microbatch=microbatch, action=action)

    def close(self) -> None:
        """Close the inner transport."""
        self._seats.clear()
        self.inner.close()

    def _seat_of(self, op: Op) -> _Seat | None:
        try:
            return self._seats[op]
        except KeyError:
            pack = self._packs.get((Route(op.edge, op.stage, op.kind.is_forward), op.index))
            seat = None
            if pack is not None:
                position = pack.indices.index(op.index)
                head = attrs.evolve(op, index=pack.indices[0])
                seat = _Seat(pack, head, pack.metas[position], pack.offsets[position])
            self._seats[op] = seat
            return seat

    def _message(self, item: Send | Recv, seat: _Seat, begun: _Open) -> Send | Recv:
        if isinstance(item, Recv):
            return Recv(seat.head, TensorMeta((seat.pack.nbytes,), (1,), torch.uint8))
        begun.memory = torch.empty(seat.pack.nbytes, dtype=torch.uint8, device=self.device)
        return Send(seat.head, begun.memory, owned=True)


@attrs.frozen
class _Seat:
    """Where one op's value stands in its pack; resolved once for each op."""

    pack: Pack
    head: Op
    meta: TensorMeta
    offset: int

    def view(self, message: torch.Tensor) -> torch.Tensor:
        """This value's part of a message: a tensor of its own over the message's memory, not tied to the others' writes."""
        flat = message[self.offset : self.offset + self.meta.nbytes]
        return flat.view(self.meta.dtype).view(self.meta.shape).data


@attrs.define(eq=False)
class _Open:
    """A pack of which a batch has shown some members; mutable until it has shown all."""

    pack: Pack
    missing: set[int]
    number: int  # which receive of the inner batch it is
    memory: torch.Tensor = attrs.field(factory=lambda: torch.empty(0))


@attrs.frozen(eq=False)
class _Parcel:
    """How one receive of a batch gets its value from the inner batch's."""

    number: int
    recv: Recv
    seat: _Seat | None


class _Unpacking:
    """A handle: waits for the messages and takes them apart."""

    def __init__(self, handle: Handle, parcels: Sequence[_Parcel], device: torch.device) -> None:
        self._handle = handle
        self._parcels = parcels
        self._device = device
        self._result: tuple[torch.Tensor, ...] | None = None

    def wait(self) -> tuple[torch.Tensor, ...]:
        if self._result is None:
            messages = self._handle.wait()
            self._result = tuple(self._value(messages[parcel.number], parcel) for parcel in self._parcels)
        return self._result

    def _value(self, message: torch.Tensor, parcel: _Parcel) -> torch.Tensor:
        if parcel.seat is None:
            return message
        return place(parcel.seat.view(message), parcel.recv.meta, self._device, parcel.recv.buffer)


def _check_member(item: Send | Recv, seat: _Seat) -> None:
    if isinstance(item, Send):
        shape, dtype = tuple(item.tensor.shape), item.tensor.dtype
    else:
        shape, dtype = item.meta.shape, item.meta.dtype
        if item.buffer is not None:
            check_buffer(item.buffer, item.meta)
    if shape != seat.meta.shape or dtype != seat.meta.dtype:
        raise P2PUsageError(
            f"{item.op} is planned as {seat.meta.dtype} of shape {seat.meta.shape} in a pack, but is {dtype} of shape {shape}"
        )


def _load(memory: torch.Tensor, item: Send, seat: _Seat) -> None:
    memory[seat.offset : seat.offset + seat.meta.nbytes].copy_(bytes_of(row_major(item.tensor)))
