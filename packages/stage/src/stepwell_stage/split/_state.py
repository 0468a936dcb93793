"""What a forward leaves changed of the model beside its units, which the next one may find."""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
import random
import sys
import threading
import types
import zlib
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
PLAIN_TYPES = frozenset(_PLAIN)
_ROWS = frozenset((dict, OrderedDict, list, tuple))
_CODE = (
    type,
    types.ModuleType,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    types.CodeType,
    functools.partial,
)
_TRAINING = operator.itemgetter("training")
CLOSED = (*_PLAIN, *_CODE, torch.Tensor)
_OF_MODULES = frozenset(("_modules", "_parameters", "_buffers", "_stepwell_split"))

Place: TypeAlias = tuple[str, Any, Any, Any]
"""A name, what holds it, under which key, and what is there."""


def plain_in(value: Any, name: str, seen: set[int]) -> list[Place]:
    """What is kept in an object, however deep: plain values, tensors, arrays and generators of random numbers.

    Args:
        value: the object.
        name: what it is called.
        seen: objects that have been looked into, by identity.
    """
    found: list[Place] = []
    _gather(value, name, seen, found)
    return found


def _gather(value: Any, name: str, seen: set[int], found: list[Place]) -> None:
    held: Any
    form = _form_of(type(value))  # type: ignore[arg-type]
    if form is None or id(value) in seen:
        return
    seen.add(id(value))
    if form is MutableMapping:
        held = list(value.items())
    elif form is list:
        held = list(enumerate(value))
    elif form is set:
        found.append((name, None, None, (len(value), frozenset(one for one in value if isinstance(one, _PLAIN)))))
        return
    elif form is nn.Module:
        held = [(key, one) for key, one in vars(value).items() if key not in _OF_MODULES]
        for key in ("_parameters", "_buffers"):
            held += vars(value)[key].items()
        value = vars(value)
    else:
        held = [(slot, getattr(value, slot)) for slot in slots_of(type(value)) if hasattr(value, slot)]  # type: ignore[arg-type]
        inside = getattr(value, "__dict__", None)
        if isinstance(inside, dict):
            held += inside.items()
            value = inside
    for key, one in held:
        kind = type(one)
        if kind in _ROWS and not one:  # as most of a module's tables are
            continue
        path = f"{name}.{key}" if name else str(key)
        now = one if kind in PLAIN_TYPES else _as_plain(one)
        if now is not _NOT_PLAIN:
            found.append((path, value, key, now))
        else:
            _gather(one, path, seen, found)


@functools.lru_cache(4096)
def _form_of(kind: type) -> type | None:
    """As what objects of a class are looked into; None: they are not."""
    forms: dict[type, tuple[type, ...]] = {
        MutableMapping: (MutableMapping, types.MappingProxyType),
        list: (list, tuple, deque),
        set: (set, frozenset),
        nn.Module: (nn.Module,),
        object: (object,),
    }
    return None if issubclass(kind, CLOSED) else next(form for form, kinds in forms.items() if issubclass(kind, kinds))


_NOT_PLAIN = object()


def _as_plain(value: Any) -> Any:
    """A value that can be compared later on, of what is looked at as a whole."""
    if _is_open(type(value)):  # type: ignore[arg-type]
        return _NOT_PLAIN
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, torch.Generator):
        return bytes(value.get_state().tolist())
    if isinstance(value, itertools.count | itertools.cycle):
        return repr(value)
    if isinstance(value, (*_PLAIN, torch.Tensor)):
        return value
    numpy = sys.modules["numpy"]
    if isinstance(value, numpy.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, numpy.random.RandomState):
        return _numbers_of(value.get_state())
    return (value.dtype.str, value.shape, value.tobytes())


@functools.lru_cache(4096)
def _is_open(kind: type) -> bool:
    """Whether objects of a class are looked into; others are looked at as a whole."""
    numpy = sys.modules.get("numpy")
    whole: tuple[Any, ...] = (*_PLAIN, torch.Tensor, random.Random, torch.Generator, itertools.count, itertools.cycle)
    if numpy is not None:
        whole += (numpy.ndarray, numpy.generic, numpy.random.Generator, numpy.random.RandomState)
    return not issubclass(kind, whole)


def _numbers_of(state: Any) -> tuple[Any, ...]:
    """The state of one of NumPy's older generators."""
    name, keys, *others = state
    return (name, keys.tobytes(), *others)


@functools.lru_cache(4096)
def slots_of(kind: type) -> list[str]:
    """The attributes of a class's instances that are in slots."""
    return [slot for one in kind.__mro__ for slot in _slots(one)]


def _slots(kind: type) -> Sequence[str]:
    slots = vars(kind).get("__slots__", ())
    return [slots] if isinstance(slots, str) else [slot for slot in slots if not slot.startswith("__")]


DRAWN = "random numbers"
"""What the state of Python's and NumPy's generators is called."""


def drawn() -> int:
    """Stands for the state of Python's and NumPy's generators; the same in every process."""
    numpy = sys.modules.get("numpy")
    states = random.getstate(), None if numpy is None else _numbers_of(numpy.random.get_state())
    return zlib.crc32(repr(states).encode())


# The generators are the process's: what one thread takes back, another would take for draws.
_DRAWING = threading.RLock()


@contextlib.contextmanager
def undrawn() -> Iterator[None]:
    """Afterwards Python's and NumPy's random numbers go on as if none had been drawn; one thread at a time."""
    numpy = sys.modules.get("numpy")
    with _DRAWING:
        states = random.getstate(), None if numpy is None else numpy.random.get_state()
        try:
            yield
        finally:
            random.setstate(states[0])
            if numpy is not None and states[1] is not None:
                numpy.random.set_state(states[1])


class GlueState:
    """The state of glue before a forward.

    Args:
        root: the model.
    """

    def __init__(self, root: nn.Module) -> None:
        self._modules = list(root.named_modules())
        self._before = self.now()

    def changes(
        self, after: Mapping[str, Any], was_written: Callable[[torch.Tensor], bool], units: Collection[str]
    ) -> dict[str, tuple[Any, Any]]:
        """What is not as it was, before and after, by name.

        Args:
            after: the state now.
            was_written: whether a tensor was changed in place.
            units: the units that were called, by name. What is in them is their own matter.
        """
        changed = {}
        prefixes = tuple(f"{unit}." for unit in units)
        for name in {**self._before, **after}:
            if name.startswith(prefixes):
                continue
            was, now = self._before.get(name), after.get(name)
            is_other = now is not was if isinstance(was, torch.Tensor) or isinstance(now, torch.Tensor) else now != was
            if is_other or (isinstance(now, torch.Tensor) and was_written(now)):
                changed[name] = (was, now)
        return changed

    def now(self) -> dict[str, Any]:
        """The state, by name."""
        return dict(self._now())

    def _now(self) -> Iterator[tuple[str, Any]]:
        seen: set[int] = set()
        for path, module in self._modules:
            for name, _, _, value in plain_in(module, path, seen):
                yield name, value
        yield DRAWN, drawn()


class Flags:
    """Plain attributes of a model beside its units, and which of all its modules are in training.

    Args:
        root: the model.
        units: its units.
    """

    def __init__(self, root: nn.Module, units: Sequence[nn.Module]) -> None:
        inside = {id(module) for unit in units for module in unit.modules()}
        self._modules = list(map(vars, root.modules()))
        self._places = [vars(module) for module in root.modules() if id(module) not in inside]

    def keep(self) -> Any:
        """What :meth:`put_back` takes."""
        return [dict(place) for place in self._places], list(map(_TRAINING, self._modules))

    def are_as(self, kept: Any) -> bool:
        """Whether they are as they were."""
        places, training = kept
        return training == list(map(_TRAINING, self._modules)) and all(
            place.keys() == was.keys() and all(place[key] is was[key] for key in was)
            for place, was in zip(self._places, places, strict=True)
        )

    def put_back(self, kept: Any) -> None:
        """Make them as they were."""
        places, training = kept
        for place, was in zip(self._places, places, strict=True):
            for key in place.keys() - was.keys():
                del place[key]
            place.update(was)
        for module, mode in zip(self._modules, training, strict=True):
            module["training"] = mode
