"""What ranks must have cut alike: whatever decides the messages between them, and what stands for all of it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from ._demand import Demand
from ._ways import Ways


def fingerprint(
    ways: Ways, parts: Sequence[Sequence[str]], owners: Sequence[Mapping[int, int]], found: Demand, *inputs: str
) -> str:
    """The same on ranks whose stages go together.

    How many bytes a value has in the example is left out, for examples may be of other sizes on each rank, as long as the same
    values cross.

    Args:
        ways: the model's forwards.
        parts: the units of each stage.
        owners: of each way, the stage of each call of a unit.
        found: what crosses.
        inputs: what else must be the same.
    """
    seen = [
        (one.names, one.singles, one.hooked, one.asks, one.measures, one.sets, one.draws, one.rewritten)
        for one in ways.recordings
    ]
    wires = [(one.wire, one.keys) for one in found.crossings]
    every = _in_order((seen, ways.parting, parts, owners, found.stages, wires, inputs))
    return hashlib.sha256(repr(every).encode()).hexdigest()


def _in_order(value: Any) -> Any:
    """The same value as tuples, what has no order sorted."""
    if attrs.has(type(value)):
        return tuple(_in_order(getattr(value, field.name)) for field in attrs.fields(type(value)))
    if isinstance(value, Mapping):
        return sorted((repr(key), _in_order(one)) for key, one in value.items())
    if isinstance(value, frozenset | set):
        return sorted(map(repr, value))
    if isinstance(value, tuple | list):
        return tuple(map(_in_order, value))
    return value
