"""Python's collector of reference cycles, held off while a plan of millions of actions is made."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Collect nothing meanwhile: plans have no cycles, and the collector would go through their tuples again and again.

    Takes half the time of lowering a large schedule, measured. Also a decorator.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
