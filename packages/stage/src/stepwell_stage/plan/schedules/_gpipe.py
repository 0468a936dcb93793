"""GPipe: all forwards, then all backwards."""

from __future__ import annotations

from stepwell_p2p._placement import Placement

from .._action import Action, Kind
from .._count import whole_numbers
from .._pause import collector_paused
from .._schedule import Schedule


@collector_paused()
@whole_numbers
def gpipe(num_ranks: int, num_microbatches: int) -> Schedule:
    """All forwards, then all backwards, one stage a rank.

    Simple, and holds the activations of all microbatches at once::

        rank 0: 0F0 0F1  .   .  0B0 0B1
        rank 1:  .  1F0 1F1 1B0 1B1  .

    Args:
        num_ranks: number of ranks, and of stages.
        num_microbatches: M, at least 1.

    Source: Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism", 2019.
    """
    microbatches = range(num_microbatches)
    return Schedule(
        "gpipe",
        Placement.loop(num_ranks, num_ranks),
        num_microbatches,
        tuple(
            tuple(Action(stage, kind, microbatch) for kind in (Kind.F, Kind.B) for microbatch in microbatches)
            for stage in range(num_ranks)
        ),
    )
