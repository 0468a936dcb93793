"""A pool of worker processes for tests that need real ranks.

Starting a process that imports torch takes seconds; a test suite has hundreds of distributed tests. The pool keeps its processes
and sends them functions. It never waits without a deadline: where a rank hangs or dies, the caller gets every rank's
stack within seconds, the processes of that call are thrown away, and fresh ones (forked from a server that has torch
loaded already) serve the next.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import attrs

from stepwell_meta._compat import LOADED_LATE
from stepwell_meta._worker import Answer, Call, serve
from stepwell_meta.exceptions import StepwellError

_MARGIN = 5.0  # seconds that the process group's timeout is longer than the deadline of the call


class WorkerFailure(StepwellError):
    """A distributed call did not succeed on every rank.

    Attributes:
        outcomes: one :class:`Outcome` per rank.
    """

    def __init__(self, message: str, outcomes: Sequence[Outcome]) -> None:
        super().__init__(message)
        self.outcomes = tuple(outcomes)


@attrs.frozen
class Outcome:
    """How a call ended on one rank.

    Exactly one of the four ways:

    * returned: ``value``, with ``error``, ``exit_code`` and ``hung`` unset;
    * raised: ``error`` (the exception's class name) and ``trace``;
    * died: ``exit_code`` (negative: the signal);
    * hung: ``hung``, with the stack of every thread in ``trace``.
    """

    rank: int
    value: Any = None
    error: str | None = None
    exit_code: int | None = None
    hung: bool = False
    trace: str = ""
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether the rank returned."""
        return self.error is None and self.exit_code is None and not self.hung

    def describe(self) -> str:
        """One paragraph for a person."""
        if self.ok:
            return f"rank {self.rank} returned after {self.seconds:.1f} s"
        if self.hung:
            return f"rank {self.rank} was still running after {self.seconds:.1f} s, in:\n{self.trace.rstrip()}"
        if self.exit_code is not None:
            how = f"exit code {self.exit_code}"
            if self.exit_code < 0:
                names = {
                    each.value: each.name for each in signal.Signals
                }  # of real-time signals only the first and last
                how = f"signal {names.get(-self.exit_code, -self.exit_code)}"
            return f"rank {self.rank} died after {self.seconds:.1f} s ({how})"
        return f"rank {self.rank} raised {self.error} after {self.seconds:.1f} s:\n{self.trace.rstrip()}"


class WorkerPool:
    """Processes kept for a whole test session; see :meth:`run`.

    Example::

        if __name__ == "__main__":   # in a script: as with any multiprocessing, new processes import its file
            with WorkerPool() as pool:
                ranks = pool.run(torch.distributed.get_rank, 4)   # [0, 1, 2, 3]

    Args:
        max_size: most ranks that one call may have.
    """

    def __init__(self, max_size: int = 8) -> None:
        import torch.distributed as dist

        self.max_size = max_size
        self._numbers = itertools.count()
        self._directory = tempfile.TemporaryDirectory(prefix="stepwell-pool-")
        self._workers: list[_Worker] = []
        self._store: Any = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(
            ["torch", "torch.distributed", *LOADED_LATE, "cloudpickle", "stepwell_meta._worker"]
        )
        forkserver.ensure_running()  # it imports these while its owner goes on

    def run(
        self,
        function: Callable[..., Any],
        world_size: int,
        *args: Any,
        deadline: float = 30.0,
        init_group: bool = True,
        **kwargs: Any,
    ) -> list[Any]:
        """Call ``function(*args, **kwargs)`` on ``world_size`` ranks and return the results by rank.

        In every rank torch.distributed is initialised (gloo, that world size) unless ``init_group`` is false. The
        function travels by value, so it may be a closure or stand in a test file that workers cannot import. Warnings are
        errors while it runs.

        Args:
            function: what to call.
            world_size: number of ranks.
            args: positional arguments of the function.
            deadline: seconds until the call is given up. The process group's timeout is a little longer, so that a rank which
                waits for ever is reported with the stack of its wait.
            init_group: whether the ranks get a default process group.
            kwargs: keyword arguments of the function.

        Raises:
            WorkerFailure: a rank raised, died, or was not done in time. Once one rank has failed the others get two more
                seconds, so the message holds each rank's own error, or its stack.
            ValueError: there are not so many ranks, or the pool is closed.
        """
        outcomes = self.outcomes(
            function, world_size, *args, deadline=deadline, grace=2.0, init_group=init_group, **kwargs
        )
        if all(outcome.ok for outcome in outcomes):
            return [outcome.value for outcome in outcomes]
        name = getattr(function, "__name__", repr(function))
        report = "\n\n".join(outcome.describe() for outcome in outcomes)
        raise WorkerFailure(f"{name} failed on {world_size} ranks.\n\n{report}", outcomes)

    def outcomes(
        self,
        function: Callable[..., Any],
        world_size: int,
        *args: Any,
        deadline: float = 30.0,
        grace: float | None = None,
        init_group: bool = True,
        **kwargs: Any,
    ) -> list[Outcome]:
        """Like :meth:`run`, for tests in which ranks are meant to fail: says how each rank ended, and never raises for it.

        Args:
            function: as in :meth:`run`.
            world_size: as in :meth:`run`.
            args: as in :meth:`run`.
            deadline: as in :meth:`run`.
            grace: seconds that the other ranks get after the first has failed; None: until the deadline.
            init_group: as in :meth:`run`.
            kwargs: as in :meth:`run`.

        Raises:
            ValueError: there are not so many ranks, or the pool is closed.
        """
        if self._store is None:
            raise ValueError("this pool is closed; make a new one")
        if not 1 <= world_size <= self.max_size:
            raise ValueError(f"world_size must be 1 to {self.max_size} (the pool's max_size), not {world_size}")
        payload = _pickle_by_value(function, args, kwargs)
        number = next(self._numbers)
        self._grow(world_size)
        workers = self._workers[:world_size]
        start = time.monotonic()
        kept = False
        try:
            for rank, worker in enumerate(workers):
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it died; its end of file will say so
                    worker.connection.send(Call(number, rank, world_size, init_group, deadline + _MARGIN, payload))
            outcomes = self._collect(workers, start, deadline, grace)
            kept = all(outcome.ok for outcome in outcomes)
        finally:
            if not kept:
                # A call that failed, or was interrupted here (by a test's own time limit, say), may leave threads, groups,
                # half-sent messages or answers that nobody read behind; no later call shall meet them.
                for worker in workers:
                    worker.kill()
                self._workers = self._workers[world_size:]
        return outcomes

    def close(self) -> None:
        """End every process and give back what the pool holds. Safe to call twice."""
        for worker in self._workers:
            worker.kill()
        self._workers = []
        self._store = None
        self._directory.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _grow(self, size: int) -> None:
        """Replace what died between calls and start what is missing."""
        alive = []
        for worker in self._workers:
            if worker.process.is_alive():
                alive.append(worker)
            else:
                worker.kill()
        self._workers = alive
        while len(self._workers) < size:
            ours, theirs = self._context.Pipe()
            stack_path = Path(self._directory.name, f"stack-{next(self._numbers)}")
            process = self._context.Process(target=serve, args=(theirs, self._store.port, str(stack_path)), daemon=True)
            process.start()
            theirs.close()
            self._workers.append(_Worker(process, ours, stack_path))

    def _collect(self, workers: Sequence[_Worker], start: float, deadline: float, grace: float | None) -> list[Outcome]:
        outcomes: dict[int, Outcome] = {}
        end = start + deadline
        while len(outcomes) < len(workers):
            waiting = {worker.connection: rank for rank, worker in enumerate(workers) if rank not in outcomes}
            ready = wait(list(waiting), timeout=max(0.0, end - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                rank = waiting[connection]  # type: ignore[index]  # wait() gives back what it was given
                outcomes[rank] = workers[rank].answer(rank, start, end)
                if not outcomes[rank].ok and grace is not None:
                    end = min(end, time.monotonic() + grace)
        late = [rank for rank in range(len(workers)) if rank not in outcomes]
        stacks = _stacks([workers[rank] for rank in late])
        for rank, stack in zip(late, stacks, strict=True):
            outcomes[rank] = Outcome(rank, hung=True, trace=stack, seconds=time.monotonic() - start)
        return [outcomes[rank] for rank in range(len(workers))]


class _Worker:
    """One process with its connection; mutable because the process is."""

    def __init__(self, process: Any, connection: Connection, stack_path: Path) -> None:
        self.process = process
        self.connection = connection
        self.stack_path = stack_path

    def answer(self, rank: int, start: float, end: float) -> Outcome:
        import cloudpickle

        stopped = threading.Event()

        def stop() -> None:
            stopped.set()
            self.process.kill()

        watch = threading.Timer(max(1.0, end - time.monotonic()), stop)
        watch.start()
        try:
            answer: Answer | None = self.connection.recv()
        except (EOFError, OSError):  # OSError: in the middle of an answer
            answer = None
        finally:
            watch.cancel()
        if stopped.is_set():
            trace = "(it stopped in the middle of its answer)"
            return Outcome(rank, hung=True, trace=trace, seconds=time.monotonic() - start)
        if answer is None:
            self.process.join(5)
        seconds = time.monotonic() - start
        if answer is None and self.process.exitcode is None:
            return Outcome(rank, hung=True, trace="(it closed its connection and lives on)", seconds=seconds)
        if answer is None:
            return Outcome(rank, exit_code=self.process.exitcode, seconds=seconds)
        if answer.error is not None:
            return Outcome(rank, error=answer.error, trace=answer.trace, seconds=seconds)
        try:
            return Outcome(rank, value=cloudpickle.loads(answer.payload), seconds=seconds)
        except Exception as error:  # the result's class may run anything while it is put together again
            return Outcome(rank, error=type(error).__name__, trace=traceback.format_exc(), seconds=seconds)

    def kill(self) -> None:
        self.process.kill()
        self.process.join(5)
        self.connection.close()
        self.stack_path.unlink(missing_ok=True)


def _stacks(workers: Sequence[_Worker]) -> list[str]:
    """The stacks of all threads of workers that are still running, asked for at once and waited for together."""
    for worker in workers:
        with contextlib.suppress(ProcessLookupError):  # it ended just now
            os.kill(worker.process.pid, signal.SIGUSR1)
    stacks = [""] * len(workers)
    end = time.monotonic() + 2.0
    while time.monotonic() < end:
        time.sleep(0.05)  # a dump has no end mark: take it once it stopped growing
        seen = [
            worker.stack_path.read_text(errors="replace") if worker.stack_path.exists() else "" for worker in workers
        ]
        if seen == stacks and all(stacks):
            break
        stacks = seen
    return [stack or "(no stack came back: the process is stopped or still starting)" for stack in stacks]


def _pickle_by_value(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """Pickle a call; what stands in the function's own file goes by value, unless that file is a part of stepwell."""
    import cloudpickle

    module = sys.modules.get(getattr(function, "__module__", None) or "")
    name = module.__name__ if module is not None and hasattr(module, "__file__") else ""
    if not name or _importable_anywhere(name) or name in cloudpickle.list_registry_pickle_by_value():
        return bytes(cloudpickle.dumps((function, args, kwargs)))
    cloudpickle.register_pickle_by_value(module)
    try:
        return bytes(cloudpickle.dumps((function, args, kwargs)))
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def _importable_anywhere(module_name: str) -> bool:
    top = module_name.partition(".")[0]
    return top in sys.stdlib_module_names or top == "torch" or top.startswith("stepwell")
