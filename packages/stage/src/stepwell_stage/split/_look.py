"""What a model's forward does with an example."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, TypeAlias

import attrs
import torch
from torch import nn

from ..exceptions import StageUsageError
from ..run._probe import undisturbed
from ._absent import Absence, NeedsDataError
from ._hold import constants, of_units
from ._inputs import Inputs, Kinds
from ._leaves import tensors_in, with_tensors
from ._own import copy_structure, named_tensors
from ._record import Recorder
from ._state import GlueState
from ._templates import Example, Templates
from ._units import Branch, choose_units
from ._values import Recording
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
        ways: the ways that they went, made to agree; behind those of the examples those that only the model's other mode goes.
        labels: what messages call each way.
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

    @property
    def seconds(self) -> dict[str, float]:
        """How long each unit took, the longest of any way."""
        found: dict[str, float] = {}
        for sight in self.sights:
            found |= {name: max(seconds, found.get(name, 0.0)) for name, seconds in sight.seconds.items()}
        return found

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
    device = _device(model, kinds.examples)
    sights = [_look_at(model, kinds.inputs, example, units, device, with_time=with_time) for example in kinds.examples]
    labels = ("the example", *(f"ways[{number}]" for number in range(len(sights) - 1)))
    ways, called = _join(units, list(zip(kinds.kinds, sights, labels, strict=True)))
    return Look(model, kinds.inputs, kinds, device, units, called, sights, ways, labels)


def look_in_other_mode(look: Look) -> Look | None:
    """The same with what the examples show in the other of training and evaluation, where glue asks which it is.

    Returns:
        None if that is nothing new.

    Raises:
        StageUsageError: it cannot be joined with the ways that are known.
    """
    model, kinds = look.model, look.kinds
    found = list(zip(kinds.kinds, look.sights, look.labels, strict=True))
    known = {(kind, sight.recording.names) for kind, sight, _ in found}
    training = not model.training
    for kind, example, label in zip(kinds.kinds, kinds.examples, look.labels, strict=True):
        try:
            sight = _look_at(
                model, kinds.inputs, example, look.candidates, look.device, with_time=False, training=training
            )
        except Exception:  # it cannot run so, whatever its own code says
            continue
        if (kind, sight.recording.names) not in known:
            known.add((kind, sight.recording.names))
            found.append((kind, sight, f"{label} in {'training' if training else 'evaluation'}"))
    if len(found) == len(look.sights):
        return None
    ways, called = _join(look.candidates, found)
    _, sights, labels = zip(*found, strict=True)
    return attrs.evolve(look, units=called, sights=sights, ways=ways, labels=labels)


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
    *,
    with_time: bool,
    training: bool | None = None,
) -> Sight:
    """Run an example: on absent tensors if that can be, else really."""
    on_meta = any(tensor.is_meta for _, tensor in named_tensors(model))
    if with_time and on_meta:
        raise StageUsageError(
            "time is measured on a model that has values, but this one is on the meta device; give costs"
        )
    if not with_time:
        try:
            with undisturbed(model, device):
                return _record(model, taken, named, units, device, real=False, training=training)
        except NeedsDataError as error:
            if on_meta:
                raise StageUsageError(
                    f"{type(model).__name__} decides by data how it goes on: {error.what}; on the meta device there is none: give"
                    " the model values before it is split"
                ) from error
    with undisturbed(model, device):
        try:
            return _record(model, taken, named, units, device, real=True, training=training)
        except NeedsDataError as error:
            raise StageUsageError(f"{type(model).__name__} cannot be cut: {error.what}") from error


def _check_hooks(model: nn.Module, units: Mapping[str, nn.Module]) -> None:
    inside = {id(module) for unit in units.values() for module in unit.modules()}
    for name, module in model.named_modules():
        if id(module) not in inside and (module._backward_hooks or module._backward_pre_hooks):
            raise StageUsageError(
                f"{name or type(model).__name__!r} has backward hooks and is no unit, so no stage has all that they are to see:"
                " put them on units, or make it one (units=)"
            )


def _record(
    model: nn.Module,
    taken: Inputs,
    named: Mapping[str, Any],
    units: Mapping[str, nn.Module],
    device: torch.device,
    *,
    real: bool,
    training: bool | None,
) -> Sight:
    mine = _copies(named)  # glue may change them in place, and the example is the caller's
    absence = Absence(device)
    own = of_units(model, units)
    held = {name for name, _ in named_tensors(model)} if real else constants(model, own)
    copy, control = copy_structure(model, units, units if real else (), held, (), absence)
    everywhere = constants(model, own)
    readable = [(name, tensor) for name, tensor in control.named.items() if name not in everywhere]
    originals = {} if real else {id(parameter): name for name, parameter in model.named_parameters()}
    if training is not None:
        copy.train(training)
    recorder = Recorder(absence, None if real else Templates(absence), mine, readable, originals)
    args, kwargs = taken.call(mine)
    with control.running(recorder):
        state = GlueState(copy, control.units)
        result = copy(*args, **kwargs)
        changes = state.changes(recorder.was_written)
    return Sight(recorder.finish(result, changes), recorder.examples, recorder.seconds)


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


def _copies(named: Mapping[str, Any]) -> dict[str, Any]:
    """The inputs with tensors of their own."""
    copies = (tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in tensors_in(named))
    return {name: with_tensors(value, copies) for name, value in named.items()}
