"""Arguments of the wrong kind, refused before anything is worked out from them."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from ..exceptions import ScheduleError, StageError, StageUsageError


def require(
    value: object, kind: type | tuple[type, ...], says: str, hint: str = "", *, error: type[StageError] = ScheduleError
) -> None:
    """Refuse what is not of a kind.

    Args:
        value: what was given.
        kind: what it should be.
        says: the beginning of the sentence, for example ``simulate() takes a plan``.
        hint: what to do; its end.
        error: what to raise.

    Raises:
        ScheduleError: it is of another kind.
    """
    if not isinstance(value, kind):
        raise error(f"{says}, got {_shown(value)}{hint and '; ' + hint}")


def several(values: Iterable[Any], says: str, *, error: type[StageError] = StageUsageError) -> tuple[Any, ...]:
    """What was given as several, as a tuple; one alone is refused, and so is a text, which is several letters.

    Raises:
        StageUsageError: it is one.
    """
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise error(f"{says}, got {_shown(values)}")
    return tuple(values)


def is_cost(number: object) -> bool:
    """Whether it is a number that is finite and at least 0."""
    try:
        return bool(0 <= number <= sys.float_info.max)  # type: ignore[operator]  # that is the question; NaN is not
    except (TypeError, ValueError):
        return False


def _shown(value: object) -> str:
    shown = repr(value) if isinstance(value, str | bytes | int | float | list | tuple | None) else ""
    return shown if 0 < len(shown) <= 60 else f"a {type(value).__qualname__}"
