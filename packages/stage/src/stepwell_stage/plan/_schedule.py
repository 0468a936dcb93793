"""A schedule: for every rank, its compute actions in order."""

from __future__ import annotations

from collections.abc import Iterator

import attrs

from stepwell_p2p._placement import Placement

from ..exceptions import ScheduleError
from ._action import Action, Kind


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
    actions: tuple[tuple[Action, ...], ...] = attrs.field(converter=lambda rows: tuple(tuple(row) for row in rows))

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
        return any(action.kind is not Kind.F for row in self.actions for action in row)

    def table(self) -> str:
        """The schedule as a table, one line a rank, one column a time slot of equal length, ``.`` where a rank idles.

        Example::

            >>> print(gpipe(2, 2).table())
            rank 0: 0F0 0F1  .   .  0B0 0B1
            rank 1:  .  1F0 1F1 1B0 1B1  .
        """
        slots: list[dict[int, str]] = [{} for _ in self.actions]
        width = last = 0
        for rank, action, slot in in_time(self):
            slots[rank][slot] = str(action)
            width = max(width, len(str(action)))
            last = max(last, slot)
        lines = []
        for rank, row in enumerate(slots):
            cells = " ".join(row.get(slot, ".").center(width) for slot in range(last + 1))
            lines.append(f"rank {rank}: {cells}".rstrip())
        return "\n".join(lines)

    def _check_sets(self) -> None:
        seen: set[Action] = set()
        for rank, row in enumerate(self.actions):
            for action in row:
                if not action.kind.is_compute:
                    raise ScheduleError(
                        f"{action} on rank {rank}: a schedule holds compute actions only; lower() adds the rest"
                    )
                if not 0 <= action.stage < self.placement.num_stages or self.placement.ranks[action.stage] != rank:
                    raise ScheduleError(
                        f"{action} on rank {rank}: that rank holds stages {self.placement.stages_of(rank)}"
                    )
                if action.microbatch is None or not 0 <= action.microbatch < self.num_microbatches:
                    raise ScheduleError(f"{action} on rank {rank}: there are {self.num_microbatches} microbatches")
                if action in seen:
                    raise ScheduleError(f"{action} on rank {rank} appears twice")
                seen.add(action)
        backward = self.has_backward
        for stage in range(self.placement.num_stages):
            for microbatch in range(self.num_microbatches):
                kinds = {kind for kind in Kind if kind.is_compute and Action(stage, kind, microbatch) in seen}
                if kinds not in (_FULL, _SPLIT) if backward else kinds != {Kind.F}:
                    expected = "F and B, or F, I and W" if backward else "F"
                    got = " and ".join(sorted(kind.value for kind in kinds)) or "nothing"
                    raise ScheduleError(
                        f"{self.name}: microbatch {microbatch} has {got} on stage {stage}, expected {expected}"
                    )


_FULL = {Kind.F, Kind.B}
_SPLIT = {Kind.F, Kind.I, Kind.W}


def needs(action: Action, num_stages: int, split: bool) -> tuple[Action, ...]:
    """What must be done before a compute action may run.

    Args:
        action: a compute action.
        num_stages: number of stages.
        split: whether the *next* stage's backward of that microbatch is split into I and W.
    """
    stage, kind, microbatch = action.stage, action.kind, action.microbatch
    if kind is Kind.F:
        return (Action(stage - 1, Kind.F, microbatch),) if stage else ()
    if kind is Kind.W:
        return (Action(stage, Kind.I, microbatch),)
    own = Action(stage, Kind.F, microbatch)
    if stage + 1 == num_stages:
        return (own,)
    return own, Action(stage + 1, Kind.I if split else Kind.B, microbatch)


def in_time(schedule: Schedule) -> Iterator[tuple[int, Action, int]]:
    """Every action with its rank and time slot, where each action takes one slot and starts as early as it may.

    Raises:
        ScheduleError: the order can never be carried out; names the first action of the lowest rank that waits for ever.
    """
    num_stages = schedule.placement.num_stages
    split = {(action.stage, action.microbatch) for row in schedule.actions for action in row if action.kind is Kind.I}
    done: dict[Action, int] = {}
    position = [0] * len(schedule.actions)
    free = [0] * len(schedule.actions)
    waiters: dict[Action, list[int]] = {}
    ready = list(range(len(schedule.actions)))
    while ready:
        rank = ready.pop()
        row = schedule.actions[rank]
        while position[rank] < len(row):
            action = row[position[rank]]
            before = needs(action, num_stages, (action.stage + 1, action.microbatch) in split)
            missing = next((need for need in before if need not in done), None)
            if missing is not None:
                waiters.setdefault(missing, []).append(rank)
                break
            slot = max([free[rank], *(done[need] + 1 for need in before)])
            done[action] = slot
            free[rank] = slot + 1
            position[rank] += 1
            ready.extend(waiters.pop(action, ()))
            yield rank, action, slot
    for rank, row in enumerate(schedule.actions):
        if position[rank] < len(row):
            action = row[position[rank]]
            split_next = (action.stage + 1, action.microbatch) in split
            missing = next(need for need in needs(action, num_stages, split_next) if need not in done)
            raise ScheduleError(
                f"{schedule.name}: {action} on rank {rank} can never run: it needs {missing}, which comes later or waits for it"
            )
