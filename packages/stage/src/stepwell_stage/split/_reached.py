"""What functions that a model keeps reach of it: a copy of the model has the same functions, which reach the model itself."""

from __future__ import annotations

import copy
import dis
import functools
import types
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import nn

from ..exceptions import StageUsageError


def reach_copies(modules: Iterable[nn.Module], copies: Mapping[int, Any]) -> None:
    """Let hooks, and functions in attributes, of copied modules reach copies where their closures and defaults reach originals.

    Args:
        modules: the copies.
        copies: what was made of each original, by its identity.
    """
    made: dict[int, types.FunctionType] = {}
    for module in modules:
        places: tuple[dict[Any, Any], ...] = (vars(module), module._forward_hooks, module._forward_pre_hooks)
        for place in places:
            for key, value in place.items():
                if isinstance(value, types.FunctionType):
                    place[key] = as_copy(value, copies, made)


def as_copy(value: Any, copies: Mapping[int, Any] | DeepCopies, made: dict[int, types.FunctionType]) -> Any:
    """The copy of a value; of a function one that reaches copies in place of originals.

    Args:
        value: the value.
        copies: what was made of each original, by its identity.
        made: takes the functions, by the identity of those that they are made of.
    """
    if isinstance(value, functools.partial):
        keywords = {name: as_copy(one, copies, made) for name, one in value.keywords.items()}
        args = [as_copy(one, copies, made) for one in value.args]
        return functools.partial(as_copy(value.func, copies, made), *args, **keywords)
    if isinstance(value, types.BuiltinMethodType):
        owner = copies.get(id(value.__self__), value.__self__)
        return value if owner is value.__self__ else getattr(owner, value.__name__)
    if not isinstance(value, types.FunctionType):
        return copies.get(id(value), value)
    if id(value) not in made:
        cells = value.__closure__ or ()
        made[id(value)] = new = types.FunctionType(
            value.__code__, value.__globals__, value.__name__, None, tuple(types.CellType() for _ in cells)
        )
        new.__defaults__ = tuple(as_copy(one, copies, made) for one in value.__defaults__ or ()) or None
        new.__kwdefaults__ = {name: as_copy(one, copies, made) for name, one in (value.__kwdefaults__ or {}).items()}
        new.__dict__.update(value.__dict__)
        new.__qualname__, new.__module__ = value.__qualname__, value.__module__
        for mine, cell in zip(new.__closure__ or (), cells, strict=True):
            if cell != types.CellType():
                mine.cell_contents = as_copy(cell.cell_contents, copies, made)
    return made[id(value)]


class DeepCopies:
    """Copies of whatever is asked for, but of modules. Mutable: it remembers them.

    Args:
        memo: those that are known, by the identities of the originals.
    """

    def __init__(self, memo: dict[int, Any]) -> None:
        self._memo = memo

    def get(self, identity: int, value: Any) -> Any:
        """The copy of a value, which has this identity."""
        return value if isinstance(value, nn.Module | types.ModuleType) else copy.deepcopy(value, self._memo)


def check_reached(model: nn.Module) -> None:
    """Refuse hooks, and functions in attributes, that reach modules of the model, or what these hold, by a global variable.

    A copy of the model has the same function. What it puts into the model's list, the copy's forward does not find in its own.

    Raises:
        StageUsageError: there is such a function.
    """
    parts: dict[int, str] = {}
    for name, module in model.named_modules():
        parts[id(module)] = repr(name) if name else "the model"
        for key, value in vars(module).items():
            if isinstance(value, list | dict | set | deque) and not key.startswith("_"):
                parts[id(value)] = repr(f"{name}.{key}" if name else key)
    for name, module in model.named_modules():
        hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        functions = [(f"a hook of {parts[id(module)]}", hook) for hook in hooks]
        functions += [(repr(f"{name}.{key}" if name else key), value) for key, value in vars(module).items()]
        for label, function in functions:
            found = next((parts[id(value)] for value in _globals_of(function) if id(value) in parts), None)
            if found is not None:
                raise StageUsageError(
                    f"{label} is a function that reaches {found} through a global variable, and so the model itself on every"
                    " stage, not the stage's copy of it: make it a method, or functools.partial of a function that is given what"
                    " it uses"
                )


def _globals_of(function: Any) -> Iterator[Any]:
    if isinstance(function, functools.partial):
        yield from _globals_of(function.func)
    elif isinstance(function, types.FunctionType):
        names = {one.argval for one in dis.get_instructions(function.__code__) if one.opname == "LOAD_GLOBAL"}
        yield from (function.__globals__[name] for name in names if name in function.__globals__)
