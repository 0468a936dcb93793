"""Memory for received values: as much as there are values in flight, and used again when they are consumed."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import torch

from ._compat import memory_users

if TYPE_CHECKING:
    from stepwell_meta import TensorMeta

_Key = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]


class BufferPool:
    """Receive buffers by meta, for one rank.

    A buffer belongs to whoever took it, and its memory comes back by itself: when no tensor, view or autograd graph uses it any
    more, it may be handed out again. So a buffer is never shared between a live graph and a new value, and nobody has to say
    when a value is consumed::

        pool = BufferPool("cpu")
        recv = Recv(op, meta, pool.take(meta))
        (value,) = transport.post([recv]).wait()
        ...                     # forward and backward with value, then let go of it

    Every buffer is a new tensor object, even over memory that was used before, so that hooks and gradients of an earlier value
    never show up on a later one. The pool keeps as much memory as was in use at once; what no value of the present looks needs
    is freed when new memory is made.

    For host memory, where new pages cost more than the copy into them; on accelerators torch's allocator does the same, and knows
    of streams. Not for several threads.

    Attributes:
        allocated: how many times new memory was needed.

    Args:
        device: where the buffers are.
    """

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self.allocated = 0
        self._bases: dict[_Key, deque[torch.Tensor]] = {}

    @property
    def in_flight(self) -> int:
        """How many buffers are in use now."""
        return sum(memory_users(base) != 1 for bases in self._bases.values() for base in bases)

    def take(self, meta: TensorMeta) -> torch.Tensor:
        """An uninitialised tensor of this shape, layout and dtype, without grad."""
        key = (meta.shape, meta.stride, meta.dtype)
        base = self._reusable(self._bases.get(key) or deque())
        if base is None:
            self._free_unused()
            self.allocated += 1
            base = meta.without_grad().empty(self.device)
            if memory_users(base) is None:
                return base  # nobody could say when it is free again
            self._bases.setdefault(key, deque()).append(base)
        return base.data  # another tensor over the same memory: own version counter, hooks and grad

    def clear(self) -> None:
        """Forget all memory; buffers that are in use stay with their users."""
        self._bases.clear()

    def _reusable(self, bases: deque[torch.Tensor]) -> torch.Tensor | None:
        """One that nobody uses; those that were taken first are looked at first."""
        for _ in range(len(bases)):
            base = bases[0]
            bases.rotate(-1)
            if memory_users(base) == 1:
                return base
        return None

    def _free_unused(self) -> None:
        for key, bases in list(self._bases.items()):
            used = deque(base for base in bases if memory_users(base) != 1)
            if used:
                self._bases[key] = used
            else:
                del self._bases[key]
