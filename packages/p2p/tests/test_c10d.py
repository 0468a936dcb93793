"""The transport over torch.distributed, on gloo: channels, set-up, sub-axes, torch's own ops."""

from __future__ import annotations

import logging
import os
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import stepwell_p2p._link as link_module
import stepwell_p2p.transports._c10d as c10d_module
from stepwell_meta import TensorMeta
from stepwell_meta.testing import WorkerPool
from stepwell_p2p import (
    C10dTransport,
    ChannelPolicy,
    Edge,
    Op,
    OpKind,
    Placement,
    Recv,
    Send,
    Transport,
    chain_wires,
    channels_for,
    giving_way,
    receive_values,
    send_values,
)
from stepwell_p2p._compat import memory_users
from stepwell_p2p.exceptions import P2PUsageError, PeerFailure, TransportError
from stepwell_p2p.testing import TRANSPORT_CHECKS, Check, PoolFabric, check_transport

META = TensorMeta((4,), (1,), torch.float32)


def ring(transport: Transport, microbatch: int = 0) -> float:
    """Hand this rank's number on; returns the one that came."""
    rank, size = transport.rank, transport.size
    send = Op(OpKind.SEND_F, Edge(rank, (rank + 1) % size), 0, microbatch)
    recv = Op(OpKind.RECV_F, Edge((rank - 1) % size, rank), 0, microbatch)
    (got,) = transport.post([Recv(recv, META), Send(send, torch.full((4,), float(rank)))]).wait()
    return float(got[0].item())


def users_of_received(turns: int) -> list[tuple[int | None, ...]]:
    """Exchanges with the other rank; after each how many users, one of them this function, has what came in it and before it."""
    transport, found = C10dTransport(), []
    kept: list[torch.Tensor] = []  # other tensors over the memory of those that came
    peer = 1 - transport.rank
    for number in range(turns):
        recv = transport.post([Recv(Op(OpKind.RECV_F, Edge(peer, transport.rank), 0, number), META)])
        send = transport.post([Send(Op(OpKind.SEND_F, Edge(transport.rank, peer), 0, number), torch.ones(4))])
        kept.append(recv.wait()[0].detach())
        del recv
        send.wait()
        found.append(tuple(memory_users(tensor) for tensor in kept))
    transport.close()
    return [*found, tuple(memory_users(tensor) for tensor in kept)]


def test_a_finished_receive_is_let_go_of_when_the_next_is_waited_for(workers: WorkerPool) -> None:
    """It was let go of at once, while gloo's thread, which had just woken this one, still used it. This thread then gave way
    until that one was done, again and again: on a machine with more threads than cores a step of 1F1B took twice as long as by
    hand. Yet it is not kept for longer than that, since it holds the value's memory."""
    for found in workers.run(users_of_received, 2, 3):
        assert found == [(2,), (1, 2), (1, 1, 2), (1, 1, 1)]


def policies() -> tuple[int, list[int]]:
    """The scheduling policy of this thread, and of those that the opening of channels started."""
    before = set(os.listdir("/proc/self/task"))
    transport = C10dTransport(placement=Placement.loop(2, 2))
    ring(transport)
    begun = [int(thread) for thread in set(os.listdir("/proc/self/task")) - before]
    found = os.sched_getscheduler(0), [os.sched_getscheduler(thread) for thread in begun]
    transport.close()
    return found


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="only Linux has such a policy")
def test_channels_take_no_core_from_a_thread_that_sends(workers: WorkerPool) -> None:
    """gloo's loop, woken by a message, took the core of its sender, which holds its connection's lock: with more ranks than cores
    the sender's own loop turned on that lock for half of all time."""
    for own, begun in workers.run(policies, 2):
        assert own == os.SCHED_OTHER
        assert os.SCHED_BATCH in begun


def test_a_policy_that_the_user_chose_is_kept() -> None:
    if not hasattr(os, "SCHED_BATCH"):
        pytest.skip("only Linux has such a policy")
    found = []

    def look() -> None:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))  # of this thread
        with giving_way():
            found.append(os.sched_getscheduler(0))
        found.append(os.sched_getscheduler(0))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert found == [os.SCHED_IDLE] * 2


# ---- channels


def count_groups(policy: str) -> tuple[int, float, str]:
    transport = C10dTransport(channels=policy, placement=Placement.loop(8, 4))
    described = transport.describe()
    transport.open(Placement.loop(8, 4), chain_wires(8))  # once more: nothing happens
    assert transport.describe() == described
    result = len(described.groups), ring(transport), str(described)
    transport.close()
    assert transport.describe().groups == ()
    return result


@pytest.mark.parametrize("policy", [policy.value for policy in ChannelPolicy])
def test_p143_groups_are_those_that_channels_for_says(workers: WorkerPool, policy: str) -> None:
    channels = channels_for(Placement.loop(8, 4), chain_wires(8), policy)
    for rank, (groups, got, text) in enumerate(workers.run(count_groups, 4, policy)):
        assert groups == len(channels.of_rank(rank))
        assert got == (rank - 1) % 4
        assert f"{groups} groups" in text
        assert policy in text


def without_a_wire() -> tuple[float, bytes]:
    """Set-up and gathering talk between ranks that no wire joins."""
    transport = C10dTransport(placement=Placement.loop(4, 4))
    rank = transport.rank
    got = b""
    if rank == 3:
        send_values(transport, Op(OpKind.SEND_F, Edge(3, 0), 0, -1), b"loss").wait()
    if rank == 0:
        got, _ = receive_values(transport, Op(OpKind.RECV_F, Edge(3, 0), 0, -1))
    result = ring(transport), got
    transport.close()
    return result


def test_ranks_that_no_wire_joins_can_talk_too(workers: WorkerPool) -> None:
    assert workers.run(without_a_wire, 4)[0] == (3.0, b"loss")


def two_at_once() -> tuple[int, float, float]:
    first, second = C10dTransport(), C10dTransport(placement=Placement.loop(2, 2))
    assert len(first.describe().groups) == len(second.describe().groups) == 2
    other = C10dTransport(name="other")
    assert other.describe().groups == ()
    first.close()
    result = dist.get_rank(), ring(second), ring(other)
    second.close()
    other.close()
    again = C10dTransport()
    assert ring(again) == result[1]
    again.close()
    return result


def test_transports_of_one_group_share_channels_until_the_last_one_closes(workers: WorkerPool) -> None:
    """Looped schedules build a transport for each stage; a third builds none of the channels again."""
    assert workers.run(two_at_once, 2) == [(0, 1.0, 1.0), (1, 0.0, 0.0)]


def over_other_pairs(policy: str) -> tuple[list[str], list[float]]:
    """Neighbours first; then a pipeline in which ranks 0 and 2 follow each other, with the same transport and with another."""
    first = C10dTransport(placement=Placement.loop(3, 3), channels=policy)
    rank, others = first.rank, Placement.custom([1, 0, 2])
    early = Op(OpKind.SEND_F, Edge(0, 2), 7, 7)  # no wire joins these in the first pipeline
    if rank == 0:
        first.post([Send(early, torch.full((4,), 7.0))]).wait()
    got = [float(first.post([Recv(early.mirror, META)]).wait()[0][0])] if rank == 2 else [7.0]
    second = C10dTransport(placement=others, channels=policy)
    first.open(Placement.loop(3, 3), chain_wires(3))  # which is open
    got += [ring(first), ring(second), ring(first)]
    first.open(others, chain_wires(3))
    got += [ring(first), ring(second)]
    names = [name for name, _, _ in second.describe().groups]
    first.close()
    got.append(ring(second))
    second.close()
    return names, got


@pytest.mark.parametrize("policy", ["per-edge", "per-direction"])
def test_a_second_pipeline_may_join_other_ranks(workers: WorkerPool, policy: str) -> None:
    """It was refused while the first was open, since its channels were not those of the first."""
    found = workers.run(over_other_pairs, 3, policy)
    per_edge = [["0->1", "1->0", "0->2", "2->0"], ["0->1", "1->0", "1->2", "2->1"], ["1->2", "2->1", "0->2", "2->0"]]
    for rank, (names, got) in enumerate(found):
        assert sorted(names) == sorted(per_edge[rank] if policy == "per-edge" else ["downstream", "upstream"])
        assert got == [7.0, *[(rank - 1) % 3] * 6]


def with_another_set_of_ranks() -> str:
    transport = C10dTransport(placement=Placement.loop(3, 3), channels="shared")
    with pytest.raises(P2PUsageError) as caught:
        transport.open(Placement.loop(2, 2), chain_wires(2))
    transport.close()
    return str(caught.value)


def test_a_channel_keeps_its_ranks(workers: WorkerPool) -> None:
    for text in workers.run(with_another_set_of_ranks, 3):
        assert "shared of ranks (0, 1) is open already between ranks (0, 1, 2)" in text


# ---- set-up


def on_a_sub_axis() -> tuple[float, float, list[int]]:
    """pp=2 x dp=2 x tp=2, every pipeline made of ranks that are not neighbours; one pipeline comes late."""
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
    late = mesh.get_local_rank("dp") == mesh.get_local_rank("tp") == 1
    dist.barrier()
    if late:
        time.sleep(2.0)
    start = time.monotonic()
    group = mesh.get_group("pp")
    transport = C10dTransport(group, placement=Placement.loop(4, 2))
    seconds = time.monotonic() - start
    rank = transport.rank
    send = Op(OpKind.SEND_F, Edge(rank, 1 - rank), 0, 0)
    recv = Recv(Op(OpKind.RECV_F, Edge(1 - rank, rank), 0, 0), META)
    (got,) = transport.post([Send(send, torch.full((4,), float(dist.get_rank()))), recv]).wait()
    before = link_module._links.get(group)
    transport.close()
    assert before == {}
    # groups that torch makes afterwards still have one name on all ranks: ours are not in its registry
    dist.all_reduce(
        torch.ones(1), group=dist.new_group(dist.get_process_group_ranks(group), use_local_synchronization=True)
    )
    return got[0].item(), seconds, dist.get_process_group_ranks(group)


def test_p013_pipelines_that_are_one_axis_of_a_larger_mesh(workers: WorkerPool) -> None:
    """All set up at once, each in its own group; none waits for the one that is late."""
    for rank, (got, seconds, ranks) in enumerate(workers.run(on_a_sub_axis, 8, deadline=40.0)):
        assert ranks == [rank % 4, rank % 4 + 4]
        assert got == (rank + 4) % 8
        assert seconds < 1.8


def parent_timeout() -> float | None:
    group = dist.new_group([0, 1], timeout=timedelta(seconds=17))
    transport = C10dTransport(group, placement=Placement.loop(2, 2))
    timeout = transport.describe().timeout
    transport.close()
    return timeout


def test_the_groups_own_timeout_is_kept(workers: WorkerPool) -> None:
    assert workers.run(parent_timeout, 2) == [17.0, 17.0]


def stay_until_others_are_done(absent: int) -> None:
    """The absent rank lives, or its connections would break; the others say here that they are done."""
    store, ranks = dist.group.WORLD.get_group_store(), range(dist.get_world_size())
    store.set(f"done/{dist.get_rank()}", "")
    if dist.get_rank() == absent:
        store.wait([f"done/{rank}" for rank in ranks], timedelta(seconds=15))


def absent_at_construction() -> str:
    text = ""
    if dist.get_rank() != 1:
        with pytest.raises(PeerFailure) as caught:
            C10dTransport(timeout=1.5)
        assert caught.value.rank == 1
        text = str(caught.value)
    stay_until_others_are_done(absent=1)
    return text


def test_p014_p016_a_peer_that_does_not_come_is_named(workers: WorkerPool) -> None:
    for text in workers.run(absent_at_construction, 3)[::2]:
        assert "rank 1 did not come within 1.5 s; every rank of the group must make a transport" in text


def absent_at_open() -> tuple[object, str]:
    transport = C10dTransport(timeout=1.5)
    found: tuple[object, str] = (None, "")
    if dist.get_rank() != 2:
        with pytest.raises(PeerFailure) as caught:
            transport.open(Placement.loop(3, 3), chain_wires(3))
        found = caught.value.rank, str(caught.value)
    stay_until_others_are_done(absent=2)
    transport.close()
    return found


def test_p014_every_rank_comes_before_the_first_step(workers: WorkerPool) -> None:
    for named, text in workers.run(absent_at_open, 3)[:2]:
        assert named == 2
        assert "waited 1.5 s for the meeting of all ranks at the opening of channels (rank" in text


def without_a_group() -> list[object]:
    transport = C10dTransport()
    op = Op(OpKind.SEND_F, Edge(0, 0), 0, 0)
    (got,) = transport.post([Recv(op.mirror, META), Send(op, torch.ones(4))]).wait()
    answers: list[object] = [transport.rank, transport.size, got.sum().item(), transport.pending()]
    with pytest.raises(TransportError, match="has not posted the send"):
        transport.post([Recv(op.mirror, META)]).wait()
    with pytest.raises(P2PUsageError, match="outside this group of 1 ranks"):
        transport.post([Send(Op(OpKind.SEND_F, Edge(0, 1), 0, 0), torch.ones(4))])
    with pytest.raises(P2PUsageError, match="needs 2 ranks"):
        transport.open(Placement.loop(2, 2), chain_wires(2))
    transport.abort("over")
    with pytest.raises(TransportError, match="over"):
        transport.post([])
    transport.close()
    return answers


@pytest.mark.parametrize("init_group", [True, False])
def test_one_rank_works_with_and_without_a_group(workers: WorkerPool, *, init_group: bool) -> None:
    assert workers.run(without_a_group, 1, init_group=init_group) == [[0, 1, 4.0, ()]]


# ---- refusals


def refused_batches() -> list[object]:
    """To itself, where a message that a refused batch left under way is seen at once."""
    transport, meta = C10dTransport(), TensorMeta((4,), (1,), torch.float32)
    send = Op(OpKind.SEND_F, Edge(0, 0), 0, 0)
    recv = Recv(send.mirror, meta)
    transport.post([Send(send, torch.ones(4)), recv]).wait()
    for wrong in (
        Send(recv.op, torch.ones(4)),  # known, but as a receive
        Recv(send, meta),
        Send(Op(OpKind.SEND_F, Edge(0, 1), 0, 0), torch.ones(4)),
        Recv(recv.op, meta, torch.empty(2)),
        Send(send, torch.ones(4).to_sparse()),
    ):
        with pytest.raises(P2PUsageError):
            transport.post([recv, wrong])
    (got,) = transport.post([Send(send, torch.full((4,), 2.0)), recv]).wait()
    transport.close()
    return got.tolist()


def test_a_refused_batch_leaves_nothing_under_way(workers: WorkerPool) -> None:
    """Items were checked while those before them started: a receive before a wrong send swallowed the next message of its op.
    And an op that was known passed as the opposite of what it is."""
    assert workers.run(refused_batches, 1, init_group=False) == [[2.0] * 4]


def refused_on_one_of_two() -> tuple[list[float], str]:
    """First both ranks post what cannot be sent, then only rank 0 does, each time behind something that can."""
    transport = C10dTransport(placement=Placement.loop(2, 2))
    rank, peer = transport.rank, 1 - transport.rank
    there, back = Op(OpKind.SEND_F, Edge(rank, peer), 0, 0), Op(OpKind.RECV_F, Edge(peer, rank), 0, 0)

    def swap(value: float) -> float:
        (got,) = transport.post([Send(there, torch.full((4,), value)), Recv(back, META)]).wait()
        return float(got[0])

    def refuse(wrong: Send) -> str:
        with pytest.raises(P2PUsageError) as caught:
            transport.post([Send(there, torch.full((4,), -1.0)), Recv(back, META), wrong])
        assert transport.pending() == ()
        return str(caught.value)

    text = refuse(Send(Op(OpKind.SEND_F, Edge(rank, peer), 256, 0), torch.ones(4)))
    found = [swap(1.0 + rank)]
    if rank == 0:
        text = refuse(Send(there, torch.ones(4).to_sparse()))
    found += [swap(3.0 + rank), swap(5.0 + rank)]
    if rank == 0:
        transport.abort(text)
    with pytest.raises(PeerFailure) as caught:
        swap(7.0)
    transport.close()
    return found, f"{text}; {caught.value.reason}"


def test_a_batch_that_one_of_two_ranks_refuses_sends_nothing_and_the_next_one_works(workers: WorkerPool) -> None:
    (first, at_first), (second, at_second) = workers.run(refused_on_one_of_two, 2)
    assert first == [2.0, 4.0, 6.0]
    assert second == [1.0, 3.0, 5.0]
    assert at_first.count("only dense tensors can be sent, got torch.sparse_coo") == 2
    assert "stage 256 has no tag on this backend" in at_second
    assert "only dense tensors can be sent, got torch.sparse_coo" in at_second


def disagrees_with_itself() -> list[float]:
    transport = C10dTransport()
    rank, peer = transport.rank, 1 - transport.rank
    own, there = Op(OpKind.SEND_F, Edge(rank, rank), 0, 0), Op(OpKind.SEND_F, Edge(rank, peer), 0, 0)
    back = Op(OpKind.RECV_F, Edge(peer, rank), 0, 0)
    batch = [Recv(back, META), Send(there, torch.ones(4)), Send(own, torch.ones(3)), Recv(own.mirror, META)]
    handle = transport.post(batch)
    with pytest.raises(
        TransportError, match=r"expected torch.float32 of shape \(4,\), but rank \d sent .* of shape \(3,\)"
    ):
        handle.wait()
    (got,) = transport.post([Recv(back, META), Send(there, torch.full((4,), 2.0))]).wait()
    transport.close()
    return got.tolist()


def test_a_rank_that_disagrees_with_itself_is_told_when_it_waits(workers: WorkerPool) -> None:
    """It was told while it posted: what was under way by then swallowed the next message."""
    assert workers.run(disagrees_with_itself, 2) == [[2.0] * 4] * 2


# ---- sizes and forms


def both_ways(numel: int) -> bool:
    """Each rank sends before the other receives, at sizes below and above every buffer in between."""
    transport = C10dTransport(placement=Placement.loop(2, 2))
    rank, meta = transport.rank, TensorMeta((numel,), (1,), torch.float32)
    sending = transport.post([Send(Op(OpKind.SEND_F, Edge(rank, 1 - rank), 0, 0), torch.full((numel,), float(rank)))])
    (got,) = transport.post([Recv(Op(OpKind.RECV_F, Edge(1 - rank, rank), 0, 0), meta)]).wait()
    sending.wait()
    transport.close()
    return bool((got == 1 - rank).all())


@pytest.mark.parametrize("mebibytes", [1, 20, 64])
def test_p026_p028_no_size_blocks_two_ranks_that_send_to_each_other(workers: WorkerPool, mebibytes: int) -> None:
    assert workers.run(both_ways, 2, mebibytes << 18) == [True, True]


def wrong_dtype() -> str:
    transport = C10dTransport(timeout=15)
    op = Op(OpKind.SEND_F, Edge(0, 1), 0, 0)
    item = Send(op, torch.ones(4, dtype=torch.float16)) if dist.get_rank() == 0 else Recv(op.mirror, META)
    with pytest.raises(TransportError) as caught:
        transport.post([item]).wait()
    transport.close()
    return str(caught.value)


def test_p023_a_half_sent_to_a_float_buffer_is_an_error_on_both_ends(workers: WorkerPool) -> None:
    for text in workers.run(wrong_dtype, 2):
        assert "both ends of one message disagree" in text
        assert "torch.float32 of shape (4,) on rank 1" in text
        assert "torch.float16 of shape (4,) on rank 0" in text


# ---- torch's own ops, and backends other than gloo


def through_torch() -> list[float]:
    transport = C10dTransport()
    rank = transport.rank
    batch: list[Send | Recv] = []
    for peer in range(3):
        if peer != rank:
            batch.append(Send(Op(OpKind.SEND_F, Edge(rank, peer), 0, 0), torch.full((4,), float(rank))))
            batch.append(Recv(Op(OpKind.RECV_F, Edge(peer, rank), 0, 0), META))
    ops = transport.as_p2p_ops(batch)
    assert all(isinstance(op, dist.P2POp) for op in ops)
    for work in dist.batch_isend_irecv(ops):  # gloo answers with one work for each op: every one is waited for
        work.wait()
    with pytest.raises(P2PUsageError, match="stays on its rank"):
        transport.as_p2p_ops([Send(Op(OpKind.SEND_F, Edge(rank, rank), 0, 0), torch.ones(4))])
    transport.close()
    return [op.tensor[0].item() for op in ops if op.op is dist.irecv]


def test_as_p2p_ops_go_through_torchs_own_batches(workers: WorkerPool) -> None:
    assert workers.run(through_torch, 3) == [[1.0, 2.0], [0.0, 2.0], [0.0, 1.0]]


def on_another_backend(size: int) -> C10dTransport:
    """As if the backend were not gloo: registered groups, no tags, one batched call for each channel."""
    with pytest.MonkeyPatch.context() as patch:  # a worker's process serves other tests too
        for module in (link_module, c10d_module):
            patch.setattr(module, "backend_for", lambda group, device: "other")
        transport = C10dTransport(placement=Placement.loop(size, size), timeout=20)
    assert not transport.rules.tagged
    assert {how for _, _, how in transport.describe().groups} <= {"new_group"}
    return transport


FIFO_CHECKS = [
    check
    for check in TRANSPORT_CHECKS
    if check.name in ("pairs", "many_channels", "mixed_batches", "both_directions", "refusals", "values", "self_sends")
]


@pytest.mark.parametrize("check", FIFO_CHECKS, ids=lambda check: check.name)
def test_p030_nothing_rests_on_tags_or_coalescing(workers: WorkerPool, check: Check) -> None:
    check_transport(lambda size: PoolFabric(workers, size, on_another_backend), checks=[check])


# ---- seeing what is under way


def wait_long() -> tuple[str, list[str], list[str]]:
    records: list[str] = []
    handler = logging.Handler()
    logging.getLogger("stepwell_p2p").addHandler(handler)
    transport, store = C10dTransport(stall_after=0.6), dist.group.WORLD.get_group_store()
    handler.emit = lambda record: (records.append(record.getMessage()), store.set("said", ""))  # type: ignore[method-assign]
    op = Op(OpKind.SEND_F, Edge(0, 1), 2, 7)
    if dist.get_rank() == 0:
        store.wait(["said"], timedelta(seconds=15))
        time.sleep(0.5)  # it is said once
        transport.post([Send(op, torch.ones(4))]).wait()
        pending: list[str] = []
    else:
        handle = transport.post([Recv(op.mirror, META)])
        pending = [str(one.op) for one in transport.pending()]
        handle.wait()
    left = transport.pending()
    transport.close()
    return str(left), pending, records


def test_a_stalled_wait_says_so_and_does_not_fail(workers: WorkerPool) -> None:
    (_, _, quiet), (left, pending, records) = workers.run(wait_long, 2)
    assert quiet == []
    assert left == "()"
    assert pending == ["RECV_F of stage 2, microbatch 7, value 0 (rank 0 to rank 1)"]
    assert len(records) == 1
    assert "rank 1 has waited 1 s for RECV_F of stage 2, microbatch 7" in records[0]
