"""The smallest stage program, for tests of code that runs one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch

from .exceptions import StageUsageError
from .plan._action import Kind

_Call = Callable[[Sequence[torch.Tensor]], tuple[tuple[Any, ...], Mapping[str, Any]]]


class FakeProgram:
    """Multiplies every floating argument by one number, and writes its gradients down by hand.

    Mutable: it counts. Implements :class:`stepwell_stage.StageProgram`; needs no module, and no autograd of its own.

    Example::

        program = FakeProgram(nn.Parameter(torch.tensor(2.0)))
        executor = Executor(PipelineStage(program, 0, 1, "cpu"), gpipe(1, 2), loss_fn)
        executor.step(x, target=y)
        assert program.calls == ["unshard", "F0", "F1", "B0", "B1", "reduce_grads", "reshard"]

    Args:
        weight: the number, a tensor of one element; gradients accumulate in its ``grad`` if it requires one.

    Attributes:
        calls: what was called, in order, as text: ``"F0"``, ``"I3"``, ``"unshard"``.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight
        self.calls: list[str] = []
        self._forwards: dict[int, _Made] = {}
        self._later: dict[int, torch.Tensor | None] = {}

    def forward(self, microbatch: int, received: Sequence[torch.Tensor], call: _Call) -> Any:
        """Every argument times the weight; what is no floating tensor as it came. One value, or a tuple of several."""
        self.calls.append(f"F{microbatch}")
        args, kwargs = call(received)
        inputs = [*args, *kwargs.values()]
        outputs = [self._times(value) if _is_floating(value) else value for value in inputs]
        if torch.is_grad_enabled():
            pairs = [(value, output) for value, output in zip(inputs, outputs, strict=True) if _requires_grad(output)]
            self._forwards[microbatch] = _Made(received, pairs)
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def backward(
        self, microbatch: int, kind: Kind, roots: Sequence[torch.Tensor], grads: Sequence[torch.Tensor | None]
    ) -> tuple[torch.Tensor | None, ...]:
        """The weight times what came back; and for the weight what came back times the inputs."""
        self.calls.append(f"{kind.value}{microbatch}")
        if kind is Kind.W:
            if microbatch not in self._later:
                raise StageUsageError(f"W of microbatch {microbatch} needs its I first")
            self._accumulate(self._later.pop(microbatch))
            return ()
        if kind not in (Kind.B, Kind.I):
            raise StageUsageError(f"a backward is B, I or W, got {kind.value}")
        if microbatch not in self._forwards:
            raise StageUsageError(f"{kind.value} of microbatch {microbatch} needs its F first")
        made = self._forwards.pop(microbatch)
        if roots:
            torch.autograd.backward(roots, grads)  # from a loss to the outputs, where a graph of this program begins
        for_weight: torch.Tensor | None = None
        found: list[torch.Tensor | None] = [None] * len(made.received)
        for value, output in made.pairs:
            if output.grad is None:
                continue
            part = (output.grad * value.detach()).sum().reshape(self.weight.shape)
            for_weight = part if for_weight is None else for_weight + part
            for number, tensor in enumerate(made.received):
                if tensor is value and tensor.requires_grad:
                    grad = output.grad * self.weight.detach()
                    before = found[number]
                    found[number] = grad if before is None else before + grad
        if kind is Kind.I:
            self._later[microbatch] = for_weight
        else:
            self._accumulate(for_weight)
        return tuple(found)

    def unshard(self) -> None:
        """Note it."""
        self.calls.append("unshard")

    def reshard(self) -> None:
        """Note it."""
        self.calls.append("reshard")

    def reduce_grads(self) -> None:
        """Note it."""
        self.calls.append("reduce_grads")

    def clear(self) -> None:
        """Let go of every microbatch."""
        self._forwards.clear()
        self._later.clear()

    def _times(self, value: torch.Tensor) -> torch.Tensor:
        wanted = torch.is_grad_enabled() and (value.requires_grad or self.weight.requires_grad)
        return (value.detach() * self.weight.detach()).requires_grad_(wanted)

    def _accumulate(self, grad: torch.Tensor | None) -> None:
        if grad is not None and self.weight.requires_grad:
            self.weight.grad = grad if self.weight.grad is None else self.weight.grad + grad


@attrs.frozen(eq=False)
class _Made:
    """What a :class:`FakeProgram` keeps of a microbatch."""

    received: Sequence[torch.Tensor]
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]


def _is_floating(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _requires_grad(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad
