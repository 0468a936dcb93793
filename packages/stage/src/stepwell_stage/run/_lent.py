"""Values that are not a stage's alone: others share their memory, or a later stage gets them too.

In one process, who writes to such a value in place changes it for all. Between stages each has a copy, and the others would go on
with what it was. So a stage that writes to one is refused.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from stepwell_meta import to_local_if_dtensor
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


def sharing(tensors: Sequence[torch.Tensor]) -> set[int]:
    """The numbers of tensors that have memory in common with others of them."""
    found: set[int] = set()
    of_storage: dict[int, list[tuple[int, torch.Tensor]]] = {}
    for number, tensor in enumerate(tensors):
        local = to_local_if_dtensor(tensor).detach()
        if (
            local.numel() and type(local) is torch.Tensor
        ):  # others, such as shards still on their way, have no storage to ask
            of_storage.setdefault(local.untyped_storage().data_ptr(), []).append((number, local))
    for members in of_storage.values():
        if len(members) > 1:
            found |= _overlapping(members)
    return found


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


def _overlapping(members: Sequence[tuple[int, torch.Tensor]]) -> set[int]:
    """Of tensors in one storage the numbers of those that have an element in common with another."""
    sizes = {local.element_size() for _, local in members}
    if len(sizes) > 1:
        return {number for number, _ in members}
    storage = members[0][1].untyped_storage()
    users = torch.zeros(storage.nbytes() // sizes.pop(), dtype=torch.uint8, device=storage.device)
    places = []
    for number, local in members:
        once = [size if stride else 1 for size, stride in zip(local.shape, local.stride(), strict=True)]
        places.append((number, users.as_strided(once, local.stride(), local.storage_offset())))
        places[-1][1].add_(1)
    return {number for number, place in places if bool((place > 1).any())}
