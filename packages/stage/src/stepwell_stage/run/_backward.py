"""Backward of one stage: from its outputs (or the loss) to its parameters and inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def stage_backward(
    roots: Sequence[torch.Tensor], grads: Sequence[torch.Tensor | None], inputs: Sequence[Any]
) -> tuple[torch.Tensor | None, ...]:
    """Accumulate gradients of everything that ``roots`` depend on, and give those of the inputs.

    Args:
        roots: tensors that require grad.
        grads: their gradients, None for a scalar's one.
        inputs: the stage's inputs; leaves that require grad get their gradient taken out of ``.grad``.

    Returns:
        For each input its gradient, or None where it needs none or nothing depends on it.
    """
    if roots:
        torch.autograd.backward(tuple(roots), tuple(grads))
    found = []
    for value in inputs:
        grad = None
        if isinstance(value, torch.Tensor) and value.requires_grad and value.is_leaf:
            grad, value.grad = value.grad, None
        found.append(grad)
    return tuple(found)
