"""Which of the values of a forward may cross to another stage, once it is known what became of them all."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import attrs
import torch

from ._values import Call, Value


def crossing(
    values: Sequence[Value],
    results: Sequence[int],
    calls: Sequence[Call],
    memory: Sequence[int],
    mixed: Collection[int],
    regions: Sequence[int | None],
    call_regions: Mapping[int, int | None],
) -> Iterator[Value]:
    """The values, of which some turned out not to cross.

    One of several tensors in one memory that glue changes is no longer one of them when it was received, so only the first
    may cross: the others are made of it again. In a checkpoint, which is run again in backward by those who have a unit in
    it, nothing is received: only what leaves it crosses, to others.

    Args:
        values: all of them.
        results: positions of those that the model returns.
        calls: calls of units.
        memory: of each value, what is the same for those in one memory.
        mixed: memories of which one tensor was used after another had been written into.
        regions: of each value, which checkpoint it was made in.
        call_regions: likewise of each call, by its number.
    """
    users: dict[int, set[int | None]] = {position: {None} for position in results}
    for position, value in enumerate(values):
        for parent in value.parents:
            users.setdefault(parent, set()).add(regions[position])
    for call in calls:
        for position in call.inputs:
            users.setdefault(position, set()).add(call_regions[call.number])
    seen: set[int] = set()
    for position, value in enumerate(values):
        region, stays = regions[position], value.stays
        if memory[position] in mixed and memory[position] in seen:
            stays = stays or "it shares memory with what is changed in place later"
        if region is not None and region in users.get(position, ()):
            stays = stays or "what uses it in the same checkpoint is run again in backward"
        seen.add(memory[position])
        yield attrs.evolve(value, stays=stays) if stays else value


def keep_where_made(tensor: torch.Tensor, values: list[Value], memory: Sequence[int], own: int) -> None:
    """Let values stay where they are made that share a tensor's memory and do not fill it, for all of it is looked into.

    Args:
        tensor: the tensor.
        values: all values; changed.
        memory: of each value, what is the same for those in one memory.
        own: that of the tensor.
    """
    if own == id(tensor):  # within a transform of torch.func: it has no memory
        return
    size = tensor.untyped_storage().nbytes()
    for position, value in enumerate(values):
        if memory[position] == own and value.nbytes < size:
            stays = value.stays or "as_strided looks at the memory between its elements, too"
            values[position] = attrs.evolve(value, stays=stays)
