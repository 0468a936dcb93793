"""Plain values that a unit changes, such as a counter in an attribute: stages that do not run it have them as they were.

While an example is looked at, each of them is replaced by something that cannot be looked at, except within the unit itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import nn

from ..exceptions import StageUsageError
from ._frames import source_line
from ._state import Place, plain_in, undrawn

_ASKING = (
    *(
        "bool",
        "int",
        "float",
        "complex",
        "index",
        "len",
        "iter",
        "next",
        "contains",
        "getitem",
        "call",
        "hash",
        "format",
        "str",
    ),
    *("eq", "ne", "lt", "le", "gt", "ge", "neg", "pos", "abs", "invert", "round", "trunc", "floor", "ceil", "bytes"),
    *(
        f"{side}{name}"
        for side in ("", "r")
        for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "divmod")
    ),
    *(f"{side}{name}" for side in ("", "r") for name in ("matmul", "and", "or", "xor", "lshift", "rshift")),
)


class Poison:
    """Stands for a value that a unit changed; whoever looks at it is refused."""

    def __init__(self, unit: str, name: str) -> None:
        self._said = (unit, name)

    def _refuse(self, *_: Any) -> NoReturn:
        unit, name = self._said
        raise StageUsageError(
            f"{source_line('the forward')} looks at {name!r}, which unit {unit!r} changes, and stages that do not have this unit"
            " do not see how: return it from the unit as a tensor, or make the module that looks at it a unit (units=)"
        )


for _name in _ASKING:
    setattr(Poison, f"__{_name}__", Poison._refuse)


class UnitState:
    """Watches the plain state of units and of what they are given. Mutable: it knows what was changed by whom."""

    def __init__(self) -> None:
        self._changed: dict[tuple[int, Any], tuple[Any, Any, str]] = {}  # holder, true value, and who changed it

    def call(self, name: str, module: nn.Module, args: Any, call: Callable[[], Any]) -> Any:
        """Call a unit, and let nobody else look at the plain values that it changed.

        Args:
            name: of the unit.
            module: the unit.
            args: what it is given.
            call: calls it.

        """
        self._restore(name)
        before = {(id(holder), key): value for _, holder, key, value in self._plain(name, module, args)}
        try:
            with undrawn():  # what a unit draws is its own matter
                return call()
        finally:
            for _, holder, key, value in self._plain(name, module, args):
                if isinstance(value, Poison) or holder is None:
                    continue
                was = before.get((id(holder), key), self)
                if was is not value and (type(was) is not type(value) or was != value):
                    self._changed[id(holder), key] = (holder, holder[key] if _is_keyed(holder) else None, name)
            self._poison()

    @property
    def is_changed(self) -> bool:
        """Whether any unit changed anything."""
        return bool(self._changed)

    def _plain(self, name: str, module: nn.Module, args: Any) -> list[Place]:
        seen: set[int] = set()
        found = [
            place
            for path, one in module.named_modules()
            for place in plain_in(one, f"{name}.{path}" if path else name, seen)
        ]
        found += plain_in(args, f"what unit {name} is given", seen)
        return [place for place in found if _is_keyed(place[1]) and not isinstance(place[3], torch.Tensor)]

    def _restore(self, name: str) -> None:
        for (_, key), (holder, value, unit) in self._changed.items():
            if name == unit and isinstance(holder[key], Poison):
                holder[key] = value

    def _poison(self) -> None:
        for (_, key), (holder, value, unit) in self._changed.items():
            if value is not None:
                holder[key] = Poison(unit, str(key))


def _is_keyed(holder: Any) -> bool:
    return isinstance(holder, dict | list)
