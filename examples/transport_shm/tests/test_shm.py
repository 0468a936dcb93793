"""The shared-memory transport keeps every promise of stepwell_p2p.Transport."""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from stepwell_transport_shm import SharedMemoryTransport

from stepwell_meta import TensorMeta
from stepwell_meta.testing import WorkerPool
from stepwell_p2p import Edge, Op, OpKind, Recv, Send
from stepwell_p2p.exceptions import TransportError
from stepwell_p2p.testing import TRANSPORT_CHECKS, Check, PoolFabric, check_transport


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


@pytest.mark.parametrize("check", TRANSPORT_CHECKS, ids=lambda check: check.name)
def test_it_keeps_every_promise(workers: WorkerPool, check: Check) -> None:
    check_transport(lambda size: PoolFabric(workers, size, connect), checks=[check])


def use_and_count() -> list[tuple[int, int]]:
    """Descriptors and threads before and after each of some runs."""
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
        counts.append((len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))))
    return counts


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts through /proc")
def test_nothing_is_left_open(workers: WorkerPool) -> None:
    for counts in workers.run(use_and_count, 2):
        assert all(after <= before for before, after in zip(counts[0], counts[-1], strict=True)), counts


def test_an_absent_rank_is_named(tmp_path: object) -> None:
    with pytest.raises(TransportError, match=r"rank 0 waited 0\.2 s for rank 1, 2"):
        SharedMemoryTransport(0, 3, f"{tmp_path}", timeout=0.2)
