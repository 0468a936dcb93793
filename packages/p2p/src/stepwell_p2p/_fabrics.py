"""Running one program on every rank of a transport, each rank with its own end."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from ._transport import Transport

if TYPE_CHECKING:
    from stepwell_meta.testing import Outcome, WorkerPool

Program = Callable[..., Any]


class Fabric(Protocol):
    """Some ranks that can talk to each other, for as many runs as you like."""

    def run(self, program: Program, *args: Any, deadline: float) -> Sequence[Outcome]:
        """Call ``program(transport, *args)`` on every rank, each with a new transport, and say how each rank ended.

        Args:
            program: a function that other processes can get, for transports between processes.
            args: passed on.
            deadline: seconds after which a rank that still runs counts as hung.
        """
        ...


class ThreadFabric:
    """Ranks as threads of this process.

    Example::

        check_transport(lambda size: ThreadFabric(size, lambda: LoopbackFabric(size).transport))

    Args:
        size: number of ranks.
        connect: called once a run; what it returns is called with each rank, in its thread, for that rank's transport.
    """

    def __init__(self, size: int, connect: Callable[[], Callable[[int], Transport]]) -> None:
        self.size = size
        self._connect = connect

    def run(self, program: Program, *args: Any, deadline: float) -> Sequence[Outcome]:
        """See :class:`Fabric`. A rank that dies is one whose thread ends: somebody has to say so, here by ``abort``."""
        from stepwell_meta.testing import Outcome

        make = self._connect()
        outcomes: list[Outcome | None] = [None] * self.size
        start = time.monotonic()

        def rank_main(rank: int) -> None:
            transport = None
            try:
                transport = make(rank)
                value = program(transport, *args)
                transport.close()
                outcomes[rank] = Outcome(rank, value=value, seconds=time.monotonic() - start)
            except BaseException as error:  # whatever a program raises goes to the caller
                seconds = time.monotonic() - start
                if isinstance(error, SystemExit):
                    reason = "its thread ended"
                    outcomes[rank] = Outcome(rank, exit_code=1, seconds=seconds)
                else:
                    reason = f"{type(error).__name__}: {error}"
                    trace = traceback.format_exc()
                    outcomes[rank] = Outcome(rank, error=type(error).__name__, trace=trace, seconds=seconds)
                if transport is not None:
                    with contextlib.suppress(Exception):  # what went wrong first is told already
                        transport.abort(reason)
                    with contextlib.suppress(Exception):
                        transport.close()

        threads = [threading.Thread(target=rank_main, args=(rank,), daemon=True) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, start + deadline - time.monotonic()))
        return [outcome or Outcome(rank, hung=True, seconds=deadline) for rank, outcome in enumerate(outcomes)]


class PoolFabric:
    """Ranks as processes of a :class:`stepwell_meta.testing.WorkerPool`.

    Args:
        pool: the pool.
        size: number of ranks.
        connect: called in each process, with the number of ranks, for that rank's transport; torch.distributed is initialised
            there. A module-level function, which travels by value like the program.
    """

    def __init__(self, pool: WorkerPool, size: int, connect: Callable[[int], Transport]) -> None:
        self._pool = pool
        self._size = size
        self._connect = connect

    def run(self, program: Program, *args: Any, deadline: float) -> Sequence[Outcome]:
        """See :class:`Fabric`."""
        return self._pool.outcomes(
            _process_main, self._size, _by_value(self._connect, program), self._size, *args, deadline=deadline
        )


def die() -> None:
    """End this rank without another word: its process by SIGKILL, or, where it is a thread, the thread."""
    if threading.current_thread() is threading.main_thread():
        os.kill(os.getpid(), signal.SIGKILL)
    raise SystemExit


def _by_value(*functions: Callable[..., Any]) -> bytes:
    """Pickle functions; those of test files, which another process need not find, with all that stands in their files."""
    import cloudpickle

    names = {function.__module__ for function in functions}
    modules = [sys.modules[name] for name in names if not name.startswith(("stepwell", "torch"))]
    for module in modules:
        cloudpickle.register_pickle_by_value(module)
    try:
        return bytes(cloudpickle.dumps(functions))
    finally:
        for module in modules:
            cloudpickle.unregister_pickle_by_value(module)


def _process_main(functions: bytes, size: int, *args: Any) -> Any:
    import cloudpickle

    connect, program = cloudpickle.loads(functions)
    transport = connect(size)
    try:
        return program(transport, *args)
    except BaseException as error:
        transport.abort(f"{type(error).__name__}: {error}")
        raise
    finally:
        transport.close()
