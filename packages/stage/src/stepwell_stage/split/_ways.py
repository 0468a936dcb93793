"""The ways that a forward goes, and how far two of them are one.

A way is a row of names of calls and operations, for one kind of inputs. Ways of one kind are the same until their names differ::

    number     0      1     2        3       4
    way 0    embed   add  block.0   add    head
    way 1    embed   add  adapter   mul   block.0  …      part at number 2
                          ▲ until here nobody can know, and nobody needs to know, which of the two it is

So what is made before ways part is one value in both: what is done with it in one is done with it in the other.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import TypeAlias

import attrs

from ..exceptions import StageUsageError
from ._values import INPUTS, Key, Origin, Recording

Place: TypeAlias = tuple[int, int]  # a way, and the position of a value in its recording

_NEVER = 1 << 60  # in place of a number, where two ways never part
_END = ""  # in place of a name, where a way has no more


@attrs.frozen
class Ways:
    """All ways of a forward, whose recordings agree about what they share.

    Attributes:
        recordings: of each way.
        parting: for every two ways the number of the first call or operation that is not the same; -1: their inputs differ.
        same: of each way, for each value: where it is in every way that shares it, the first way first.
    """

    recordings: tuple[Recording, ...]
    parting: tuple[tuple[int, ...], ...]
    same: tuple[tuple[tuple[Place, ...], ...], ...]

    def sharing(self, way: int, number: int) -> list[int]:
        """The ways that are one with this up to and including a number."""
        return [other for other, parts_at in enumerate(self.parting[way]) if parts_at > number]

    def units(self) -> dict[str, None]:
        """All units that are called."""
        return dict.fromkeys(call.unit for recording in self.recordings for call in recording.calls)


def join(recordings: Sequence[Recording], kinds: Sequence[Hashable]) -> Ways:
    """Make recordings agree about what they share.

    Args:
        recordings: of each way.
        kinds: the kind of inputs of each; ways of different kinds are told apart before anything runs.
    """
    parting = tuple(
        tuple(
            (_parting(one.names, other.names) if kind == other_kind else -1)
            for other, other_kind in zip(recordings, kinds, strict=True)
        )
        for one, kind in zip(recordings, kinds, strict=True)
    )
    places = [_crossing(recording) for recording in recordings]
    same = []
    agreed = []
    for way, recording in enumerate(recordings):
        rows: list[tuple[Place, ...]] = []
        values = []
        for position, value in enumerate(recording.values):
            if places[way].get(value.key) != position:
                rows.append(((way, position),))
                values.append(value)
                continue
            sharing = [other for other, parts_at in enumerate(parting[way]) if parts_at > value.key[0]]
            row = tuple((other, places[other][value.key]) for other in sharing if value.key in places[other])
            every = [recordings[other].values[number] for other, number in row]
            stays = next((one.stays for one in every if one.stays), "")
            if len(row) < len(sharing):
                stays = stays or "it is not made anew in every way that a forward may go from there"
            rows.append(row)
            values.append(
                attrs.evolve(
                    value,
                    nbytes=max(one.nbytes for one in every),
                    stays=stays,
                    is_written=any(one.is_written for one in every),
                    is_drawn=any(one.is_drawn for one in every),
                )
            )
        same.append(tuple(rows))
        singles = frozenset(
            number
            for number in recording.singles
            if all(
                number in other.singles
                for other, parts_at in zip(recordings, parting[way], strict=True)
                if parts_at > number
            )
        )
        agreed.append(attrs.evolve(recording, values=tuple(values), singles=singles))
    return Ways(tuple(agreed), parting, tuple(same))


def check_plain(ways: Ways, plain: Sequence[Mapping[int, Hashable]]) -> None:
    """What a unit gives Python, as a number or a structure, is taken by other stages to be what it was in the example.

    Args:
        ways: the ways.
        plain: what calls gave, by their number, for each way; where that is known.

    Raises:
        StageUsageError: one call gives several ways something else, so that other stages cannot know which of them it is.
    """
    for way, given in enumerate(plain):
        for call in ways.recordings[way].calls:
            for other in ways.sharing(way, call.number):
                both = call.number in given and call.number in plain[other]
                if both and given[call.number] != plain[other][call.number]:
                    raise StageUsageError(
                        f"unit {call.unit!r} gives Python another number, or structure, in one way than in another, and stages"
                        " that do not have it cannot see which: return a tensor in its place"
                    )


@attrs.frozen
class Part:
    """What one stage does in one way, in numbers of the way's recording.

    Attributes:
        owned: calls of units that it computes.
        takes: for calls, operations and (under ``INPUTS``) the inputs, by their number: which of their results, by index, is
            which of the stage's inputs.
        gives: likewise, which result is which of the stage's outputs, and whether it is copied, since it is changed later on.
        last: the number of the last call or operation that it runs; None: it runs to the end.
    """

    owned: frozenset[int]
    takes: Mapping[int, Mapping[int, int]]
    gives: Mapping[int, tuple[tuple[int, int, bool], ...]]
    last: int | None


@attrs.frozen(eq=False)
class Route:
    """Ways that are one so far, as one stage goes them. Routes have the same numbers on every stage.

    Attributes:
        number: of the route.
        ways: which these are.
        names: of the calls and operations, in order; beyond ``parts_at`` those of the first way.
        singles: of the operations those that give a single tensor; likewise.
        hooked: how many calls and operations come before each hook on a gradient, in any of the ways.
        part: what the stage does; likewise.
        last: where it may stop, if the ways do not part before: where none of them has anything left. None: it runs to the end.
        parts_at: the number at which the ways part.
        branches: the routes from there on, by the name of the call or operation that comes there.
    """

    number: int
    ways: tuple[int, ...]
    names: tuple[str, ...]
    singles: frozenset[int]
    hooked: frozenset[int]
    part: Part
    last: int | None
    parts_at: int
    branches: Mapping[str, Route]

    def ended(self, count: int) -> Route:
        """The route of a forward that is over after so many calls and operations."""
        return self.branches.get(_END, self) if count == self.parts_at else self

    def walk(self) -> Iterator[Route]:
        """This one and all that come of it."""
        yield self
        for branch in self.branches.values():
            yield from branch.walk()


def routes(ways: Ways, parts: Sequence[Part]) -> tuple[Route, ...]:
    """For each way the route that begins all ways of its kind.

    Args:
        ways: the ways.
        parts: what the stage does in each.
    """
    numbers = iter(range(_NEVER))

    def route(members: tuple[int, ...]) -> Route:
        number, first = next(numbers), members[0]
        names = [ways.recordings[way].names for way in members]
        ends = [parts[way].last for way in members]
        parts_at = min(ways.parting[first][way] for way in members)
        branches: dict[str, list[int]] = {}
        if parts_at < _NEVER:
            for way, own in zip(members, names, strict=True):
                branches.setdefault(own[parts_at] if parts_at < len(own) else _END, []).append(way)
        return Route(
            number,
            members,
            names[0],
            ways.recordings[first].singles,
            frozenset(number for way in members for _, number in ways.recordings[way].hooked),
            parts[first],
            None if None in ends else max(end for end in ends if end is not None),
            parts_at,
            {name: route(tuple(found)) for name, found in branches.items()},
        )

    kinds = [tuple(ways.sharing(way, INPUTS)) for way in range(len(parts))]
    found = {members: route(members) for members in dict.fromkeys(kinds)}
    return tuple(found[members] for members in kinds)


def stop(ways: Ways, way: int, ends: Sequence[int | None]) -> int | None:
    """Where a stage really stops in a way: not before it is sure that it does not go one in which there is more to do.

    Args:
        ways: the ways.
        way: which.
        ends: where the stage could stop in each.
    """
    end = ends[way]
    if end is None:
        return None
    while True:
        later = max(min(ends[other] or 0, ways.parting[way][other]) for other in ways.sharing(way, end))
        if later <= end:
            return end
        end = later


def allot(wanted: Sequence[tuple[int, frozenset[int], frozenset[int]]]) -> list[int]:
    """Which output of a stage carries which value: one for values that no way has both of, and that go to the same stages.

    Args:
        wanted: for each value its size, the ways that it is in, and the stages that it goes to.

    Returns:
        For each value the number of its output.
    """
    outputs: list[tuple[frozenset[int], set[int], set[int]]] = []  # stages, ways, sizes
    found = []
    for nbytes, within, stages in wanted:
        free = [number for number, (to, used, _) in enumerate(outputs) if to == stages and not used & within]
        if not free:
            free = [len(outputs)]
            outputs.append((stages, set(), set()))
        # One of the same size, if there is: then it looks the same in all ways, as far as that can be known here.
        number = min(free, key=lambda one: (nbytes not in outputs[one][2], one))
        outputs[number][1].update(within)
        outputs[number][2].add(nbytes)
        found.append(number)
    return found


def _parting(one: Sequence[str], other: Sequence[str]) -> int:
    if tuple(one) == tuple(other):
        return _NEVER
    pairs = zip(one, other, strict=False)
    return next((number for number, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _crossing(recording: Recording) -> dict[Key, int]:
    """Where values are that have a name of their own, by that."""
    found: dict[Key, int] = {}
    for position, value in enumerate(recording.values):
        if value.origin in (Origin.INPUT, Origin.CALL, Origin.GLUE) and value.key[1] >= 0:
            found.setdefault(value.key, position)
    return found
