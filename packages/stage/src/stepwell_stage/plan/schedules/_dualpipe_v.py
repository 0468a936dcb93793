"""DualPipeV: a V of stages with forwards and backwards overlapped."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Mapping

from stepwell_p2p._placement import Placement

from .._action import Action, Kind
from .._count import whole_numbers
from .._pause import collector_paused
from .._schedule import Schedule
from ._phases import Phases


@collector_paused()
@whole_numbers
def dualpipe_v(num_ranks: int, num_microbatches: int) -> Schedule:
    """A V of stages, where in the steady state a forward of one half runs together with a backward of the other.

    Rank *r* of *R* holds stages *r* and *2R - 1 - r*. The pairs let the communication inside one half (of experts, of tensor
    parallelism) run under the compute of the other. In the ends backwards are split to fill gaps. Fewer than 2R microbatches run
    in the order that those of a longer step would have.

    Args:
        num_ranks: number of ranks; there are twice as many stages.
        num_microbatches: M, at least 1.

    Source: DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, and the cut-in-half form of its published DualPipe.
    """
    placement = Placement.v(2 * num_ranks, num_ranks)
    rows = (_row(rank, num_ranks, num_microbatches) for rank in range(num_ranks))
    return Schedule("dualpipe-v", placement, num_microbatches, rows)


def _row(rank: int, num_ranks: int, num_microbatches: int) -> Iterator[Action]:
    full = max(num_microbatches, 2 * num_ranks)  # the pattern needs as many
    phases, down, up, behind = Phases(num_microbatches), rank, 2 * num_ranks - 1 - rank, num_ranks - rank - 1
    down_f, down_b, up_f, up_b = (down, Kind.F), (down, Kind.B), (up, Kind.F), (up, Kind.B)
    yield from phases.repeat(2 * behind, (down_f,))
    yield from phases.repeat(rank + 1, (down_f,), (up_f,))
    yield from phases.repeat(behind, ((up, Kind.I),), ((up, Kind.W),), (up_f,))
    steady = full - 2 * num_ranks + rank + 1
    if behind == 0:  # nothing to hide under yet: the gradient had better leave early
        yield from phases.repeat(1, (down_f,), (up_b,), (up_f, down_b))
        steady -= 1
    yield from phases.repeat(steady, (down_f, up_b), (up_f, down_b))  # two pairs in turn
    yield from phases.repeat(behind, (up_b,), (up_f, down_b))
    if phases.done[down_b] < num_microbatches:
        numbers = {stage: itertools.count(phases.done[stage, Kind.B]) for stage in (down, up)}
        yield from (action for action in _end(rank, behind, numbers) if (action.microbatch or 0) < num_microbatches)


def _end(rank: int, behind: int, numbers: Mapping[int, Iterator[int]]) -> Iterator[Action]:
    """The last backwards, of the two stages in turn; split in the second half, with the weights left for the gaps."""
    down, up = numbers
    weights: deque[Action] = deque()

    def split(stage: int) -> Action:
        number = next(numbers[stage])
        weights.append(Action(stage, Kind.W, number))
        return Action(stage, Kind.I, number)

    for turn in range(2 * (rank + 1)):
        stage = down if turn % 2 else up
        yield split(stage) if turn > rank else Action(stage, Kind.B, next(numbers[stage]))
    for _ in range(behind):
        if weights:
            yield weights.popleft()
        yield split(down)
    yield from weights
