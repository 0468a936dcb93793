"""How one rank cuts its batches, step after step.

Most batches look like the one before. How such a one is cut is known, so its tensors are cut at once and nothing else is looked
through. That holds for plain tensors, whose shapes and dtypes decide it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch

from ._agree import Cut
from ._microbatch import Batch, samples, signature

_Args = list[tuple[Any, ...]]
_Kwargs = list[dict[str, Any]]


@attrs.frozen
class _Way:
    """How plain tensors were cut.

    Attributes:
        look: what they looked like, and what else decided it.
        dims: along which dim each was cut; None for one that went to every microbatch as it is.
        count: into how many parts.
    """

    look: object
    dims: tuple[int | None, ...]
    count: int

    @classmethod
    def of(cls, look: object, values: Sequence[torch.Tensor], first: Sequence[torch.Tensor], count: int) -> _Way:
        """From whole values, and what the first microbatch got of them."""
        pairs = zip(values, first, strict=True)
        return cls(look, tuple(None if part is value else _cut_dim(value, part) for value, part in pairs), count)

    def cut(self, values: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, ...]]:
        """What each microbatch gets of others that look the same."""
        columns = [
            [value] * self.count if dim is None else value.tensor_split(self.count, dim)
            for value, dim in zip(values, self.dims, strict=True)
        ]
        return list(zip(*columns, strict=True))


class Cutter:
    """Cuts batches. Mutable: it remembers how the last one was cut.

    Args:
        num_microbatches: M.
        args_spec: how positional inputs are cut.
        kwargs_spec: likewise keyword inputs.
    """

    def __init__(
        self, num_microbatches: int, args_spec: Sequence[Any] | None, kwargs_spec: Mapping[str, Any] | None
    ) -> None:
        self._num_microbatches = num_microbatches
        self._args_spec = args_spec
        self._kwargs_spec = kwargs_spec
        self._last: tuple[_Way, Cut] | None = None
        self._last_keywords: _Way | None = None
        self._last_target: _Way | None = None

    def inputs(self, batch: Batch, *, fewer: bool) -> tuple[_Args, _Kwargs, Cut]:
        """On the first rank: positional and keyword inputs of each microbatch, and how the batch was cut.

        Raises:
            StageUsageError: as :meth:`Batch.inputs`.
        """
        values, names = (*batch.args, *batch.kwargs.values()), tuple(batch.kwargs)
        look = _look(values, len(batch.args), names, fewer) if not batch.is_cut else None
        if look is not None and self._last is not None and self._last[0].look == look:
            way, cut = self._last
            parts, count = way.cut(values), len(batch.args)
            kwargs = [dict(zip(names, part[count:], strict=True)) for part in parts] if names else [{} for _ in parts]
            return [part[:count] for part in parts], kwargs, cut
        inputs = batch.inputs(self._num_microbatches, self._args_spec, self._kwargs_spec, fewer=fewer)
        numbers: dict[tuple[Any, ...], int] = {}
        groups = tuple(numbers.setdefault(signature(part), len(numbers)) for part in inputs)
        args_spec = self._args_spec if batch.arg_mbs is None else None
        # All of one group have the same shapes.
        counts = samples([inputs[groups.index(n)] for n in range(len(numbers))], args_spec, self._kwargs_spec)
        cut = Cut(tuple(counts[group] for group in groups), groups, tuple(numbers))
        self._last = None
        if look is not None and values:
            first = (*inputs[0][0], *(inputs[0][1][name] for name in names))
            self._last = _Way.of(look, values, first, len(inputs)), cut
        return [args for args, _ in inputs], [kwargs for _, kwargs in inputs], cut

    def keywords(self, batch: Batch, sizes: Sequence[int]) -> _Kwargs:
        """On other ranks: keyword inputs of each microbatch, of which the samples are given.

        Raises:
            StageUsageError: as :meth:`Batch.keywords`.
        """
        values, names = tuple(batch.kwargs.values()), tuple(batch.kwargs)
        look = _look(values, names, sizes) if values and batch.kwarg_mbs is None else None
        if look is not None and self._last_keywords is not None and self._last_keywords.look == look:
            return [dict(zip(names, part, strict=True)) for part in self._last_keywords.cut(values)]
        found = batch.keywords(sizes, self._kwargs_spec)
        self._last_keywords = (
            None if look is None else _Way.of(look, values, [found[0][name] for name in names], len(found))
        )
        return found

    def targets(self, batch: Batch, sizes: Sequence[int]) -> list[Any] | None:
        """The target of each microbatch, or None where there is none.

        Raises:
            StageUsageError: as :meth:`Batch.targets`.
        """
        values = (batch.target,)
        look = _look(values, sizes) if batch.target_mbs is None else None
        if look is not None and self._last_target is not None and self._last_target.look == look:
            return [part for (part,) in self._last_target.cut(values)]
        found = batch.targets(sizes)
        self._last_target = None if look is None or found is None else _Way.of(look, values, found[:1], len(found))
        return found


def _look(values: Sequence[Any], *more: object) -> object:
    """What decides how plain tensors are cut, or None where there is anything else among the values."""
    if not all(
        type(value) is torch.Tensor and not value.is_nested and value.layout is torch.strided for value in values
    ):
        return None
    return (*((value.shape, value.dtype) for value in values), *more)


def _cut_dim(value: torch.Tensor, part: torch.Tensor) -> int:
    """The dim in which a part is smaller; 0 where it is the only one."""
    return next((dim for dim, sizes in enumerate(zip(value.shape, part.shape, strict=True)) if len(set(sizes)) > 1), 0)
