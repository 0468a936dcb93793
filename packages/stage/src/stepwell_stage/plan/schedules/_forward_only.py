"""Forward only, for evaluation."""

from __future__ import annotations

from stepwell_p2p._placement import Placement

from .._action import Action, Kind
from .._schedule import Schedule


def forward_only(placement: Placement, num_microbatches: int) -> Schedule:
    """Every microbatch forward through every stage, and nothing else.

    In each time slot, were all stages equally fast, a rank with several stages takes the latest one whose input is there. So
    ranks idle in the ends only, and few values wait between stages::

        rank 0: 0F0 0F1 0F2 3F0  .  3F1  .  3F2
        rank 1:  .  1F0 2F0 1F1 2F1 1F2 2F2  .

    Args:
        placement: the rank of each stage; any.
        num_microbatches: M, at least 1.
    """
    stages = [placement.stages_of(rank)[::-1] for rank in range(placement.num_ranks)]
    done = [0] * placement.num_stages  # microbatches through each stage
    rows: list[list[Action]] = [[] for _ in stages]
    for _ in range(placement.num_stages * max(0, num_microbatches)):  # at least one action a slot
        before = done.copy()
        for rank, local in enumerate(stages):
            for stage in local:
                there = before[stage - 1] if stage else num_microbatches
                if done[stage] < there:
                    rows[rank].append(Action(stage, Kind.F, done[stage]))
                    done[stage] += 1
                    break
        if done[-1] == num_microbatches:
            break
    return Schedule("forward-only", placement, num_microbatches, rows)
