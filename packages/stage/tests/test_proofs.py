"""Every built-in schedule is proved, with 1 to 16 stages and 1 to 64 microbatches, for the strictest of rules.

What is proved for them holds for all others, which is tested too. The tests take each number of ranks and stages with a small and
a large number of microbatches; `python packages/stage/tests/test_proofs.py` takes all with all.
"""

from __future__ import annotations

import itertools
import random
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepwell_p2p import ChannelPolicy, Placement, Rules
from stepwell_p2p.exceptions import DeadlockError
from stepwell_stage import Schedule, lower, prove
from stepwell_stage.exceptions import ScheduleError
from stepwell_stage.plan._random import random_links, random_schedule
from stepwell_stage.schedules import (
    BY_NAME,
    forward_only,
    interleaved_1f1b,
    interleaved_zero_bubble,
    looped_bfs,
)

STAGES, MICROBATCHES = 16, 64
STRICT = Rules(tagged=False, rendezvous=True)
LOOPED: dict[str, Callable[..., Schedule]] = {
    "interleaved-1f1b": interleaved_1f1b,
    "looped-bfs": looped_bfs,
    "interleaved-zero-bubble": interleaved_zero_bubble,
}
NAMES = (*BY_NAME, "forward-only", "forward-only in a V")


def makers(name: str) -> Iterator[Callable[[int], Schedule]]:
    """For each number of ranks and of stages on them: from microbatches to the schedule."""
    for ranks in range(1, STAGES + 1):
        depths = range(1, STAGES // ranks + 1)
        if name == "forward-only":
            yield from (partial(forward_only, Placement.loop(ranks * depth, ranks)) for depth in depths)
        elif name == "forward-only in a V":
            yield from (partial(forward_only, Placement.v(ranks * depth, ranks)) for depth in depths[1:])
        elif name in LOOPED:
            yield from (partial(LOOPED[name], ranks, stages_per_rank=depth) for depth in depths)
        elif BY_NAME[name](ranks, 1).placement.num_stages <= STAGES:
            yield partial(BY_NAME[name], ranks)


def check(make: Callable[[int], Schedule], num_microbatches: int) -> None:
    schedule = make(num_microbatches)  # making it checks that it is complete and legal
    proof = prove(lower(schedule), STRICT, channels="per-edge")
    assert max(proof.peak_activations) <= num_microbatches * schedule.placement.num_stages


@pytest.mark.parametrize("name", NAMES)
def test_every_schedule_is_proved_for_the_strictest_rules(name: str) -> None:
    seen = set()
    for number, make in enumerate(makers(name)):
        for quarter in range(2):  # of these sizes one is small and one large
            count = (number * 7 + 11 * quarter) % (MICROBATCHES // 2) + quarter * MICROBATCHES // 2 + 1
            check(make, count)
            seen.add(count)
    assert len(seen) >= 14


@given(seed=st.integers(0, 2**32), prefetch=st.integers(0, 3))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_what_holds_for_the_strictest_rules_holds_for_all(seed: int, prefetch: int) -> None:
    """Also of plans in an order that lowering would not choose."""
    rng = random.Random(seed)
    schedule = random_schedule(rng)
    plan = lower(schedule, random_links(rng, schedule.placement.num_stages), prefetch=prefetch)
    for _ in range(rng.randrange(4)):
        rows = [list(row) for row in plan.actions]
        row = rng.choice([row for row in rows if row])
        at = rng.randrange(len(row))
        row.insert(min(len(row) - 1, max(0, at + rng.randint(-3, 3))), row.pop(at))
        plan = attrs.evolve(plan, actions=rows)
    proved = {}
    for policy, tagged, rendezvous in itertools.product(ChannelPolicy, (False, True), (False, True)):
        try:
            proof = prove(plan, Rules(tagged=tagged, rendezvous=rendezvous), channels=policy)
        except (ScheduleError, DeadlockError):
            proof = None
        proved[policy, tagged, rendezvous] = proof
    strict = proved[ChannelPolicy.PER_EDGE, False, True]
    if strict is not None:
        for (policy, tagged, _), proof in proved.items():
            if tagged or policy is ChannelPolicy.PER_EDGE:
                assert proof == strict
    for (policy, tagged, rendezvous), proof in proved.items():  # sends that are done at once never make a plan worse
        if proof is not None and rendezvous:
            assert proved[policy, tagged, False] == proof


if __name__ == "__main__":
    for each in NAMES:
        begun, total = time.perf_counter(), 0
        for made, microbatches in itertools.product(makers(each), range(1, MICROBATCHES + 1)):
            check(made, microbatches)
            total += 1
        sys.stdout.write(f"{each}: {total} sizes proved in {time.perf_counter() - begun:.0f} s\n")
        sys.stdout.flush()
