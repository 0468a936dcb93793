"""Which output of which stage goes into which input of which later stage."""

from __future__ import annotations

from collections.abc import Iterable

import attrs

from stepwell_p2p._placement import Wire

from ..exceptions import ScheduleError


def _sorted(wires: Iterable[Wire] | None) -> tuple[Wire, ...] | None:
    return None if wires is None else tuple(sorted(set(wires)))


@attrs.frozen
class Wiring:
    """The wires of a pipeline; without any given, the *chain*: all outputs of a stage are the inputs of the next.

    Attributes:
        num_stages: number of stages.
        wires: every wire, sorted, or None for the chain, whose number of values is the modules' matter.

    Raises:
        ScheduleError: a wire to a stage that is not there; an input that two wires lead to, or none; a stage that gets nothing.
    """

    num_stages: int
    wires: tuple[Wire, ...] | None = attrs.field(default=None, converter=_sorted)

    def __attrs_post_init__(self) -> None:
        if self.wires is None:
            return
        inputs: dict[int, list[Wire]] = {stage: [] for stage in range(1, self.num_stages)}
        for wire in self.wires:
            if wire.destination not in inputs:
                raise ScheduleError(f"{wire} leads to a stage that is not there: stages are 0 to {self.num_stages - 1}")
            inputs[wire.destination].append(wire)
        for stage, wires in inputs.items():
            numbers = sorted(wire.input for wire in wires)
            if not numbers:
                raise ScheduleError(
                    f"no wire leads to stage {stage}: every stage but the first takes at least one value"
                )
            if numbers != list(range(len(numbers))):
                raise ScheduleError(
                    f"the inputs of stage {stage} must be 0, 1, 2, … with one wire each; the wires lead to inputs {numbers}"
                )

    @property
    def links(self) -> tuple[tuple[int, int], ...]:
        """Pairs of stages (source, destination) between which values travel."""
        if self.wires is None:
            return tuple((stage, stage + 1) for stage in range(self.num_stages - 1))
        return tuple(sorted({(wire.source, wire.destination) for wire in self.wires}))

    def between(self, source: int, destination: int) -> tuple[Wire, ...] | None:
        """The wires of one link, by input; None for the chain."""
        if self.wires is None:
            return None
        found = (wire for wire in self.wires if (wire.source, wire.destination) == (source, destination))
        return tuple(sorted(found, key=lambda wire: wire.input))

    def sources(self, stage: int) -> tuple[int, ...]:
        """The stages whose values a stage takes, ascending."""
        return tuple(source for source, destination in self.links if destination == stage)

    def destinations(self, stage: int) -> tuple[int, ...]:
        """The stages that take a stage's values, ascending."""
        return tuple(destination for source, destination in self.links if source == stage)

    def first_message(self, source: int, destination: int) -> int:
        """The number of a link's first message among all that its source stage sends, so that no two have one name."""
        if self.wires is None:
            return 0
        return sum(wire.source == source and wire.destination < destination for wire in self.wires)

    def first_gradient(self, source: int, destination: int) -> int:
        """Likewise for the gradients that the link's destination stage sends back."""
        if self.wires is None:
            return 0
        return sum(wire.destination == destination and wire.source < source for wire in self.wires)


def same_wiring(given: Iterable[Iterable[Wire] | None], num_stages: int) -> Wiring:
    """The one wiring that several stages were given.

    Raises:
        ScheduleError: they were given different ones, or one that is no wiring.
    """
    found = {Wiring(num_stages, wires) for wires in given}
    if len(found) != 1:
        raise ScheduleError(
            "every stage of a pipeline is given the same wires, but these stages were given different ones"
        )
    return found.pop()
