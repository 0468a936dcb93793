"""Modes that watch operations while an example is looked at."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.nn.utils.parametrize import register_parametrization
from torch.overrides import TorchFunctionMode

from .._compat import TorchDispatchMode, is_transformed
from ..exceptions import StageUsageError
from ._absent import reads, versions, written
from ._frames import source_line
from ._leaves import Given, shown_by, tensors_in
from ._questions import MEASURES
from ._settings import may_draw

Made: TypeAlias = "dict[int, tuple[weakref.ref[torch.Tensor], str]]"
"""Tensors, by identity, and the unit that made or changed each."""


class Inside(TorchFunctionMode):
    """Remembers which tensors are made or changed in a unit.

    Args:
        unit: its name.
        made: where they are put, by identity.
        constants: likewise those that are made of no others, such as a table of positions.
        check: is called with the tensors that each operation takes.
        drawn: is called where one draws random numbers.
        is_seen: whether glue has a tensor.

    Attributes:
        makers: other units that made something which glue has not, and of which what this one gives is made.
        measures: whether anybody asked for the shape of such a thing.
    """

    def __init__(
        self,
        unit: str,
        made: Made,
        constants: Made,
        check: Callable[[Sequence[torch.Tensor]], None],
        drawn: Callable[[], None],
        is_seen: Callable[[torch.Tensor], bool],
    ) -> None:
        super().__init__()
        self._unit = unit
        self._made = made
        self._constants = constants
        self._check = check
        self._drawn = drawn
        self._is_seen = is_seen
        self.makers: set[str] = set()
        self.measures = self._runs = False
        self._of_others: dict[int, tuple[torch.Tensor, set[str]]] = {}  # what is made of it, by identity

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
        if self._runs and (name == "__get__" or name in MEASURES):
            self.measures = self.measures or any(map(self._others, given))
        before = versions(given)
        if may_draw(name, args, kwargs):
            with Draws() as draws:
                out = func(*args, **kwargs)
            if draws.any:
                self._drawn()
        else:
            out = func(*args, **kwargs)
        if name == "__get__" and not isinstance(out, torch.Tensor):
            return out
        changed = [given[number] for number in written(func, args, kwargs, given, before)]
        others = set().union(*map(self._others, given))
        if others:
            if reads(name, args) or any(map(self._is_seen, changed)):
                self.makers |= others
            self._of_others.update((id(one), (one, others)) for one in (*tensors_in(out), *changed))
        is_constant = all(id(one) in self._constants for one in given)
        for tensor in (*(leaf for leaf in tensors_in(out) if all(leaf is not one for one in given)), *changed):
            self._made[id(tensor)] = (weakref.ref(tensor), self._unit)
            if is_constant:
                self._constants[id(tensor)] = self._made[id(tensor)]
            else:
                self._constants.pop(id(tensor), None)
        return out

    def returning(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """The same call of the unit, whose result is looked at."""

        def seen(*args: Any, **kwargs: Any) -> Any:
            self._runs = True  # what looks at arguments before and after is not the unit
            try:
                out = call(*args, **kwargs)
            finally:
                self._runs = False
            self.makers.update(*map(self._others, tensors_in(out)))
            self._of_others.clear()
            return out

        return seen

    def _others(self, tensor: torch.Tensor) -> set[str]:
        """The other units that made something which glue has not, and of which a tensor is made."""
        if id(tensor) in self._of_others:
            return self._of_others[id(tensor)][1]
        made, unit = self._made.get(id(tensor), (None, self._unit))
        is_hidden = made is not None and unit != self._unit and made() is tensor and not self._is_seen(tensor)
        return {unit} if is_hidden else set()


def check_left(constants: Made) -> None:
    """Refuse a table that a unit has left outside of the model: all that look for it there would find one without data.

    Args:
        constants: see :class:`Inside`; what saw the forward is gone.

    Raises:
        StageUsageError: there is one.
    """
    if any(made() is not None for made, _ in constants.values()):
        gc.collect()  # the copy of the model may hold it, which is gone with it
        for made, unit in constants.values():
            if made() is not None:
                raise StageUsageError(
                    f"unit {unit!r} leaves a table that it makes outside of the model, such as in a class or in what"
                    " functools.lru_cache remembers, where it has no data now: run the model once before it is split, in a new"
                    " process"
                )


def check_taken(
    unit: str,
    module: nn.Module,
    given: Any,
    known: set[int],
    taken: Sequence[torch.Tensor],
    origin_of: Callable[[torch.Tensor], str],
) -> None:
    """Refuse a unit that uses what it is neither given nor has: stages that do not run what made it have it not.

    Args:
        unit: its name.
        module: the unit.
        given: its arguments.
        known: tensors that it is given or has, by identity; filled where it is needed first.
        taken: what an operation within it uses.
        origin_of: says where a tensor comes from; "" if it is the unit's own.

    Raises:
        StageUsageError: it does.
    """
    odd = [tensor for tensor in taken if id(tensor) not in known and origin_of(tensor)]
    if odd and not known:
        known.update(map(id, (*shown_by(given), *module.parameters(), *module.buffers())))
    for tensor in odd:
        if id(tensor) not in known:
            raise StageUsageError(
                f"unit {unit!r} uses {origin_of(tensor)}, which it is not given, but finds elsewhere, such as in an attribute of"
                f" another module ({source_line('the forward')}): pass it to the unit, or make what holds both a unit"
                " (units=); a table that whoever is first makes for all is there if the model has run once before the first split"
            )


class _Double(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.number = nn.Parameter(torch.zeros(()))

    def forward(self, number: torch.Tensor) -> torch.Tensor:
        return number * 2


_probe = _Double()
register_parametrization(_probe, "number", _Double())


def check_called(unit: str, given: Given) -> None:
    """Refuse a call of a unit from where no copy of it can be called as it is.

    Args:
        unit: its name.
        given: what it is given.

    Raises:
        StageUsageError: it is called there, or with what only one stage can use.
    """
    if any(isinstance(one, Iterator) for one in given.objects):
        raise StageUsageError(
            f"unit {unit!r} is given an iterator, of which only the stage that has this unit would take something: pass what the"
            " unit takes of it, or a list"
        )
    if any(map(is_transformed, given.tensors)):
        raise StageUsageError(
            f"unit {unit!r} is called within a transform of torch.func or torch.vmap, which goes through units: make the"
            " module that calls the transform a unit (units=)"
        )
    if _probe.number is _probe.number:
        raise StageUsageError(
            f"unit {unit!r} is called within torch.nn.utils.parametrize.cached(), which takes the weights of all copies of a"
            " module for one: enter it in the unit, or leave it out"
        )


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


def check_returned(maker: str | None, does: str = "makes") -> None:
    """Refuse what glue takes of what a unit makes and does not return.

    Args:
        maker: the unit, if there is one.
        does: what it does.
    """
    if maker is not None:
        raise StageUsageError(
            f"{source_line('the forward')} takes a tensor that unit {maker!r} {does} but does not return, or returns in an object"
            " that is not looked into: what hooks keep, what is put into attributes or into a list that a unit was given, other"
            " stages do not see; return it, in a tuple, list, dict or dataclass, or make the module that takes it a unit (units=)"
        )
