"""Received values as they lie in memory where they were made.

What travels is dense. But code that is given a slice or an expanded tensor may ask for its strides, and ``reshape`` or
``contiguous`` of one is a copy, which may be changed in place without a change to the other.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def laid_out(tensor: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    """The same values with these strides, which leave gaps or expand dims; as they are where elements overlap otherwise."""
    base = tensor
    for dim, step in enumerate(strides):
        if step == 0:
            base = base[(slice(None),) * dim + (slice(0, 1),)]
    reach = 0
    for step, size in sorted((step, size) for size, step in zip(base.shape, strides, strict=True) if size > 1):
        if step <= reach:
            return tensor
        reach += step * (size - 1)
    memory = torch.empty_strided(base.shape, strides, dtype=base.dtype, device=base.device)
    return memory.copy_(base).expand(tensor.shape)
