"""Whether an order of communication can block, or mix messages up, decided before anything runs."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from ._channels import ChannelMap, ChannelPolicy
from ._cycle import explain
from ._ends import Ends
from ._op import Op
from ._require import require, several, whole
from ._run import Run
from ._step import Post, Step, Wait
from ._transport import Rules
from .exceptions import DeadlockError


@attrs.frozen
class OrderProof:
    """The order is safe: every send meets its receive, the right one, and no rank waits for ever.

    Attributes:
        num_ranks: how many ranks.
        num_messages: how many messages.
        policy: under which channels.
        rules: under which rules.
    """

    num_ranks: int
    num_messages: int
    policy: ChannelPolicy
    rules: Rules


def prove_order(
    sequences: Sequence[Sequence[Step]], channels: ChannelMap | ChannelPolicy | str, rules: Rules
) -> OrderProof:
    """Prove that an order of communication always comes to its end with the right data.

    Batches that are never waited for must still be done in the end.

    Example::

        send, recv = Op(OpKind.SEND_F, Edge(0, 1), 0, 0), Op(OpKind.RECV_F, Edge(0, 1), 0, 0)
        prove_order([[Post([send]), Wait(0)], [Post([recv]), Wait(0)]], "per-edge", Rules(tagged=False, rendezvous=True))

    Args:
        sequences: what each rank does, in order.
        channels: how messages are spread over channels.
        rules: what the transport promises.

    Raises:
        DeadlockError: a message has one end only, the ends of a channel disagree about the order, or ranks wait for each
            other in a cycle; the message tells the shortest such cycle.
        P2PUsageError: a sequence is malformed: an op of another rank, or of a rank that has no sequence, a wait for what was
            not posted, or something that is no step.
    """
    require(rules, Rules, "prove_order() takes the rules of a transport", "transport.rules are its")
    policy = channels.policy if isinstance(channels, ChannelMap) else ChannelPolicy.of(channels)
    try:
        ends = Ends(sequences, policy, tagged=rules.tagged)
    except (AttributeError, TypeError):  # looked for only now, so that right ones pay nothing
        _check_kinds(sequences)
        raise
    problem = _find_problem(ends, rules)
    if problem is None:
        return OrderProof(len(sequences), len(ends.ops) // 2, policy, rules)
    if problem.kind == "unmatched":
        raise problem
    safe = _safe_policy(sequences, policy, rules)
    advice = "" if rules.tagged else " No channel policy makes this order safe: change the order."
    if safe is not None:
        advice = f" The same order is safe with {safe.value!r} channels."
    raise DeadlockError(
        f"{problem}{advice}", kind=problem.kind, cycle=problem.cycle, safe_policy=safe.value if safe else None
    )


def _check_kinds(sequences: Sequence[Sequence[Step]]) -> None:
    for rank, steps in enumerate(several(sequences, "sequences are several, one for each rank")):
        for step in several(steps, f"the sequence of rank {rank} is of several steps"):
            for op in step.ops if isinstance(step, Post) else ():
                require(op, Op, f"rank {rank} posts Ops")
            if isinstance(step, Wait):
                whole(step.post, f"the post that rank {rank} waits for")


def _safe_policy(sequences: Sequence[Sequence[Step]], policy: ChannelPolicy, rules: Rules) -> ChannelPolicy | None:
    if rules.tagged:  # channels do not matter
        return None
    for other in ChannelPolicy:
        if other is not policy and _find_problem(Ends(sequences, other, tagged=False), rules) is None:
            return other
    return None


def _find_problem(ends: Ends, rules: Rules) -> DeadlockError | None:
    if ends.problem is not None:
        return ends.problem
    run = Run(ends, rules)
    return None if run.finishes() else explain(run)
