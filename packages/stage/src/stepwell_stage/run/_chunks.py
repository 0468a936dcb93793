"""How a batch is cut into microbatches, and results put together again: the one place where tensors are cut and joined.

What is cut where is said by a *spec* for each value: a :class:`TensorChunkSpec`, ours or torch's, or None for a value that every
microbatch gets as it is. Values without a spec follow a rule: torch's in :func:`split_args_kwargs_into_chunks`, a stricter one in
a step (``split`` in ``_microbatch.py``).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import attrs
import torch
from torch.distributed.tensor import DTensor, Shard

from .._compat import tree_flatten, tree_map, tree_unflatten
from ..exceptions import StageUsageError


@attrs.frozen
class TensorChunkSpec:
    """Says along which dim a tensor is cut into microbatches.

    Wherever one is taken, torch's own ``TensorChunkSpec`` is taken too; None in its place means that every microbatch gets the
    whole value.

    Example::

        Executor(stages, schedule, loss_fn, args_chunk_spec=(TensorChunkSpec(1),), kwargs_chunk_spec={"mask": None})

    Attributes:
        split_dim: the dim, from 0, or from the last one with -1.
    """

    split_dim: int

    @staticmethod
    def from_tuple(chunk_dims: tuple[int, ...]) -> tuple[TensorChunkSpec, ...]:
        """Specs for positional arguments: ``from_tuple((0, 1))`` cuts the first along dim 0, the second along dim 1."""
        specs: tuple[TensorChunkSpec, ...] = tree_map(TensorChunkSpec, chunk_dims)
        return specs

    @staticmethod
    def from_dict(chunk_dims: dict[str, int]) -> dict[str, TensorChunkSpec]:
        """Specs for keyword arguments: ``from_dict({"ids": 0, "mask": 1})``."""
        specs: dict[str, TensorChunkSpec] = tree_map(TensorChunkSpec, chunk_dims)
        return specs


Spec: TypeAlias = "TensorChunkSpec | None"

BY_RULE = object()
"""In place of a spec: cut this value by the rule for values without one."""


def split_args_kwargs_into_chunks(
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None,
    chunks: int,
    args_chunk_spec: tuple[Any, ...] | None = None,
    kwargs_chunk_spec: Mapping[str, Any] | None = None,
) -> tuple[list[tuple[Any, ...]], list[dict[str, Any]]]:
    """Cut the arguments of a call, as torch's function of this name does.

    Every tensor without a spec is cut along dim 0, and every other value is shared. There are at most ``chunks`` chunks, and no
    more than the smallest tensor has rows to give. (:meth:`Executor.step` is stricter.)

    Args:
        args: positional arguments, nested as you like.
        kwargs: keyword arguments.
        chunks: how many chunks are wanted.
        args_chunk_spec: a spec for each positional argument, or for each value inside it.
        kwargs_chunk_spec: likewise for keyword arguments; those that it does not name follow the rule.

    Returns:
        The arguments of each chunk, and the keyword arguments of each.

    Raises:
        StageUsageError: a spec does not fit its value.
    """
    value, spec = with_specs(args, dict(kwargs or {}), args_chunk_spec, kwargs_chunk_spec)
    leaves, structure, given = flatten(value, spec, what="arguments")
    specs = [
        TensorChunkSpec(0) if one is BY_RULE and has_rows(leaf) else one
        for leaf, one in zip(leaves, given, strict=True)
    ]
    specs = [None if one is BY_RULE else one for one in specs]
    sizes = [
        rows(leaf, one) for leaf, one in zip(leaves, specs, strict=True) if one is not None and not is_shared_mask(leaf)
    ]
    parts = cut(leaves, specs, max(1, min([chunks, *sizes])))
    whole = [tree_unflatten(part, structure) for part in parts]
    return [one for one, _ in whole], [other for _, other in whole]


def merge_chunks(chunks: Sequence[Any], chunk_spec: Any = None) -> Any:
    """Join the values of several chunks, as torch's function of this name does.

    Without a spec, tensors are joined along dim 0, tensors of no dimension are stacked, and of other values the first is taken.
    With one, a value whose spec is None must be the same in every chunk, and torch's reducers (``sum_reducer``) reduce.

    Args:
        chunks: one value per chunk, all of the same structure.
        chunk_spec: a spec for each value, or for all that is inside it.

    Raises:
        StageUsageError: there are no chunks, they differ in structure, or a spec does not fit.
    """
    if not chunks:
        raise StageUsageError("nothing to merge: there are no chunks")
    first, structure, specs = flatten(chunks[0], BY_RULE if chunk_spec is None else chunk_spec, what="chunk 0")
    columns: list[list[Any]] = [[leaf] for leaf in first]
    for number, chunk in enumerate(chunks[1:], start=1):
        leaves, other = tree_flatten(chunk)
        if other != structure:
            raise StageUsageError(
                f"microbatch {number} has the structure {other}, microbatch 0 has {structure}: they cannot be put together"
            )
        for column, leaf in zip(columns, leaves, strict=True):
            column.append(leaf)
    return tree_unflatten([_join(column, spec) for column, spec in zip(columns, specs, strict=True)], structure)


def with_specs(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    args_chunk_spec: Sequence[Any] | None,
    kwargs_chunk_spec: Mapping[str, Any] | None,
) -> tuple[Any, Any]:
    """Arguments as one value, and specs for all of it. A spec for a keyword argument that this rank was not given is no error.

    Raises:
        StageUsageError: there are not as many specs as positional arguments.
    """
    if args_chunk_spec is None or not args:
        for_args: tuple[Any, ...] = (BY_RULE,) * len(args)
    elif len(args_chunk_spec) != len(args):
        raise StageUsageError(
            f"args_chunk_spec has {len(args_chunk_spec)} specs, but there are {len(args)} positional arguments: give one for"
            " each, None for those that every microbatch gets whole"
        )
    else:
        for_args = tuple(args_chunk_spec)
    named = kwargs_chunk_spec or {}
    return (args, kwargs), (for_args, {name: named.get(name, BY_RULE) for name in kwargs})


def flatten(value: Any, spec: Any, *, what: str) -> tuple[list[Any], Any, list[Any]]:
    """Leaves and structure of a value, and the spec of each leaf: a TensorChunkSpec, None, a reducer, or BY_RULE.

    Raises:
        StageUsageError: the specs do not have the value's structure.
    """
    leaves, structure = tree_flatten(value, is_leaf=_is_mask)
    specs: list[Any] = []

    def spread(one: Any, below: Any) -> None:
        specs.extend([one] * len(tree_flatten(below)[0]))

    try:
        tree_map(spread, spec, tree_unflatten(list(range(len(leaves))), structure))
    except ValueError as error:
        raise StageUsageError(f"{what}: specs {spec} do not have the structure of the values: {error}") from error
    return leaves, structure, [_checked(one, what) for one in specs]


def rows(leaf: Any, spec: TensorChunkSpec) -> int:
    """How many rows there are along the spec's dim.

    Raises:
        StageUsageError: the value is no tensor, or has no such dim, or the spec is for results.
    """
    if not isinstance(spec, TensorChunkSpec):
        raise StageUsageError(f"{spec} says how results are put together: values are cut by a TensorChunkSpec, or None")
    dim = spec.split_dim
    if _is_mask(leaf):
        if dim != 0:
            raise StageUsageError(f"a BlockMask is cut along dim 0, its batch, not {dim}")
        return int(leaf.kv_num_blocks.shape[0])
    if not isinstance(leaf, torch.Tensor):
        raise StageUsageError(f"only tensors are cut, got {type(leaf).__qualname__} with {spec}: give it the spec None")
    if not -leaf.dim() <= dim < leaf.dim():
        raise StageUsageError(f"a tensor of shape {tuple(leaf.shape)} has no dim {dim} to cut along")
    return leaf.shape[dim]


def cut(leaves: Sequence[Any], specs: Sequence[Spec], count: int) -> list[list[Any]]:
    """The leaves of each of ``count`` chunks; every dim that is cut has at least ``count`` rows, or belongs to a shared mask."""
    columns = [_cut(leaf, spec, count) for leaf, spec in zip(leaves, specs, strict=True)]
    return [[column[number] for column in columns] for number in range(count)]


def _cut(leaf: Any, spec: Spec, count: int) -> Sequence[Any]:
    if spec is None or is_shared_mask(leaf):
        return [leaf] * count
    if _is_mask(leaf):
        return _cut_mask(leaf, count)
    if isinstance(leaf, DTensor):
        return _cut_dtensor(leaf, spec.split_dim, count)
    tensor: torch.Tensor = leaf
    try:
        return tensor.tensor_split(count, spec.split_dim)
    except RuntimeError as error:  # sparse and nested tensors cannot be cut
        raise StageUsageError(
            f"a {type(tensor).__name__} of layout {tensor.layout} cannot be cut along dim {spec.split_dim}: cut it yourself"
            " and pass its parts, as arg_mbs, kwarg_mbs or target_mbs of Executor.step"
        ) from error


def _cut_dtensor(whole: DTensor, dim: int, count: int) -> list[torch.Tensor]:
    """Every rank cuts its own shard, so that nothing is sent; a chunk is what the ranks' pieces make together."""
    dim %= whole.dim()
    mesh, placements = whole.device_mesh, whole.placements
    shards = [whole.shape[dim]]
    for axis, placement in enumerate(placements):
        if placement.is_shard(dim):
            if type(placement) is not Shard:
                raise StageUsageError(
                    f"a DTensor placed as {placement} cannot be cut along dim {dim}: redistribute it first"
                )
            shards = [piece for size in shards for piece in _shard_sizes(size, mesh.size(axis))]
    chunks: list[torch.Tensor] = []
    for number, local in enumerate(whole.to_local().tensor_split(count, dim)):
        pieces = [size // count + (number < size % count) for size in shards]
        shape = list(whole.shape)
        shape[dim] = sum(pieces)
        if len(pieces) > 1 and pieces != _expected_pieces(shape[dim], placements, mesh, dim):
            raise StageUsageError(
                f"a DTensor of shape {tuple(whole.shape)}, {placements}, cannot be cut into {count} chunks along dim {dim}: the"
                " pieces of its shards would not be shards of the chunk; use sizes that the number of shards and chunks divides"
            )
        stride = torch.empty(shape, device="meta").stride()
        chunks.append(
            DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)
        )
    return chunks


def _expected_pieces(size: int, placements: Sequence[Any], mesh: Any, dim: int) -> list[int]:
    sizes = [size]
    for axis, placement in enumerate(placements):
        if placement.is_shard(dim):
            sizes = [piece for one in sizes for piece in _shard_sizes(one, mesh.size(axis))]
    return sizes


def _shard_sizes(size: int, ranks: int) -> list[int]:
    """Rows of each rank's shard: as torch.chunk cuts, padded with empty ones."""
    most = math.ceil(size / ranks)
    return [max(0, min(most, size - most * rank)) for rank in range(ranks)]


def _cut_mask(mask: Any, count: int) -> list[Any]:
    """A flex-attention mask along its batch: the blocks are cut, and the mask function is told the batch index that it knows."""
    names = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
    whole = {name: getattr(mask, name) for name in names}
    parts = {name: [None] * count if one is None else one.tensor_split(count) for name, one in whole.items()}
    chunks = []
    start = 0
    for number in range(count):
        blocks: dict[str, Any] = {name: part[number] for name, part in parts.items()}
        # A tensor, so that what traces the function takes the offset as an input and does not write the first one down.
        mask_mod = _shifted(mask.mask_mod, torch.tensor(start, device=mask.kv_num_blocks.device))
        chunks.append(
            type(mask).from_kv_blocks(
                **blocks, BLOCK_SIZE=mask.BLOCK_SIZE, mask_mod=mask_mod, seq_lengths=mask.seq_lengths
            )
        )
        start += blocks["kv_num_blocks"].shape[0]
    return chunks


def _shifted(mask_mod: Any, start: torch.Tensor) -> Any:
    def shifted(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return mask_mod(b + start, h, q_idx, kv_idx)

    return shifted


def _join(values: list[Any], spec: Any) -> Any:
    first = values[0]
    if spec is BY_RULE:
        if not isinstance(first, torch.Tensor):
            return first
        return torch.stack(values) if first.dim() == 0 else _cat(values, 0)
    if hasattr(spec, "reduce_fn"):
        total = spec.init_value
        for value in values:
            total = spec.reduce_fn(total, value)
        return total
    if spec is not None:
        rows(first, spec)
        return _cat(values, spec.split_dim)
    for number, value in enumerate(values):
        same = torch.equal(value, first) if isinstance(value, torch.Tensor) else value == first
        if not same:
            raise StageUsageError(
                f"a value whose spec is None must be the same in every chunk, but microbatch {number} has {value},"
                f" microbatch 0 {first}"
            )
    return first


def _cat(values: list[Any], dim: int) -> torch.Tensor:
    if not any(isinstance(value, DTensor) for value in values):
        try:
            return torch.cat(values, dim)
        except RuntimeError as error:
            shapes = [tuple(value.shape) for value in values]
            raise StageUsageError(f"tensors of shapes {shapes} cannot be joined along dim {dim}") from error
    first = values[0]
    for number, value in enumerate(values):
        if (
            not isinstance(value, DTensor)
            or value.placements != first.placements
            or value.device_mesh != first.device_mesh
        ):
            raise StageUsageError(
                f"chunks that are DTensors have one mesh and placements, but chunk {number} is"
                f" {getattr(value, 'placements', 'a plain tensor')}, chunk 0 {getattr(first, 'placements', 'a plain tensor')}"
            )
    shape = list(first.shape)
    shape[dim] = sum(value.shape[dim] for value in values)
    stride = torch.empty(shape, device="meta").stride()
    local = torch.cat([value.to_local() for value in values], dim)
    return DTensor.from_local(
        local, first.device_mesh, first.placements, run_check=False, shape=torch.Size(shape), stride=stride
    )


def _checked(spec: Any, what: str) -> Any:
    """Ours for torch's own specs; None for torch's mark of a shared value."""
    if spec is None or spec is BY_RULE or isinstance(spec, TensorChunkSpec) or hasattr(spec, "reduce_fn"):
        return spec
    if isinstance(getattr(spec, "split_dim", None), int):
        return TensorChunkSpec(spec.split_dim)
    if "_Replicate" in (getattr(spec, "__name__", ""), type(spec).__name__):
        return None
    raise StageUsageError(f"{what}: a spec is a TensorChunkSpec or None, got {spec!r}")


def has_rows(leaf: Any) -> bool:
    """Whether it has a dim 0 that could be cut."""
    return _is_mask(leaf) or (isinstance(leaf, torch.Tensor) and leaf.dim() > 0)


def _is_mask(value: Any) -> bool:
    """Whether it is a BlockMask, without importing flex attention, which takes its time."""
    module = sys.modules.get("torch.nn.attention.flex_attention")
    return module is not None and isinstance(value, module.BlockMask)


def is_shared_mask(value: Any) -> bool:
    """Whether it is a BlockMask for all samples."""
    return _is_mask(value) and value.kv_num_blocks.shape[0] == 1
