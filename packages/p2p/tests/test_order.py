"""Known orders, and the proof against what the loopback transport really does."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stepwell_meta import TensorMeta
from stepwell_p2p import (
    ChannelPolicy,
    Edge,
    LoopbackFabric,
    LoopbackTransport,
    Op,
    OpKind,
    Placement,
    Post,
    Recv,
    Rules,
    Send,
    Step,
    Wait,
    Work,
    chain_wires,
    channels_for,
    prove_order,
)
from stepwell_p2p.exceptions import DeadlockError, P2PUsageError, PeerFailure, TransportError

FIFO = Rules(tagged=False, rendezvous=False)
FIFO_RENDEZVOUS = Rules(tagged=False, rendezvous=True)
TAGGED = Rules(tagged=True, rendezvous=False)
TAGGED_RENDEZVOUS = Rules(tagged=True, rendezvous=True)
ALL_RULES = [FIFO, FIFO_RENDEZVOUS, TAGGED, TAGGED_RENDEZVOUS]


def send_f(source: int, destination: int, stage: int = 0, microbatch: int = 0, index: int = 0) -> Op:
    return Op(OpKind.SEND_F, Edge(source, destination), stage, microbatch, index)


def send_b(source: int, destination: int, stage: int = 0, microbatch: int = 0) -> Op:
    return Op(OpKind.SEND_B, Edge(source, destination), stage, microbatch)


def blocking(*ops: Op, label: str = "") -> list[Step]:
    """Each op posted and waited for at once; indices are those of a sequence that holds nothing else."""
    return [step for number, op in enumerate(ops) for step in (Post([op], label), Wait(2 * number, label))]


# ---- known cases


def test_two_ranks_that_both_send_first_block_under_rendezvous_only() -> None:
    there, back = send_f(0, 1), send_f(1, 0)
    sequences = [blocking(there, back.mirror, label="F0"), blocking(back, there.mirror, label="F1")]
    for rules in (FIFO, TAGGED):
        prove_order(sequences, "per-edge", rules)
    for rules in (FIFO_RENDEZVOUS, TAGGED_RENDEZVOUS):
        with pytest.raises(DeadlockError) as caught:
            prove_order(sequences, "per-edge", rules)
        assert caught.value.kind == "cycle"
        assert [(link.rank, link.action) for link in caught.value.cycle] in (
            [(0, "F0"), (1, "F1")],
            [(1, "F1"), (0, "F0")],
        )
        assert caught.value.safe_policy is None
        message = str(caught.value)
        assert "rank 0 in F0 waits on channel 0->1 for SEND_F of stage 0, microbatch 0" in message
        assert "rank 1 has not come to receive it" in message
    as_one = [[Post([there, back.mirror]), Wait(0)], [Post([back, there.mirror]), Wait(0)]]
    prove_order(as_one, "shared", FIFO_RENDEZVOUS)


def looped_forward(*, early: bool) -> list[list[Step]]:
    """8 stages on 4 ranks, 2 microbatches, forward only; ``early``: the second stage's receives are posted first of all."""
    placement = Placement.loop(8, 4)
    sequences: list[list[Step]] = []
    for rank in range(4):
        steps: list[Step] = []
        posted: dict[tuple[int, int], int] = {}

        def receive(
            stage: int, microbatch: int, rank: int = rank, steps: list[Step] = steps, posted: dict = posted
        ) -> None:
            if stage > 0 and (stage, microbatch) not in posted:
                op = send_f(placement.ranks[stage - 1], rank, stage - 1, microbatch).mirror
                posted[stage, microbatch] = len(steps)
                steps.append(Post([op], f"{stage}RECV_F{microbatch}"))

        if early and rank == 0:
            for microbatch in range(2):
                receive(4, microbatch)
        sends = []
        for stage in placement.stages_of(rank):
            for microbatch in range(2):
                receive(stage, microbatch)
                if stage > 0:
                    steps.append(Wait(posted[stage, microbatch], f"{stage}F{microbatch}"))
                steps.append(Work(f"{stage}F{microbatch}"))
                if stage < 7:
                    sends.append(len(steps))
                    steps.append(
                        Post(
                            [send_f(rank, placement.ranks[stage + 1], stage, microbatch)], f"{stage}SEND_F{microbatch}"
                        )
                    )
        steps.extend(Wait(at, "end") for at in sends)
        sequences.append(steps)
    return sequences


def test_p001_p003_a_shared_fifo_puts_a_receive_before_unrelated_sends() -> None:
    """Rank 0 posts stage 4's receives, which need rank 3, before stage 0's sends, which rank 3 needs in the end."""
    channels = channels_for(Placement.loop(8, 4), chain_wires(8), "shared")
    with pytest.raises(DeadlockError) as caught:
        prove_order(looped_forward(early=True), channels, FIFO_RENDEZVOUS)
    assert caught.value.kind == "cycle"
    assert caught.value.safe_policy == "per-edge"
    assert "stands in rank 0's channel shared behind RECV_F of stage 3" in str(caught.value)
    assert "safe with 'per-edge' channels" in str(caught.value)
    prove_order(looped_forward(early=True), "per-edge", FIFO_RENDEZVOUS)
    prove_order(looped_forward(early=True), "shared", TAGGED_RENDEZVOUS)
    prove_order(looped_forward(early=False), "shared", FIFO)


def test_v_placement_with_a_middle_on_one_rank() -> None:
    """Stages 1 and 2 are both on rank 1: nothing crosses there, and one channel each way does."""
    placement = Placement.v(4, 2)
    channels = channels_for(placement, chain_wires(4))
    assert [channel.name for channel in channels.channels] == ["0->1", "1->0"]
    first, up = send_f(0, 1, 0), send_f(1, 0, 2)
    back, down = send_b(0, 1, 3), send_b(1, 0, 1)
    sequences = [blocking(first, up.mirror, back, down.mirror), blocking(first.mirror, up, back.mirror, down)]
    for rules in ALL_RULES:
        assert prove_order(sequences, channels, rules).num_messages == 4


def test_p010_p011_both_directions_of_a_two_rank_pipeline_are_one_pair() -> None:
    """Next and previous rank are the same: rank 1's activations and gradients share an edge, and disagreeing ends mix them up."""
    value, gradient = send_f(1, 0, stage=1), send_b(1, 0, stage=1)
    sequences = [[Post([gradient.mirror]), Post([value.mirror]), Wait(0), Wait(1)], blocking(value, gradient)]
    for rules in (FIFO, FIFO_RENDEZVOUS):
        with pytest.raises(DeadlockError, match="receiver would get the wrong data") as caught:
            prove_order(sequences, "per-edge", rules)
        assert caught.value.kind == "order"
        assert caught.value.safe_policy == "per-direction"
        prove_order(sequences, "per-direction", rules)
    prove_order(sequences, "shared", TAGGED)


@pytest.mark.parametrize("rules", ALL_RULES)
def test_p006_fewer_microbatches_than_stages(rules: Rules) -> None:
    sequences: list[list[Step]] = []
    for rank in range(4):
        ops = []
        if rank > 0:
            ops.append(send_f(rank - 1, rank, rank - 1).mirror)
        if rank < 3:
            ops += [send_f(rank, rank + 1, rank), send_b(rank + 1, rank, rank + 1).mirror]
        if rank > 0:
            ops.append(send_b(rank, rank - 1, rank))
        sequences.append(blocking(*ops))
    assert prove_order(sequences, "shared", rules).num_messages == 6


def test_p018_ops_without_another_end_are_refused() -> None:
    ops = [send_f(0, 1, microbatch=number) for number in range(2)]
    with pytest.raises(
        DeadlockError, match=r"rank 0 posts SEND_F of stage 0, microbatch 1.* in F1, but rank 1 never receives it"
    ):
        prove_order([[Post(ops, "F1"), Wait(0)], [Post([ops[0].mirror]), Wait(0)]], "shared", FIFO)
    with pytest.raises(DeadlockError, match=r"rank 1 posts RECV_F .*, but rank 0 never sends it") as caught:
        prove_order([[Post([ops[1]])], [Post([ops[0].mirror, ops[1].mirror])]], "per-edge", FIFO)
    assert caught.value.kind == "unmatched"
    with pytest.raises(DeadlockError, match="never sends it"):
        prove_order([[], [Post([ops[0].mirror])]], "per-edge", TAGGED)


def test_p025_several_sends_before_any_receive_need_no_room() -> None:
    """Sends that are posted, not waited for, rest on no buffer; waited for one by one they do."""
    ops = [send_f(0, 1, microbatch=number) for number in range(4)]
    reply = send_f(1, 0)
    posted: list[Step] = (
        [Post([op]) for op in ops] + [Post([reply.mirror]), Wait(4)] + [Wait(number) for number in range(4)]
    )
    answers_first = blocking(reply, *(op.mirror for op in ops))
    prove_order([posted, answers_first], "per-edge", FIFO_RENDEZVOUS)
    with pytest.raises(DeadlockError):
        prove_order([blocking(*ops, reply.mirror), answers_first], "per-edge", FIFO_RENDEZVOUS)


def test_a_batch_nobody_waits_for_must_be_done_in_the_end() -> None:
    """Ranks pass their last step, yet each channel's first message stands before the other rank's first one."""
    there = [send_f(0, 1, microbatch=number) for number in range(2)]
    back = [send_f(1, 0, microbatch=number) for number in range(2)]
    sequences: list[list[Step]] = [
        [Post([there[0]]), Post([back[0].mirror])],
        [Post([back[0]]), Post([there[0].mirror])],
    ]
    with pytest.raises(DeadlockError) as caught:
        prove_order(sequences, "shared", FIFO_RENDEZVOUS)
    assert caught.value.safe_policy == "per-edge"
    assert {link.rank for link in caught.value.cycle} == {0, 1}
    assert there[1] != back[1]


def test_the_cycle_shown_is_the_shortest() -> None:
    """Ranks 0, 1, 2 wait in a ring, and 3 and 4 for each other."""
    ring = [send_f(rank, (rank + 1) % 3) for rank in range(3)]
    pair = [send_f(3, 4), send_f(4, 3)]
    sequences = [blocking(ring[rank], ring[(rank - 1) % 3].mirror) for rank in range(3)]
    sequences += [blocking(pair[0], pair[1].mirror), blocking(pair[1], pair[0].mirror)]
    with pytest.raises(DeadlockError, match="a cycle of 2 waits") as caught:
        prove_order(sequences, "per-edge", TAGGED_RENDEZVOUS)
    assert {link.rank for link in caught.value.cycle} == {3, 4}


def test_malformed_sequences_are_refused() -> None:
    op = send_f(0, 1)
    with pytest.raises(P2PUsageError, match="rank 0's to post"):
        prove_order([[], [Post([op])]], "shared", FIFO)
    with pytest.raises(P2PUsageError, match="no earlier post"):
        prove_order([[Wait(0)], []], "shared", FIFO)
    with pytest.raises(P2PUsageError, match="no channel policy is named"):
        prove_order([], "ring", FIFO)


def one_f_one_b(ranks: int, microbatches: int) -> list[list[Step]]:
    sequences = []
    for rank in range(ranks):
        ops = []
        for microbatch in range(microbatches):
            if rank > 0:
                ops.append(send_f(rank - 1, rank, rank - 1, microbatch).mirror)
            if rank < ranks - 1:
                ops += [
                    send_f(rank, rank + 1, rank, microbatch),
                    send_b(rank + 1, rank, rank + 1, microbatch).mirror,
                ]
            if rank > 0:
                ops.append(send_b(rank, rank - 1, rank, microbatch))
        sequences.append(blocking(*ops))
    return sequences


@pytest.mark.parametrize("rules", [FIFO_RENDEZVOUS, TAGGED])
def test_work_grows_in_proportion(rules: Rules) -> None:
    """A million ends take seconds (benchmarks/p2p.py) because ten times the ends take about ten times the time."""

    def seconds(microbatches: int) -> float:
        sequences, taken = one_f_one_b(4, microbatches), []
        for _ in range(3):
            start = time.process_time()
            proof = prove_order(sequences, "per-edge", rules)
            taken.append(time.process_time() - start)
        assert proof.num_messages == 6 * microbatches
        return min(taken)

    assert seconds(1500) < 30 * seconds(150)


# ---- the proof against the loopback transport


def random_case(random: Random) -> list[list[Step]]:
    """Ranks with messages between them (both ends always there), in orders from orderly to wild."""
    size = random.randint(2, 4)
    kinds = [OpKind.SEND_F, OpKind.SEND_B]
    messages = []
    for _ in range(random.randint(2, 9)):
        source, destination = random.sample(range(size), 2)
        messages.append(Op(random.choice(kinds), Edge(source, destination), random.randint(0, 1), random.randint(0, 2)))
    swaps = random.choice([0, 1, 2, 8])
    together, lazy = random.choice([0.0, 0.3, 0.8]), random.choice([0.1, 0.6, 1.0])
    sequences: list[list[Step]] = []
    for rank in range(size):
        mine = (op if rank == op.edge.source else op.mirror for op in messages)
        ops = [op for op in mine if op.rank == rank]
        for _ in range(swaps if len(ops) > 1 else 0):
            at = random.randrange(len(ops) - 1)
            ops[at], ops[at + 1] = ops[at + 1], ops[at]
        sequences.append(random_steps(random, ops, together, lazy))
    return sequences


def random_steps(random: Random, ops: list[Op], together: float, lazy: float) -> list[Step]:
    steps: list[Step] = []
    open_posts: list[int] = []
    while ops:
        count = 1
        while count < len(ops) and random.random() < together:
            count += 1
        open_posts.append(len(steps))
        steps.append(Post(ops[:count]))
        ops = ops[count:]
        while open_posts and random.random() > lazy:
            steps.append(Wait(open_posts.pop(random.randrange(len(open_posts)))))
    return steps


def verdict(sequences: list[list[Step]], policy: ChannelPolicy, rules: Rules) -> str:
    try:
        prove_order(sequences, policy, rules)
    except DeadlockError as error:
        return error.kind
    return "fine"


def what_happens(sequences: list[list[Step]], policy: ChannelPolicy, rules: Rules, threads: ThreadPoolExecutor) -> str:
    fabric = LoopbackFabric(len(sequences), rules=rules, channels=policy, timeout=20)
    runs = [threads.submit(run_rank, fabric.transport(rank), sequence) for rank, sequence in enumerate(sequences)]
    endings = {run.result() for run in runs}
    return next(ending for ending in ("wrong data", "order", "cycle", "fine") if ending in endings)


def run_rank(transport: LoopbackTransport, sequence: list[Step]) -> str:
    """Every message carries its own numbers; equal ones also how many of them went before."""
    meta = TensorMeta((5,), (1,), torch.int64)
    handles = {}
    seen: dict[Op, int] = {}
    expected = {}

    def content(op: Op) -> torch.Tensor:
        seen[op] = seen.get(op, 0) + 1
        return torch.tensor([op.edge.source, op.stage, op.microbatch, op.kind.is_forward, seen[op]])

    def wait(at: int) -> bool:
        got = handles.pop(at).wait()
        return all(torch.equal(ours, theirs) for ours, theirs in zip(got, expected[at], strict=True))

    try:
        for at, step in enumerate(sequence):
            if isinstance(step, Post):
                batch = [Send(op, content(op)) if op.kind.is_send else Recv(op, meta) for op in step.ops]
                expected[at] = [content(op) for op in step.ops if not op.kind.is_send]
                handles[at] = transport.post(batch)
            elif isinstance(step, Wait) and not wait(step.post):
                return "wrong data"
        return "fine" if all(wait(at) for at in list(handles)) else "wrong data"
    except PeerFailure:
        return "fine"  # some other rank says what it was
    except TransportError as error:
        kind = "order" if "another order" in str(error) else "cycle"
        if kind == "order":
            transport.abort("order")
        return kind
    finally:
        transport.close()


@settings(max_examples=2000, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32), rules=st.sampled_from(ALL_RULES), policy=st.sampled_from(list(ChannelPolicy)))
def check_agreement(
    threads: ThreadPoolExecutor, tally: dict[str, int], seed: int, rules: Rules, policy: ChannelPolicy
) -> None:
    sequences = random_case(Random(seed))
    said, seen = verdict(sequences, policy, rules), what_happens(sequences, policy, rules, threads)
    tally[said] = tally.get(said, 0) + 1
    # Ends that disagree are found before the run; the run may block before they meet.
    assert seen == said or (said == "order" and seen == "cycle"), (said, seen, sequences)


def test_the_verdict_is_what_the_loopback_transport_does() -> None:
    tally: dict[str, int] = {}
    with ThreadPoolExecutor(4) as threads:
        check_agreement(threads, tally)
    assert min(tally.get(kind, 0) for kind in ("fine", "order", "cycle")) > 100, tally  # no kind went untested


def test_a_rank_without_a_sequence_is_named_as_such() -> None:
    """The advice was to add the other end on a rank that does not exist."""
    for peer in (2, -1):
        with pytest.raises(P2PUsageError, match=f"there is no rank {peer}: the sequences are those of ranks 0 to 1"):
            prove_order([[Post([Op(OpKind.SEND_F, Edge(0, peer), 0, 0)])], []], "per-edge", Rules(False, False))


def test_what_is_no_step_is_refused() -> None:
    """It counted as local work, so an order with a step of another kind was proved without that step."""
    op = Op(OpKind.SEND_F, Edge(0, 1), 0, 0)
    with pytest.raises(P2PUsageError, match="rank 1, step 0 is no Post, Wait or Work"):
        prove_order([[Work("F0")], [op]], "per-edge", Rules(False, False))  # type: ignore[list-item]


def test_explaining_a_cycle_takes_time_linear_in_the_order() -> None:
    """Each of the messages that a rank waited for went through its channel from the start: 22 s for this one."""

    def message(source: int, microbatch: int, index: int = 0) -> Op:
        return Op(OpKind.SEND_F, Edge(source, 1 - source), source, microbatch, index)

    sequences: list[list[Step]] = []
    for rank in (0, 1):
        steps: list[Step] = []
        for microbatch in range(10_000):
            steps += [Post([message(rank, microbatch), message(1 - rank, microbatch).mirror]), Wait(len(steps))]
        steps.append(Post([message(rank, 10_000)]))  # each sends first, and then a large batch, before it receives
        steps += [Post([message(rank, 10_001, index) for index in range(10_000)]), Wait(len(steps))]
        steps.append(Post([message(1 - rank, 10_000).mirror]))
        steps += [Post([message(1 - rank, 10_001, index).mirror for index in range(10_000)]), Wait(len(steps))]
        sequences.append(steps)
    start = time.process_time()
    with pytest.raises(DeadlockError, match="a cycle of 4 waits"):
        prove_order(sequences, "per-edge", Rules(tagged=False, rendezvous=True))
    assert time.process_time() - start < 5
