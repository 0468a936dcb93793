"""Tensors that need a gradient which nobody computes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


class _Made(torch.autograd.Function):
    """Makes a tensor one that something which needs a gradient was written into."""

    @staticmethod
    def forward(ctx: Any, source: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(tensor)
        return tensor

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError("no gradient comes through what a stage does not have")


def needing(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, no leaf of autograd any more: as an operation on what needs a gradient would have made it."""
    if torch.is_inference_mode_enabled() or not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor
    with torch.enable_grad():
        made: torch.Tensor = _Made.apply(torch.zeros((), requires_grad=True), tensor)  # type: ignore[no-untyped-call]
    return made


def apart(given: Sequence[torch.Tensor], made: torch.Tensor) -> torch.Tensor:
    """What a unit made, without the graph behind it; what it was given, as another tensor."""
    if any(made is one for one in given):
        return made.view_as(made)
    return needing(made.data) if made.requires_grad else made
