"""What the executor asks of a stage's computation, and the program that runs a plain module."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from .._compat import non_leaf
from ..exceptions import StageUsageError
from ..plan._action import Kind
from ._backward import stage_backward


@runtime_checkable
class StageProgram(Protocol):
    """The computation of one stage, as actions ask for it. Knows nothing of ranks, messages or schedules.

    Microbatches are independent: several may be between their forward and their backward at once, in any order.
    """

    def forward(
        self,
        microbatch: int,
        received: Sequence[torch.Tensor],
        call: Callable[[Sequence[torch.Tensor]], tuple[tuple[Any, ...], Mapping[str, Any]]],
    ) -> Any:
        """Run microbatch ``microbatch`` forward and keep what its backward needs, if gradients are enabled.

        Args:
            microbatch: its number.
            received: the tensors that came from earlier stages, leaves of autograd; the first stage has none. Those that require
                grad are the ones whose gradients :meth:`backward` returns.
            call: makes the positional and keyword arguments from the received tensors, or from others in their place.

        Returns:
            The outputs, in any structure. Those that depend on a parameter or an input that requires grad require grad.
        """
        ...

    def backward(
        self, microbatch: int, kind: Kind, roots: Sequence[torch.Tensor], grads: Sequence[torch.Tensor | None]
    ) -> tuple[torch.Tensor | None, ...]:
        """Run the backward of a microbatch, or a part of it, and accumulate into the parameters' gradients.

        Args:
            microbatch: its number; its forward has run.
            kind: B for all of it, I for the inputs' gradients only, W for the rest (then ``roots`` is empty).
            roots: tensors to start from: outputs of :meth:`forward` that require grad, or a loss computed from them.
            grads: the gradient of each root.

        Returns:
            For B and I one entry per received tensor: its gradient, or None where it has none. For W nothing.
        """
        ...

    def unshard(self) -> None:
        """Make the whole parameters available, where they are sharded over data-parallel ranks."""
        ...

    def reshard(self) -> None:
        """Let go of what :meth:`unshard` gathered."""
        ...

    def reduce_grads(self) -> None:
        """Reduce the accumulated gradients over the data-parallel ranks."""
        ...


class EagerProgram:
    """Runs an ``nn.Module`` as it is, with autograd.

    Mutable: it holds the leaves of each microbatch between forward and backward. A plain module holds its parameters whole
    and has no other replica, so there is nothing to unshard, reshard or reduce.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._leaves: dict[int, Sequence[torch.Tensor]] = {}

    def forward(
        self,
        microbatch: int,
        received: Sequence[torch.Tensor],
        call: Callable[[Sequence[torch.Tensor]], tuple[tuple[Any, ...], Mapping[str, Any]]],
    ) -> Any:
        """See :meth:`StageProgram.forward`."""
        if torch.is_grad_enabled():
            self._leaves[microbatch] = received
            received = [non_leaf(tensor) if tensor.requires_grad else tensor for tensor in received]
        args, kwargs = call(received)
        return self.module(*args, **kwargs)

    def backward(
        self, microbatch: int, kind: Kind, roots: Sequence[torch.Tensor], grads: Sequence[torch.Tensor | None]
    ) -> tuple[torch.Tensor | None, ...]:
        """See :meth:`StageProgram.backward`."""
        if kind is not Kind.B:
            raise StageUsageError(f"an EagerProgram runs full backwards (B), not {kind.value}")
        return stage_backward(roots, grads, self._leaves.pop(microbatch))

    def unshard(self) -> None:
        """Nothing: the parameters are whole."""

    def reshard(self) -> None:
        """Nothing: the parameters stay."""

    def reduce_grads(self) -> None:
        """Nothing: there is no other replica."""
