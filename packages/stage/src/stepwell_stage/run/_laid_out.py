"""Received values with gaps between their elements, and expanded, where they were so when they were made.

What travels is dense. But ``reshape`` or ``contiguous`` of a slice or an expanded tensor is a copy, which may be changed in place
without a change to the other; of a dense one it is none.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from stepwell_meta import TensorMeta

_GAP = 64  # bytes between rows that are no shorter, so that they stay aligned


def gaps_of(meta: TensorMeta) -> tuple[int, ...] | None:
    """Strides with gaps where a tensor has some, or where its elements overlap; None where it has neither.

    Short gaps, however long those of the tensor are: it may be a slice of a large one.
    """
    if meta.is_dense:
        return None
    strides = [0] * len(meta.stride)
    theirs = ours = 1  # the next stride without a gap
    for step, size, dim in sorted(zip(meta.stride, meta.shape, range(len(strides)), strict=True)):
        if step == 0:
            continue
        if size == 1 or step == theirs:
            strides[dim] = ours
        else:
            width = meta.dtype.itemsize
            strides[dim] = ours + (_GAP // width if ours * width >= _GAP else 1)
        if size > 1:
            theirs, ours = step * size, strides[dim] * size
    return tuple(strides)


def laid_out(tensor: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    """A copy with these strides."""
    base = tensor
    for dim, step in enumerate(strides):
        if step == 0:
            base = base.narrow(dim, 0, 1)
    copy = torch.empty_strided(base.shape, strides, dtype=base.dtype, device=base.device).copy_(base)
    return copy if base is tensor else copy.expand(tensor.shape)
