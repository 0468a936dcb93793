"""ZB-V: zero bubble on a V of stages, two a rank."""

from __future__ import annotations

from collections.abc import Iterator

from stepwell_p2p._placement import Placement

from .._action import Action, Kind
from .._pause import collector_paused
from .._schedule import Schedule


@collector_paused()
def zbv(num_ranks: int, num_microbatches: int) -> Schedule:
    """Zero bubble on a V: rank *r* of *R* holds stages *r* and *2R - 1 - r*.

    Where F, I and W take equally long no rank idles between its first and last action (from M = 2R on), with the memory of 1F1B,
    evenly spread::

        rank 0: 0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2  .
        rank 1:  .  1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2

    Fewer microbatches run in the order that those of a longer step would have.

    Args:
        num_ranks: number of ranks; there are twice as many stages.
        num_microbatches: M, at least 1.

    Source: Qi et al., "Zero Bubble Pipeline Parallelism", 2023, schedule ZB-V.
    """
    placement = Placement.v(2 * num_ranks, num_ranks)
    full = max(num_microbatches, 2 * num_ranks - 1)  # the pattern needs as many; what is too much is left out
    rows = (
        [action for action in _row(rank, num_ranks, full) if (action.microbatch or 0) < num_microbatches]
        for rank in range(num_ranks)
    )
    return Schedule("zbv", placement, num_microbatches, rows)


def _row(rank: int, num_ranks: int, num_microbatches: int) -> Iterator[Action]:
    down, up = rank, 2 * num_ranks - 1 - rank
    count: dict[tuple[int, Kind], int] = {(stage, kind): 0 for stage in (down, up) for kind in Kind}

    def run(stage: int, *kinds: Kind) -> Iterator[Action]:
        """The next microbatch of each kind on a stage."""
        for kind in kinds:
            yield Action(stage, kind, count[stage, kind])
            count[stage, kind] += 1

    for _ in range(2 * (num_ranks - rank) - 1):  # fill the way down
        yield from run(down, Kind.F)
    for _ in range(rank):  # the way up begins to fill
        yield from run(up, Kind.F)
        yield from run(down, Kind.F)
    for _ in range(num_ranks - rank):  # the first backwards, on the way up
        yield from run(up, Kind.F, Kind.I, Kind.W)
    while count[up, Kind.F] < num_microbatches:  # steady
        if count[down, Kind.F] < num_microbatches:
            yield from run(down, Kind.F)
        yield from run(down, Kind.I, Kind.W)
        yield from run(up, Kind.F, Kind.I, Kind.W)
    for _ in range(rank):  # no forwards are left: gradients first, weights are kept for the gaps
        yield from run(down, Kind.I)
        yield from run(up, Kind.I)
    for _ in range(num_ranks - rank):
        yield from run(down, Kind.I, Kind.W)
    for stage in (up, down):
        while count[stage, Kind.W] < num_microbatches:
            yield from run(stage, Kind.W)
