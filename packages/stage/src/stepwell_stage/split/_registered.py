"""What of a model is to learn."""

from __future__ import annotations

import torch
from torch import nn

from ..exceptions import StageUsageError
from ._state import plain_in


def check_registered(model: nn.Module) -> None:
    """Refuse tensors that are to learn and are no parameters: each stage would have one of its own.

    Raises:
        StageUsageError: there is such a tensor.
    """
    known = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    seen: set[int] = set()
    for path, module in model.named_modules():
        for name, _, _, value in plain_in(module, path, seen):
            if isinstance(value, torch.Tensor) and value.requires_grad and id(value) not in known:
                if not value.is_leaf:
                    raise StageUsageError(
                        f"{name!r} is made of parameters and kept, as old weight_norm and pruning do, or an earlier forward, and"
                        " cannot be copied: use torch.nn.utils.parametrizations, or prune.remove(), or del it, before the split"
                    )
                raise StageUsageError(
                    f"{name!r} requires a gradient and is not registered, so every stage would have another one: make it an"
                    " nn.Parameter or a child module, in an nn.ParameterList or nn.ModuleList where there are several"
                )
