"""Schedules and plans as comma-separated files, in the form of torch.distributed.pipelining.

A row per rank, a cell per action, empty cells for idle slots. A file with compute actions alone is a schedule, one with
communication a plan.
"""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterable, Iterator

from stepwell_p2p._placement import Placement

from ..exceptions import ScheduleError
from ._action import Action, Kind
from ._lower import Plan
from ._require import path_of, require
from ._schedule import Schedule
from .schedules._custom import assemble


def to_csv(item: Schedule | Plan, path: str | os.PathLike[str] | None = None, *, for_torch: bool = False) -> str:
    """The text of a schedule or plan, written to a file if one is named.

    Args:
        item: what to write.
        path: the file to write.
        for_torch: leave out the WAITs, which torch's runtime does not have. Schedules need no such care.

    Raises:
        ScheduleError: ``for_torch``, and the plan has links that torch cannot express, or custom actions.
    """
    require(item, (Schedule, Plan), "to_csv() takes a schedule or a plan")
    text = io.StringIO()
    writer = csv.writer(text)
    for row in item.actions:
        actions = [action for action in row if not (for_torch and action.kind in _WAITS)]
        beyond = next((action for action in actions if for_torch and action.peer is not None), None)
        if beyond is not None:
            raise ScheduleError(f"{beyond}: torch's plans know links from each stage to the next only")
        own = next((action for action in actions if for_torch and action.name), None)
        if own is not None:
            raise ScheduleError(f"{own}: torch's schedules have no actions of the user's own")
        writer.writerow(map(str, actions))
    if path is not None:
        with path_of(path, error=ScheduleError).open("w", newline="") as file:
            file.write(text.getvalue())
    return text.getvalue()


def from_csv(
    path: str | os.PathLike[str], *, name: str | None = None, links: Iterable[tuple[int, int]] | None = None
) -> Schedule | Plan:
    """The schedule, or if the file has communication the plan, that a file holds.

    Sends that no WAIT of the file lets go of get one, as torch's files have none: after the backward of the same microbatch, or
    at the end.

    Args:
        path: the file.
        name: what to call it; the file's name by default.
        links: of a plan, the pairs of stages between which values travel; by default those that its RECVs tell of, and each stage
            and the next where both are on one rank. Needed where a rank hands values to a stage of its own that is not the next.

    Raises:
        ScheduleError: the file is no text, a cell is no action, the schedule is not legal, or in a plan nothing is received for
            a stage; says where and why.
        OSError: the file cannot be read.
    """
    name = name or path_of(path, error=ScheduleError).stem
    rows = _read(path)
    schedule = assemble(name, [[action for action in row if action.kind.is_compute] for row in rows])
    other = next((action for row in rows for action in row if not action.kind.is_compute), None)
    if other is None:
        return schedule
    if links is None:
        links = sorted(_links(rows, schedule.placement))
        missing = set(range(1, schedule.placement.num_stages)).difference(destination for _, destination in links)
        if missing:
            raise ScheduleError(
                f"{name}: there is {other}, so this is a plan, but stage {min(missing)} has no RECV_F of what it takes; without"
                f" {other} and its like the file is a schedule, of which lower() makes a plan"
            )
    return Plan(schedule, links, [_with_waits(row) for row in rows])


def _read(path: str | os.PathLike[str]) -> list[list[Action]]:
    """The actions of each line that has any: a spreadsheet writes commas where nothing is."""
    rows: list[list[Action]] = []
    with path_of(path, error=ScheduleError).open(newline="", encoding="utf-8-sig") as file:
        reader = csv.reader(file)
        try:
            for cells in reader:
                row = []
                for column, cell in enumerate(cells, start=1):
                    if cell.strip():
                        try:
                            row.append(Action.parse(cell))
                        except ScheduleError as error:
                            raise ScheduleError(f"{path}, line {reader.line_num}, cell {column}: {error}") from None
                if row:
                    rows.append(row)
        except (UnicodeDecodeError, csv.Error) as error:
            raise ScheduleError(f"{path} is no comma-separated text: {error}") from None
    return rows


_WAITS = (Kind.WAIT_F, Kind.WAIT_B)


def _links(rows: Iterable[Iterable[Action]], placement: Placement) -> set[tuple[int, int]]:
    """What the RECVs say, and what stands to reason within a rank."""
    ranks = placement.ranks
    found = {(stage, stage + 1) for stage in range(len(ranks) - 1) if ranks[stage] == ranks[stage + 1]}
    for row in rows:
        for action in row:
            if action.kind is Kind.RECV_F:
                found.add((action.stage - 1 if action.peer is None else action.peer, action.stage))
    return found


def _with_waits(row: list[Action]) -> Iterator[Action]:
    """The row, with a WAIT for each SEND that has none."""
    wait_of = {Kind.SEND_F: Kind.WAIT_F, Kind.SEND_B: Kind.WAIT_B}
    waited = {action for action in row if action.kind in _WAITS}
    open_waits: dict[Action, None] = {}
    for action in row:
        yield action
        if action.kind in wait_of:
            wait = Action(action.stage, wait_of[action.kind], action.microbatch)
            if wait not in waited:
                open_waits[wait] = None
        for leaf in action.leaves:
            wait = Action(leaf.stage, Kind.WAIT_F, leaf.microbatch)
            if leaf.kind.is_backward and wait in open_waits:
                del open_waits[wait]
                yield wait
    yield from open_waits
