"""Forward only, for evaluation."""

from __future__ import annotations

from stepwell_p2p._placement import Placement

from .._action import Action, Kind
from .._count import whole_numbers
from .._require import require
from .._schedule import Schedule


@whole_numbers
def forward_only(placement: Placement, num_microbatches: int) -> Schedule:
    """Every microbatch forward through every stage, and nothing else.

    In each time slot, were all stages equally fast, a rank with several stages takes the latest one whose input is there. So
    few values wait between stages, and no order is faster on a chain, on a V with two stages a rank,
    or on a loop where M is a multiple of the ranks::

        rank 0: 0F0 0F1 0F2 3F0  .  3F1  .  3F2
        rank 1:  .  1F0 2F0 1F1 2F1 1F2 2F2  .

    Args:
        placement: the rank of each stage; any.
        num_microbatches: M, at least 1.
    """
    require(placement, Placement, "forward_only() takes a placement", "Placement.loop(stages, ranks) is the usual one")
    stages = [placement.stages_of(rank)[::-1] for rank in range(placement.num_ranks)]
    done = [0] * placement.num_stages  # microbatches through each stage
    there = [num_microbatches, *done]  # before each stage, and behind the last
    rows: list[list[Action]] = [[] for _ in stages]
    awake = set(placement.ranks)  # ranks that may have something to do in the next slot
    while awake:
        found = ((stage for stage in stages[rank] if done[stage] < there[stage]) for rank in awake)
        chosen = [stage for stage in (next(each, None) for each in found) if stage is not None]
        for stage in chosen:
            rows[placement.ranks[stage]].append(Action(stage, Kind.F, done[stage]))
            done[stage] += 1
            there[stage + 1] += 1
        awake = {placement.ranks[other] for stage in chosen for other in (stage, stage + 1) if other < len(done)}
    return Schedule("forward-only", placement, num_microbatches, rows)
