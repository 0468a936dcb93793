"""A batch cut into microbatches, and results put together again."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch

from .._compat import tree_flatten, tree_unflatten
from ..exceptions import StageUsageError
from ._chunks import BY_RULE, TensorChunkSpec, cut, flatten, has_rows, is_shared_mask, merge_chunks, rows, with_specs


def split(
    value: Any,
    num_microbatches: int,
    *,
    what: str,
    spec: Any = BY_RULE,
    fewer: bool = False,
    has_batch: bool = True,
    like: Sequence[int] | None = None,
) -> list[Any]:
    """Cut the tensors of a nested value into ``num_microbatches`` parts whose sizes differ by at most one.

    Without a spec, the batch size is that of the first tensor with a dim 0 other than 1, and tensors of that size are cut along
    it. Tensors of no dimension, or of size 1 in dim 0 (a mask for all samples), and all that is no tensor go to every microbatch
    as they are.

    Args:
        value: any nesting of the containers that torch's pytree knows.
        num_microbatches: M.
        what: the value's name, for messages.
        spec: for each value, or for all inside it, a :class:`TensorChunkSpec`, None for one that is shared, or ``BY_RULE``.
        fewer: whether a smaller batch gives fewer parts, instead of being refused.
        has_batch: whether tensors of which all have size 1 are a batch of 1; else they are shared.
        like: samples of each microbatch, with which the rows of each part have to go.

    Raises:
        StageUsageError: the batch is smaller than M, tensors disagree about its size, or a spec does not fit.
    """
    leaves, structure, given = flatten(value, spec, what=what)
    by_rule = [leaf for leaf, one in zip(leaves, given, strict=True) if one is BY_RULE]
    _check_known(by_rule, what)
    size = _common_size(by_rule, what)
    specs = [
        (TensorChunkSpec(0) if size is not None and _dim_0(leaf) == size else None) if one is BY_RULE else one
        for leaf, one in zip(leaves, given, strict=True)
    ]
    sizes = [
        rows(leaf, one) for leaf, one in zip(leaves, specs, strict=True) if one is not None and not is_shared_mask(leaf)
    ]
    if not sizes and has_batch and any(_dim_0(leaf) == 1 for leaf in by_rule):
        sizes = [1]
    least = min(sizes, default=num_microbatches)
    if least < (1 if fewer else num_microbatches):
        raise StageUsageError(
            f"{what}: a batch of {least} cannot be cut into {num_microbatches} microbatches;"
            " give at least as many samples as microbatches"
        )
    count = min(num_microbatches, least)
    if like is not None and size is not None:
        _check_alike([size // count + (number < size % count) for number in range(count)], like, what)
    return [tree_unflatten(part, structure) for part in cut(leaves, specs, count)]


def _check_alike(sizes: Sequence[int], like: Sequence[int], what: str) -> None:
    """Refuse parts that have not the same number of rows for each sample: those of one microbatch would meet another's."""
    if any(size * sum(like) != count * sum(sizes) for size, count in zip(sizes, like, strict=True)):
        raise StageUsageError(
            f"{what}: {sum(sizes)} rows were cut into {_listed(sizes)}, which do not go with the inputs' microbatches of"
            f" {_listed(like)} samples: give as many rows for each sample, or cut it yourself (kwarg_mbs=, target_mbs=)"
        )


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def _check_known(leaves: Sequence[Any], what: str) -> None:
    """Refuse containers of tensors that torch's pytree does not look into: every microbatch would get all of the batch."""
    for leaf in leaves:
        if isinstance(leaf, Mapping):
            held = list(leaf.values())
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            held = [getattr(leaf, field.name, None) for field in dataclasses.fields(leaf)]
        else:
            continue
        if any(isinstance(one, torch.Tensor) and _dim_0(one) not in (None, 1) for one in held):
            raise StageUsageError(
                f"{what}: a {type(leaf).__qualname__} holds tensors, but is no container that torch's pytree knows: it would go"
                " to every microbatch as a whole: pass a dict or tuple of its tensors, or cut it yourself (arg_mbs=, kwarg_mbs=);"
                " if all of it is meant for each, give it the spec None"
            )


def _common_size(leaves: Sequence[Any], what: str) -> int | None:
    """The size of the batch, by the values that no spec says how to cut; None where none of them is to be cut."""
    sizes = [(leaf, size) for leaf in leaves if (size := _dim_0(leaf)) not in (None, 1)]
    for leaf, size in sizes:
        if size != sizes[0][1]:
            raise StageUsageError(
                f"{what}: tensors of a batch have the same size in dim 0, or size 1 to be shared by all microbatches;"
                f" got {sizes[0][1]} and {size} (shape {tuple(leaf.shape)})"
            )
    return sizes[0][1] if sizes else None


def _dim_0(leaf: Any) -> int | None:
    return rows(leaf, TensorChunkSpec(0)) if has_rows(leaf) else None


@attrs.frozen
class Batch:
    """What a rank was given for a step: whole, to be cut, or cut by the caller; see the arguments of :meth:`Executor.step`."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = attrs.field(factory=dict)
    target: Any = None
    arg_mbs: Sequence[tuple[Any, ...]] | None = None
    kwarg_mbs: Sequence[Mapping[str, Any]] | None = None
    target_mbs: Sequence[Any] | None = None

    @property
    def is_cut(self) -> bool:
        """Whether the caller cut some of the inputs."""
        return self.arg_mbs is not None or self.kwarg_mbs is not None

    @property
    def has_args(self) -> bool:
        """Whether there are positional inputs."""
        return bool(self.args) or self.arg_mbs is not None

    @property
    def has_target(self) -> bool:
        """Whether there is a target."""
        return self.target is not None or self.target_mbs is not None

    def check(self) -> None:
        """Refuse what is given twice, or not as it should be.

        Raises:
            StageUsageError: which.
        """
        if self.args and self.arg_mbs is not None:
            raise StageUsageError("positional inputs were given both whole and as arg_mbs: give one of them")
        if self.target is not None and self.target_mbs is not None:
            raise StageUsageError("target and target_mbs were both given: give one of them")
        kinds = (
            ("arg_mbs", self.arg_mbs, tuple),
            ("kwarg_mbs", self.kwarg_mbs, Mapping),
            ("target_mbs", self.target_mbs, object),
        )
        for name, parts, kind in kinds:
            if parts is not None and not isinstance(parts, list | tuple):
                raise StageUsageError(
                    f"{name} is a list with an entry for each microbatch, got {type(parts).__qualname__}"
                )
            for number, part in enumerate(parts or ()):
                if not isinstance(part, kind):
                    raise StageUsageError(
                        f"{name} holds a {kind.__name__.lower()} for each microbatch, but microbatch {number} is"
                        f" {type(part).__qualname__}"
                    )
        for number, part in enumerate(self.kwarg_mbs or ()):
            twice = sorted(part.keys() & self.kwargs.keys())
            if twice:
                raise StageUsageError(f"kwarg_mbs of microbatch {number} has {twice[0]!r}, which was given whole too")

    def inputs(
        self,
        num_microbatches: int,
        args_spec: Sequence[Any] | None,
        kwargs_spec: Mapping[str, Any] | None,
        *,
        fewer: bool = False,
        like: Sequence[int] | None = None,
    ) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        """Positional and keyword inputs of each microbatch.

        Args:
            num_microbatches: M.
            args_spec: how positional inputs are cut.
            kwargs_spec: likewise keyword inputs.
            fewer: whether there may be fewer microbatches than M.
            like: samples of each microbatch, on a rank that has no batch of its own; there a value of size 1 is shared.

        Raises:
            StageUsageError: what was given cannot be cut, or is not cut into M parts, or what is whole does not go with the rest.
        """
        count = _count({"arg_mbs": self.arg_mbs, "kwarg_mbs": self.kwarg_mbs}, num_microbatches, fewer=fewer)
        whole, spec = with_specs(self.args, dict(self.kwargs), args_spec, kwargs_spec)
        if count is None:
            parts = split(
                whole, num_microbatches, what="inputs", spec=spec, fewer=fewer, has_batch=like is None, like=like
            )
        else:
            if self.arg_mbs is not None:  # keyword inputs that the caller cut may be of other things than samples
                like = samples([(args, {}) for args in self.arg_mbs])
            parts = split(whole, count, what="inputs", spec=spec, has_batch=False, like=like)
        inputs = []
        for number, (args, kwargs) in enumerate(parts):
            mine = args if self.arg_mbs is None else self.arg_mbs[number]
            inputs.append((mine, kwargs if self.kwarg_mbs is None else {**kwargs, **self.kwarg_mbs[number]}))
        return inputs

    def keywords(self, sizes: Sequence[int], spec: Mapping[str, Any] | None) -> list[dict[str, Any]]:
        """Keyword inputs of each microbatch, on a rank that has no batch of its own.

        Args:
            sizes: samples of each microbatch.
            spec: how keyword inputs are cut.

        Raises:
            StageUsageError: as :meth:`inputs`.
        """
        if not self.kwargs and self.kwarg_mbs is None:
            return [{}] * len(sizes)
        return [kwargs for _, kwargs in self.inputs(len(sizes), None, spec, like=sizes)]

    def targets(self, sizes: Sequence[int]) -> list[Any] | None:
        """The target of each microbatch, or None where there is none.

        Args:
            sizes: samples of each microbatch.

        Raises:
            StageUsageError: as :meth:`inputs`; or the target's rows do not go with the samples.
        """
        if self.target_mbs is not None:
            _count({"target_mbs": self.target_mbs}, len(sizes), fewer=False)
            return list(self.target_mbs)
        return None if self.target is None else split(self.target, len(sizes), what="target", like=sizes)


def _count(given: Mapping[str, Sequence[Any] | None], num_microbatches: int, *, fewer: bool) -> int | None:
    """How many microbatches the caller cut; None where none of these was given."""
    count = None
    for name, parts in given.items():
        if parts is None:
            continue
        wanted = num_microbatches if count is None else count
        if len(parts) != wanted and not (fewer and count is None and 0 < len(parts) < wanted):
            raise StageUsageError(
                f"{name} has {len(parts)} microbatches, but {wanted} are wanted: give one entry for each, or give the whole batch"
            )
        count = len(parts)
    return count


def samples(
    inputs: Sequence[tuple[tuple[Any, ...], dict[str, Any]]],
    args_spec: Sequence[Any] | None = None,
    kwargs_spec: Mapping[str, Any] | None = None,
) -> tuple[int, ...]:
    """Samples of each of some microbatches: the rows of the first tensor that was cut; 1 where none was.

    A tensor with one row in each of them went to all microbatches, or each has one sample.

    Args:
        inputs: positional and keyword inputs of each.
        args_spec: how positional inputs were cut.
        kwargs_spec: likewise keyword inputs.
    """
    columns = zip(*(_rows_of(part, with_specs(*part, args_spec, kwargs_spec)[1]) for part in inputs), strict=False)
    return next((column for column in columns if any(count != 1 for count in column)), (1,) * len(inputs))


def _rows_of(part: Any, spec: Any) -> list[int]:
    leaves, _, specs = flatten(part, spec, what="microbatch")
    return [
        rows(leaf, TensorChunkSpec(0) if one is BY_RULE else one)
        for leaf, one in zip(leaves, specs, strict=True)
        if one is not None and has_rows(leaf)
    ]


def signature(value: tuple[tuple[Any, ...], Mapping[str, Any]]) -> tuple[tuple[Any, Any], ...]:
    """What two microbatches must have in common to share their metadata, as pairs that a message shows in reverse.

    Shapes and dtypes, in order; names of keyword inputs, and those of their values that choose a way through a model: strings,
    booleans and None. Other values that are no tensors do not count: they may differ from one microbatch to the next.

    Args:
        value: a microbatch's positional and keyword inputs.
    """
    args, kwargs = value
    leaves: Sequence[Any] = args
    if kwargs or not all(isinstance(arg, torch.Tensor) for arg in args):
        leaves, _ = tree_flatten(value)
    named = (
        (repr(one), f"{name} =") if one is None or isinstance(one, str | bool) else (name, "input")
        for name, one in sorted(kwargs.items())
    )
    return (*((tuple(leaf.shape), leaf.dtype) for leaf in leaves if isinstance(leaf, torch.Tensor)), *named)


def merge(parts: Sequence[Any], spec: Any = None) -> Any:
    """Put the outputs of all microbatches together again; see :func:`merge_chunks`.

    Raises:
        StageUsageError: the microbatches' outputs differ in structure, or the spec does not fit them.
    """
    try:
        return merge_chunks(parts, spec)
    except StageUsageError as error:
        raise StageUsageError(f"outputs of the microbatches: {error}; pass return_outputs=False") from error
