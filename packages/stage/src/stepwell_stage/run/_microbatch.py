"""A batch cut into microbatches, and results put together again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .._compat import tree_flatten, tree_unflatten
from ..exceptions import StageUsageError


def split(value: Any, num_microbatches: int, *, what: str) -> list[Any]:
    """Cut every tensor of a nested value along dim 0 into ``num_microbatches`` parts whose sizes differ by at most one.

    The batch size is that of the first tensor with a dim 0 other than 1. Tensors with that dim 0 are cut. Tensors of no
    dimension, or of size 1 in dim 0 (a mask for all samples), and all that is no tensor go to every microbatch as they are.

    Args:
        value: any nesting of the containers that torch's pytree knows.
        num_microbatches: M.
        what: the value's name, for messages.

    Raises:
        StageUsageError: the batch is smaller than M, or tensors disagree about its size.
    """
    leaves, structure = tree_flatten(value)
    cuttable = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and leaf.shape[0] != 1]
    size = cuttable[0].shape[0] if cuttable else None
    for leaf in cuttable:
        if leaf.shape[0] != size:
            raise StageUsageError(
                f"{what}: tensors of a batch have the same size in dim 0, or size 1 to be shared by all microbatches;"
                f" got {size} and {leaf.shape[0]} (shape {tuple(leaf.shape)})"
            )
    if size is None:
        if num_microbatches > 1 and any(isinstance(leaf, torch.Tensor) and leaf.dim() > 0 for leaf in leaves):
            raise StageUsageError(
                f"{what}: a batch of 1 cannot be cut into {num_microbatches} microbatches;"
                " give at least as many samples as microbatches"
            )
    elif size < num_microbatches:
        raise StageUsageError(
            f"{what}: a batch of {size} cannot be cut into {num_microbatches} microbatches;"
            " give at least as many samples as microbatches"
        )
    cut = [
        leaf.tensor_split(num_microbatches)
        if isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and leaf.shape[0] == size
        else (leaf,) * num_microbatches
        for leaf in leaves
    ]
    return [tree_unflatten([parts[m] for parts in cut], structure) for m in range(num_microbatches)]


def batch_size(value: Any) -> int:
    """Samples in a microbatch: dim 0 of its first tensor that has one, else 1."""
    leaves, _ = tree_flatten(value)
    return next((leaf.shape[0] for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim() > 0), 1)


def signature(value: Any) -> tuple[Any, ...]:
    """What two microbatches must have in common to share their metadata: shapes and dtypes, in order.

    Values that are no tensors do not count: they may differ from one microbatch to the next.
    """
    leaves, _ = tree_flatten(value)
    return tuple((tuple(leaf.shape), leaf.dtype) for leaf in leaves if isinstance(leaf, torch.Tensor))


def merge(parts: Sequence[Any]) -> Any:
    """Put the outputs of all microbatches together again: tensors along dim 0, scalars stacked, the rest from the first.

    Args:
        parts: one value per microbatch, all of the same structure.

    Raises:
        StageUsageError: the microbatches' outputs differ in structure.
    """
    flat = [tree_flatten(part) for part in parts]
    structure = flat[0][1]
    for microbatch, (_, other) in enumerate(flat):
        if other != structure:
            raise StageUsageError(
                f"outputs of microbatch {microbatch} have the structure {other}, those of microbatch 0 {structure}:"
                " they cannot be put together; pass return_outputs=False"
            )
    merged = []
    for values in zip(*(leaves for leaves, _ in flat), strict=True):
        if not isinstance(values[0], torch.Tensor):
            merged.append(values[0])
        elif values[0].dim() == 0:
            merged.append(torch.stack(values))
        else:
            merged.append(torch.cat(values))
    return tree_unflatten(merged, structure)
