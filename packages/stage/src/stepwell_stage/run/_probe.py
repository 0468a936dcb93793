"""Running a stage once to see what it makes, without a trace: nothing is accumulated, no state moves on."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..plan._action import Kind
from ._program import StageProgram


class Probe:
    """A program whose backward gives the gradients of the received tensors and leaves the parameters' alone.

    Mutable: it holds the received tensors. Implements :class:`~stepwell_stage.StageProgram`.
    """

    def __init__(self, program: StageProgram) -> None:
        self._program = program
        self._received: Sequence[torch.Tensor] = ()

    def forward(
        self,
        microbatch: int,
        received: Sequence[torch.Tensor],
        call: Callable[[Sequence[torch.Tensor]], tuple[tuple[Any, ...], Mapping[str, Any]]],
    ) -> Any:
        """See :meth:`StageProgram.forward`."""
        self._received = received
        return self._program.forward(microbatch, received, call)

    def backward(
        self, microbatch: int, kind: Kind, roots: Sequence[torch.Tensor], grads: Sequence[torch.Tensor | None]
    ) -> tuple[torch.Tensor | None, ...]:
        """The gradients of the received tensors."""
        wanted = [tensor for tensor in self._received if tensor.requires_grad]
        found = iter(torch.autograd.grad(roots, wanted, grads, allow_unused=True) if roots and wanted else [])
        return tuple(next(found, None) if tensor.requires_grad else None for tensor in self._received)

    def unshard(self) -> None:
        """See :meth:`StageProgram.unshard`."""
        self._program.unshard()

    def reshard(self) -> None:
        """See :meth:`StageProgram.reshard`."""
        self._program.reshard()

    def reduce_grads(self) -> None:
        """Nothing: there are none."""


@contextlib.contextmanager
def undisturbed(module: object, device: torch.device) -> Iterator[None]:
    """Afterwards, also after an exception, random numbers go on and the module's buffers are as if nothing had run.

    A module may write into its buffers or put others in their places; one buffer may have several names. All of it is undone.
    """
    modules = list(module.modules()) if isinstance(module, nn.Module) else []
    places = [
        (owner, name, buffer)
        for owner in modules
        for name, buffer in owner.named_buffers(recurse=False, remove_duplicate=False)
    ]
    values = {id(buffer): _once(buffer).detach().clone() for _, _, buffer in places}
    others = {} if device.type == "cpu" else {"devices": [device], "device_type": device.type}
    try:
        with torch.random.fork_rng(**(others or {"devices": []})):
            yield
    finally:
        with torch.no_grad():
            for owner, name, buffer in places:
                if getattr(owner, name) is not buffer:
                    setattr(owner, name, buffer)
                _once(buffer).copy_(values[id(buffer)])


def _once(tensor: torch.Tensor) -> torch.Tensor:
    """Of a tensor that shows one value in several places, as ``expand()`` makes, each value once; else the tensor."""
    if tensor.layout is not torch.strided:
        return tensor
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0:
            tensor = tensor.narrow(dim, 0, min(1, tensor.shape[dim]))
    return tensor
