"""What costs may be."""

from __future__ import annotations

import math
from collections.abc import Callable

import attrs
import pytest

from stepwell_stage import Action, Costs, CustomCost, EdgeCost, Event, Schedule, Timeline, lower, simulate
from stepwell_stage.exceptions import StageUsageError
from stepwell_stage.schedules import custom, dualpipe_v, one_f_one_b, zbv


def test_defaults() -> None:
    costs = Costs.uniform(3)
    assert costs.num_stages == 3
    assert costs.forward == (1.0, 1.0, 1.0)
    assert costs.input_costs == costs.weight_costs == (1.0, 1.0, 1.0)
    assert costs.link(0, 1) == (0.0, math.inf)
    assert costs.activation_bytes == costs.unshard == (0, 0, 0)


def test_halves_of_the_backward() -> None:
    costs = attrs.evolve(Costs.uniform(2), backward_input=[1.5, 3.0])
    assert costs.weight_costs == (0.5, 0.0)  # the rest of the backward, never below nothing
    assert attrs.evolve(costs, backward_weight=[1.0, 1.0]).weight_costs == (1.0, 1.0)


def test_edges_that_differ() -> None:
    costs = Costs((1,), (1,), latency=1.0, bandwidth=10.0, edges=[EdgeCost(0, 1, 2.0, 5.0)])
    assert costs.link(0, 1) == (2.0, 5.0)
    assert costs.link(1, 0) == (1.0, 10.0)


def test_actions_of_ones_own() -> None:
    costs = Costs((1, 1), (1, 1), custom=[CustomCost("save", 2.0, stage=1), CustomCost("save", 3.0)])
    assert [costs.custom_cost("save", stage) for stage in (0, 1)] == [3.0, 2.0]
    assert costs.custom_cost("load", 0) == 0.0


def test_actions_of_ones_own_are_measured_too() -> None:
    """They were left out, so a step that spent its time in them was predicted to take none."""
    plan = lower(custom(["0F0 0{save}0 0F1 0{save}1 0B0 0B1", "1F0 1{save}0 1B0 1F1 1B1"]))
    true = Costs((1, 2), (3, 4), custom=[CustomCost("save", 5.0, stage=0), CustomCost("save", 6.0, stage=1)])
    costs = Costs.measured(simulate(plan, true).timeline, 2)
    assert sorted(costs.custom, key=lambda cost: cost.seconds) == list(true.custom)
    assert simulate(plan, costs).makespan == simulate(plan, true).makespan


def test_kept_bytes_are_all_bytes_unless_said() -> None:
    assert Costs((1,), (1,), activation_bytes=[8]).bytes_for_weights == (8,)
    assert Costs((1,), (1,), activation_bytes=[8], kept_bytes=[3]).bytes_for_weights == (3,)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"forward": ()}, "costs need at least one stage"),
        ({"backward": (1, 2, 3)}, "backward has 3 numbers but forward has 2"),
        ({"output_bytes": (1,)}, "output_bytes has 1 numbers but forward has 2"),
        ({"forward": (1, -1)}, r"forward must be finite and at least 0, got \(1.0, -1.0\)"),
        ({"forward": (1, math.nan)}, "forward must be finite and at least 0"),
        ({"latency": -1.0}, "latency must be finite and at least 0, got -1.0"),
        ({"bandwidth": 0.0}, "a bandwidth must be above 0 bytes a second"),
        ({"edges": [EdgeCost(0, 1, 0.0, 0.0)]}, "a bandwidth must be above 0"),
        ({"forward": (1, math.inf)}, "forward must be finite and at least 0"),
        ({"latency": math.inf}, "latency must be finite and at least 0, got inf"),
        ({"bandwidth": math.nan}, "a bandwidth must be above 0"),
        ({"edges": [EdgeCost(0, 1, math.nan, 1.0)]}, "the latency of an edge must be finite and at least 0, got nan"),
        ({"activation_bytes": (4, 4), "kept_bytes": (4, 5)}, r"that stays from I to W, got \(4, 5\) of \(4, 4\)"),
        ({"custom": [CustomCost("save", -1.0)]}, "seconds must be finite and at least 0, got CustomCost"),
        ({"overlap_gain": 1.5}, "overlap_gain is a share from 0 to 1, got 1.5"),
        # What follows ended in errors of Python's from inside, which named neither the field nor its value.
        ({"forward": ["a", 1]}, r"forward must be finite and at least 0, got \('a', 1.0\)"),
        ({"forward": 1}, "costs of stages are several numbers, one for each stage, got 1"),
        ({"forward": "12"}, "costs of stages are several numbers, one for each stage, got '12'"),
        ({"output_bytes": ["x", "y"]}, "output_bytes must be finite and at least 0"),
        ({"latency": "low"}, "latency must be finite and at least 0, got 'low'"),
        ({"bandwidth": None}, "a bandwidth must be above 0 bytes a second, got None"),
        ({"overlap_gain": "much"}, "overlap_gain must be finite and at least 0, got 'much'"),
        ({"edges": [(0, 1, 2.0, 3.0)]}, r"edges are EdgeCosts, got \(0, 1, 2.0, 3.0\)"),
        ({"edges": EdgeCost(0, 1, 2.0, 3.0)}, "edges are several EdgeCosts, got a EdgeCost"),
        ({"custom": {"save": 1.0}}, "costs of custom actions are CustomCosts, got 'save'"),
        ({"latency": None}, "latency must be finite and at least 0, got None"),
        ({"per_action": 10**400}, "per_action must be finite and at least 0, got 1000"),
        ({"custom": [CustomCost("save", "long")]}, "seconds must be finite and at least 0"),  # type: ignore[arg-type]
    ],
)
def test_what_costs_may_not_be(change: dict[str, object], sentence: str) -> None:
    fields: dict[str, object] = {"forward": (1, 1), "backward": (2, 2), **change}
    if not fields["forward"]:
        fields["backward"] = ()
    with pytest.raises(StageUsageError, match=sentence):
        Costs(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("make", [one_f_one_b, zbv, dualpipe_v])
@pytest.mark.parametrize("gain", [None, 0.0, 0.25])
def test_what_was_measured_predicts_the_step(make: Callable[[int, int], Schedule], gain: float | None) -> None:
    plan = lower(make(3, 8))
    stages = plan.placement.num_stages
    true = Costs([1 + s for s in range(stages)], [4 + s for s in range(stages)], overlap_gain=gain)
    timeline = simulate(plan, true).timeline
    costs = Costs.measured(timeline, stages)
    assert costs.overlap_gain == (gain if make is dualpipe_v else None)
    assert costs.forward == true.forward
    assert [a + b for a, b in zip(costs.input_costs, costs.weight_costs, strict=True)] == pytest.approx(true.backward)
    assert simulate(plan, costs).makespan == pytest.approx(simulate(plan, true).makespan)


def test_medians_leave_out_what_is_out_of_the_ordinary() -> None:
    seconds = [9.0, 1.0, 1.2, 1.1, 1.0]
    events = [Event(0, Action.parse(f"0F{n}"), 10.0 * n, 10.0 * n + value) for n, value in enumerate(seconds)]
    costs = Costs.measured(Timeline(events), 1)
    assert costs.forward == pytest.approx((1.1,))
    assert costs.backward == (0.0,)


def test_what_is_no_number_of_stages_and_no_timeline() -> None:
    """They ended in errors of Python's from inside."""
    for make in (Costs.uniform, lambda count: Costs.measured(Timeline([]), count)):
        with pytest.raises(StageUsageError, match=r"num_stages must be a whole number, got 2.0, a float"):
            make(2.0)  # type: ignore[arg-type]
    with pytest.raises(StageUsageError, match=r"Costs.measured\(\) takes a timeline, got a Simulation"):
        Costs.measured(simulate(lower(one_f_one_b(2, 2)), Costs.uniform(2)), 2)  # type: ignore[arg-type]


def test_every_stage_must_be_measured() -> None:
    with pytest.raises(StageUsageError, match="no F of stage 1 was measured; merge the timelines of all ranks"):
        Costs.measured(Timeline([Event(0, Action.parse("0F0"), 0.0, 1.0)]), 2)
