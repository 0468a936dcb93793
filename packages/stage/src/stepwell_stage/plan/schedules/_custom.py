"""A schedule of your own, written down as a table."""

from __future__ import annotations

import re
from collections.abc import Sequence

from stepwell_p2p._placement import Placement

from ...exceptions import ScheduleError
from .._action import Action
from .._require import require, several
from .._schedule import Schedule


def custom(table: str | Sequence[str], *, name: str = "custom") -> Schedule:
    """The schedule that a table shows, in the form that :meth:`Schedule.table` prints.

    Which rank holds which stage, and how many microbatches there are, follows from the table::

        custom('''
            rank 0: 0F0 0F1  .  0B0 0B1
            rank 1:  .  1F0 1B0 1F1 1B1
        ''')

    Args:
        table: a line per rank, as one text or several; ``rank 0:`` in front is optional, ``.`` is an idle slot, and
            ``0F1+3B0`` runs both as one.
        name: what to call it.

    Raises:
        ScheduleError: something in the table is no action, or the schedule is not legal; says where and why.
    """
    lines = table.splitlines() if isinstance(table, str) else several(table, _SAYS, error=ScheduleError)
    rows: list[list[Action]] = []
    for number, line in enumerate(lines, start=1):
        require(line, str, f"line {number} of the table: {_SAYS}")
        if not line.strip():
            continue
        match = _LINE.fullmatch(line.strip())
        row, cells = len(rows), line.split()
        if match is not None:
            row, cells = int(match["rank"]), match["rest"].split()
        if row != len(rows):
            raise ScheduleError(f"line {number} of the table is rank {row}, expected rank {len(rows)}")
        try:
            rows.append([_cell(cell) for cell in cells if cell.strip(".")])
        except ScheduleError as error:
            raise ScheduleError(f"line {number} of the table: {error}") from None
    return assemble(name, rows)


def assemble(name: str, rows: Sequence[Sequence[Action]]) -> Schedule:
    """A schedule from its compute actions alone; placement and number of microbatches follow from them.

    Raises:
        ScheduleError: a stage is on two ranks or on none, or the schedule is not legal.
    """
    owner: dict[int, int] = {}
    microbatches = set[int]()
    for rank, row in enumerate(rows):
        for action in row:
            for leaf in action.leaves:
                if leaf.microbatch is not None:
                    microbatches.add(leaf.microbatch)
                if owner.setdefault(leaf.stage, rank) != rank:
                    raise ScheduleError(
                        f"{name}: {leaf} is on rank {rank}, but stage {leaf.stage} is on rank {owner[leaf.stage]}"
                    )
        if not row:
            raise ScheduleError(f"{name}: rank {rank} computes nothing")
    if not owner:
        raise ScheduleError(f"{name}: there are no actions")
    for what, numbers in (("stage", owner.keys()), ("microbatch", microbatches)):
        missing = next((number for number in range(len(numbers)) if number not in numbers), None)
        if missing is not None:
            raise ScheduleError(
                f"{name}: {what} {max(numbers)} is there, but no rank computes {what} {missing}; numbers start at 0"
            )
    placement = Placement.custom(owner[stage] for stage in range(len(owner)))
    return Schedule(name, placement, len(microbatches), rows)


def _cell(text: str) -> Action:
    parts = text.split("+")
    if len(parts) == 2:
        return Action.overlap(Action.parse(parts[0]), Action.parse(parts[1]))
    return Action.parse(text)


_SAYS = "a table is text, or several texts, one for each rank, for example '0F0 0F1 0B0 0B1'"
_LINE = re.compile(r"rank\s+(?P<rank>\d+)\s*:(?P<rest>.*)")
