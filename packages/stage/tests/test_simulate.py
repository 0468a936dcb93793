"""Plans on paper: time, memory, and what decides them."""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Callable
from typing import Any

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepwell_p2p import Rules
from stepwell_p2p.exceptions import DeadlockError
from stepwell_stage import Action, Costs, CustomCost, EdgeCost, Kind, Plan, lower, prove, simulate
from stepwell_stage.exceptions import ScheduleError
from stepwell_stage.plan._random import random_schedule
from stepwell_stage.schedules import (
    BY_NAME,
    custom,
    dualpipe_v,
    gpipe,
    interleaved_1f1b,
    one_f_one_b,
    zb_h1,
)


def test_a_step_by_hand() -> None:
    simulation = simulate(lower(one_f_one_b(2, 2)), Costs.uniform(2))
    assert simulation.makespan == 9.0
    assert simulation.busy == (6.0, 6.0)
    assert simulation.bubble == pytest.approx(1 / 3)
    assert [simulation.bubble_of(rank) for rank in (0, 1)] == pytest.approx([1 / 3, 1 / 3])
    assert [f"{rank}:{action}" for rank, action in simulation.critical_path] == [
        "0:0F0",
        "1:1F0",
        "1:1B0",
        "1:1F1",
        "1:1B1",
        "0:0B1",
    ]


def test_unequal_stages_wait_for_the_slowest() -> None:
    simulation = simulate(lower(gpipe(3, 4)), Costs((1, 5, 1), (2, 10, 2)))
    assert simulation.makespan == 1 + 4 * 5 + 1 + 2 + 4 * 10 + 2
    assert [action.stage for _, action in simulation.critical_path if action.kind is Kind.F] == [0, 1, 1, 1, 1, 2]


def test_latency_adds_up_along_the_chain() -> None:
    plain, late = (
        simulate(lower(one_f_one_b(4, 1)), Costs.uniform(4, latency=latency)).makespan for latency in (0, 0.5)
    )
    assert late == plain + 6 * 0.5


def test_bandwidth_is_shared_by_the_messages_of_an_edge() -> None:
    # F takes no time, so both messages want the edge at once: each takes 4 s on it.
    costs = Costs((0, 0), (0, 0), output_bytes=(8, 0), bandwidth=2.0)
    assert simulate(lower(custom(["0F0 0F1", "1F0 1F1"])), costs).makespan == 8.0
    wide = attrs.evolve(costs, edges=[EdgeCost(0, 1, 0.5, 8.0)])
    assert simulate(lower(custom(["0F0 0F1", "1F0 1F1"])), wide).makespan == 2.5


def test_gradients_are_as_large_as_the_values_that_they_belong_to() -> None:
    costs = Costs((0, 0), (0, 0), output_bytes=(6, 100), bandwidth=2.0)
    assert simulate(lower(gpipe(2, 1)), costs).makespan == 6.0


def test_messages_that_do_not_overlap_stop_both_ends() -> None:
    costs = Costs.uniform(2, latency=1.0)
    assert simulate(lower(one_f_one_b(2, 4)), costs).makespan == 19
    by_hand = simulate(lower(one_f_one_b(2, 4)), attrs.evolve(costs, overlap=False))
    assert by_hand.makespan > 20
    # The first rank sends 4 values and takes 4 gradients, a second each, and computes for 12.
    assert by_hand.makespan >= 12 + 4 + 4
    assert by_hand.busy == (12.0, 12.0)


def test_a_late_receive_holds_back_a_message_unless_it_is_eager() -> None:
    plan = Plan(custom(["0F0", "1F0 2F0", "3F0"]), ((0, 1), (1, 2), (2, 3)), [[], [], []])
    rows = ["0F0 0SEND_F0 0WAIT_F0", "1RECV_F0 1F0 2F0 2SEND_F0 2WAIT_F0", "3RECV_F0 3F0"]
    plan = attrs.evolve(plan, actions=[map(Action.parse, row.split()) for row in rows])
    costs = Costs((1,) * 4, (0,) * 4, latency=2.0)
    assert simulate(plan, costs).makespan == 1 + 2 + 2 + 2 + 1
    late = attrs.evolve(
        plan,
        schedule=custom(["0F0 0F1 0F2", "1F0 1F1 1F2"]),
        links=((0, 1),),
        actions=[
            map(Action.parse, ["0F0", "0SEND_F0", "0F1", "0SEND_F1", "0F2", "0SEND_F2"]),
            map(Action.parse, ["1RECV_F0", "1F0", "1RECV_F1", "1F1", "1RECV_F2", "1F2"]),
        ],
    )
    costs = Costs((1, 3), (0, 0), latency=2.0)
    assert simulate(late, costs).makespan == 1 + 3 * (2 + 3)
    assert simulate(late, attrs.evolve(costs, eager=True)).makespan == 1 + 2 + 3 * 3


def test_the_executors_own_time_counts_for_every_action() -> None:
    plan = lower(custom(["0F0 0F1 0B0 0B1"]))
    assert simulate(plan, attrs.evolve(Costs.uniform(1), per_action=0.25)).makespan == 6 + 4 * 0.25


def test_actions_of_ones_own_take_what_costs_say() -> None:
    """They took nothing, whatever they did, so a schedule full of offloading looked as fast as one without."""
    plan = lower(custom(["0{save}0 0F0 0{load}0 0B0", "1F0 1{load}0 1B0"]))
    costs = Costs.uniform(2, forward=1, backward=2)
    assert simulate(plan, costs).makespan == 6
    dear = attrs.evolve(
        costs, custom=[CustomCost("load", 0.25, stage=1), CustomCost("load", 8.0), CustomCost("save", 5)]
    )
    simulation = simulate(plan, dear)
    assert simulation.makespan == 5 + 1 + 8 + 2  # the other rank's 1 + 0.25 + 2 pass meanwhile
    assert simulation.busy == (16.0, 3.25)
    assert [str(action) for _, action in simulation.critical_path] == ["0{save}0", "0F0", "0{load}0", "0B0"]
    assert simulation.timeline.bubble == pytest.approx(simulation.bubble)


def test_the_critical_path_follows_a_busy_edge_to_what_filled_it() -> None:
    """It went from a message that had queued to the action that had sent it, which had nothing to do with the delay."""
    plan = lower(custom(["0F0 0F1", "1F0 1F1"]))
    simulation = simulate(plan, Costs((1, 1), (0, 0), output_bytes=(10, 0), bandwidth=1.0))
    assert simulation.makespan == 1 + 10 + 10 + 1
    assert [str(action) for _, action in simulation.critical_path] == ["0F0", "1F1"]


def test_the_critical_path_does_not_run_through_what_a_message_passed() -> None:
    """A late receive held the message back, yet the path ran through what the receiver computed while it was on its way."""
    late = Plan(
        custom(["0F0 0F1", "1F0 1F1"]),
        ((0, 1),),
        [
            map(Action.parse, ["0F0", "0SEND_F0", "0F1", "0SEND_F1", "0WAIT_F0", "0WAIT_F1"]),
            map(Action.parse, ["1RECV_F0", "1F0", "1RECV_F1", "1F1"]),
        ],
    )
    simulation = simulate(late, Costs((1, 3), (0, 0), latency=5.0))
    assert simulation.makespan == 1 + 5 + 3 + 5 + 3
    assert [str(action) for _, action in simulation.critical_path] == ["0F0", "1F0", "1F1"]
    early = attrs.evolve(late, actions=[late.actions[0], map(Action.parse, ["1RECV_F0", "1RECV_F1", "1F0", "1F1"])])
    simulation = simulate(early, Costs((3, 1), (0, 0), latency=5.0))
    assert [str(action) for _, action in simulation.critical_path] == ["0F0", "0F1", "1F1"]


def test_who_waits_for_parameters_does_not_wait_for_a_message() -> None:
    """The picture showed a wait in a receive that the stage, the first, does not have."""
    simulation = simulate(lower(one_f_one_b(1, 1), sharded=[0]), Costs((1,), (2,), unshard=(4,)))
    assert [str(event.action) for event in simulation.timeline.events] == ["0UNSHARD", "0F0", "0B0"]
    assert [str(action) for _, action in simulation.critical_path] == ["0F0", "0B0"]
    assert simulation.bubble == simulation.timeline.bubble == pytest.approx(4 / 7)


def test_what_the_forward_of_a_pair_made_leaves_before_the_backward_of_the_pair_begins() -> None:
    """It left with the end of the pair, a whole backward late, where the executor sends it at once: steps beat their ideal."""
    schedule = custom(["0F0 0F1 0F2 0B0 0B1 0B2", "1F0 (1F1;1B0)OVERLAP_F_B 1F2 1B1 1B2", "2F0 2B0 2F1 2B1 2F2 2B2"])
    costs = Costs.uniform(3, backward=4.0)
    simulation = simulate(lower(schedule), costs)
    assert simulation.plan == lower(schedule).with_pairs_apart()
    found = {(str(event.action), event.rank): (event.start, event.end) for event in simulation.timeline.events}
    # Until 7 s rank 2 is in 2B0, whose gradient the pair's backward takes; the forward does not wait for it.
    assert found["1F1", 1] == (2, 3)
    assert found["1RECV_B0", 1] == (3, 7)
    assert found["1B0", 1] == (7, 11)
    assert found["2F1", 2] == (7, 8)
    assert [(rank, str(action)) for rank, action in simulation.critical_path][:3] == [
        (0, "0F0"),
        (1, "1F0"),
        (2, "2F0"),
    ]
    as_one = simulate(lower(schedule), attrs.evolve(costs, overlap_gain=0.0))
    assert as_one.plan == lower(schedule)
    starts = {str(event.action): event.start for event in as_one.timeline.events}
    assert starts["(1F1;1B0)OVERLAP_F_B"] == 7
    assert starts["2F1"] == 12


def test_overlapped_pairs_save_what_they_are_said_to() -> None:
    plan = lower(dualpipe_v(1, 4))
    pairs = sum(bool(action.parts) for action in plan.actions[0])
    costs = Costs.uniform(2)
    assert pairs > 0
    plain = simulate(plan, costs).makespan
    assert simulate(plan, attrs.evolve(costs, overlap_gain=0.5)).makespan == plain - 0.5 * pairs


def test_gathering_and_reducing_run_beside_compute() -> None:
    costs = Costs((1, 1), (2, 2), unshard=(4, 4), reduce_grad=(5, 5))
    schedule = one_f_one_b(2, 2)
    gathered = simulate(lower(schedule, sharded=[0, 1], reduced=[0, 1]), costs)
    assert gathered.makespan == 4 + 9 + 5  # the last backward is the first rank's
    assert gathered.busy == (6.0, 6.0)
    kinds = {event.action.kind for event in gathered.timeline.events}
    assert {Kind.UNSHARD, Kind.REDUCE_GRAD} <= kinds


def test_bytes_held() -> None:
    costs = attrs.evolve(Costs.uniform(4), activation_bytes=(10, 20, 30, 40))
    assert simulate(lower(one_f_one_b(4, 8)), costs).peak_bytes == (40, 60, 60, 40)
    assert simulate(lower(gpipe(4, 8)), costs).peak_bytes == (80, 160, 240, 320)


def test_what_the_weight_step_needs_stays_longer() -> None:
    whole = attrs.evolve(Costs.uniform(4), activation_bytes=(10,) * 4)
    part = attrs.evolve(whole, kept_bytes=(4,) * 4)
    assert simulate(lower(zb_h1(4, 8)), whole).peak_bytes == (40, 40, 40, 40)
    assert simulate(lower(zb_h1(4, 8)), part).peak_bytes == (40, 34, 28, 22)


@pytest.mark.parametrize("overlap_gain", [None, 0.25])
@pytest.mark.parametrize("per_action", [0.0, 0.02])
@pytest.mark.parametrize("name", BY_NAME)
def test_timeline_and_simulation_agree(name: str, per_action: float, overlap_gain: float | None) -> None:
    """Also where the executor takes time: the picture once counted that as compute, and its bubble was smaller."""
    schedule = BY_NAME[name](4, 6)
    costs = Costs.uniform(schedule.placement.num_stages, latency=0.3)
    costs = attrs.evolve(costs, per_action=per_action, overlap_gain=overlap_gain)
    simulation = simulate(lower(schedule), costs)
    timeline = simulation.timeline
    assert timeline.makespan == simulation.makespan
    assert timeline.bubble == pytest.approx(simulation.bubble)
    for rank in range(4):
        events = timeline.of_rank(rank)
        assert timeline.bubble_of(rank) == pytest.approx(simulation.bubble_of(rank))
        run = [action for action in simulation.plan.actions[rank] if action.kind.is_compute]
        assert [event.action for event in events if event.action.kind.is_compute] == run
        assert [leaf for action in run for leaf in action.leaves] == [
            leaf for action in schedule.actions[rank] for leaf in action.leaves
        ]
        assert all(a.end <= b.start + 1e-9 for a, b in itertools.pairwise(events))


@given(seed=st.integers(0, 2**32))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_no_faster_and_no_slower_than_what_every_action_needs(seed: int) -> None:
    rng = random.Random(seed)
    schedule = random_schedule(rng)
    stages = schedule.placement.num_stages
    costs = attrs.evolve(
        Costs([rng.randint(1, 9) for _ in range(stages)], [rng.randint(2, 9) for _ in range(stages)]),
        eager=True,
        overlap_gain=rng.choice([None, 0.0]),
    )
    simulation = simulate(lower(schedule, prefetch=rng.randrange(3)), costs)
    assert simulation.makespan == _longest_chain(simulation.plan, costs)
    path = simulation.critical_path
    assert sum(_cost(action, costs) for _, action in path) == simulation.makespan


def _cost(action: Action, costs: Costs) -> float:
    tables = {Kind.F: costs.forward, Kind.B: costs.backward, Kind.I: costs.input_costs, Kind.W: costs.weight_costs}
    return sum(tables[leaf.kind][leaf.stage] for leaf in action.leaves)


def _longest_chain(plan: Plan, costs: Costs) -> float:
    """By going over all actions until nothing changes."""
    end: dict[Action, float] = {}
    changed = True
    while changed:
        changed = False
        for row in plan.actions:
            clock = 0.0
            for action in (action for action in row if action.kind.is_compute):
                for stage, kind, microbatch, *_ in action.leaves:
                    before = {Kind.F: [Action(stage - 1, Kind.F, microbatch)], Kind.W: []}.get(
                        kind, [Action(stage + 1, Kind.B, microbatch), Action(stage + 1, Kind.I, microbatch)]
                    )
                    clock = max([clock, *(end.get(need, 0.0) for need in before)])
                clock += _cost(action, costs)
                for leaf in action.leaves:
                    changed |= end.get(leaf) != clock
                    end[leaf] = clock
    return max(end.values())


def test_costs_for_other_stages_are_refused() -> None:
    with pytest.raises(ScheduleError, match="the plan has 2 stages but costs are given for 3"):
        simulate(lower(gpipe(2, 2)), Costs.uniform(3))


def test_costs_of_edges_that_are_not_there_are_refused() -> None:
    """Ranks that were counted from 1 were passed over, and the slow edge with them."""
    costs = attrs.evolve(Costs.uniform(2), edges=[EdgeCost(1, 2, latency=9.0, bandwidth=1.0)])
    with pytest.raises(ScheduleError, match=r"EdgeCost\(source=1, destination=2, .* not there: ranks are 0 to 1"):
        simulate(lower(gpipe(2, 2)), costs)


def test_a_schedule_is_no_plan_yet() -> None:
    """Simulating a schedule that was not lowered ended in an AttributeError."""
    with pytest.raises(ScheduleError, match=r"simulate\(\) takes a plan, got a Schedule; lower\(schedule\) makes one"):
        simulate(gpipe(2, 2), Costs.uniform(2))  # type: ignore[arg-type]


def test_a_plan_that_cannot_end_is_refused() -> None:
    plan = lower(gpipe(2, 2))
    rows = [[action for action in row if str(action) != "0SEND_F1"] for row in plan.actions]
    with pytest.raises(ScheduleError, match=r"0WAIT_F1 on rank 0 .*: the SEND of the value of microbatch 1"):
        simulate(attrs.evolve(plan, actions=rows), Costs.uniform(2))
    rows[0] = [action for action in rows[0] if str(action) != "0WAIT_F1"]
    with pytest.raises(DeadlockError, match="rank 0 never sends it"):
        simulate(attrs.evolve(plan, actions=rows), Costs.uniform(2))


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (Action(1, Kind.WAIT_B, 5), "microbatches 0 to 1"),
        (Action(1, Kind.SEND_B, -1), "microbatches 0 to 1"),
        (Action(7, Kind.RECV_F, 0), "holds stages"),
        (Action(1, Kind.RECV_F, 0, peer=7), "7"),
        (Action(1, Kind.SEND_B, 0, peer=7), "7"),
        (Action.overlap(Action(1, Kind.F, 1), Action(9, Kind.B, 0)), "9"),
        (Action.overlap(Action(1, Kind.F, 1), Action(1, Kind.B, 9)), "9"),
    ],
)
def test_a_message_that_is_not_there_is_refused(wrong: Action, sentence: str) -> None:
    """It ended in an IndexError, or another message counted in its place."""
    plan = lower(gpipe(2, 2))
    with pytest.raises(ScheduleError, match=sentence):
        simulate(attrs.evolve(plan, actions=[plan.actions[0], (*plan.actions[1], wrong)]), Costs.uniform(2))


def test_work_grows_with_actions_alone() -> None:
    """Making, lowering, proving and simulating: as many calls for each action, however many ranks or microbatches there are."""

    def calls_per_action(num_ranks: int, num_microbatches: int) -> list[float]:
        counts = []

        def counted(function: Callable[[], Any]) -> Any:
            counts.append(0)
            sys.setprofile(lambda frame, event, argument: counts.__setitem__(-1, counts[-1] + 1))
            try:
                return function()
            finally:
                sys.setprofile(None)

        schedule = counted(lambda: interleaved_1f1b(num_ranks, num_microbatches))
        plan = counted(lambda: lower(schedule))
        counted(lambda: prove(plan, Rules(tagged=False, rendezvous=True)))
        counted(lambda: simulate(plan, Costs.uniform(2 * num_ranks)))
        return [count / sum(map(len, plan.actions)) for count in counts]

    small = calls_per_action(8, 16)
    for num_ranks, num_microbatches in ((8, 128), (64, 16)):
        for before, after in zip(small, calls_per_action(num_ranks, num_microbatches), strict=True):
            assert after < 1.25 * before  # quadratic would be 8 times
