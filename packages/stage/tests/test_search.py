"""The search for a plan, against trying everything."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stepwell_stage import Action, Costs, Kind, Layer, Schedule, Simulation, lower, plan_search, simulate
from stepwell_stage.exceptions import ScheduleError, StageUsageError
from stepwell_stage.plan._search import SEARCHED
from stepwell_stage.schedules import (
    BY_NAME,
    dualpipe_v,
    gpipe,
    interleaved_1f1b,
    interleaved_zero_bubble,
    looped_bfs,
    one_f_one_b,
    zb_h1,
    zbv,
)

NETWORK = Costs.uniform(1, latency=0.1, bandwidth=10.0)


def some_layers(rng: random.Random, count: int) -> list[Layer]:
    return [
        Layer(
            rng.randint(1, 6),
            rng.randint(2, 9),
            activation_bytes=rng.randint(0, 4),
            output_bytes=rng.randint(0, 3),
            parameter_bytes=rng.randint(0, 9),
            overhead=rng.choice([0.0, 0.5]),
        )
        for _ in range(count)
    ]


def everything(layers: list[Layer], num_ranks: int, batch: int, limit: int | None) -> Iterator[float]:
    """The makespan of every plan that fits: all cuts, schedules, stages per rank and numbers of microbatches."""
    for count in (m for m in range(1, batch + 1) if batch % m == 0):
        depths = [depth for depth in (1, 2) if depth * num_ranks <= len(layers)]
        looped = (interleaved_1f1b, looped_bfs, interleaved_zero_bubble)
        for schedule in (
            *(make(num_ranks, count) for make in (gpipe, one_f_one_b, zb_h1)),
            *(make(num_ranks, count, stages_per_rank=depth) for make in looped for depth in depths),
            *(make(num_ranks, count) for make in (zbv, dualpipe_v) if 2 in depths),
        ):
            plan, size = lower(schedule), schedule.placement.num_stages
            for rest in itertools.combinations(range(1, len(layers)), size - 1):
                parts = [layers[a:b] for a, b in itertools.pairwise((0, *rest, len(layers)))]
                samples = batch // count
                costs = Costs(
                    [sum(layer.overhead + samples * layer.forward for layer in part) for part in parts],
                    [sum(layer.overhead + samples * layer.backward for layer in part) for part in parts],
                    activation_bytes=[samples * sum(layer.activation_bytes for layer in part) for part in parts],
                    output_bytes=[samples * part[-1].output_bytes for part in parts],
                    latency=0.1,
                    bandwidth=10.0,
                )
                simulation = simulate(plan, costs)
                held = list(simulation.peak_bytes)
                for rank, part in zip(schedule.placement.ranks, parts, strict=True):
                    held[rank] += sum(layer.parameter_bytes for layer in part)
                if limit is None or max(held) <= limit:
                    yield simulation.makespan


@given(seed=st.integers(0, 2**32), num_ranks=st.integers(1, 3), batch=st.sampled_from([1, 2, 4]))
@settings(max_examples=12, deadline=None, derandomize=True)
def test_small_cases_are_exact(seed: int, num_ranks: int, batch: int) -> None:
    rng = random.Random(seed)
    layers = some_layers(rng, rng.randint(num_ranks, 6))
    limit = rng.choice([None, 30, 60])
    names = [name for name in SEARCHED if name != "zero-bubble"]
    best = min(everything(layers, num_ranks, batch, limit), default=None)
    if best is None:
        with pytest.raises(ScheduleError, match="nothing fits into"):
            plan_search(
                layers,
                num_ranks,
                batch_size=batch,
                memory_limit=limit,
                network=NETWORK,
                schedules=names,
                stages_per_rank=(1, 2),
            )
        return
    found = plan_search(
        layers,
        num_ranks,
        batch_size=batch,
        memory_limit=limit,
        network=NETWORK,
        schedules=names,
        stages_per_rank=(1, 2),
    )
    assert found.best.makespan == pytest.approx(best)
    assert limit is None or max(found.best.peak_bytes) <= limit


def test_what_is_found_is_what_it_says() -> None:
    found = plan_search(some_layers(random.Random(1), 7), 3, batch_size=6, network=NETWORK)
    assert [choice.makespan for choice in found.choices] == sorted(choice.makespan for choice in found.choices)
    assert found.best is found.choices[0]
    assert {choice.schedule.name for choice in found.choices} <= set(SEARCHED)
    for choice in found.choices:
        assert simulate(choice.plan, choice.costs).makespan == choice.makespan
        assert choice.cuts[0] == 0
        assert len(choice.cuts) == choice.schedule.placement.num_stages
        assert 6 % choice.schedule.num_microbatches == 0


@pytest.mark.parametrize("seed", range(2))
def test_p156_large_cases_cover_all_layers_and_beat_equal_cuts(seed: int) -> None:
    layers = some_layers(random.Random(seed), 30)
    batch, num_ranks = 8, 4
    found = plan_search(
        layers,
        num_ranks,
        batch_size=batch,
        network=NETWORK,
        stages_per_rank=(1, 2),
        num_microbatches=[8],
        most_simulations=20,
    )
    assert sum(map(len, (range(a, b) for a, b in itertools.pairwise((*found.best.cuts, 30))))) == 30
    for name, make in BY_NAME.items():
        schedule = make(num_ranks, 8)
        size = schedule.placement.num_stages
        cuts = [stage * 30 // size for stage in range(size)]
        parts = [layers[a:b] for a, b in itertools.pairwise((*cuts, 30))]
        costs = Costs(
            [sum(layer.overhead + layer.forward for layer in part) for part in parts],
            [sum(layer.overhead + layer.backward for layer in part) for part in parts],
            output_bytes=[part[-1].output_bytes for part in parts],
            latency=0.1,
            bandwidth=10.0,
        )
        assert found.best.makespan <= simulate(lower(schedule), costs).makespan, name


def test_memory_decides_between_schedules() -> None:
    layers = [Layer(1.0, 2.0, activation_bytes=10)] * 4
    plenty, little = (
        plan_search(
            layers,
            4,
            batch_size=16,
            memory_limit=limit,
            num_microbatches=[16],
            schedules=["gpipe", "1f1b"],
            network=NETWORK,
        )
        for limit in (160, 40)
    )
    assert {choice.schedule.name for choice in plenty.choices} == {"gpipe", "1f1b"}
    assert [choice.schedule.name for choice in little.choices] == ["1f1b"]
    with pytest.raises(
        ScheduleError, match=r"nothing fits into 39 bytes a rank; the leanest plan, 1f1b with M = 16 .* needs 40: use"
    ):
        plan_search(layers, 4, batch_size=16, memory_limit=39, num_microbatches=[16], schedules=["gpipe", "1f1b"])


def test_overhead_decides_the_number_of_microbatches() -> None:
    cheap, dear = (
        plan_search([Layer(1.0, 2.0, overhead=overhead)] * 2, 2, batch_size=16, schedules=["1f1b"]).best
        for overhead in (0.0, 50.0)
    )
    assert cheap.schedule.num_microbatches == 16
    assert dear.schedule.num_microbatches <= 2


def seconds_of(schedule: Schedule, seconds: Callable[[Action], float]) -> float:
    """How long a schedule takes whose messages take no time, by going through the ranks again and again."""
    last, ends, at = schedule.placement.num_stages - 1, dict[Action, float](), [0] * len(schedule.actions)
    clocks = [0.0] * len(at)
    while any(position < len(row) for position, row in zip(at, schedule.actions, strict=True)):
        for rank, row in enumerate(schedule.actions):
            while at[rank] < len(row):
                action = row[at[rank]]
                stage, kind, microbatch = action[:3]
                if kind is Kind.F:
                    needs = [Action(stage - 1, Kind.F, microbatch)] if stage else []
                else:
                    needs = [Action(stage + 1, kind, microbatch) if stage < last else Action(stage, Kind.F, microbatch)]
                if any(need not in ends for need in needs):
                    break
                clocks[rank] = max([clocks[rank], *(ends[need] for need in needs)]) + seconds(action)
                ends[action] = clocks[rank]
                at[rank] += 1
    return max(clocks)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved-1f1b", "looped-bfs"])
@pytest.mark.parametrize(("batch", "count"), [(37, 8), (30, 8), (7, 5), (9, 8)])
def test_microbatches_may_differ_by_a_sample(name: str, batch: int, count: int) -> None:
    """Numbers of microbatches that do not divide the batch were refused, although the executor runs them."""
    layers = [Layer(1.0, 2.0, activation_bytes=3, output_bytes=1, overhead=0.25)] * 8
    depth = SEARCHED[name].depths or (2,)
    sizes_to_try = {"num_microbatches": [count], "stages_per_rank": depth}
    found = plan_search(layers, 4, batch_size=batch, schedules=[name], most_simulations=1, **sizes_to_try).best
    sizes = [len(part) for part in torch.zeros(batch).tensor_split(count)]
    assert max(sizes) - min(sizes) == 1
    per_stage = len(layers) // found.schedule.placement.num_stages

    def seconds(action: Action) -> float:
        return per_stage * (0.25 + sizes[action.microbatch or 0] * (1.0 if action.kind is Kind.F else 2.0))

    def priced(samples: int) -> Simulation:
        per_sample = attrs.evolve(found.costs, activation_bytes=[3 * per_stage * samples] * found.costs.num_stages)
        return simulate(found.plan, per_sample)

    one_sample = 3.0 * per_stage  # through F and B of one stage
    assert found.makespan == pytest.approx(seconds_of(found.schedule, seconds), abs=4 * one_sample)
    assert found.peak_bytes == priced(max(sizes)).peak_bytes
    # All that a rank computes is counted to the sample.
    assert sum(simulate(found.plan, found.costs).busy) == pytest.approx(8 * (2 * 0.25 * count + 3.0 * batch))


def test_a_batch_that_has_no_divisors_is_cut_all_the_same() -> None:
    """A batch of 37 samples ran as one microbatch, for 37 of them are more than are tried."""
    best = plan_search([Layer(1.0, 2.0)] * 8, 4, batch_size=37).best
    assert best.schedule.num_microbatches == 32
    whole = plan_search([Layer(1.0, 2.0)] * 8, 4, batch_size=37, num_microbatches=[1]).best
    assert best.makespan < whole.makespan / 2


def test_overlapped_pairs_of_unequal_stages_are_not_ruled_out() -> None:
    """A pair is of two stages, so a long F may hide under the long B of another: such cuts were taken for too slow to try."""
    times = [(0.1, 0.1), (1.0, 20.0), (20.0, 1.0), (0.1, 0.1), (0.1, 0.1), (20.0, 1.0)]
    network = attrs.evolve(Costs.uniform(1), overlap_gain=1.0)
    found = plan_search(
        [Layer(*pair) for pair in times],
        2,
        batch_size=8,
        num_microbatches=[8],
        network=network,
        schedules=["dualpipe-v"],
    )
    plan = lower(dualpipe_v(2, 8))
    every = []
    for rest in itertools.combinations(range(1, 6), 3):
        parts = [times[a:b] for a, b in itertools.pairwise((0, *rest, 6))]
        sums = [[sum(pair[way] for pair in part) for part in parts] for way in (0, 1)]
        every.append(simulate(plan, Costs(*sums, overlap_gain=1.0)).makespan)
    assert found.best.makespan == pytest.approx(min(every))


@pytest.mark.parametrize("field", ["forward", "backward", "overhead", "activation_bytes", "parameter_bytes"])
@pytest.mark.parametrize("value", ["1", None, -1, float("nan"), float("inf"), [1]])
def test_what_a_layer_may_not_cost(field: str, value: object) -> None:
    """A word ended in a TypeError from within the search; negative bytes made plans fit that do not."""
    with pytest.raises(StageUsageError, match=f"{field} of a layer must be a number, finite and at least 0, got"):
        attrs.evolve(Layer(1.0, 1.0), **{field: value})


@pytest.mark.parametrize("gain", [None, 0.0, 0.75])
def test_overlapped_pairs_are_priced_as_they_run(gain: float | None) -> None:
    """They were priced as one action, as a handler may run them; without a handler the executor takes less time than that."""
    network = attrs.evolve(NETWORK, overlap_gain=gain)
    layers = [Layer(1.0, 2.0, output_bytes=1)] * 8
    best = plan_search(layers, 4, batch_size=8, num_microbatches=[8], network=network, schedules=["dualpipe-v"]).best
    plan = lower(best.schedule)
    as_run = plan.with_pairs_apart() if gain is None else plan
    costs = Costs.uniform(8, output_bytes=1, latency=0.1, bandwidth=10.0)
    assert best.makespan == pytest.approx(simulate(as_run, attrs.evolve(costs, overlap_gain=gain or 0.0)).makespan)
    assert plan != plan.with_pairs_apart()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"num_ranks": 0}, "ranks and samples must be at least 1, got 0 and 4"),
        ({"num_ranks": 5}, "5 ranks need at least 5 layers, got 4"),
        ({"batch_size": 0}, "ranks and samples must be at least 1"),
        # Equal cuts were not tried then, and what was found was slower than they are.
        ({"most_simulations": 0}, "most_simulations must be at least 1, for equal cuts, got 0"),
        ({"num_microbatches": [5]}, "a batch of 4 makes 1 to 4 microbatches, got 5"),
        ({"schedules": ["mine"]}, "no schedule is named 'mine'; there are gpipe, 1f1b"),
        ({"schedules": ["zbv"], "num_ranks": 3}, "4 layers on 3 ranks are too few for zbv"),
        # With a limit of memory, that was blamed.
        ({"schedules": ["zbv"], "num_ranks": 3, "memory_limit": 9}, "4 layers on 3 ranks are too few for zbv"),
        ({"num_microbatches": []}, "num_microbatches are the numbers to try, but there is none"),
        # Layers were said to be too few for these.
        ({"stages_per_rank": []}, "stages_per_rank are the numbers to try, but there is none"),
        ({"stages_per_rank": [1, 0]}, "stages_per_rank must be at least 1, got 0"),
        ({"schedules": []}, "no schedule was named to try"),
        # These ended in errors of Python's from inside.
        ({"num_ranks": 2.0}, "num_ranks must be a whole number, got 2.0, a float"),
        ({"batch_size": "4"}, "batch_size must be a whole number, got '4', a str"),
        ({"num_microbatches": 2}, "num_microbatches are several numbers to try, got 2"),
        ({"num_microbatches": [2.0]}, r"num_microbatches must be a whole number, got 2.0, a float"),
        ({"stages_per_rank": 2}, "stages_per_rank are several numbers to try, got 2"),
        ({"schedules": "1f1b"}, r"schedules are several names, for example \['1f1b'\], got '1f1b'"),
        ({"memory_limit": "4GB"}, "memory_limit is a number of bytes, at least 0, got '4GB'"),
        ({"memory_limit": float("nan")}, "memory_limit is a number of bytes, at least 0, got nan"),
        ({"memory_limit": -1}, "memory_limit is a number of bytes, at least 0, got -1"),
        ({"network": 1e-5}, r"network is given as Costs, got 1e-05; Costs.uniform\(1, latency=1e-5\) for example"),
        ({"most_simulations": None}, "most_simulations must be a whole number, got None"),
        ({"layers": [1.0, 2.0]}, r"plan_search\(\) takes layers, got 1.0"),
        ({"layers": Layer(1.0, 1.0)}, r"plan_search\(\) takes several layers, got a Layer"),
    ],
)
def test_what_cannot_be_searched(change: dict[str, object], sentence: str) -> None:
    arguments: dict[str, object] = {"layers": [Layer(1.0, 1.0)] * 4, "num_ranks": 2, "batch_size": 4, **change}
    with pytest.raises((StageUsageError, ScheduleError), match=sentence):
        plan_search(**arguments)  # type: ignore[arg-type]
