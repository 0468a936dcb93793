"""What a loss function of the caller's own may not use: parameters of the model that other stages compute with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import Node

from ..exceptions import StageUsageError
from ..run._program import StageProgram


def check_loss(program: StageProgram, model: nn.Module) -> None:
    """Look at the first loss of a last stage: what else than the stage's own parameters it depends on.

    The gradients of others would go to the model, which no stage is, or to nobody.

    Args:
        program: of the last stage.
        model: the model.
    """
    module: nn.Module = program.module  # type: ignore[attr-defined]
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    backward = program.backward

    def checked(microbatch: int, kind: Any, roots: Sequence[torch.Tensor], grads: Sequence[torch.Tensor | None]) -> Any:
        del vars(program)["backward"]
        _check(roots, module, names)
        return backward(microbatch, kind, roots, grads)

    vars(program)["backward"] = checked


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
