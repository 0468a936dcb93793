"""The worker pool, on which every distributed test rests: it must run what it is sent, and never hang."""

from __future__ import annotations

import contextlib
import operator
import os
import signal
import stat
import sys
import threading
import time
import warnings
from multiprocessing.connection import Connection

import cloudpickle
import pytest
import torch
import torch.distributed as dist

from stepwell_meta.testing import Outcome, WorkerFailure, WorkerPool


def rank_and_sum() -> tuple[int, int, float]:
    value = torch.tensor(float(dist.get_rank() + 1))
    dist.all_reduce(value)
    return dist.get_rank(), dist.get_world_size(), value.item()


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
def test_every_rank_gets_a_group_of_the_size_asked_for(workers: WorkerPool, world_size: int) -> None:
    total = world_size * (world_size + 1) / 2
    assert workers.run(rank_and_sum, world_size) == [(rank, world_size, total) for rank in range(world_size)]


def test_processes_are_kept_between_calls(workers: WorkerPool) -> None:
    first = workers.run(os.getpid, 2)
    assert workers.run(os.getpid, 2) == first
    assert os.getpid() not in first


def test_arguments_closures_and_results_travel_by_value(workers: WorkerPool) -> None:
    class Box:
        def __init__(self, value: torch.Tensor) -> None:
            self.value = value

    offset = 10

    def add(box: Box, *, times: int) -> Box:
        return Box(box.value * times + offset + dist.get_rank())

    results = workers.run(add, 2, Box(torch.arange(3)), times=2)
    assert [box.value.tolist() for box in results] == [[10, 12, 14], [11, 13, 15]]


def test_without_a_group(workers: WorkerPool) -> None:
    assert workers.run(dist.is_initialized, 2, init_group=False) == [False, False]


def test_an_error_on_one_rank_fails_the_call_with_all_ranks_reports(workers: WorkerPool) -> None:
    def work() -> None:
        if dist.get_rank() == 1:
            raise KeyError("lost on rank one")
        dist.barrier()

    start = time.monotonic()
    with pytest.raises(WorkerFailure, match="lost on rank one") as failure:
        workers.run(work, 3, deadline=60)
    assert time.monotonic() - start < 10
    assert failure.value.outcomes[1].error == "KeyError"
    assert "rank 0 " in str(failure.value)
    assert "rank 2 " in str(failure.value)
    assert not any(outcome.ok for outcome in failure.value.outcomes)


def waits_for_ever_here() -> None:
    if dist.get_rank() == 0:
        time.sleep(3600)
    else:
        dist.recv(torch.zeros(1), src=0)  # inside C++


def test_a_hang_fails_at_the_deadline_with_every_stack_and_the_pool_heals(workers: WorkerPool) -> None:
    before = workers.run(os.getpid, 2)
    start = time.monotonic()
    with pytest.raises(WorkerFailure) as failure:
        workers.run(waits_for_ever_here, 2, deadline=1)
    assert time.monotonic() - start < 10
    assert "waits_for_ever_here" in failure.value.outcomes[0].trace
    assert "waits_for_ever_here" in failure.value.outcomes[1].trace
    # Also the rank that waits for the other in C++: the group's timeout, which was the deadline itself, does not come first
    # and leave a rank that is neither in its wait nor done.
    assert [outcome.hung for outcome in failure.value.outcomes] == [True, True]

    after = workers.run(os.getpid, 2)
    assert not set(before) & set(after)
    assert workers.run(rank_and_sum, 2)[0] == (0, 2, 3.0)


def test_a_killed_worker_is_named_and_replaced(workers: WorkerPool) -> None:
    def die() -> None:
        if dist.get_rank() == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()

    start = time.monotonic()
    with pytest.raises(WorkerFailure, match=r"rank 2 died .*SIGKILL") as failure:
        workers.run(die, 4, deadline=60)
    assert time.monotonic() - start < 10
    assert failure.value.outcomes[2].exit_code == -signal.SIGKILL
    assert [result[0] for result in workers.run(rank_and_sum, 4)] == [0, 1, 2, 3]


def test_outcomes_do_not_raise_and_wait_for_the_survivors(workers: WorkerPool) -> None:
    def work() -> str:
        if dist.get_rank() == 0:
            sys.exit(3)
        time.sleep(0.5)
        return "done"

    lost, survivor = workers.outcomes(work, 2, deadline=20)
    assert lost.error == "SystemExit"
    assert survivor.ok
    assert survivor.value == "done"


def test_a_worker_that_died_between_calls_is_replaced(workers: WorkerPool) -> None:
    victim = workers.run(os.getpid, 2)[0]
    os.kill(victim, signal.SIGKILL)
    time.sleep(0.2)
    assert workers.run(rank_and_sum, 2) == [(0, 2, 3.0), (1, 2, 3.0)]


def test_warnings_are_errors_in_workers_too(workers: WorkerPool) -> None:
    def warn() -> None:
        warnings.warn("look out", UserWarning, stacklevel=1)

    with pytest.raises(WorkerFailure, match="UserWarning: look out"):
        workers.run(warn, 1)


def test_more_ranks_than_the_pool_has_are_refused(workers: WorkerPool) -> None:
    with pytest.raises(ValueError, match="1 to 8"):
        workers.run(os.getpid, 9)


def test_an_unpicklable_result_is_an_error_not_a_hang(workers: WorkerPool) -> None:
    with pytest.raises(WorkerFailure, match="pickle"):
        workers.run(threading.Lock, 1, deadline=20)


class Unloadable:
    def __reduce__(self) -> tuple[object, ...]:
        return operator.truediv, (1, 0)


def test_a_result_that_cannot_be_loaded_is_that_ranks_error_and_leaves_no_answer_behind(workers: WorkerPool) -> None:
    """Rank 0's result raised here while it was put together; rank 1's answer was left over, and became the next call's."""

    def work() -> object:
        return Unloadable() if dist.get_rank() == 0 else "left over"

    with pytest.raises(WorkerFailure, match="rank 0 raised ZeroDivisionError") as failure:
        workers.run(work, 2)
    assert failure.value.outcomes[1].ok
    assert workers.run(dist.get_rank, 2) == [0, 1]


@pytest.mark.parametrize(("end", "words"), [("dies", "SIGKILL"), ("stops", "stopped in the middle of its answer")])
def test_a_rank_that_dies_or_stops_in_the_middle_of_its_answer_is_named(
    workers: WorkerPool, end: str, words: str
) -> None:
    """Of one that died nothing was said but that a file ended, without the other ranks' outcomes; on one that stopped the call
    waited for ever."""

    def cut_off() -> str:
        def half(connection: Connection, data: bytes) -> None:
            os.write(connection.fileno(), bytes(data)[: len(data) // 2])
            os.kill(os.getpid(), signal.SIGKILL if end == "dies" else signal.SIGSTOP)

        if dist.get_rank() == 1:
            Connection._send = half  # type: ignore[attr-defined]
        return "x" * 1000

    outcomes = workers.outcomes(cut_off, 2, deadline=2)
    assert outcomes[0].ok
    assert words in outcomes[1].describe()
    assert workers.run(dist.get_rank, 2) == [0, 1]


def test_an_interrupted_call_leaves_no_answer_behind(workers: WorkerPool) -> None:
    """A test's own time limit ended a call here while its ranks ran on; the next test got their answers as its own."""

    def late() -> str:
        time.sleep(0.5)
        return "left over"

    def interrupt(number: int, frame: object) -> None:
        raise TimeoutError("the test took too long")

    before = signal.signal(signal.SIGUSR2, interrupt)
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGUSR2))
    try:
        workers.run(os.getpid, 2)  # started
        timer.start()
        with pytest.raises(TimeoutError, match="took too long"):
            workers.run(late, 2)
    finally:
        timer.join()
        signal.signal(signal.SIGUSR2, before)
    assert workers.run(dist.get_rank, 2) == [0, 1]


def test_a_rank_that_closes_its_connection_and_lives_on_has_not_returned() -> None:
    """It counted as a rank that returned None: it had no exit code."""

    def cut_off() -> None:
        for number in range(3, 64):
            with contextlib.suppress(OSError):
                if stat.S_ISSOCK(os.fstat(number).st_mode):
                    os.close(number)
        time.sleep(60)

    with WorkerPool(max_size=1) as pool, pytest.MonkeyPatch.context() as patch:
        pool.run(os.getpid, 1, init_group=False)
        patch.setattr(pool._workers[0].process, "join", lambda seconds: None)  # it would be waited for 5 s
        (outcome,) = pool.outcomes(cut_off, 1, deadline=10, init_group=False)
    assert not outcome.ok
    assert "it closed its connection and lives on" in outcome.describe()


def remembered() -> bool:
    """Whether an operator's result bears the mesh of this call."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    value = distribute_tensor(torch.ones(4, 2), mesh, (Shard(0), Shard(1)))
    return (value + value).device_mesh is mesh


def test_a_call_meets_no_mesh_of_an_earlier_one(workers: WorkerPool) -> None:
    """DTensor operators remember meshes: in the second call their results bore the mesh, and the groups, of the first."""
    assert [workers.run(remembered, 2) for _ in range(2)] == [[True, True], [True, True]]


def test_a_module_that_a_test_suite_sends_by_value_stays_so(workers: WorkerPool) -> None:
    """A call of one of its functions took it off the list, and later calls that only use it failed to import it."""
    module = sys.modules[__name__]
    cloudpickle.register_pickle_by_value(module)
    try:
        workers.run(rank_and_sum, 1)
        assert __name__ in cloudpickle.list_registry_pickle_by_value()
    finally:
        cloudpickle.unregister_pickle_by_value(module)
    workers.run(rank_and_sum, 1)
    assert __name__ not in cloudpickle.list_registry_pickle_by_value()


@pytest.mark.parametrize(
    ("exit_code", "words"),
    [(3, "exit code 3"), (-9, "signal SIGKILL"), (-40, "signal 40")],  # 40 has no name
)
def test_how_a_rank_died_is_described_whatever_it_was(exit_code: int, words: str) -> None:
    """A real-time signal has no name, and asking for it raised ValueError in place of the report."""
    assert Outcome(1, exit_code=exit_code, seconds=2.0).describe() == f"rank 1 died after 2.0 s ({words})"


def test_close_ends_the_processes_and_may_be_called_twice() -> None:
    pool = WorkerPool(max_size=2)
    pids = pool.run(os.getpid, 2)
    pool.close()
    pool.close()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    with pytest.raises(ValueError, match="this pool is closed; make a new one"):  # its workers died of a missing folder
        pool.run(os.getpid, 2)
