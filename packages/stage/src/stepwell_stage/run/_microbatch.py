"""A batch cut into microbatches, and results put together again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .._compat import tree_flatten, tree_unflatten
from ..exceptions import StageUsageError
from ._chunks import BY_RULE, TensorChunkSpec, cut, flatten, has_rows, is_shared_mask, merge_chunks, rows


def split(value: Any, num_microbatches: int, *, what: str, spec: Any = BY_RULE) -> list[Any]:
    """Cut the tensors of a nested value into ``num_microbatches`` parts whose sizes differ by at most one.

    Without a spec, the batch size is that of the first tensor with a dim 0 other than 1, and tensors of that size are cut along
    it. Tensors of no dimension, or of size 1 in dim 0 (a mask for all samples), and all that is no tensor go to every microbatch
    as they are.

    Args:
        value: any nesting of the containers that torch's pytree knows.
        num_microbatches: M.
        what: the value's name, for messages.
        spec: for each value, or for all inside it, a :class:`TensorChunkSpec`, None for one that is shared, or ``BY_RULE``.

    Raises:
        StageUsageError: the batch is smaller than M, tensors disagree about its size, or a spec does not fit.
    """
    leaves, structure, given = flatten(value, spec, what=what)
    by_rule = [leaf for leaf, one in zip(leaves, given, strict=True) if one is BY_RULE]
    size = _common_size(by_rule, num_microbatches, what)
    specs = [
        (TensorChunkSpec(0) if size is not None and _dim_0(leaf) == size else None) if one is BY_RULE else one
        for leaf, one in zip(leaves, given, strict=True)
    ]
    for leaf, one in zip(leaves, specs, strict=True):
        if one is not None and not is_shared_mask(leaf) and rows(leaf, one) < num_microbatches:
            raise StageUsageError(
                f"{what}: a batch of {rows(leaf, one)} cannot be cut into {num_microbatches} microbatches;"
                " give at least as many samples as microbatches"
            )
    return [tree_unflatten(part, structure) for part in cut(leaves, specs, num_microbatches)]


def _common_size(leaves: Sequence[Any], num_microbatches: int, what: str) -> int | None:
    """The size of the batch, by the values that no spec says how to cut; None where none of them is to be cut."""
    sizes = [(leaf, size) for leaf in leaves if (size := _dim_0(leaf)) not in (None, 1)]
    for leaf, size in sizes:
        if size != sizes[0][1]:
            raise StageUsageError(
                f"{what}: tensors of a batch have the same size in dim 0, or size 1 to be shared by all microbatches;"
                f" got {sizes[0][1]} and {size} (shape {tuple(leaf.shape)})"
            )
    if not sizes and num_microbatches > 1 and any(_dim_0(leaf) == 1 for leaf in leaves):
        raise StageUsageError(
            f"{what}: a batch of 1 cannot be cut into {num_microbatches} microbatches;"
            " give at least as many samples as microbatches"
        )
    return sizes[0][1] if sizes else None


def _dim_0(leaf: Any) -> int | None:
    return rows(leaf, TensorChunkSpec(0)) if has_rows(leaf) else None


def batch_size(value: Any, spec: Any = BY_RULE) -> int:
    """Samples in a microbatch: the rows of the first tensor that was cut, along the dim that it was cut along; 1 if none was."""
    leaves, _, specs = flatten(value, spec, what="microbatch")
    for leaf, one in zip(leaves, specs, strict=True):
        if one is not None and has_rows(leaf):
            return rows(leaf, TensorChunkSpec(0) if one is BY_RULE else one)
    return 1


def signature(value: Any) -> tuple[Any, ...]:
    """What two microbatches must have in common to share their metadata: shapes and dtypes, in order.

    Values that are no tensors do not count: they may differ from one microbatch to the next.
    """
    leaves, _ = tree_flatten(value)
    return tuple((tuple(leaf.shape), leaf.dtype) for leaf in leaves if isinstance(leaf, torch.Tensor))


def merge(parts: Sequence[Any], spec: Any = None) -> Any:
    """Put the outputs of all microbatches together again; see :func:`merge_chunks`.

    Raises:
        StageUsageError: the microbatches' outputs differ in structure, or the spec does not fit them.
    """
    try:
        return merge_chunks(parts, spec)
    except StageUsageError as error:
        raise StageUsageError(f"outputs of the microbatches: {error}; pass return_outputs=False") from error
