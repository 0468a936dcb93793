"""A schedule: for every rank, its compute actions in order."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import attrs

from stepwell_p2p._placement import Placement

from ..exceptions import ScheduleError
from ._action import Action, Kind
from ._count import whole
from ._require import require, several


def rows_of(rows: Iterable[Iterable[Action]]) -> tuple[tuple[Action, ...], ...]:
    """The actions of each rank, as schedules and plans hold them."""
    found = several(rows, "actions are a row for each rank", error=ScheduleError)
    return tuple(several(row, "the actions of a rank are several", error=ScheduleError) for row in found)


def _microbatches(count: int) -> int:
    return whole(count, "num_microbatches")


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
        slots: for each rank the time slot of each action, where each takes one slot and starts as early as it may: a stage's F
            after that of the stage before it, its B or I after its own F and that of the stage behind it, its W after its I; a
            custom action after the rank's action before it.

    Raises:
        ScheduleError: the first wrong action, and why.
    """

    name: str
    placement: Placement
    num_microbatches: int = attrs.field(converter=_microbatches)
    actions: tuple[tuple[Action, ...], ...] = attrs.field(converter=rows_of, repr=False)
    slots: tuple[array[int], ...] = attrs.field(init=False, repr=False, eq=False)

    def __attrs_post_init__(self) -> None:
        require(
            self.placement,
            Placement,
            f"{self.name} takes a placement",
            "Placement.loop(stages, ranks) is the usual one",
        )
        if self.num_microbatches < 1:
            raise ScheduleError(f"{self.name} needs at least 1 microbatch, got {self.num_microbatches}")
        if len(self.actions) != self.placement.num_ranks:
            raise ScheduleError(f"{self.name} has {self.placement.num_ranks} ranks but actions for {len(self.actions)}")
        self._check_sets()
        object.__setattr__(self, "slots", _InTime(self).slots())

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
        rows = [
            {slot: "+".join(map(str, action.leaves)) for action, slot in zip(row, slots, strict=True)}
            for row, slots in zip(self.actions, self.slots, strict=True)
        ]
        width = max(len(text) for row in rows for text in row.values())
        columns = range(1 + max(max(row, default=0) for row in rows))
        lines = []
        for rank, row in enumerate(rows):
            cells = " ".join(row.get(slot, ".").center(width) for slot in columns)
            lines.append(f"rank {rank}: {cells}".rstrip())
        return "\n".join(lines)

    def _check_sets(self) -> None:
        count, ranks = self.num_microbatches, self.placement.ranks
        seen = bytearray(count * len(ranks))  # for each stage and microbatch which kinds it has, as bits
        for rank, row in enumerate(self.actions):
            stages = self.placement.stages_of(rank)
            for action in row:
                if not isinstance(action, Action):
                    raise ScheduleError(
                        f"{self.name}: a schedule holds actions, got {action!r}; custom() takes a table of texts"
                    )
                for leaf in action[4] or (action,):
                    stage, kind, microbatch, _, _, _ = leaf
                    bit = _BITS.get(kind)
                    if bit is None:
                        raise ScheduleError(
                            f"{self.name}: {leaf} on rank {rank}: a schedule holds compute actions only; lower() adds the rest"
                        )
                    if stage not in stages:
                        raise ScheduleError(f"{self.name}: {leaf} on rank {rank}: that rank holds stages {stages}")
                    if microbatch is None and not bit:
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


# Members of an enum are looked up through Python code before 3.12; a plan asks for them millions of times.
F, B, I, W = Kind.F, Kind.B, Kind.I, Kind.W  # noqa: E741 - the field's names


class _InTime:
    """A walk in time. Facts are numbered: first the F of every stage and microbatch, then their B or I, then their W."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.rows = schedule.actions
        self.count = schedule.num_microbatches
        self.size = self.count * schedule.placement.num_stages
        self.after = [-1] * (3 * self.size)  # by fact: the first slot after it, -1 for not yet
        self.found: list[list[int]] = [[] for _ in self.rows]
        self.waiters: dict[int, list[int]] = {}

    def slots(self) -> tuple[array[int], ...]:
        """The slot of every action.

        Raises:
            ScheduleError: the order can never be carried out; names the first action of the lowest rank that waits for ever.
        """
        ready = list(range(len(self.rows)))
        while ready:
            self._advance(ready.pop(), ready)
        for rank, row in enumerate(self.rows):
            at = len(self.found[rank])
            if at < len(row):
                raise ScheduleError(
                    f"{self.schedule.name}: {row[at]} on rank {rank} can never run: it needs {self._missing(row[at])}, which"
                    " comes later or waits for it"
                )
        return tuple(array("l", found) for found in self.found)

    def _advance(self, rank: int, ready: list[int]) -> None:
        """Take a rank's actions until one has to wait; ranks that waited for them become ready."""
        found, after, waiters = self.found[rank], self.after, self.waiters
        count, size = self.count, self.size
        slot = found[-1] + 1 if found else 0
        row, facts = self.rows[rank], list[int]()
        for at in range(len(found), len(row)):
            action = row[at]
            facts.clear()
            for stage, kind, microbatch, _, _, _ in action[4] or (action,):
                # What an action needs beyond this has come before what it needs: the F of a B's stage, in a chain.
                fact = stage * count + (microbatch or 0)
                if kind is F:
                    need = fact - count
                elif kind is W:
                    need, fact = size + fact, 2 * size + fact
                elif kind is B or kind is I:
                    need, fact = size + fact + count, size + fact
                    if need >= 2 * size:  # the last stage's
                        need = fact - size
                else:
                    continue
                facts.append(fact)
                if need >= 0:
                    before = after[need]
                    if before < 0:
                        waiters.setdefault(need, []).append(rank)
                        return
                    if before > slot:
                        slot = before
            found.append(slot)
            slot += 1
            for fact in facts:
                after[fact] = slot
                if fact in waiters:
                    ready.extend(waiters.pop(fact))

    def _missing(self, action: Action) -> str:
        """The first thing that an action waits for, in text form."""
        for stage, kind, microbatch, _, _, _ in action.leaves:
            at = stage * self.count + (microbatch or 0)
            if kind is F:
                needs = [at - self.count] if stage else []
            elif kind is W:
                needs = [self.size + at]
            else:
                needs = [at, *([self.size + at + self.count] if at + self.count < self.size else [])]
            for need in needs:
                if self.after[need] < 0:
                    return self._name(need)
        raise AssertionError("an action that waits has something to wait for")

    def _name(self, fact: int) -> str:
        block, at = divmod(fact, self.size)
        stage, microbatch = divmod(at, self.count)
        split = any(Action(stage, I, microbatch) in action.leaves for row in self.rows for action in row)
        return f"{stage}{'F' if block == 0 else 'I' if split else 'B'}{microbatch}"
