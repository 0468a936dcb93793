"""Values that are not a stage's alone: others share their memory, or a later stage gets them too.

In one process, who writes to such a value in place changes it for all. Between stages each has a copy, and the others would go on
with what it was. So a stage that writes to one is refused.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from stepwell_p2p import Wire


class Lent:
    """Such values as a stage is given them, before it runs.

    Args:
        received: the tensors that its module is given.
        numbers: of those that are not this stage's alone.
    """

    def __init__(self, received: Sequence[torch.Tensor], numbers: Sequence[int]) -> None:
        self._before = [(number, received[number], _state(received[number])) for number in numbers]

    def written(self) -> int | None:
        """The first of them that was written to since."""
        return next((number for number, value, before in self._before if not _is_as(value, before)), None)


def _state(value: torch.Tensor) -> int | torch.Tensor:
    """What shows whether a tensor is written to: its count of that, which those of inference mode do not have, or a copy."""
    return value.clone() if value.is_inference() else value._version


def _is_as(value: torch.Tensor, before: int | torch.Tensor) -> bool:
    if isinstance(before, int):
        return value._version == before
    return bool(((value == before) | ((value != value) & (before != before))).all())  # NaN is no number, but the same


def lent_by_wires(wires: Sequence[Wire] | None, every: Sequence[Wire] | None) -> tuple[int, ...]:
    """Which values of a link another input gets too, of the same stage or a later one.

    Args:
        wires: of the link, by input; None for a chain.
        every: of the pipeline.
    """

    def others(wire: Wire) -> bool:
        return any(
            other != wire
            and (other.source, other.output) == (wire.source, wire.output)
            and other.destination >= wire.destination
            for other in every or ()
        )

    return tuple(number for number, wire in enumerate(wires or ()) if others(wire))


def taken_from(destination: int, source: int, every: Sequence[Wire] | None) -> tuple[int, ...] | None:
    """Which outputs of a stage another and those behind it take; None: all.

    Args:
        destination: the first of those.
        source: the stage.
        every: of the pipeline's wires; None for a chain.
    """
    if every is None:
        return None
    return tuple(sorted({wire.output for wire in every if wire.source == source and wire.destination >= destination}))
