"""Waiting on loopback under attack: several threads of a rank, interrupts, last moments, closing, and very many messages."""

from __future__ import annotations

import logging
import random
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait

import pytest
import torch

from stepwell_meta import TensorMeta
from stepwell_p2p import Edge, LoopbackFabric, LoopbackTransport, Op, OpKind, Recv, Rules, Send
from stepwell_p2p.exceptions import P2PUsageError, PeerFailure, TransportError
from stepwell_p2p.transports._loopback import _Batch

META = TensorMeta((4,), (1,), torch.float32)


def op(source: int, destination: int, microbatch: int = 0) -> Op:
    return Op(OpKind.SEND_F, Edge(source, destination), 0, microbatch)


def send(end: LoopbackTransport, to: int, microbatch: int = 0, value: float = 1.0) -> _Batch:
    return end.post([Send(op(end.rank, to, microbatch), torch.full((4,), float(value)))])


def recv(end: LoopbackTransport, source: int, microbatch: int = 0, buffer: torch.Tensor | None = None) -> _Batch:
    return end.post([Recv(op(source, end.rank, microbatch).mirror, META, buffer)])


def ends(size: int, **how: object) -> list[LoopbackTransport]:
    fabric = LoopbackFabric(size, **{"timeout": 20.0, **how})  # type: ignore[arg-type]
    return [fabric.transport(rank) for rank in range(size)]


def until_asleep(end: LoopbackTransport, threads: int = 1) -> None:
    limit = time.monotonic() + 5
    while len(end.fabric._asleep[end.rank]) < threads:
        assert time.monotonic() < limit
        time.sleep(0.001)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(16) as threads:
        yield threads


@pytest.fixture
def switch() -> Iterator[Callable[[float], None]]:
    """Sets how soon a thread must give way to another that wants to run."""
    before = sys.getswitchinterval()
    yield sys.setswitchinterval
    sys.setswitchinterval(before)


# ---- several threads of one rank


def test_two_threads_that_wait_for_one_handle_get_the_same(
    pool: ThreadPoolExecutor, switch: Callable[[float], None]
) -> None:
    """Both took what had come, each for itself: one emptied the handle while the other read it, which then got no value."""
    first, second = ends(2)
    switch(1e-6)
    for microbatch in range(300):
        handle = recv(second, 0, microbatch)
        waits = [pool.submit(handle.wait) for _ in range(4)]
        send(first, 1, microbatch, value=microbatch)
        results = [one.result(timeout=10) for one in waits]
        assert all(result is results[0] for result in results)
        assert torch.equal(results[0][0], torch.full((4,), float(microbatch)))


def test_a_thread_that_comes_late_to_a_handle_does_not_write_to_the_buffer_again(
    pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It copied the value once more, over what its owner had made of it since."""
    first, second = ends(2)
    buffer = torch.empty(4, 4)[:, 0]
    handle = recv(second, 0, buffer=buffer)
    send(first, 1, value=3.0)
    module = sys.modules[_Batch.__module__]
    place, go = module.place, [threading.Event(), threading.Event()]  # type: ignore[attr-defined]
    turns = iter(go)

    def when_told(*args: object) -> torch.Tensor:
        assert next(turns).wait(5)
        return place(*args)  # type: ignore[no-any-return]

    monkeypatch.setattr(module, "place", when_told)
    waits = [pool.submit(handle.wait) for _ in range(2)]
    time.sleep(0.1)
    go[0].set()
    done = wait(waits, timeout=5, return_when="FIRST_COMPLETED").done.pop()
    done.result()[0].add_(1)
    go[1].set()
    assert [one.result(timeout=5)[0] is buffer for one in waits] == [True, True]
    assert torch.equal(buffer, torch.full((4,), 4.0))


def test_a_rank_that_has_been_woken_and_has_not_run_yet_does_not_wait(
    pool: ThreadPoolExecutor, switch: Callable[[float], None]
) -> None:
    first, second = ends(2)
    for microbatch in range(50):
        handle = recv(second, 0, microbatch)
        answering = pool.submit(
            lambda handle=handle, microbatch=microbatch: (handle.wait(), send(second, 0, microbatch))
        )
        until_asleep(second)
        switch(5.0)  # nobody runs between the next two lines
        send(first, 1, microbatch)
        recv(first, 1, microbatch).wait()
        switch(0.005)
        answering.result(timeout=5)


def test_all_threads_that_wait_are_told_that_nothing_moves(pool: ThreadPoolExecutor) -> None:
    first, second = ends(2)
    waits = [pool.submit(recv(second, 0, microbatch).wait) for microbatch in range(3)]
    until_asleep(second, threads=3)
    assert [pending.waiting for pending in second.pending()] == [True] * 3
    with pytest.raises(TransportError, match="rank 0 waits for RECV_F of stage 0, microbatch 9"):
        recv(first, 1, 9).wait()
    for microbatch, one in enumerate(waits):
        with pytest.raises(TransportError, match=f"rank 1 waits for RECV_F of stage 0, microbatch {microbatch}"):
            one.result(timeout=5)


def test_one_thread_that_is_interrupted_leaves_the_other_one_waiting(pool: ThreadPoolExecutor) -> None:
    """It took the whole rank off the list of those that wait, so nobody saw that nothing moved any more."""
    first, second = ends(2)
    waits = pool.submit(recv(first, 1, 1).wait)
    until_asleep(first)
    interrupted(recv(first, 1, 2))
    until_asleep(first)
    with pytest.raises(TransportError, match="every rank waits"):
        recv(second, 0, 3).wait()
    with pytest.raises(TransportError, match="every rank waits"):
        waits.result(timeout=5)


# ---- interrupts and last moments


def interrupted(handle: _Batch) -> None:
    """Wait until a Ctrl-C comes in the middle."""
    timer = threading.Timer(0.1, signal.pthread_kill, [threading.main_thread().ident, signal.SIGINT])

    def wait_for_it() -> None:
        timer.start()
        handle.wait()

    with pytest.raises(KeyboardInterrupt):
        wait_for_it()
    timer.join()


def test_a_wait_that_was_interrupted_is_over_and_can_be_taken_up_again(pool: ThreadPoolExecutor) -> None:
    first, second = ends(2)
    handle = recv(first, 1)
    interrupted(handle)
    assert not any(first.fabric._asleep)
    assert [pending.waiting for pending in first.pending()] == [False]
    waits = pool.submit(recv(second, 0).wait)  # this rank alone waits: no report
    until_asleep(second)
    send(second, 0, value=2.0)
    send(first, 1)
    waits.result(timeout=5)
    assert torch.equal(handle.wait()[0], torch.full((4,), 2.0))


def test_what_comes_in_the_last_moment_of_a_timeout_counts(pool: ThreadPoolExecutor) -> None:
    """The wait gave up, and named as what it had waited for nothing at all, since all was there."""
    first, second = ends(2, timeout=0.2)
    fabric = first.fabric
    fabric._lock = threading.RLock()  # type: ignore[assignment]  # to hold it while this thread posts
    handle = recv(second, 0)
    waits = pool.submit(handle.wait)
    until_asleep(second)
    with fabric._lock:
        time.sleep(0.4)
        assert handle.missing
        send(first, 1, value=5.0)
    assert torch.equal(waits.result(timeout=5)[0], torch.full((4,), 5.0))


def test_a_warning_comes_once_and_the_timeout_counts_from_the_start(
    pool: ThreadPoolExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where the thread is woken again and again for what another one waits for."""
    first, second = ends(2, timeout=1.0, stall_after=0.3)
    start = time.monotonic()
    with caplog.at_level(logging.WARNING):
        waits = pool.submit(recv(second, 0, 999).wait)
        for microbatch in range(30):
            handle = pool.submit(recv(second, 0, microbatch).wait)
            time.sleep(0.02)
            send(first, 1, microbatch)
            handle.result(timeout=5)
        with pytest.raises(TransportError, match=r"rank 1 waited 1 s for RECV_F of stage 0, microbatch 999"):
            waits.result(timeout=5)
    assert time.monotonic() - start < 6
    assert caplog.text.count("microbatch 999") == 1
    assert not any(first.fabric._asleep)


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf"), None, "30"])
def test_timeouts_that_no_wait_can_have_are_refused(timeout: object) -> None:
    """An endless one failed in the middle of the first wait, in Python's words: timestamp out of range."""
    with pytest.raises(P2PUsageError, match="timeout="):
        LoopbackFabric(2, timeout=timeout)  # type: ignore[arg-type]


# ---- closing and aborting while others wait


def test_others_that_close_end_a_wait_only_when_nobody_is_left(pool: ThreadPoolExecutor) -> None:
    first, second, third = ends(3)
    waits = pool.submit(recv(first, 1, 1).wait)
    until_asleep(first)
    third.close()
    time.sleep(0.05)
    send(second, 0, 1)
    waits.result(timeout=5)
    waits = pool.submit(recv(first, 1, 2).wait)
    until_asleep(first)
    second.close()
    with pytest.raises(TransportError, match="Closed already: rank 1, 2"):
        waits.result(timeout=5)


def test_closing_ends_the_waits_of_all_threads_of_that_rank(pool: ThreadPoolExecutor) -> None:
    first, second = ends(2)
    waits = [pool.submit(recv(first, 1, microbatch).wait) for microbatch in range(3)]
    until_asleep(first, threads=3)
    first.close()
    for one in waits:
        with pytest.raises(P2PUsageError, match="rank 0 closed its transport while it waited"):
            one.result(timeout=5)
    with pytest.raises(TransportError, match="Closed already: rank 0"):
        recv(second, 0).wait()


def test_an_abort_ends_the_waits_of_all_threads_of_all_ranks(pool: ThreadPoolExecutor) -> None:
    transports = ends(3)
    waits = [pool.submit(recv(end, 2, microbatch).wait) for end in transports[:2] for microbatch in range(2)]
    for end in transports[:2]:
        until_asleep(end, threads=2)
    transports[2].abort("no room")
    for one in waits:
        with pytest.raises(PeerFailure, match="rank 2 failed: no room"):
            one.result(timeout=5)
    assert not any(transports[0].fabric._asleep)


# ---- very many messages


ALL_RULES = [Rules(tagged=tagged, rendezvous=wait) for tagged in (True, False) for wait in (True, False)]


def traffic(fabric: LoopbackFabric, count: int, seed: int) -> None:
    """Messages between random ranks in bursts: in any order where ops match, else in one; waited for in any order.

    Deadlocks are impossible: every rank posts a burst whole before it waits for any of it.
    """
    draw = random.Random(seed)
    messages = [(*draw.sample(range(fabric.size), 2), number) for number in range(count)]

    def run(rank: int) -> None:
        end, own = fabric.transport(rank), random.Random(rank)
        seen = 0
        for start in range(0, count, 64):
            mine = [one for one in messages[start : start + 64] if rank in one[:2]]
            if fabric.rules.tagged:
                own.shuffle(mine)
            handles = []
            for source, destination, number in mine:
                handles.append(
                    (send(end, destination, number, number), None)
                    if rank == source
                    else (recv(end, source, number), number)
                )
            own.shuffle(handles)
            for handle, number in handles:
                got = handle.wait()
                assert [float(value[3]) for value in got] == ([] if number is None else [number])
                seen += 1
        assert seen == sum(rank in one[:2] for one in messages)
        end.close()

    with ThreadPoolExecutor(fabric.size) as threads:
        for done in [threads.submit(run, rank) for rank in range(fabric.size)]:
            done.result(timeout=120)


@pytest.mark.parametrize("rules", ALL_RULES, ids=str)
def test_no_message_and_no_waking_is_lost_among_eight_threads(rules: Rules, switch: Callable[[float], None]) -> None:
    switch(1e-6)
    traffic(LoopbackFabric(8, rules=rules, timeout=30), count=6000, seed=1)


@pytest.mark.parametrize("rules", ALL_RULES, ids=str)
def test_nothing_is_kept_of_steps_that_are_done(rules: Rules, pool: ThreadPoolExecutor) -> None:
    fabric = LoopbackFabric(2, rules=rules, timeout=20)
    first, second = (fabric.transport(rank) for rank in range(2))

    def answer() -> None:
        for microbatch in range(200):
            recv(second, 0, microbatch % 8).wait()
            send(second, 0, microbatch % 8).wait()

    answering: Future[None] = pool.submit(answer)
    kept = []
    for microbatch in range(200):
        value = torch.ones(4)
        kept.append(weakref.ref(value))
        sending = first.post([Send(op(0, 1, microbatch % 8), value)])
        recv(first, 1, microbatch % 8).wait()
        sending.wait()
    answering.result(timeout=5)
    del value
    assert not any(tensor() is not None for tensor in kept)
    for store in (fabric._sends, fabric._recvs, fabric._moved, *fabric._asleep, *fabric._pending):
        assert not store
    assert not any(fabric._lanes.values())
    assert len(first._sends) == len(first._recvs) == 8
