"""What a unit leaves in objects that it is given, such as a cache: the same is done again where the unit is not run.

All stages must find such an object as one process does, but for the data: how many entries it has, and of what shapes.
"""

from __future__ import annotations

import copy
import functools
import types
from collections import deque
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from typing import Any, TypeAlias

import attrs
import torch
from torch import nn

from ..exceptions import StageUsageError
from ._leaves import shown_by
from ._state import CLOSED, PLAIN_TYPES, slots_of

_Step: TypeAlias = tuple[str, Any]
"""What of a holder: an "item" and its index or key, an "attribute" and its name, or a "cell" of a function and its number."""

_GONE = object()


class Untold(Exception):
    """An object was changed in a way that cannot be done again from here."""


@attrs.frozen(eq=False)
class Filling:
    """What a call has changed in the objects that it was given.

    Attributes:
        changes: which object, the way to a place in it, and what is there now.
        tensors: the absent tensors in these.
    """

    changes: tuple[tuple[tuple[_Step, ...], Any], ...]
    tensors: tuple[torch.Tensor, ...]

    def with_tensors(self, tensors: Sequence[torch.Tensor]) -> Filling:
        """The same with others in the tensors' places."""
        memo = _memo(self.tensors, tensors)
        return Filling(tuple((path, copy.deepcopy(one, memo)) for path, one in self.changes), tuple(tensors))

    def again(self, objects: Sequence[Any], like: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Do it to other objects, which look as those did before."""
        memo = _memo(self.tensors, list(map(like, self.tensors)))
        for path, value in self.changes:
            holder: Any = objects
            for step in path[:-1]:
                holder = _get(holder, step)
            _put(holder, path[-1], value if value is _GONE else copy.deepcopy(value, memo))


class Watched:
    """The objects that a call is given, before it.

    Args:
        objects: in which changes are looked for, also in what functions remember; modules are not looked into.
    """

    def __init__(self, objects: Sequence[Any]) -> None:
        self._before: dict[int, tuple[Any, Any]] = {}  # by identity: what holds something, and what it holds
        self._objects = list(objects)
        todo: list[Any] = [self._objects]
        while todo:
            one = todo.pop()
            if id(one) not in self._before and (held := _held(one)) is not None:
                self._before[id(one)] = one, held
                todo += held.values() if isinstance(held, dict) else ()

    def filling(self, like: Callable[[torch.Tensor], torch.Tensor]) -> Filling | None:
        """What has changed, when the call has returned.

        Args:
            like: makes an absent tensor that looks like one.

        Returns:
            None if nothing has.

        Raises:
            Untold: something has in a way that cannot be told.
        """
        changes = list(self._changes(self._objects, (), set()))
        if not changes:
            return None
        values = [value for _, value in changes if value is not _GONE]
        tensors = {id(one): one for one in shown_by(values)}
        absent = [like(one) for one in tensors.values()]
        try:
            made = [
                (path, value if value is _GONE else copy.deepcopy(value, _memo([*tensors.values()], absent)))
                for path, value in changes
            ]
        except Exception as error:  # whatever their own code says
            raise Untold from error
        if any(self._reaches(value) for value in values):  # it would be another one the next time
            raise Untold
        return Filling(tuple(made), tuple(absent))

    def places(self) -> list[tuple[_Step, ...]]:
        """Where something has changed."""
        return [path for path, _ in self._changes(self._objects, (), set())]

    def told(self, unit: str, like: Callable[[torch.Tensor], torch.Tensor]) -> Filling | None:
        """Likewise for a unit that decides by data, so that stages which do not have it cannot run it.

        Raises:
            StageUsageError: something has changed in a way that cannot be told.
        """
        try:
            return self.filling(like)
        except Untold as error:
            raise StageUsageError(
                f"unit {unit!r} decides by data what it computes, and changes an object that it is given in a way that other"
                " stages cannot do again: return what it makes in its place, or make the module that holds both a unit (units=)"
            ) from error

    def _changes(self, holder: Any, path: tuple[_Step, ...], seen: set[int]) -> Iterator[tuple[tuple[_Step, ...], Any]]:
        if id(holder) not in self._before or id(holder) in seen:
            return
        seen.add(id(holder))
        _, was = self._before[id(holder)]
        now = _held(holder)
        if not isinstance(was, dict) or not isinstance(now, dict):
            if type(was) is not type(now) or [*map(id, was)] != [*map(id, now)]:
                raise Untold
            return
        for step, value in now.items():
            if step not in was or not _is_same(was[step], value):
                yield (*path, step), value
            else:
                yield from self._changes(value, (*path, step), seen)
        yield from (((*path, step), _GONE) for step in reversed(was) if step not in now)

    def _reaches(self, value: Any) -> bool:
        """Whether a new value holds an object that was there before."""
        todo, seen = [value], set()
        while todo:
            one = todo.pop()
            if id(one) in self._before:
                return True
            if id(one) not in seen and isinstance(held := _held(one), dict):
                seen.add(id(one))
                todo += held.values()
        return False


def _held(value: Any) -> Any:
    """What is in an object, by place; without places in a list, to be compared by identity; None: it is not looked into."""
    if type(value) in PLAIN_TYPES:
        return None
    if isinstance(value, types.FunctionType):
        cells = enumerate(value.__closure__ or ())
        held: dict[_Step, Any] = {
            ("cell", number): cell.cell_contents for number, cell in cells if cell != types.CellType()
        }
        return held | {("attribute", "__defaults__"): value.__defaults__}
    if isinstance(value, functools.partial):
        return {("attribute", name): getattr(value, name) for name in ("func", "args", "keywords")}
    if isinstance(value, types.MethodType | types.BuiltinFunctionType):
        return {("attribute", "__self__"): value.__self__}
    if isinstance(value, (*CLOSED, nn.Module)):
        return None
    if isinstance(value, MutableMapping):
        return {("item", key): one for key, one in value.items()}
    if isinstance(value, list | tuple):
        return {("item", number): one for number, one in enumerate(value)}
    if isinstance(value, set | frozenset | deque):
        return list(value)
    slots = slots_of(type(value))  # type: ignore[arg-type]
    held = {("attribute", slot): getattr(value, slot) for slot in slots if hasattr(value, slot)}
    return held | {("attribute", name): one for name, one in getattr(value, "__dict__", {}).items()}


def _is_same(was: Any, now: Any) -> bool:
    return was is now or (type(was) is type(now) and type(now) in PLAIN_TYPES and bool(was == now))


def _get(holder: Any, step: _Step) -> Any:
    kind, key = step
    if kind == "cell":
        return holder.__closure__[key].cell_contents
    return getattr(holder, key) if kind == "attribute" else holder[key]


def _put(holder: Any, step: _Step, value: Any) -> None:
    kind, key = step
    if kind == "cell":
        holder.__closure__[key].cell_contents = value
    elif kind == "attribute" and value is _GONE:
        object.__delattr__(holder, key)
    elif kind == "attribute":
        object.__setattr__(holder, key, value)
    elif value is _GONE:
        del holder[key]
    elif isinstance(holder, list) and key == len(holder):
        holder.append(value)
    else:
        holder[key] = value


def _memo(tensors: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> dict[int, Any]:
    return {id(one): other for one, other in zip(tensors, others, strict=True)}
