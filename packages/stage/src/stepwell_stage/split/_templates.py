"""What a unit of another stage would have returned: absent tensors, in the unit's own structure."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeAlias

import attrs
import torch
from torch import nn

from ..exceptions import StageUsageError
from ._absent import Absence, memory_of
from ._leaves import signature, tensors_in, with_tensors

# A dim of a result: a number, or dims of the inputs (which tensor, which dim), multiplied.
_Dim: TypeAlias = "int | tuple[tuple[int, int], ...]"


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
    def of(cls, given: Sequence[torch.Tensor], versions: Sequence[int], made: Sequence[torch.Tensor]) -> Effects:
        """From a call that has returned.

        Args:
            given: the tensors that it took.
            versions: of these, before the call.
            made: the tensors that it gave.
        """
        first: dict[int, int] = {}
        for number, tensor in enumerate((*given, *made)):
            first.setdefault(memory_of(tensor), number)
        shared = (first[memory_of(tensor)] for tensor in made)
        return cls(
            tuple(number for number, tensor in enumerate(given) if tensor._version != versions[number]),
            tuple(number if number < len(given) + index else None for index, number in enumerate(shared)),
        )


_NONE = Effects((), ())


class Templates:
    """Results of units and of glue, by what they depend on. Mutable: each is run once for each look of its inputs.

    A unit is run on absent tensors, with absent parameters. One that decides by data what it computes cannot be; then its
    results look as they did in the example, with dims that follow those of its inputs.

    Args:
        absence: makes absent tensors.
    """

    def __init__(self, absence: Absence) -> None:
        self._absence = absence
        self._known: dict[Hashable, Known] = {}

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self._known)

    def known(
        self,
        example: Example | None,
        name: str,
        module: nn.Module,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Known:
        """What the unit returns, and does, for such arguments.

        Args:
            example: if it decides by data: what it took and gave in the example.
            name: of the unit.
            module: the unit.
            call: runs it.
            args: what it takes.
            kwargs: likewise.
        """
        looks = signature(args, within=True), signature(kwargs, within=True)
        key = (name, module.training, self._autocast(), *looks, example)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self._make(example, name, call, args, kwargs)
        return known

    def operation(self, number: int, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """What an operation of glue gives: of absent tensors alone, it always looks the same.

        Raises:
            NeedsDataError: see :meth:`Absence.run`.
        """
        if not self._absence.gives_absent(func.__name__, args, kwargs):
            return self._absence.run(func, args, kwargs)
        try:
            key = (number, func.__name__, self._autocast(), signature(args, exact=True), signature(kwargs, exact=True))
        except TypeError:
            return self._absence.run(func, args, kwargs)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = Known(self._absence.run(func, args, kwargs))
        return known.result()

    def _autocast(self) -> torch.dtype | None:
        kind = self._absence.device.type
        return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None

    def _make(
        self,
        example: Example | None,
        name: str,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Known:
        if example is not None:
            return Known(example.scaled(name, [*tensors_in(args), *tensors_in(kwargs)], self._absence), example.effects)
        absent_args = with_tensors(args, map(self._absence.of, tensors_in(args)))
        absent_kwargs = with_tensors(dict(kwargs), map(self._absence.of, tensors_in(kwargs)))
        given = [*tensors_in(absent_args), *tensors_in(absent_kwargs)]
        versions = [tensor._version for tensor in given]
        with torch.no_grad(), self._absence.mode:
            result = call(*absent_args, **absent_kwargs)
        return Known(result, Effects.of(given, versions, list(tensors_in(result))))


class Known:
    """One result. Mutable: what glue changed in place is made anew.

    Attributes:
        effects: what else the call does.
    """

    def __init__(self, result: Any, effects: Effects = _NONE) -> None:
        self.effects = effects
        self._result = result
        self._leaves = list(tensors_in(result))
        self._looks = [(leaf.detach(), leaf._version) for leaf in self._leaves]

    def result(self, *, anew: bool = False) -> Any:
        """It, in containers of its own; with tensors of its own as well, or with the same again unless glue changed them."""
        for number, (kept, version) in enumerate(self._looks):
            if anew or self._leaves[number]._version != version:
                leaf = self._leaves[number] = torch.empty_like(kept)
                self._looks[number] = (kept, leaf._version)
        return with_tensors(self._result, iter(self._leaves))


class Example:
    """What a unit took and gave in the example."""

    def __init__(self, inputs: Sequence[torch.Tensor], result: Any, effects: Effects, absence: Absence) -> None:
        self.effects = effects
        shapes = [tuple(tensor.shape) for tensor in inputs]
        self._looks = [_Look(leaf, shapes) for leaf in tensors_in(result)]
        self._result = with_tensors(result, map(absence.of, tensors_in(result)))
        self.plain = _plain(result)

    def check(self, name: str, result: Any) -> None:
        """Other stages take the unit to give Python the numbers of the example.

        Raises:
            StageUsageError: it gave others.
        """
        if _plain(result) != self.plain:
            raise StageUsageError(
                f"unit {name!r} gives Python another number, or structure, than in the example, and other stages do not see it:"
                " return a tensor in its place"
            )

    def scaled(self, name: str, inputs: Sequence[torch.Tensor], absence: Absence) -> Any:
        """The result for inputs of other sizes."""
        shapes = [tuple(tensor.shape) for tensor in inputs]
        try:
            return with_tensors(self._result, iter([look.absent(shapes, absence) for look in self._looks]))
        except IndexError as error:
            raise StageUsageError(
                f"unit {name!r} decides by data what it computes, and was called with other inputs than in the example"
            ) from error


class _Look:
    """How one result looks, in terms of the inputs' sizes."""

    def __init__(self, leaf: torch.Tensor, inputs: Sequence[tuple[int, ...]]) -> None:
        self.dtype = leaf.dtype
        self.device = leaf.device
        self.dims = [_as_input(size, position, inputs) for position, size in enumerate(leaf.shape)]

    def absent(self, inputs: Sequence[tuple[int, ...]], absence: Absence) -> torch.Tensor:
        sizes = []
        for dim in self.dims:
            if isinstance(dim, int):
                sizes.append(dim)
                continue
            size = 1
            for tensor, which in dim:
                size *= inputs[tensor][which]
            sizes.append(size)
        device = absence.device if self.device.type == "meta" else self.device
        with absence.mode:
            return torch.empty(sizes, dtype=self.dtype, device=device)


def _plain(result: Any) -> Hashable:
    return signature(with_tensors(result, itertools.repeat(None)))


def _as_input(size: int, position: int, inputs: Sequence[tuple[int, ...]]) -> _Dim:
    """Where a size comes from: the same dim of an input, then any, then two that follow each other, multiplied."""
    if size == 1:
        return size
    for number, shape in enumerate(inputs):
        if position < len(shape) and shape[position] == size:
            return ((number, position),)
    for number, shape in enumerate(inputs):
        for dim, known in enumerate(shape):
            if known == size:
                return ((number, dim),)
    for number, shape in enumerate(inputs):
        for dim in range(len(shape) - 1):
            if shape[dim] * shape[dim + 1] == size:
                return ((number, dim), (number, dim + 1))
    return size
