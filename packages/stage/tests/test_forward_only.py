"""Forward-only tables, on any placement."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from stepwell_p2p import Placement, Rules
from stepwell_stage import Costs, lower, prove, simulate
from stepwell_stage.schedules import forward_only


def test_chain() -> None:
    assert forward_only(Placement.loop(3, 3), 3).table() == "\n".join(
        [
            "rank 0: 0F0 0F1 0F2  .   .",
            "rank 1:  .  1F0 1F1 1F2  .",
            "rank 2:  .   .  2F0 2F1 2F2",
        ]
    )


def test_loop() -> None:
    assert forward_only(Placement.loop(4, 2), 4).table() == "\n".join(
        [
            "rank 0: 0F0 0F1 2F0 2F1 0F2 0F3 2F2 2F3  .",
            "rank 1:  .  1F0 1F1 3F0 3F1 1F2 1F3 3F2 3F3",
        ]
    )


def test_v() -> None:
    assert forward_only(Placement.v(4, 2), 3).table() == "\n".join(
        [
            "rank 0: 0F0 0F1 0F2 3F0  .  3F1  .  3F2",
            "rank 1:  .  1F0 2F0 1F1 2F1 1F2 2F2  .",
        ]
    )


def test_any() -> None:
    assert forward_only(Placement.custom([1, 0, 0, 1, 1]), 2).table() == "\n".join(
        [
            "rank 0:  .  1F0 2F0 1F1 2F1  .   .",
            "rank 1: 0F0 0F1  .  3F0 4F0 3F1 4F1",
        ]
    )


def test_nothing_is_held_without_a_backward() -> None:
    """Evaluations were said to hold the activations of all microbatches on all stages: 16 on each rank here."""
    plan = lower(forward_only(Placement.v(8, 4), 8))
    assert prove(plan, Rules(tagged=False, rendezvous=True)).peak_activations == (0, 0, 0, 0)
    simulation = simulate(plan, Costs.uniform(8, activation_bytes=10))
    assert (simulation.peak_activations, simulation.peak_bytes) == ((0, 0, 0, 0), (0, 0, 0, 0))


@given(num_ranks=st.integers(1, 16), num_microbatches=st.integers(1, 64), depth=st.integers(1, 4))
@settings(max_examples=40, deadline=None, derandomize=True)
def test_ranks_idle_no_longer_than_they_must(num_ranks: int, num_microbatches: int, depth: int) -> None:
    """The last rank starts R - 1 slots after the first; and on a V what comes out of it goes back through all others."""

    def idle(placement: Placement, count: int) -> float:
        makespan = simulate(lower(forward_only(placement, count)), Costs.uniform(placement.num_stages)).makespan
        return makespan - count * placement.num_stages / num_ranks

    assert idle(Placement.loop(num_ranks, num_ranks), num_microbatches) == num_ranks - 1
    assert idle(Placement.v(2 * num_ranks, num_ranks), num_microbatches) == 2 * (num_ranks - 1)
    rounds = -(-num_microbatches // num_ranks) * num_ranks
    assert idle(Placement.loop(depth * num_ranks, num_ranks), rounds) == num_ranks - 1
