"""Legal schedules at random, to test what must work for every one."""

from __future__ import annotations

import contextlib
import random

from stepwell_p2p._placement import Placement

from ..exceptions import ScheduleError
from ._action import Action, Kind
from ._schedule import Schedule


def random_schedule(rng: random.Random, *, backward: bool | None = None, custom: bool = False) -> Schedule:
    """A small legal schedule: random stages per rank, placement, order, splits and overlapped pairs.

    Args:
        rng: where it comes from.
        backward: whether it runs backward; either if not given.
        custom: whether actions of the user's own stand between the others.
    """
    num_ranks, num_microbatches = rng.randint(1, 4), rng.randint(1, 4)
    owners = [*range(num_ranks), *(rng.randrange(num_ranks) for _ in range(rng.randint(0, 4)))]
    rng.shuffle(owners)
    has_backward = rng.random() < 0.8 if backward is None else backward
    lots = [[rng.random() < 0.4 for _ in range(num_microbatches)] for _ in owners]
    rows: list[list[Action]] = [[] for _ in range(num_ranks)]
    # What may run next on each stage and microbatch: F first, then the backward from the last stage up, then W if it is split.
    ready = [Action(0, Kind.F, microbatch) for microbatch in range(num_microbatches)]
    while ready:
        action = ready.pop(rng.randrange(len(ready)))
        stage, microbatch = action.stage, action.microbatch or 0
        rows[owners[stage]].append(action)
        turned = action.kind is Kind.F and stage + 1 == len(owners)
        if action.kind is Kind.F and not turned:
            ready.append(Action(stage + 1, Kind.F, microbatch))
        if action.kind is Kind.I:
            ready.append(Action(stage, Kind.W, microbatch))
        before = stage if turned else stage - 1
        if has_backward and before >= 0 and (turned or action.kind.is_backward):
            ready.append(Action(before, Kind.I if lots[before][microbatch] else Kind.B, microbatch))
    placement = Placement.custom(owners)
    if custom:
        for rank, row in enumerate(rows):
            own = [stage for stage, owner in enumerate(owners) if owner == rank]
            for _ in range(rng.randint(0, 3)):
                microbatch = rng.choice([None, *range(num_microbatches)])
                row.insert(rng.randint(0, len(row)), Action.custom(rng.choice(own), rng.choice("ab"), microbatch))
    with contextlib.suppress(ScheduleError):  # a pair waits for what either part needs, which may close a circle
        return Schedule("random", placement, num_microbatches, [_paired(row, rng) for row in rows])
    return Schedule("random", placement, num_microbatches, rows)


def random_links(rng: random.Random, num_stages: int) -> list[tuple[int, int]]:
    """Most links of the chain, and some that skip stages; to each stage at least one."""
    found = []
    for stage in range(1, num_stages):
        into = [(source, stage) for source in range(stage) if rng.random() < (0.9 if source == stage - 1 else 0.3)]
        found += into or [(rng.randrange(stage), stage)]
    return sorted(found)


def _paired(row: list[Action], rng: random.Random) -> list[Action]:
    """Some neighbouring F and B as one."""
    out: list[Action] = []
    for action in row:
        before = out[-1] if out else None
        if (
            before is not None
            and before.kind is Kind.F
            and action.kind.is_backward
            and before.microbatch != action.microbatch
            and rng.random() < 0.4
        ):
            out[-1] = Action.overlap(before, action)
        else:
            out.append(action)
    return out
