"""Interleaved 1F1B: 1F1B with several stages a rank, which shortens the bubble."""

from __future__ import annotations

from collections.abc import Iterator

from stepwell_p2p._placement import Placement

from .._action import Action, Kind
from .._count import whole_numbers
from .._pause import collector_paused
from .._schedule import Schedule
from ._rounds import in_rounds, round_sizes, warm_up


@collector_paused()
@whole_numbers
def interleaved_1f1b(num_ranks: int, num_microbatches: int, *, stages_per_rank: int = 2) -> Schedule:
    """1F1B over looped stages: the more stages a rank has, the shorter the bubble, and the more messages.

    Microbatches go in rounds through all stages of a rank; after a warm-up forwards and backwards take turns::

        rank 0: 0F0 0F1 2F0 2F1  .  2B0  .  2B1 0B0 0B1
        rank 1:  .  1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1  .

    Any M runs: rounds have as many microbatches as there are ranks, or some more where M is no multiple.

    Args:
        num_ranks: number of ranks.
        num_microbatches: M, at least 1.
        stages_per_rank: stages of each rank, at least 1; with 1 this is 1F1B with a longer warm-up.

    Source: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", 2021.
    """
    placement = Placement.loop(num_ranks * stages_per_rank, num_ranks)
    sizes = round_sizes(num_ranks, num_microbatches)
    return Schedule(
        "interleaved-1f1b",
        placement,
        num_microbatches,
        [
            _row(placement.stages_of(rank), warm_up(rank, num_ranks, stages_per_rank, sizes, 2), sizes)
            for rank in range(num_ranks)
        ],
    )


def _row(stages: tuple[int, ...], warm: int, sizes: list[int]) -> Iterator[Action]:
    forwards, backwards = in_rounds(stages, sizes, Kind.F), in_rounds(stages[::-1], sizes, Kind.B)
    yield from forwards[:warm]
    for number, backward in enumerate(backwards):
        yield from forwards[warm + number : warm + number + 1]
        yield backward
