"""Which stage makes each call of a unit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ..exceptions import StageUsageError
from ._values import Call, Origin, Recording
from ._ways import Ways


def order_units(ways: Ways, prices: Mapping[str, float]) -> list[str]:
    """All units in an order in which they run, in every way; where two ways disagree, the cheaper unit comes early.

    For that one is called again later, in the other way, and may be needed on two stages. Units that exclude each other take
    turns, so that stages are even in each way.

    Args:
        ways: the model's forwards.
        prices: what each unit costs.
    """
    rows = [list(dict.fromkeys(call.unit for call in recording.calls)) for recording in ways.recordings]
    lengths = [sum(prices[name] for name in row) or 1.0 for row in rows]
    order: list[str] = []
    while any(rows):
        heads: dict[str, float] = {}  # what comes next in each way, and how much of the way is left
        for row, length in zip(rows, lengths, strict=True):
            if row:
                heads.setdefault(row[0], sum(prices[name] for name in row) / length)
        free = [name for name in heads if not any(name in row[1:] for row in rows)]
        name = max(free, key=heads.__getitem__) if free else min(heads, key=prices.__getitem__)
        order.append(name)
        for row in rows:
            if name in row:
                row.remove(name)
    return order


def place_calls(ways: Ways, stages: Mapping[str, int], fixed: Iterable[str] = ()) -> tuple[dict[int, int], ...]:
    """The stage of each call of a unit, in each way.

    It is that of the unit, or, where a later stage makes what the call takes or what Python looks at before it, that later one.

    Args:
        ways: the model's forwards.
        stages: the stage of each unit.
        fixed: units whose first call may not be anywhere else, in one way at least.

    Raises:
        StageUsageError: a fixed unit takes what a later stage makes.
    """
    least: list[dict[int, int]] = [{} for _ in ways.recordings]
    while True:
        found = tuple(
            _place_calls(recording, stages, mine) for recording, mine in zip(ways.recordings, least, strict=True)
        )
        before = [dict(mine) for mine in least]
        for way, owners in enumerate(found):
            for number, owner in owners.items():
                for other in ways.sharing(way, number):  # one call, as far as anybody can know
                    least[other][number] = max(owner, least[other].get(number, 0))
        if least == before:
            break
    for unit in fixed:
        level = min(
            next(owners[call.number] for call in recording.calls if call.unit == unit)
            for recording, owners in zip(ways.recordings, found, strict=True)
            if any(call.unit == unit for call in recording.calls)
        )
        if level > stages[unit]:
            raise StageUsageError(
                f"unit {unit!r} is to be on stage {stages[unit]}, but takes what stage {level} makes: put it on stage {level} or"
                " a later one"
            )
    return found


def _place_calls(recording: Recording, stages: Mapping[str, int], least: Mapping[int, int]) -> dict[int, int]:
    owners: dict[int, int] = {}
    levels: list[int] = []  # of values
    reads = sorted(recording.reads, key=lambda read: read.number)

    def place(call: Call) -> None:
        before = (levels[read.value] for read in reads if read.number <= call.number)
        level = max([*(levels[position] for position in call.inputs), *before], default=0)
        owners[call.number] = max(stages[call.unit], level, least.get(call.number, 0))

    calls = {call.number: call for call in recording.calls}
    for value in recording.values:
        if value.origin is not Origin.CALL:
            levels.append(max((levels[parent] for parent in value.parents), default=0))
            continue
        if value.key[0] not in owners:
            place(calls[value.key[0]])
        levels.append(owners[value.key[0]])
    for call in recording.calls:  # those that return no tensor
        if call.number not in owners:
            place(call)
    return owners
