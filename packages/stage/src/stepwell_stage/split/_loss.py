"""What a loss function of the caller's own may not use: parameters of the model that other stages compute with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn
from torch.autograd.graph import Node

from ..exceptions import StageUsageError
from ..plan._action import Kind
from ..run._program import EagerProgram


class LastProgram(EagerProgram):
    """Runs the last stage of a cut model, and looks at its first loss: what else than the stage's own parameters it depends on.

    The gradients of others would go to the model, which no stage is, or to nobody.

    Args:
        module: the stage.
        model: the model.
    """

    def __init__(self, module: nn.Module, model: nn.Module) -> None:
        super().__init__(module)
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}

    def backward(
        self, microbatch: int, kind: Kind, roots: Sequence[torch.Tensor], grads: Sequence[torch.Tensor | None]
    ) -> tuple[torch.Tensor | None, ...]:
        """See :meth:`StageProgram.backward`."""
        if self._names:
            _check(roots, self.module, self._names)
            self._names = {}
        return super().backward(microbatch, kind, roots, grads)


def _check(roots: Sequence[torch.Tensor], module: nn.Module, names: Mapping[int, str]) -> None:
    own = set(map(id, module.parameters()))
    for leaf in _leaves([root.grad_fn for root in roots if root.grad_fn is not None]):
        if id(leaf) in names and id(leaf) not in own:
            raise StageUsageError(
                f"loss_fn uses {names[id(leaf)]!r} of the model, which other stages compute with, so its gradient would be lost:"
                " put this part of the loss into the model's forward"
            )


def _leaves(nodes: list[Node]) -> Iterator[torch.Tensor]:
    """The leaves that a graph leads to."""
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            yield leaf
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                nodes.append(following)
