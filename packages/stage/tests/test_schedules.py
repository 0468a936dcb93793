"""What holds for every built-in schedule, whatever its size."""

from __future__ import annotations

import time
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import stepwell_stage.schedules as module
from stepwell_p2p import ChannelPolicy, Placement, Rules
from stepwell_p2p.exceptions import DeadlockError
from stepwell_stage import Costs, Kind, Schedule, lower, prove, simulate
from stepwell_stage.exceptions import ScheduleError
from stepwell_stage.schedules import (
    BY_NAME,
    forward_only,
    interleaved_1f1b,
    interleaved_zero_bubble,
    looped_bfs,
    one_f_one_b,
)

LOOPED = {
    "interleaved-1f1b": interleaved_1f1b,
    "looped-bfs": looped_bfs,
    "interleaved-zero-bubble": interleaved_zero_bubble,
}
SPLIT = {"zb-h1", "interleaved-zero-bubble", "zbv"}
sizes = st.integers(1, 16), st.integers(1, 64)


def _any_size(name: str, num_ranks: int, num_microbatches: int, stages_per_rank: int) -> Schedule:
    if name in LOOPED:
        return LOOPED[name](num_ranks, num_microbatches, stages_per_rank=stages_per_rank)
    return BY_NAME[name](num_ranks, num_microbatches)


@pytest.mark.parametrize("name", BY_NAME)
@given(num_ranks=sizes[0], num_microbatches=sizes[1], stages_per_rank=st.integers(1, 4))
@settings(max_examples=6, deadline=None, derandomize=True)
def test_every_size_is_legal_and_complete(
    name: str, num_ranks: int, num_microbatches: int, stages_per_rank: int
) -> None:
    schedule = _any_size(name, num_ranks, num_microbatches, stages_per_rank)  # making it checks it
    assert schedule.num_microbatches == num_microbatches
    assert schedule.placement.num_ranks == num_ranks
    kinds = {leaf.kind for row in schedule.actions for action in row for leaf in action.leaves}
    if name in SPLIT:
        assert kinds == {Kind.F, Kind.I, Kind.W}
    elif name == "dualpipe-v":  # splits some backwards, or all, or none where there are too few
        assert kinds in ({Kind.F, Kind.B}, {Kind.F, Kind.I, Kind.W}, {Kind.F, Kind.B, Kind.I, Kind.W})
    else:
        assert kinds == {Kind.F, Kind.B}


@pytest.mark.parametrize("name", BY_NAME)
def test_p006_one_microbatch_runs(name: str) -> None:
    for num_ranks in (1, 2, 8):
        assert simulate(lower(BY_NAME[name](num_ranks, 1)), _unit(name, num_ranks)).makespan > 0


@pytest.mark.parametrize("num_microbatches", [1, 3, 5, 7, 9])
def test_p008_microbatches_need_not_be_a_multiple_of_ranks(num_microbatches: int) -> None:
    for make in LOOPED.values():
        assert make(2, num_microbatches).num_microbatches == num_microbatches


# In units of one F of one stage; I and W take 1 each and B takes 2. The bubble is the makespan less a rank's work.
BUBBLES: dict[str, Callable[[int, int], Fraction]] = {
    "gpipe": lambda ranks, stages: Fraction((ranks - 1) * 3),  # (R - 1)(F + B)
    "1f1b": lambda ranks, stages: Fraction((ranks - 1) * 3),
    "interleaved-1f1b": lambda ranks, stages: Fraction((ranks - 1) * 3),  # of a stage, of which a rank has several
    "looped-bfs": lambda ranks, stages: Fraction((ranks - 1) * 3),
    "zb-h1": lambda ranks, stages: Fraction(ranks - 1),  # (R - 1)(F + I - W)
    "interleaved-zero-bubble": lambda ranks, stages: Fraction(ranks - 1),
    "zbv": lambda ranks, stages: Fraction(ranks - 1),  # none within a rank; the last starts R - 1 later than the first
    "dualpipe-v": lambda ranks, stages: Fraction((ranks - 1) * 2),  # (R - 1)(F&B + B - 3W), F&B together take F + B
}


@pytest.mark.parametrize("name", BY_NAME)
@given(
    num_ranks=st.integers(1, 16),
    depth=st.integers(1, 3),
    times=st.tuples(*[st.integers(1, 4)] * 3),
    data=st.data(),
)
@settings(max_examples=20, deadline=None, derandomize=True)
def test_the_formulas_hold_for_the_sizes_and_times_that_the_page_names(
    name: str, num_ranks: int, depth: int, times: tuple[int, int, int], data: st.DataObject
) -> None:
    """The page of schedules gave some of them without a word on the times for which they hold."""
    on_a_v = name in ("zbv", "dualpipe-v")
    forward, inputs, weights = times
    if name == "zb-h1":
        weights = min(times)
    elif on_a_v or name == "interleaved-zero-bubble":
        inputs = weights = forward
    schedule = _any_size(name, num_ranks, data.draw(st.integers(num_ranks * (1 + on_a_v), 64)), depth)
    stages = schedule.placement.num_stages
    costs = Costs(
        [forward] * stages,
        [inputs + weights] * stages,
        backward_input=[inputs] * stages,
        backward_weight=[weights] * stages,
        overlap_gain=0.0,
    )
    work = schedule.num_microbatches * stages / num_ranks * (forward + inputs + weights)
    idle = simulate(lower(schedule), costs).makespan - work
    per_rank = {
        "zb-h1": forward + inputs - weights,
        "interleaved-zero-bubble": forward,
        "zbv": forward,
        "dualpipe-v": 2 * forward,  # (F&B) + B - 3W
    }
    assert idle == pytest.approx((num_ranks - 1) * per_rank.get(name, forward + inputs + weights))


def _unit(name: str, num_ranks: int) -> Costs:
    return Costs.uniform(BY_NAME[name](num_ranks, 1).placement.num_stages)


@pytest.mark.parametrize("name", BY_NAME)
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("rounds", [2, 3, 5])
def test_the_bubble_is_that_of_the_paper(name: str, num_ranks: int, rounds: int) -> None:
    schedule = BY_NAME[name](num_ranks, num_ranks * rounds)
    stages = schedule.placement.num_stages // num_ranks
    paired = attrs.evolve(_unit(name, num_ranks), overlap_gain=0.0)  # a pair is one action, and takes F + B
    makespan = simulate(lower(schedule), paired).makespan
    assert makespan - 3 * stages * schedule.num_microbatches == BUBBLES[name](num_ranks, stages)


@pytest.mark.parametrize("stages_per_rank", [1, 2, 3, 4])
def test_looping_divides_the_bubble(stages_per_rank: int) -> None:
    schedule = interleaved_1f1b(4, 16, stages_per_rank=stages_per_rank)
    whole = Costs.uniform(4 * stages_per_rank, forward=12 / stages_per_rank, backward=24 / stages_per_rank)
    assert simulate(lower(schedule), whole).makespan == pytest.approx(16 * 36 + 3 * 36 / stages_per_rank)


def test_peak_activations_are_those_of_the_papers() -> None:
    peaks = {name: simulate(lower(make(4, 32)), _unit(name, 4)).peak_activations for name, make in BY_NAME.items()}
    assert peaks == {
        "gpipe": (32, 32, 32, 32),
        "1f1b": (4, 3, 2, 1),
        "interleaved-1f1b": (11, 9, 7, 5),
        "looped-bfs": (64, 64, 64, 64),
        "zb-h1": (4, 4, 4, 4),
        "interleaved-zero-bubble": (8, 8, 8, 8),
        "zbv": (8, 8, 8, 8),
        "dualpipe-v": (9, 9, 9, 9),
    }


@pytest.mark.parametrize("name", [*BY_NAME, "forward-only"])
@given(
    num_ranks=st.integers(1, 16),
    num_microbatches=st.integers(1, 64),
    stages_per_rank=st.integers(1, 4),
    policy=st.sampled_from(ChannelPolicy),
    rules=st.builds(Rules, tagged=st.booleans(), rendezvous=st.booleans()),
    prefetch=st.integers(0, 2),
)
@settings(max_examples=8, deadline=None, derandomize=True)
def test_p001_p005_p025_every_schedule_is_proved_under_every_rule(
    name: str,
    num_ranks: int,
    num_microbatches: int,
    stages_per_rank: int,
    policy: ChannelPolicy,
    rules: Rules,
    prefetch: int,
) -> None:
    num_ranks = max(1, num_ranks // stages_per_rank)  # at most 16 stages
    if name == "forward-only":
        schedule = forward_only(Placement.v(num_ranks * stages_per_rank, num_ranks), num_microbatches)
    else:
        schedule = _any_size(name, num_ranks, num_microbatches, stages_per_rank)
    plan = lower(schedule, prefetch=prefetch)
    if rules.tagged or policy is ChannelPolicy.PER_EDGE:
        proof = prove(plan, rules, channels=policy)
        assert max(proof.peak_activations) <= num_microbatches * schedule.placement.num_stages
    else:  # lanes that several edges share can block; then the proof says so, and which policy is safe
        try:
            prove(plan, rules, channels=policy)
        except DeadlockError as error:
            blocked = error
        else:
            return
        assert blocked.safe_policy is not None


def test_a_shared_first_in_first_out_channel_blocks_looped_stages() -> None:
    plan = lower(interleaved_1f1b(4, 8))
    with pytest.raises(DeadlockError, match=r"rank \d in \d[A-Z_]+\d waits on channel shared") as caught:
        prove(plan, Rules(tagged=False, rendezvous=True), channels="shared")
    assert caught.value.safe_policy == "per-edge"
    prove(plan, Rules(tagged=False, rendezvous=True), channels="per-edge")


@pytest.mark.parametrize("num_microbatches", [4, 8, 32])
@pytest.mark.parametrize("latency", [0.0, 0.02])
def test_p161_more_stages_and_split_backwards_do_not_make_a_step_longer(num_microbatches: int, latency: float) -> None:
    """With the same work on each rank, and receives that block nothing."""

    def seconds(schedule: Schedule) -> float:
        stages = schedule.placement.num_stages
        share = 4 / stages
        return simulate(
            lower(schedule), Costs.uniform(stages, forward=share, backward=2 * share, latency=latency)
        ).makespan

    plain, looped, split = (
        seconds(make(4, num_microbatches)) for make in (one_f_one_b, interleaved_1f1b, interleaved_zero_bubble)
    )
    assert split <= looped + 1e-9
    assert looped <= plain + 1e-9


@pytest.mark.parametrize("name", BY_NAME)
def test_many_ranks_with_few_microbatches_take_no_time_for_what_is_not_there(name: str) -> None:
    """On a V each rank made the order of 2R microbatches and left most of it out: with 4,096 ranks that took three minutes."""
    begun = time.process_time()
    schedule = BY_NAME[name](1024, 2)
    assert time.process_time() - begun < 3  # it takes a tenth of a second, and took ten
    assert schedule.num_microbatches == 2


def test_sizes_below_one_are_refused() -> None:
    for make in BY_NAME.values():
        for num_ranks, num_microbatches in ((0, 1), (2, 0)):
            with pytest.raises((ScheduleError, ValueError), match="at least 1"):
                make(num_ranks, num_microbatches)


@pytest.mark.parametrize(
    "name", ["gpipe", "one_f_one_b", "interleaved_1f1b", "looped_bfs", "zb_h1", "zbv", "forward_only"]
)
def test_p160_the_tables_in_the_docstrings_are_true(name: str) -> None:
    make = getattr(module, name)
    tables = [line.strip() for line in make.__doc__.splitlines() if line.strip().startswith("rank ")]
    assert len(tables) == 2
    width = max(int(number) for number in (part[-1] for part in " ".join(tables).split() if part[-1].isdigit())) + 1
    placement = (
        Placement.v(4, 2) if "3F" in "".join(tables) and name in ("zbv", "forward_only") else Placement.loop(2, 2)
    )
    schedule = make(placement, width) if name == "forward_only" else make(2, width)
    assert tables == [line.strip() for line in schedule.table().splitlines()]


def test_every_schedule_has_a_test_of_its_own() -> None:
    folder = Path(module.__file__).parent / "plan" / "schedules"
    for file in folder.glob("_[a-z]*.py"):
        if file.stem not in ("_rounds", "_phases"):
            assert (Path(__file__).parent / f"test{file.stem}.py").exists(), file.stem
