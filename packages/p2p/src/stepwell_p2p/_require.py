"""Arguments of the wrong kind, refused before anything is worked out from them."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

from stepwell_meta.exceptions import StepwellError

from .exceptions import P2PUsageError


def require(
    value: object,
    kind: type | tuple[type, ...],
    says: str,
    hint: str = "",
    *,
    error: type[StepwellError] = P2PUsageError,
) -> None:
    """Refuse what is not of a kind.

    Args:
        value: what was given.
        kind: what it should be.
        says: the beginning of the sentence, for example ``simulate() takes a plan``.
        hint: what to do; its end.
        error: what to raise.

    Raises:
        P2PUsageError: it is of another kind.
    """
    if not isinstance(value, kind):
        raise error(f"{says}, got {_shown(value)}{hint and '; ' + hint}")


def several(values: Iterable[Any], says: str, *, error: type[StepwellError] = P2PUsageError) -> tuple[Any, ...]:
    """What was given as several, as a tuple; one alone is refused, and so is a text, which is several letters.

    Raises:
        P2PUsageError: it is one.
    """
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise error(f"{says}, got {_shown(values)}")
    return tuple(values)


def whole(value: object, name: str, error: type[StepwellError] = P2PUsageError) -> int:
    """What stands for a whole number, such as one of numpy, as an int.

    Args:
        value: what was given.
        name: under which name.
        error: what to raise.

    Raises:
        P2PUsageError: it stands for none.
    """
    try:
        if not isinstance(value, bool):
            return operator.index(value)  # type: ignore[arg-type]  # that is the question
    except TypeError:
        pass
    raise error(f"{name} must be a whole number, got {value!r}, a {type(value).__qualname__}")


def _shown(value: object) -> str:
    shown = repr(value) if isinstance(value, str | bytes | int | float | list | tuple | None) else ""
    return shown if 0 < len(shown) <= 60 else f"a {type(value).__qualname__}"
