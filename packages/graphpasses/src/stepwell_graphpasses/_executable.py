"""A finished graph, ready to be called."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch

from . import _compat as compat
from ._codegen import compile_graph
from ._graph import JointGraph
from ._variants import Variant
from .exceptions import GradientError


@attrs.frozen
class StepOutput:
    """What a graph gave.

    Attributes:
        loss: the loss.
        losses: the named losses.
        gradients: by the parameter's canonical name, as the variant says.
    """

    loss: torch.Tensor
    losses: dict[str, Any]
    gradients: dict[str, torch.Tensor]


@attrs.frozen(eq=False)
class Executable:
    """One variant of one capture, after all passes."""

    joint: JointGraph
    variant: Variant
    _step: Callable[[list[Any]], Sequence[Any]] = attrs.field(init=False, repr=False)

    @_step.default
    def _compile(self) -> Callable[[list[Any]], Sequence[Any]]:
        return compile_graph(self.joint.graph, self.joint.root)

    def __call__(
        self,
        parameters: Sequence[torch.Tensor],
        buffers: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        carried: Mapping[str, torch.Tensor],
    ) -> StepOutput:
        """Run the graph; nothing but buffers is written.

        Raises:
            GradientError: what is carried from earlier microbatches is not what the graph adds.
        """
        joint = self.joint
        if set(carried) != set(joint.extra_inputs):
            odd = sorted(set(carried) ^ set(joint.extra_inputs))
            raise GradientError(
                f"microbatches of one accumulation have gradients of different parameters: {', '.join(odd[:5])}; use the same"
                " train function and the same training mode for all of them, or unused='zeros'"
            )
        device = inputs[0].device.type if inputs else parameters[0].device.type
        values = [*parameters, *buffers, *inputs, *(carried[name] for name in joint.extra_inputs)]
        # The casts of autocast are in the graph already, if it was captured under it.
        with torch.no_grad(), torch.autocast(device, enabled=False), compat.below_autograd():
            flat = self._step(values)
        return self._named(flat)

    def _named(self, flat: Sequence[Any]) -> StepOutput:
        joint = self.joint
        values = iter(flat[1:])
        losses = {name: next(values) if value is None else value for name, value in joint.losses}
        gradients = dict(zip(joint.gradients, values, strict=True))
        return StepOutput(flat[0], losses, gradients)
