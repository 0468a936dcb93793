"""Plain values that a unit changes, such as a counter in an attribute: stages that do not run it have them as they were.

While an example is looked at, each of them is replaced by something that cannot be looked at, except within the unit itself. Of a
list or dict that gets longer or shorter, all is replaced; of one whose items alone change, only these.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, TypeAlias

import torch
from torch import nn

from ..exceptions import StageUsageError
from ._frames import source_line
from ._state import PLAIN_TYPES, plain_in, undrawn

_KINDS = (bool, int, float, complex, str, bytes, list, dict, set, deque)
ASKING = {name for kind in _KINDS for name in dir(kind) if name.startswith("__")} - frozenset(dir(object))
ASKING |= {
    f"__{name}__" for name in ("eq", "ne", "lt", "le", "gt", "ge", "hash", "str", "repr", "format", "call", "next")
}
ASKING |= {f"__{name}__" for name in ("complex", "bytes", "matmul", "rmatmul", "getattr", "copy", "deepcopy")}

_OF_TORCH = frozenset(vars(nn.Module())) | {"_stepwell_split"}

_Found: TypeAlias = dict[tuple[int, Any], tuple[Any, Any, bool]]
"""By the identity of a list or dict and a key in it: it, what is there, as far as it can be compared, and whether the next
forward may find it.
"""


class Poison:
    """Stands for a value that a unit changed; whoever looks at it is refused."""

    def __init__(self, unit: str, name: str) -> None:
        self._said = (unit, name)

    def _refuse(self, *_: Any) -> NoReturn:
        unit, name = self._said
        raise StageUsageError(
            f"{source_line('the forward')} looks at {name!r}, which unit {unit!r} changes, and stages that do not have this unit"
            " do not see how: return it from the unit as a tensor, or make the module that looks at it a unit (units=); if it"
            " says how far a table is made, run the model once with the largest inputs before it is split"
        )

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """What functions of torch are given is looked at too."""
        for one in (*args, *(kwargs or {}).values()):
            if isinstance(one, cls):
                one._refuse()
        return NotImplemented


for _name in ASKING:
    setattr(Poison, _name, Poison._refuse)


class UnitState:
    """Watches the plain state of units and of what they are given. Mutable: it knows what was changed by whom.

    Args:
        outside: modules that are in no unit, which hooks of units may reach.
        inputs: what the model is given.
        by_data: whether units run on data, which others have not.
    """

    def __init__(self, outside: Sequence[nn.Module], inputs: Mapping[str, Any], *, by_data: bool) -> None:
        self._outside = outside
        self._inputs = inputs
        self._lasts = False
        self._by_data = by_data
        self._changed: dict[tuple[int, Any], tuple[Any, Any, str]] = {}  # holder, true value, and who changed it

    def call(self, name: str, module: nn.Module, args: Any, call: Callable[[], Any]) -> Any:
        """Call a unit, and let nobody else look at the plain values that it changed.

        Args:
            name: of the unit.
            module: the unit.
            args: what it is given.
            call: calls it.

        """
        hidden = self._restore(name)
        before = self._look(module, args)
        try:
            with undrawn():  # what a unit draws is its own matter
                return call()
        finally:
            after = self._look(module, args)
            for place, (holder, now, lasts) in after.items():
                is_as_before = place in before and _are_same(before[place][1], now)
                # What it puts into objects that it is given is put there on every stage, unless data decide what it is.
                is_filled = not (lasts or self._by_data) and type(holder[place[1]]) in PLAIN_TYPES
                if place in hidden or not (
                    is_as_before or is_filled or (place not in before and self._is_told(module, holder, place[1]))
                ):
                    self._hide(place, holder, name)
                    self._lasts = self._lasts or lasts

    @property
    def is_changed(self) -> bool:
        """Whether any unit changed anything that the next forward may find."""
        return self._lasts

    def _look(self, module: nn.Module, args: Any) -> _Found:
        """What is in a unit and in what it is given."""
        seen: set[int] = set()
        modules = list(module.modules())
        if any(one._forward_hooks or one._forward_pre_hooks for one in modules):
            modules += self._outside
        found: _Found = {}
        for one in (*modules, self._inputs, args):
            for _, holder, key, value in plain_in(one, "", seen):
                if isinstance(holder, dict | list) and not isinstance(value, torch.Tensor | Poison):
                    found[id(holder), key] = (holder, value, one is not args)
        for one in modules:
            own = vars(one)
            found.update(_containers(own, own.keys() - _OF_TORCH, set()))
        return found

    def _is_told(self, module: nn.Module, holder: Any, key: Any) -> bool:
        """Whether a value is that of a cached property, which each stage finds by itself as it is."""
        owner = next((one for one in module.modules() if vars(one) is holder), None)
        is_cached = isinstance(
            getattr(type(owner), key, None) if owner is not None else None, functools.cached_property
        )
        return is_cached and type(holder[key]) in PLAIN_TYPES and not self._by_data

    def _restore(self, name: str) -> set[tuple[int, Any]]:
        """Give a unit back what it changed, unless glue has put something else there, as it does on every stage."""
        mine = {place: holder for place, (holder, _, unit) in self._changed.items() if unit == name}
        hidden = {place for place, holder in mine.items() if isinstance(_at(holder, place[1]), Poison)}
        for place in hidden:
            mine[place][place[1]] = self._changed[place][1]
        return hidden

    def _hide(self, place: tuple[int, Any], holder: Any, name: str) -> None:
        value = holder[place[1]]
        self._changed[place] = (holder, value, name)
        if value is not None:  # asked for by ``is``, which nobody hears: left as it is
            holder[place[1]] = Poison(name, str(place[1]))


def _containers(
    holder: Any, keys: Iterable[Any], seen: set[int]
) -> Iterator[tuple[tuple[int, Any], tuple[Any, Any, bool]]]:
    """Lists, dicts and their kind, however deep: how long each is; of those without places also what is in them."""
    for key in keys:
        value = holder[key]
        if id(value) in seen or isinstance(value, torch.Tensor | nn.Module | Poison | type):
            continue
        seen.add(id(value))
        if isinstance(value, dict):
            yield (id(holder), key), (holder, list(value), True)
            yield from _containers(value, list(value), seen)
        elif isinstance(value, list):
            yield (id(holder), key), (holder, len(value), True)
            yield from _containers(value, range(len(value)), seen)
        elif isinstance(value, tuple | set | frozenset | deque):
            inside = [one for _, _, _, one in plain_in(value, "", set()) if not isinstance(one, torch.Tensor)]
            yield (id(holder), key), (holder, [len(value), *inside], True)
        elif isinstance(own := getattr(value, "__dict__", None), dict):
            yield from _containers(own, list(own), seen)


def _are_same(was: Any, now: Any) -> bool:
    return was is now or (type(was) is type(now) and bool(was == now))


def _at(holder: Any, key: Any) -> Any:
    try:
        return holder[key]
    except LookupError:
        return None
