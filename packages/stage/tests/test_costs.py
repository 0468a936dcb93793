"""What costs may be."""

from __future__ import annotations

import math

import attrs
import pytest

from stepwell_stage import Costs, EdgeCost
from stepwell_stage.exceptions import StageUsageError


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


def test_kept_bytes_are_all_bytes_unless_said() -> None:
    assert Costs((1,), (1,), activation_bytes=[8]).bytes_for_weights == (8,)
    assert Costs((1,), (1,), activation_bytes=[8], kept_bytes=[3]).bytes_for_weights == (3,)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"forward": ()}, "costs need at least one stage"),
        ({"backward": (1, 2, 3)}, "backward has 3 numbers but forward has 2"),
        ({"output_bytes": (1,)}, "output_bytes has 1 numbers but forward has 2"),
        ({"forward": (1, -1)}, "forward must not be negative"),
        ({"forward": (1, math.nan)}, "forward must not be negative"),
        ({"latency": -1.0}, "latency must not be negative"),
        ({"bandwidth": 0.0}, "a bandwidth must be above 0 bytes a second"),
        ({"edges": [EdgeCost(0, 1, 0.0, 0.0)]}, "a bandwidth must be above 0"),
        ({"overlap_gain": 1.5}, "overlap_gain is a share from 0 to 1, got 1.5"),
    ],
)
def test_what_costs_may_not_be(change: dict[str, object], sentence: str) -> None:
    fields: dict[str, object] = {"forward": (1, 1), "backward": (2, 2), **change}
    if not fields["forward"]:
        fields["backward"] = ()
    with pytest.raises(StageUsageError, match=sentence):
        Costs(**fields)  # type: ignore[arg-type]
