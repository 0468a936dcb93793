"""Forward only, for evaluation."""

from __future__ import annotations

from stepwell_p2p._placement import Placement

from .._action import Action, Kind
from .._schedule import Schedule


def forward_only(placement: Placement, num_microbatches: int) -> Schedule:
    """Every microbatch forward through every stage, and nothing else.

    A rank with several stages takes the microbatches in rounds of as many as there are ranks, so that its later stages start
    as soon as their inputs can be there.

    Args:
        placement: the rank of each stage; any.
        num_microbatches: M, at least 1.
    """
    round_size = placement.num_ranks
    return Schedule(
        "forward-only",
        placement,
        num_microbatches,
        tuple(
            tuple(
                Action(stage, Kind.F, microbatch)
                for start in range(0, num_microbatches, round_size)
                for stage in placement.stages_of(rank)
                for microbatch in range(start, min(start + round_size, num_microbatches))
            )
            for rank in range(placement.num_ranks)
        ),
    )
