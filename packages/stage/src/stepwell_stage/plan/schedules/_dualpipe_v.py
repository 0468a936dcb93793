"""DualPipeV: a V of stages with forwards and backwards overlapped."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from stepwell_p2p._placement import Placement

from .._action import Action, Kind
from .._pause import collector_paused
from .._schedule import Schedule


@collector_paused()
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
    full = max(num_microbatches, 2 * num_ranks)
    rows = (_row(rank, num_ranks, full, num_microbatches) for rank in range(num_ranks))
    return Schedule("dualpipe-v", placement, num_microbatches, rows)


def _row(rank: int, num_ranks: int, full: int, num_microbatches: int) -> Iterator[Action]:
    for action in _Row(rank, num_ranks).actions(full):
        left = [leaf for leaf in action.leaves if (leaf.microbatch or 0) < num_microbatches]
        if len(left) == len(action.leaves):
            yield action
        else:  # half of a pair, or nothing
            yield from left


class _Row:
    """One rank's order; counts the microbatches of each stage."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        self.rank, self.num_ranks = rank, num_ranks
        self.down, self.up = rank, 2 * num_ranks - 1 - rank
        self.forwards = {self.down: 0, self.up: 0}
        self.backwards = {self.down: 0, self.up: 0}
        self.weights: deque[Action] = deque()

    def forward(self, stage: int) -> Action:
        self.forwards[stage] += 1
        return Action(stage, Kind.F, self.forwards[stage] - 1)

    def backward(self, stage: int, *, split: bool = False) -> Action:
        number = self.backwards[stage]
        self.backwards[stage] += 1
        if split:
            self.weights.append(Action(stage, Kind.W, number))
        return Action(stage, Kind.I if split else Kind.B, number)

    def pair(self, forward: int, backward: int) -> Action:
        return Action.overlap(self.forward(forward), self.backward(backward))

    def weight(self) -> Iterator[Action]:
        if self.weights:
            yield self.weights.popleft()

    def actions(self, num_microbatches: int) -> Iterator[Action]:
        down, up, rank, behind = self.down, self.up, self.rank, self.num_ranks - self.rank - 1
        for _ in range(2 * behind):
            yield self.forward(down)
        for _ in range(rank + 1):
            yield self.forward(down)
            yield self.forward(up)
        for _ in range(behind):
            yield self.backward(up, split=True)
            yield from self.weight()
            yield self.forward(up)
        for number in range(num_microbatches - 2 * self.num_ranks + rank + 1):  # steady: two pairs in turn
            if number == 0 and behind == 0:  # nothing to hide under yet: the gradient had better leave early
                yield self.forward(down)
                yield self.backward(up)
            else:
                yield self.pair(down, up)
            yield self.pair(up, down)
        for _ in range(behind):
            yield self.backward(up)
            yield self.pair(up, down)
        for number in range(2 * (rank + 1)):  # the last backwards in turn; split in the second half
            yield self.backward(down if number % 2 else up, split=number > rank)
        for _ in range(behind):
            yield from self.weight()
            yield self.backward(down, split=True)
        while self.weights:
            yield from self.weight()
