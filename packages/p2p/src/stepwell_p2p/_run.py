"""One simulated run of an order of communication.

What a transport does under given :class:`~stepwell_p2p.Rules` is deterministic: the k-th send of a lane meets its k-th receive,
whoever is faster, and what can proceed at one moment can still proceed later. So one simulated run stands for all of them: it
comes to its end exactly if every run does. Under the rules

* *tagged*, a message goes as soon as both ends are posted;
* *first in, first out*, each rank works through each channel in the order of its posts. The messages of one batch on one channel
  go together; those of a later batch wait until they are done. (This is how a communicator with its own stream behaves.)
* *buffered*, a send is done when it is its turn; *rendezvous*, when its receive has its turn too.

The run takes time linear in the number of messages.
"""

from __future__ import annotations

import itertools
from collections import deque

from ._ends import Ends, Lane
from ._step import Post, Wait
from ._transport import Rules


class Run:
    """The state of the run; after :meth:`finishes`, the state in which it ended.

    Attributes:
        active: by end: whether it has its turn.
        done: by end.
        posted: by batch.
        lanes: by rank and channel: groups that are posted and not done. Only for first in, first out.
        position: by rank: the step it is at.
        blocked_on: by rank: the batch it waits for, or -1.
    """

    def __init__(self, ends: Ends, rules: Rules) -> None:
        self.ends = ends
        self.rules = rules
        self.active = bytearray(len(ends.ops))
        self.done = bytearray(len(ends.ops))
        self.posted = bytearray(len(ends.batch_step))
        self.lanes: dict[Lane, deque[int]] = {lane: deque() for lane in set(ends.group_lane)}
        self._lane_of = [self.lanes[lane] for lane in ends.group_lane]
        self.position = [0] * len(ends.sequences)
        self.blocked_on = [-1] * len(ends.sequences)
        self._group_left = _sizes(ends.group_first)
        self._batch_left = _sizes([ends.group_first[group] for group in ends.batch_first])
        self._runnable = list(range(len(ends.sequences)))
        self._moved: list[int] = []  # groups that were done just now

    def finishes(self) -> bool:
        """Let every rank go as far as it can; whether all came to their end and everything is done."""
        while self._runnable:
            self._advance(self._runnable.pop())
        return not any(self._batch_left) and all(batch < 0 for batch in self.blocked_on)

    def _advance(self, rank: int) -> None:
        sequence, at, batch_at = self.ends.sequences[rank], self.position[rank], self.ends.batch_at[rank]
        while at < len(sequence):
            step = sequence[at]
            if isinstance(step, Post):
                self._post(batch_at[at])
            elif isinstance(step, Wait) and self._batch_left[batch_at[step.post]]:
                self.blocked_on[rank] = batch_at[step.post]
                break
            at += 1
        self.position[rank] = at

    def _post(self, batch: int) -> None:
        ends = self.ends
        self.posted[batch] = 1
        if self.rules.tagged:
            for end in ends.ends_of_batch(batch):
                self._activate(end)
            return
        for group in range(ends.batch_first[batch], ends.batch_first[batch + 1]):
            lane = self._lane_of[group]
            lane.append(group)
            if len(lane) == 1:
                for end in ends.ends_of_group(group):
                    self._activate(end)
        while self._moved:
            lane = self._lane_of[self._moved.pop()]
            while lane and not self._group_left[lane[0]]:
                lane.popleft()
                if lane:
                    for end in ends.ends_of_group(lane[0]):
                        self._activate(end)

    def _activate(self, end: int) -> None:
        self.active[end] = 1
        other = self.ends.other[end]
        if self.active[other]:
            self._complete(end)
            if not self.done[other]:
                self._complete(other)
        elif not self.rules.rendezvous and self.ends.is_send[end]:
            self._complete(end)

    def _complete(self, end: int) -> None:
        self.done[end] = 1
        group = self.ends.group_of[end]
        batch = self.ends.group_batch[group]
        self._group_left[group] -= 1
        self._batch_left[batch] -= 1
        if not self._group_left[group] and not self.rules.tagged:
            self._moved.append(group)
        if not self._batch_left[batch]:
            rank = self.ends.rank_of[end]
            if self.blocked_on[rank] == batch:
                self.blocked_on[rank] = -1
                self._runnable.append(rank)


def _sizes(first: list[int]) -> list[int]:
    return [end - start for start, end in itertools.pairwise(first)]
