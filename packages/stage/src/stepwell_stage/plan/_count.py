"""Numbers of ranks, stages and microbatches, as callers give them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from stepwell_p2p import _require

from ..exceptions import ScheduleError, StageError

_P = ParamSpec("_P")
_R = TypeVar("_R")


def whole(value: object, name: str, error: type[StageError] = ScheduleError) -> int:
    """What stands for a whole number, such as one of numpy, as an int, as in the layer below.

    Raises:
        ScheduleError: it stands for none.
    """
    return _require.whole(value, name, error)


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
