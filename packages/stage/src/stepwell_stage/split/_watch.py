"""Modes that watch operations while an example is looked at."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch.overrides import TorchFunctionMode

from .._compat import TorchDispatchMode
from ._absent import versions, written
from ._leaves import tensors_in

Made: TypeAlias = "dict[int, tuple[weakref.ref[torch.Tensor], str]]"
"""Tensors, by identity, and the unit that made or changed each."""


class Inside(TorchFunctionMode):
    """Remembers which tensors are made or changed in a unit.

    Args:
        unit: its name.
        made: where they are put, by identity.
        check: is called with the tensors that each operation takes.
    """

    def __init__(self, unit: str, made: Made, check: Callable[[Sequence[torch.Tensor]], None]) -> None:
        super().__init__()
        self._unit = unit
        self._made = made
        self._check = check

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """One operation."""
        kwargs = kwargs or {}
        name = func.__name__
        if name == "__set__" and func.__self__.__name__ != "data":  # type: ignore[attr-defined]
            return func(*args, **kwargs)
        given = [*tensors_in(args), *tensors_in(kwargs)]
        self._check(given)
        before = versions(given)
        out = func(*args, **kwargs)
        if name == "__get__" and not isinstance(out, torch.Tensor):
            return out
        changed = [given[number] for number in written(func, args, kwargs, given, before)]
        for tensor in (*(leaf for leaf in tensors_in(out) if all(leaf is not one for one in given)), *changed):
            self._made[id(tensor)] = (weakref.ref(tensor), self._unit)
        return out


class Draws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes whether random numbers are drawn. Mutable."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.any = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """One operation."""
        self.any = self.any or torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))
