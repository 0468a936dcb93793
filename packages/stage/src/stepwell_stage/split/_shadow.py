"""A stage's own units as stages that do not have them see them: copies, which are run on absent tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, TypeAlias

from torch import nn

from ._state import PLAIN_TYPES

_OF_TORCH = frozenset(vars(nn.Module())) | {"_stepwell_split"}

_Place: TypeAlias = tuple[str, str]
"""The path of a module, and the name of an attribute."""


class Attributes:
    """Plain values that glue puts into attributes of a unit, as in ``block.height = 7``: it does so on every stage.

    What the unit itself puts there others do not see, so the copy has what came of its own runs. Mutable: it knows what that is.
    """

    def __init__(self) -> None:
        self._own: set[_Place] = set()

    @contextlib.contextmanager
    def given(self, unit: nn.Module, shadow: nn.Module) -> Iterator[None]:
        """While this lasts the copy runs; beforehand it is given what glue has given to the unit."""
        modules = dict(shadow.named_modules())
        for (path, name), value in _plain_of(unit).items():
            if path in modules and (path, name) not in self._own:
                modules[path].__dict__[name] = value
        before = _plain_of(shadow)
        try:
            yield
        finally:
            after = _plain_of(shadow)
            self._own |= {place for place, value in after.items() if place not in before or before[place] != value}


def _plain_of(unit: nn.Module) -> dict[_Place, Any]:
    return {
        (path, name): value
        for path, module in unit.named_modules()
        for name, value in vars(module).items()
        if name not in _OF_TORCH
        and all(type(one) in PLAIN_TYPES for one in (value if type(value) is tuple else [value]))
    }
