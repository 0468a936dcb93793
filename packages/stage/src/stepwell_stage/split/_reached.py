"""What functions that a model keeps reach of it: through a closure they reach the model itself, and not a stage's copy of it."""

from __future__ import annotations

import dis
import functools
import types
from collections import deque
from collections.abc import Iterator
from typing import Any

from torch import nn

from ..exceptions import StageUsageError


def check_reached(model: nn.Module) -> None:
    """Refuse hooks, and functions in attributes, that reach modules of the model, or what these hold, without being given it.

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
            found = next((parts[id(value)] for value in _reached(function) if id(value) in parts), None)
            if found is not None:
                raise StageUsageError(
                    f"{label} is a function that reaches {found} through a closure or a global variable, and so the model"
                    " itself on every stage, not the stage's copy of it: make it a method, or functools.partial of a"
                    " function that is given what it uses"
                )


def _reached(function: Any) -> Iterator[Any]:
    """What a function uses that is no argument of it, and no copy of it has copies of."""
    if isinstance(function, functools.partial):
        yield from _reached(function.func)
    elif isinstance(function, types.FunctionType):
        for cell in function.__closure__ or ():
            if cell != types.CellType():
                yield cell.cell_contents
        yield from (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
        names = {one.argval for one in dis.get_instructions(function.__code__) if one.opname == "LOAD_GLOBAL"}
        yield from (function.__globals__[name] for name in names if name in function.__globals__)
