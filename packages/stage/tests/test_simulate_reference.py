"""The simulation against another one, which knows nothing of waiting: it lets times grow until every rule holds."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepwell_stage import Action, Costs, CustomCost, EdgeCost, Kind, Plan, lower, simulate
from stepwell_stage.plan._random import random_links, random_schedule

VALUES, GRADIENTS = (Kind.SEND_F, Kind.RECV_F, Kind.WAIT_F), (Kind.SEND_B, Kind.RECV_B, Kind.WAIT_B)
Message = tuple[int, int, int]  # from which stage to which, microbatch


def random_costs(rng: random.Random, stages: int, ranks: int) -> Costs:
    """Any costs at all; no two sums of them are equal, but where something costs nothing."""

    def some(most: float) -> list[float]:
        return [rng.uniform(0.1, most) for _ in range(stages)]

    split = rng.random() < 0.5
    sizes = [rng.randint(1, 9) for _ in range(stages)]
    return Costs(
        some(3),
        some(5),
        backward_input=some(3) if split else None,
        backward_weight=some(3) if split else None,
        overlap_gain=rng.choice([None, 0.0, 0.3]),
        activation_bytes=sizes,
        kept_bytes=[rng.randint(0, size) for size in sizes] if rng.random() < 0.5 else None,
        output_bytes=[rng.randint(0, 9) for _ in range(stages)],
        latency=rng.choice([0.0, rng.uniform(0, 2)]),
        bandwidth=rng.choice([float("inf"), rng.uniform(1, 9)]),
        edges=[
            EdgeCost(*edge, rng.uniform(0, 2), rng.uniform(1, 9))
            for edge in itertools.permutations(range(ranks), 2)
            if rng.random() < 0.2
        ],
        overlap=rng.random() < 0.8,
        eager=rng.random() < 0.3,
        per_action=rng.choice([0.0, rng.uniform(0, 0.5)]),
        unshard=some(2) if rng.random() < 0.5 else (),
        reduce_grad=some(2) if rng.random() < 0.5 else (),
        custom=[
            CustomCost(name, rng.uniform(0, 2), stage) for name in "ab" for stage in range(stages) if rng.random() < 0.6
        ],
    )


def random_plan(rng: random.Random) -> Plan:
    schedule = random_schedule(rng, custom=True)
    stages = range(schedule.placement.num_stages)
    sharded = [stage for stage in stages if rng.random() < 0.3]
    reduced = [stage for stage in stages if rng.random() < 0.3] if schedule.has_backward else []
    return lower(schedule, random_links(rng, len(stages)), prefetch=rng.randrange(4), sharded=sharded, reduced=reduced)


def as_run(row: Sequence[Action]) -> Iterator[Action]:
    """A rank's actions as the executor runs them without handlers: what a pair's forward made leaves before its backward."""
    for before, action, after in zip((None, *row), row, (*row[1:], None), strict=False):
        if action.parts:
            yield action.parts[0]
            if after is not None and after.kind is Kind.SEND_F:
                yield after
            yield action.parts[1]
        elif action.kind is not Kind.SEND_F or before is None or not before.parts:
            yield action


class Reference:
    """Times of a plan: from nothing upwards, round by round, until nothing changes any more."""

    def __init__(self, plan: Plan, costs: Costs) -> None:
        self.plan, self.costs, self.ranks = plan, costs, plan.placement.ranks
        self.rows = tuple(tuple(as_run(row)) if costs.overlap_gain is None else row for row in plan.actions)
        self.tables = {
            Kind.F: costs.forward,
            Kind.B: costs.backward,
            Kind.I: costs.input_costs,
            Kind.W: costs.weight_costs,
        }
        self.sent: dict[Message, float] = {}
        self.posted: dict[Message, float] = {}
        self.arrival: dict[Message, float] = {}
        self.lanes: dict[tuple[int, int], list[Message]] = {}  # by edge, in the order of the sends
        for action in itertools.chain.from_iterable(self.rows):
            if action.kind in (Kind.SEND_F, Kind.SEND_B):
                for message in self.messages(action):
                    self.lanes.setdefault((self.ranks[message[0]], self.ranks[message[1]]), []).append(message)
        while True:
            before = dict(self.sent), dict(self.posted), dict(self.arrival)
            self.times = [list(self.row(rank)) for rank in range(len(self.rows))]
            self.travel()
            if before == (self.sent, self.posted, self.arrival):
                return

    def messages(self, action: Action) -> list[Message]:
        """What a SEND, RECV or WAIT concerns, by the stage at the other end."""
        outward = action.kind in (Kind.SEND_F, Kind.WAIT_F, Kind.SEND_B, Kind.WAIT_B)
        peers, microbatch = self.plan.peers(action), action.microbatch or 0
        return [(action.stage, peer, microbatch) if outward else (peer, action.stage, microbatch) for peer in peers]

    def taken(self, leaf: Action) -> list[Message]:
        if leaf.kind is Kind.F:
            return self.messages(Action(leaf.stage, Kind.RECV_F, leaf.microbatch))
        return self.messages(Action(leaf.stage, Kind.RECV_B, leaf.microbatch)) if leaf.kind.is_backward else []

    def on_wire(self, message: Message) -> tuple[float, float]:
        """How long it occupies its edge, and how long it takes from one end to the other."""
        latency, bandwidth = self.costs.link(self.ranks[message[0]], self.ranks[message[1]])
        occupied = self.costs.output_bytes[min(message[:2])] / bandwidth
        return occupied, latency + occupied

    def travel(self) -> None:
        for lane in self.lanes.values():
            free = 0.0
            for message in lane:
                posted = 0.0 if self.costs.eager else self.posted.get(message, 0.0)
                begin = max(self.sent[message], posted, free)
                occupied, flight = self.on_wire(message)
                free, self.arrival[message] = begin + occupied, begin + flight

    def row(self, rank: int) -> Iterator[tuple[float, float]]:
        """When each action of a rank starts and ends, as far as is known."""
        costs, now, collective = self.costs, 0.0, 0.0
        gathered: dict[int, float] = {}
        for action in self.rows[rank]:
            start = end = now = now + costs.per_action
            if action.kind in (Kind.UNSHARD, Kind.REDUCE_GRAD):
                start = max(now, collective)
                end = collective = (
                    start + (costs.unshard if action.kind is Kind.UNSHARD else costs.reduce_grad)[action.stage]
                )
                if action.kind is Kind.UNSHARD:
                    gathered[action.stage] = end
                yield start, end
                continue
            if action.kind in (Kind.SEND_F, Kind.SEND_B):
                for message in self.messages(action):
                    self.sent[message] = end
                    end += 0.0 if costs.overlap else self.on_wire(message)[1]
            elif action.kind in (Kind.RECV_F, Kind.RECV_B):
                self.posted |= dict.fromkeys(self.messages(action), now)
            elif action.kind in (Kind.WAIT_F, Kind.WAIT_B):
                if costs.overlap and not costs.eager:
                    end = max(now, *(self.arrival.get(message, 0.0) for message in self.messages(action)))
            elif action.kind is Kind.CUSTOM:
                end += sum(
                    cost.seconds for cost in costs.custom if (cost.name, cost.stage) == (action.name, action.stage)
                )
            elif action.kind is not Kind.RESHARD:
                for leaf in action.leaves:
                    for message in self.taken(leaf):
                        there = self.arrival.get(message, 0.0)
                        if not costs.overlap:
                            there = max(start, self.sent.get(message, 0.0)) + self.on_wire(message)[1]
                        start = max(start, there)
                    start = max(start, gathered.get(leaf.stage, 0.0))
                each = [self.tables[leaf.kind][leaf.stage] for leaf in action.leaves]
                end = start + sum(each) - ((costs.overlap_gain or 0.0) * min(each) if action.parts else 0.0)
            yield start, end
            now = end


def held(plan: Plan, rank: int, costs: Costs) -> tuple[int, int]:
    """Microbatches and bytes at most, action by action; none without a backward."""
    if not plan.schedule.has_backward:
        return 0, 0
    counts, sizes = [0], [0]
    for leaf in itertools.chain.from_iterable(action.leaves for action in plan.actions[rank]):
        whole, kept = costs.activation_bytes[leaf.stage], costs.bytes_for_weights[leaf.stage]
        change = {Kind.F: (1, whole), Kind.B: (-1, -whole), Kind.I: (0, kept - whole), Kind.W: (-1, -kept)}
        count, size = change.get(leaf.kind, (0, 0))
        counts.append(counts[-1] + count)
        sizes.append(sizes[-1] + size)
    return max(counts), max(sizes)


@given(seed=st.integers(0, 2**32))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_every_action_starts_and_ends_when_the_rules_say(seed: int) -> None:
    rng = random.Random(seed)
    plan = random_plan(rng)
    costs = random_costs(rng, plan.placement.num_stages, plan.placement.num_ranks)
    simulation, reference = simulate(plan, costs), Reference(plan, costs)
    assert simulation.plan.actions == reference.rows
    for rank, times in enumerate(reference.times):
        assert list(simulation.starts[rank]) == pytest.approx([start for start, _ in times])
        assert list(simulation.ends[rank]) == pytest.approx([end for _, end in times])
        assert (simulation.peak_activations[rank], simulation.peak_bytes[rank]) == held(plan, rank, costs)
    assert simulation.makespan == pytest.approx(max(end for times in reference.times for _, end in times))


@given(seed=st.integers(0, 2**32))
@settings(max_examples=150, deadline=None, derandomize=True)
def test_the_critical_path_is_what_decides_the_makespan(seed: int) -> None:
    """If everything a stage does takes a little longer, the step does so once for each time that it is on the path."""
    rng = random.Random(seed)
    plan = random_plan(rng)
    costs = random_costs(rng, plan.placement.num_stages, plan.placement.num_ranks)
    costs = attrs.evolve(costs, backward_input=costs.input_costs, backward_weight=costs.weight_costs)
    simulation, little = simulate(plan, costs), 1e-7
    fields = {Kind.F: "forward", Kind.B: "backward", Kind.I: "backward_input", Kind.W: "backward_weight"}
    shares: dict[
        tuple[Kind, int], float
    ] = {}  # how much each counts: the shorter of a pair less, by what the pair saves
    for _, action in simulation.critical_path:
        shorter = min(action.parts, key=lambda leaf: getattr(costs, fields[leaf.kind])[leaf.stage], default=None)
        for leaf in action.leaves:
            share = 1 - (costs.overlap_gain or 0.0) if leaf is shorter else 1
            shares[leaf.kind, leaf.stage] = shares.get((leaf.kind, leaf.stage), 0) + share
    for kind, field in fields.items():
        for stage, seconds in enumerate(getattr(costs, field)):
            longer = list(getattr(costs, field))
            longer[stage] = seconds + little
            change = simulate(plan, attrs.evolve(costs, **{field: longer})).makespan - simulation.makespan
            assert change / little == pytest.approx(shares.get((kind, stage), 0), abs=1e-3), (kind, stage)
