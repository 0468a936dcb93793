"""One simulated run of an order of communication.

What a transport does under given :class:`~stepwell_p2p.Rules` is deterministic: the k-th send of a lane meets its k-th receive,
whoever is faster, and what can proceed at one moment can still proceed later. So one simulated run stands for all of them: it
comes to its end exactly if every run does. Under the rules

* *tagged*, a message goes as soon as both ends are posted;
* *first in, first out*, each rank works through each channel in the order of its posts. The messages of one batch on one channel
  go together; those of a later batch wait until they are done. (This is how a communicator with its own stream behaves.)
* *buffered*, a send is done when it is its turn; *rendezvous*, when its receive has its turn too.

The run takes time linear in the number of messages: every end is posted, gets its turn and is done once, and every step is passed
once, or twice where its rank was blocked in it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from ._ends import Ends
from ._transport import Rules


class Run:
    """The state of the run; after :meth:`finishes`, the state in which it ended.

    Attributes:
        active: by end: whether it has its turn.
        done: by end.
        posted: by batch.
        turns: by lane: how many of its ends have had their turn. Only for first in, first out.
        position: by rank: the step it is at.
        blocked_on: by rank: the batch it waits for, or -1.
    """

    def __init__(self, ends: Ends, rules: Rules) -> None:
        self.ends = ends
        self.rules = rules
        self.active = bytearray(len(ends.ops))
        self.done = bytearray(len(ends.ops))
        self.posted = bytearray(len(ends.first))
        self.turns = [0] * len(ends.queues)
        self.position = [0] * len(ends.sequences)
        self.blocked_on = [-1] * len(ends.sequences)
        self._left = [
            end - start for start, end in itertools.pairwise(ends.first)
        ]  # by batch: its ends that are not done
        self._busy = [0] * len(ends.queues)  # by lane: its ends that have their turn and are not done
        self._waiting: dict[int, int] = {}  # by batch: the rank that is blocked on it
        self._runnable = list(range(len(ends.sequences)))

    def finishes(self) -> bool:
        """Let every rank go as far as it can; whether all came to their end and everything is done."""
        post, left = self._post, self._left
        while self._runnable:
            rank = self._runnable.pop()
            program = self.ends.programs[rank]
            for at in range(self.position[rank], len(program)):
                batch = program[at]
                if batch is None:
                    continue
                if batch >= 0:
                    post(batch)
                elif left[~batch]:
                    self.position[rank], self.blocked_on[rank] = at, ~batch
                    self._waiting[~batch] = rank
                    break
            else:
                self.position[rank] = len(program)
        return not any(left)

    def _post(self, batch: int) -> None:
        """Post a batch, and do all that becomes possible by it. In one piece, for it runs once for each of a million messages."""
        ends, fifo, rendezvous = self.ends, not self.rules.tagged, self.rules.rendezvous
        lane_of, batch_of, other, queues = ends.lane_of, ends.batch_of, ends.other, ends.queues
        active, done, posted, left, busy, turns = (
            self.active,
            self.done,
            self.posted,
            self._left,
            self._busy,
            self.turns,
        )
        posted[batch] = 1
        start, stop = ends.first[batch], ends.first[batch + 1]
        free = lane_of[start:stop]  # lanes that may be free for their next ends
        ready: Sequence[int] = () if fifo else range(start, stop)  # ends that have their turn now
        while True:
            for end in ready:
                active[end] = 1
                mate = other[end]
                if active[mate]:
                    finished = (end,) if done[mate] else (end, mate)
                elif rendezvous or not ends.is_send[end]:
                    continue
                else:
                    finished = (end,)
                for one in finished:
                    done[one] = 1
                    batch = batch_of[one]
                    left[batch] -= 1
                    if not left[batch] and batch in self._waiting:
                        rank = self._waiting.pop(batch)
                        self.blocked_on[rank] = -1
                        self._runnable.append(rank)
                    if fifo:
                        lane = lane_of[one]
                        busy[lane] -= 1
                        if not busy[lane]:
                            free.append(lane)
            if not free:
                return
            lane = free.pop()
            queue, start = queues[lane], turns[lane]
            ready = ()
            if busy[lane] or start == len(queue) or not posted[batch_of[queue[start]]]:
                continue
            batch, stop = batch_of[queue[start]], start + 1
            while stop < len(queue) and batch_of[queue[stop]] == batch:
                stop += 1
            turns[lane], busy[lane] = stop, stop - start
            ready = queue[start:stop]
