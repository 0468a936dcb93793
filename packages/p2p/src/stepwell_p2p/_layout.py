"""Between a tensor's own strides and the wire, where values stand in row-major order.

Both ends may hold a value in other strides (channels-last, transposed, expanded): what crosses is the row-major sequence of its
elements, so equal values arrive whatever the layouts, and a contiguous tensor is not copied at either end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor

from .exceptions import P2PUsageError

if TYPE_CHECKING:
    from stepwell_meta import TensorMeta


_FREED = " was freed, as that of a parameter between its steps is when it is sharded: gather it first"
_UNCOPIED = frozenset(getattr(torch, f"{sign}int{bits}") for sign in ("", "u") for bits in range(1, 8))


def row_major(tensor: torch.Tensor) -> torch.Tensor:
    """The same values as a plain contiguous tensor without grad; the tensor's own memory where it is that already.

    Raises:
        P2PUsageError: a DTensor or another subclass that is no plain memory; a sparse tensor, one without data or whose memory
            was freed, or of a dtype smaller than a byte.
    """
    tensor = _dense(tensor)
    if tensor.is_neg() or (tensor.dtype.is_complex and tensor.is_conj()):
        tensor = tensor.resolve_conj().resolve_neg()  # lazily negated or conjugated: its memory holds other numbers
    return tensor if tensor.is_contiguous() else tensor.contiguous()


def row_major_copy(tensor: torch.Tensor) -> torch.Tensor:
    """The same as :func:`row_major`, always in memory of its own."""
    return _dense(tensor).clone(memory_format=torch.contiguous_format)


def place(
    tensor: torch.Tensor, meta: TensorMeta, device: torch.device, buffer: torch.Tensor | None = None
) -> torch.Tensor:
    """A received row-major tensor in the caller's layout, on its device, or in its buffer.

    Args:
        tensor: what came, of the meta's shape and dtype; given away by the caller.
        meta: the layout that the receiver asked for.
        device: where it shall be.
        buffer: where to put the values, or None.
    """
    if buffer is tensor:
        return tensor
    if buffer is None:
        if tensor.stride() == meta.stride and tensor.device == device:
            return tensor
        buffer = meta.without_grad().empty(device)
    return buffer.copy_(tensor)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor's memory as a flat uint8 tensor."""
    flat = tensor.as_strided((tensor.numel(),), (1,))  # a view(-1) of one element may keep any stride
    return flat.view(torch.uint8)


def check_buffer(buffer: torch.Tensor, meta: TensorMeta) -> None:
    """Refuse a receive buffer that cannot hold the value.

    Raises:
        P2PUsageError: another shape or dtype; or a buffer that requires grad, is sparse, or has elements that share memory.
    """
    if tuple(buffer.shape) != meta.shape or buffer.dtype != meta.dtype:
        raise P2PUsageError(
            f"a buffer for a {meta.dtype} value of shape {meta.shape} must have that shape and dtype,"
            f" got {buffer.dtype} {tuple(buffer.shape)}"
        )
    if buffer.requires_grad:
        raise P2PUsageError("a receive buffer must not require grad: pass buffer.detach()")
    if buffer.layout is not torch.strided or buffer.is_meta:
        kind = "on the meta device" if buffer.is_meta else f"laid out as {buffer.layout}"
        raise P2PUsageError(f"a receive buffer must be dense memory, got one {kind}")
    if not buffer.untyped_storage().nbytes() and buffer.numel():
        raise P2PUsageError(f"the memory of the receive buffer{_FREED}")
    if not buffer.is_contiguous() and any(
        stride == 0 and size > 1 for size, stride in zip(buffer.shape, buffer.stride(), strict=True)
    ):
        raise P2PUsageError(
            "a receive buffer must not be expanded, for its elements share memory: pass buffer.contiguous()"
        )


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """The same values as a plain dense tensor without grad, in the same memory where they are plain already."""
    if type(tensor) is not torch.Tensor:
        tensor = _plain(tensor)
    if tensor.layout is not torch.strided:
        raise P2PUsageError(
            f"only dense tensors can be sent, got {tensor.layout}: send its indices and values, or to_dense()"
        )
    dtype = tensor.dtype
    if dtype in _UNCOPIED:
        raise P2PUsageError(f"torch copies no values of {dtype}: send their bytes, tensor.view(torch.uint8)")
    if tensor.is_meta:
        raise P2PUsageError("a tensor on the meta device has no values to send: give it some first, as with to_empty()")
    # Freed memory is at address 0. To ask the storage would make an object of it, which lives as long as the memory.
    if tensor.data_ptr() == tensor.storage_offset() * dtype.itemsize and tensor.numel():
        raise P2PUsageError(f"the memory of the tensor{_FREED}")
    return tensor.detach() if tensor.requires_grad else tensor


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    if not isinstance(tensor, torch.Tensor):
        raise P2PUsageError(
            f"only tensors can be sent, got {type(tensor).__name__}: send_values carries bytes, torch.tensor takes a number"
        )
    if isinstance(tensor, DTensor):
        raise P2PUsageError("a DTensor cannot be sent as it is: send its local shard, tensor.to_local()")
    if isinstance(tensor, torch.nn.Parameter):
        return tensor.data
    plain = tensor.detach().clone()  # waits for a functional collective that is still in flight
    if type(plain) is not torch.Tensor:
        raise P2PUsageError(f"only plain tensors can be sent, got {type(tensor).__qualname__}: unwrap it first")
    return plain
