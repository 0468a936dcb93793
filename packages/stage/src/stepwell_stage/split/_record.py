"""Runs a model's forward once, to see what comes from where."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import nn

from .._compat import TorchDispatchMode
from ._absent import Absence, NeedsDataError, reads, source_line, writes
from ._glue import Glue
from ._leaves import tensors_in
from ._templates import Example, Templates
from ._values import INPUTS, Call, Key, Origin, Read, Recording, Value


@attrs.frozen(eq=False)
class _Seen:
    """A tensor with the value that it was when it was last made or written."""

    tensor: torch.Tensor
    position: int


class Recorder(Glue):
    """Sees a whole forward, of which nothing belongs to anybody.

    Args:
        absence: makes absent tensors.
        templates: what units return; None: units are run, on their real parameters.
        inputs: the model's inputs, by name.
        held: parameters, and buffers without a value, that glue may read, by name.

    Attributes:
        examples: with real units, what each call took and gave.
        seconds: with real units, how long each took.
    """

    def __init__(
        self,
        absence: Absence,
        templates: Templates | None,
        inputs: Mapping[str, Any],
        held: Sequence[tuple[str, torch.Tensor]],
    ) -> None:
        super().__init__()
        self.examples: dict[int, Example] = {}
        self.seconds: dict[str, float] = {}
        self._absence = absence
        self._templates = templates
        self._names: list[str] = []
        self._values: list[Value] = []
        self._calls: list[Call] = []
        self._reads: list[Read] = []
        self._seen: dict[int, _Seen] = {}  # by identity; tensors are kept, so that none is taken for another
        self._writers: dict[int, int] = {}  # by storage: who wrote into it last
        self._storages: list[torch.UntypedStorage] = []
        self._singles: set[int] = set()
        self._inputs: list[tuple[str, torch.Tensor]] = []
        for name, value in inputs.items():
            self._inputs += ((name, tensor) for tensor in tensors_in(value))
        for index, (name, tensor) in enumerate(self._inputs):
            self._add(tensor, (INPUTS, index), Origin.INPUT, name, ())
        for name, tensor in held:
            self._add(tensor, (INPUTS, -1), Origin.HELD, name, (), can_cross=False)

    @property
    def singles(self) -> frozenset[int]:
        """Numbers of operations that give a single tensor."""
        return frozenset(self._singles)

    def finish(self, result: Any) -> Recording:
        """The recording, when the forward has returned."""
        results = tuple(self._position(tensor) for tensor in tensors_in(result))
        return Recording(tuple(self._names), tuple(self._values), tuple(self._calls), tuple(self._reads), results)

    def operation(self, func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """See :meth:`Glue.operation`."""
        given = [*tensors_in(args), *tensors_in(kwargs)]
        by_shape = self._absence.is_by_shape(name)
        parents = () if by_shape else tuple(dict.fromkeys(map(self._position, given)))
        if reads(name, args):
            line = source_line(name)
            self._reads += (Read(self.count, position, line) for position in parents)
        with Draws() as draws:
            out = self._absence.run(func, args, kwargs)
        leaves = list(tensors_in(out))
        if not leaves:
            if writes(name) and given:  # as __setitem__, which gives nothing
                key = (self.count, -1)
                self._add(given[0], key, Origin.GLUE, name, parents, can_cross=False, is_drawn=draws.any)
            return out
        number = self.count
        self.count += 1
        self._names.append(name)
        if isinstance(out, torch.Tensor):
            self._singles.add(number)
        changes = writes(name) or "out" in kwargs
        for index, leaf in enumerate(leaves):
            if any(leaf is one for one in given) and not changes:
                continue  # the argument itself, such as a dropout's that drops nothing: still what it was
            self._add(leaf, (number, index), Origin.GLUE, name, parents, can_cross=not changes, is_drawn=draws.any)
        return out

    def unit_call(
        self, name: str, module: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """See :meth:`Glue.unit`."""
        number = self.count
        self.count += 1
        self._names.append(name)
        given = [*tensors_in(args), *tensors_in(kwargs)]
        inputs = tuple(dict.fromkeys(map(self._position, given)))
        self._calls.append(Call(number, name, inputs))
        if self._templates is None:
            start = time.perf_counter()
            versions = [tensor._version for tensor in given]
            out = call(*args, **kwargs)
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
            self.examples[number] = Example(given, out, self._absence)
            for tensor, version in zip(given, versions, strict=True):
                if tensor._version != version:
                    self._add(tensor, (number, -1), Origin.CALL, name, inputs, can_cross=False)
        else:
            try:
                out = self._templates.result(number, name, module, call, args, kwargs)
            except Exception as error:  # whatever torch or the module says when there is no data
                raise NeedsDataError(f"unit {name!r} ({type(module).__name__}): {error}") from error
        for index, leaf in enumerate(tensors_in(out)):
            if not any(leaf is one for one in given):
                self._add(leaf, (number, index), Origin.CALL, name, inputs)
        return out

    def _add(
        self,
        tensor: torch.Tensor,
        key: Key,
        origin: Origin,
        name: str,
        parents: tuple[int, ...],
        *,
        can_cross: bool = True,
        is_drawn: bool = False,
    ) -> int:
        position = len(self._values)
        nbytes = tensor.numel() * tensor.element_size()
        self._values.append(Value(key, origin, name, parents, nbytes, can_cross, is_drawn=is_drawn))
        before = self._seen.get(id(tensor))
        self._seen[id(tensor)] = _Seen(tensor, position)
        if before is not None and origin is not Origin.ALIAS:
            self._mark(before.position)
            self._written(tensor, position)
        return position

    def _mark(self, position: int) -> None:
        self._values[position] = attrs.evolve(self._values[position], is_written=True)

    def _written(self, tensor: torch.Tensor, writer: int) -> None:
        """A tensor was changed in place: what shares its memory and was made before is not what it was."""
        storage = tensor.untyped_storage()
        self._storages.append(storage)
        self._writers[storage._cdata] = writer
        for seen in self._seen.values():
            if seen.tensor.untyped_storage()._cdata == storage._cdata and seen.position != writer:
                self._mark(seen.position)

    def _position(self, tensor: torch.Tensor) -> int:
        """Which value a tensor is now."""
        seen = self._seen.get(id(tensor))
        if seen is None:
            origin_unknown = self._absence.is_absent(tensor)
            # Made where nothing is seen. A real one is a constant of the model; an absent one may come of anything.
            parents = tuple(range(len(self._values))) if origin_unknown else ()
            return self._add(
                tensor, (self.count, -1), Origin.ALIAS, "a tensor of unknown origin", parents, can_cross=False
            )
        writer = self._writers.get(tensor.untyped_storage()._cdata) if self._writers else None
        if writer is not None and writer > seen.position:
            parents = (seen.position, writer)
            return self._add(
                tensor, (self.count, -1), Origin.ALIAS, "a tensor changed in place", parents, can_cross=False
            )
        return seen.position


class Draws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes whether random numbers are drawn. Mutable."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.any = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """One operation."""
        self.any = self.any or torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))
