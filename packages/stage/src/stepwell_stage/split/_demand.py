"""Which values each stage takes from which other, and where its forward may end.

A stage needs what its units take, what it returns if it is the last, and what Python looks at before it is done. A value is
*real* there if it is given, comes from one of its units, or is computed by glue from real values alone. What is needed and
not real is taken from an earlier stage where it is real, or computed from values that are: whichever moves fewer bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import inf

import attrs

from stepwell_p2p._placement import Wire

from ..exceptions import StageUsageError
from ._values import TOKEN, Key, Origin, Recording


@attrs.frozen
class StagePlan:
    """What one stage does, all of it in numbers of the recording.

    Attributes:
        owned: calls of units that it computes.
        receives: values that it takes, in the order of its inputs.
        sends: values that it returns, in the order of its outputs; none on the last stage, which returns the model's result.
        copies: of these, those that are changed in place later on.
        last: the number of the last call or operation that it runs; None: it runs to the end.
        held: names of parameters and buffers that its glue reads.
    """

    owned: frozenset[int]
    receives: tuple[Key, ...]
    sends: tuple[Key, ...]
    copies: frozenset[Key]
    last: int | None
    held: tuple[str, ...]


@attrs.frozen
class Demand:
    """Every stage's part, and what crosses between them.

    Attributes:
        stages: by number.
        wires: what crosses.
        nbytes: for each wire, how much in the example.
    """

    stages: tuple[StagePlan, ...]
    wires: tuple[Wire, ...]
    nbytes: tuple[int, ...]


def demand(
    recording: Recording, owners: Mapping[int, int], *, num_stages: int, ranks: Sequence[int], inputs_everywhere: bool
) -> Demand:
    """Find what crosses.

    Args:
        recording: the model's forward.
        owners: the stage of each call of a unit, by its number.
        num_stages: how many stages.
        ranks: the rank of each stage: what several stages of a rank need is sent to it once.
        inputs_everywhere: whether every rank is given the inputs; otherwise only the first stage has them.

    Raises:
        StageUsageError: a stage needs what a later one makes, or the forward changes the model by what units make.
    """
    _check_state(recording)
    need = _Needs(recording, owners, num_stages, ranks, inputs_everywhere=inputs_everywhere)
    reads: set[tuple[int, int]] = set()
    while True:
        found = need.solve(reads)
        more = {
            (stage, number)
            for stage, end in enumerate(found.ends)
            for number, read in enumerate(recording.reads)
            if end is None or read.number <= end
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
        recording: Recording,
        owners: Mapping[int, int],
        num_stages: int,
        ranks: Sequence[int],
        *,
        inputs_everywhere: bool,
    ) -> None:
        self.recording = recording
        self.owners = owners
        self.num_stages = num_stages
        self.ranks = ranks
        self.inputs_everywhere = inputs_everywhere

    def solve(self, reads: Iterable[tuple[int, int]]) -> _Solution:
        """Stage by stage, the first first, so that it is known what each one before has."""
        solution = _Solution(self)
        for stage in range(self.num_stages):
            needed: dict[int, str] = {}
            for call in self.recording.calls:
                if self.owners[call.number] == stage:
                    needed |= dict.fromkeys(call.inputs, f"unit {call.unit!r}")
            for reader, number in sorted(reads):
                if reader == stage:
                    read = self.recording.reads[number]
                    needed.setdefault(read.value, read.what)
            if stage and not self.inputs_everywhere:  # glue looks at inputs, and at their shapes, wherever it likes
                given = [n for n, value in enumerate(self.recording.values) if value.origin is Origin.INPUT]
                needed |= dict.fromkeys(given, "the model's inputs")
            if stage == self.num_stages - 1:
                needed |= {value: "the model's result" for value in self.recording.results if value not in needed}
            solution.add(stage, needed)
        solution.run_on_for_hooks()
        return solution


class _Solution:
    """What is found so far; mutable."""

    def __init__(self, needs: _Needs) -> None:
        self.needs = needs
        self.values = needs.recording.values
        self.real: list[list[bool]] = []
        self.ends: list[int | None] = []
        self.held: list[dict[str, None]] = []
        self.receives: list[dict[int, int]] = []  # by stage: position of a value, and the stage that it comes from
        self.sends: list[set[Key]] = []
        self.drawn: dict[int, int] = {}  # random values: the one stage that draws each

    def add(self, stage: int, needed: Mapping[int, str]) -> None:
        """Decide for one stage."""
        self.held.append({})
        self.receives.append({})
        self.sends.append(set())
        owned = [number for number, owner in self.needs.owners.items() if owner == stage]
        is_last = stage == self.needs.num_stages - 1
        least = len(self.needs.recording.names) if self.needs.recording.has_changes else -1
        self.ends.append(None if is_last else max([*owned, least]))
        real = self._real(stage)
        costs = self._costs(stage, real)
        for value, why in needed.items():
            self._take(stage, value, why, real, costs)
        self.real.append(self._real(stage))
        if stage and not self.receives[stage]:
            self._token(stage)

    def run_on_for_hooks(self) -> None:
        """A stage whose value gets a hook does not end before it."""
        for position, number in self.needs.recording.hooked:
            for stage, end in enumerate(self.ends):
                if end is not None and self.values[position].key[0] <= end and self.real[stage][position]:
                    self.ends[stage] = max(end, number)

    def demand(self) -> Demand:
        """All of it as data."""
        wires, nbytes = [], []
        receives: list[tuple[Key, ...]] = []
        sends = [tuple(sorted(sent)) for sent in self.sends]
        for stage, taken in enumerate(self.receives):
            order = sorted(taken, key=lambda position: (taken[position], self._key(position)))
            receives.append(tuple(self._key(position) for position in order))
            for number, position in enumerate(order):
                source = taken[position]
                wires.append(Wire(source, sends[source].index(self._key(position)), stage, number))
                nbytes.append(self.values[position].nbytes if position >= 0 else 0)
        written = {value.key for value in self.values if value.is_written}
        stages = tuple(
            StagePlan(
                frozenset(number for number, owner in self.needs.owners.items() if owner == stage),
                receives[stage],
                sends[stage],
                frozenset(written.intersection(sends[stage])),
                self.ends[stage],
                tuple(self.held[stage]),
            )
            for stage in range(self.needs.num_stages)
        )
        return Demand(stages, tuple(wires), tuple(nbytes))

    def _key(self, position: int) -> Key:
        return self.values[position].key if position >= 0 else TOKEN

    def _real(self, stage: int) -> list[bool]:
        """Which values are real on a stage, with what it holds and takes."""
        real: list[bool] = []
        held, taken = self.held[stage], self.receives[stage]
        for position, value in enumerate(self.values):
            if position in taken:
                real.append(True)
            elif value.origin is Origin.INPUT:
                real.append(self.needs.inputs_everywhere or stage == 0)
            elif value.origin is Origin.HELD:
                real.append(value.name in held)
            elif value.origin is Origin.CALL:
                real.append(self.needs.owners[value.key[0]] == stage)
            elif value.is_drawn and self.drawn.get(position) != stage:
                real.append(False)
            else:
                real.append(all(real[parent] for parent in value.parents))
        return real

    def _costs(self, stage: int, real: Sequence[bool]) -> list[float]:
        """Bytes to move so that a value is real here."""
        costs: list[float] = []
        for position, value in enumerate(self.values):
            if real[position]:
                costs.append(0)
                continue
            sent = value.nbytes if self._source(stage, position) is not None else inf
            if value.origin is Origin.HELD:
                costs.append(value.nbytes)
            elif self._is_computed(stage, position):
                costs.append(min(sent, sum(costs[parent] for parent in value.parents)))
            else:
                costs.append(sent)
        return costs

    def _source(self, stage: int, position: int) -> int | None:
        """The stage to take a value from: one on the same rank, else the nearest that has it without running on for it."""
        value = self.values[position]
        if value.stays or value.origin is Origin.HELD:
            return None
        having = [earlier for earlier in range(stage) if self.real[earlier][position]]
        if not having:
            return None

        def runs_on(earlier: int) -> bool:
            end = self.ends[earlier]
            return end is not None and value.key[0] > end

        same_rank = self.needs.ranks[stage]
        return max(having, key=lambda earlier: (self.needs.ranks[earlier] == same_rank, not runs_on(earlier), earlier))

    def _take(self, stage: int, wanted: int, why: str, real: list[bool], costs: list[float]) -> None:
        """Take a value from another stage, or what it is computed from."""
        todo = [wanted]
        while todo:
            position = todo.pop()
            if real[position]:
                continue
            value = self.values[position]
            source = self._source(stage, position)
            is_computed = self._is_computed(stage, position)
            parents = sum(costs[parent] for parent in value.parents) if is_computed else inf
            if value.origin is Origin.HELD:
                self.held[stage][value.name] = None
            elif source is not None and value.nbytes <= parents:
                self.receives[stage][position] = source
                self.sends[source].add(value.key)
                end = self.ends[source]
                if end is not None:
                    self.ends[source] = max(end, value.key[0])
            elif is_computed and parents < inf:
                if value.is_drawn:
                    self.drawn[position] = stage
                todo += value.parents
            else:
                raise StageUsageError(self._refusal(stage, wanted, self._culprit(stage, position, costs), why))
            real[position] = True

    def _is_computed(self, stage: int, position: int) -> bool:
        """Whether a stage may compute a value itself; one with random numbers only if no other has."""
        value = self.values[position]
        is_free = not value.is_drawn or self.drawn.get(position, stage) == stage
        return value.origin in (Origin.GLUE, Origin.ALIAS) and is_free

    def _culprit(self, stage: int, position: int, costs: Sequence[float]) -> int:
        """Of what a value is computed from, what cannot be had."""
        while self._is_computed(stage, position):
            position = next(parent for parent in self.values[position].parents if costs[parent] == inf)
        return position

    def _refusal(self, stage: int, wanted: int, position: int, why: str) -> str:
        value = self.values[position]
        maker = value.name
        if value.origin is Origin.CALL:
            owner = self.needs.owners[value.key[0]]
            maker = f"unit {value.name!r}, which is on stage {owner}"
            if owner < stage and value.stays:
                maker += f", and {value.stays}"
        elif value.is_drawn:
            maker = f"{maker!r}, which draws random numbers in place, on stage {self.drawn.get(position, stage)}"
        return (
            f"stage {stage} needs, for {why}, what comes from {maker}: values only go from earlier stages to later ones; put"
            " what needs it on that stage or a later one, with a mapping from names of units to stages in place of a number"
        )

    def _token(self, stage: int) -> None:
        self.receives[stage][-1] = stage - 1
        self.sends[stage - 1].add(TOKEN)


def place_calls(recording: Recording, stages: Mapping[str, int], fixed: Iterable[str] = ()) -> dict[int, int]:
    """The stage of each call of a unit: that of the unit, or, where a call takes what a later stage makes, that later one.

    Args:
        recording: the model's forward.
        stages: the stage of each unit.
        fixed: units whose first call may not be anywhere else.

    Raises:
        StageUsageError: a fixed unit takes what a later stage makes.
    """
    given = set(fixed)
    owners: dict[int, int] = {}
    calls = {call.number: call for call in recording.calls}
    levels: list[int] = []
    seen: set[str] = set()
    for value in recording.values:
        if value.origin is not Origin.CALL:
            levels.append(max((levels[parent] for parent in value.parents), default=0))
            continue
        call = calls[value.key[0]]
        if call.number not in owners:
            owners[call.number] = _owner(call.unit, stages, [levels[p] for p in call.inputs], given - seen)
            seen.add(call.unit)
        levels.append(owners[call.number])
    for call in recording.calls:  # those that return no tensor
        if call.number not in owners:
            owners[call.number] = _owner(call.unit, stages, [levels[p] for p in call.inputs], given - seen)
    return owners


def _owner(unit: str, stages: Mapping[str, int], levels: Sequence[int], fixed: set[str]) -> int:
    least = max(levels, default=0)
    if least > stages[unit] and unit in fixed:
        raise StageUsageError(
            f"unit {unit!r} is to be on stage {stages[unit]}, but takes what stage {least} makes: put it on stage {least} or a"
            " later one"
        )
    return max(stages[unit], least)
