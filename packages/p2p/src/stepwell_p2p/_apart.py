"""Waits in another thread, for those that nothing ends from outside.

gloo forgets a message that it has begun to read: where its sender ends then, whoever waits for it sleeps until its timeout. The
thread that needs the message therefore lets another one sleep, and looks now and then whether a failure is known by now; see
:meth:`~._link.Link.probe`.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

_PAUSE = 0.05  # seconds between two looks for a failure


class Waiter:
    """A thread that sleeps in place of another, one wait at a time; kept, since making one takes longer than most messages.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._asked: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._ended: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
        threading.Thread(target=_serve, args=(self._asked, self._ended), name=name, daemon=True).start()

    def wait(self, block: Callable[[], object], has_failed: Callable[[], bool]) -> bool:
        """Call ``block`` there. False where that has not ended, but something has failed: then the thread is still asleep.

        Raises:
            Exception: what ``block`` raised.
        """
        self._asked.put(block)
        while True:
            try:
                error = self._ended.get(timeout=_PAUSE)
            except queue.Empty:
                if has_failed():
                    self.close()
                    return False
                continue
            if error is not None:
                raise error
            return True

    def close(self) -> None:
        """Let the thread end, when it wakes up."""
        self._asked.put(None)


def _serve(asked: queue.SimpleQueue[Callable[[], object] | None], ended: queue.SimpleQueue[Exception | None]) -> None:
    while (block := asked.get()) is not None:
        error = None
        try:
            block()
        except Exception as caught:
            error = caught
        del block  # what was waited for is no concern of this thread any more
        ended.put(error)
        del error
