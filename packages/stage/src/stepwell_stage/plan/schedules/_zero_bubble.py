"""Zero bubble, one F and one I in turn: W steps fill the gaps that 1F1B leaves."""

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
def zb_h1(num_ranks: int, num_microbatches: int) -> Schedule:
    """1F1B with the backward split, the W of rank *r* lagging *r* microbatches behind, one stage a rank.

    The bubble is a third of that of 1F1B where F, I and W take equally long; every rank holds the activations of as many
    microbatches as the first rank does under 1F1B::

        rank 0: 0F0 0F1  .  0I0 0W0 0F2 0I1 0W1 0I2 0W2
        rank 1:  .  1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2

    Args:
        num_ranks: number of ranks, and of stages.
        num_microbatches: M, at least 1.

    Source: Qi et al., "Zero Bubble Pipeline Parallelism", 2023, schedule ZB-H1.
    """
    sizes = [num_microbatches]
    placement = Placement.loop(num_ranks, num_ranks)
    rows = [_row((rank,), min(num_ranks - 1 - rank, num_microbatches), rank, sizes) for rank in range(num_ranks)]
    return Schedule("zb-h1", placement, num_microbatches, rows)


@collector_paused()
@whole_numbers
def interleaved_zero_bubble(num_ranks: int, num_microbatches: int, *, stages_per_rank: int = 2) -> Schedule:
    """Interleaved 1F1B with the backward split, the W of rank *r* lagging *r* steps behind, and a shorter warm-up.

    Args:
        num_ranks: number of ranks.
        num_microbatches: M, at least 1.
        stages_per_rank: stages of each rank, at least 1.

    Source: Qi et al., "Zero Bubble Pipeline Parallelism", 2023, on looped stages as torch.distributed.pipelining places them.
    """
    placement = Placement.loop(num_ranks * stages_per_rank, num_ranks)
    sizes = round_sizes(num_ranks, num_microbatches)
    rows = [
        _row(placement.stages_of(rank), warm_up(rank, num_ranks, stages_per_rank, sizes, 1), rank, sizes)
        for rank in range(num_ranks)
    ]
    return Schedule("interleaved-zero-bubble", placement, num_microbatches, rows)


def _row(stages: tuple[int, ...], warm: int, lag: int, sizes: list[int]) -> Iterator[Action]:
    forwards, inputs = in_rounds(stages, sizes, Kind.F), in_rounds(stages[::-1], sizes, Kind.I)
    weights = in_rounds(stages[::-1], sizes, Kind.W)
    yield from forwards[:warm]
    for number, action in enumerate(inputs):
        yield from forwards[warm + number : warm + number + 1]
        yield action
        if number >= lag:
            yield weights[number - lag]
    yield from weights[max(0, len(weights) - lag) :]
