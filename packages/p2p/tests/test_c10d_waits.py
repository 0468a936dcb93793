"""What a wait over gloo does once its messages are there: whose memory it keeps, when it naps, and for how many threads."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

import stepwell_p2p.transports._c10d as c10d_module
from stepwell_meta import TensorMeta
from stepwell_meta.testing import WorkerPool
from stepwell_p2p import C10dTransport, Edge, Op, OpKind, Recv, Send
from stepwell_p2p._pack import SMALL

LARGE = SMALL + 1


def exchange(
    transport: C10dTransport, sizes: list[int], *, clock: Callable[[], float]
) -> tuple[list[float], list[int]]:
    """Values of so many bytes both ways, under another clock: the naps of the receive, and the sizes of what it keeps."""
    rank, peer = transport.rank, 1 - transport.rank
    naps: list[float] = []
    metas = [TensorMeta((size,), (1,), torch.uint8) for size in sizes]
    sends = transport.post(
        [Send(Op(OpKind.SEND_F, Edge(rank, peer), 0, 0, index), torch.ones(size, dtype=torch.uint8))
         for index, size in enumerate(sizes)]
    )  # fmt: skip
    receives = transport.post(
        [Recv(Op(OpKind.RECV_F, Edge(peer, rank), 0, 0, index), meta) for index, meta in enumerate(metas)]
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(c10d_module, "time", SimpleNamespace(monotonic=clock, sleep=naps.append))
        receives.wait()
        patch.setattr(c10d_module, "time", SimpleNamespace(monotonic=itertools.count().__next__, sleep=never))
        sends.wait()
    return naps, [flight.tensor.nbytes for flight in transport._link.received]  # type: ignore[union-attr]


def never(seconds: float) -> None:
    raise AssertionError("who waits for sends does not nap")


def naps_of_receives() -> list[tuple[list[float], list[int]]]:
    transport = C10dTransport(timeout=20)

    def at_once() -> float:
        return 7.0

    def slowly() -> Callable[[], float]:
        return itertools.count(0.0, 0.001).__next__

    found = [
        exchange(transport, [LARGE], clock=slowly()),
        exchange(transport, [LARGE], clock=at_once),
        exchange(transport, [SMALL], clock=slowly()),
        exchange(transport, [LARGE, SMALL, LARGE], clock=slowly()),
    ]
    transport.close()
    return found


def test_who_waited_long_for_a_large_value_naps_before_it_lets_go_of_the_receive(workers: WorkerPool) -> None:
    """gloo's thread still uses a receive when it wakes who waits for it, and letting go then takes longer than the message. A
    small one is kept until the next wait. Of a large one nothing may be kept, not even for that long: its memory counts. So the
    waiting thread naps once, and only where it slept before, for what had come already gloo's thread is done with.
    """
    nap = [c10d_module._NAP]
    for large, ready, small, several in workers.run(naps_of_receives, 2):
        assert large == (nap, [])
        assert ready == ([], [])
        assert small == ([], [SMALL])
        assert several == (nap, [SMALL])


def two_wait_for_one() -> list[bool]:
    transport, found = C10dTransport(timeout=20), []
    rank, peer = transport.rank, 1 - transport.rank
    meta = TensorMeta((4,), (1,), torch.float32)
    with ThreadPoolExecutor(3) as threads:
        for number in range(50):
            handle = transport.post([Recv(Op(OpKind.RECV_F, Edge(peer, rank), 0, number), meta)])
            waits = [threads.submit(handle.wait) for _ in range(3)]
            transport.post([Send(Op(OpKind.SEND_F, Edge(rank, peer), 0, number), torch.ones(4))]).wait()
            results = [wait.result(timeout=25) for wait in waits]
            found.append(all(result is results[0] for result in results))
    transport.close()
    return found


def test_threads_that_wait_for_one_handle_get_the_same(workers: WorkerPool) -> None:
    """gloo woke one of them; the others waited for the timeout, or were told that the transport had been closed."""
    for found in workers.run(two_wait_for_one, 2):
        assert found == [True] * 50
