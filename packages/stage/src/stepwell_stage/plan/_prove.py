"""Proof that a plan can be carried out, before anything runs.

Two things are to be shown. On each rank, every action comes after what it needs from that rank. Between ranks, what is waited for
comes: a RECV or SEND posts and goes on, the compute action that takes a received value waits for its RECV, a WAIT waits for its
SEND; :func:`stepwell_p2p.prove_order` shows that these waits end, with the right data, under the rules of the transport.

An overlapped pair is taken as one: both its waits come before its sends. Where the executor sends what the forward made before it
waits for the backward's gradient, the same is posted in the same order, only sooner; so what is proved here holds there too.
"""

from __future__ import annotations

from typing import NoReturn

import attrs

from stepwell_p2p._channels import ChannelPolicy
from stepwell_p2p._op import Op, OpKind
from stepwell_p2p._order import prove_order
from stepwell_p2p._step import Post, Step, Wait
from stepwell_p2p._transport import Rules
from stepwell_p2p.exceptions import DeadlockError

from ..exceptions import ScheduleError
from ._action import Action, Kind
from ._lower import Plan
from ._messages import Messages
from ._pause import collector_paused
from ._require import require


@attrs.frozen
class PlanProof:
    """What is known of a plan that was proved; each tuple holds one number per rank.

    Attributes:
        peak_activations: microbatches of a stage that are held between their F and their B or W, at most; 0 where nothing runs
            backward.
        peak_receives: messages posted to be received and not yet used by a compute action, at most.
        peak_sends: messages sent and not yet waited for, at most.
        peak_unsharded: stages whose parameters are gathered at once, at most; 0 where the plan gathers nothing.
        num_messages: messages that a rank sends in one step.
    """

    peak_activations: tuple[int, ...]
    peak_receives: tuple[int, ...]
    peak_sends: tuple[int, ...]
    peak_unsharded: tuple[int, ...]
    num_messages: tuple[int, ...]


@collector_paused()
def prove(plan: Plan, rules: Rules, *, channels: ChannelPolicy | str = ChannelPolicy.PER_EDGE) -> PlanProof:
    """Prove that a plan runs to its end and every value reaches the action that takes it. Linear in the number of actions.

    Args:
        plan: a lowered schedule.
        rules: what the transport promises.
        channels: which messages share a first-in-first-out channel, where the rules are not tagged.

    Returns:
        The bounds that hold in every run.

    Raises:
        ScheduleError: an action comes before what it needs on its own rank, is missing or there twice; or ``plan`` is none.
        DeadlockError: a message has one end only, or the two ends of a channel disagree on an order, so that data would be mixed
            up, or ranks wait for one another in a circle. Names each rank, the action in which it waits, and for what.
    """
    require(plan, Plan, "prove() takes a plan", "lower(schedule) makes one")
    require(rules, Rules, "prove() takes the rules of a transport", "transport.rules are its own")
    facts = _Facts(plan)
    ranks = [_Rank(facts, rank) for rank in range(len(plan.actions))]
    if len(ranks) > 1:
        try:
            prove_order([rank.steps for rank in ranks], channels, rules)
        except DeadlockError:
            # It takes longer to name a million actions than to prove them: they are named when somebody will read it.
            prove_order([rank.labelled_steps() for rank in ranks], channels, rules)
            raise
    return PlanProof(
        tuple(rank.peak_activations for rank in ranks),
        tuple(rank.peak_receives for rank in ranks),
        tuple(rank.peak_sends for rank in ranks),
        tuple(rank.peak_unsharded for rank in ranks),
        tuple(rank.num_messages for rank in ranks),
    )


# Members of an enum are looked up through Python code before 3.12; a plan asks for them millions of times.
F, B, I, W = Kind.F, Kind.B, Kind.I, Kind.W  # noqa: E741 - the field's names
SEND_F, SEND_B, RECV_F, RECV_B = Kind.SEND_F, Kind.SEND_B, Kind.RECV_F, Kind.RECV_B
WAIT_F, WAIT_B = Kind.WAIT_F, Kind.WAIT_B


class _Facts:
    """What all ranks share: the numbering of messages, and tables by stage and microbatch or by message."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.name = plan.schedule.name
        self.ranks = plan.placement.ranks
        self.count = plan.num_microbatches
        self.messages = Messages.of(plan.placement, plan.links, self.count)
        size = plan.placement.num_stages * self.count
        self.forward_done, self.backward_done, self.split = bytearray(size), bytearray(size), bytearray(size)
        self.keeps = plan.schedule.has_backward  # else no F leaves anything behind
        # By message: the step that posts its send or its receive, -1 for not yet.
        self.send_step, self.recv_step = [-1] * len(self.messages), [-1] * len(self.messages)
        self.waited = bytearray(len(self.messages))
        # By link, first for values, then for gradients: the edge, and the stages at its ends.
        firsts = range(0, len(self.messages), self.count)
        self.ends = [(self.messages.edge(first), *self.messages.ends(first)) for first in firsts]
        ports = self.messages.ports
        self.moved = ports | {WAIT_F: ports[SEND_F], WAIT_B: ports[SEND_B]}

    def ops(self, messages: tuple[int, ...], kind: Kind) -> tuple[Op, ...]:
        """One end of each message. The index, 0 between neighbours, tells apart those from one stage to several of one rank."""
        found = []
        for message in messages:
            edge, source, destination = self.ends[message // self.count]
            found.append(Op(_OP_KINDS[kind], edge, source, message % self.count, abs(destination - source) - 1))
        return tuple(found)


_OP_KINDS = {kind: OpKind(kind.value) for kind in (SEND_F, SEND_B, RECV_F, RECV_B)}


class _Rank:
    """One rank's actions, gone through in order. Notes peaks, and what is posted and waited for."""

    def __init__(self, facts: _Facts, rank: int) -> None:
        self.facts = facts
        self.rank = rank
        self.row = facts.plan.actions[rank]
        self.messages = facts.messages
        self.stages = frozenset(facts.plan.placement.stages_of(rank))
        self.steps: list[Step] = []
        self.actions: list[Action] = []  # of each step
        self.held = self.receives = self.sends = 0
        self.peak_activations = self.peak_receives = self.peak_sends = self.peak_unsharded = 0
        self.num_messages = 0
        self.unsharded: set[int] = set()
        self.reduced: set[int] = set()
        self.gathers: set[int] = set()
        self.left: dict[int, int] = {}  # backwards of each stage still to come
        self._check_compute()
        self.at = 0
        for action in self.row:
            self._take(action)
            self.at += 1

    def labelled_steps(self) -> list[Step]:
        """The steps, with their actions as labels."""
        return [attrs.evolve(step, label=str(action)) for step, action in zip(self.steps, self.actions, strict=True)]

    def _add(self, step: Step, action: Action) -> None:
        self.steps.append(step)
        self.actions.append(action)

    def _check_compute(self) -> None:
        """The plan computes what its schedule says, in that order; and note what else the proof has to know beforehand."""
        compute, left = [], self.left
        for action in self.row:
            stage, kind, _, _, parts, _ = action
            if kind is Kind.UNSHARD:
                self.gathers.add(stage)
            if kind not in _COMPUTE:
                continue
            compute.append(action)
            for part in parts or (action,):
                if part[1] is B or part[1] is W:
                    left[part[0]] = left.get(part[0], 0) + 1
        expected = self.facts.plan.schedule.actions[self.rank]
        if tuple(compute) != expected and not any(action[4] for action in compute):
            # Overlapped pairs may stand apart: all of a rank's, or none.
            expected = tuple(leaf for action in expected for leaf in action[4] or (action,))
        if tuple(compute) != expected:
            at = next((i for i, (a, b) in enumerate(zip(compute, expected, strict=False)) if a != b), None)
            at = min(len(compute), len(expected)) if at is None else at
            got, want = (str(actions[at]) if at < len(actions) else "nothing" for actions in (compute, expected))
            raise ScheduleError(
                f"{self.facts.name}: compute action {at} of rank {self.rank} is {got} in the plan but {want} in its schedule"
            )

    def _take(self, action: Action) -> None:
        kind = action[1]
        if kind is RECV_F or kind is RECV_B:
            self._receive(action)
        elif kind is SEND_F or kind is SEND_B:
            self._send(action)
        elif kind is WAIT_F or kind is WAIT_B:
            self._wait(action)
        elif kind is Kind.UNSHARD or kind is Kind.RESHARD or kind is Kind.REDUCE_GRAD:
            self._data_parallel(action)
        elif kind is not Kind.CUSTOM:
            leaves = action[4] or (action,)
            for leaf in leaves:
                self._check_needs(leaf, action)
            for leaf in leaves:
                self._compute(leaf)

    def _check_needs(self, leaf: Action, action: Action) -> None:
        """What a compute action needs stands before it; what it takes from other ranks it waits for."""
        facts = self.facts
        stage, kind, microbatch = leaf[0], leaf[1], leaf[2] or 0
        at = stage * facts.count + microbatch
        if stage in self.gathers and stage not in self.unsharded:
            self._refuse(action, f"{stage}UNSHARD must come before it, and {stage}RESHARD after it")
        if kind is W:
            if not facts.split[at]:
                self._refuse(action, f"{stage}I{microbatch} must come before it")
            return
        if kind is F:
            neighbours, done, ports = self.messages.local_sources, facts.forward_done, facts.moved[RECV_F]
        else:
            neighbours, done, ports = self.messages.local_destinations, facts.backward_done, facts.moved[RECV_B]
            if not facts.forward_done[at]:
                self._refuse(action, f"{stage}F{microbatch} must come before it")
        for other in neighbours[stage]:
            if not done[other * facts.count + microbatch]:
                what = "the forward" if kind is F else "the backward"
                self._refuse(action, f"{what} of stage {other}, whose result it takes, must come before it")
        for port in ports[stage]:
            step = facts.recv_step[port.base + microbatch]
            if step < 0:
                missing = self.messages.describe(port.base + microbatch)
                self._refuse(action, f"the RECV of {missing} must come before it")
            self._add(Wait(step), action)

    def _compute(self, leaf: Action) -> None:
        facts, stage, kind = self.facts, leaf[0], leaf[1]
        at = stage * facts.count + (leaf[2] or 0)
        if kind is F:
            facts.forward_done[at] = 1
            self.held += self.facts.keeps
            self.peak_activations = max(self.peak_activations, self.held)
            self.receives -= len(facts.moved[RECV_F][stage])
            return
        if kind is W:
            facts.split[at] = 0
        else:
            facts.backward_done[at] = 1
            self.receives -= len(facts.moved[RECV_B][stage])
            if kind is I:
                facts.split[at] = 1
                return
        self.held -= 1
        self.left[stage] -= 1

    def _receive(self, action: Action) -> None:
        numbers, steps = self._numbers(action), self.facts.recv_step
        for message in numbers:
            if steps[message] >= 0:
                self._refuse(action, f"{self.messages.describe(message)} is received twice")
            steps[message] = len(self.steps)
        self._add(Post(self.facts.ops(numbers, action[1])), action)
        self.receives += len(numbers)
        self.peak_receives = max(self.peak_receives, self.receives)

    def _send(self, action: Action) -> None:
        facts, stage, microbatch = self.facts, action[0], action[2] or 0
        numbers, steps = self._numbers(action), facts.send_step
        done = facts.forward_done if action[1] is SEND_F else facts.backward_done
        if not done[stage * facts.count + microbatch]:
            what = "forward" if action[1] is SEND_F else "backward"
            self._refuse(action, f"the {what} of stage {stage}, microbatch {microbatch} must come before it")
        for message in numbers:
            if steps[message] >= 0:
                self._refuse(action, f"{self.messages.describe(message)} is sent twice")
            steps[message] = len(self.steps)
        self._add(Post(facts.ops(numbers, action[1])), action)
        self.sends += len(numbers)
        self.num_messages += len(numbers)
        self.peak_sends = max(self.peak_sends, self.sends)

    def _wait(self, action: Action) -> None:
        numbers, facts = self._numbers(action), self.facts
        for message in numbers:
            if facts.send_step[message] < 0:
                self._refuse(action, f"the SEND of {self.messages.describe(message)} must come before it")
            if facts.waited[message]:
                self._refuse(action, f"{self.messages.describe(message)} is waited for twice")
            facts.waited[message] = 1
        self._add(Wait(facts.send_step[numbers[0]]), action)
        self.sends -= len(numbers)

    def _data_parallel(self, action: Action) -> None:
        stage = action.stage
        self._check_place(action)
        if action.kind is Kind.UNSHARD:
            if stage in self.unsharded:
                self._refuse(action, f"stage {stage} is gathered already")
            self.unsharded.add(stage)
            self.peak_unsharded = max(self.peak_unsharded, len(self.unsharded))
        elif action.kind is Kind.RESHARD:
            if stage not in self.unsharded:
                self._refuse(action, f"stage {stage} is not gathered")
            self.unsharded.remove(stage)
        else:
            if self.left.get(stage):
                self._refuse(action, f"{self.left[stage]} backwards of stage {stage} come after it")
            if stage in self.reduced:
                self._refuse(action, f"the gradients of stage {stage} are reduced already")
            self.reduced.add(stage)

    def _check_place(self, action: Action) -> None:
        if action.stage not in self.stages:
            self._refuse(action, f"that rank holds stages {tuple(sorted(self.stages))}")

    def _numbers(self, action: Action) -> tuple[int, ...]:
        """The messages that a SEND, RECV or WAIT concerns."""
        stage, kind, microbatch, peer, _, _ = action
        if stage not in self.stages:
            self._check_place(action)
        if microbatch is None or not 0 <= microbatch < self.facts.count:
            self._refuse(action, f"there are microbatches 0 to {self.facts.count - 1}")
        ports = self.facts.moved[kind][stage]
        if peer is None and len(ports) == 1:
            return (ports[0].base + microbatch,)
        numbers = tuple(port.base + microbatch for port in ports if peer is None or port.peer == peer)
        if not numbers:
            self._refuse(action, "no other rank is at the other end of it")
        return numbers

    def _refuse(self, action: Action, why: str) -> NoReturn:
        raise ScheduleError(f"{self.facts.name}: {action} on rank {self.rank} (action {self.at} of its plan): {why}")


_COMPUTE = frozenset(kind for kind in Kind if kind.is_compute)
