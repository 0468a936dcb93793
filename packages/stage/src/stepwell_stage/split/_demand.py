"""Which values each stage takes from which other, and where its forward may end.

A stage needs what its units take, what it returns if it is the last, and what Python looks at before it is done. A value is
*real* there if it is given, comes from one of its units, or is computed by glue from real values alone. What is needed and
not real is taken from earlier stages where it is real, or computed from values that are: the fewest bytes in all (`_least`).

Where a forward may go several ways, all of this is so in each. What ways share crosses in all of them if it crosses in one, for
neither who sends it nor who takes it can know yet which way it is. After that each way has its own values on the same wires.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from math import inf

import attrs

from stepwell_p2p._placement import Wire

from ..exceptions import StageUsageError
from ._least import least
from ._values import INPUTS, MARKS, ROUTE, TOKEN, Key, Origin, Recording, Value
from ._ways import Part, Place, Ways, allot, stop

# What stands for a value, in every way, and is none: by its position.
_TOKEN, _ROUTE, _MARKS = -1, -2, -3
_SIGNS = {
    _TOKEN: Value(TOKEN, Origin.GLUE, "a token"),
    _ROUTE: Value(ROUTE, Origin.GLUE, "a route"),
    _MARKS: Value(MARKS, Origin.GLUE, "marks"),
}


@attrs.frozen
class StagePlan:
    """What one stage does.

    Attributes:
        parts: in each way.
        outputs: how many tensors it returns; on the last stage none, which returns the model's result.
        is_last: whether it is the last stage.
        said: the inputs by which earlier stages say which way they went, where there are several.
        says: the output by which it does so itself; None where it does not.
        marked: likewise for each earlier stage the input by which it learns which of its values have a gradient; and what comes
            from there: inputs, and the outputs of that stage that they are.
        marks: the output by which this one does.
        held: names of parameters and buffers that its glue reads.
    """

    parts: tuple[Part, ...]
    outputs: int
    is_last: bool
    said: tuple[int, ...]
    says: int | None
    marked: tuple[tuple[int, tuple[tuple[int, int], ...]], ...]
    marks: int | None
    held: tuple[str, ...]


@attrs.frozen
class Crossing:
    """One wire.

    Attributes:
        wire: where it goes.
        keys: what crosses in each way; None: nothing.
        nbytes: how much, in each way's example.
    """

    wire: Wire
    keys: tuple[Key | None, ...]
    nbytes: tuple[int, ...]


@attrs.frozen
class Demand:
    """Every stage's part, and what crosses between them."""

    stages: tuple[StagePlan, ...]
    crossings: tuple[Crossing, ...]

    @property
    def wires(self) -> tuple[Wire, ...]:
        """Where something crosses."""
        return tuple(crossing.wire for crossing in self.crossings)


def demand(
    ways: Ways,
    owners: Sequence[Mapping[int, int]],
    *,
    num_stages: int,
    ranks: Sequence[int],
    inputs_everywhere: bool,
) -> Demand:
    """Find what crosses.

    Args:
        ways: the model's forwards.
        owners: of each, the stage of each call of a unit, by its number.
        num_stages: how many stages.
        ranks: the rank of each stage: what several stages of a rank need is sent to it once.
        inputs_everywhere: whether every rank is given the inputs; otherwise only the first stage has them.

    Raises:
        StageUsageError: a stage needs what a later one makes, or the forward changes the model by what units make.
    """
    for recording in ways.recordings:
        _check_state(recording)
    need = _Needs(ways, owners, num_stages, ranks, inputs_everywhere=inputs_everywhere)
    reads: set[tuple[int, int, int]] = set()
    while True:
        found = need.solve(reads)
        more = {
            (stage, way, number)
            for stage, ends in enumerate(found.ends)
            for way, recording in enumerate(ways.recordings)
            for number, read in enumerate(recording.reads)
            if (end := stop(ways, way, ends)) is None or read.number <= end
        }
        if more <= reads:
            return found.demand()
        reads |= more


def _check_state(recording: Recording) -> None:
    """What the next forward finds must be the same on every stage: computed from inputs and constants alone."""
    for name, position in recording.state:
        todo, seen = [position], {position}
        while todo:
            value = recording.values[todo.pop()]
            if value.is_drawn or value.origin in (Origin.CALL, Origin.HELD):
                raise StageUsageError(
                    f"the forward changes {name!r}, which is in no unit, by what comes from {value.name!r}: each stage would go"
                    " on with another one; make the module that changes it a unit (units=)"
                )
            todo += set(value.parents) - seen
            seen.update(value.parents)


class _Needs:
    def __init__(
        self,
        ways: Ways,
        owners: Sequence[Mapping[int, int]],
        num_stages: int,
        ranks: Sequence[int],
        *,
        inputs_everywhere: bool,
    ) -> None:
        self.ways = ways
        self.owners = owners
        self.num_stages = num_stages
        self.ranks = ranks
        self.inputs_everywhere = inputs_everywhere
        self.barriers = [self._barriers(way) for way in range(len(owners))]
        self.held: dict[str, Place] = {}  # parameters and buffers that glue reads, by name: the first place
        for way, recording in enumerate(ways.recordings):
            for position, value in enumerate(recording.values):
                if value.origin is Origin.HELD:
                    self.held.setdefault(value.name, (way, position))

    def _barriers(self, way: int) -> list[float]:
        """For each stage the number that it cannot reach, since Python looks there at what a later stage makes."""
        recording = self.ways.recordings[way]
        levels: list[int] = []
        for value in recording.values:
            is_made = value.origin is Origin.CALL
            before = (levels[parent] for parent in value.parents)
            levels.append(self.owners[way][value.key[0]] if is_made else max(before, default=0))
        return [
            min((read.number for read in recording.reads if levels[read.value] > stage), default=inf)
            for stage in range(self.num_stages)
        ]

    def solve(self, reads: Iterable[tuple[int, int, int]]) -> _Solution:
        """Stage by stage, the first first, so that it is known what each one before has."""
        solution = _Solution(self)
        for stage in range(self.num_stages):
            needed: dict[Place, str] = {}
            for way, recording in enumerate(self.ways.recordings):
                for call in recording.calls:
                    if self.owners[way][call.number] == stage:
                        needed |= {(way, value): f"unit {call.unit!r}" for value in call.inputs}
            for reader, way, number in sorted(reads):
                if reader == stage:
                    read = self.ways.recordings[way].reads[number]
                    needed.setdefault((way, read.value), read.what)
            for way, recording in enumerate(self.ways.recordings):
                if stage and not self.inputs_everywhere:  # glue looks at inputs, and at their shapes, wherever it likes
                    given = (n for n, value in enumerate(recording.values) if value.origin is Origin.INPUT)
                    needed |= {(way, position): "the model's inputs" for position in given}
                if stage == self.num_stages - 1:
                    for position in recording.results:
                        needed.setdefault((way, position), "the model's result")
            solution.add(stage, needed)
        solution.run_on_for_hooks()
        return solution


class _Solution:
    """What is found so far; mutable. Values that ways share go by their place in the first of these."""

    def __init__(self, needs: _Needs) -> None:
        self.needs = needs
        self.ways = needs.ways
        self.every = range(len(needs.ways.recordings))
        self.real: list[list[list[bool]]] = []  # by stage, way and position
        self.ends: list[list[int | None]] = []  # by stage and way
        self.held: list[dict[str, None]] = []
        self.receives: list[dict[Place, int]] = []  # by stage: a value, and the stage that it comes from
        self.sends: list[dict[Place, set[int]]] = []  # by stage: a value, and the stages that it goes to
        self.drawn: dict[Place, int] = {}  # random values: the one stage that draws each

    def add(self, stage: int, needed: Mapping[Place, str]) -> None:
        """Decide for one stage."""
        self.held.append({})
        self.receives.append({})
        self.sends.append({})
        self.ends.append([self._least(stage, way) for way in self.every])
        self._take(stage, needed)
        self.real.append(self._all_real(stage))
        several = len(self.every) > 1 or any(recording.draws for recording in self.ways.recordings)
        if stage and not self.receives[stage]:
            self._sign(stage, stage - 1, _ROUTE if several else _TOKEN)
        elif several:
            for source in set(self.receives[stage].values()):
                self._sign(stage, source, _ROUTE)
                self._sign(stage, source, _MARKS)

    def _least(self, stage: int, way: int) -> int | None:
        """Where a stage may end that takes nothing and sends nothing."""
        if stage == self.needs.num_stages - 1:
            return None
        recording = self.ways.recordings[way]
        owned = (number for number, owner in self.needs.owners[way].items() if owner == stage)
        return max([*owned, len(recording.names) if recording.has_changes else 0])

    def _sign(self, stage: int, source: int, sign: int) -> None:
        self.receives[stage][0, sign] = source
        self.sends[source].setdefault((0, sign), set()).add(stage)

    def run_on_for_hooks(self) -> None:
        """A stage whose value gets a hook does not end before it."""
        for way, recording in enumerate(self.ways.recordings):
            for position, number in recording.hooked:
                for stage, ends in enumerate(self.ends):
                    end = stop(self.ways, way, ends)
                    made = recording.values[position].key[0]
                    if end is not None and made <= end and self.real[stage][way][position]:
                        ends[way] = max(end, number)

    def demand(self) -> Demand:
        """All of it as data."""
        carried = [self._allotted(sent) for sent in self.sends]
        counts = [0 for _ in carried]
        crossings = []
        for source, outputs in enumerate(carried):
            for number, by_way in enumerate(outputs):
                for destination in sorted(self.sends[source][self._first(next(iter(by_way.values())))]):
                    wire = Wire(source, number, destination, counts[destination])
                    counts[destination] += 1
                    values = [self._value(by_way[way]) if way in by_way else None for way in self.every]
                    keys = tuple(None if value is None else value.key for value in values)
                    crossings.append(Crossing(wire, keys, tuple(0 if v is None else v.nbytes for v in values)))
        crossings.sort(key=lambda crossing: (crossing.wire.destination, crossing.wire.input))
        plans = []
        for stage, outputs in enumerate(carried):
            mine = [crossing for crossing in crossings if crossing.wire.destination == stage]
            plans.append(
                StagePlan(
                    tuple(self._part(stage, way, mine, outputs) for way in self.every),
                    len(outputs),
                    stage == self.needs.num_stages - 1,
                    tuple(crossing.wire.input for crossing in mine if ROUTE in crossing.keys),
                    _sign_among(outputs, _ROUTE),
                    tuple(_marked(mine)),
                    _sign_among(outputs, _MARKS),
                    tuple(self.held[stage]),
                )
            )
        return Demand(tuple(plans), tuple(crossings))

    def _allotted(self, sent: Mapping[Place, set[int]]) -> list[dict[int, Place]]:
        """What each output of a stage carries, by way."""
        order = sorted(sent, key=lambda place: (self._value(place).key, place))
        within = [dict(self._same(place)) for place in order]
        wanted = [
            (self._value(place).nbytes, frozenset(ways), frozenset(sent[place]))
            for place, ways in zip(order, within, strict=True)
        ]
        outputs: dict[int, dict[int, Place]] = {}
        for ways, number in zip(within, allot(wanted), strict=True):
            outputs.setdefault(number, {}).update({way: (way, position) for way, position in ways.items()})
        return [outputs[number] for number in sorted(outputs)]

    def _part(self, stage: int, way: int, taken: Sequence[Crossing], outputs: Sequence[Mapping[int, Place]]) -> Part:
        takes: dict[int, dict[int, int]] = {}
        for crossing in taken:
            key = crossing.keys[way]
            if key is not None:
                takes.setdefault(key[0], {})[key[1]] = crossing.wire.input
        gives: dict[int, tuple[tuple[int, int, bool], ...]] = {}
        for number, by_way in enumerate(outputs):
            if way in by_way:
                value = self._value(by_way[way])
                gives[value.key[0]] = (*gives.get(value.key[0], ()), (value.key[1], number, value.is_written))
        owned = frozenset(number for number, owner in self.needs.owners[way].items() if owner == stage)
        return Part(owned, takes, gives, self.ends[stage][way])

    def _value(self, place: Place) -> Value:
        return _SIGNS[place[1]] if place[1] < 0 else self.ways.recordings[place[0]].values[place[1]]

    def _same(self, place: Place) -> Sequence[Place]:
        """Where a value is in all ways that share it."""
        return [(way, place[1]) for way in self.every] if place[1] < 0 else self.ways.same[place[0]][place[1]]

    def _first(self, place: Place) -> Place:
        return self._same(place)[0]

    def _node(self, place: Place) -> Place:
        """What stands for a value in all ways: of what is held the first that has its name."""
        value = self._value(place)
        return self.needs.held[value.name] if value.origin is Origin.HELD else self._first(place)

    def _all_real(self, stage: int) -> list[list[bool]]:
        """Which values are real on a stage, with what it holds and takes, in each way."""
        return [self._real(stage, way) for way in self.every]

    def _real(self, stage: int, way: int) -> list[bool]:
        real: list[bool] = []
        held, taken, needs = self.held[stage], self.receives[stage], self.needs
        for position, value in enumerate(self.ways.recordings[way].values):
            if self._first((way, position)) in taken:
                real.append(True)
            elif value.origin is Origin.INPUT:
                real.append(needs.inputs_everywhere or stage == 0)
            elif value.origin is Origin.HELD:
                real.append(value.name in held)
            elif value.origin is Origin.CALL:
                real.append(needs.owners[way][value.key[0]] == stage)
            elif value.is_drawn and self.drawn.get(self._first((way, position))) != stage:
                real.append(False)
            else:
                real.append(all(real[parent] for parent in value.parents))
        return real

    def _source(self, stage: int, place: Place) -> int | None:
        """The stage to take a value from: one on the same rank, else the nearest that has it without running on for it."""
        value = self._value(place)
        if value.stays or value.origin is Origin.HELD:
            return None
        having = [
            earlier
            for earlier in range(stage)
            if all(
                self.real[earlier][way][position] and value.key[0] < self.needs.barriers[way][earlier]
                for way, position in self._same(place)
            )
        ]
        if not having:
            return None

        def runs_on(earlier: int) -> bool:
            end = self.ends[earlier][place[0]]
            return end is not None and value.key[0] > end

        same_rank = self.needs.ranks[stage]
        return max(having, key=lambda earlier: (self.needs.ranks[earlier] == same_rank, not runs_on(earlier), earlier))

    def _take(self, stage: int, needed: Mapping[Place, str]) -> None:
        """Take values from other stages, so that what is needed is here or can be computed."""
        real = self._all_real(stage)
        wanted = {self._node(place): why for place, why in needed.items() if not real[place[0]][place[1]]}
        sizes: dict[Place, float] = {}
        parents: dict[Place, list[Place] | None] = {}
        todo = list(wanted)
        for node in todo:
            if node in parents:
                continue
            before = [(way, one) for way, position in self._same(node) for one in self._value((way, position)).parents]
            missing = dict.fromkeys(self._node(one) for one in before if not real[one[0]][one[1]])
            parents[node] = [*missing] if self._is_computed(stage, node) else None
            value = self._value(node)
            can_move = value.origin is Origin.HELD or self._source(stage, node) is not None
            sizes[node] = value.nbytes if can_move else inf
            todo += parents[node] or ()
        self._check(stage, wanted, parents, sizes)
        taken = least(parents, sizes, wanted)
        for node in sorted(taken):
            source = self._source(stage, node)
            if source is None:
                self.held[stage][self._value(node).name] = None
            else:
                self._send(stage, source, node)
        self._draw(stage, wanted, parents, taken)

    def _check(
        self,
        stage: int,
        wanted: Mapping[Place, str],
        parents: Mapping[Place, Sequence[Place] | None],
        sizes: Mapping[Place, float],
    ) -> None:
        """Refuse what cannot be had: neither itself nor what it is computed from."""
        seen: set[Place] = set()
        for first, why in wanted.items():
            todo = [first]
            while todo:
                node = todo.pop()
                if node in seen or sizes[node] < inf:
                    continue
                seen.add(node)
                before = parents[node]
                if before is None:
                    raise StageUsageError(self._refusal(stage, node, why))
                todo += reversed(before)

    def _draw(
        self,
        stage: int,
        wanted: Iterable[Place],
        parents: Mapping[Place, Sequence[Place] | None],
        taken: Collection[Place],
    ) -> None:
        """Who computes a random value draws it, in all ways that share it."""
        todo, seen = list(wanted), set(taken)
        while todo:
            node = todo.pop()
            if node not in seen:
                seen.add(node)
                todo += parents[node] or ()
                if self._value(node).is_drawn:
                    self.drawn[node] = stage

    def _send(self, stage: int, source: int, node: Place) -> None:
        """Let a value cross, in all ways that share it."""
        self.receives[stage][node] = source
        self.sends[source].setdefault(node, set()).add(stage)
        number = self._value(node).key[0]
        for way, _ in self._same(node):
            end = self.ends[source][way]
            if end is not None:
                self.ends[source][way] = max(end, number)

    def _is_computed(self, stage: int, place: Place) -> bool:
        """Whether a stage may compute a value itself; one with random numbers only if no other has."""
        value = self._value(place)
        is_free = not value.is_drawn or self.drawn.get(self._first(place), stage) == stage
        return value.origin in (Origin.GLUE, Origin.ALIAS) and is_free

    def _refusal(self, stage: int, culprit: Place, why: str) -> str:
        value = self._value(culprit)
        maker = value.name
        reason = "values only go from earlier stages to later ones; put what needs it on that stage or a later one"
        if value.origin is Origin.CALL:
            owner = self.needs.owners[culprit[0]][value.key[0]]
            maker = f"unit {value.name!r}, which is on stage {owner}"
            if owner < stage and value.stays:
                maker += f", and {value.stays}"
                reason = "such a value does not go to another stage; put what needs it on the same one"
        elif value.is_drawn:
            drawer = self.drawn.get(self._first(culprit), stage)
            maker = f"{maker!r}, which draws random numbers in place, on stage {drawer}"
        return (
            f"stage {stage} needs, for {why}, what comes from {maker}: {reason}, with a mapping from names of units to stages in"
            " place of a number"
        )


def _sign_among(outputs: Sequence[Mapping[int, Place]], sign: int) -> int | None:
    """Which output is a sign."""
    return next((number for number, by_way in enumerate(outputs) if by_way.get(0) == (0, sign)), None)


def _marked(taken: Sequence[Crossing]) -> Iterator[tuple[int, tuple[tuple[int, int], ...]]]:
    """What a stage takes, by source: the input that is its marks, and the inputs and outputs that are values."""
    for marks in taken:
        if MARKS in marks.keys:
            wires = [
                one.wire for one in taken if one.wire.source == marks.wire.source and max(_made(one)) >= (INPUTS, 0)
            ]
            yield marks.wire.input, tuple((wire.input, wire.output) for wire in wires)


def _made(crossing: Crossing) -> list[Key]:
    return [key for key in crossing.keys if key is not None]
