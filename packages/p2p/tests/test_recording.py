"""Recording what is posted, and spoiling it."""

from __future__ import annotations

import time

import pytest
import torch

from stepwell_meta import TensorMeta
from stepwell_p2p import Edge, LoopbackFabric, Op, OpKind, Recv, Rules, Send, Transport, prove_order
from stepwell_p2p.exceptions import DeadlockError, P2PUsageError, TransportError
from stepwell_p2p.testing import Fault, FaultyTransport, RecordingTransport, ThreadFabric

META = TensorMeta((2,), (1,), torch.float32)


def op(microbatch: int) -> Op:
    return Op(OpKind.SEND_F, Edge(0, 1), 0, microbatch)


def test_a_recorded_run_can_be_proved_under_other_rules() -> None:
    """Both ranks sent first, which buffering let pass."""
    recorders: dict[int, RecordingTransport] = {}
    fabric = LoopbackFabric(2)

    def connect() -> object:
        return lambda rank: recorders.setdefault(rank, RecordingTransport(fabric.transport(rank)))

    def program(transport: Transport) -> None:
        rank = transport.rank
        send, recv = Op(OpKind.SEND_F, Edge(rank, 1 - rank), 0, 0), Op(OpKind.RECV_F, Edge(1 - rank, rank), 0, 0)
        transport.post([Send(send, torch.ones(2))]).wait()
        transport.post([Recv(recv, META)]).wait()

    outcomes = ThreadFabric(2, connect).run(program, deadline=10)  # type: ignore[arg-type]
    assert all(outcome.ok for outcome in outcomes)
    steps = [recorders[rank].steps for rank in range(2)]
    assert recorders[0].sizes == [8]
    prove_order(steps, "shared", Rules(tagged=False, rendezvous=False))
    with pytest.raises(DeadlockError):
        prove_order(steps, "shared", Rules(tagged=False, rendezvous=True))


def run(*faults: Fault, tagged: bool = True) -> tuple[list[float], str]:
    """Five values from rank 0 to rank 1 over a spoiled transport: what came, and the error that ended it."""
    rules = Rules(tagged=tagged, rendezvous=False)
    fabric = LoopbackFabric(2, rules=rules, timeout=5)
    sender, receiver = FaultyTransport(fabric.transport(0), faults), fabric.transport(1)
    for microbatch in range(5):
        sender.post([Send(op(microbatch), torch.full((2,), float(microbatch)))]).wait()
    sender.close()
    got: list[float] = []
    try:
        got.extend(receiver.post([Recv(op(microbatch).mirror, META)]).wait()[0][0].item() for microbatch in range(5))
    except TransportError as error:
        return got, str(error)
    return got, ""


def test_each_fault_does_what_it_says() -> None:
    assert run() == ([0, 1, 2, 3, 4], "")
    assert "no message is on its way" in run(Fault("drop", 2))[1]
    assert "sent torch.float32 of shape (1,)" in run(Fault("truncate", 1))[1]
    assert run(Fault("reorder", 1)) == ([0, 1, 2, 3, 4], "")  # tags set it right
    assert "in another order than they were sent" in run(Fault("reorder", 1), tagged=False)[1]
    assert "in another order than they were sent" in run(Fault("duplicate", 1), tagged=False)[1]
    start = time.monotonic()
    assert run(Fault("delay", 0, seconds=0.3)) == ([0, 1, 2, 3, 4], "")
    assert time.monotonic() - start >= 0.3


def test_a_rank_is_killed_at_the_nth_message() -> None:
    killed = []
    fabric = LoopbackFabric(2)
    transport = FaultyTransport(fabric.transport(1), [Fault("kill", 1)], kill=lambda: killed.append(True))
    for microbatch in range(3):
        transport.post([Recv(op(microbatch).mirror, META)])
        assert len(killed) == (microbatch >= 1)


def test_an_unknown_fault_is_refused() -> None:
    with pytest.raises(P2PUsageError, match="'drop', 'delay'"):
        Fault("explode", 0)
