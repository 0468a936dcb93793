"""What a model's forward does with an example."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, TypeAlias

import attrs
import torch
from torch import nn

from .._compat import quiet_fakes
from ..exceptions import StageUsageError
from ..run._probe import undisturbed
from ._absent import Absence, NeedsDataError
from ._example import Example
from ._hold import constants, of_units
from ._inputs import Inputs, Kinds
from ._leaves import tensors_in, with_tensors
from ._own import copy_structure, named_tensors
from ._poison import UnitState
from ._record import Recorder
from ._settings import Settings
from ._state import Flags, GlueState, undrawn
from ._templates import Templates
from ._units import Branch, choose_units
from ._values import Recording
from ._watch import Made, check_left
from ._ways import Ways, check_plain, join


@attrs.frozen(eq=False)
class Sight:
    """What one example showed.

    Attributes:
        recording: what was computed from what.
        examples: for units that decide by data, by the number of the call: what it took and gave.
        seconds: if they were measured, of each unit.
    """

    recording: Recording
    examples: Mapping[int, Example]
    seconds: Mapping[str, float]


_Found: TypeAlias = tuple[Hashable, Sight, str]
"""The kind of an example, what it showed, and what messages call it."""

_Mode: TypeAlias = tuple[bool, bool]
"""Whether the model is in training, and whether gradients are enabled."""

_MODES: dict[_Mode, str] = {(True, True): "training", (False, False): "evaluation"}


@attrs.frozen(eq=False)
class Look:
    """What the examples showed: everything that a cut is decided from.

    Attributes:
        model: the model.
        inputs: its inputs.
        kinds: which inputs are of one kind.
        device: where it computes.
        candidates: what may be units.
        units: those that are called.
        sights: what each example showed.
        ways: the ways that they went, made to agree; behind those of the examples those that the model goes only in another mode
            or when it is called again.
        labels: what messages call each way.
        way_kinds: which kind of inputs each way is for.
    """

    model: nn.Module
    inputs: Inputs
    kinds: Kinds
    device: torch.device
    candidates: Mapping[str, nn.Module]
    units: Mapping[str, nn.Module]
    sights: Sequence[Sight]
    ways: Ways
    labels: tuple[str, ...]
    way_kinds: tuple[Hashable, ...]

    @property
    def seconds(self) -> dict[str, float]:
        """How long each unit took, the longest of any way."""
        found: dict[str, float] = {}
        for sight in self.sights:
            found |= {name: max(seconds, found.get(name, 0.0)) for name, seconds in sight.seconds.items()}
        return found

    @property
    def needs_process(self) -> str:
        """Why ranks may not be threads of one process; "" if they may."""
        found = sorted({name for recording in self.ways.recordings for name in recording.settings})
        return (
            ""
            if not found
            else (
                f"the forward of {type(self.model).__name__} {' and '.join(found)}, which torch keeps for the whole process, so"
                " ranks that are threads would compute with one another's"
            )
        )

    @property
    def rewritten(self) -> set[str]:
        """What units change of what they have, by name."""
        return {name for recording in self.ways.recordings for name in recording.rewritten}

    @property
    def changed(self) -> set[str]:
        """What a forward leaves changed of the model beside its units, by name."""
        return {name for recording in self.ways.recordings for name, _ in recording.state}


def look_for(model: nn.Module, kinds: Kinds, tree: Branch, count: int, *, with_time: bool) -> Look:
    """Look at the examples with units that are found; smaller ones where they are too few."""
    wanted = count
    names = choose_units(tree, wanted)
    while True:
        look = look_at(model, kinds, names, with_time=with_time)
        if len(look.units) >= count:
            return look
        wanted = max(wanted, len(names)) + 1
        more = choose_units(tree, wanted)
        if more == names or (len(more) < wanted and len(more) <= len(names)):
            return look
        names = more


def look_at(model: nn.Module, kinds: Kinds, names: Sequence[str], *, with_time: bool) -> Look:
    """Run every example once and see what comes from where."""
    units = {name: model.get_submodule(name) for name in names}
    _check_hooks(model, units)
    _check_compiled(model, units)
    device = _device(model, kinds.examples)
    mode = (model.training, torch.is_grad_enabled())
    every = [_look_at(model, kinds.inputs, one, units, device, mode, with_time=with_time) for one in kinds.examples]
    labels = ("the example", *(f"ways[{number}]" for number in range(len(every) - 1)))
    found: list[_Found] = [(kind, one[0], label) for kind, one, label in zip(kinds.kinds, every, labels, strict=True)]
    for kind, more, label in zip(kinds.kinds, every, labels, strict=True):
        _add(found, kind, more[1:], f"{label}, called again")
    ways, called = _join(units, found)
    every_kind, sights, labels = zip(*found, strict=True)
    return Look(model, kinds.inputs, kinds, device, units, called, sights, ways, labels, every_kind)


def look_in_other_modes(look: Look) -> Look | None:
    """The same with what the examples show in training and in evaluation, where glue asks which it is.

    Returns:
        None if that is nothing new.

    Raises:
        StageUsageError: it cannot be joined with the ways that are known.
    """
    model, kinds = look.model, look.kinds
    found = list(zip(look.way_kinds, look.sights, look.labels, strict=True))
    with_time = any(sight.seconds for sight in look.sights)
    for mode, name in _MODES.items():
        if mode == (model.training, torch.is_grad_enabled()):
            continue
        for kind, example, label in zip(kinds.kinds, kinds.examples, look.labels, strict=False):
            try:
                seen = _look_at(model, kinds.inputs, example, look.candidates, look.device, mode, with_time=with_time)
            except Exception:  # it cannot run so, whatever its own code says
                continue
            _add(found, kind, seen, f"{label} in {name}")
    if len(found) == len(look.sights):
        return None
    ways, called = _join(look.candidates, found)
    every, sights, labels = zip(*found, strict=True)
    return attrs.evolve(look, units=called, sights=sights, ways=ways, labels=labels, way_kinds=every)


def _add(found: list[_Found], kind: Hashable, sights: Sequence[Sight], label: str) -> None:
    """Add what goes another way than what is known."""
    for sight in sights:
        if not any(kind == one and sight.recording.goes_as(other.recording) for one, other, _ in found):
            found.append((kind, sight, label))


def _join(units: Mapping[str, nn.Module], found: Sequence[_Found]) -> tuple[Ways, dict[str, nn.Module]]:
    """The ways, and the units that they call: what is never called has parameters at most, which glue may read."""
    sights = [sight for _, sight, _ in found]
    ways = join([sight.recording for sight in sights], [kind for kind, _, _ in found])
    check_plain(ways, [{number: one.plain for number, one in sight.examples.items()} for sight in sights])
    called = set(ways.units())
    return ways, {name: unit for name, unit in units.items() if name in called}


def _look_at(
    model: nn.Module,
    taken: Inputs,
    named: Mapping[str, Any],
    units: Mapping[str, nn.Module],
    device: torch.device,
    mode: _Mode,
    *,
    with_time: bool,
) -> list[Sight]:
    """Run an example: on absent tensors if that can be, else really; and again, if the model remembers that it was run."""
    on_meta = any(tensor.is_meta for _, tensor in named_tensors(model))
    if with_time and on_meta:
        raise StageUsageError(
            "time is measured on a model that has values, but this one is on the meta device; give costs"
        )
    if not with_time:
        try:
            with undrawn(), undisturbed(model, device), _uncompiled(), quiet_fakes():
                tables: Made = {}
                sights = _record(model, taken, named, units, device, mode, tables, real=False)
            check_left(tables)
            return sights
        except NeedsDataError as error:
            if on_meta:
                raise StageUsageError(
                    f"{type(model).__name__} decides by data how it goes on: {error.what}; on the meta device there is none: give"
                    " the model values before it is split"
                ) from error
    with undrawn(), undisturbed(model, device), _uncompiled():
        try:
            sights = _record(model, taken, named, units, device, mode, {}, real=True)
        except NeedsDataError as error:
            raise StageUsageError(f"{type(model).__name__} cannot be cut: {error.what}") from error
    # Of units that decide by data only this is known: once more, so that sizes that are equal by chance are not mistaken.
    with contextlib.suppress(Exception, NeedsDataError), undrawn(), undisturbed(model, device), _uncompiled():
        others = _record(model, taken, _longer(named), units, device, mode, {}, real=True)
        for sight, other in zip(sights, others, strict=False):
            if sight.recording.names == other.recording.names:
                for number, example in sight.examples.items():
                    example.learn(other.examples[number])
    return sights


def _uncompiled() -> contextlib.AbstractContextManager[Any]:
    """What torch.compile has made runs as it is written."""
    if "torch._dynamo" not in sys.modules:  # there is nothing, and to import it takes a second
        return contextlib.nullcontext()
    stance: contextlib.AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance


def _check_hooks(model: nn.Module, units: Mapping[str, nn.Module]) -> None:
    inside = {id(module) for unit in units.values() for module in unit.modules()}
    for name, module in model.named_modules():
        if id(module) not in inside and (module._backward_hooks or module._backward_pre_hooks):
            raise StageUsageError(
                f"{name or type(model).__name__!r} has backward hooks and is no unit, so no stage has all that they are to see:"
                " put them on units, or make it one (units=)"
            )


def _check_compiled(model: nn.Module, units: Mapping[str, nn.Module]) -> None:
    """What a compiler has made of a module has no Python to run, or runs it elsewhere."""
    within = {id(module) for unit in units.values() for module in unit.modules() if module is not unit}
    for name, module in model.named_modules():
        what = repr(name) if name else type(model).__name__
        if isinstance(module, torch.jit.ScriptModule):
            raise StageUsageError(
                f"{what} is a module of torch.jit, which no stage can have a part of: split the model that it was made of"
            )
        if id(module) not in within and isinstance(vars(module)["_modules"].get("_orig_mod"), nn.Module):
            raise StageUsageError(
                f"{what} is wrapped by torch.compile, which would compile what stages do around it too: split the model without"
                " it, and compile units of the stages' modules, or use the method compile() of the module, which wraps nothing"
            )


def _record(
    model: nn.Module,
    taken: Inputs,
    named: Mapping[str, Any],
    units: Mapping[str, nn.Module],
    device: torch.device,
    mode: _Mode,
    tables: Made,
    *,
    real: bool,
) -> list[Sight]:
    absence = Absence(device)
    own = of_units(model, units)
    held = {name for name, _ in named_tensors(model)} if real else constants(model, own)
    copy, control = copy_structure(model, units, units if real else (), held, (), absence)
    everywhere = constants(model, own)
    readable = [(name, tensor) for name, tensor in control.named.items() if name not in everywhere]
    originals = {} if real else {id(parameter): name for name, parameter in model.named_parameters()}
    if copy.training != mode[0]:
        copy.train(mode[0])
    inside = {id(module) for unit in control.units for module in unit.modules()}
    outside = [module for module in copy.modules() if id(module) not in inside]
    templates, owned = None if real else Templates(absence), {name: control.named[name] for name in own}
    plain, before = UnitState(outside, named, by_data=real), None
    with control.shown():
        flags = Flags(copy, control.units)
    sights: list[Sight] = []
    recorders: list[Recorder] = []
    settings = Settings()
    while len(sights) < 2:
        mine = _copies(named)  # glue may change them in place, and the example is the caller's
        recorder = Recorder(
            absence, templates, mine, readable, originals, owned, plain, before, flags, settings, tables
        )
        args, kwargs = taken.call(mine)
        with torch.set_grad_enabled(mode[1]), control.running(recorder), settings.kept():
            state = GlueState(copy)
            result = copy(*args, **kwargs)
            after = state.now()
            settings.check_left()
        changes = state.changes(after, recorder.was_written, recorder.units)
        sights.append(Sight(recorder.finish(result, changes), recorder.examples, recorder.seconds))
        absence.forget()
        recorders.append(recorder)
        if not changes and not plain.is_changed:
            break
        before = recorder
    for recorder in recorders:
        recorder.forget()
    return sights


def branches(model: nn.Module) -> Branch:
    """The model's modules as data."""
    saved = set(model.state_dict(keep_vars=True))
    seen: set[int] = set()

    def branch(name: str, module: nn.Module) -> Branch:
        seen.add(id(module))
        size = sum(parameter.numel() for parameter in module.parameters(recurse=False))
        prefix = f"{name}." if name else ""
        size += sum(b.numel() for n, b in module.named_buffers(recurse=False) if f"{prefix}{n}" in saved)
        children = tuple(
            branch(f"{prefix}{child_name}", child)
            for child_name, child in module.named_children()
            if id(child) not in seen
        )
        is_called = not isinstance(module, nn.ModuleList | nn.ModuleDict)
        is_container = not is_called or isinstance(module, nn.Sequential)
        return Branch(name, is_container, is_called, size + sum(child.size for child in children), children)

    return branch("", model)


def _device(model: nn.Module, examples: Sequence[Mapping[str, Any]]) -> torch.device:
    """Where the model computes: where its parameters are, or, if they are on the meta device, its inputs."""
    every = [*(tensor for _, tensor in named_tensors(model)), *tensors_in(examples)]
    return next((tensor.device for tensor in every if not tensor.is_meta), torch.device("cpu"))


def _longer(named: Mapping[str, Any]) -> dict[str, Any]:
    """The inputs with one more row, which is the last once more."""
    size = next((len(tensor) for tensor in tensors_in(named) if tensor.dim()), 0)
    longer = (
        torch.cat([one, one[-1:]]) if size and one.dim() and len(one) == size else one for one in tensors_in(named)
    )
    with torch.no_grad():
        return {name: with_tensors(value, longer) for name, value in named.items()}


def _copies(named: Mapping[str, Any]) -> dict[str, Any]:
    """The inputs with tensors of their own."""
    copies = (tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in tensors_in(named))
    return {name: with_tensors(value, copies) for name, value in named.items()}
