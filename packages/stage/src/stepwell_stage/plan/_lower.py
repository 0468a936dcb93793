"""Lowering: communication put into a schedule.

For every wire between two ranks the sender gets a SEND right after the action that makes the value, and the receiver a RECV some
actions before the one that takes it. Three rules keep it safe and lean:

* *Order.* On each edge receives are posted in the order of the sends, whatever order they are consumed in. So both ends of a
  first-in-first-out channel agree without looking at each other.
* *Early, but not too early.* A receive is posted ``prefetch`` compute actions ahead of its use: early enough that the transfer
  runs under other work, late enough that buffers follow the microbatches in flight and not M.
* *Let go.* A sent value is kept until its send is done. Its WAIT stands where waiting costs nothing: for activations before the
  backward of the same microbatch (whose gradient proves the arrival), else ``window`` sends later on.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable

import attrs

from stepwell_p2p._placement import Placement

from ..exceptions import ScheduleError
from ._action import Action, Kind
from ._schedule import Schedule


@attrs.frozen
class Plan:
    """A lowered schedule: for every rank everything it does, in order. Pure data.

    Attributes:
        schedule: what was lowered.
        links: pairs of stages (source, destination) between which values travel.
        actions: for each rank its actions, communication included.
    """

    schedule: Schedule
    links: tuple[tuple[int, int], ...]
    actions: tuple[tuple[Action, ...], ...]

    @property
    def placement(self) -> Placement:
        """The rank of each stage."""
        return self.schedule.placement

    @property
    def num_microbatches(self) -> int:
        """M."""
        return self.schedule.num_microbatches

    def peers(self, stage: int, kind: Kind) -> tuple[int, ...]:
        """The stages on other ranks with which a SEND or RECV of ``stage`` exchanges values, ascending."""
        downstream = kind in (Kind.SEND_F, Kind.RECV_B, Kind.WAIT_F)
        ranks = self.placement.ranks
        found = (
            (destination if downstream else source)
            for source, destination in self.links
            if (source if downstream else destination) == stage and ranks[source] != ranks[destination]
        )
        return tuple(sorted(found))


def lower(
    schedule: Schedule,
    links: Iterable[tuple[int, int]] | None = None,
    *,
    prefetch: int = 1,
    window: int = 2,
) -> Plan:
    """Put communication into a schedule.

    Args:
        schedule: what each rank computes.
        links: pairs of stages (source, later destination) between which values travel; by default each stage and the next.
        prefetch: how many compute actions ahead of its use a receive is posted, at least 0.
        window: how many sends of one edge may be under way before the oldest is waited for, at least 1.

    Raises:
        ScheduleError: a link names a stage that is not there, or does not lead to a later stage; a limit is too small.
    """
    num_stages = schedule.placement.num_stages
    chosen = tuple(sorted(set(links))) if links is not None else tuple((s, s + 1) for s in range(num_stages - 1))
    for source, destination in chosen:
        if not 0 <= source < destination < num_stages:
            raise ScheduleError(
                f"link {source} -> {destination} must lead from a stage to a later one of the {num_stages} stages"
            )
    if prefetch < 0 or window < 1:
        raise ScheduleError(f"prefetch must be at least 0 and window at least 1, got {prefetch} and {window}")
    return Plan(schedule, chosen, _Lowering(schedule, chosen, prefetch, window).actions())


class _Lowering:
    """One run of :func:`lower`; holds the tables that all ranks share."""

    def __init__(self, schedule: Schedule, links: tuple[tuple[int, int], ...], prefetch: int, window: int) -> None:
        self.schedule = schedule
        self.ranks = schedule.placement.ranks
        self.prefetch = prefetch
        self.window = window
        crossing = [(a, b) for a, b in links if self.ranks[a] != self.ranks[b]]
        self.consumers: dict[int, list[int]] = defaultdict(list)
        self.producers: dict[int, list[int]] = defaultdict(list)
        for source, destination in crossing:
            self.consumers[source].append(destination)
            self.producers[destination].append(source)

    def actions(self) -> tuple[tuple[Action, ...], ...]:
        incoming = self._incoming()
        return tuple(tuple(self._row(rank, incoming[rank])) for rank in range(len(self.schedule.actions)))

    def _incoming(self) -> list[dict[int, list[Action]]]:
        """For each rank, by source rank, the RECVs that the source's sends call for, in the order of those sends."""
        incoming: list[dict[int, list[Action]]] = [defaultdict(list) for _ in self.schedule.actions]
        for rank, row in enumerate(self.schedule.actions):
            for action in row:
                for stage in self.consumers[action.stage] if action.kind is Kind.F else ():
                    incoming[self.ranks[stage]][rank].append(Action(stage, Kind.RECV_F, action.microbatch))
                for stage in self.producers[action.stage] if action.kind in (Kind.B, Kind.I) else ():
                    incoming[self.ranks[stage]][rank].append(Action(stage, Kind.RECV_B, action.microbatch))
        return incoming

    def _row(self, rank: int, incoming: dict[int, list[Action]]) -> Iterable[Action]:
        row = self.schedule.actions[rank]
        queues = {source: deque(receives) for source, receives in incoming.items()}
        posted: set[Action] = set()
        underway: dict[tuple[int, Kind], deque[Action]] = defaultdict(deque)
        position = 0
        for done, action in enumerate(row):
            # Post what the actions up to `prefetch` ahead will take.
            while position < len(row) and position <= done + self.prefetch:
                yield from self._receives(row[position], queues, posted)
                position += 1
            if action.kind in (Kind.B, Kind.I) and self.consumers[action.stage]:
                # Every consumer has sent its gradient back by now, so the activation has long arrived.
                wait = Action(action.stage, Kind.WAIT_F, action.microbatch)
                yield action
                yield wait
            else:
                yield action
            yield from self._sends(action, underway)
        for queue in underway.values():
            yield from queue

    def _receives(self, action: Action, queues: dict[int, deque[Action]], posted: set[Action]) -> Iterable[Action]:
        """The RECV that a compute action needs, after those that were sent before it on the same edge."""
        if action.kind is Kind.F:
            needed, peers = Action(action.stage, Kind.RECV_F, action.microbatch), self.producers[action.stage]
        elif action.kind in (Kind.B, Kind.I):
            needed, peers = Action(action.stage, Kind.RECV_B, action.microbatch), self.consumers[action.stage]
        else:
            return
        if needed in posted:
            return
        for source in sorted({self.ranks[peer] for peer in peers}):
            queue = queues[source]
            while (receive := queue.popleft()) != needed:
                if receive not in posted:
                    posted.add(receive)
                    yield receive
        if peers:
            posted.add(needed)
            yield needed

    def _sends(self, action: Action, underway: dict[tuple[int, Kind], deque[Action]]) -> Iterable[Action]:
        stage, kind, microbatch = action.stage, action.kind, action.microbatch
        if kind is Kind.F and self.consumers[stage]:
            send, wait, waited_by_backward = Kind.SEND_F, Kind.WAIT_F, self.schedule.has_backward
        elif kind in (Kind.B, Kind.I) and self.producers[stage]:
            send, wait, waited_by_backward = Kind.SEND_B, Kind.WAIT_B, False
        else:
            return
        queue = underway[stage, wait]
        if not waited_by_backward:
            if len(queue) >= self.window:
                yield queue.popleft()
            queue.append(Action(stage, wait, microbatch))
        yield Action(stage, send, microbatch)
