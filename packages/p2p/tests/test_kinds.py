"""What is no batch of messages is refused in a sentence by every transport, before anything is under way."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from stepwell_meta import TensorMeta
from stepwell_meta.testing import WorkerPool
from stepwell_p2p import C10dTransport, Edge, LoopbackFabric, Op, OpKind, Recv, Rules, Send, Transport
from stepwell_p2p.exceptions import P2PUsageError
from stepwell_p2p.testing import RecordingTransport

META = TensorMeta((4,), (1,), torch.float32)


def wrong_batches(rank: int, peer: int) -> Iterator[tuple[object, str]]:
    """Each beside a good message, which must not be sent; and a part of what is said."""
    there, here = Op(OpKind.SEND_F, Edge(rank, peer), 0, 0), Op(OpKind.RECV_F, Edge(peer, rank), 0, 0)
    good = Send(there, torch.ones(4))
    yield [good, 3], "item 1 of a batch must be a Send or a Recv, got int"
    yield [good, None], "item 1 of a batch must be a Send or a Recv, got None"
    yield [good, torch.ones(4)], "got Tensor"
    yield good, r"post takes a list of Send and Recv, got Send: write post\(\[…\]\)"
    yield (one for one in [good]), "post takes a list of Send and Recv, got generator"  # has no second reading
    yield 7, "post takes a list of Send and Recv, got int"
    yield [good, Send(None, torch.ones(4))], "the Send that is item 1 of a batch needs an Op .*, got None"  # type: ignore[arg-type]
    yield [good, Recv("F0", META)], "the Recv that is item 1 of a batch needs an Op .*, got str"  # type: ignore[arg-type]
    yield [good, Recv([], META)], "needs an Op .*, got list"  # type: ignore[arg-type]  # no key of a dict either
    yield [good, Recv(here, None)], r"\(RECV_F of stage 0.*\) needs a TensorMeta, got None: both ends agree"  # type: ignore[arg-type]
    yield [good, Recv(here, torch.ones(4))], r"needs a TensorMeta, got Tensor: pass TensorMeta.from_tensor"  # type: ignore[arg-type]
    yield [good, Recv(here, META.shape)], "needs a TensorMeta, got tuple"  # type: ignore[arg-type]
    yield [good, Recv(here, None, torch.ones(4))], "needs a TensorMeta, got None"  # type: ignore[arg-type]
    yield [good, Recv(here, META, [0.0] * 4)], "needs a tensor or None as buffer, got list"  # type: ignore[arg-type]
    yield [good, Send(there, None)], "only tensors can be sent, got NoneType"  # type: ignore[arg-type]
    yield [good, Send(there, [1.0])], "only tensors can be sent, got list"  # type: ignore[arg-type]
    yield [good, Send(there, META)], "only tensors can be sent, got TensorMeta"  # type: ignore[arg-type]


def refuses(transport: Transport, peer: int) -> None:
    """Every wrong batch, also where the ops were posted before; afterwards a right one works, which finds no other message."""
    rank = transport.rank
    batch = [
        Send(Op(OpKind.SEND_F, Edge(rank, peer), 0, 0), torch.full((4,), float(rank))),
        Recv(Op(OpKind.RECV_F, Edge(peer, rank), 0, 0), META),
    ]
    for _ in range(2):
        for wrong, words in wrong_batches(rank, peer):
            with pytest.raises(P2PUsageError, match=words):
                transport.post(wrong)  # type: ignore[arg-type]
        (got,) = transport.post(batch).wait()
        assert torch.equal(got, torch.full((4,), float(peer)))


@pytest.mark.parametrize("tagged", [True, False])
def test_loopback_refuses_what_is_no_message(*, tagged: bool) -> None:
    """An AttributeError, in the middle of a batch; a Recv without a meta was found by its sender, whose post failed.

    A generator was a batch here, and where batches go by channel, as over NCCL, and none over gloo.
    """
    fabric = LoopbackFabric(1, rules=Rules(tagged=tagged, rendezvous=False))
    refuses(fabric.transport(0), 0)


def test_what_is_no_message_is_not_recorded() -> None:
    recorder = RecordingTransport(LoopbackFabric(1).transport(0))
    refuses(recorder, 0)
    assert len(recorder.steps) == 2 * 2  # a post and a wait for each right batch


def refuses_over_gloo(*, tagged: bool) -> None:
    transport = C10dTransport(timeout=20)
    if not tagged:
        transport._link.gloo = False  # type: ignore[union-attr]  # batches by channel, as over NCCL
    refuses(transport, 1 - transport.rank)
    refuses(transport, transport.rank)
    if tagged:
        for wrong, words in wrong_batches(transport.rank, 1 - transport.rank):
            with pytest.raises(P2PUsageError, match=words):
                transport.as_p2p_ops(wrong)  # type: ignore[arg-type]
        with pytest.raises(P2PUsageError, match="must be a process group that this rank is in, got"):
            C10dTransport(dist.GroupMember.NON_GROUP_MEMBER)  # type: ignore[arg-type]
    transport.close()


@pytest.mark.parametrize("tagged", [True, False])
def test_c10d_refuses_what_is_no_message(workers: WorkerPool, *, tagged: bool) -> None:
    workers.run(refuses_over_gloo, 2, tagged=tagged)


@pytest.mark.parametrize("group", [3, "pp", (0, 1)])
def test_a_group_that_is_none_is_refused(group: object) -> None:
    """An AttributeError: what new_group gives to a rank outside the new group is a number to Python."""
    with pytest.raises(P2PUsageError, match="group must be a process group that this rank is in, got"):
        C10dTransport(group)  # type: ignore[arg-type]
