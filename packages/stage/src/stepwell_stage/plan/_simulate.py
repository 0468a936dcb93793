"""What a plan takes in time and memory, without running it.

Each rank is a clock. A compute action starts when its rank is free and what it takes has arrived; a message starts when both ends
have posted it and the one before it on the same edge has left. One pass over the actions, whatever their number.
"""

from __future__ import annotations

from array import array

import attrs

from ..exceptions import ScheduleError
from ._action import Action, Kind
from ._costs import Costs
from ._lower import Plan
from ._messages import Messages
from ._timeline import Event, Timeline


@attrs.frozen
class Simulation:
    """What came out; each tuple holds one number per rank.

    Attributes:
        plan: what was simulated.
        makespan: seconds from the start of the step to the end of its last action.
        busy: seconds of compute.
        peak_activations: microbatches of a stage held between their F and their B or W, at most.
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

    @property
    def bubble(self) -> float:
        """Share of all ranks' time in which they do not compute."""
        return 1 - sum(self.busy) / (len(self.busy) * self.makespan) if self.makespan else 0.0

    def bubble_of(self, rank: int) -> float:
        """Share of one rank's time in which it does not compute."""
        return 1 - self.busy[rank] / self.makespan if self.makespan else 0.0

    @property
    def critical_path(self) -> tuple[tuple[int, Action], ...]:
        """Rank and compute action of each link of the chain that decides the makespan, first to last."""
        rank = max(range(len(self.ends)), key=lambda r: self.ends[r][-1] if self.ends[r] else 0.0)
        at = len(self.ends[rank]) - 1
        path = []
        while at >= 0:
            action = self.plan.actions[rank][at]
            if action.kind.is_compute:
                path.append((rank, action))
            rank, at = self._causes.get((rank, at), (rank, at - 1))
        return tuple(reversed(path))

    @property
    def timeline(self) -> Timeline:
        """Every compute action and every wait, for drawing."""
        events = []
        for rank, row in enumerate(self.plan.actions):
            clock = 0.0
            for action, start, end in zip(row, self.starts[rank], self.ends[rank], strict=True):
                if action.kind.is_compute:
                    if start > clock:
                        kind = Kind.RECV_F if action.leaves[0].kind is Kind.F else Kind.RECV_B
                        events.append(Event(rank, Action(action.stage, kind, action.microbatch), clock, start))
                    events.append(Event(rank, action, start, end))
                    clock = end
                elif end > start:
                    events.append(Event(rank, action, start, end))
                    clock = end if action.kind not in _BESIDE else clock
        return Timeline(events, f"{self.plan.schedule.name}, simulated")


_BESIDE = (Kind.UNSHARD, Kind.REDUCE_GRAD)  # they take time, but not the rank's own


def simulate(plan: Plan, costs: Costs) -> Simulation:
    """Run a plan on paper. Linear in the number of actions.

    Example::

        simulate(lower(one_f_one_b(4, 8)), Costs.uniform(4)).bubble   # 3/11

    Args:
        plan: a lowered schedule.
        costs: what each action and each message takes.

    Raises:
        ScheduleError: costs are for another number of stages; or the plan cannot run to its end, see :func:`prove`.
    """
    if costs.num_stages != plan.placement.num_stages:
        raise ScheduleError(
            f"the plan has {plan.placement.num_stages} stages but costs are given for {costs.num_stages}"
        )
    return _Clocks(plan, costs).run()


class _Clocks:
    """One run of :func:`simulate`."""

    def __init__(self, plan: Plan, costs: Costs) -> None:
        self.plan = plan
        self.costs = costs
        self.messages = messages = Messages.of(plan.placement, plan.links, plan.num_microbatches)
        ranks = range(len(plan.actions))
        self.clock = [0.0 for _ in ranks]
        self.busy = [0.0 for _ in ranks]
        self.starts, self.ends = [array("d") for _ in ranks], [array("d") for _ in ranks]
        self.sent = [-1.0] * len(messages)  # when the sender posted it, -1 for not yet
        self.posted = [-1.0] * len(messages)  # when the receiver did
        self.arrival = [-1.0] * len(messages)  # when it is there
        self.sent_at = [0] * len(messages)  # where in the sender's list its SEND stands
        edges = [messages.edge(link * messages.num_microbatches) for link in range(2 * len(messages.links))]
        numbers = {edge: number for number, edge in enumerate(dict.fromkeys(edges))}
        self.edge_of_link = [numbers[edge] for edge in edges]
        self.edge_free = [0.0] * len(numbers)
        self.causes: dict[tuple[int, int], tuple[int, int]] = {}
        half = len(messages.links)
        self.flight, self.on_wire = [], []
        for number, edge in enumerate(edges):
            source, destination = messages.links[number % half]
            size = costs.message_bytes(source, destination)
            latency, bandwidth = costs.link(edge.source, edge.destination)
            self.on_wire.append(size / bandwidth)
            self.flight.append(latency + size / bandwidth)
        self.collective = [0.0 for _ in ranks]  # when a rank's collectives are through
        self.gathered = [0.0] * plan.placement.num_stages
        self.held, self.held_bytes = [0 for _ in ranks], [0 for _ in ranks]
        self.peak, self.peak_bytes = [0 for _ in ranks], [0 for _ in ranks]
        self.tables: dict[Kind, tuple[float, ...]] = {
            Kind.F: costs.forward,
            Kind.B: costs.backward,
            Kind.I: costs.input_costs,
            Kind.W: costs.weight_costs,
        }

    def run(self) -> Simulation:
        plan = self.plan
        waiters: dict[int, list[int]] = {}
        position = [0] * len(plan.actions)
        ready = list(range(len(plan.actions)))[::-1]
        while ready:
            rank = ready.pop()
            row, at = plan.actions[rank], position[rank]
            while at < len(row):
                missing = self._take(rank, at, row[at], waiters, ready)
                if missing is not None:
                    waiters.setdefault(missing, []).append(rank)
                    break
                at += 1
            position[rank] = at
        for rank, row in enumerate(plan.actions):
            if position[rank] < len(row):
                raise ScheduleError(
                    f"{plan.schedule.name}: {row[position[rank]]} on rank {rank} waits for ever; prove() says for what"
                )
        makespan = max([*self.clock, *self.collective])
        return Simulation(
            plan,
            makespan,
            tuple(self.busy),
            tuple(self.peak),
            tuple(self.peak_bytes),
            tuple(self.starts),
            tuple(self.ends),
            self.causes,
        )

    def _take(self, rank: int, at: int, action: Action, waiters: dict[int, list[int]], ready: list[int]) -> int | None:
        """Do an action, or return the message whose time is not known yet."""
        kind = action.kind
        start = self.clock[rank]
        if kind in self.tables or kind is Kind.OVERLAP:
            for leaf in action.parts or (action,):
                if leaf.kind is Kind.W:
                    continue
                ports = self.messages.ports[Kind.RECV_F if leaf.kind is Kind.F else Kind.RECV_B][leaf.stage]
                for port in ports:
                    message = port.base + (leaf.microbatch or 0)
                    arrival = self.arrival[message]
                    if arrival < 0:
                        return message
                    if not self.costs.overlap:  # the receiver takes it itself, and computes only then
                        arrival = max(start, self.sent[message]) + self.flight[message // self.plan.num_microbatches]
                    if arrival > start:
                        start = arrival
                        self._blame(rank, at, message)
                start = max(start, self.gathered[leaf.stage])
            end = start + self._duration(action)
            self.busy[rank] += end - start
            for leaf in action.parts or (action,):
                self._hold(rank, leaf)
        elif kind is Kind.RECV_F or kind is Kind.RECV_B:
            end = start
            for message in self.messages.of_action(action):
                self.posted[message] = start
                if self.sent[message] >= 0:
                    self._meet(message, waiters, ready)
        elif kind is Kind.SEND_F or kind is Kind.SEND_B:
            end = start
            for message in self.messages.of_action(action):
                self.sent[message] = end
                self.sent_at[message] = at
                if self.posted[message] >= 0 or self.costs.eager:
                    self._meet(message, waiters, ready)
                if not self.costs.overlap:
                    end += self.flight[message // self.plan.num_microbatches]
        elif kind is Kind.WAIT_F or kind is Kind.WAIT_B:
            end = start
            for message in () if self.costs.eager or not self.costs.overlap else self.messages.of_action(action):
                if self.arrival[message] < 0:
                    return message
                end = max(end, self.arrival[message])
        else:
            start, end = self._collective(rank, action)
            self.starts[rank].append(start)
            self.ends[rank].append(end)
            self.clock[rank] += self.costs.per_action
            return None
        end += self.costs.per_action
        self.starts[rank].append(start)
        self.ends[rank].append(end)
        self.clock[rank] = end
        return None

    def _duration(self, action: Action) -> float:
        if not action.parts:
            return self.tables[action.kind][action.stage]
        first, second = (self.tables[part.kind][part.stage] for part in action.parts)
        return first + second - self.costs.overlap_gain * min(first, second)

    def _meet(self, message: int, waiters: dict[int, list[int]], ready: list[int]) -> None:
        """Both ends are there: the message travels."""
        link = message // self.plan.num_microbatches
        edge = self.edge_of_link[link]
        start = max(self.sent[message], self.edge_free[edge])
        if not self.costs.eager:
            start = max(start, self.posted[message])
        self.edge_free[edge] = start + self.on_wire[link]
        self.arrival[message] = start + self.flight[link]
        ready.extend(waiters.pop(message, ()))

    def _blame(self, rank: int, at: int, message: int) -> None:
        """The start of an action was decided by a message: by its sender, or by this rank's own late receive."""
        if self.costs.eager or self.sent[message] >= self.posted[message]:
            source = self.messages.edge(message).source
            self.causes[rank, at] = (source, self.sent_at[message])

    def _hold(self, rank: int, action: Action) -> None:
        stage, kind = action.stage, action.kind
        size = self.costs.activation_bytes[stage]
        if kind is Kind.F:
            self.held[rank] += 1
            self.held_bytes[rank] += size
            self.peak[rank] = max(self.peak[rank], self.held[rank])
            self.peak_bytes[rank] = max(self.peak_bytes[rank], self.held_bytes[rank])
            return
        kept = self.costs.kept_bytes[stage]  # what I leaves for W
        if kind is Kind.I:
            self.held_bytes[rank] -= size - kept
            return
        self.held[rank] -= 1
        self.held_bytes[rank] -= kept if kind is Kind.W else size

    def _collective(self, rank: int, action: Action) -> tuple[float, float]:
        """UNSHARD and REDUCE_GRAD run beside compute, one after the other."""
        if action.kind is Kind.RESHARD:
            return self.clock[rank], self.clock[rank]
        start = max(self.clock[rank], self.collective[rank])
        end = start + (self.costs.unshard if action.kind is Kind.UNSHARD else self.costs.reduce_grad)[action.stage]
        self.collective[rank] = end
        if action.kind is Kind.UNSHARD:
            self.gathered[action.stage] = end
        return start, end
