"""Arguments of the wrong kind, refused before anything is worked out from them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from stepwell_p2p import _require

from ..exceptions import ScheduleError, StageError, StageUsageError


def require(
    value: object, kind: type | tuple[type, ...], says: str, hint: str = "", *, error: type[StageError] = ScheduleError
) -> None:
    """Refuse what is not of a kind, as the layer below does.

    Raises:
        ScheduleError: it is of another kind.
    """
    _require.require(value, kind, says, hint, error=error)


def several(values: Iterable[Any], says: str, *, error: type[StageError] = StageUsageError) -> tuple[Any, ...]:
    """What was given as several, as a tuple, as in the layer below.

    Raises:
        StageUsageError: it is one.
    """
    return _require.several(values, says, error=error)


def path_of(path: str | os.PathLike[str], *, error: type[StageError] = StageUsageError) -> Path:
    """Where a file is.

    Raises:
        StageUsageError: this is no path.
    """
    require(path, (str, os.PathLike), "a file is named by a text or a path", error=error)
    return Path(path)


def is_cost(number: object) -> bool:
    """Whether it is a number that is finite and at least 0."""
    try:
        return bool(0 <= number <= sys.float_info.max)  # type: ignore[operator]  # that is the question; NaN is not
    except (TypeError, ValueError):
        return False
