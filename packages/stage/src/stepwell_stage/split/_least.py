"""Which values to move, so that others can be computed from them: those that are the fewest bytes in all.

What moves stands on every path from what can only be moved to what is wanted. The least set that does so is a minimum cut, as
large as the largest flow along these paths where no value lets through more than its size (Ford and Fulkerson)::

    unit ─▶ x ─▶ x / 2 ─▶ wanted      x moves, and x / 2 is computed: one x
            ╰───────────▶ wanted      in place of two

Of sets of one size it is the last, nearest to what is wanted, so that nothing is computed again that need not be.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from math import inf
from typing import TypeAlias

from ._ways import Place

_Point: TypeAlias = tuple[Place, int]
"""A value: 0, where it is reached, or 1, behind what it lets through."""

_Room: TypeAlias = dict[_Point, dict[_Point, float]]
"""How much more may flow from one point to another."""

_START: _Point = ((-1, -1), 1)
_END: _Point = ((-1, -1), 0)


def least(
    parents: Mapping[Place, Sequence[Place] | None], sizes: Mapping[Place, float], wanted: Iterable[Place]
) -> set[Place]:
    """The values to move.

    Args:
        parents: of each value what it is computed from, as far as that is not here; None: it cannot be computed.
        sizes: of each value; infinite: it cannot be moved. On every path there is one that can.
        wanted: the values to have.
    """
    room: _Room = {_START: {}, _END: {}}

    def link(one: _Point, other: _Point, size: float) -> None:
        room.setdefault(one, {})[other] = size
        room.setdefault(other, {})[one] = 0

    for value, before in parents.items():
        link((value, 0), (value, 1), sizes[value])
        for point in [_START] if before is None else [(parent, 1) for parent in before]:
            link(point, (value, 0), inf)
    for value in wanted:
        link((value, 1), _END, inf)
    while path := _path(room):
        more = min(room[one][other] for one, other in path)
        for one, other in path:
            room[one][other] -= more
            room[other][one] += more
    ahead = _ahead(room)
    return {value for value in parents if (value, 1) in ahead and (value, 0) not in ahead}


def _path(room: _Room) -> list[tuple[_Point, _Point]]:
    """The shortest path on which more may flow, from its end; empty if there is none."""
    came: dict[_Point, _Point] = {_START: _START}
    todo = deque(came)
    while todo and _END not in came:
        one = todo.popleft()
        for other, size in room[one].items():
            if size and other not in came:
                came[other] = one
                todo.append(other)
    path: list[tuple[_Point, _Point]] = []
    point = _END if _END in came else _START
    while point != _START:
        path.append((came[point], point))
        point = came[point]
    return path


def _ahead(room: _Room) -> set[_Point]:
    """From where more may flow to the end."""
    found = {_END}
    todo = [_END]
    while todo:
        one = todo.pop()
        more = [other for other in room[one] if room[other][one] and other not in found]
        found.update(more)
        todo += more
    return found
