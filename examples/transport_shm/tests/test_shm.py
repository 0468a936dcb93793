"""The shared-memory transport keeps every promise of stepwell_p2p.Transport."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from stepwell_transport_shm import SharedMemoryTransport

from stepwell_meta import TensorMeta
from stepwell_meta.testing import WorkerPool
from stepwell_p2p import Edge, Op, OpKind, Recv, Send
from stepwell_p2p.exceptions import P2PUsageError, PeerFailure, TransportError
from stepwell_p2p.testing import TRANSPORT_CHECKS, Check, PoolFabric, check_transport, die

MIB = 1 << 18  # elements of float32


@pytest.fixture(scope="module")
def workers() -> Iterator[WorkerPool]:
    with WorkerPool() as pool:
        yield pool


def connect(size: int) -> SharedMemoryTransport:
    """torch.distributed is there in every worker; only its store is used, for a folder's name."""
    store = dist.group.WORLD.get_group_store()
    if dist.get_rank() == 0:
        store.set("folder", tempfile.mkdtemp(prefix="shm-test-"))
    return SharedMemoryTransport(dist.get_rank(), size, store.get("folder").decode(), timeout=20)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[SharedMemoryTransport, SharedMemoryTransport]]:
    """Two ranks in this process."""
    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(
            lambda rank: SharedMemoryTransport(rank, 2, tmp_path / "meet", timeout=20), range(2)
        )
    yield first, second
    first.close()
    second.close()


def send_to(rank: int, tensor: torch.Tensor, *, source: int = 0, microbatch: int = 0) -> Send:
    return Send(Op(OpKind.SEND_F, Edge(source, rank), 0, microbatch), tensor)


def recv_from(rank: int, numel: int, *, at: int = 1, microbatch: int = 0) -> Recv:
    return Recv(Op(OpKind.RECV_F, Edge(rank, at), 0, microbatch), TensorMeta((numel,), (1,), torch.float32))


def in_time(action: Callable[[], object]) -> Exception:
    """What an action raises, within seconds."""
    start = time.monotonic()
    with pytest.raises(TransportError) as caught:
        action()
    assert time.monotonic() - start < 5
    return caught.value


@pytest.mark.parametrize("check", TRANSPORT_CHECKS, ids=lambda check: check.name)
def test_it_keeps_every_promise(workers: WorkerPool, check: Check) -> None:
    check_transport(lambda size: PoolFabric(workers, size, connect), checks=[check])


def use_and_count() -> list[tuple[int, int, int]]:
    """Descriptors, threads and shared mappings after each of some runs."""
    meta = TensorMeta((1 << 20,), (1,), torch.float32)
    rank, counts = dist.get_rank(), []
    for run in range(4):
        folder = dist.PrefixStore(f"run{run}", dist.group.WORLD.get_group_store())
        if rank == 0:
            folder.set("folder", tempfile.mkdtemp(prefix="shm-test-"))
        transport = SharedMemoryTransport(rank, 2, folder.get("folder").decode(), timeout=20)
        for microbatch in range(5):
            send = Send(Op(OpKind.SEND_F, Edge(rank, 1 - rank), 0, microbatch), torch.ones(1 << 20))
            recv = Recv(Op(OpKind.RECV_F, Edge(1 - rank, rank), 0, microbatch), meta)
            transport.post([send, recv]).wait()
        transport.close()
        del transport, send, recv
        gc.collect()
        counts.append((len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), shared_bytes()))
    return counts


def shared_bytes() -> int:
    """How much shared memory this process maps."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    ends = [line.split()[0].split("-") for line in lines if "stepwell-transport-shm" in line]
    return sum(int(end, 16) - int(start, 16) for start, end in ends)


def test_nothing_is_left_open(workers: WorkerPool) -> None:
    for counts in workers.run(use_and_count, 2):
        assert all(after <= before for before, after in zip(counts[0], counts[-1], strict=True)), counts


def test_an_absent_rank_is_named(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(TransportError, match=r"in 0\.2 s: rank 1, 2 did not come"):
        SharedMemoryTransport(0, 3, tmp_path, timeout=0.2)
    assert len(os.listdir("/proc/self/fd")) <= before


def test_a_rank_that_waits_for_an_absent_one_is_not_called_absent(tmp_path: Path) -> None:
    """Rank 2 calls rank 0 first, which never comes. Its error named rank 1 too, which was there and waited as well."""

    def waits_longer() -> None:
        with contextlib.suppress(TransportError):
            SharedMemoryTransport(1, 3, tmp_path, timeout=1.5)

    with ThreadPoolExecutor(1) as threads:
        threads.submit(waits_longer)
        with pytest.raises(TransportError, match="rank 0 did not come"):
            SharedMemoryTransport(2, 3, tmp_path, timeout=0.7)


def test_a_folder_whose_name_is_too_long_is_a_transport_error(tmp_path: Path) -> None:
    with pytest.raises(TransportError, match="too long"):
        SharedMemoryTransport(0, 2, tmp_path / ("x" * 120), timeout=0.2)


def test_a_rank_alone_sends_to_itself(tmp_path: Path) -> None:
    transport = SharedMemoryTransport(0, 1, tmp_path)
    for numel in (0, 3, MIB):
        value = torch.rand(numel)
        (got,) = transport.post([send_to(0, value), recv_from(0, numel, at=0)]).wait()
        assert torch.equal(got, value)
    with pytest.raises(TransportError, match="this rank has not sent it"):
        transport.post([recv_from(0, 3, at=0)]).wait()
    transport.close()


def test_nobody_waits_for_room(pair: tuple[SharedMemoryTransport, SharedMemoryTransport]) -> None:
    """A send is done when it is posted, however much lies unread: 80 MiB here, before the receiver does anything."""
    first, second = pair
    sizes = [2000] * 5000 + [MIB] * 40
    for microbatch, numel in enumerate(sizes):
        first.post([send_to(1, torch.full((numel,), float(microbatch)), microbatch=microbatch)]).wait()
    for microbatch in reversed(range(len(sizes))):
        (got,) = second.post([recv_from(0, sizes[microbatch], microbatch=microbatch)]).wait()
        assert torch.equal(got, torch.full((sizes[microbatch],), float(microbatch)))


def test_a_large_value_lies_in_memory_that_is_used_again_when_nobody_uses_it(
    pair: tuple[SharedMemoryTransport, SharedMemoryTransport],
) -> None:
    first, second = pair
    kept: dict[int, torch.Tensor] = {}
    sizes = []
    for step in range(60):
        first.post([send_to(1, torch.full((MIB,), float(step)))]).wait()
        (got,) = second.post([recv_from(0, MIB)]).wait()
        got += 1  # the receiver's own
        kept[step] = got[1:].view(-1)  # a view of it is a user too
        kept.pop(step - 8, None)
        sizes.append(shared_bytes())
        for older, value in kept.items():
            assert bool((value == older + 1).all())
    assert sizes[-1] == sizes[12]


def test_a_value_outlives_its_transport(pair: tuple[SharedMemoryTransport, SharedMemoryTransport]) -> None:
    first, second = pair
    for numel in (5, MIB):
        first.post([send_to(1, torch.arange(float(numel)))])
    first.close()
    (small,) = second.post([recv_from(0, 5)]).wait()
    (large,) = second.post([recv_from(0, MIB)]).wait()
    assert "its sender has closed" in str(in_time(lambda: second.post([recv_from(0, 5)]).wait()))
    second.close()
    assert torch.equal(small, torch.arange(5.0))
    assert torch.equal(large, torch.arange(float(MIB)))


def test_every_dtype_and_layout_where_it_lies(pair: tuple[SharedMemoryTransport, SharedMemoryTransport]) -> None:
    """The battery tries small values, which take another way."""
    first, second = pair
    dtypes = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    dtypes -= {dtype for dtype in dtypes if re.search("qu?int|bits|torch.u?int[1-7]$|complex32|float4", str(dtype))}
    assert {torch.float8_e5m2, torch.complex64, torch.uint64, torch.float8_e8m0fnu} <= dtypes
    for dtype in dtypes:
        raw = torch.arange(1 << 16).fmod(2).to(torch.uint8)
        value = raw.view(dtype).view(4, -1)
        for given in (value, value.t(), value[:, ::2], value[:, :0], value[0, 0]):
            look = TensorMeta.from_tensor(given).as_dense()
            for meta in (look, TensorMeta.from_tensor(torch.empty(given.shape, dtype=dtype, device="meta"))):
                op = Op(OpKind.SEND_B, Edge(0, 1), 200, 1 << 40, 1 << 40)
                first.post([Send(op, given)])
                (got,) = second.post([Recv(op.mirror, meta)]).wait()
                assert got.stride() == meta.stride
                as_bytes = [one.contiguous().view(-1).view(torch.uint8) for one in (got, given)]
                assert torch.equal(*as_bytes), (dtype, given.shape)


def test_what_is_no_plain_memory_is_refused_and_nothing_of_its_batch_leaves(
    pair: tuple[SharedMemoryTransport, SharedMemoryTransport],
) -> None:
    first, second = pair
    for tensor in (torch.eye(3).to_sparse(), torch.empty(3, device="meta")):
        with pytest.raises(P2PUsageError, match="only plain tensors"):
            first.post([send_to(1, torch.ones(3)), send_to(1, tensor)])
    first.post([send_to(1, torch.nn.Parameter(torch.zeros(3)))])
    (got,) = second.post([recv_from(0, 3)]).wait()
    assert torch.equal(got, torch.zeros(3))
    assert not got.requires_grad


def dies_at(point: str) -> str:
    """Rank 1 of three ends at some point; what the others raise."""
    transport = connect(3)
    rank = transport.rank
    neighbours = [other for other in range(3) if other != rank]
    sends = [send_to(other, torch.ones(MIB), source=rank) for other in neighbours]
    recvs = [recv_from(other, MIB, at=rank) for other in neighbours]
    if rank == 1 and point not in ("connected", "forked"):
        handle = transport.post(sends if point == "sent" else recvs)
        if point == "waiting":
            threading.Timer(0.3, lambda: os.kill(os.getpid(), 9)).start()
            handle.wait()
    if rank == 1 and point == "forked":
        with warnings.catch_warnings(
            action="ignore", category=DeprecationWarning
        ):  # of threads, which the child has not
            if os.fork() == 0:  # a process that outlives its rank, as loaders of data do
                time.sleep(8)
                os._exit(0)
    if rank == 1:
        die()
    error = in_time(lambda: [transport.post([*sends, *recvs]).wait() for _ in range(2)])
    transport.close()
    assert isinstance(error, PeerFailure), error
    assert error.rank == 1
    return error.reason


@pytest.mark.parametrize("point", ["connected", "sent", "posted", "waiting", "forked"])
def test_a_rank_that_dies_is_named(workers: WorkerPool, point: str) -> None:
    outcomes = workers.outcomes(dies_at, 3, point, deadline=20.0)
    assert outcomes[1].exit_code == -9
    assert [outcomes[rank].value for rank in (0, 2)] == ["its process ended"] * 2, outcomes


def test_an_abort_ends_a_wait(pair: tuple[SharedMemoryTransport, SharedMemoryTransport]) -> None:
    """By abort, which the other rank hears too; a second one changes nothing."""
    first, second = pair
    threading.Timer(0.3, lambda: [second.abort("first reason"), second.abort("second reason")]).start()
    for wait in (lambda: second.post([recv_from(0, 3)]).wait(), lambda: first.post([recv_from(1, 3, at=0)]).wait()):
        error = in_time(wait)
        assert isinstance(error, PeerFailure), error
        assert (error.rank, error.reason) == (1, "first reason")


def test_a_close_ends_a_wait(pair: tuple[SharedMemoryTransport, SharedMemoryTransport]) -> None:
    first, second = pair
    threading.Timer(0.3, lambda: [second.close(), second.close()]).start()
    with pytest.raises(P2PUsageError, match="closed"):
        second.post([recv_from(0, 3)]).wait()
    assert "its sender has closed" in str(in_time(first.post([recv_from(1, 3, at=0)]).wait))
    first.post([send_to(1, torch.ones(3))]).wait()  # nobody reads it, and that is no fault of this rank
    second.abort("too late")
    first.post([send_to(1, torch.ones(3))]).wait()
