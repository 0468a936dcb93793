"""Every name of torch that is not public, in one place.

* ``torch.ops.aten._unsafe_view`` (seen in 2.11 to 2.15): a reshape that autograd does not track as a view. Without it,
  :func:`non_leaf` falls back to a copy, which is right but costs one.
* ``_raw_saved_*`` of autograd's nodes and ``unpack_hook`` of what they give (seen in 2.11 to 2.13): whether hooks stand between a
  node and what it saved. Without it, :func:`has_saved_tensor_hooks` says yes, so that no node's backward is split.
* ``torch.utils._pytree`` (seen in 2.11 to 2.15): torch's own flattening of nested containers. Without it there is no fallback:
  torch itself does not work without it either.
"""

from __future__ import annotations

import functools

import torch
from torch.autograd.graph import Node
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

__all__ = ["has_saved_tensor_hooks", "non_leaf", "tree_flatten", "tree_map", "tree_unflatten"]

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


def has_saved_tensor_hooks(node: Node) -> bool:
    """Whether a node of the autograd graph saved tensors under ``torch.autograd.graph.saved_tensors_hooks``."""
    for name in _saved_names(type(node)):
        saved = getattr(node, name)
        for tensor in saved if isinstance(saved, tuple) else (saved,):
            if getattr(tensor, "unpack_hook", node) is not None:
                return True
    return False


@functools.cache
def _saved_names(kind: type) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))
