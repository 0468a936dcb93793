"""A schedule: for every rank, its compute actions in order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import attrs

from stepwell_p2p._placement import Placement

from ..exceptions import ScheduleError
from ._action import Action, Kind


def _rows(rows: Iterable[Iterable[Action]]) -> tuple[tuple[Action, ...], ...]:
    return tuple(tuple(row) for row in rows)


@attrs.frozen
class Schedule:
    """Who computes what, in which order. Pure data: it says nothing of communication, see :func:`lower`.

    Making one checks it: every microbatch has its F, and its B (or I and W) unless the schedule is forward-only, once on
    every stage, on that stage's rank, in an order that can be carried out.

    Attributes:
        name: what to call it in messages and pictures.
        placement: the rank of each stage.
        num_microbatches: M.
        actions: for each rank its compute actions in order.

    Raises:
        ScheduleError: the first wrong action, and why.
    """

    name: str
    placement: Placement
    num_microbatches: int
    actions: tuple[tuple[Action, ...], ...] = attrs.field(converter=_rows, repr=False)

    def __attrs_post_init__(self) -> None:
        if self.num_microbatches < 1:
            raise ScheduleError(f"{self.name} needs at least 1 microbatch, got {self.num_microbatches}")
        if len(self.actions) != self.placement.num_ranks:
            raise ScheduleError(f"{self.name} has {self.placement.num_ranks} ranks but actions for {len(self.actions)}")
        self._check_sets()
        for _ in in_time(self):  # raises where the order cannot be carried out
            pass

    @property
    def has_backward(self) -> bool:
        """Whether anything runs backward."""
        return any(
            action.kind is not Kind.F and action.kind is not Kind.CUSTOM for row in self.actions for action in row
        )

    def table(self) -> str:
        """The schedule as a table, one line a rank, one column a time slot of equal length, ``.`` where a rank idles.

        Example::

            >>> from stepwell_stage.schedules import gpipe
            >>> print(gpipe(2, 2).table())
            rank 0: 0F0 0F1  .   .  0B0 0B1
            rank 1:  .  1F0 1F1 1B0 1B1  .
        """
        slots: list[dict[int, str]] = [{} for _ in self.actions]
        width = last = 0
        for rank, action, slot in in_time(self):
            text = "+".join(map(str, action.leaves))
            slots[rank][slot] = text
            width = max(width, len(text))
            last = max(last, slot)
        lines = []
        for rank, row in enumerate(slots):
            cells = " ".join(row.get(slot, ".").center(width) for slot in range(last + 1))
            lines.append(f"rank {rank}: {cells}".rstrip())
        return "\n".join(lines)

    def _check_sets(self) -> None:
        count, ranks = self.num_microbatches, self.placement.ranks
        seen = bytearray(count * len(ranks))  # for each stage and microbatch which kinds it has, as bits
        for rank, row in enumerate(self.actions):
            for action in row:
                for leaf in action.parts or (action,):
                    stage, microbatch = leaf.stage, leaf.microbatch
                    bit = _BITS.get(leaf.kind)
                    if bit is None:
                        raise ScheduleError(
                            f"{self.name}: {leaf} on rank {rank}: a schedule holds compute actions only; lower() adds the rest"
                        )
                    if not 0 <= stage < len(ranks) or ranks[stage] != rank:
                        raise ScheduleError(
                            f"{self.name}: {leaf} on rank {rank}: that rank holds stages {self.placement.stages_of(rank)}"
                        )
                    if bit == 0 and microbatch is None:
                        continue
                    if microbatch is None or not 0 <= microbatch < count:
                        raise ScheduleError(
                            f"{self.name}: {leaf} on rank {rank}: there are microbatches 0 to {count - 1}"
                        )
                    at = stage * count + microbatch
                    if seen[at] & bit:
                        raise ScheduleError(f"{self.name}: {leaf} on rank {rank} appears twice")
                    seen[at] |= bit
        legal, expected = _LEGAL[self.has_backward]
        if seen.translate(None, legal):  # what is left over is wrong
            at = next(i for i, bits in enumerate(seen) if bits not in legal)
            got = " and ".join(kind.value for kind, bit in _BITS.items() if seen[at] & bit) or "nothing"
            raise ScheduleError(
                f"{self.name}: microbatch {at % count} has {got} on stage {at // count}, expected {expected}"
            )


_BITS = {Kind.F: 1, Kind.B: 2, Kind.I: 4, Kind.W: 8, Kind.CUSTOM: 0}
_LEGAL = {False: (bytes([1]), "F"), True: (bytes([1 | 2, 1 | 4 | 8]), "F and B, or F, I and W")}


def in_time(schedule: Schedule) -> Iterator[tuple[int, Action, int]]:
    """Every action with its rank and time slot, where each action takes one slot and starts as early as it may.

    A stage's F comes after that of the stage before it, its B or I after its own F and that of the stage behind it, its W after
    its I. An action comes out after all those that it needs.

    Raises:
        ScheduleError: the order can never be carried out; names the first action of the lowest rank that waits for ever.
    """
    walk = _InTime(schedule)
    ready = list(range(len(schedule.actions)))
    while ready:
        rank = ready.pop()
        for action, slot in walk.advance(rank, ready):
            yield rank, action, slot
    for rank, row in enumerate(schedule.actions):
        if walk.position[rank] < len(row):
            action = row[walk.position[rank]]
            missing = walk.name(
                next(need for leaf in action.leaves for need in walk.needs(leaf) if walk.done[need] < 0)
            )
            raise ScheduleError(
                f"{schedule.name}: {action} on rank {rank} can never run: it needs {missing}, which comes later or waits for it"
            )


# Members of an enum are looked up through Python code before 3.12; a plan asks for them millions of times.
F, B, I, W = Kind.F, Kind.B, Kind.I, Kind.W  # noqa: E741 - the field's names


class _InTime:
    """The state of :func:`in_time`. Facts are numbered: first the F of every stage and microbatch, then their B or I, then W."""

    def __init__(self, schedule: Schedule) -> None:
        self.rows = schedule.actions
        self.count = schedule.num_microbatches
        self.size = self.count * schedule.placement.num_stages
        self.done = [-1] * (3 * self.size)  # slot of each fact
        self.position = [0] * len(self.rows)
        self.free = [0] * len(self.rows)
        self.waiters: dict[int, list[int]] = {}

    def needs(self, action: Action) -> tuple[int, ...]:
        """The facts that an action needs."""
        at = action.stage * self.count + (action.microbatch or 0)
        if action.kind is F:
            return (at - self.count,) if action.stage else ()
        if action.kind is W:
            return (self.size + at,)
        after = self.size + at + self.count
        return (at, after) if after < 2 * self.size else (at,)

    def advance(self, rank: int, ready: list[int]) -> Iterator[tuple[Action, int]]:
        """Take a rank's actions until one has to wait; ranks that waited for them become ready."""
        row, done, count, size = self.rows[rank], self.done, self.count, self.size
        slot, at = self.free[rank], self.position[rank]
        while at < len(row):
            action = row[at]
            for leaf in action.parts or (action,):
                for need in self.needs(leaf):
                    before = done[need]
                    if before < 0:
                        self.waiters.setdefault(need, []).append(rank)
                        self.free[rank], self.position[rank] = slot, at
                        return
                    slot = max(slot, before + 1)
            for leaf in action.parts or (action,):
                fact = _BLOCK[leaf.kind] * size + leaf.stage * count + (leaf.microbatch or 0)
                done[fact] = slot
                if fact in self.waiters:
                    ready.extend(self.waiters.pop(fact))
            yield action, slot
            slot += 1
            at += 1
        self.free[rank], self.position[rank] = slot, at

    def name(self, fact: int) -> str:
        """A fact in text form."""
        block, at = divmod(fact, self.size)
        stage, microbatch = divmod(at, self.count)
        split = any(Action(stage, I, microbatch) in action.leaves for row in self.rows for action in row)
        return f"{stage}{'F' if block == 0 else 'I' if split else 'B'}{microbatch}"


_BLOCK = {F: 0, B: 1, I: 1, W: 2}
