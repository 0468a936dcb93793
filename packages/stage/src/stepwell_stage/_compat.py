"""Every name of torch that is not public, in one place.

* ``torch.ops.aten._unsafe_view`` (seen in 2.11 to 2.15): a reshape that autograd does not track as a view. Without it,
  :func:`non_leaf` falls back to a copy, which is right but costs one.
* ``torch.utils._pytree`` (seen in 2.11 to 2.15): torch's own flattening of nested containers. Without it there is no fallback:
  torch itself does not work without it either.
"""

from __future__ import annotations

import torch
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

__all__ = ["non_leaf", "tree_flatten", "tree_map", "tree_unflatten"]

_unsafe_view = getattr(torch.ops.aten, "_unsafe_view", None)


def non_leaf(leaf: torch.Tensor) -> torch.Tensor:
    """The values of ``leaf``, in the same memory, as a tensor that is no leaf of the autograd graph and no view.

    In one process a layer may change its input in place, since the input is another layer's result. Leaves and their views
    refuse that, so a stage does not hand the leaf itself to its module.
    """
    if _unsafe_view is None:
        return leaf.clone()
    result: torch.Tensor = _unsafe_view(leaf, leaf.shape)
    return result
