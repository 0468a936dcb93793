"""How much work something is, in calls of Python's functions: the same on every machine and under any load."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType, ModuleType
from typing import Any


def count_calls(work: Callable[[], object], *, within: ModuleType | None = None) -> int:
    """Calls of functions that are written in Python, by this thread while ``work`` runs.

    Example::

        assert count_calls(lambda: cut(large)) < 4.5 * count_calls(lambda: cut(small))     # four times as large

    Args:
        work: is called.
        within: a package; counts calls of its functions alone.
    """
    prefixes = ("",) if within is None else tuple(within.__path__)
    calls = 0

    def see(frame: FrameType, event: str, _: Any) -> None:
        nonlocal calls
        calls += event == "call" and frame.f_code.co_filename.startswith(prefixes)

    before = sys.getprofile()
    sys.setprofile(see)
    try:
        work()
    finally:
        sys.setprofile(before)
    return calls
