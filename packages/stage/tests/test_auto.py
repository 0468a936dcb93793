"""Zero-bubble schedules made for costs and a limit of memory."""

from __future__ import annotations

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepwell_p2p import Placement, Rules
from stepwell_stage import Costs, Schedule, Simulation, lower, prove, simulate
from stepwell_stage.exceptions import ScheduleError
from stepwell_stage.schedules import one_f_one_b, zb_h1, zbv, zero_bubble


def run(schedule: Schedule, costs: Costs) -> Simulation:
    return simulate(lower(schedule), costs)


@pytest.mark.parametrize("num_ranks", [2, 4, 6])
def test_with_the_memory_of_1f1b_it_is_zb_h1_and_with_more_there_is_no_gap(num_ranks: int) -> None:
    microbatches, costs = 2 * num_ranks, Costs.uniform(num_ranks, activation_bytes=1)
    chain = Placement.loop(num_ranks, num_ranks)
    lean = run(zero_bubble(chain, microbatches, costs, memory_limit=num_ranks), costs)
    assert lean.makespan <= run(zb_h1(num_ranks, microbatches), costs).makespan
    # Backward first costs more than W here, so ZB-H1 has gaps: (R - 1)(F + I - W). More memory closes them.
    uneven = attrs.evolve(costs, backward_input=[2.0] * num_ranks, backward_weight=[1.0] * num_ranks)
    h1 = run(zb_h1(num_ranks, microbatches), uneven).makespan
    more = run(zero_bubble(chain, microbatches, uneven, memory_limit=2 * num_ranks), uneven)
    assert max(more.peak_bytes) <= 2 * num_ranks
    assert more.makespan < h1 or num_ranks == 2


def test_on_a_v_it_is_no_slower_than_zbv() -> None:
    costs = Costs.uniform(8, activation_bytes=1)
    for limit in (8, 12):
        made = run(zero_bubble(Placement.v(8, 4), 8, costs, memory_limit=limit), costs)
        assert made.makespan <= run(zbv(4, 8), costs).makespan
        assert max(made.peak_bytes) <= limit


def test_p103_memory_limits_hold_per_rank() -> None:
    costs = attrs.evolve(Costs.uniform(4), activation_bytes=(1, 2, 3, 4))
    limits = [3, 8, 6, 4]
    made = run(zero_bubble(Placement.loop(4, 4), 12, costs, memory_limit=limits), costs)
    assert all(peak <= limit for peak, limit in zip(made.peak_bytes, limits, strict=True))


def test_a_limit_may_be_a_float() -> None:
    """``memory_limit=8e9``, as one writes it, was taken for a sequence."""
    costs = Costs.uniform(4, activation_bytes=1)
    placement = Placement.loop(4, 4)
    assert zero_bubble(placement, 8, costs, memory_limit=4e0) == zero_bubble(placement, 8, costs, memory_limit=4)


def test_unequal_costs_beat_schedules_made_for_equal_ones() -> None:
    costs = Costs(
        (1, 1, 1, 2), (3, 2, 2, 4), backward_input=(2, 1, 1, 2), backward_weight=(1, 1, 1, 2), activation_bytes=[1] * 4
    )
    made = run(zero_bubble(Placement.loop(4, 4), 8, costs, memory_limit=8), costs).makespan
    assert made <= min(run(make(4, 8), costs).makespan for make in (one_f_one_b, zb_h1))


@given(
    num_ranks=st.integers(1, 4),
    depth=st.integers(1, 3),
    num_microbatches=st.integers(1, 8),
    slack=st.integers(0, 6),
    latency=st.sampled_from([0.0, 0.5]),
    kept=st.integers(0, 2),
)
@settings(max_examples=25, deadline=None, derandomize=True)
def test_any_size_fits_and_is_proved(
    num_ranks: int, depth: int, num_microbatches: int, slack: int, latency: float, kept: int
) -> None:
    size = num_ranks * depth
    costs = attrs.evolve(Costs.uniform(size, activation_bytes=2, latency=latency), kept_bytes=(kept,) * size)
    placement = Placement.v(size, num_ranks) if depth != 3 else Placement.loop(size, num_ranks)
    schedule = zero_bubble(placement, num_microbatches, costs, memory_limit=2 * depth + slack)
    assert max(run(schedule, costs).peak_bytes) <= 2 * depth + slack
    prove(lower(schedule), Rules(tagged=False, rendezvous=True))


@pytest.mark.parametrize(
    ("limit", "sentence"),
    [
        (9, "rank 0 may hold 9 bytes of activations but one microbatch takes 10; raise the limit"),
        ([10, 10, 10], "there are 2 ranks but memory limits for 3"),
    ],
)
def test_limits_that_cannot_be(limit: int | list[int], sentence: str) -> None:
    with pytest.raises(ScheduleError, match=sentence):
        zero_bubble(Placement.loop(2, 2), 2, Costs.uniform(2, activation_bytes=10), memory_limit=limit)


def test_other_sizes_are_refused() -> None:
    with pytest.raises(ScheduleError, match="2 stages are placed but costs are given for 3"):
        zero_bubble(Placement.loop(2, 2), 2, Costs.uniform(3))
    with pytest.raises(ScheduleError, match="at least 1 microbatch, got 0"):
        zero_bubble(Placement.loop(2, 2), 0, Costs.uniform(2))
