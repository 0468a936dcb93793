"""What a forward computes between its units, as data: values, where they come from, and who needs them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import Enum
from typing import TypeAlias

import attrs

Key: TypeAlias = tuple[
    int, int
]  # the number of the call or operation that made a value, and which of its results it is

INPUTS = -1  # in place of a number: the model's inputs
TOKEN: Key = (-2, 0)  # nothing but a sign of life, for a stage that needs no value of another
ROUTE: Key = (-3, 0)  # which way a stage went, as far as it knows, where a forward may go several
MARKS: Key = (-4, 0)  # which of the values that a stage sent have a gradient, likewise


class Origin(Enum):
    """How a value comes about."""

    INPUT = "input"  # given by the caller
    HELD = "held"  # a parameter, or a buffer without value yet, that glue reads: it is where it is needed
    CALL = "call"  # a result of a unit
    GLUE = "glue"  # computed by glue from its parents; without any it is the same on every stage
    ALIAS = "alias"  # a tensor that was changed in place after it was made


@attrs.frozen
class Value:
    """One tensor that glue or a unit sees.

    Attributes:
        key: its name, the same on every stage; of aliases and what is held, which never cross, any.
        origin: how it comes about.
        name: the input's or parameter's name, or what computed it.
        parents: positions, in the list of values, of what it is computed from.
        nbytes: its size in the example.
        stays: why no stage can take it from another instead of computing it; "" if one can.
        is_written: whether it is changed in place later on.
        is_drawn: whether one stage alone may compute it: random numbers are in it, which would be others on each, or a hook is on
            it, which is to see all of its gradient.
    """

    key: Key
    origin: Origin
    name: str
    parents: tuple[int, ...] = ()
    nbytes: int = 0
    stays: str = ""
    is_written: bool = False
    is_drawn: bool = False


@attrs.frozen
class Call:
    """One call of a unit.

    Attributes:
        number: among the forward's calls and operations.
        unit: the unit's name.
        inputs: positions of the values that it takes.
    """

    number: int
    unit: str
    inputs: tuple[int, ...]


@attrs.frozen
class Read:
    """Where Python itself looks at data, such as in an ``if``.

    Attributes:
        number: how many calls and operations come before it.
        value: position of the value.
        what: how, and the line of the source.
    """

    number: int
    value: int
    what: str


@attrs.frozen
class Recording:
    """One forward of the example.

    Attributes:
        names: of each numbered call and operation, in order.
        values: every tensor; parents come before what is computed from them.
        calls: calls of units.
        reads: looks at data.
        results: positions of the tensors that the model returns.
        state: what the forward leaves changed of the model beside its units, for the next one, by name: positions of tensors.
        hooked: values with a hook on their gradient: positions, and how many calls and operations come before it.
        has_changes: whether it leaves anything changed, tensors or plain numbers.
        checkpointed: numbers of calls that one checkpoint encloses, which is run again in backward.
        singles: numbers of operations that give a single tensor, not a row of them.
        asks: whether Python asks if what units make needs a gradient.
        measures: whether Python asks for the shape of what units make.
        sets: whether attributes of glue are another while it runs than before.
        rewritten: names of parameters and buffers of units that units change.
        draws: whether glue draws random numbers of Python's or NumPy's.
        derives: whether it takes derivatives in forward mode, of which a process takes one at a time.
        filled: objects in what it returns that units fill, by their number among its objects, and these units.
        settings: which of torch's settings it sets for a part of itself.
        passed: what operations give that is what they were given, by its name as their result and by its own.
        found: units of which a call finds a tensor in an object that it is given, which the unit does not return: the unit, and
            the call's number.
    """

    names: tuple[str, ...]
    values: tuple[Value, ...]
    calls: tuple[Call, ...]
    reads: tuple[Read, ...]
    results: tuple[int, ...]
    state: tuple[tuple[str, int], ...] = ()
    hooked: tuple[tuple[int, int], ...] = ()
    has_changes: bool = False
    checkpointed: tuple[tuple[int, ...], ...] = ()
    singles: frozenset[int] = frozenset()
    asks: bool = False
    measures: bool = False
    sets: bool = False
    draws: bool = False
    rewritten: frozenset[str] = frozenset()
    derives: bool = False
    filled: tuple[tuple[int, frozenset[str]], ...] = ()
    settings: frozenset[str] = frozenset()
    passed: tuple[tuple[Key, Key], ...] = ()
    found: tuple[tuple[str, int], ...] = ()

    def goes_as(self, other: Recording) -> bool:
        """Whether another forward does the same with the same values, also where a dropout passes on what it is given in one."""
        passed = dict((*self.passed, *other.passed))
        return self.names == other.names and self._uses(passed) == other._uses(passed)

    def _uses(self, passed: Mapping[Key, Key]) -> list[tuple[Key, set[Key]]]:
        """What is made of what, what units are given, and what is returned."""

        def keys(positions: Iterable[int]) -> set[Key]:
            found = {self.values[position].key for position in positions}
            while moved := found & passed.keys():
                found = found - moved | {passed[key] for key in moved}
            return found

        uses = [(value.key, keys(value.parents)) for value in self.values if value.key not in passed]
        uses += [((call.number, -1), keys(call.inputs)) for call in self.calls]
        return [*uses, ((len(self.names), -1), keys(self.results))]


def unit_between(values: Sequence[Value], inputs: Collection[int], outputs: Iterable[int]) -> str | None:
    """A unit, if there is one, that makes some of these values from some of those, by their positions."""
    after = set(inputs)
    for position, value in enumerate(values):
        if after.intersection(value.parents):
            after.add(position)
    todo, seen = list(outputs), set(inputs)
    while todo:
        position = todo.pop()
        value = values[position]
        if value.origin is Origin.CALL and position in after and position not in inputs:
            return value.name
        todo += set(value.parents) - seen
        seen.update(value.parents)
    return None
