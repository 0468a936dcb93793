"""What lowering puts in, and where."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepwell_p2p import Placement, Rules
from stepwell_stage import Action, Kind, Plan, Schedule, lower, prove
from stepwell_stage.exceptions import ScheduleError
from stepwell_stage.plan._random import random_links, random_schedule
from stepwell_stage.schedules import BY_NAME, forward_only, gpipe, one_f_one_b

FIFO = Rules(tagged=False, rendezvous=True)
RECV = (Kind.RECV_F, Kind.RECV_B)
SEND = (Kind.SEND_F, Kind.SEND_B)


def rows(plan: Plan) -> list[str]:
    return [" ".join(map(str, row)) for row in plan.actions]


def test_a_chain() -> None:
    assert rows(lower(one_f_one_b(2, 2))) == [
        "0RECV_B0 0F0 0SEND_F0 0RECV_B1 0F1 0SEND_F1 0B0 0WAIT_F0 0B1 0WAIT_F1",
        "1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0 1F1 1WAIT_B0 1B1 1SEND_B1 1WAIT_B1",
    ]


def test_receives_at_the_last_moment() -> None:
    assert rows(lower(one_f_one_b(2, 2), prefetch=0)) == [
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0WAIT_F0 0RECV_B1 0B1 0WAIT_F1",
        "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1WAIT_B0 1B1 1SEND_B1 1WAIT_B1",
    ]


def test_nothing_travels_within_a_rank() -> None:
    assert rows(lower(forward_only(Placement.v(4, 2), 1))) == [
        "3RECV_F0 0F0 0SEND_F0 0WAIT_F0 3F0",
        "1RECV_F0 1F0 2F0 2SEND_F0 2WAIT_F0",
    ]
    assert rows(lower(gpipe(1, 2))) == ["0F0 0F1 0B0 0B1"]


def test_a_stage_with_several_sources_receives_from_each_apart() -> None:
    plan = lower(forward_only(Placement.loop(4, 2), 2), [(0, 1), (0, 3), (1, 2), (2, 3)])
    # On the edge from rank 0 to rank 1 stage 0 sends to stages 1 and 3 at once, long before stage 2 sends to stage 3.
    assert rows(plan)[1] == (
        "1RECV_F0 3RECV_F0@0 1RECV_F1 3RECV_F1@0 3RECV_F0@2 1F0 1SEND_F0 3RECV_F1@2 1F1 1SEND_F1 1WAIT_F0 3F0 1WAIT_F1 3F1"
    )
    prove(plan, FIFO)


def test_data_parallel_stages() -> None:
    assert rows(lower(one_f_one_b(2, 2), sharded=[0, 1], reduced=[0])) == [
        "0RECV_B0 0UNSHARD 0F0 0SEND_F0 0RECV_B1 0F1 0SEND_F1 0B0 0WAIT_F0 0B1 0REDUCE_GRAD 0WAIT_F1 0RESHARD",
        "1RECV_F0 1RECV_F1 1UNSHARD 1F0 1B0 1SEND_B0 1F1 1WAIT_B0 1B1 1SEND_B1 1WAIT_B1 1RESHARD",
    ]


def test_unshard_looks_ahead() -> None:
    schedule = forward_only(Placement.loop(4, 1), 1)
    assert rows(lower(schedule, sharded=range(4), max_unsharded=2)) == [
        "0UNSHARD 1UNSHARD 0F0 0RESHARD 2UNSHARD 1F0 1RESHARD 3UNSHARD 2F0 2RESHARD 3F0 3RESHARD"
    ]
    assert rows(lower(schedule, sharded=range(4), max_unsharded=1)) == [
        "0UNSHARD 0F0 0RESHARD 1UNSHARD 1F0 1RESHARD 2UNSHARD 2F0 2RESHARD 3UNSHARD 3F0 3RESHARD"
    ]
    assert rows(lower(schedule, sharded=[2])) == ["2UNSHARD 0F0 1F0 2F0 2RESHARD 3F0"]


def test_p123_unshard_and_reshard_counts_follow_the_plan() -> None:
    for prefetch in (1, 2, 3):
        plan = lower(gpipe(4, 4), sharded=range(4), reduced=range(4), max_unsharded=prefetch)
        for rank, row in enumerate(plan.actions):
            kinds = [action.kind for action in row]
            assert kinds.count(Kind.UNSHARD) == kinds.count(Kind.RESHARD) == kinds.count(Kind.REDUCE_GRAD) == 1, rank
        assert prove(plan, FIFO).peak_unsharded == (1, 1, 1, 1)


def test_a_pair_of_sharded_stages_needs_both() -> None:
    schedule = _with_a_pair()
    assert prove(lower(schedule, sharded=[0, 1], max_unsharded=2), FIFO).peak_unsharded == (2,)
    with pytest.raises(ScheduleError, match=r"\(0F1;1B0\)OVERLAP_F_B needs the parameters of 2 .* max_unsharded is 1"):
        lower(schedule, sharded=[0, 1], max_unsharded=1)


def _with_a_pair() -> Schedule:
    pair = Action.overlap(Action(0, Kind.F, 1), Action(1, Kind.B, 0))
    texts = "0F0 1F0", "0B0 1F1 1B1 0B1"
    first, rest = ([Action.parse(text) for text in part.split()] for part in texts)
    return Schedule("pair", Placement.custom([0, 0]), 2, [[*first, pair, *rest]])


def test_a_pair_posts_both_receives_before_and_both_sends_after() -> None:
    table = ["0F0 0F1 0B0 0B1", "1F0 (1F1;1B0)OVERLAP_F_B 1B1", "2F0 2B0 2F1 2B1"]
    schedule = Schedule("pair", Placement.loop(3, 3), 2, [map(Action.parse, row.split()) for row in table])
    plan = lower(schedule, prefetch=0)
    assert rows(plan)[1] == (
        "1RECV_F0 1F0 1SEND_F0 1RECV_F1 1RECV_B0 (1F1;1B0)OVERLAP_F_B 1SEND_F1 1SEND_B0 1WAIT_F0"
        " 1RECV_B1 1WAIT_B0 1B1 1SEND_B1 1WAIT_F1 1WAIT_B1"
    )
    prove(plan, FIFO)


def test_p003_p004_no_receive_stands_before_a_send_that_is_ready() -> None:
    for schedule in (*(make(8, 16) for make in BY_NAME.values()), forward_only(Placement.loop(16, 8), 8)):
        for row in lower(schedule).actions:
            for before, action in itertools.pairwise(row):
                if action.kind in SEND:  # at once after the compute action that makes what it sends
                    assert before.kind.is_compute or before.kind in SEND


@pytest.mark.parametrize("prefetch", [0, 1, 2, 5])
def test_prefetch_is_how_far_a_receive_runs_ahead(prefetch: int) -> None:
    for row in lower(one_f_one_b(4, 12), prefetch=prefetch).actions:
        for position, action in enumerate(row):
            if action.kind in RECV:
                kind = Kind.F if action.kind is Kind.RECV_F else Kind.B
                compute = [other for other in row[position:] if other.kind.is_compute]
                assert compute.index(Action(action.stage, kind, action.microbatch)) <= prefetch


def test_p136_what_is_held_does_not_grow_with_microbatches() -> None:
    short, long = (prove(lower(one_f_one_b(4, m)), FIFO) for m in (16, 64))
    assert (short.peak_activations, short.peak_receives) == (long.peak_activations, long.peak_receives)
    assert short.peak_sends == long.peak_sends == (4, 4, 3, 1)


def test_p135_forward_only_lets_go_of_what_it_sent() -> None:
    for m in (16, 64):
        proof = prove(lower(forward_only(Placement.loop(4, 4), m)), FIFO)
        assert max(proof.peak_sends) <= 3
        assert max(proof.peak_receives) <= 3


@pytest.mark.parametrize(
    ("links", "limits", "sentence"),
    [
        ([(0, 2)], {}, "link 0 -> 2 must lead from a stage to a later one of the 2 stages"),
        ([(1, 0)], {}, "link 1 -> 0 must lead"),
        ([(1, 1)], {}, "link 1 -> 1 must lead"),
        (None, {"prefetch": -1}, "prefetch must be at least 0, got -1"),
        (None, {"sharded": [2]}, "stage 2 was said to be data parallel, but there are stages 0 to 1"),
        (None, {"reduced": [-1]}, "stage -1 was said to be data parallel"),
    ],
)
def test_what_cannot_be_lowered(links: list[tuple[int, int]] | None, limits: dict[str, object], sentence: str) -> None:
    with pytest.raises(ScheduleError, match=sentence):
        lower(gpipe(2, 2), links, **limits)  # type: ignore[arg-type]


@given(seed=st.integers(0, 2**32), prefetch=st.integers(0, 3))
@settings(max_examples=80, deadline=None, derandomize=True)
def test_any_schedule_over_any_links_can_be_carried_out(seed: int, prefetch: int) -> None:
    rng = random.Random(seed)
    schedule = random_schedule(rng, custom=True)
    links = random_links(rng, schedule.placement.num_stages)
    stages = range(schedule.placement.num_stages)
    plan = lower(schedule, links, prefetch=prefetch, sharded=stages, reduced=stages if schedule.has_backward else ())
    for rules in (FIFO, Rules(tagged=True, rendezvous=True), Rules(tagged=False, rendezvous=False)):
        prove(plan, rules)
    ends = [(a, peer) for row in plan.actions for a in row if a.kind in (*SEND, *RECV) for peer in plan.peers(a)]
    sent = [(a.kind is Kind.SEND_F, a.stage, peer, a.microbatch) for a, peer in ends if a.kind in SEND]
    received = [(a.kind is Kind.RECV_F, peer, a.stage, a.microbatch) for a, peer in ends if a.kind in RECV]
    assert sorted(sent) == sorted(received)
    assert len(set(sent)) == len(sent)
    for rank, row in enumerate(plan.actions):
        assert tuple(a for a in row if a.kind.is_compute) == schedule.actions[rank]


def test_every_stage_but_the_first_takes_something() -> None:
    """A plan of several ranks without messages, or without some, was lowered and proved, and no value reached these stages."""
    sentence = r"no link leads to stage 2: every stage but the first takes values of an earlier one"
    for links in ([(0, 1)], [(0, 1), (0, 3), (1, 3)]):
        with pytest.raises(ScheduleError, match=sentence):
            lower(gpipe(4, 2), links)
    with pytest.raises(ScheduleError, match="no link leads to stage 1"):
        Plan(gpipe(2, 2), (), gpipe(2, 2).actions)
    assert lower(gpipe(1, 2), []).links == ()
