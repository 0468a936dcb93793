"""Numbers of ranks, stages and microbatches, as callers give them."""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from ..exceptions import ScheduleError, StageError

_P = ParamSpec("_P")
_R = TypeVar("_R")


def whole(value: object, name: str, error: type[StageError] = ScheduleError) -> int:
    """What stands for a whole number, such as one of numpy, as an int.

    Args:
        value: what was given.
        name: under which name.
        error: what to raise.

    Raises:
        ScheduleError: it stands for none.
    """
    try:
        if not isinstance(value, bool):
            return operator.index(value)  # type: ignore[arg-type]  # that is the question
    except TypeError:
        pass
    raise error(f"{name} must be a whole number, got {value!r}, a {type(value).__qualname__}")


def whole_numbers(make: Callable[_P, _R]) -> Callable[_P, _R]:
    """Let a function have ints wherever it says that it takes them; see :func:`whole`."""
    signature = inspect.signature(make)
    names = [name for name, parameter in signature.parameters.items() if parameter.annotation in (int, "int")]

    @functools.wraps(make)
    def checked(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            given = signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{make.__name__}(): {error}") from None  # which alone does not say of what
        given.arguments |= {name: whole(given.arguments[name], name) for name in names if name in given.arguments}
        return make(*given.args, **given.kwargs)

    return checked
