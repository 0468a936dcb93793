"""Whether every rank is given the same inputs: a number stands for each of them, and goes with the word that begins a step.

Where every rank passes the model's inputs, none is sent, and ranks that are given other batches, as by loaders that shuffle
otherwise, would train on a mixture. A number's upper half stands for how an input looks: shapes, dtypes, structure, and what is
no tensor. The lower half stands for what is in its tensors, bit by bit: all of it where that is little, else elements spread over
all of it, so that the work is bounded.

What is on an accelerator is looked at there, and nothing waits for it: it is compared when the next step begins. Only a step that
cuts its batch in a new way, such as the first, waits for it, as it does for other things.
"""

from __future__ import annotations

import functools
import itertools
import math
import reprlib
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..run._announce import SLOTS
from ..run._microbatch import Batch
from ._inputs import Inputs
from ._leaves import structure, tensors_in

_MOST = 4096  # elements of one input that are looked at
_LEAST = 64  # likewise of each of its tensors
_HALF = (1 << 32) - 1
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_UNKNOWN = object()  # an input that was left out and would be a tensor: others refuse that


class Alike:
    """Looks at what a rank is given. Mutable: it remembers the step before.

    Args:
        inputs: of the model.
        examples: inputs by name.

    Attributes:
        before: numbers of the step before.
    """

    def __init__(self, inputs: Inputs, examples: Sequence[Mapping[str, Any]]) -> None:
        self._inputs = inputs
        # What an input is that is left out: what the model takes it for, or what it was in the example.
        absent = {name: value for example in reversed(examples) for name, value in example.items()}
        absent |= {name: inputs.defaults[name] for name in absent.keys() & inputs.defaults.keys()}
        self._absent = {
            name: value if next(tensors_in(value), None) is None else _UNKNOWN for name, value in sorted(absent.items())
        }
        self.before: _Numbers | None = None

    def look(self, batch: Batch) -> Given:
        """What this rank is given for a step.

        Raises:
            StageUsageError: the model's forward does not take these inputs.
        """
        if batch.arg_mbs is None and batch.kwarg_mbs is None:
            named = self._inputs.joined(batch.args, batch.kwargs)
        else:
            count = len(batch.arg_mbs or batch.kwarg_mbs or ())
            args = batch.arg_mbs or [batch.args] * count
            rows = [
                self._inputs.joined(one, {**batch.kwargs, **more})
                for one, more in zip(args, batch.kwarg_mbs or [{}] * count, strict=False)
            ]
            named = {name: [row.get(name) for row in rows] for name in dict.fromkeys(itertools.chain(*rows))}
            named |= batch.kwargs
        return Given(self, {name: named.get(name, absent) for name, absent in self._absent.items()})


class Given:
    """What a rank is given for one step.

    Args:
        alike: remembers it.
        named: the inputs by name.
    """

    def __init__(self, alike: Alike, named: Mapping[str, Any]) -> None:
        self._alike = alike
        self._named = named
        self._numbers = _Numbers(named.values())

    def numbers(self, *, wait: bool) -> list[int]:
        """See :meth:`GivenBatch.numbers`. What is not known is 0."""
        before = self._alike.before
        return [*self._numbers.slots(wait=wait), *([0] * SLOTS if before is None else before.slots(wait=True))]

    def begin(self) -> None:
        """See :meth:`GivenBatch.begin`."""
        self._alike.before = self._numbers

    def other(self, theirs: Sequence[int], *, wait: bool) -> str | None:
        """See :meth:`GivenBatch.other`."""
        for slot, (mine, their) in enumerate(zip(self.numbers(wait=wait), theirs, strict=True)):
            if not mine or not their:
                continue
            if mine >> 32 != their >> 32:
                return self._said(slot, "another shape, dtype, structure or value")
            if mine & _HALF and their & _HALF and mine != their:
                return self._said(slot % SLOTS, "other values" if slot < SLOTS else "other values in the step before")
        return None

    def _said(self, slot: int, how: str) -> str:
        names = list(self._named)[slot : slot + 1] if slot < SLOTS - 1 else list(self._named)[slot:]
        return f"{how} for {' or '.join(f'{name} = {_described(self._named[name])}' for name in names)}"


class _Numbers:
    """Numbers of one step's inputs. Mutable: those of tensors on accelerators come late.

    Args:
        values: the inputs.
    """

    def __init__(self, values: Iterable[Any]) -> None:
        self._looks = []
        self._contents = []  # 0: not known, 1: there is none
        late: dict[int, torch.Tensor] = {}
        for position, value in enumerate(values):
            self._looks.append(0 if value is _UNKNOWN else _look(value))
            content = _content(value)
            if content is not None and not _is_here(content):
                late[position] = content
            self._contents.append(1 if content is None else 0 if position in late else _half(int(content)))
        self._late = _Late(late) if late else None

    def slots(self, *, wait: bool) -> list[int]:
        """As many as there are slots; the last stands for all inputs that are left."""
        if wait and self._late is not None:
            for position, content in self._late.read():
                self._contents[position] = _half(content)
            self._late = None
        looks, contents = self._looks, self._contents
        if len(looks) > SLOTS:
            more = slice(SLOTS - 1, None)
            looks = [*looks[: SLOTS - 1], _crc(looks[more]) if all(looks[more]) else 0]
            contents = [*contents[: SLOTS - 1], _crc(contents[more]) if all(contents[more]) else 0]
        found = [look and look << 32 | content for look, content in zip(looks, contents, strict=True)]
        return found + [0] * (SLOTS - len(found))


class _Late:
    """Contents of inputs on accelerators, on their way.

    Args:
        contents: by the input's position.
    """

    def __init__(self, contents: Mapping[int, torch.Tensor]) -> None:
        self._positions = list(contents)
        device = contents[self._positions[0]].device
        self._here = torch.empty(len(contents), dtype=torch.int64, pin_memory=True)  # else the copy would be waited for
        self._here.copy_(torch.stack([one.to(device) for one in contents.values()]), non_blocking=True)
        self._arrived = torch.Event(device)
        self._arrived.record()

    def read(self) -> Iterable[tuple[int, int]]:
        """Wait for them; positions and contents."""
        self._arrived.synchronize()
        return zip(self._positions, self._here.tolist(), strict=True)


def _look(value: Any) -> int:
    """Stands for how a value looks; never 0."""
    if isinstance(value, torch.Tensor):
        return _look_of(value.shape, value.dtype) if _is_plain(value) else _crc((type(value).__name__, value.dtype))
    if isinstance(value, torch.device):
        return _crc(value.type)  # each rank has its own
    tensors = list(map(_look, tensors_in(value)))
    if type(value) is list and len(tensors) == len(value):
        return _crc(tensors)
    objects: list[Any] = []
    look = structure(value, [], objects)
    return _crc(tensors if objects else (look, tensors))  # objects of other kinds are not compared


@functools.lru_cache(4096)
def _look_of(shape: torch.Size, dtype: torch.dtype) -> int:
    return _crc((tuple(shape), dtype))


def _content(value: Any) -> torch.Tensor | None:
    """Stands for what is in a value's tensors, on their device; None where it has none."""
    tensors = [value] if isinstance(value, torch.Tensor) else list(tensors_in(value))
    tensors = [tensor.detach() for tensor in tensors if _is_plain(tensor) and tensor.numel()]
    if not tensors:
        return None
    most = max(_LEAST, _MOST // len(tensors))
    rows = [_row(tensor, most) for tensor in tensors]
    device = next((row.device for row in rows if row.device.type != "cpu"), rows[0].device)
    if len({(row.dtype, row.device) for row in rows}) > 1:
        rows = [_integers(row).to(device) for row in rows]
    every = _integers(torch.cat(rows) if len(rows) > 1 else rows[0])
    return ((every ^ every >> 31) * _weights(len(every), device)).sum()


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)} and {value.dtype}"
    return reprlib.repr(value) if next(tensors_in(value), None) is None else f"a {type(value).__name__} of tensors"


def _is_here(content: torch.Tensor) -> bool:
    return content.device.type == "cpu"


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) in (torch.Tensor, nn.Parameter, nn.Buffer)
        and tensor.layout is torch.strided
        and not (tensor.is_meta or tensor.is_quantized or tensor.is_nested)
    )


def _row(tensor: torch.Tensor, most: int) -> torch.Tensor:
    """At most so many elements, spread over all of it."""
    size = tensor.numel()
    if size <= most:
        return tensor.reshape(-1)
    if tensor.is_contiguous():
        return tensor.view(-1)[:: _stride(size, most)]
    return tensor[_places(tensor.shape, most, tensor.device)]


def _integers(row: torch.Tensor) -> torch.Tensor:
    """Its bits."""
    if row.is_complex():
        row = torch.view_as_real(row.resolve_conj()).flatten()
    return row.resolve_neg().view(_INTEGERS[row.element_size()]).long()


def _stride(size: int, most: int) -> int:
    """Such that all rows and columns are met."""
    stride = -(-size // most)
    while math.gcd(stride, size) > 1:
        stride += 1
    return stride


@functools.lru_cache(256)
def _places(shape: torch.Size, most: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    size = shape.numel()
    return torch.unravel_index(torch.arange(0, size, _stride(size, most), device=device), shape)


@functools.lru_cache(256)
def _weights(count: int, device: torch.device) -> torch.Tensor:
    """Odd numbers that look random."""
    numbers = torch.arange(1, count + 1, device=device) * -0x61C8864680B583EB
    return (numbers ^ numbers >> 29) * -0x4B47D0C5A4A6C6B3 | 1


def _half(content: int) -> int:
    return (content >> 32 ^ content) & _HALF or 1


def _crc(value: object) -> int:
    """Never 0, and the same in every process."""
    return zlib.crc32(repr(value).encode()) & 0x7FFFFFFF or 1
