"""Which of the values that a stage sent have a gradient, where the stages that took them go several ways.

Links carry a gradient for every value that may have one, zeros where there is none, for both ends must know beforehand what
comes. But a parameter whose gradient is zeros is one that an optimizer with momentum or weight decay moves, and one without a
gradient is not. So one more small value goes along, marks, whose own gradient says it, by the number of the output::

    sender    v0, v1 ──▶ marked ─▶ v0, v1, marks       backward: v1 was not marked, so nothing goes on from there
    taker     v0, v1, marks ──▶ taken ──▶ v0, v1       backward: v0 has a gradient, v1 has none: marks get (1, 0)

Marks of several takers are added up, as gradients are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


class _Sent(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, numbers: Sequence[int], marks: torch.Tensor, *values: torch.Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.numbers = numbers
        return (marks.clone(), *(value.detach() for value in values))

    @staticmethod
    def backward(ctx: Any, marks: torch.Tensor | None, *grads: torch.Tensor | None) -> Any:
        used = [] if marks is None else marks.tolist()
        kept = (grad if used and used[number] > 0 else None for number, grad in zip(ctx.numbers, grads, strict=True))
        return (None, None, *kept)


class _Taken(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, numbers: Sequence[int], marks: torch.Tensor, *values: torch.Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.numbers, ctx.marks = numbers, torch.zeros_like(marks)
        return tuple(value.detach() for value in values)  # no views, which glue may not change in place

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        marks = ctx.marks
        used = [number for number, grad in zip(ctx.numbers, grads, strict=True) if grad is not None]
        marks[used] = 1
        return (None, marks, *grads)


def marked(values: Sequence[torch.Tensor], device: torch.device) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The marks of a stage's outputs, and these outputs, joined to them."""
    marks = torch.zeros(len(values), device=device)
    numbers = [number for number, value in enumerate(values) if value.requires_grad]
    if not torch.is_grad_enabled():
        return marks, list(values)
    if not numbers:
        return marks.requires_grad_(), list(values)
    marks, *joined = _Sent.apply(numbers, marks, *(values[number] for number in numbers))  # type: ignore[no-untyped-call]
    following = iter(joined)
    return marks, [next(following) if value.requires_grad else value for value in values]


def taken(marks: torch.Tensor, values: Sequence[torch.Tensor], numbers: Sequence[int]) -> list[torch.Tensor]:
    """Values that came from one stage, joined to their marks.

    Args:
        marks: of that stage's outputs.
        values: what came.
        numbers: which output each is.
    """
    wanted = [number for number, value in zip(numbers, values, strict=True) if value.requires_grad]
    if not wanted or not marks.requires_grad:
        return list(values)
    following = iter(_Taken.apply(wanted, marks, *(value for value in values if value.requires_grad)))  # type: ignore[no-untyped-call]
    return [next(following) if value.requires_grad else value for value in values]
