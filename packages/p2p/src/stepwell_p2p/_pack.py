"""Small values of one (edge, microbatch) as one message.

A message costs tens of microseconds however small it is. Both ends know beforehand what every value looks like, so both can
decide alike, from sizes only, which values travel together and where in the message each one stands.
"""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Real
from types import NoneType
from typing import Any

import attrs
import torch

from stepwell_meta import TensorMeta

from ._layout import bytes_of, place, row_major
from ._op import Op
from ._require import require, several
from ._transport import Handle, Recv, Send
from .exceptions import P2PUsageError

_ALIGNMENT = 16  # bytes; every dtype may start there
SMALL = 1 << 16
"""Up to how many bytes a value counts as small: beyond it a copy costs more than a message."""


@attrs.frozen
class Pack:
    """Values that travel as one message.

    Attributes:
        indices: which of the values, ascending; the message goes under the op of the first.
        metas: what they look like.
        offsets: where each one starts, in bytes.
        nbytes: how long the message is.
    """

    indices: tuple[int, ...]
    metas: tuple[TensorMeta, ...]
    offsets: tuple[int, ...]
    nbytes: int

    def load(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """The message, from its values in order; on the device of the first.

        Raises:
            P2PUsageError: a value looks otherwise than planned.
        """
        message = torch.empty(self.nbytes, dtype=torch.uint8, device=tensors[0].device)
        for index, tensor, meta, offset in zip(self.indices, tensors, self.metas, self.offsets, strict=True):
            if tensor.shape != meta.shape or tensor.dtype != meta.dtype:
                raise P2PUsageError(
                    f"value {index} is planned as {meta.dtype} of shape {meta.shape} in a pack, but is {tensor.dtype} of shape"
                    f" {tuple(tensor.shape)}"
                )
            message[offset : offset + meta.nbytes].copy_(bytes_of(row_major(tensor)))
        return message

    def unload(self, message: torch.Tensor) -> list[torch.Tensor]:
        """The values in a message: tensors of their own over its memory, none tied to the others' writes."""
        found = []
        for meta, offset in zip(self.metas, self.offsets, strict=True):
            value = message[offset : offset + meta.nbytes].view(meta.dtype).view(meta.shape).data
            found.append(place(value, meta, message.device))
        return found


def plan_packs(metas: Sequence[TensorMeta | None], *, small: int = SMALL) -> tuple[Pack, ...]:
    """Which values of one microbatch travel together: all small ones, if there are two or more.

    Pure: both ends compute the same from the same metas.

    Args:
        metas: the values, in order; None where nothing crosses.
        small: up to how many bytes a value counts as small.
    """
    require(small, Real, "small is a number of bytes")
    metas = _told(metas, (TensorMeta, NoneType))
    chosen = [(index, meta) for index, meta in enumerate(metas) if meta is not None and meta.nbytes <= small]
    if len(chosen) < 2:
        return ()
    offsets, at = [], 0
    for _, meta in chosen:
        offsets.append(at)
        at += -(-meta.nbytes // _ALIGNMENT) * _ALIGNMENT
    indices, looks = zip(*chosen, strict=True)
    return (Pack(indices, looks, tuple(offsets), at),)


class Packing:
    """How several values travel from one stage to another in each microbatch: small ones together, each other alone.

    Both ends make one from the same metas, and post what it makes of their values; one that has nothing to pack changes
    nothing and copies nothing.

    Example::

        packing = Packing(metas)                                                # on both ranks
        transport.post(packing.sends(ops, values)).wait()                       # on the one
        values = packing.unpack(transport.post(packing.recvs(ops))).wait()      # on the other

    Args:
        metas: what the values look like.
        small: up to how many bytes a value counts as small.

    Attributes:
        messages: of each message the index of its first value, and what it looks like.
        is_trivial: whether each value is a message.
    """

    def __init__(self, metas: Sequence[TensorMeta], *, small: int = SMALL) -> None:
        metas = _told(metas, TensorMeta)
        self._count = len(metas)
        self._pack = next(iter(plan_packs(metas, small=small)), None)
        self.is_trivial = self._pack is None
        packed = self._pack.indices if self._pack is not None else ()
        messages = {index: meta.without_grad() for index, meta in enumerate(metas) if index not in packed}
        if self._pack is not None:
            messages[packed[0]] = TensorMeta((self._pack.nbytes,), (1,), torch.uint8)
        self.messages = tuple(sorted(messages.items()))

    def sends(self, ops: Sequence[Op], tensors: Sequence[torch.Tensor], *, owned: bool = False) -> list[Send]:
        """A batch that sends the values.

        Args:
            ops: an op for each value; those of messages are used.
            tensors: the values.
            owned: whether the sender gives their memory away, see :class:`Send`.

        Raises:
            P2PUsageError: other values than planned.
        """
        pack = self._pack
        if pack is None:
            return [Send(op, tensor, owned=owned) for op, tensor in zip(ops, tensors, strict=True)]
        if len(tensors) != self._count:
            raise P2PUsageError(f"expected {self._count} values to pack, got {len(tensors)}")
        head = pack.indices[0]
        message = pack.load([tensors[index] for index in pack.indices])
        return [
            Send(ops[index], message, owned=True) if index == head else Send(ops[index], tensors[index], owned=owned)
            for index, _ in self.messages
        ]

    def recvs(self, ops: Sequence[Op]) -> list[Recv]:
        """A batch that receives the values, to be posted as often as they come; its handle goes through :meth:`unpack`."""
        return [Recv(ops[index], meta) for index, meta in self.messages]

    def unpack(self, handle: Handle) -> Handle:
        """A handle on the values, from one on the messages."""
        return handle if self._pack is None else _Unpacking(handle, self._pack, self)


class _Unpacking:
    """A handle: waits for the messages and takes them apart."""

    def __init__(self, handle: Handle, pack: Pack, packing: Packing) -> None:
        self._handle = handle
        self._pack = pack
        self._packing = packing
        self._result: tuple[torch.Tensor, ...] | None = None

    def wait(self) -> tuple[torch.Tensor, ...]:
        if self._result is None:
            found: dict[int, torch.Tensor] = {}
            for (index, _), message in zip(self._packing.messages, self._handle.wait(), strict=True):
                if index == self._pack.indices[0]:
                    found.update(zip(self._pack.indices, self._pack.unload(message), strict=True))
                else:
                    found[index] = message
            self._result = tuple(found[index] for index in range(len(found)))
        return self._result


def _told(metas: Sequence[Any], kind: type | tuple[type, ...]) -> tuple[Any, ...]:
    """What values look like, where that is told as it should be."""
    found = several(metas, "what is packed is told as several TensorMetas")
    for meta in found:
        require(meta, kind, "what is packed is told as TensorMetas", "TensorMeta.from_tensor(…) makes one")
    return found
