"""Proof that a plan can be carried out, before anything runs.

Every rank walks through its actions; RECV and SEND post and go on, the compute action that takes a received value waits for it,
a WAIT waits for its send. The walk needs no clock: an action that does not wait is taken, and what a wait waits for stays true
once it is true. So the walk ends in the same state whatever the speed of ranks and network: either every plan runs to its end,
or the same ranks stand still in the same actions. What it finds once holds always.
"""

from __future__ import annotations

from typing import Protocol

import attrs

from stepwell_p2p._channels import ChannelPolicy
from stepwell_p2p.exceptions import DeadlockError

from ..exceptions import ScheduleError
from ._action import Action, Kind
from ._lanes import Lanes
from ._lower import Plan
from ._messages import Messages


class OrderRules(Protocol):
    """What a transport promises about order; :class:`stepwell_p2p.Rules` is one."""

    @property
    def tagged(self) -> bool:
        """Whether messages are matched by what they are, in any order; else each channel is first in, first out."""
        ...

    @property
    def rendezvous(self) -> bool:
        """Whether a send is done only once its receive is posted; else it is done when posted."""
        ...


@attrs.frozen
class PlanProof:
    """What is known of a plan that was proved; each tuple holds one number per rank.

    Attributes:
        peak_activations: microbatches of a stage that are held between their F and their B or W, at most.
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


def prove(plan: Plan, rules: OrderRules, *, channels: ChannelPolicy | str = ChannelPolicy.PER_EDGE) -> PlanProof:
    """Prove that a plan runs to its end and every value reaches the action that takes it. Linear in the number of actions.

    Args:
        plan: a lowered schedule.
        rules: what the transport promises.
        channels: which messages share a first-in-first-out channel, where the rules are not tagged.

    Returns:
        The bounds that hold in every run.

    Raises:
        ScheduleError: an action comes before what it needs on its own rank, is missing or there twice.
        DeadlockError: the two ends of a channel disagree on an order, so that data would be mixed up; or ranks wait for one
            another in a circle. The message names each rank, the action in which it waits, and for what.
    """
    _check_compute(plan)
    walk = _Walk(plan, rules, ChannelPolicy.of(channels))
    walk.run()
    return walk.proof()


def _check_compute(plan: Plan) -> None:
    """The plan computes what its schedule says, in that order."""
    for rank, (row, expected) in enumerate(zip(plan.actions, plan.schedule.actions, strict=True)):
        compute = tuple(action for action in row if action.kind.is_compute)
        if compute != expected:
            at = next((i for i, pair in enumerate(zip(compute, expected, strict=False)) if pair[0] != pair[1]), None)
            at = min(len(compute), len(expected)) if at is None else at
            got, want = (str(actions[at]) if at < len(actions) else "nothing" for actions in (compute, expected))
            raise ScheduleError(
                f"{plan.schedule.name}: compute action {at} of rank {rank} is {got} in the plan but {want} in its schedule"
            )


# Members of an enum are looked up through Python code before 3.12; a plan asks for them millions of times.
F, B, I, W = Kind.F, Kind.B, Kind.I, Kind.W  # noqa: E741 - the field's names
SEND_F, SEND_B, RECV_F, RECV_B = Kind.SEND_F, Kind.SEND_B, Kind.RECV_F, Kind.RECV_B
WAIT_F, WAIT_B = Kind.WAIT_F, Kind.WAIT_B


class _Walk:
    """The walk; holds what is true so far."""

    def __init__(self, plan: Plan, rules: OrderRules, policy: ChannelPolicy) -> None:
        self.rows = plan.actions
        self.name = plan.schedule.name
        self.m = plan.num_microbatches
        self.messages = Messages.of(plan.placement, plan.links, plan.num_microbatches)
        self.lanes = Lanes(self.messages, tagged=rules.tagged, rendezvous=rules.rendezvous, policy=policy)
        size = plan.placement.num_stages * self.m
        self.forward_done, self.backward_done, self.split = bytearray(size), bytearray(size), bytearray(size)
        ranks = range(len(self.rows))
        self.position = [0 for _ in ranks]
        self.blocked: list[int | None] = [None for _ in ranks]  # the message that a rank waits for
        self.held, self.receives, self.sends = ([0 for _ in ranks] for _ in range(3))
        self.peaks = [[0 for _ in ranks] for _ in range(4)]
        self.sent = [0 for _ in ranks]
        self.unsharded: list[set[int]] = [set() for _ in ranks]
        self.gathers = {a.stage for row in self.rows for a in row if a.kind is Kind.UNSHARD}
        self.left = [0] * plan.placement.num_stages  # backwards still to come, for REDUCE_GRAD
        for row in self.rows:
            for action in row:
                for leaf in action.parts or (action,):
                    if leaf.kind is B or leaf.kind is W:
                        self.left[leaf.stage] += 1
        self.waited = bytearray(len(self.messages))

    def run(self) -> None:
        """Take every action that can be taken."""
        waiters: dict[int, list[int]] = {}
        ready = list(range(len(self.rows)))[::-1]
        while ready:
            rank = ready.pop()
            row, at = self.rows[rank], self.position[rank]
            while at < len(row):
                missing = self._take(rank, row[at])
                if missing is not None:
                    self.blocked[rank] = missing
                    waiters.setdefault(missing, []).append(rank)
                    break
                at += 1
                if self.lanes.finished:
                    for message in self.lanes.finished:
                        ready.extend(waiters.pop(message, ()))
                    self.lanes.finished.clear()
            else:
                self.blocked[rank] = None
            self.position[rank] = at
        if any(position < len(row) for position, row in zip(self.position, self.rows, strict=True)):
            self._refuse_standstill()
        self._check_ends()

    def proof(self) -> PlanProof:
        """The bounds that the walk has seen."""
        activations, receives, sends, unsharded = (tuple(peak) for peak in self.peaks)
        return PlanProof(activations, receives, sends, unsharded, tuple(self.sent))

    def _take(self, rank: int, action: Action) -> int | None:
        """Do an action, or return the message that it has to wait for."""
        kind = action.kind
        if kind is F or kind is B or kind is I or kind is W:
            missing = self._missing(rank, action)
            if missing is None:
                self._compute(rank, action)
            return missing
        if kind is Kind.OVERLAP:
            for leaf in action.parts:
                missing = self._missing(rank, leaf)
                if missing is not None:
                    return missing
            for leaf in action.parts:
                self._compute(rank, leaf)
            return None
        if kind is RECV_F or kind is RECV_B:
            self._receive(rank, action)
        elif kind is SEND_F or kind is SEND_B:
            self._send(rank, action)
        elif kind is WAIT_F or kind is WAIT_B:
            return self._wait(rank, action)
        else:
            self._data_parallel(rank, action)
        return None

    def _missing(self, rank: int, action: Action) -> int | None:
        """The message that a compute action has to wait for, after checking what must come before it on its own rank."""
        stage, kind, microbatch = action.stage, action.kind, action.microbatch or 0
        at = stage * self.m + microbatch
        if stage in self.gathers and stage not in self.unsharded[rank]:
            raise self._error(rank, action, f"{stage}UNSHARD must come before it, and {stage}RESHARD after it")
        if kind is W:
            if not self.split[at]:
                raise self._error(rank, action, f"{stage}I{microbatch} must come before it")
            return None
        if kind is F:
            if self.forward_done[at]:
                raise self._error(rank, action, "it is there twice")
            ports = self.messages.ports[RECV_F][stage]
            for source in self.messages.local_sources[stage]:
                if not self.forward_done[source * self.m + microbatch]:
                    raise self._error(
                        rank, action, f"{source}F{microbatch}, whose output it takes, must come before it"
                    )
        else:
            if not self.forward_done[at]:
                raise self._error(rank, action, f"{stage}F{microbatch} must come before it")
            if self.backward_done[at]:
                raise self._error(
                    rank, action, f"the backward of stage {stage}, microbatch {microbatch} is there twice"
                )
            ports = self.messages.ports[RECV_B][stage]
            for destination in self.messages.local_destinations[stage]:
                if not self.backward_done[destination * self.m + microbatch]:
                    raise self._error(
                        rank,
                        action,
                        f"the backward of stage {destination}, whose gradient it takes, must come before it",
                    )
        for port in ports:
            message = port.base + microbatch
            if not self.lanes.recv_posted[message]:
                raise self._error(rank, action, f"the RECV of {self.messages.describe(message)} must come before it")
            if not self.lanes.recv_done[message]:
                return message
        return None

    def _compute(self, rank: int, action: Action) -> None:
        stage, kind = action.stage, action.kind
        at = stage * self.m + (action.microbatch or 0)
        if kind is F:
            self.forward_done[at] = 1
            self.held[rank] += 1
            self.peaks[0][rank] = max(self.peaks[0][rank], self.held[rank])
            self.receives[rank] -= len(self.messages.ports[RECV_F][stage])
            return
        if kind is W:
            self.split[at] = 0
        else:
            self.backward_done[at] = 1
            self.receives[rank] -= len(self.messages.ports[RECV_B][stage])
            if kind is I:
                self.split[at] = 1
                return
        self.held[rank] -= 1
        self.left[stage] -= 1

    def _receive(self, rank: int, action: Action) -> None:
        numbers = self.messages.of_action(action)
        self._check_numbers(rank, action, numbers)
        for message in numbers:
            if self.lanes.recv_posted[message]:
                raise self._error(rank, action, f"{self.messages.describe(message)} is received twice")
        self.receives[rank] += len(numbers)
        self.peaks[1][rank] = max(self.peaks[1][rank], self.receives[rank])
        self.lanes.post(rank, numbers, is_send=False)

    def _send(self, rank: int, action: Action) -> None:
        stage, microbatch = action.stage, action.microbatch or 0
        numbers = self.messages.of_action(action)
        self._check_numbers(rank, action, numbers)
        done = self.forward_done if action.kind is SEND_F else self.backward_done
        if not done[stage * self.m + microbatch]:
            made_by = f"{stage}F{microbatch}" if action.kind is SEND_F else f"the backward of stage {stage}"
            raise self._error(rank, action, f"{made_by}, which makes what it sends, must come before it")
        for message in numbers:
            if self.lanes.send_posted[message]:
                raise self._error(rank, action, f"{self.messages.describe(message)} is sent twice")
        self.sends[rank] += len(numbers)
        self.sent[rank] += len(numbers)
        self.peaks[2][rank] = max(self.peaks[2][rank], self.sends[rank])
        self.lanes.post(rank, numbers, is_send=True)

    def _wait(self, rank: int, action: Action) -> int | None:
        numbers = self.messages.of_action(action)
        self._check_numbers(rank, action, numbers)
        for message in numbers:
            if not self.lanes.send_posted[message]:
                raise self._error(rank, action, f"the SEND of {self.messages.describe(message)} must come before it")
            if self.waited[message]:
                raise self._error(rank, action, f"{self.messages.describe(message)} is waited for twice")
            if not self.lanes.send_done[message]:
                return message
        for message in numbers:
            self.waited[message] = 1
        self.sends[rank] -= len(numbers)
        return None

    def _data_parallel(self, rank: int, action: Action) -> None:
        unsharded, stage = self.unsharded[rank], action.stage
        if action.kind is Kind.UNSHARD:
            if stage in unsharded:
                raise self._error(rank, action, f"stage {stage} is gathered already")
            unsharded.add(stage)
            self.peaks[3][rank] = max(self.peaks[3][rank], len(unsharded))
        elif action.kind is Kind.RESHARD:
            if stage not in unsharded:
                raise self._error(rank, action, f"stage {stage} is not gathered")
            unsharded.remove(stage)
        elif self.left[stage]:
            raise self._error(rank, action, f"{self.left[stage]} backwards of stage {stage} come after it")

    def _check_numbers(self, rank: int, action: Action, numbers: tuple[int, ...]) -> None:
        if not numbers:
            raise self._error(rank, action, "no other rank is at the other end of it")

    def _error(self, rank: int, action: Action, why: str) -> ScheduleError:
        return ScheduleError(f"{self.name}: {action} on rank {rank} (action {self.position_of(rank, action)}): {why}")

    def position_of(self, rank: int, action: Action) -> int:
        """Where the action stands in its rank's list."""
        row = self.rows[rank]
        return next((i for i, a in enumerate(row) if a is action or action in a.parts), len(row))

    def _check_ends(self) -> None:
        """Nothing is left out or posted at one end only, and the two ends of every channel agree on the order."""
        lanes = self.lanes
        if lanes.send_posted != lanes.recv_posted:
            for message in range(len(self.messages)):
                if lanes.send_posted[message] != lanes.recv_posted[message]:
                    there, missing = ("sent", "received") if lanes.send_posted[message] else ("received", "sent")
                    raise ScheduleError(
                        f"{self.name}: {self.messages.describe(message)} is {there} but never {missing}"
                    )
        lanes.check_order(self.name)

    def _refuse_standstill(self) -> None:
        """Say who waits for whom."""
        self.lanes.check_order(self.name)  # crossed orders explain more than the standstill that follows from them
        waiting: dict[int, int] = {
            rank: message
            for rank, message in enumerate(self.blocked)
            if message is not None and self.position[rank] < len(self.rows[rank])
        }
        rank = min(waiting)
        story: list[str] = []
        seen: dict[int, int] = {}
        while rank in waiting and rank not in seen:
            seen[rank] = len(story)
            why, rank = self._why(rank, waiting[rank])
            story.append(why)
        if rank in waiting:  # a circle; leave out what only leads to it
            raise DeadlockError(f"{self.name} would never end: {'; '.join(story[seen[rank] :])}")
        raise ScheduleError(f"{self.name}: {story[-1]}, but rank {rank} reaches its end without doing so")

    def _why(self, rank: int, message: int) -> tuple[str, int]:
        """Why a rank waits, in words, and the rank that it waits for."""
        action = self.rows[rank][self.position[rank]]
        why = f"rank {rank} waits in {action} for {self.messages.describe(message)}"
        behind, culprit = self.lanes.culprit(rank, message)
        if behind:
            why += f", {behind}"
        edge = self.messages.edge(message)
        if not behind:
            verb = "send it" if culprit == edge.source else "post its receive"
            why += f", and rank {culprit} has yet to {verb}"
        return why, culprit
