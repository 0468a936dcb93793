"""Memory for received values: as much as there are values in flight, and used again when they are consumed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ._compat import memory_users
from .exceptions import P2PUsageError

if TYPE_CHECKING:
    from stepwell_meta import TensorMeta

_Key = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]


class BufferPool:
    """Receive buffers by meta, for one rank.

    Take a buffer when the receive is posted and give it back when its value is consumed::

        pool = BufferPool("cpu")
        recv = Recv(op, meta, pool.take(meta))
        (value,) = transport.post([recv]).wait()
        ...                     # forward and backward with value
        pool.give(value)

    Memory that something still uses when a buffer is given back (a graph that is alive, a view that was kept) is
    forgotten, not handed out again. Every buffer is a new tensor object, even over memory that was used before, so that hooks
    and gradients of an earlier value never show up on a later one.

    Not for several threads.

    Attributes:
        most_in_flight: the most there ever were.
        allocated: how many times new memory was needed.

    Args:
        device: where the buffers are.
    """

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self.most_in_flight = 0
        self.allocated = 0
        self._free: dict[_Key, list[torch.Tensor]] = {}
        self._taken: dict[int, tuple[_Key, torch.Tensor, torch.Tensor]] = {}

    @property
    def in_flight(self) -> int:
        """How many buffers are taken and not given back."""
        return len(self._taken)

    def take(self, meta: TensorMeta) -> torch.Tensor:
        """An uninitialised tensor of this shape, layout and dtype, without grad."""
        key = (meta.shape, meta.stride, meta.dtype)
        base = self._reusable(key)
        if base is None:
            self.allocated += 1
            base = meta.without_grad().empty(self.device)
        buffer = base.data  # another tensor over the same memory: own version counter, hooks and grad
        self._taken[id(buffer)] = (key, base, buffer)
        self.most_in_flight = max(self.most_in_flight, len(self._taken))
        return buffer

    def give(self, buffer: torch.Tensor) -> None:
        """Give back what :meth:`take` returned.

        Raises:
            P2PUsageError: it is not from this pool, or was given back already.
        """
        taken = self._taken.pop(id(buffer), None)
        if taken is None:
            raise P2PUsageError("this tensor is not a buffer that was taken from this pool and is still out")
        key, base, _ = taken
        self._free.setdefault(key, []).append(base)

    def clear(self) -> None:
        """Forget the memory that is not taken."""
        self._free.clear()

    def _reusable(self, key: _Key) -> torch.Tensor | None:
        free = self._free.get(key, [])
        while free:
            base = free.pop()
            if memory_users(base) == 1:
                return base
        return None
