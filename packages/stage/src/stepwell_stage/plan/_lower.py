"""Lowering: communication put into a schedule.

For every link between two ranks the sender gets a SEND right after the action that makes the value, and the receiver a RECV some
actions before the one that takes it. Three rules keep it safe and lean:

* *Order.* On each edge receives are posted in the order of the sends, whatever order they are consumed in. So both ends of a
  first-in-first-out channel agree without looking at each other. A stage that takes values from several others has one RECV for
  each, since no one order of its receives may suit every edge. A RECV names its source unless that is the neighbour alone.
* *Early, but not too early.* A receive is posted ``prefetch`` compute actions ahead of its use: early enough that the transfer
  runs under other work, late enough that buffers follow the microbatches in flight and not M.
* *Let go.* A sent value is kept until its send is done. Its WAIT stands where waiting costs nothing and can close no circle: for
  a value right after the backward of the same microbatch, whose gradient proves the arrival; for what is not answered
  (gradients, and values where there is no backward) before the first action that, in a timeline of equal actions, starts after
  the receiver has used it. All waits lead forward in that one timeline, so no circle of them can close.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Collection, Iterable, Iterator

import attrs

from stepwell_p2p._placement import Placement

from ..exceptions import ScheduleError
from ._action import Action, Kind
from ._messages import Messages, Port
from ._schedule import Schedule, in_time
from ._shard import with_data_parallel


def _rows(rows: Iterable[Iterable[Action]]) -> tuple[tuple[Action, ...], ...]:
    return tuple(tuple(row) for row in rows)


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
    actions: tuple[tuple[Action, ...], ...] = attrs.field(converter=_rows, repr=False)

    @property
    def placement(self) -> Placement:
        """The rank of each stage."""
        return self.schedule.placement

    @property
    def num_microbatches(self) -> int:
        """M."""
        return self.schedule.num_microbatches

    def peers(self, action: Action) -> tuple[int, ...]:
        """The stages on other ranks with which a SEND, RECV or WAIT exchanges values, ascending."""
        if action.peer is not None:
            return (action.peer,)
        downstream = action.kind in (Kind.SEND_F, Kind.RECV_B, Kind.WAIT_F)
        ranks = self.placement.ranks
        found = (
            (destination if downstream else source)
            for source, destination in self.links
            if (source if downstream else destination) == action.stage and ranks[source] != ranks[destination]
        )
        return tuple(sorted(found))


def lower(
    schedule: Schedule,
    links: Iterable[tuple[int, int]] | None = None,
    *,
    prefetch: int = 1,
    sharded: Collection[int] = (),
    reduced: Collection[int] = (),
    max_unsharded: int = 3,
) -> Plan:
    """Put communication into a schedule.

    Example::

        plan = lower(one_f_one_b(4, 8))                    # a chain
        plan = lower(one_f_one_b(4, 8), [(0, 1), (1, 2), (2, 3), (0, 3)])    # with a skip connection

    Args:
        schedule: what each rank computes.
        links: pairs of stages (source, later destination) between which values travel; by default each stage and the next.
        prefetch: how many compute actions ahead of its use a receive is posted, at least 0.
        sharded: stages whose parameters are gathered (UNSHARD) before they compute and freed (RESHARD) afterwards.
        reduced: stages whose gradients are reduced (REDUCE_GRAD) after their last backward.
        max_unsharded: how many sharded stages a rank may have gathered at once: those at work, and those coming next.

    Raises:
        ScheduleError: a link or stage that is not there, a link that does not lead to a later stage, a limit that is too small.
    """
    num_stages = schedule.placement.num_stages
    chosen = tuple(sorted(set(links))) if links is not None else tuple((s, s + 1) for s in range(num_stages - 1))
    for source, destination in chosen:
        if not 0 <= source < destination < num_stages:
            raise ScheduleError(
                f"link {source} -> {destination} must lead from a stage to a later one of the {num_stages} stages"
            )
    for stage in (*sharded, *reduced):
        if not 0 <= stage < num_stages:
            raise ScheduleError(
                f"stage {stage} was said to be data parallel, but there are stages 0 to {num_stages - 1}"
            )
    if prefetch < 0:
        raise ScheduleError(f"prefetch must be at least 0, got {prefetch}")
    rows: Iterable[list[Action]] = _Lowering(schedule, chosen, prefetch).rows()
    if sharded or reduced:
        rows = with_data_parallel(rows, set(sharded), set(reduced), max_unsharded)
    return Plan(schedule, chosen, rows)


# Members of an enum are looked up through Python code before 3.12; a plan asks for them millions of times.
F, B, I, W = Kind.F, Kind.B, Kind.I, Kind.W  # noqa: E741 - the field's names
SEND_F, SEND_B, RECV_F, RECV_B = Kind.SEND_F, Kind.SEND_B, Kind.RECV_F, Kind.RECV_B
WAIT_F, WAIT_B = Kind.WAIT_F, Kind.WAIT_B


class _Lowering:
    """One run of :func:`lower`; holds the tables that all ranks share."""

    def __init__(self, schedule: Schedule, links: tuple[tuple[int, int], ...], prefetch: int) -> None:
        self.schedule = schedule
        self.prefetch = prefetch
        self.count = schedule.num_microbatches
        self.messages = Messages.of(schedule.placement, links, self.count)
        self.answered = schedule.has_backward
        self.slots: list[list[int]] = [[] for _ in schedule.actions]  # when each action runs, were all equally long
        size = self.count * schedule.placement.num_stages
        self.forward, self.backward = [0] * size, [0] * size  # likewise for each stage and microbatch
        for rank, action, slot in in_time(schedule):
            self.slots[rank].append(slot)
            for leaf in action.parts or (action,):
                if leaf.kind is F:
                    self.forward[leaf.stage * self.count + (leaf.microbatch or 0)] = slot
                elif leaf.kind is not W:
                    self.backward[leaf.stage * self.count + (leaf.microbatch or 0)] = slot
        self.incoming = self._incoming()

    def rows(self) -> Iterator[list[Action]]:
        """Each rank's actions."""
        for rank in range(len(self.schedule.actions)):
            yield self._row(rank)

    def _incoming(self) -> list[dict[int, deque[tuple[int, Action]]]]:
        """For each rank, by source rank, the RECVs that the source's sends call for and their messages, in the sends' order."""
        ranks, ports = self.schedule.placement.ranks, self.messages.ports
        incoming: list[dict[int, deque[tuple[int, Action]]]] = [{} for _ in self.schedule.actions]
        calls = {
            kind: [
                [
                    (
                        port.base,
                        port.peer,
                        None if len(ports[receive][port.peer]) == 1 and abs(port.peer - stage) == 1 else stage,
                        incoming[ranks[port.peer]].setdefault(ranks[stage], deque()),
                    )
                    for port in row
                ]
                for stage, row in enumerate(ports[send])
            ]
            for kind, send, receive in (
                (F, SEND_F, RECV_F),
                (B, SEND_B, RECV_B),
                (I, SEND_B, RECV_B),
            )
        }
        for row in self.schedule.actions:
            for action in row:
                for leaf in action.parts or (action,):
                    if leaf.kind is W:
                        continue
                    receive = RECV_F if leaf.kind is F else RECV_B
                    for base, peer, source, queue in calls[leaf.kind][leaf.stage]:
                        queue.append((base + leaf.microbatch, Action(peer, receive, leaf.microbatch, source)))  # type: ignore[operator]
        return incoming

    def _row(self, rank: int) -> list[Action]:
        row, slots = self.schedule.actions[rank], self.slots[rank]
        out: list[Action] = []
        posted = set[int]()
        waits: list[tuple[int, int, Action]] = []  # when each may stand, a number to keep ties in order, the WAIT
        position = 0
        for done, action in enumerate(row):
            while position < len(row) and position <= done + self.prefetch:  # what the next actions will take
                for leaf in row[position].parts or (row[position],):
                    self._receive(rank, leaf, posted, out)
                position += 1
            while waits and waits[0][0] <= slots[done]:
                out.append(heapq.heappop(waits)[2])
            out.append(action)
            for leaf in action.parts or (action,):
                self._send(leaf, waits, out)
        out.extend(wait for _, _, wait in sorted(waits))
        return out

    def _receive(self, rank: int, action: Action, posted: set[int], out: list[Action]) -> None:
        """The RECVs that a compute action needs, each after those that were sent before it on the same edge."""
        if action.kind is W:
            return
        ranks = self.schedule.placement.ranks
        for port in self.messages.ports[RECV_F if action.kind is F else RECV_B][action.stage]:
            message = port.base + (action.microbatch or 0)
            if message in posted:
                posted.remove(message)
                continue
            queue = self.incoming[rank][ranks[port.peer]]
            while True:
                number, receive = queue.popleft()
                out.append(receive)
                if number == message:
                    break
                posted.add(number)

    def _send(self, action: Action, waits: list[tuple[int, int, Action]], out: list[Action]) -> None:
        stage, kind, microbatch = action.stage, action.kind, action.microbatch
        if kind is W:
            return
        consumers = self.messages.ports[SEND_F][stage]
        if kind is F:
            if consumers:
                out.append(Action(stage, SEND_F, microbatch))
                if not self.answered:
                    self._let_go(Action(stage, WAIT_F, microbatch), consumers, self.forward, waits, len(out))
            return
        producers = self.messages.ports[SEND_B][stage]
        if producers:
            out.append(Action(stage, SEND_B, microbatch))
            self._let_go(Action(stage, WAIT_B, microbatch), producers, self.backward, waits, len(out))
        if consumers:
            out.append(Action(stage, WAIT_F, microbatch))

    def _let_go(
        self,
        wait: Action,
        ports: Iterable[Port],
        used: list[int],
        waits: list[tuple[int, int, Action]],
        number: int,
    ) -> None:
        """Note the WAIT for when all receivers have used the message."""
        last = max(used[port.peer * self.count + (wait.microbatch or 0)] for port in ports)
        heapq.heappush(waits, (last + 1, number, wait))
