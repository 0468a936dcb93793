"""What the loopback transport does beyond the battery: hand-over, imitated rules, saying at once that nothing moves."""

from __future__ import annotations

import logging
import pickle
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from stepwell_meta import TensorMeta
from stepwell_p2p import Edge, LoopbackFabric, Op, OpKind, Recv, Rules, Send
from stepwell_p2p.exceptions import P2PUsageError, PeerFailure, TransportError

META = TensorMeta((4,), (1,), torch.float32)
THERE = Op(OpKind.SEND_F, Edge(0, 1), 0, 0)


def hand_over(tensor: torch.Tensor, *, owned: bool) -> torch.Tensor:
    fabric = LoopbackFabric(2)
    first, second = fabric.transport(0), fabric.transport(1)
    first.post([Send(THERE, tensor, owned)])
    (got,) = second.post([Recv(THERE.mirror, TensorMeta.from_tensor(tensor))]).wait()
    return got


def test_a_tensor_given_away_is_handed_over_itself() -> None:
    given = torch.ones(4)
    assert hand_over(given, owned=True).data_ptr() == given.data_ptr()
    assert hand_over(given, owned=False).data_ptr() != given.data_ptr()


def test_a_part_of_a_larger_memory_is_copied_even_if_given_away() -> None:
    """The receiver may write to all of what it gets, and others still read the rest of that memory."""
    whole = torch.zeros(2, 4)
    assert hand_over(whole[0], owned=True).data_ptr() != whole.data_ptr()


def test_a_stage_that_works_in_place_does_not_spoil_the_senders_backward() -> None:
    """tanh keeps its output for its backward; the next stage writes to what it received."""
    fabric = LoopbackFabric(2)
    first, second = fabric.transport(0), fabric.transport(1)
    weight = torch.ones(4, requires_grad=True)
    out = torch.tanh(weight)
    first.post([Send(THERE, out.detach())])
    (got,) = second.post([Recv(THERE.mirror, META)]).wait()
    got.mul_(100)
    out.sum().backward()
    torch.testing.assert_close(weight.grad, 1 - torch.tanh(torch.ones(4)) ** 2)


def test_rendezvous_sends_wait_for_their_receive() -> None:
    fabric = LoopbackFabric(2, rules=Rules(tagged=True, rendezvous=True))
    first, second = fabric.transport(0), fabric.transport(1)
    done = threading.Event()

    def send() -> None:
        first.post([Send(THERE, torch.ones(4))]).wait()
        done.set()

    thread = threading.Thread(target=send)
    thread.start()
    assert not done.wait(0.1)
    second.post([Recv(THERE.mirror, META)]).wait()
    assert done.wait(5)
    thread.join()


def test_p025_nothing_moves_and_every_rank_says_so_at_once() -> None:
    fabric = LoopbackFabric(2, timeout=60)
    ends = [fabric.transport(rank) for rank in range(2)]
    errors: list[str] = []

    def wait(rank: int) -> None:
        try:
            ends[rank].post([Recv(Op(OpKind.RECV_F, Edge(1 - rank, rank), 0, 7), META)]).wait()
        except TransportError as error:
            errors.append(str(error))

    start = time.monotonic()
    threads = [threading.Thread(target=wait, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert time.monotonic() - start < 5
    assert len(errors) == 2
    assert "rank 0 waits for RECV_F of stage 0, microbatch 7" in errors[0]
    assert "rank 1 waits for RECV_F" in errors[0]


def test_a_peer_that_has_closed_is_named() -> None:
    fabric = LoopbackFabric(2)
    fabric.transport(1).close()
    with pytest.raises(TransportError, match="Closed already: rank 1"):
        fabric.transport(0).post([Recv(Op(OpKind.RECV_F, Edge(1, 0), 0, 0), META)]).wait()


def test_a_wait_ends_at_the_timeout_and_says_before_what_it_waits_for(caplog: pytest.LogCaptureFixture) -> None:
    fabric = LoopbackFabric(2, timeout=0.4, stall_after=0.1)
    first = fabric.transport(0)
    fabric.transport(1)  # is alive, and never sends
    handle = first.post([Recv(Op(OpKind.RECV_F, Edge(1, 0), 3, 5), META)])
    (pending,) = first.pending()
    assert (pending.op.stage, pending.waiting) == (3, False)
    with (
        caplog.at_level(logging.WARNING),
        pytest.raises(TransportError, match=r"rank 0 waited 0\.4 s for RECV_F of stage 3"),
    ):
        handle.wait()
    assert "rank 0 has waited 0 s for RECV_F of stage 3, microbatch 5" in caplog.text


def test_the_first_reason_wins_and_reaches_waits_already_done() -> None:
    fabric = LoopbackFabric(2)
    first, second = fabric.transport(0), fabric.transport(1)
    done = second.post([Send(Op(OpKind.SEND_F, Edge(1, 0), 0, 0), torch.ones(4))])
    first.abort("out of memory", stage=4, microbatch=2, action="B")
    second.abort("some other error")
    with pytest.raises(PeerFailure, match="rank 0, stage 4, microbatch 2, action B failed: out of memory") as caught:
        done.wait()
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.rank, again.stage, again.action) == (str(caught.value), 0, 4, "B")


def test_ranks_are_taken_once() -> None:
    fabric = LoopbackFabric(2)
    fabric.transport(0)
    with pytest.raises(P2PUsageError, match="is taken"):
        fabric.transport(0)
    with pytest.raises(P2PUsageError, match="ranks 0 to 1"):
        fabric.transport(2)
    with pytest.raises(P2PUsageError, match="at least 1 rank"):
        LoopbackFabric(0)


def test_closing_while_waiting_ends_that_wait_and_no_other() -> None:
    """A wait of a closed rank slept on, and that rank was counted twice among those that cannot post any more: as a waiting
    one and as a closed one. So the others were told that nothing moves while one of them was computing.
    """
    fabric = LoopbackFabric(3, timeout=30)
    first, second, third = (fabric.transport(rank) for rank in range(3))
    handles = [end.post([Recv(Op(OpKind.RECV_F, Edge(2, end.rank), 0, 0), META)]) for end in (first, second)]
    with ThreadPoolExecutor(2) as threads:
        ended, served = (threads.submit(handle.wait) for handle in handles)
        time.sleep(0.2)
        first.close()
        with pytest.raises(P2PUsageError, match="rank 0 closed its transport while it waited"):
            ended.result(timeout=5)
        time.sleep(0.2)
        third.post([Send(Op(OpKind.SEND_F, Edge(2, 1), 0, 0), torch.ones(4))])
        assert torch.equal(served.result(timeout=5)[0], torch.ones(4))


def test_an_op_is_refused_at_the_wrong_end_also_when_it_was_posted_before() -> None:
    """What had been posted once was not looked at again, so a Send with a receive's op was taken for a message of its own."""
    fabric = LoopbackFabric(2)
    first, second = fabric.transport(0), fabric.transport(1)
    first.post([Send(THERE, torch.ones(4))])
    second.post([Recv(THERE.mirror, META)]).wait()
    with pytest.raises(P2PUsageError, match="a Send needs an op of that kind"):
        second.post([Send(THERE.mirror, torch.ones(4))])
    with pytest.raises(P2PUsageError, match="a Recv needs an op of that kind"):
        first.post([Recv(THERE, META)])


def test_nothing_is_kept_after_everybody_closed() -> None:
    fabric = LoopbackFabric(2)
    ends = [fabric.transport(rank) for rank in range(2)]
    ends[0].post([Send(THERE, torch.ones(4))])
    for end in ends:
        end.close()
    assert not fabric._sends
    assert ends[0].pending() == ()
