"""Runs a model's forward once, to see what comes from where."""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any

import attrs
import torch
from torch import nn

from .._compat import is_transformed, takes_forward_derivative
from ..exceptions import StageUsageError
from ._absent import HOOKS, Absence, NeedsDataError, looked_into, memory_of, reads, versions, written
from ._crossing import crossing, keep_where_made
from ._example import Effects, Example
from ._filling import Filling, Watched
from ._frames import Enclosing, enclosing, source_line
from ._glue import Glue, check_told
from ._leaves import Given, contents, shown_by, tensors_in, with_tensors
from ._needs import apart
from ._poison import UnitState
from ._questions import FOLLOWED
from ._settings import Settings, may_draw
from ._state import DRAWN, Flags
from ._templates import Known, Templates, check_content
from ._values import INPUTS, Call, Key, Origin, Read, Recording, Value, unit_between
from ._watch import Draws, Inside, Made, check_called, check_returned, check_taken
from ._withheld import filled

_CHANGED = "it is changed in place"
_UNSEEN = "it is made where nothing is seen"
_TRANSFORMED = "it is made in a transform of torch.func"
_UNKNOWN = "a tensor of unknown origin"


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
        originals: names of the parameters of the model that the copy is of, by identity, where the copy has others.
        owned: parameters and buffers of units, by name.
        plain: watches what else units change.
        before: what saw the forward before this one, if the model remembers that there was one.
        flags: of the model.
        settings: of torch.
        constants: takes tensors that units make of no others.

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
        originals: Mapping[int, str],
        owned: Mapping[str, torch.Tensor],
        plain: UnitState,
        before: Recorder | None,
        flags: Flags,
        settings: Settings,
        constants: Made,
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
        self._memory: list[int] = []  # of each value: see memory_of
        self._same: dict[int, int] = {}  # memories that are one in truth: a unit gave a view of what it took
        self._inside: Made = {}
        self._constants = constants
        self._storages: list[torch.UntypedStorage] = []  # kept, so that no memory is taken for another
        self._writers: dict[int, int] = {}  # by memory: who wrote into it last
        self._mixed: set[int] = set()  # memories of which one tensor was used after another had been written into
        self._outside = sys._getframe(1)
        self._checkpoints: list[FrameType] = []
        self._regions: list[int | None] = []  # of each value: which checkpoint it was made in
        self._regions_of_calls: list[int | None] = []
        self._hooked: list[tuple[int, int]] = []
        self._originals = originals
        self._singles: set[int] = set()
        self._asks = self._measures = self._derives = False
        self._of_units = owned
        self._owned = {memory_of(tensor): name for name, tensor in owned.items()}
        self._plain = plain
        self._before = before
        self._flags, self._kept, self._sets = flags, flags.keep(), False
        self._settings = settings
        self._found: list[tuple[str, int]] = []
        self._spoilt: dict[int, str] = {}  # by memory: what a unit has changed that it found in an object, and the unit
        self._passed: list[tuple[Key, Key]] = []
        self._inputs: list[tuple[str, torch.Tensor]] = []
        for name, value in inputs.items():
            self._inputs += ((name, tensor) for tensor in tensors_in(value))
        for index, (name, tensor) in enumerate(self._inputs):
            self._add(tensor, (INPUTS, index), Origin.INPUT, name, ())
        for name, tensor in held:
            self._add(tensor, (INPUTS, -1), Origin.HELD, name, ())

    def finish(self, result: Any, changes: Mapping[str, tuple[Any, Any]]) -> Recording:
        """The recording, when the forward has returned.

        Args:
            result: what it returned.
            changes: what it left changed of the model beside the units: before and after.
        """
        self._check_kept()
        shown = list(tensors_in(result))  # and what whoever is given the result may find in it
        shown += filter(self._is_seen, shown_by(result))
        results = tuple(dict.fromkeys(map(self._position, shown)))
        state = {
            name: self._position(after)
            for name, (before, after) in changes.items()
            if isinstance(after, torch.Tensor) and isinstance(before, torch.Tensor) and id(before) in self._seen
        }
        calls = self._call_regions()
        return Recording(
            tuple(self._names),
            tuple(crossing(self._values, results, self._calls, self._memory, self._mixed, self._regions, calls)),
            tuple(self._calls),
            tuple(self._reads),
            results,
            tuple(state.items()),
            tuple(self._hooked),
            bool(changes),
            self._checkpointed(),
            frozenset(self._singles),
            self._asks,
            self._measures,
            self._sets,
            DRAWN in changes,
            frozenset(name for name, tensor in self._of_units.items() if id(tensor) in self._inside),
            self._derives,
            filled(result, self._maker_of),
            frozenset(self._settings.seen),
            tuple(self._passed),
            tuple(self._found),
        )

    def forget(self) -> None:
        """Let go of all tensors."""
        vars(self).clear()

    @property
    def units(self) -> set[str]:
        """The units that were called."""
        return {call.unit for call in self._calls}

    def was_written(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor was changed in place."""
        return self._memory_of(tensor) in self._writers

    def _is_seen(self, tensor: torch.Tensor) -> bool:
        """Whether glue has a tensor."""
        seen = self._seen.get(id(tensor))
        return seen is not None and seen.tensor is tensor and self._memory_of(tensor) not in self._spoilt

    def _call_regions(self) -> dict[int, int | None]:
        return dict(zip((call.number for call in self._calls), self._regions_of_calls, strict=True))

    def _checkpointed(self) -> tuple[tuple[int, ...], ...]:
        groups: dict[int, list[int]] = {}
        for number, region in self._call_regions().items():
            if region is not None:
                groups.setdefault(region, []).append(number)
        return tuple(map(tuple, groups.values()))

    def _region(self, around: Enclosing) -> int | None:
        if around.checkpoint is None:
            return None
        if around.checkpoint not in self._checkpoints:
            self._checkpoints.append(around.checkpoint)
        return self._checkpoints.index(around.checkpoint)

    def operation(self, func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """See :meth:`Glue.operation`."""
        self._derives = self._derives or takes_forward_derivative()
        self._settings.look()
        given = [*tensors_in(args), *tensors_in(kwargs)]
        looked = looked_into(name, args, kwargs)
        self._check_parameters(given)
        around = enclosing(self._outside)
        if around.function is not None:  # its backward may use all of them
            looked += around.function
        parents = tuple(dict.fromkeys(map(self._position, looked)))
        if reads(name, args):
            line = source_line(name)
            self._reads += (Read(self.count, position, line) for position in parents)
        if func is torch.autograd.grad:
            self._check_gradient(args, kwargs)
        if name == "as_strided":
            keep_where_made(given[0], self._values, self._memory, self._memory_of(given[0]))
        before = versions(given)
        try:
            with Draws() as draws:
                out = self._absence.run(func, args, kwargs)
        except Exception as error:
            if self._templates is not None and any(map(is_transformed, given)):  # where torch may need data
                raise NeedsDataError(source_line(name)) from error
            raise
        if draws.any and may_draw(name, args, kwargs):
            self._drawn()
        changed = [given[number] for number in written(func, args, kwargs, given, before)]
        changed += (one for one in self._absence.overwrote if all(one is not other for other in changed))
        self._check_owned(name, changed)
        leaves = list(tensors_in(out))
        if name in HOOKS:
            self._alone(parents[0])
        number = self.count
        if leaves:
            self.count += 1
            self._names.append(name)
        if isinstance(out, torch.Tensor):
            self._singles.add(number)
        for one in changed:
            if all(one is not leaf for leaf in leaves):  # as by __setitem__, which gives nothing
                self._add(one, (number, -1), Origin.GLUE, name, parents, stays=_CHANGED, is_drawn=draws.any)
        for index, leaf in enumerate(leaves):
            is_changed = any(leaf is one for one in changed)
            if any(leaf is one for one in given) and not is_changed:
                # The argument itself, such as a dropout's that drops nothing: still what it was.
                self._passed.append(((number, index), self._values[self._position(leaf)].key))
                continue
            stays = _CHANGED if is_changed else around.stays
            self._add(leaf, (number, index), Origin.GLUE, name, parents, stays=stays, is_drawn=draws.any)
        return out

    def asked(self, what: str, tensor: torch.Tensor) -> None:
        """See :meth:`Glue.asked`."""
        if self._templates is not None and not self._absence.is_absent(tensor):
            return
        if self._templates is None and not self._is_made(tensor):
            return
        if what in FOLLOWED and not isinstance(tensor, nn.Parameter):
            self._asks = True
        check_told(what, tensor)

    def measured(self, tensor: torch.Tensor) -> None:
        """See :meth:`Glue.measured`."""
        if not self._measures:
            self._measures = self._is_made(tensor) if self._templates is None else self._absence.is_absent(tensor)

    def _is_made(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor comes from a unit."""
        seen = self._seen.get(id(tensor))
        if seen is None:
            return self._maker_of(tensor) is not None
        todo = [seen.position]
        while todo:
            value = self._values[todo.pop()]
            if value.origin is Origin.CALL:
                return True
            todo += value.parents
        return False

    def unit_call(
        self, name: str, module: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """See :meth:`Glue.unit`."""
        number = self.count
        self.count += 1
        self._names.append(name)
        self._sets = self._sets or not self._flags.are_as(self._kept)
        taken = Given(args, kwargs)
        given = taken.tensors
        hidden = list(filter(self._is_seen, shown_by(taken.objects)))
        found = versions(hidden)
        inputs = tuple(dict.fromkeys(map(self._position, (*given, *hidden))))
        self._calls.append(Call(number, name, inputs))
        around = enclosing(self._outside)
        self._regions_of_calls.append(self._region(around))
        check_called(name, taken)
        inside = Inside(
            name,
            self._inside,
            self._constants,
            functools.partial(self._check_taken, name, module, (args, kwargs), set()),
            self._drawn,
            self._is_seen,
        )
        if self._templates is None:
            start = time.perf_counter()
            before, content = versions(given), contents((args, kwargs))

            def filled() -> tuple[Any, Filling | None]:
                watched = Watched(taken.objects)
                return inside.returning(call)(*args, **kwargs), watched.told(name, self._absence.of)

            with inside:
                out, filling = self._plain.call(name, module, (args, kwargs), filled)
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
            check_content(name, content, out)
            # A tensor that it was given is another one on stages that do not call it; and its graph is not needed.
            out = with_tensors(out, map(functools.partial(apart, given), tensors_in(out)))
            effects = Effects.of(given, before, list(tensors_in(out)))
            self.examples[number] = Example(given, out, effects, filling, self._absence)
        else:
            templates = self._templates

            def made() -> Known:
                return templates.known(name, module, inside.returning(call), taken, anew=True)

            try:
                with inside:
                    known = self._plain.call(name, module, (args, kwargs), made)
            except StageUsageError:
                raise
            except Exception as error:  # whatever torch or the module says when there is no data
                raise NeedsDataError(f"unit {name!r} ({type(module).__name__}): {error}") from error
            out, effects = known.result(), known.effects
            if known.attributes:
                raise StageUsageError(
                    f"unit {name!r} gives a tensor with an attribute {known.attributes[0]!r}, which stages that receive it do not"
                    " have: return that beside it"
                )
        changes = zip(hidden, found, versions(hidden), strict=True)
        self._spoilt.update((self._memory_of(one), name) for one, was, now in changes if now != was)
        self._found += ((maker, number) for maker in inside.makers)
        self._measures = self._measures or inside.measures
        for index in effects.changed:
            self._add(given[index], (number, -1), Origin.CALL, name, inputs, stays=_CHANGED)
        leaves = list(tensors_in(out))
        for index, (leaf, shared) in enumerate(zip(leaves, effects.shared, strict=True)):
            if shared is not None:
                self._same[memory_of(leaf)] = self._memory_of([*given, *leaves][shared])
            self._add(leaf, (number, index), Origin.CALL, name, inputs, stays=around.stays)
        return out

    def _check_parameters(self, given: Sequence[torch.Tensor]) -> None:
        """The copy's own parameters have other identities, where units are absent."""
        name = next((self._originals[id(tensor)] for tensor in given if id(tensor) in self._originals), None)
        if name is not None:
            raise StageUsageError(
                f"{source_line('the forward')} reaches {name!r} of the model itself, not of the module that it is called on:"
                " through a closure, a lambda or a function that was made beforehand, which no copy of the model changes; reach"
                " modules and parameters through self"
            )

    def _check_gradient(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """No stage has the graph of a gradient that goes through units."""
        outputs = map(self._position, tensors_in((args[:1], kwargs.get("outputs"))))
        inputs = set(map(self._position, tensors_in((args[1:2], kwargs.get("inputs")))))
        unit = unit_between(self._values, inputs, list(outputs))
        if unit is not None:
            raise StageUsageError(
                f"{source_line('the forward')} takes a gradient through unit {unit!r}, whose graph no other stage has: make the"
                " module that takes it a unit (units=)"
            )

    def _check_owned(self, name: str, changed: Sequence[torch.Tensor]) -> None:
        """Glue may not change what is a unit's: a stage stops when nothing is left to compute, and others have it not."""
        names = (self._owned.get(memory_of(one)) for one in changed)
        owned = next((name for name in names if name is not None), None)
        if owned is not None:
            raise StageUsageError(
                f"{source_line(name)} changes {owned!r}, which is a unit's, outside of the unit, and other stages do not have it:"
                " do it after the step, or make the module that does it a unit (units=)"
            )

    def _check_kept(self) -> None:
        """What a unit wrote into something of its own, glue may not have used, for others have it as it was."""
        used = {parent for value in self._values for parent in value.parents}
        used |= {position for call in self._calls for position in call.inputs} | {read.value for read in self._reads}
        for identity, (made, unit) in self._inside.items():
            seen = self._seen.get(identity)
            if seen is None or made() is not seen.tensor or seen.position not in used:
                continue
            value = self._values[seen.position]
            if value.origin is Origin.HELD or value.name == _UNKNOWN:
                what = repr(value.name) if value.origin is Origin.HELD else "a tensor"
                raise StageUsageError(
                    f"the forward uses {what} outside of unit {unit!r}, which changes it, and stages that do not have this unit"
                    " have it as it was: return it from the unit, or make the module that uses it a unit (units=)"
                )

    def _check_taken(
        self, unit: str, module: nn.Module, given: Any, known: set[int], taken: Sequence[torch.Tensor]
    ) -> None:
        """What a unit uses it is given, or has: what it finds elsewhere, stages that do not run what made it have not."""
        self._derives = self._derives or takes_forward_derivative()
        self._settings.look()
        check_taken(unit, module, given, known, taken, functools.partial(self._origin_of, unit))

    def _drawn(self) -> None:
        """Random numbers are drawn."""
        if enclosing(self._outside).checkpoint is not None:
            self._settings.drawn()

    def _maker_of(self, tensor: torch.Tensor) -> str | None:
        """The unit that made or changed a tensor."""
        made, unit = self._inside.get(id(tensor), (None, ""))
        return unit if made is not None and made() is tensor else None

    def _origin_of(self, unit: str, tensor: torch.Tensor) -> str:
        """Where a tensor comes from, in words; "" where a unit has made it itself."""
        maker = self._maker_of(tensor)
        if maker is not None:
            return "" if maker == unit else f"a tensor that unit {maker!r} makes"
        if not self._is_seen(tensor):
            return ""
        value = self._values[self._seen[id(tensor)].position]
        if value.name == _UNKNOWN and not value.parents:  # a constant of the model, which is in no module's buffers
            return ""
        names = {Origin.HELD: repr(value.name), Origin.INPUT: f"the input {value.name!r}"}
        return names.get(value.origin, "a tensor that is made between units")

    def _alone(self, position: int) -> None:
        """A value of which one stage must have the whole gradient: no other makes it too."""
        self._values[position] = attrs.evolve(self._values[position], is_drawn=True)
        self._hooked.append((position, self.count))

    def _memory_of(self, tensor: torch.Tensor) -> int:
        memory = memory_of(tensor)
        return self._same.get(memory, memory)

    def _add(
        self,
        tensor: torch.Tensor,
        key: Key,
        origin: Origin,
        name: str,
        parents: tuple[int, ...],
        *,
        stays: str = "",
        is_drawn: bool = False,
    ) -> int:
        position = len(self._values)
        nbytes = tensor.numel() * tensor.element_size()
        if is_transformed(tensor):
            stays = stays or _TRANSFORMED
        self._values.append(Value(key, origin, name, parents, nbytes, stays, is_drawn=is_drawn))
        self._regions.append(self._region(enclosing(self._outside)))
        before = self._seen.get(id(tensor))
        self._seen[id(tensor)] = _Seen(tensor, position)
        memory = self._memory_of(tensor)
        self._memory.append(memory)
        if memory != id(tensor):
            self._storages.append(tensor.untyped_storage())
        if before is not None and origin in (Origin.GLUE, Origin.CALL):
            self._mark(before.position)
            self._written(memory, position)
        return position

    def _mark(self, position: int) -> None:
        self._values[position] = attrs.evolve(self._values[position], is_written=True)

    def _written(self, memory: int, writer: int) -> None:
        """A tensor was changed in place: what shares its memory and was made before is not what it was."""
        self._writers[memory] = writer
        for position, other in enumerate(self._memory):
            if other == memory and position != writer:
                self._mark(position)

    def _position(self, tensor: torch.Tensor) -> int:
        """Which value a tensor is now."""
        seen = self._seen.get(id(tensor))
        check_returned(self._spoilt.get(self._memory_of(tensor)) if self._spoilt else None, "changes in place")
        if seen is None:
            check_returned(self._maker_of(tensor))
            if self._before is not None and self._before._is_made(tensor):
                raise StageUsageError(
                    f"{source_line('the forward')} takes what an earlier forward has made of what units make, and each stage"
                    " would go on with another one; make the module that keeps it a unit (units=)"
                )
            origin_unknown = self._absence.is_absent(tensor)
            # Made where nothing is seen. A real one is a constant of the model; an absent one may come of anything.
            parents = tuple(range(len(self._values))) if origin_unknown else ()
            return self._add(tensor, (self.count, -1), Origin.ALIAS, _UNKNOWN, parents, stays=_UNSEEN)
        writer = self._writers.get(self._memory_of(tensor)) if self._writers else None
        if writer is not None and writer > seen.position:
            self._mixed.add(self._memory_of(tensor))
            parents, name = (seen.position, writer), "a tensor changed in place"
            return self._add(tensor, (self.count, -1), Origin.ALIAS, name, parents, stays=_CHANGED)
        return seen.position
