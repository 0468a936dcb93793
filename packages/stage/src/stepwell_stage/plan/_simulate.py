"""What a plan takes in time and memory, without running it.

Each rank is a clock. A compute action starts when its rank is free and what it takes has arrived; a message starts when both ends
have posted it and the one before it on the same edge has left. One pass over the actions, whatever their number.

Overlapped pairs are taken as the executor takes them. Where costs say what they save, a handler runs each as one action: what its
forward made leaves when the pair is over. Else they run apart, see :meth:`Plan.with_pairs_apart`.
"""

from __future__ import annotations

from array import array

import attrs

from stepwell_p2p._transport import Rules

from ..exceptions import ScheduleError
from ._action import Action, Kind
from ._costs import Costs
from ._count import whole
from ._lower import Plan
from ._messages import Messages
from ._pause import collector_paused
from ._prove import prove
from ._require import require
from ._timeline import Event, Timeline


@attrs.frozen
class Simulation:
    """What came out; each tuple holds one number per rank.

    Attributes:
        plan: what was simulated: with pairs apart, unless costs say what they save as one.
        makespan: seconds from the start of the step to the end of its last action.
        busy: seconds of compute.
        peak_activations: microbatches of a stage held between their F and their B or W, at most; 0 where nothing runs backward.
        peak_bytes: bytes of activations held, at most.
        starts: for each action of each rank, when it began, waiting apart.
        ends: for each action of each rank, when it ended.
    """

    plan: Plan
    makespan: float
    busy: tuple[float, ...]
    peak_activations: tuple[int, ...]
    peak_bytes: tuple[int, ...]
    starts: tuple[array[float], ...] = attrs.field(repr=False, eq=False)
    ends: tuple[array[float], ...] = attrs.field(repr=False, eq=False)
    _causes: dict[tuple[int, int], tuple[int, int]] = attrs.field(repr=False, eq=False)
    _per_action: float = attrs.field(repr=False, eq=False)

    @property
    def bubble(self) -> float:
        """Share of all ranks' time in which they do not compute."""
        return 1 - sum(self.busy) / (len(self.busy) * self.makespan) if self.makespan else 0.0

    def bubble_of(self, rank: int) -> float:
        """Share of one rank's time in which it does not compute."""
        rank = whole(rank, "rank")
        if not 0 <= rank < len(self.busy):
            raise ScheduleError(f"the ranks are 0 to {len(self.busy) - 1}, got {rank}")
        return 1 - self.busy[rank] / self.makespan if self.makespan else 0.0

    @property
    def critical_path(self) -> tuple[tuple[int, Action], ...]:
        """Rank and compute action of each link of the chain that decides the makespan, first to last."""
        latest = [max(ends, default=0.0) for ends in self.ends]
        rank = latest.index(max(latest))
        at = self.ends[rank].index(latest[rank]) if self.ends[rank] else -1
        path = []
        while at >= 0:
            action = self.plan.actions[rank][at]
            if action.kind.is_compute:
                path.append((rank, action))
            if (rank, at) in self._causes:
                rank, at = self._causes[rank, at]
                continue
            at -= 1
            while at >= 0 and self.plan.actions[rank][at].kind in _BESIDE:  # the rank went on at once
                at -= 1
        return tuple(reversed(path))

    @property
    def timeline(self) -> Timeline:
        """Every compute action and every wait, for drawing."""
        events = []
        for rank, row in enumerate(self.plan.actions):
            clock = 0.0
            for at, (action, start, end) in enumerate(zip(row, self.starts[rank], self.ends[rank], strict=True)):
                before, clock = clock, clock + self._per_action
                if action.kind in _BESIDE:
                    if end > start:
                        events.append(Event(rank, action, start, end))
                    continue
                if action.kind.is_compute:
                    if start > clock and not self._gathers(rank, at):
                        kind = Kind.RECV_F if action.leaves[0].kind is Kind.F else Kind.RECV_B
                        events.append(Event(rank, Action(action.stage, kind, action.microbatch), clock, start))
                    events.append(Event(rank, action, start, end))
                elif end > before:
                    events.append(Event(rank, action, before, end))
                clock = end
        return Timeline(events, f"{self.plan.schedule.name}, simulated")

    def _gathers(self, rank: int, at: int) -> bool:
        """Whether a compute action was late for its parameters, and not for a message."""
        cause = self._causes.get((rank, at))
        return cause is not None and cause[0] == rank and self.plan.actions[rank][cause[1]].kind is Kind.UNSHARD


# Members of an enum are looked up through Python code before 3.12; the loop below asks for them millions of times.
F, B, I, W = Kind.F, Kind.B, Kind.I, Kind.W  # noqa: E741 - the field's names
SEND_F, SEND_B, RECV_F, RECV_B = Kind.SEND_F, Kind.SEND_B, Kind.RECV_F, Kind.RECV_B
WAIT_F, WAIT_B, CUSTOM, OVERLAP, RESHARD = Kind.WAIT_F, Kind.WAIT_B, Kind.CUSTOM, Kind.OVERLAP, Kind.RESHARD

_BESIDE = (Kind.UNSHARD, Kind.REDUCE_GRAD)  # they take time, but not the rank's own


@collector_paused()
def simulate(plan: Plan, costs: Costs) -> Simulation:
    """Run a plan on paper. Linear in the number of actions.

    Example::

        simulate(lower(one_f_one_b(4, 8)), Costs.uniform(4)).bubble   # 3/11

    Args:
        plan: a lowered schedule.
        costs: what each action and each message takes; with an ``overlap_gain`` where a handler runs overlapped pairs.

    Raises:
        ScheduleError: ``plan`` is none, or costs are for another number of stages or name other ranks; or as :func:`prove`.
        DeadlockError: as :func:`prove`.
    """
    require(plan, Plan, "simulate() takes a plan", "lower(schedule) makes one")
    require(costs, Costs, "simulate() takes Costs", "Costs.uniform(num_stages) are the simplest")
    if costs.num_stages != plan.placement.num_stages:
        raise ScheduleError(
            f"the plan has {plan.placement.num_stages} stages but costs are given for {costs.num_stages}"
        )
    ranks = range(len(plan.actions))
    beyond = next((edge for edge in costs.edges if edge.source not in ranks or edge.destination not in ranks), None)
    if beyond is not None:
        raise ScheduleError(f"{beyond} leads from or to a rank that is not there: ranks are 0 to {len(ranks) - 1}")
    if not _all_there(plan):
        prove(plan, Rules(tagged=True, rendezvous=False))  # says what is not there
    return _Clocks(plan.with_pairs_apart() if costs.overlap_gain is None else plan, costs).run()


def _all_there(plan: Plan) -> bool:
    """Whether every action, and every part of an overlapped pair, is of stages and microbatches that the plan has."""
    stages, microbatches = {*range(plan.placement.num_stages)}, {*range(plan.num_microbatches), None}
    for row in filter(None, plan.actions):  # by columns, for there are millions
        parts = (part for action in row if action[4] for part in action[4])
        own, _, of, peers, _, _ = zip(*row, *parts, strict=True)
        if not (stages.issuperset(own) and microbatches.issuperset(of) and (stages | {None}).issuperset(peers)):
            return False
    return True


class _Clocks:
    """One run of :func:`simulate`. Facts about messages are in plain lists by number, for the loop runs millions of times."""

    def __init__(self, plan: Plan, costs: Costs) -> None:
        self.plan = plan
        self.costs = costs
        self.messages = messages = Messages.of(plan.placement, plan.links, plan.num_microbatches)
        ranks = range(len(plan.actions))
        self.clock = [0.0 for _ in ranks]
        self.busy = [0.0 for _ in ranks]
        self.starts, self.ends = ([array("d", bytes(8 * len(row))) for row in plan.actions] for _ in range(2))
        self.sent = [-1.0] * len(messages)  # when the sender posted it, -1 for not yet
        self.posted = [0.0 if costs.eager else -1.0] * len(messages)  # when the receiver did
        self.arrival = [-1.0] * len(messages)  # when it is there
        # Where its SEND and its RECV stand, and which of the two, its own or an earlier message's, made it leave when it did.
        # A place is a position in a rank's list, times the number of ranks, plus the rank.
        self.sent_at, self.posted_at, self.left_by = ([0] * len(messages) for _ in range(3))
        edges = [messages.edge(link * messages.num_microbatches) for link in range(2 * len(messages.links))]
        numbers = {edge: number for number, edge in enumerate(dict.fromkeys(edges))}
        self.edge_of_link = [numbers[edge] for edge in edges]
        self.edge_free = [0.0] * len(numbers)
        self.edge_taken_by = [0] * len(numbers)  # what made the last message on it leave when it did: a place
        self.causes: dict[tuple[int, int], tuple[int, int]] = {}
        self.flight, self.on_wire = [], []
        for number, edge in enumerate(edges):
            source, _ = messages.links[number % len(messages.links)]
            latency, bandwidth = costs.link(edge.source, edge.destination)
            self.on_wire.append(costs.output_bytes[source] / bandwidth)
            self.flight.append(latency + costs.output_bytes[source] / bandwidth)
        self.keeps = plan.schedule.has_backward  # else no F leaves anything behind
        self.kept_bytes = costs.bytes_for_weights
        self.collective = [0.0 for _ in ranks]  # when a rank's collectives are through
        self.last_collective = [0 for _ in ranks]  # where the last of them stands
        self.gathered = [0.0] * plan.placement.num_stages
        self.gathered_at = [0] * plan.placement.num_stages  # the place of the UNSHARD
        self.held, self.held_bytes = [0 for _ in ranks], [0 for _ in ranks]
        self.peak, self.peak_bytes = [0 for _ in ranks], [0 for _ in ranks]
        self.tables: dict[Kind, tuple[float, ...]] = {
            F: costs.forward,
            B: costs.backward,
            I: costs.input_costs,
            W: costs.weight_costs,
        }
        # The first message of each port, by what a SEND, RECV or WAIT moves and by what a compute action takes.
        bases = {
            kind: tuple(tuple(port.base for port in ports) for ports in rows) for kind, rows in messages.ports.items()
        }
        nothing: tuple[tuple[int, ...], ...] = ((),) * plan.placement.num_stages
        self.moved = bases | {Kind.WAIT_F: bases[Kind.SEND_F], Kind.WAIT_B: bases[Kind.SEND_B]}
        self.taken = {F: bases[RECV_F], B: bases[RECV_B], I: bases[RECV_B], W: nothing}
        self.count = plan.num_microbatches
        self.waiters: dict[int, list[int]] = {}
        self.ready = list(ranks)[::-1]

    def run(self) -> Simulation:
        """Let every rank go as far as it can, until all are through."""
        plan = self.plan
        position = [0] * len(plan.actions)
        while self.ready:
            rank = self.ready.pop()
            position[rank] = self._advance(rank, position[rank])
        if any(at < len(row) for at, row in zip(position, plan.actions, strict=True)):
            prove(plan, Rules(tagged=True, rendezvous=self.costs.overlap and not self.costs.eager))
            raise AssertionError("a plan that is proved comes to its end")
        return Simulation(
            plan,
            max([*self.clock, *self.collective]),
            tuple(self.busy),
            tuple(self.peak),
            tuple(self.peak_bytes),
            tuple(self.starts),
            tuple(self.ends),
            self.causes,
            self.costs.per_action,
        )

    def _advance(self, rank: int, at: int) -> int:
        """Take a rank's actions from a position on; where it stops."""
        row, per_action, num_ranks = self.plan.actions[rank], self.costs.per_action, len(self.plan.actions)
        tables, taken, moved = self.tables, self.taken, self.moved
        sent, posted, arrival = self.sent, self.posted, self.arrival
        sent_at, posted_at, left_by = self.sent_at, self.posted_at, self.left_by
        starts, ends = self.starts[rank], self.ends[rank]
        blocking, eager, count = not self.costs.overlap, self.costs.eager, self.count
        gathered = self.gathered
        now, busy = self.clock[rank], self.busy[rank]
        stopped = -1
        while at < len(row):
            action = row[at]
            stage, kind, number, peer, _, _ = action
            microbatch = number or 0
            start = end = now + per_action
            late = -1  # what it is late for: a place
            if kind is SEND_F or kind is SEND_B:
                for base in moved[kind][stage]:
                    message = base + microbatch
                    sent[message], sent_at[message] = end, at * num_ranks + rank
                    if posted[message] >= 0:
                        self._meet(message)
                    if blocking:
                        end += self.flight[message // count]
            elif kind is RECV_F or kind is RECV_B:
                if not eager:
                    numbers = moved[kind][stage] if peer is None else (self.messages.of_action(action)[0] - microbatch,)
                    for base in numbers:
                        message = base + microbatch
                        posted[message], posted_at[message] = end, at * num_ranks + rank
                        if sent[message] >= 0:
                            self._meet(message)
            elif kind in tables:
                for base in taken[kind][stage]:
                    message = base + microbatch
                    there = arrival[message]
                    if there < 0:
                        stopped = message
                        break
                    if blocking:
                        late = sent_at[message] if sent[message] > start else late
                        start = self._taken_by_hand(message, start)
                    elif there > start:
                        start, late = there, left_by[message]
                if stopped >= 0:
                    break
                if gathered[stage] > start:
                    start, late = gathered[stage], self.gathered_at[stage]
                end = start + tables[kind][stage]
                busy += end - start
                self._hold(rank, kind, stage)
            elif kind is WAIT_F or kind is WAIT_B:
                if not eager and not blocking:
                    for base in moved[kind][stage]:
                        there = arrival[base + microbatch]
                        if there < 0:
                            stopped = base + microbatch
                            break
                        if there > end:
                            end, late = there, left_by[base + microbatch]
                    if stopped >= 0:
                        break
            elif kind is OVERLAP:
                stopped, start, late = self._pair_start(action, start)
                if stopped >= 0:
                    break
                end = start + self._pair_seconds(action)
                busy += end - start
                for leaf in action.parts:
                    self._hold(rank, leaf.kind, leaf.stage)
            elif kind is CUSTOM:
                end = start + self.costs.custom_cost(action.name, stage)
                busy += end - start
            elif kind is not RESHARD:  # beside compute: the rank itself goes on at once
                starts[at], ends[at] = self._collective(rank, action, start, at)
                now = start
                at += 1
                continue
            now = end
            starts[at], ends[at] = start, end
            if late >= 0:
                self.causes[rank, at] = late % num_ranks, late // num_ranks
            at += 1
        self.clock[rank], self.busy[rank] = now, busy
        if stopped >= 0:
            self.waiters.setdefault(stopped, []).append(rank)
        return at

    def _taken_by_hand(self, message: int, now: float) -> float:
        """When a message is there if the receiver has to stop for it."""
        return max(now, self.sent[message]) + self.flight[message // self.count]

    def _pair_start(self, action: Action, start: float) -> tuple[int, float, int]:
        """A message that is not known yet, else -1; when the pair can start; and what it is late for, else -1."""
        late = -1
        for leaf in action.parts:
            for base in self.taken[leaf.kind][leaf.stage]:
                message = base + (leaf.microbatch or 0)
                there = self.arrival[message]
                if there < 0:
                    return message, start, late
                if not self.costs.overlap:
                    late = self.sent_at[message] if self.sent[message] > start else late
                    start = self._taken_by_hand(message, start)
                elif there > start:
                    start, late = there, self.left_by[message]
            if self.gathered[leaf.stage] > start:
                start, late = self.gathered[leaf.stage], self.gathered_at[leaf.stage]
        return -1, start, late

    def _pair_seconds(self, action: Action) -> float:
        first, second = (self.tables[part.kind][part.stage] for part in action.parts)
        return first + second - (self.costs.overlap_gain or 0.0) * min(first, second)

    def _meet(self, message: int) -> None:
        """Both ends are there: the message travels once the one before it on its edge has left."""
        link = message // self.count
        edge = self.edge_of_link[link]
        start, posted, free = self.sent[message], self.posted[message], self.edge_free[edge]
        left_by = self.sent_at[message]
        if posted > start:
            start, left_by = posted, self.posted_at[message]
        if free > start:
            start, left_by = free, self.edge_taken_by[edge]
        self.left_by[message] = self.edge_taken_by[edge] = left_by
        self.edge_free[edge] = start + self.on_wire[link]
        self.arrival[message] = start + self.flight[link]
        if message in self.waiters:
            self.ready.extend(self.waiters.pop(message))

    def _hold(self, rank: int, kind: Kind, stage: int) -> None:
        size = self.costs.activation_bytes[stage]
        if kind is F:
            if not self.keeps:
                return
            held = self.held[rank] = self.held[rank] + 1
            held_bytes = self.held_bytes[rank] = self.held_bytes[rank] + size
            if held > self.peak[rank]:
                self.peak[rank] = held
            if held_bytes > self.peak_bytes[rank]:
                self.peak_bytes[rank] = held_bytes
            return
        kept = self.kept_bytes[stage]  # what I leaves for W
        if kind is I:
            self.held_bytes[rank] -= size - kept
            return
        self.held[rank] -= 1
        self.held_bytes[rank] -= kept if kind is W else size

    def _collective(self, rank: int, action: Action, now: float, at: int) -> tuple[float, float]:
        """UNSHARD and REDUCE_GRAD run beside compute, one after the other."""
        start = self.collective[rank]
        if start > now:
            self.causes[rank, at] = rank, self.last_collective[rank]
        else:
            start = now
        end = start + (self.costs.unshard if action.kind is Kind.UNSHARD else self.costs.reduce_grad)[action.stage]
        self.collective[rank], self.last_collective[rank] = end, at
        if action.kind is Kind.UNSHARD:
            self.gathered[action.stage], self.gathered_at[action.stage] = end, at * len(self.plan.actions) + rank
        return start, end
