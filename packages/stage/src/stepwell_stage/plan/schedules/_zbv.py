"""ZB-V: zero bubble on a V of stages, two a rank."""

from __future__ import annotations

from collections.abc import Iterator

from stepwell_p2p._placement import Placement

from .._action import Action, Kind
from .._count import whole_numbers
from .._pause import collector_paused
from .._schedule import Schedule
from ._phases import Phases


@collector_paused()
@whole_numbers
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
    rows = (_row(rank, num_ranks, num_microbatches) for rank in range(num_ranks))
    return Schedule("zbv", placement, num_microbatches, rows)


def _row(rank: int, num_ranks: int, num_microbatches: int) -> Iterator[Action]:
    full = max(num_microbatches, 2 * num_ranks - 1)  # the pattern needs as many
    phases, down, up, behind = Phases(num_microbatches), rank, 2 * num_ranks - 1 - rank, num_ranks - rank
    down_f, down_i, down_w = (((down, kind),) for kind in (Kind.F, Kind.I, Kind.W))
    up_f, up_i, up_w = (((up, kind),) for kind in (Kind.F, Kind.I, Kind.W))
    yield from phases.repeat(2 * behind - 1, down_f)  # fill the way down
    yield from phases.repeat(rank, up_f, down_f)  # the way up begins to fill
    yield from phases.repeat(behind, up_f, up_i, up_w)  # the first backwards, on the way up
    yield from phases.repeat(full - num_ranks, down_f, down_i, down_w, up_f, up_i, up_w)  # steady
    yield from phases.repeat(rank, down_i, up_i)  # no forwards are left: gradients first, weights are kept for the gaps
    yield from phases.repeat(behind, down_i, down_w)
    yield from phases.repeat(full, up_w)
    yield from phases.repeat(full, down_w)
