"""How the kernel schedules the threads that a backend starts."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator


@contextlib.contextmanager
def giving_way() -> Iterator[None]:
    """Around what starts threads, such as gloo's: as they wake they take no core from a running thread, but wait for a free one.

    Where ranks share cores, messages and collectives over gloo take a fraction of the time. A message wakes the receiver's
    event loop, and the kernel may give it the core of the thread that is sending. That one then holds the lock of its connection,
    and until it has a core again its own loop turns on that lock. :class:`C10dTransport` makes its channels within this.

    Of no effect but on Linux, and where the calling thread was given a scheduling policy of its own.

    Example::

        with giving_way():
            dist.init_process_group("gloo")
    """
    changed = _change("SCHED_OTHER", "SCHED_BATCH")  # threads inherit the policy of the one that starts them
    try:
        yield
    finally:
        if changed:
            _change("SCHED_BATCH", "SCHED_OTHER")


def _change(before: str, after: str) -> bool:
    """Give this thread the one policy where it has the other; whether that was done. Sandboxes may know no policies."""
    with contextlib.suppress(AttributeError, OSError):
        if os.sched_getscheduler(0) == getattr(os, before):
            os.sched_setscheduler(0, getattr(os, after), os.sched_param(0))
            return True
    return False
