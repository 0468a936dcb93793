"""Orders in phases: a few steps in turn, so and so often, and then others. Those of schedules on a V of stages are.

A phase may be made for more microbatches than there are: what is too much is left out, and costs nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TypeAlias

from .._action import Action, Kind

Leaf: TypeAlias = tuple[int, Kind]
"""A stage, and what it does with the next microbatch."""


class Phases:
    """One rank's order; mutable: it counts the microbatches that each stage had.

    Args:
        num_microbatches: M.

    Attributes:
        done: how many of a stage had their forward, their backward (B or I) or their W, by stage and F, B or W.
    """

    def __init__(self, num_microbatches: int) -> None:
        self.num_microbatches = num_microbatches
        self.done: Counter[Leaf] = Counter()

    def repeat(self, times: int, *steps: tuple[Leaf, ...]) -> Iterator[Action]:
        """The steps in turn, so often. A step is a leaf, or a forward and a backward as an overlapped pair."""
        firsts = [[self.done[_counted(leaf)] for leaf in step] for step in steps]
        least = min(first for each in firsts for first in each)
        for turn in range(min(times, self.num_microbatches - least)):
            for step, numbers in zip(steps, firsts, strict=True):
                left = [
                    Action(stage, kind, first + turn)
                    for (stage, kind), first in zip(step, numbers, strict=True)
                    if first + turn < self.num_microbatches
                ]
                if len(left) == 2:
                    yield Action.overlap(*left)
                else:  # half of a pair, or nothing
                    yield from left
        for step in steps:
            for leaf in step:
                self.done[_counted(leaf)] += times


def _counted(leaf: Leaf) -> Leaf:
    stage, kind = leaf
    return stage, Kind.B if kind is Kind.I else kind
