"""One rank fails: every rank ends, with the first cause, and the same processes can start again."""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import stepwell_p2p._groups as groups_module
import stepwell_p2p._link as link_module
from stepwell_meta import TensorMeta
from stepwell_meta.testing import WorkerPool
from stepwell_p2p import C10dTransport, Edge, Op, OpKind, Placement, Recv, Send, chain_wires
from stepwell_p2p._board import FailureBoard, Note
from stepwell_p2p._failure import Failure
from stepwell_p2p.exceptions import PeerFailure, TransportError
from stepwell_p2p.testing import Fault, FaultyTransport, die

META = TensorMeta((4,), (1,), torch.float32)


def others_done(culprit: int) -> None:
    """The culprit lives on until every other rank has said here that it is done: they must not need its end."""
    store, ranks = dist.group.WORLD.get_group_store(), range(dist.get_world_size())
    store.set(f"done/{dist.get_rank()}", "")
    if dist.get_rank() == culprit:
        store.wait([f"done/{rank}" for rank in ranks], timedelta(seconds=15))


def chain(transport: object, steps: int, *, fail: object = None) -> None:
    """Values down a chain of ranks and gradients back up, microbatch by microbatch; ``fail`` runs on rank 1 at microbatch 3."""
    rank, size = transport.rank, transport.size  # type: ignore[attr-defined]
    post = transport.post  # type: ignore[attr-defined]
    for microbatch in range(steps):
        if rank == 1 and microbatch == 3 and fail is not None:
            fail()  # type: ignore[operator]
        if rank > 0:
            post([Recv(Op(OpKind.RECV_F, Edge(rank - 1, rank), rank - 1, microbatch), META)]).wait()
        if rank < size - 1:
            sending = post([Send(Op(OpKind.SEND_F, Edge(rank, rank + 1), rank, microbatch), torch.ones(4))])
            post([Recv(Op(OpKind.RECV_B, Edge(rank + 1, rank), rank + 1, microbatch), META)]).wait()
            sending.wait()
        if rank > 0:
            post([Send(Op(OpKind.SEND_B, Edge(rank, rank - 1), rank, microbatch), torch.ones(4))]).wait()


def outcome_of(transport: object, fail: object) -> tuple[float, str, object, object]:
    start = time.monotonic()
    try:
        chain(transport, 10, fail=fail)
    except PeerFailure as error:
        seconds = time.monotonic() - start
        others_done(culprit=1)
        return seconds, error.reason, error.rank, error.microbatch
    except RuntimeError as error:  # the rank that raised, as a stage would
        transport.abort(f"RuntimeError: {error}", stage=1, microbatch=3, action="F")  # type: ignore[attr-defined]
        others_done(culprit=1)
        return 0.0, "raised", 1, 3
    return time.monotonic() - start, "finished", None, None


def raise_in_the_middle(*, channels: bool) -> tuple[float, str, object, object]:
    placement = Placement.loop(4, 4) if channels else None
    transport = C10dTransport(placement=placement)

    def fail() -> None:
        raise RuntimeError("out of memory")

    result = outcome_of(transport, fail)
    transport.close()
    return result


@pytest.mark.parametrize("channels", [True, False])
def test_p150_a_rank_that_raises_and_lives_on_ends_every_wait(workers: WorkerPool, *, channels: bool) -> None:
    answers = workers.run(raise_in_the_middle, 4, channels=channels)
    for rank in (0, 2, 3):
        seconds, reason, failed, microbatch = answers[rank]
        assert (reason, failed, microbatch) == ("RuntimeError: out of memory", 1, 3)
        assert seconds < 5


def killed_in_the_middle() -> tuple[float, str, object, object]:
    transport = C10dTransport(placement=Placement.loop(4, 4))
    result = outcome_of(transport, die)
    transport.close()
    return result


def test_a_rank_that_is_killed_ends_every_wait(workers: WorkerPool) -> None:
    outcomes = workers.outcomes(killed_in_the_middle, 4, deadline=20.0)
    assert outcomes[1].exit_code == -9
    for rank in (0, 2, 3):
        seconds, reason, failed, _ = outcomes[rank].value
        assert failed == 1
        assert "ended, or its connection" in reason
        assert seconds < 5


def hangs_in_the_middle() -> tuple[float, str, object, object]:
    transport = C10dTransport(placement=Placement.loop(4, 4), timeout=20.0)
    link = transport._link
    assert link is not None
    link.timeout = link.own_timeout = timedelta(
        seconds=2
    )  # of the chain's waits alone: the others may come late to the opening
    result = outcome_of(transport, lambda: others_done(culprit=1))
    transport.close()
    return result


def test_a_rank_that_hangs_past_the_timeout_is_found_through_those_that_wait_for_it(workers: WorkerPool) -> None:
    """Rank 3 waits for 2, which waits for 1, which computes for ever: the reason names 1, whoever runs out first."""
    answers = workers.run(hangs_in_the_middle, 4)
    for seconds, reason, failed, _ in answers:
        assert failed == 1
        assert "rank 1 does not say that it waits for anybody" in reason
        assert seconds < 2.0 + 5


def store_host_dies(port: int) -> str:
    """Rank 0 hosts the store and is killed while the others wait for each other."""
    counter = dist.group.WORLD.get_group_store()
    rank = counter.add("who", 1) - 1
    dist.destroy_process_group()
    store = dist.TCPStore("127.0.0.1", port, 3, is_master=rank == 0, timeout=timedelta(seconds=10))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=3, timeout=timedelta(seconds=20))
    transport = C10dTransport(placement=Placement.loop(3, 3))
    if rank == 0:
        time.sleep(0.5)
        die()
    start = time.monotonic()
    peer = 3 - rank
    with pytest.raises(TransportError) as caught:
        transport.post([Recv(Op(OpKind.RECV_F, Edge(peer, rank), 0, 0), META)]).wait()
    assert time.monotonic() - start < 10
    transport.close()
    return str(caught.value)


def test_the_others_end_when_the_rank_that_hosts_the_store_dies(workers: WorkerPool) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    outcomes = workers.outcomes(store_host_dies, 3, port, deadline=25.0)
    assert sorted(outcome.exit_code == -9 for outcome in outcomes) == [False, False, True]
    for outcome in outcomes:
        if outcome.exit_code is None:
            assert "store cannot be reached" in outcome.value or "ended, or its connection" in outcome.value


def fail_and_start_again(times: int) -> list[tuple[int, int, int]]:
    """Fail, tear down, initialise, and work: counts of threads, descriptors and links after every fifth round."""
    base = dist.group.WORLD.get_group_store()
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    counts, causes = [], []
    for turn in range(times):
        store = dist.PrefixStore("the same name every time" if turn % 2 else f"turn {turn}", base)
        store = dist.PrefixStore(f"turn {turn}", store)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=20))
        transport = C10dTransport(placement=Placement.loop(size, size))
        chain(transport, 2)

        def fail() -> None:
            raise RuntimeError("again")

        try:
            chain(transport, 5, fail=fail)
        except RuntimeError as error:
            transport.abort(str(error))
        except PeerFailure as error:
            causes.append((error.reason, error.rank))
        transport.close()
        dist.destroy_process_group()
        del transport
        if turn % 5 < 4:  # a collection takes long where a test has imported much
            continue
        gc.collect()
        counts.append((len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")), len(link_module._links)))
    assert causes == [("again", 1)] * (0 if rank == 1 else times)
    return counts


@pytest.mark.skipif(sys.platform != "linux", reason="counts through /proc")
def test_twenty_failures_in_a_row_leave_nothing_behind(workers: WorkerPool) -> None:
    for counts in workers.run(fail_and_start_again, 3, 20, deadline=60.0):
        threads, descriptors, links = zip(*counts, strict=True)
        assert max(threads) <= threads[0]
        assert max(descriptors) <= descriptors[0] + 1  # torch closes one of its own late
        assert set(links) == {0}


def destroyed_without_close() -> int:
    """A user who forgets close: the group's end takes the link along, and a new group gets a fresh one."""
    base = dist.group.WORLD.get_group_store()
    rank = dist.get_rank()
    transport = C10dTransport(placement=Placement.loop(2, 2))
    del transport
    dist.destroy_process_group()
    gc.collect()
    left = len(link_module._links)
    dist.init_process_group("gloo", store=dist.PrefixStore("again", base), rank=rank, world_size=2)
    again = C10dTransport(placement=Placement.loop(2, 2))
    chain(again, 3)
    again.close()
    return left


def test_a_destroyed_group_takes_its_link_along(workers: WorkerPool) -> None:
    assert workers.run(destroyed_without_close, 2) == [0, 0]


def faulty(kind: str, at: int) -> str:
    transport = FaultyTransport(C10dTransport(timeout=2.0), [Fault(kind, at)] if dist.get_rank() == 1 else [])
    try:
        chain(transport, 6)
    except TransportError as error:
        transport.abort(str(error))
        return type(error).__name__
    finally:
        transport.close()
    return "finished"


@pytest.mark.parametrize("kind", ["drop", "truncate", "kill", "delay"])
def test_faults_end_in_errors_on_every_rank_and_never_in_a_hang(workers: WorkerPool, kind: str) -> None:
    outcomes = workers.outcomes(faulty, 3, kind, 6, deadline=20.0)
    assert not any(outcome.hung for outcome in outcomes)
    endings = [outcome.value for outcome in outcomes]
    if kind == "delay":
        assert endings == ["finished"] * 3
    elif kind == "kill":
        assert outcomes[1].exit_code == -9
        assert endings[0] == endings[2] == "PeerFailure"
    else:
        assert endings == ["PeerFailure"] * 3


def test_failure_records_travel_as_bytes() -> None:
    failure = Failure("x" * 10_000, 3, 1, 2, "B")
    again = Failure.from_bytes(failure.to_bytes())
    assert again.reason == "x" * 4000
    assert str(again.error()).startswith("rank 3, stage 1, microbatch 2, action B failed: x")
    assert "cannot be read" in Failure.from_bytes(b"\xff").reason
    assert "cannot be read" in Failure.from_bytes(b'{"other": 1}').reason


def aborts_before_the_channels_open() -> tuple[float, str]:
    transport = C10dTransport(timeout=60.0)
    start = time.monotonic()
    if transport.rank == 1:
        transport.abort("no memory for its stage", stage=1)
        others_done(culprit=1)
        transport.close()
        return 0.0, ""
    with pytest.raises(PeerFailure) as caught:
        transport.open(Placement.loop(3, 3), chain_wires(3))
    seconds = time.monotonic() - start
    others_done(culprit=1)
    transport.close()
    return seconds, str(caught.value)


def test_a_rank_that_fails_before_its_channels_open_ends_the_others_opening(workers: WorkerPool) -> None:
    """They sat in gloo, which waits for a peer's address as long as the group's timeout says: half an hour by default."""
    answers = workers.run(aborts_before_the_channels_open, 3)
    for seconds, error in (answers[0], answers[2]):
        assert "rank 1, stage 1 failed: no memory for its stage" in error
        assert seconds < 5


def killed_before_the_channels_open() -> tuple[float, object]:
    transport = C10dTransport()
    start = time.monotonic()
    if transport.rank == 1:
        die()
    with pytest.raises(PeerFailure) as caught:
        transport.open(Placement.loop(4, 4), chain_wires(4))
    seconds = time.monotonic() - start
    transport.close()
    return seconds, caught.value.rank


def test_a_rank_that_is_killed_before_its_channels_open_ends_the_others_opening(workers: WorkerPool) -> None:
    """It said nothing and was connected to nobody through a channel, so the others waited for it as long as the group's timeout
    says: half an hour by default."""
    outcomes = workers.outcomes(killed_before_the_channels_open, 4, deadline=20.0)
    assert outcomes[1].exit_code == -9
    for rank in (0, 2, 3):
        seconds, failed = outcomes[rank].value
        assert failed == 1
        assert seconds < 5


def killed_while_the_channels_open(moment: str) -> tuple[float, object]:
    transport = C10dTransport()
    start = time.monotonic()
    if transport.rank == 1 and moment == "after the meeting":
        groups_module._wait_for_members = die_now
    elif transport.rank == 1:
        groups_module.gloo_groups = lambda timeout: die_now
    with pytest.raises(PeerFailure) as caught:
        transport.open(Placement.loop(4, 4), chain_wires(4))
    seconds = time.monotonic() - start
    transport.close()
    return seconds, caught.value.rank


@pytest.mark.parametrize("moment", ["after the meeting", "where its peers wait for its address"])
def test_a_rank_that_is_killed_while_channels_open_ends_the_others_opening(workers: WorkerPool, moment: str) -> None:
    """gloo waited for it as long as the timeout says, and so did the thread that looks for failures: they shared a connection."""
    outcomes = workers.outcomes(killed_while_the_channels_open, 4, moment, deadline=20.0)
    assert outcomes[1].exit_code == -9
    for rank in (0, 2, 3):
        seconds, failed = outcomes[rank].value
        assert failed == 1
        assert seconds < 5


def killed_before_it_has_a_transport(who: int) -> tuple[float, object, str]:
    start = time.monotonic()
    if dist.get_rank() == who:
        die()
    with pytest.raises(PeerFailure) as caught:
        C10dTransport()
    return time.monotonic() - start, caught.value.rank, str(caught.value)


@pytest.mark.parametrize("who", [0, 1, 3])
def test_a_rank_that_is_killed_before_it_has_a_transport_is_missed_at_once(workers: WorkerPool, who: int) -> None:
    """A rank waited for another that had noticed it, had given up, and lived on: until the timeout."""
    outcomes = workers.outcomes(killed_before_it_has_a_transport, 4, who, deadline=20.0)
    assert outcomes[who].exit_code == -9
    for outcome in outcomes:
        if outcome.rank != who:
            seconds, failed, text = outcome.value
            assert failed == who
            assert "it ended before all ranks had made their transports" in text
            assert seconds < 5


def killed_in_the_middle_of_a_message() -> tuple[float, object]:
    transport = C10dTransport(placement=Placement.loop(3, 3))
    rank, numel = transport.rank, 1 << 28
    start = time.monotonic()
    if rank == 0:
        value = torch.zeros(numel, dtype=torch.uint8)
        transport.post([Send(Op(OpKind.SEND_F, Edge(0, 1), 0, 0), value)])
        threading.Timer(0.05, die_now).start()  # the message takes longer
        time.sleep(20)
    meta = TensorMeta((numel,), (1,), torch.uint8) if rank == 1 else META
    with pytest.raises(PeerFailure) as caught:
        transport.post([Recv(Op(OpKind.RECV_F, Edge(rank - 1, rank), rank - 1, 0), meta)]).wait()
    seconds = time.monotonic() - start
    transport.close()
    return seconds, caught.value.rank


def die_now(*_: object) -> None:
    """Not `die`, which ends a thread that is not the main one."""
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_rank_that_is_killed_in_the_middle_of_a_message_is_missed(workers: WorkerPool) -> None:
    """gloo forgets what it has begun to read, so its receiver, and all that waited for that one, waited for the timeout."""
    outcomes = workers.outcomes(killed_in_the_middle_of_a_message, 3, deadline=20.0)
    assert outcomes[0].exit_code == -9
    for outcome in outcomes[1:]:
        seconds, failed = outcome.value
        assert failed == 0
        assert seconds < 10


def small_sockets() -> None:
    """Let connections of this process take little at once, so that messages cross in pieces."""
    for name in os.listdir("/proc/self/fd"):
        try:
            sock = socket.socket(fileno=os.dup(int(name)))
        except OSError:  # no socket, or closed meanwhile
            continue
        with sock:
            if sock.family in (socket.AF_INET, socket.AF_INET6):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)


def killed_within_a_small_message(numel: int, count: int) -> tuple[float, object]:
    """Rank 1 is stopped while rank 0 sends more than the sockets hold and dies; rank 2 lets it go on, in the middle of one."""
    transport = C10dTransport(placement=Placement.loop(3, 3))
    rank, store = transport.rank, dist.group.WORLD.get_group_store()
    ops = [Op(OpKind.SEND_F, Edge(0, 1), 0, number) for number in range(count)]
    if rank == 0:
        small_sockets()
        receiver = int(store.get("receiver"))
        os.kill(receiver, signal.SIGSTOP)
        for op in ops:
            transport.post([Send(op, torch.zeros(numel, dtype=torch.uint8))])
        time.sleep(0.5)
        store.set("sent", "")
        die_now()
    if rank == 2:
        store.wait(["sent"])
        time.sleep(0.5)
        os.kill(int(store.get("receiver")), signal.SIGCONT)
        return 0.0, None
    meta = TensorMeta((numel,), (1,), torch.uint8)
    handle = transport.post([Recv(op.mirror, meta) for op in ops])
    store.set("receiver", str(os.getpid()))
    start = time.monotonic()
    with pytest.raises(PeerFailure) as caught:
        handle.wait()
    seconds = time.monotonic() - start
    transport.close()
    return seconds, caught.value.rank


@pytest.mark.skipif(sys.platform != "linux", reason="finds sockets through /proc")
@pytest.mark.parametrize("numel", [10_000, 1 << 16, 1 << 18])
def test_a_rank_that_is_killed_within_a_message_of_any_size_is_missed(workers: WorkerPool, numel: int) -> None:
    """A receive of at most 64 KiB that gloo had begun to read slept until its timeout: nothing that Python has could wake it, and
    only larger ones were waited for in a thread of their own."""
    outcomes = workers.outcomes(killed_within_a_small_message, 3, numel, (1 << 24) // numel, deadline=25.0)
    assert outcomes[0].exit_code == -9
    seconds, failed = outcomes[1].value
    assert failed == 0
    assert seconds < 10


class CountingStore(dist.HashStore):
    """Says how often it was asked."""

    asked = 0

    def get(self, key: str) -> bytes:
        self.asked += 1
        return bytes(super().get(key))


class ManyWaits:
    """A rank with a thousand receives under way, all from rank 1."""

    def notes(self, older_than: float) -> list[Note]:
        return [Note((1, 0, True, 0, number, 0, 0), "a receive", 1, "float32", 2.0, False) for number in range(1000)]

    def probe(self) -> None:
        return None

    def wake(self, failure: Failure) -> None:
        raise AssertionError(failure)


def test_what_a_rank_asks_the_store_does_not_grow_with_what_is_under_way() -> None:
    """Every message that took more than a second asked the store for its peer's notes, five times a second."""
    store, watched = CountingStore(), ManyWaits()
    theirs = FailureBoard(store, 1, 2, watched, stall_after=60)
    theirs.publish()
    theirs.close()
    store.asked = 0
    board = FailureBoard(store, 0, 2, watched, stall_after=60)
    time.sleep(1.0)
    board.close()
    assert 1 <= store.asked <= 10
