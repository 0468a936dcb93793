"""Looped breadth-first: GPipe with several stages a rank."""

from __future__ import annotations

from stepwell_p2p._placement import Placement

from .._action import Action, Kind
from .._count import whole_numbers
from .._pause import collector_paused
from .._schedule import Schedule


@collector_paused()
@whole_numbers
def looped_bfs(num_ranks: int, num_microbatches: int, *, stages_per_rank: int = 2) -> Schedule:
    """All microbatches through one local stage before the next one, backwards in the reverse of that order.

    Each stage computes once without a break, so that a sharded stage is gathered once forward and once backward::

        rank 0: 0F0 0F1 2F0 2F1  .   .  2B1 2B0 0B1 0B0
        rank 1:  .  1F0 1F1 3F0 3F1 3B1 3B0 1B1 1B0  .

    Args:
        num_ranks: number of ranks.
        num_microbatches: M, at least 1.
        stages_per_rank: stages of each rank, at least 1.

    Source: Lamy-Poirier, "Breadth-First Pipeline Parallelism", 2022.
    """
    placement = Placement.loop(num_ranks * stages_per_rank, num_ranks)
    microbatches = range(num_microbatches)
    rows = []
    for rank in range(num_ranks):
        stages = placement.stages_of(rank)
        forwards = [Action(stage, Kind.F, microbatch) for stage in stages for microbatch in microbatches]
        backwards = [Action(stage, Kind.B, microbatch) for stage in stages[::-1] for microbatch in microbatches[::-1]]
        rows.append(forwards + backwards)
    return Schedule("looped-bfs", placement, num_microbatches, rows)
