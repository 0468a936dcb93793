"""How the kernel schedules the threads that a backend starts for this layer."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator


@contextlib.contextmanager
def giving_way() -> Iterator[None]:
    """Around what starts threads: they wait for a core that is free, and take it from no running thread as they wake.

    A message wakes the receiver's event loop. Where all cores are busy, the kernel may give that loop the core of the thread that
    is sending, in the middle of it: with gloo, that thread holds the lock of its connection, on which the sender's own loop then
    turns, for as long as the sender has no core. With 4 ranks on 2 cores more than half of a step of small messages was that.

    Of no effect but on Linux, and where the calling thread was given a policy of its own.
    """
    batch = getattr(os, "SCHED_BATCH", None)  # threads inherit the policy of the one that starts them
    own = os.sched_getscheduler(0) if batch is not None else None
    if batch is None or own != os.SCHED_OTHER:
        yield
        return
    with contextlib.suppress(PermissionError):  # a sandbox may forbid it; then messages only take longer
        os.sched_setscheduler(0, batch, os.sched_param(0))
    try:
        yield
    finally:
        with contextlib.suppress(PermissionError):
            os.sched_setscheduler(0, own, os.sched_param(0))
