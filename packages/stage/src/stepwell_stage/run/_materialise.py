"""Gives values to a stage's parameters and buffers that are on the meta device."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import nn

from ..exceptions import StageUsageError


def materialise(
    part: nn.Module,
    device: torch.device | str | None,
    init_fn: Callable[[nn.Module], object] | None,
    what: str,
) -> None:
    """Make what is on the meta device, tensors that are shared within the part once, and have it initialised.

    New values are not numbers, or the least there is where they are indices, so that one that is left out is seen.

    Args:
        part: the module.
        device: where they are made.
        init_fn: called with the part; gives all of it its values.
        what: what the part is called in messages.

    Raises:
        StageUsageError: something is on the meta device and device or ``init_fn`` is missing, or ``init_fn`` left something
            without a value.
    """
    places = [
        (owner, name, tensor)
        for owner in part.modules()
        for name, tensor in (
            *owner.named_parameters(recurse=False, remove_duplicate=False),
            *owner.named_buffers(recurse=False, remove_duplicate=False),
        )
    ]
    if not any(tensor.is_meta for _, _, tensor in places):
        return
    if device is None or init_fn is None:
        raise StageUsageError(
            f"{what} has parameters or buffers on the meta device: pass device=, and init_fn= to give them values"
        )
    made: dict[int, torch.Tensor] = {}
    for owner, name, tensor in places:
        if tensor.is_meta:
            new = made.get(id(tensor))
            if new is None:
                new = torch.empty_like(tensor, device=torch.device(device))
                new.fill_(_no_value(tensor.dtype))
                if isinstance(tensor, nn.Parameter):
                    new = nn.Parameter(new, requires_grad=tensor.requires_grad)
                made[id(tensor)] = new
            setattr(owner, name, new)
    init_fn(part)
    tensors = [*part.named_parameters(), *part.named_buffers()]
    left = [name for name, tensor in tensors if tensor.is_meta or _has_no_value(tensor)]
    if left:
        raise StageUsageError(f"init_fn left {', '.join(left)} of {what} without a value; it must give all of them one")


def _no_value(dtype: torch.dtype) -> float | int:
    """What a tensor is filled with that has no value yet."""
    if dtype.is_floating_point or dtype.is_complex:
        return math.nan
    return torch.iinfo(dtype).min if dtype in _INDICES else 0  # any other small number or truth value may be meant


def _has_no_value(tensor: torch.Tensor) -> bool:
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        return bool(tensor.isnan().any())
    if tensor.dtype not in _INDICES or not tensor.numel():
        return False
    return bool((tensor == torch.iinfo(tensor.dtype).min).all())


_INDICES = (torch.int32, torch.int64)
