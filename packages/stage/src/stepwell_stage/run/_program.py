"""What the executor asks of a stage's computation, and the program that runs a plain module."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from .._compat import non_leaf
from ..exceptions import SplitBackwardWarning, StageUsageError
from ..plan._action import Kind
from ._backward import Ask, run_deferred, run_inputs, run_whole
from ._data_parallel import find_data_parallel
from ._divide import Divisions


@runtime_checkable
class StageProgram(Protocol):
    """The computation of one stage, as actions ask for it. Knows nothing of ranks, messages or schedules.

    :func:`stepwell_stage.testing.check_stage_program` tries what is promised here on a program of yours.

    Microbatches are independent: several may be between their forward and their backward at once, in any order.

    A program may also have a method ``clear()``: it is called at the end of every step, also of one that failed, to let go of
    what it keeps for backwards that will not come.
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
            kind: B for all of it, I for the inputs' gradients and what comes with them, W for the rest (``roots`` is empty then).
            roots: tensors to start from: outputs of :meth:`forward` that require grad, or a loss computed from them.
            grads: the gradient of each root; None for one, where the root is a scalar.

        Returns:
            For B and I one entry per received tensor: its gradient, or None where it has none; its ``.grad`` stays None. For W an
            empty tuple.

        Raises:
            Exception: the part that has to run before has not, or it is no kind of backward.
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

    Mutable: it holds what each microbatch under way needs for its backward.

    Args:
        module: the module. DDP and FSDP2 modules (itself, or inside) reduce once a step and gather when told.
        dw_builder: for a module that computes its weights' gradients itself and later: after each backward it is called for a
            function, which is called where they are due: at once after B, in W after I.

    Attributes:
        data_parallel: the module's data-parallel side, or None where it has none.
    """

    def __init__(self, module: nn.Module, *, dw_builder: Callable[[], Callable[..., None]] | None = None) -> None:
        self.module = module
        self.data_parallel = find_data_parallel(module)
        self._dw_builder = dw_builder
        self._leaves: dict[int, Sequence[torch.Tensor]] = {}
        self._left: dict[int, Callable[..., None]] = {}  # by microbatch what its W has to do
        self._divisions, self._ask = Divisions(), Ask()
        self._said_unsplit = False

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
        with self._microbatch():
            return self.module(*args, **kwargs)

    def backward(
        self, microbatch: int, kind: Kind, roots: Sequence[torch.Tensor], grads: Sequence[torch.Tensor | None]
    ) -> tuple[torch.Tensor | None, ...]:
        """See :meth:`StageProgram.backward`."""
        with self._microbatch():
            if kind is Kind.W:
                if microbatch not in self._left:
                    raise StageUsageError(f"W of microbatch {microbatch} needs its I first")
                self._left.pop(microbatch)()
                return ()
            if kind not in (Kind.B, Kind.I):
                raise StageUsageError(f"a backward is B, I or W, got {kind.value}")
            leaves = self._leaves.pop(microbatch, None)
            if leaves is None:
                raise StageUsageError(
                    f"{kind.value} of microbatch {microbatch} needs its F first, with gradients enabled: leave torch.no_grad()"
                    " out of what stands around actions"
                )
            if self._dw_builder is not None:
                found = run_whole(roots, grads, leaves)
                self._left[microbatch] = self._dw_builder()
                if kind is Kind.B:
                    self._left.pop(microbatch)()
                return found
            if kind is Kind.B:
                return run_whole(roots, grads, leaves)
            found, deferred = run_inputs(roots, grads, leaves, divisions=self._divisions, unsplit=self._say_unsplit)
            self._left[microbatch] = functools.partial(run_deferred, deferred, self._ask)
            return found

    def unshard(self) -> None:
        """See :meth:`StageProgram.unshard`."""
        if self.data_parallel is not None:
            self.data_parallel.unshard()

    def reshard(self) -> None:
        """See :meth:`StageProgram.reshard`."""
        if self.data_parallel is not None:
            self.data_parallel.reshard()

    def reduce_grads(self) -> None:
        """See :meth:`StageProgram.reduce_grads`."""
        if self.data_parallel is not None:
            self.data_parallel.reduce_grads()

    def clear(self) -> None:
        """Let go of every microbatch."""
        self._leaves.clear()
        self._left.clear()

    def _say_unsplit(self, node: str) -> None:
        if not self._said_unsplit:
            self._said_unsplit = True
            change = "use checkpoint(use_reentrant=False)" if "Checkpoint" in node else "do not compile this stage"
            warnings.warn(
                f"the backward of {type(self.module).__qualname__} cannot be split, since its graph holds {node}: each I runs all"
                " of it and W nothing. Gradients are right, but a zero-bubble schedule gains nothing from this stage:"
                f" {change}, or take a schedule without W",
                SplitBackwardWarning,
                stacklevel=2,
            )

    def _microbatch(self) -> contextlib.AbstractContextManager[None]:
        return _NOTHING_AROUND if self.data_parallel is None else self.data_parallel.microbatch()


_NOTHING_AROUND = contextlib.nullcontext()


def is_sharded(program: StageProgram) -> bool:
    """Whether a program is to be told when to gather and free its parameters. Ours knows; others are told in any case."""
    if not isinstance(program, EagerProgram):
        return True
    return program.data_parallel is not None and program.data_parallel.is_sharded


def is_reduced(program: StageProgram) -> bool:
    """Whether a program is to be told when to reduce its gradients; likewise."""
    return not isinstance(program, EagerProgram) or program.data_parallel is not None
