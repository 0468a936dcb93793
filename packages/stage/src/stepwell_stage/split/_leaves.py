"""The tensors in what modules take and return: nested tuples, lists, dicts and dataclasses, of whatever class."""

from __future__ import annotations

import copy
import dataclasses
import functools
import types
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch

from ._state import slots_of

_PLAIN = (bool, int, float, complex, str, bytes, range, torch.dtype, torch.device, torch.layout, torch.memory_format)
_EMPTY = frozenset(
    (*_PLAIN, type(None), slice, type(...))
)  # classes of what holds no tensor, for most values are of these


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in a value, in order. Objects of other kinds are not looked into."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif type(value) is slice:
        for item in (value.start, value.stop, value.step):
            yield from tensors_in(item)
    elif type(value) not in _EMPTY and (names := _fields(value)) is not None:
        for name in names:
            yield from tensors_in(getattr(value, name, None))


def shown_by(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor that a result holds in any way: in objects of any kind, and in what functions remember."""
    todo, seen = [value], set()
    while todo:
        one = todo.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, torch.Tensor):
            yield one
        elif isinstance(one, types.FunctionType):
            todo += (cell.cell_contents for cell in one.__closure__ or () if cell != types.CellType())
            todo += one.__defaults__ or ()
        elif isinstance(one, functools.partial):
            todo += (one.func, *one.args, *one.keywords.values())
        elif isinstance(one, types.MethodType | types.BuiltinFunctionType):
            todo.append(one.__self__)
        elif isinstance(one, Mapping):
            todo += one.values()
        elif isinstance(one, tuple | list | set | frozenset | deque):
            todo += one
        elif type(one) not in _EMPTY and not isinstance(one, torch.nn.Module | type | types.ModuleType):
            slots = slots_of(type(one))  # type: ignore[arg-type]
            todo += (getattr(one, slot) for slot in slots if hasattr(one, slot))
            todo += getattr(one, "__dict__", {}).values()


def contents(value: Any) -> list[tuple[Any, list[Any]]]:
    """Every list, dict and dataclass in a value, and what is in each that can be compared later on."""
    if isinstance(value, Mapping):
        items = [*value.keys(), *value.values()]
    elif isinstance(value, tuple | list):
        items = list(value)
    else:
        names = None if type(value) in _EMPTY else _fields(value)
        if names is None:
            return []
        items = [getattr(value, name, None) for name in names]
    found = [(value, [one if isinstance(one, _PLAIN) else id(one) for one in items])]
    return found + [pair for item in items for pair in contents(item)]


def with_tensors(value: Any, tensors: Iterator[Any], *, anew: bool = False) -> Any:
    """The same value with others in the tensors' places, in order.

    Args:
        value: what holds them.
        tensors: the others.
        anew: whether containers that hold none are copied too.
    """
    if isinstance(value, torch.Tensor):
        return next(tensors)
    if not anew and next(tensors_in(value), None) is None:
        return value
    return rebuilt(value, lambda item: with_tensors(item, tensors, anew=anew))


def renewed(value: Any) -> Any:
    """The same value, with the same tensors in containers of its own."""
    return value if isinstance(value, torch.Tensor) else with_tensors(value, tensors_in(value), anew=True)


def structure(value: Any, tensors: list[torch.Tensor], objects: list[Any]) -> Hashable:
    """What of a value is no tensor: its containers, and plain Python values. Of objects of other kinds only the class counts.

    Args:
        value: arguments of a module or of a function of torch, or what one gives.
        tensors: takes every tensor in it, in order.
        objects: takes every object of another kind.
    """
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return torch.Tensor
    kind = type(value)
    if kind is tuple or kind is list or isinstance(value, tuple | list):
        return (kind, *[structure(item, tensors, objects) for item in value])
    if kind is slice:
        return (kind, *[structure(item, tensors, objects) for item in (value.start, value.stop, value.step)])
    if kind in _EMPTY or isinstance(value, _PLAIN):
        return (kind, value if value == value else None)  # no nan is another
    if kind is dict or isinstance(value, Mapping):
        return (kind, *[(repr(name), structure(item, tensors, objects)) for name, item in value.items()])
    names = _fields(value)
    if names is not None:
        return (kind, *[structure(getattr(value, name, None), tensors, objects) for name in names])
    objects.append(value)
    return (kind,)


class Given:
    """What a unit or a function is given, looked through once.

    Attributes:
        args: positional.
        kwargs: by name.
        tensors: in both, in order.
        objects: what in both is neither a tensor, nor plain, nor a container of such.
        structure: the rest.
    """

    __slots__ = ("args", "kwargs", "objects", "structure", "tensors")

    def __init__(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self.args, self.kwargs = args, kwargs
        self.tensors: list[torch.Tensor] = []
        self.objects: list[Any] = []
        if not kwargs and len(args) == 1 and isinstance(args[0], torch.Tensor):  # as for most, and in less time
            self.tensors.append(args[0])
            self.structure: Hashable = (type(args), torch.Tensor)
        else:
            self.structure = structure((args, kwargs) if kwargs else args, self.tensors, self.objects)


def rebuilt(value: Any, change: Callable[[Any], Any]) -> Any:
    """A container of the same kind with what ``change`` makes of each of its items, in order; anything else as it is."""
    if isinstance(value, tuple):
        items = [change(item) for item in value]
        if hasattr(value, "_make"):
            return value._make(items)  # not by its __new__, which may want to see what it is given
        return type(value)(items) if type(value) is not tuple else tuple(items)
    if isinstance(value, list):
        new: Any = copy.copy(value)
        new[:] = [change(item) for item in value]
        return new
    if isinstance(value, Mapping):
        new = copy.copy(value)
        for name, item in list(value.items()):
            new[name] = change(item)
        return new
    if type(value) is slice:
        return slice(change(value.start), change(value.stop), change(value.step))
    names = None if type(value) in _EMPTY else _fields(value)
    if names is None:
        return value
    new = copy.copy(value)
    for name in names:
        object.__setattr__(new, name, change(getattr(value, name, None)))
    return new


def _fields(value: Any) -> list[str] | None:
    """The names of a dataclass's or attrs class's fields; None for anything else."""
    return None if isinstance(value, type) else _fields_of(type(value))  # type: ignore[arg-type]


@functools.lru_cache(4096)
def _fields_of(kind: type) -> list[str] | None:
    if dataclasses.is_dataclass(kind):
        return [field.name for field in dataclasses.fields(kind)]
    if attrs.has(kind):
        return [field.name for field in attrs.fields(kind)]
    return None
