"""Lowering: communication put into a schedule.

For every link between two ranks the sender gets a SEND right after the action that makes the value, and the receiver a RECV some
actions before the one that takes it. Three rules keep it safe and lean:

* *Order.* On each edge receives are posted in the order of the sends, whatever order they are consumed in. So both ends of a
  first-in-first-out channel agree without looking at each other. A stage that takes values from several others has one RECV for
  each, since no one order of its receives may suit every edge. A RECV names its source unless that is the neighbour alone.
* *Early, but not too early.* A receive is posted ``prefetch`` compute actions ahead of its use: early enough that the transfer
  runs under other work and that the sender knows of it when it sends (a backend that meets a send without its receive asks the
  receiver first, which is one message more and a way there and back), late enough that buffers follow the microbatches in
  flight and not M.
* *Let go.* A sent value is kept until its send is done. Its WAIT stands where waiting costs nothing and can close no circle: for
  a value right after the backward of the same microbatch, whose gradient proves the arrival; for what is not answered
  (gradients, and values where there is no backward) before the first action that, in a timeline of equal actions, starts after
  the receiver has used it. All waits lead forward in that one timeline, so no circle of them can close.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Iterator

import attrs

from stepwell_p2p._placement import Placement

from ..exceptions import ScheduleError
from ._action import Action, Kind
from ._count import whole
from ._messages import Messages, Port
from ._pause import collector_paused
from ._require import require, several
from ._schedule import Schedule, rows_of
from ._shard import with_data_parallel

# So far ahead, senders mostly know of a receive when they send; each more may keep one more value on a rank.
PREFETCH = 2


def _pairs(links: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Links, each once and in order, if they are pairs of numbers."""
    found = several(links, "links are several pairs of stages, for example [(0, 1), (1, 2)]", error=ScheduleError)
    for link in found:
        if len(several(link, "a link is a pair of stages, for example (0, 1)", error=ScheduleError)) != 2:
            raise ScheduleError(f"a link is a pair of stages, for example (0, 1), got {link!r}")
    numbers = {
        (whole(source, "a stage of a link"), whole(destination, "a stage of a link")) for source, destination in found
    }
    return tuple(sorted(numbers))


@attrs.frozen
class Plan:
    """A lowered schedule: for every rank everything it does, in order. Pure data.

    Attributes:
        schedule: what was lowered.
        links: pairs of stages (source, destination) between which values travel.
        actions: for each rank its actions, communication included.

    Raises:
        ScheduleError: a link does not lead from a stage to a later one, or none leads to a stage.
    """

    schedule: Schedule
    links: tuple[tuple[int, int], ...] = attrs.field(converter=_pairs)
    actions: tuple[tuple[Action, ...], ...] = attrs.field(converter=rows_of, repr=False)

    def __attrs_post_init__(self) -> None:
        require(self.schedule, Schedule, "a plan is of a schedule")
        _check_links(self.links, self.placement.num_stages)
        if len(self.actions) != self.placement.num_ranks:
            raise ScheduleError(f"a plan for {self.placement.num_ranks} ranks has actions for {len(self.actions)}")
        for row in self.actions:
            if not {Action}.issuperset(map(type, row)):  # there are millions
                wrong = next(action for action in row if type(action) is not Action)
                raise ScheduleError(f"a plan holds actions, got {wrong!r}; Action.parse() takes a text")

    @property
    def placement(self) -> Placement:
        """The rank of each stage."""
        return self.schedule.placement

    @property
    def num_microbatches(self) -> int:
        """M."""
        return self.schedule.num_microbatches

    def with_pairs_apart(self) -> Plan:
        """The plan as the executor runs it where no handler runs overlapped pairs.

        Instead of each pair stand its forward, the send of what that made, and its backward.

        :func:`simulate` and all that uses it do this by themselves, unless costs say what pairs save.
        """
        if not any(action[4] for row in self.actions for action in row):
            return self
        return attrs.evolve(self, actions=map(_apart, self.actions))

    def peers(self, action: Action) -> tuple[int, ...]:
        """The stages on other ranks with which a SEND, RECV or WAIT exchanges values, ascending."""
        require(action, Action, "peers() takes an action")
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


@collector_paused()
def lower(
    schedule: Schedule,
    links: Iterable[tuple[int, int]] | None = None,
    *,
    prefetch: int = PREFETCH,
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
        prefetch: how many compute actions ahead of its use a receive is posted, at least 0; so many more values than are in use
            may have memory on a rank.
        sharded: stages whose parameters are gathered (UNSHARD) before they compute and freed (RESHARD) afterwards.
        reduced: stages whose gradients are reduced (REDUCE_GRAD) after their last backward.
        max_unsharded: how many sharded stages a rank may have gathered at once: those at work, and those coming next.

    Raises:
        ScheduleError: a link or stage that is not there, a link that does not lead to a later stage, a stage to which none leads,
            a limit that is too small.
    """
    require(schedule, Schedule, "lower() takes a schedule")
    num_stages = schedule.placement.num_stages
    chosen = _pairs(links) if links is not None else tuple((s, s + 1) for s in range(num_stages - 1))
    _check_links(chosen, num_stages)
    says = "data-parallel stages are several numbers, for example [0, 1]"
    for stage in (*several(sharded, says, error=ScheduleError), *several(reduced, says, error=ScheduleError)):
        whole(stage, "a data-parallel stage")
        if not 0 <= stage < num_stages:
            raise ScheduleError(
                f"stage {stage} was said to be data parallel, but there are stages 0 to {num_stages - 1}"
            )
    max_unsharded = whole(max_unsharded, "max_unsharded")
    prefetch = whole(prefetch, "prefetch")
    if prefetch < 0:
        raise ScheduleError(f"prefetch must be at least 0, got {prefetch}")
    if max_unsharded < 1:
        raise ScheduleError(f"max_unsharded must be at least 1, got {max_unsharded}")
    rows: Iterable[list[Action]] = _Lowering(schedule, chosen, prefetch).rows()
    if sharded or reduced:
        rows = with_data_parallel(rows, set(sharded), set(reduced), max_unsharded)
    return Plan(schedule, chosen, rows)


def _apart(planned: Iterable[Action]) -> Iterator[Action]:
    """The parts of overlapped pairs one after the other, and between them the send of what the forward made.

    In the plan that send follows the pair; nothing else is posted in between, so the order of messages stays.
    """
    backward: Action | None = None  # of the pair before
    for action in planned:
        sends = action[1] is SEND_F  # behind a pair: what its forward made
        if backward is not None and not sends:
            yield backward
        yield action[4][0] if action[4] else action
        if backward is not None and sends:
            yield backward
        backward = action[4][1] if action[4] else None
    if backward is not None:
        yield backward


def _check_links(links: Iterable[tuple[int, int]], num_stages: int) -> None:
    for source, destination in links:
        if not 0 <= source < destination < num_stages:
            raise ScheduleError(
                f"link {source} -> {destination} must lead from a stage to a later one of the {num_stages} stages"
            )
    alone = set(range(1, num_stages)).difference(destination for _, destination in links)
    if alone:
        raise ScheduleError(
            f"no link leads to stage {min(alone)}: every stage but the first takes values of an earlier one"
        )


# Members of an enum are looked up through Python code before 3.12; a plan asks for them millions of times.
F, B, I, W = Kind.F, Kind.B, Kind.I, Kind.W  # noqa: E741 - the field's names
SEND_F, SEND_B, RECV_F, RECV_B = Kind.SEND_F, Kind.SEND_B, Kind.RECV_F, Kind.RECV_B
WAIT_F, WAIT_B, CUSTOM = Kind.WAIT_F, Kind.WAIT_B, Kind.CUSTOM


class _Lowering:
    """One run of :func:`lower`; holds the tables that all ranks share. Messages are numbers, see :class:`Messages`."""

    def __init__(self, schedule: Schedule, links: tuple[tuple[int, int], ...], prefetch: int) -> None:
        self.schedule = schedule
        self.prefetch = prefetch
        self.count = schedule.num_microbatches
        self.messages = Messages.of(schedule.placement, links, self.count)
        self.answered = schedule.has_backward
        stages = range(schedule.placement.num_stages)
        ranks, ports = schedule.placement.ranks, self.messages.ports
        # By rank and source rank: the messages in the order in which the source sends them.
        self.incoming: list[dict[int, list[int]]] = [{} for _ in schedule.actions]
        # By compute kind and stage: the first number of each message that it takes, with the rank that sends it.
        self.takes: dict[Kind, list[list[tuple[int, int]]]] = {}
        # Likewise of each that it makes, with the list in which the receiver finds it.
        self.gives: dict[Kind, list[list[tuple[int, list[int]]]]] = {}
        for kind, send, receive in ((F, SEND_F, RECV_F), (B, SEND_B, RECV_B), (I, SEND_B, RECV_B)):
            self.takes[kind] = [[(port.base, ranks[port.peer]) for port in ports[receive][stage]] for stage in stages]
            self.gives[kind] = [
                [(port.base, self._queue(ranks[stage], ranks[port.peer])) for port in ports[send][stage]]
                for stage in stages
            ]
        self.takes[W] = self.takes[CUSTOM] = [[] for _ in stages]
        self.receivers = [self._receiver(link) for link in range(2 * len(self.messages.links))]
        size = self.count * len(stages)
        # By stage and microbatch: the slot after its F, and after its B or I.
        self.forward, self.backward = [0] * size, [0] * size
        self._walk()

    def rows(self) -> Iterator[list[Action]]:
        """Each rank's actions."""
        for rank in range(len(self.schedule.actions)):
            yield self._row(rank)

    def _queue(self, source: int, destination: int) -> list[int]:
        return self.incoming[destination].setdefault(source, [])

    def _receiver(self, link: int) -> tuple[int, Kind, int | None]:
        """Stage and kind of the RECV of a link's messages, and whether it names the source."""
        source, destination = self.messages.ends(link * self.count)
        kind = RECV_F if source < destination else RECV_B
        alone = len(self.messages.ports[kind][destination]) == 1 and abs(source - destination) == 1
        return destination, kind, None if alone else source

    def _walk(self) -> None:
        """Note when everything is made, and in which order it is sent."""
        count, gives, forward, backward = self.count, self.gives, self.forward, self.backward
        for row, slots in zip(self.schedule.actions, self.schedule.slots, strict=True):
            for action, slot in zip(row, slots, strict=True):
                for stage, kind, microbatch, _, _, _ in action[4] or (action,):
                    if kind is W or kind is CUSTOM or microbatch is None:
                        continue
                    if kind is F:
                        forward[stage * count + microbatch] = slot + 1
                    else:
                        backward[stage * count + microbatch] = slot + 1
                    for base, queue in gives[kind][stage]:
                        queue.append(base + microbatch)

    def _row(self, rank: int) -> list[Action]:
        row, slots, prefetch = self.schedule.actions[rank], self.schedule.slots[rank], self.prefetch
        takes, receivers, count = self.takes, self.receivers, self.count
        streams = {source: iter(queue) for source, queue in self.incoming[rank].items()}
        out: list[Action] = []
        posted = set[int]()
        waits: list[tuple[int, int, Action]] = []  # when each may stand, a number to keep ties in order, the WAIT
        for at in range(-prefetch, len(row)):
            if at + prefetch < len(
                row
            ):  # post what this action will take, and what was sent before it on the same edge
                ahead = row[at + prefetch]
                for stage, kind, microbatch, _, _, _ in ahead[4] or (ahead,):
                    for base, source in takes[kind][stage]:
                        message = base + (microbatch or 0)
                        if message in posted:
                            posted.remove(message)
                            continue
                        for number in streams[source]:
                            receiver, receive, named = receivers[number // count]
                            out.append(Action(receiver, receive, number % count, named))
                            if number == message:
                                break
                            posted.add(number)
            if at < 0:
                continue
            action = row[at]
            while waits and waits[0][0] <= slots[at]:
                out.append(heapq.heappop(waits)[2])
            out.append(action)
            for leaf in action[4] or (action,):
                self._send(leaf, waits, out)
        out.extend(wait for _, _, wait in sorted(waits))
        return out

    def _send(self, action: Action, waits: list[tuple[int, int, Action]], out: list[Action]) -> None:
        """The SEND behind a compute action; and its WAIT, at once or noted for when all receivers have used the message."""
        stage, kind, microbatch, _, _, _ = action
        if kind is W or kind is CUSTOM or microbatch is None:
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
        self, wait: Action, ports: tuple[Port, ...], used: list[int], waits: list[tuple[int, int, Action]], number: int
    ) -> None:
        offset, count = wait[2] or 0, self.count
        if len(ports) == 1:
            last = used[ports[0].peer * count + offset]
        else:
            last = max(used[port.peer * count + offset] for port in ports)
        heapq.heappush(waits, (last, number, wait))
