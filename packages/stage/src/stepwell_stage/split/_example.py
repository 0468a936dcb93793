"""What a call of a unit does, as an example showed it: for units that decide by data, which nobody else can run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import attrs
import torch

from ..exceptions import StageUsageError
from ._absent import Absence, memory_of, versions
from ._filling import Filling
from ._leaves import structure, tensors_in, with_tensors
from ._needs import needing

# A dim of a result: a number, or dims of the inputs (which tensor, which dim), multiplied.
_Dim: TypeAlias = "int | tuple[tuple[int, int], ...]"

# The shape of a result, and those of the inputs.
_Sample: TypeAlias = "tuple[tuple[int, ...], Sequence[tuple[int, ...]]]"


@attrs.frozen
class Effects:
    """What a call of a unit does beside making new tensors.

    Attributes:
        changed: which of the tensors that it takes it changes in place.
        shared: for each tensor that it gives, which has the same memory: of those that it takes, and then of those that it
            gives. None: no earlier one.
    """

    changed: tuple[int, ...]
    shared: tuple[int | None, ...]

    @classmethod
    def of(cls, given: Sequence[torch.Tensor], before: Sequence[int], made: Sequence[torch.Tensor]) -> Effects:
        """From a call that has returned.

        Args:
            given: the tensors that it took.
            before: their versions, before the call.
            made: the tensors that it gave.
        """
        first: dict[int, int] = {}
        for number, tensor in enumerate((*given, *made)):
            first.setdefault(memory_of(tensor), number)
        shared = (first[memory_of(tensor)] for tensor in made)
        return cls(
            tuple(number for number, now in enumerate(versions(given)) if now != before[number]),
            tuple(number if number < len(given) + index else None for index, number in enumerate(shared)),
        )


class Example:
    """What a unit took and gave in the example.

    Attributes:
        effects: what else the call did.
        plain: what it gave that is no tensor.
    """

    def __init__(
        self,
        inputs: Sequence[torch.Tensor],
        result: Any,
        effects: Effects,
        filling: Filling | None,
        absence: Absence,
    ) -> None:
        self.effects = effects
        self._filling = filling
        shapes = [tuple(tensor.shape) for tensor in inputs]
        filled = () if filling is None else filling.tensors
        self._looks = [_Look(leaf, shapes) for leaf in (*tensors_in(result), *filled)]
        self._result = with_tensors(result, map(absence.of, tensors_in(result)))
        self.plain = structure(result, [], [])

    def learn(self, other: Example) -> None:
        """Of the same call with inputs of other sizes: what follows them, and what is as large by chance."""
        if self.plain == other.plain and len(self._looks) == len(other._looks):
            for mine, one in zip(self._looks, other._looks, strict=True):
                mine.learn(one)

    def scaled(self, name: str, inputs: Sequence[torch.Tensor], absence: Absence) -> tuple[Any, Filling | None]:
        """The result for inputs of other sizes, and what is put into objects."""
        shapes = [tuple(tensor.shape) for tensor in inputs]
        try:
            absent = iter([look.absent(shapes, absence) for look in self._looks])
            result = with_tensors(self._result, absent)
            return result, None if self._filling is None else self._filling.with_tensors(list(absent))
        except IndexError as error:
            raise StageUsageError(
                f"unit {name!r} decides by data what it computes, and was called with other inputs than in the example"
            ) from error


class _Look:
    """How one result looks, in terms of the inputs' sizes."""

    def __init__(self, leaf: torch.Tensor, inputs: Sequence[tuple[int, ...]]) -> None:
        self.dtype = leaf.dtype
        self.needs_grad = leaf.requires_grad
        self.device = leaf.device
        self._samples: list[_Sample] = [(tuple(leaf.shape), inputs)]
        self._find()

    def learn(self, other: _Look) -> None:
        """See :meth:`Example.learn`."""
        ((made, inputs),) = other._samples
        if len(made) == len(self.dims) and list(map(len, inputs)) == list(map(len, self._samples[0][1])):
            self._samples.append((made, inputs))
            self._find()

    def _find(self) -> None:
        self.dims = [_as_input(self._samples, position) for position in range(len(self._samples[0][0]))]

    def absent(self, inputs: Sequence[tuple[int, ...]], absence: Absence) -> torch.Tensor:
        sizes = []
        for dim in self.dims:
            if isinstance(dim, int):
                sizes.append(dim)
                continue
            sizes.append(_size(dim, inputs))
        device = absence.device if self.device.type == "meta" else self.device
        with absence.mode:
            absent = torch.empty(sizes, dtype=self.dtype, device=device)
        return needing(absent) if self.needs_grad and absence.tracks and torch.is_grad_enabled() else absent


def _as_input(samples: Sequence[_Sample], position: int) -> _Dim:
    """Where a size comes from: the same dim of an input, then any, then two that follow each other, multiplied."""
    sizes = [made[position] for made, _ in samples]
    if set(sizes) == {1}:
        return 1
    for dims in _candidates(samples[0][1], position):
        if all(_size(dims, inputs) == size for (_, inputs), size in zip(samples, sizes, strict=True)):
            return dims
    return sizes[0]


def _candidates(inputs: Sequence[tuple[int, ...]], position: int) -> Iterator[tuple[tuple[int, int], ...]]:
    yield from (((number, position),) for number, shape in enumerate(inputs) if position < len(shape))
    yield from (((number, dim),) for number, shape in enumerate(inputs) for dim in range(len(shape)))
    for number, shape in enumerate(inputs):
        yield from (((number, dim), (number, dim + 1)) for dim in range(len(shape) - 1))


def _size(dims: tuple[tuple[int, int], ...], inputs: Sequence[tuple[int, ...]]) -> int:
    return math.prod(inputs[number][dim] for number, dim in dims)
