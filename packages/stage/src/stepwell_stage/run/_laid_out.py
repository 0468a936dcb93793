"""Received values with gaps between their elements, and expanded, where they were so when they were made.

What travels is dense. But ``reshape`` or ``contiguous`` of a slice or an expanded tensor is a copy, which may be changed in place
without a change to the other; of a dense one it is none.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from stepwell_meta import TensorMeta

_GAP = 64  # bytes between rows, which so stay aligned


def gaps_of(meta: TensorMeta) -> tuple[int, ...] | None:
    """Strides with gaps where a tensor has some, but no longer ones than it takes to have them: a slice may be of a large tensor.

    None where there are none, or elements overlap otherwise than in expanded dims.
    """
    if meta.is_dense:
        return None
    strides = [0 if step == 0 else 1 for step in meta.stride]
    reach, theirs, ours = 0, 1, 1  # how far elements reach, and the next stride without a gap: of theirs, and of these
    for step, size, dim in sorted(zip(meta.stride, meta.shape, range(len(strides)), strict=True)):
        if size == 1 or step == 0:
            continue
        if step <= reach:
            return None
        gap = 1 if theirs == 1 else max(1, _GAP // meta.dtype.itemsize)
        strides[dim] = ours if step == theirs else min(max(step, ours + 1), ours + gap)
        reach, theirs, ours = reach + step * (size - 1), step * size, strides[dim] * size
    return tuple(strides)


def laid_out(tensor: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    """The same values with these strides."""
    base = tensor
    for dim, step in enumerate(strides):
        if step == 0:
            base = base.narrow(dim, 0, 1)
    memory = torch.empty_strided(base.shape, strides, dtype=base.dtype, device=base.device)
    return memory.copy_(base).expand(tensor.shape)
