"""1F1B: after a warm-up, one forward and one backward in turn."""

from __future__ import annotations

from collections.abc import Iterator

from stepwell_p2p._placement import Placement

from .._action import Action, Kind
from .._count import whole_numbers
from .._pause import collector_paused
from .._schedule import Schedule


@collector_paused()
@whole_numbers
def one_f_one_b(num_ranks: int, num_microbatches: int) -> Schedule:
    """After a warm-up, one forward and one backward in turn, one stage a rank.

    Takes as long as GPipe, but stage *s* of *S* holds the activations of at most *S - s* microbatches::

        rank 0: 0F0 0F1  .  0B0 0F2 0B1  .  0B2
        rank 1:  .  1F0 1B0 1F1 1B1 1F2 1B2  .

    Any M runs; with fewer microbatches than stages the warm-up is as short as M.

    Args:
        num_ranks: number of ranks, and of stages.
        num_microbatches: M, at least 1.

    Source: Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training", 2019, in the flushing form of
    "Memory-Efficient Pipeline-Parallel DNN Training", 2021.
    """
    return Schedule(
        "1f1b",
        Placement.loop(num_ranks, num_ranks),
        num_microbatches,
        tuple(tuple(_row(stage, num_ranks, num_microbatches)) for stage in range(num_ranks)),
    )


def _row(stage: int, num_stages: int, num_microbatches: int) -> Iterator[Action]:
    warm_up = min(num_stages - 1 - stage, num_microbatches)
    for microbatch in range(warm_up):
        yield Action(stage, Kind.F, microbatch)
    for microbatch in range(num_microbatches):
        if microbatch + warm_up < num_microbatches:
            yield Action(stage, Kind.F, microbatch + warm_up)
        yield Action(stage, Kind.B, microbatch)
