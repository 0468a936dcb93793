"""Stages from any model, as its author wrote it."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import attrs
import torch
from torch import nn

from stepwell_p2p import Placement, Transport, Wire

from ..exceptions import StageUsageError
from ..plan._balance import balance
from ..run._materialise import materialise
from ..run._probe import undisturbed
from ..run._stage import PipelineStage
from ._absent import Absence, NeedsDataError
from ._demand import Demand, demand, place_calls
from ._glue import DoneError, StageGlue
from ._inputs import Inputs, replaced
from ._leaves import tensors_in
from ._own import Control, copy_structure, named_tensors
from ._record import Recorder
from ._templates import Example, Templates
from ._units import Branch, choose_units, given_units, matching, near
from ._values import INPUTS, TOKEN, Key, Recording

_STAGE = "_stepwell_stage"


@attrs.frozen(eq=False)
class _Look:
    """What the example showed: everything that a cut is decided from."""

    model: nn.Module
    inputs: Inputs
    example: Mapping[str, Any]
    device: torch.device
    units: Mapping[str, nn.Module]
    recording: Recording
    examples: Mapping[int, Example]
    singles: frozenset[int]
    seconds: Mapping[str, float]


@attrs.frozen(eq=False)
class ModelSplit:
    """A model cut into stages; made by :func:`split`.

    Attributes:
        model: the model. Stages hold its own parameters and buffers.
        parts: the names of the units of each stage, in the order in which they run.
        tied: what several stages hold, for :func:`stepwell_stage.tie`.
        costs: what each unit was taken to cost, by name.
    """

    model: nn.Module
    parts: tuple[tuple[str, ...], ...]
    tied: Mapping[str, tuple[tuple[int, str], ...]]
    costs: Mapping[str, float]
    _look: _Look
    _owners: Mapping[int, int]
    _held: tuple[frozenset[str], ...]
    _inputs: Literal["every", "first"]
    _modules: dict[int, nn.Module] = attrs.field(factory=dict, init=False)

    @property
    def num_stages(self) -> int:
        """How many stages there are."""
        return len(self.parts)

    def keywords(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The model's inputs by name, as every rank passes them to ``step`` and ``eval``.

        Raises:
            StageUsageError: the model's forward does not take them.
        """
        return self._look.inputs.named(args, kwargs)

    def wires(self, placement: Placement | None = None) -> tuple[Wire, ...]:
        """What crosses between stages.

        Args:
            placement: the rank of each stage; by default each has its own.
        """
        return self._demand(placement).wires

    def module(
        self,
        stage: int,
        *,
        placement: Placement | None = None,
        device: torch.device | str | None = None,
        init_fn: Callable[[nn.Module], object] | None = None,
    ) -> nn.Module:
        """One stage: a module of the model's class, with the parameters and buffers of its units under the model's names.

        It takes what crosses to it, in the order of the wires, and the model's inputs by name; the first takes the model's
        inputs as the model does. It returns what crosses from it; the last one what the model returns. Wrap its units in FSDP2,
        DDP, or tensor parallelism, or compile them, as you would the model's.

        Args:
            stage: which.
            placement: the rank of each stage; by default each has its own.
            device: where parameters and buffers that are on the meta device are made.
            init_fn: called with the module if something of it was on the meta device; gives all of it its values, by random
                initialisation or from a checkpoint: names are those of the whole model.

        Raises:
            StageUsageError: something is on the meta device and device or ``init_fn`` is missing, or ``init_fn`` left something
                without a value; or the model's structure cannot be copied.
        """
        look = self._look
        found = self._demand(placement)
        first = {name: holders[0][0] for holders in self.tied.values() for _, name in holders}
        copied = {name for name in self._held[stage] if first.get(name, stage) != stage}
        absence = Absence(torch.device(device) if device is not None and look.device.type == "meta" else look.device)
        module, control = copy_structure(
            self.model, look.units, self.parts[stage], self._held[stage], copied, absence
        )
        materialise(module, device, init_fn, f"stage {stage}")
        run = _StageForward(stage, self, found, control, absence)
        own_forward = vars(module).pop("forward", None)
        kind = type(module)

        def forward(self: nn.Module, *received: Any, **inputs: Any) -> Any:
            plain = own_forward if own_forward is not None else functools.partial(kind.forward, self)
            return run(plain, received, inputs)

        module.__class__ = type(f"{kind.__name__}Stage", (kind,), {"forward": forward, "__module__": kind.__module__})
        vars(module)[_STAGE] = run
        self._modules[stage] = module
        return module

    def stages(
        self,
        placement: Placement,
        rank: int,
        device: torch.device | str,
        *,
        init_fn: Callable[[nn.Module], object] | None = None,
        transport: Transport | None = None,
        shapes: Literal["static", "dynamic"] = "static",
    ) -> list[PipelineStage]:
        """The stages of one rank; only these are materialised.

        If :attr:`tied` is not empty, no step runs before ``tie(executor, split.tied)``.

        Args:
            placement: the rank of each stage, of the schedule.
            rank: this one.
            device: where it computes.
            init_fn: see :meth:`module`.
            transport: see :class:`stepwell_stage.PipelineStage`.
            shapes: likewise.

        Raises:
            StageUsageError: the model was cut into another number of stages; and see :meth:`module`.
        """
        if placement.num_stages != self.num_stages:
            raise StageUsageError(
                f"the model was cut into {self.num_stages} stages, but the schedule has {placement.num_stages};"
                f" use split(model, {placement.num_stages}, example=…)"
            )
        wires = _or_chain(self.wires(placement), self.num_stages)
        stages = []
        for index in placement.stages_of(rank):
            part = self.module(index, placement=placement, device=device, init_fn=init_fn)
            stage = PipelineStage(part, index, self.num_stages, device, transport=transport, wires=wires, shapes=shapes)
            stage.to_tie = tuple(self.tied)
            stages.append(stage)
        return stages

    def describe(self, placement: Placement | None = None) -> str:
        """What was cut where and why, what crosses, and, of stages that have run here, how much of their time glue takes."""
        found = self._demand(placement)
        total = sum(self.costs.values()) or 1.0
        lines = []
        for stage, units in enumerate(self.parts):
            share = sum(self.costs.get(name, 0.0) for name in units) / total
            lines.append(f"stage {stage}: {_row(units)}, {share:.0%} of the cost")
            held = [name for name in found.stages[stage].held if not any(name.startswith(f"{unit}.") for unit in units)]
            if held:
                lines.append(f"  for its glue: {_row(held)}")
            for wire, nbytes in zip(found.wires, found.nbytes, strict=True):
                if wire.destination == stage:
                    key = found.stages[stage].receives[wire.input]
                    lines.append(f"  from stage {wire.source}: {self._said(key)}, {nbytes:,} bytes in the example")
            run = vars(self._modules[stage])[_STAGE] if stage in self._modules else None
            if run is not None and run.forwards:
                glue = run.glue_seconds / run.forwards
                lines.append(f"  glue: {glue * 1e6:.0f} µs of {run.seconds / run.forwards * 1e6:.0f} µs a forward")
        for name, holders in self.tied.items():
            lines.append(
                f"tied: {name!r} on stages {', '.join(str(stage) for stage in sorted({s for s, _ in holders}))}"
            )
        return "\n".join(lines)

    def _said(self, key: Key) -> str:
        if key == TOKEN:
            return "nothing but its turn"
        if key[0] == INPUTS:
            value = next(value for value in self._look.recording.values if value.key == key)
            return f"the input {value.name!r}"
        return f"a result of {self._look.recording.names[key[0]]!r}"

    def _demand(self, placement: Placement | None) -> Demand:
        return _demanded(self, tuple(range(self.num_stages)) if placement is None else placement.ranks)


@functools.lru_cache(maxsize=64)
def _demanded(cut: ModelSplit, ranks: tuple[int, ...]) -> Demand:
    return demand(
        cut._look.recording,
        cut._owners,
        num_stages=cut.num_stages,
        ranks=ranks,
        inputs_everywhere=cut._inputs == "every",
    )


class _StageForward:
    """The forward of one stage. Mutable: it counts what it takes."""

    def __init__(self, stage: int, cut: ModelSplit, found: Demand, control: Control, absence: Absence) -> None:
        self.forwards = 0
        self.seconds = 0.0
        self.glue_seconds = 0.0
        self._stage = stage
        self._is_last = stage == cut.num_stages - 1
        self._look = cut._look
        self._plan = found.stages[stage]
        self._everywhere = cut._inputs == "every"
        self._control = control
        self._absence = absence
        self._templates = Templates(absence, cut._look.examples, cut._look.singles)

    def __call__(self, forward: Callable[..., Any], received: Sequence[Any], inputs: Mapping[str, Any]) -> Any:
        """Run the model's forward as far as this stage needs it."""
        start = time.perf_counter()
        values = {} if self._stage == 0 else dict(zip(self._plan.receives, received, strict=True))
        named = self._named(received, inputs, values)
        passed = self._passed(named, values)
        args, kwargs = self._look.inputs.call(named)
        glue = StageGlue(self._plan, self._look.recording.names, values, self._absence, self._templates)
        result = None
        try:
            with self._control.running(glue):
                result = forward(*args, **kwargs)
        except DoneError:
            pass
        finally:
            self._absence.forget()
        if not self._is_last:
            result = tuple(passed[key] if key in passed else glue.sent[key] for key in self._plan.sends)
        elif any(map(self._absence.is_absent, tensors_in(result))):
            raise StageUsageError(
                "the model returned something that it did not return in the example, and another stage has"
            )
        self.forwards += 1
        seconds = time.perf_counter() - start
        self.seconds += seconds
        self.glue_seconds += seconds - glue.unit_seconds
        return result

    def _named(
        self, received: Sequence[Any], inputs: Mapping[str, Any], values: Mapping[Key, torch.Tensor]
    ) -> dict[str, Any]:
        """All of the model's inputs, by name."""
        example = self._look.example
        if self._stage == 0:
            named = self._look.inputs.joined(received, inputs)
        elif self._everywhere:
            named = dict(inputs)
        else:
            return replaced(example, {index: one for (number, index), one in values.items() if number == INPUTS})
        odd = named.keys() - example.keys()
        if odd:
            raise StageUsageError(
                f"stage {self._stage} was given {', '.join(sorted(odd))}, which the example did not have: split with an example that"
                " has every input"
            )
        lacking = [name for name in example if name not in named and next(tensors_in(example[name]), None) is not None]
        if lacking:
            raise StageUsageError(
                f"stage {self._stage} was given no {', '.join(lacking)}: every rank passes the model's inputs by name,"
                ' step(**split.keywords(...)); or split with inputs="first"'
            )
        return {**example, **named}

    def _passed(self, named: Mapping[str, Any], values: Mapping[Key, torch.Tensor]) -> dict[Key, torch.Tensor]:
        """What this stage sends without having computed it, as it is before the model's code may change it."""
        passed = {}
        for key in self._plan.sends:
            if key == TOKEN:
                passed[key] = torch.empty(0, device=self._absence.device)
                continue
            tensor = values.get(key)
            if tensor is None and key[0] == INPUTS:
                tensor = [one for value in named.values() for one in tensors_in(value)][key[1]]
            if tensor is not None:
                passed[key] = tensor.clone() if key in self._plan.copies else tensor
        return passed


def split(
    model: nn.Module,
    stages: int | Mapping[str, int],
    *,
    example: Any,
    costs: Literal["parameters", "time"] | Mapping[str, float] = "parameters",
    units: Sequence[str] | None = None,
    inputs: Literal["every", "first"] = "every",
) -> ModelSplit:
    """Cut any model into stages, as its author wrote it: no tracing, no change of its forward.

    Each stage runs the model's own forward, computes its units (blocks, embeddings, heads), and takes from earlier stages what its
    units need of others. The package's docstring tells how. Run it with the same arguments on every rank.

    Example::

        cut = split(model, schedule.placement.num_stages, example={"input_ids": tokens, "labels": tokens})
        stages = cut.stages(schedule.placement, rank, device)
        executor = Executor(stages, schedule, loss_fn=lambda output: output.loss)
        tie(executor, cut.tied)
        executor.step(input_ids=batch, labels=batch)     # on every rank

    Args:
        model: the model; on the meta device it costs nothing, and each rank materialises its own stages only.
        stages: how many; or for some units, by name or glob, their stage: others are on that of the unit that runs before them.
        example: inputs of one microbatch, of any size: a dict of keyword inputs, or a tensor or tuple of positional ones. Inputs
            that are passed later are these, all of them.
        costs: what makes stages even: the units' numbers of parameters, the time of their forward in the example (each rank
            measures, so give the numbers of one to all, :attr:`ModelSplit.costs`, where ranks may differ), or numbers by name.
        units: names or globs of modules that are never cut, in place of those found by themselves; what owns parameters beside
            them becomes units too.
        inputs: "every": each rank passes the model's inputs, so that none is sent; "first": only the first stage's rank does.

    Raises:
        StageUsageError: the model cannot be cut so; says why, and what to change.
    """
    taken = Inputs(model)
    named = taken.named(*_arguments(example))
    tree = _branches(model)
    given = stages if isinstance(stages, Mapping) else None
    count = max(stages.values()) + 1 if isinstance(stages, Mapping) else stages
    below = next((name for name, stage in (given or {}).items() if stage < 0), None)
    if given is not None and below is not None:
        raise StageUsageError(f"{below!r} is to be on stage {given[below]}: stages are numbered from 0")
    if count < 1:
        raise StageUsageError(f"a model is cut into at least 1 stage, got {count}")
    if inputs not in ("every", "first"):
        raise StageUsageError(f"inputs must be 'every' or 'first', got {inputs!r}")
    if units is None:
        look = _look_for(model, taken, named, tree, count, with_time=costs == "time")
    else:
        look = _look_at(model, taken, named, given_units(tree, units), with_time=costs == "time")
    order = list(dict.fromkeys(call.unit for call in look.recording.calls))
    if len(order) < count:
        raise StageUsageError(
            f"{type(model).__name__} has {len(order)} units that the example calls, too few for {count} stages: {_row(order)};"
            " use fewer stages, or name smaller units with units="
        )
    prices = _prices(costs, look, order)
    if given is None:
        starts = balance([prices[name] for name in order], count)
        where = {name: sum(start <= number for start in starts) - 1 for number, name in enumerate(order)}
    else:
        where = _given_stages(given, order, count)
    owners = place_calls(look.recording, where, order if given is not None else ())
    parts = [
        dict.fromkeys(call.unit for call in look.recording.calls if owners[call.number] == s) for s in range(count)
    ]
    empty = next((stage for stage, part in enumerate(parts) if not part), None)
    if empty is not None:
        raise StageUsageError(f"no unit is left for stage {empty}: use fewer stages, or say which unit is where")
    parts[-1] |= dict.fromkeys(name for name in look.units if name not in order)  # never called in the example
    found = demand(look.recording, owners, num_stages=count, ranks=range(count), inputs_everywhere=inputs == "every")
    held = _held(model, look.units, parts, [set(plan.held) for plan in found.stages])
    return ModelSplit(
        model,
        tuple(tuple(part) for part in parts),
        _shared(model, held, look.units, parts),
        prices,
        look,
        owners,
        tuple(held),
        inputs,
    )


def _arguments(example: Any) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    if isinstance(example, Mapping):
        return (), example
    return (tuple(example) if isinstance(example, tuple | list) else (example,)), {}


def _branches(model: nn.Module) -> Branch:
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


def _look_for(
    model: nn.Module, taken: Inputs, named: Mapping[str, Any], tree: Branch, count: int, *, with_time: bool
) -> _Look:
    """Look at the example with units that are found; smaller ones where they are too few."""
    wanted = count
    names = choose_units(tree, wanted)
    while True:
        look = _look_at(model, taken, named, names, with_time=with_time)
        called = {call.unit for call in look.recording.calls}
        if len(called) >= count:
            return look
        wanted = max(wanted, len(names)) + 1
        more = choose_units(tree, wanted)
        if more == names or (len(more) < wanted and len(more) <= len(names)):
            return look
        names = more


def _look_at(
    model: nn.Module, taken: Inputs, named: Mapping[str, Any], names: Sequence[str], *, with_time: bool
) -> _Look:
    """Run the example once and see what comes from where: on absent tensors if that can be, else really."""
    units = {name: model.get_submodule(name) for name in names}
    on_meta = any(tensor.is_meta for _, tensor in named_tensors(model))
    device = _device(model, named)
    if with_time and on_meta:
        raise StageUsageError(
            "time is measured on a model that has values, but this one is on the meta device; give costs"
        )
    if not with_time:
        try:
            return _record(model, taken, named, units, device, real=False)
        except NeedsDataError as error:
            if on_meta:
                raise StageUsageError(
                    f"{type(model).__name__} decides by data how it goes on: {error.what}; on the meta device there is none: give"
                    " the model values before it is split"
                ) from error
    with undisturbed(model, device):
        try:
            return _record(model, taken, named, units, device, real=True)
        except NeedsDataError as error:
            raise StageUsageError(f"{type(model).__name__} cannot be cut: {error.what}") from error


def _record(
    model: nn.Module,
    taken: Inputs,
    named: Mapping[str, Any],
    units: Mapping[str, nn.Module],
    device: torch.device,
    *,
    real: bool,
) -> _Look:
    absence = Absence(device)
    own = _of_units(model, units)
    held = {name for name, _ in named_tensors(model)} if real else _constants(model, own)
    copy, control = copy_structure(model, units, units if real else (), held, (), absence)
    constants = _constants(model, own)
    readable = [(name, tensor) for name, tensor in control.named.items() if name not in constants]
    recorder = Recorder(absence, None if real else Templates(absence), named, readable)
    args, kwargs = taken.call(named)
    with control.running(recorder):
        result = copy(*args, **kwargs)
    recording = recorder.finish(result)
    return _Look(model, taken, named, device, units, recording, recorder.examples, recorder.singles, recorder.seconds)


def _device(model: nn.Module, named: Mapping[str, Any]) -> torch.device:
    """Where the model computes: where its parameters are, or, if they are on the meta device, its inputs."""
    every = [*(tensor for _, tensor in named_tensors(model)), *tensors_in(named)]
    return next((tensor.device for tensor in every if not tensor.is_meta), torch.device("cpu"))


def _of_units(model: nn.Module, units: Mapping[str, nn.Module]) -> dict[str, str]:
    """The unit of each parameter and buffer that is in one, by all its names there."""
    names = {id(module): name for name, module in units.items()}
    own: dict[str, str] = {}
    for path, module in model.named_modules(remove_duplicate=False):  # what holds another first
        if id(module) in names:
            for name, _ in named_tensors(module):
                own.setdefault(f"{path}.{name}", names[id(module)])
    return own


def _constants(model: nn.Module, own: Mapping[str, str]) -> set[str]:
    """Buffers beside the units that have a value: every stage has them, for glue."""
    return {
        name for name, tensor in model.named_buffers(remove_duplicate=False) if name not in own and not tensor.is_meta
    }


def _held(
    model: nn.Module, units: Mapping[str, nn.Module], parts: Sequence[Iterable[str]], read: Sequence[set[str]]
) -> list[frozenset[str]]:
    """Names of what each stage holds. What nobody needs is on the last, so that nothing is lost."""
    own = _of_units(model, units)
    every = list(named_tensors(model))
    beside = {name for name, tensor in model.named_buffers(remove_duplicate=False) if name not in own}
    held: list[set[str]] = []
    for part, names in zip(parts, read, strict=True):
        mine = set(part)
        held.append({name for name, unit in own.items() if unit in mine} | names | beside)
    found = {id(tensor) for name, tensor in every if any(name in names for names in held)}
    held[-1] |= {name for name, tensor in every if id(tensor) not in found}
    seen: list[frozenset[str]] = []
    for part, names in zip(parts, held, strict=True):
        kept, mine = {id(tensor) for name, tensor in every if name in names}, set(part)
        seen.append(
            frozenset(name for name, tensor in every if id(tensor) in kept and (name not in own or own[name] in mine))
        )
    return seen


def _shared(
    model: nn.Module,
    held: Sequence[frozenset[str]],
    units: Mapping[str, nn.Module],
    parts: Sequence[Sequence[str] | Iterable[str]],
) -> dict[str, tuple[tuple[int, str], ...]]:
    """What several stages hold, by the first name of it."""
    saved = set(model.state_dict(keep_vars=True))
    own = _of_units(model, units)
    groups: dict[int, dict[tuple[int, str], None]] = {}
    tensors = dict(named_tensors(model))
    for stage, names in enumerate(held):
        for name in tensors:
            if name in names:
                groups.setdefault(id(tensors[name]), {})[stage, name] = None
    shared = {}
    for holders in groups.values():
        stages = sorted({stage for stage, _ in holders})
        first = next(iter(holders))[1]
        if len(stages) < 2 or not (isinstance(tensors[first], nn.Parameter) or first in saved):
            continue
        if first in own and not isinstance(tensors[first], nn.Parameter):
            raise StageUsageError(
                f"unit {own[first]!r} is called on stages {', '.join(map(str, stages))}, and its buffer {first!r}, which is part of"
                " its state, would be another on each: put what is called between on one stage, with a mapping from names of units"
                " to stages"
            )
        shared[first] = tuple(holders)
    return shared


def _prices(
    costs: Literal["parameters", "time"] | Mapping[str, float], look: _Look, order: Sequence[str]
) -> dict[str, float]:
    if costs == "time":
        return {name: look.seconds[name] for name in order}
    if costs == "parameters":
        return {name: float(sum(p.numel() for p in look.units[name].parameters())) for name in order}
    if not isinstance(costs, Mapping):
        raise StageUsageError(f"costs must be 'parameters', 'time' or numbers by unit, got {costs!r}")
    odd = sorted(costs.keys() ^ set(order))
    if odd:
        raise StageUsageError(f"costs must name every unit, and only these: {_row(order)}; differs in {odd}")
    return {name: float(costs[name]) for name in order}


def _given_stages(given: Mapping[str, int], order: Sequence[str], count: int) -> dict[str, int]:
    """The stage of each unit, where some are given."""
    named: dict[str, int] = {}
    for pattern, stage in given.items():
        fitting = matching(pattern, order)
        if not fitting:
            raise StageUsageError(
                f"no unit is called {pattern!r}; {near(pattern, [Branch(name, False, True, 1) for name in order])}"
            )
        named |= dict.fromkeys(fitting, stage)
    where: dict[str, int] = {}
    stage = 0
    for name in order:
        stage = where[name] = named.get(name, stage)
    return where


def _or_chain(wires: Sequence[Wire], num_stages: int) -> tuple[Wire, ...] | None:
    """None where every stage hands all that it gives to the next, in order: what needs no wires said."""
    if all(wire.destination == wire.source + 1 and wire.output == wire.input for wire in wires):
        return None
    return tuple(wires)


def _row(names: Iterable[str]) -> str:
    """Names in a row, long runs of numbered ones shortened."""
    found = list(names)
    return ", ".join(found) if len(found) <= 6 else f"{', '.join(found[:3])}, … {found[-1]} ({len(found)})"
