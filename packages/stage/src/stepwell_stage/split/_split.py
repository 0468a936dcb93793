"""Stages from any model, as its author wrote it."""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import attrs
import torch
from torch import nn

from stepwell_p2p import Placement, Transport, Wire

from ..exceptions import StageUsageError
from ..plan._balance import balance
from ..plan._count import whole
from ..plan._require import several
from ..run._materialise import materialise
from ..run._stage import PipelineStage
from ._absent import Absence
from ._alike import Alike
from ._claims import claim
from ._demand import Crossing, Demand, demand
from ._fingerprint import fingerprint
from ._forward import StageForward
from ._hold import Holding, hold
from ._hooked import with_hooks
from ._inputs import Inputs, Kinds
from ._look import Look, branches, look_at, look_for, look_in_other_modes
from ._loss import LastProgram
from ._own import copy_structure, named_tensors
from ._place import order_units, place_calls
from ._reached import check_reached
from ._registered import check_registered
from ._units import Branch, given_units, matching, near
from ._values import INPUTS, MARKS, ROUTE, TOKEN, Call, Key
from ._ways import Ways

_STAGE = "_stepwell_stage"
_level = threading.Lock()


@attrs.frozen(eq=False)
class ModelSplit:
    """A model cut into stages; made by :func:`split`.

    Attributes:
        model: the model. Stages hold its own parameters and buffers.
        parts: the names of the units of each stage, in the order in which they run.
        tied: what several stages hold, for :func:`stepwell_stage.tie`.
        costs: what each unit was taken to cost, by name.
        inputs: "every" where each rank passes the model's inputs, "first" where only the first stage's rank does.
    """

    model: nn.Module
    parts: tuple[tuple[str, ...], ...]
    tied: Mapping[str, tuple[tuple[int, str], ...]]
    costs: Mapping[str, float]
    inputs: Literal["every", "first"]
    _look: Look
    _owners: Sequence[Mapping[int, int]]
    _holding: Holding
    _modules: weakref.WeakValueDictionary[int, nn.Module] = attrs.field(factory=weakref.WeakValueDictionary, init=False)
    _demands: dict[tuple[int, ...], Demand] = attrs.field(factory=dict, init=False)  # by ranks of the stages

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
                without a value; the model's structure cannot be copied; or several stages of a rank would change one buffer.
        """
        look, names = self._look, self._holding.names[stage]
        changed = look.changed
        rank = stage if placement is None else placement.ranks[stage]
        every = dict(named_tensors(self.model))
        tied = {name: every[name] for holders in self.tied.values() for _, name in holders}
        copied = {name for name, tensor in tied.items() if name in names and not claim(tensor, rank)}
        copied |= {name for name in names if stage and name in changed}
        together = placement is not None and len(set(placement.ranks)) < self.num_stages
        counted = sorted(changed.intersection(self.tied)) if together else []
        if counted:
            raise StageUsageError(
                f"the forward changes the buffer {in_a_row(counted)}, which is in no unit, and several stages of one rank would"
                " change the same one: use a schedule with one stage on each rank, register it with persistent=False, or make"
                " the module that changes it a unit (units=)"
            )
        absence = Absence(torch.device(device) if device is not None and look.device.type == "meta" else look.device)
        units = self._holding.units[stage]
        module, control = copy_structure(self.model, look.units, units, names, copied, absence)
        materialise(module, device, init_fn, f"stage {stage}")
        run = StageForward(
            stage,
            look,
            self._demand(placement).stages[stage],
            everywhere=self.inputs == "every",
            control=control,
            absence=absence,
        )
        plain, hooked = module.forward, with_hooks(module)
        if any(one.derives for one in look.ways.recordings):
            hooked = _alone(hooked)
        vars(module)["forward"] = functools.update_wrapper(functools.partial(_run, run, hooked), plain)
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
        shown = (self.inputs, *self.tied)
        cut = fingerprint(self._look.ways, self.parts, self._owners, self._demand(placement), *shown)
        alike = Alike(self._look.inputs, self._look.kinds.examples) if self.inputs == "every" else None
        stages = []
        for index in placement.stages_of(rank):
            part = self.module(index, placement=placement, device=device, init_fn=init_fn)
            stage = PipelineStage(part, index, self.num_stages, device, transport=transport, wires=wires, shapes=shapes)
            stage.to_tie, stage.parts, stage.alike = tuple(self.tied), cut, alike
            stage.needs_process = self._look.needs_process
            if stage.is_last:
                stage.program = LastProgram(part, self.model)
            stages.append(stage)
        return stages

    def describe(self, placement: Placement | None = None) -> str:
        """What was cut where and why, what crosses, and, of stages that have run here, how much of their time glue takes."""
        found = self._demand(placement)
        total = sum(self.costs.values()) or 1.0
        lines = []
        for stage, units in enumerate(self.parts):
            share = sum(self.costs.get(name, 0.0) for name in units) / total
            lines.append(f"stage {stage}: {in_a_row(units)}, {share:.0%} of the cost")
            held = [name for name in found.stages[stage].held if not any(name.startswith(f"{unit}.") for unit in units)]
            if held:
                lines.append(f"  for its glue: {in_a_row(held)}")
            for crossing in found.crossings:
                if crossing.wire.destination == stage and (said := self._said(crossing)):
                    lines.append(f"  from stage {crossing.wire.source}: {said}")
            module = self._modules.get(stage)
            run = None if module is None else vars(module)[_STAGE]
            if run is not None and run.forwards:
                glue = run.glue_seconds / run.forwards
                lines.append(f"  glue: {glue * 1e6:.0f} µs of {run.seconds / run.forwards * 1e6:.0f} µs a forward")
        for name, holders in self.tied.items():
            lines.append(
                f"tied: {name!r} on stages {', '.join(str(stage) for stage in sorted({s for s, _ in holders}))}"
            )
        return "\n".join(lines)

    def _said(self, crossing: Crossing) -> str:
        """What a wire carries, in words; nothing where it only says which way a stage went."""
        found: dict[str, list[int]] = {}
        for way, (key, nbytes) in enumerate(zip(crossing.keys, crossing.nbytes, strict=True)):
            if key == TOKEN:
                return "nothing but its turn"
            if key is not None and key not in (MARKS, ROUTE):
                found.setdefault(f"{self._named(way, key)}, {nbytes:,} bytes", []).append(way)
        if [*found.values()] == [[*range(len(crossing.keys))]] and len(crossing.keys) > 1:
            return f"{next(iter(found))} in every way"
        labels = self._look.labels
        return "; ".join(f"{what} in {in_a_row([labels[way] for way in mine])}" for what, mine in found.items())

    def _named(self, way: int, key: Key) -> str:
        recording = self._look.ways.recordings[way]
        if key[0] == INPUTS:
            value = next(value for value in recording.values if value.key == key)
            return f"the input {value.name!r}"
        return f"a result of {recording.names[key[0]]!r}"

    def _demand(self, placement: Placement | None) -> Demand:
        ranks = tuple(range(self.num_stages)) if placement is None else placement.ranks
        if ranks not in self._demands:
            self._demands[ranks] = demand(
                self._look.ways,
                self._owners,
                num_stages=self.num_stages,
                ranks=ranks,
                inputs_everywhere=self.inputs == "every",
            )
        return self._demands[ranks]


def split(
    model: nn.Module,
    stages: int | Mapping[str, int],
    *,
    example: Any,
    ways: Sequence[Any] = (),
    costs: Literal["parameters", "time"] | Mapping[str, float] = "parameters",
    units: Sequence[str] | None = None,
    inputs: Literal["every", "first"] = "every",
) -> ModelSplit:
    """Cut any model into stages, as its author wrote it: no tracing, no change of its forward.

    Each stage runs the model's own forward, computes its units (blocks, embeddings, heads), and takes from earlier stages
    what its units need of others. The package's docstring tells how. Run it with the same arguments on every rank.

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
        ways: further examples, where forwards do not all go the way of the first: one for each other way, such as one without the
            input that only some batches have. What no example shows is refused when it comes.
        costs: what makes stages even: the units' numbers of parameters, the time of their forward in the example (each rank
            measures, so give the numbers of one to all, :attr:`ModelSplit.costs`, where ranks may differ), or numbers by name.
        units: names or globs of modules that are never cut, in place of those found by themselves; what owns parameters beside
            them becomes units too.
        inputs: "every": each rank passes the model's inputs, so that none is sent, and each step compares them; "first": only the
            first stage's rank does.

    Raises:
        StageUsageError: the model cannot be cut so; says why, and what to change.
    """
    given_each = [_arguments(one) for one in (example, *ways)]
    taken = Inputs(model, positional=min(len(args) for args, _ in given_each))
    named = [taken.named(args, kwargs) for args, kwargs in given_each]
    if inputs not in ("every", "first"):
        raise StageUsageError(f"inputs must be 'every' or 'first', got {inputs!r}")
    kinds = Kinds(taken, named, everywhere=inputs == "every")
    if isinstance(stages, Mapping):
        stages = {name: whole(stage, f"the stage of {name!r}", StageUsageError) for name, stage in stages.items()}
        below = next((name for name, stage in stages.items() if stage < 0), None)
        if below is not None:
            raise StageUsageError(f"{below!r} is to be on stage {stages[below]}: stages are numbered from 0")
        count = max(stages.values(), default=0) + 1
    else:
        count = stages = whole(stages, "stages", StageUsageError)
    if count < 1:
        raise StageUsageError(f"a model is cut into at least 1 stage, got {count}")
    check_registered(model)
    tree = branches(model)
    if units is None:
        look = look_for(model, kinds, tree, count, with_time=costs == "time")
    else:
        patterns = several(units, "units are several names or globs of modules, for example ['blocks.*']")
        look = look_at(model, kinds, given_units(tree, patterns), with_time=costs == "time")
    check_reached(model)
    cut = _cut(look, stages, count, costs, inputs)
    # Nobody asked for both training and evaluation: that may cost nothing, and where it cannot be had, it is refused later.
    with contextlib.suppress(StageUsageError):
        wider = look_in_other_modes(look)
        both = cut if wider is None else _cut(wider, stages, count, costs, inputs)
        return both if both.tied.keys() == cut.tied.keys() else cut
    return cut


def _cut(
    look: Look,
    stages: int | Mapping[str, int],
    count: int,
    costs: Literal["parameters", "time"] | Mapping[str, float],
    inputs: Literal["every", "first"],
) -> ModelSplit:
    """Decide, from what was seen."""
    model, given = look.model, stages if isinstance(stages, Mapping) else None
    called = look.ways.units()
    if not called:
        raise StageUsageError(
            f"the example calls no unit of {type(model).__name__}: a unit is a module that is called, not one whose weights alone"
            " are used, and reached through self, not through a closure; name modules that are with units="
        )
    if len(called) < count:
        raise StageUsageError(
            f"{type(model).__name__} has {len(called)} units that the example calls, too few for {count} stages:"
            f" {in_a_row(called)}; use fewer stages, or name smaller units with units="
        )
    prices = _prices(costs, look, list(called))
    order = order_units(look.ways, prices)
    where = _balanced(look.ways, order, prices, count) if given is None else _given_stages(given, order, count)
    owners = place_calls(look.ways, where, order if given is not None else ())
    _check_together(look.ways, owners)
    parts = [
        [name for name in order if any(owners[w][c.number] == stage for w, c in _calls(look.ways) if c.unit == name)]
        for stage in range(count)
    ]
    empty = next((stage for stage, part in enumerate(parts) if not part), None)
    if empty is not None:
        raise StageUsageError(f"no unit is left for stage {empty}: use fewer stages, or say which unit is where")
    found = demand(look.ways, owners, num_stages=count, ranks=range(count), inputs_everywhere=inputs == "every")
    holding = hold(model, look.units, parts, found.stages, look.rewritten)
    return ModelSplit(model, tuple(tuple(part) for part in parts), holding.tied, prices, inputs, look, owners, holding)


def _alone(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Run forwards of ranks that are threads one after the other: torch has one level of derivatives for all threads."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with _level:
            return forward(*args, **kwargs)

    return call


def _run(run: StageForward, plain: Callable[..., Any], /, *received: Any, **inputs: Any) -> Any:
    if run.is_under_way:  # the model's forward calls itself
        return plain(*received, **inputs)
    return run(plain, received, inputs)


def _arguments(example: Any) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    if isinstance(example, Mapping):
        return (), example
    return (tuple(example) if isinstance(example, tuple | list) else (example,)), {}


def _prices(
    costs: Literal["parameters", "time"] | Mapping[str, float], look: Look, order: Sequence[str]
) -> dict[str, float]:
    if costs == "time":
        return {name: look.seconds[name] for name in order}
    if costs == "parameters":
        return {name: float(sum(p.numel() for p in look.units[name].parameters())) for name in order}
    if not isinstance(costs, Mapping):
        raise StageUsageError(f"costs must be 'parameters', 'time' or numbers by unit, got {costs!r}")
    # Those of another cut may name units that no example calls here, such as one of training alone.
    odd = sorted({*(set(order) - costs.keys()), *(costs.keys() - look.candidates.keys())})
    if odd:
        raise StageUsageError(f"costs must name every unit, and only these: {in_a_row(order)}; differs in {odd}")
    return {name: float(costs[name]) for name in order}


def _calls(ways: Ways) -> Iterator[tuple[int, Call]]:
    """Every call of a unit, with its way."""
    for way, recording in enumerate(ways.recordings):
        for call in recording.calls:
            yield way, call


def _together(ways: Ways) -> Iterator[tuple[int, dict[int, str], str]]:
    """Units that must be on one stage, by the number of the call, with the way; and why."""
    for way, recording in enumerate(ways.recordings):
        names = {call.number: call.unit for call in recording.calls}
        for numbers in recording.checkpointed:
            why = "are in one checkpoint, which runs again in backward"
            yield way, {number: names[number] for number in numbers}, f"{why}: checkpoint each by itself"
        for maker, number in recording.found:
            before = {other: name for other, name in names.items() if name == maker and other < number}
            why = (
                "are given one object, such as a cache, in which the last finds a tensor that the first does not return"
            )
            yield way, before | {number: names[number]}, f"{why}: return it, and pass it on"


def _balanced(ways: Ways, order: Sequence[str], prices: Mapping[str, float], count: int) -> dict[str, int]:
    """The stage of each unit, where none is given: from the first to the last of those that must be together, all are."""
    ends, place_of, whys = list(range(len(order))), {name: place for place, name in enumerate(order)}, dict[str, None]()
    for _, names, why in _together(ways):
        whys[why] = None
        places = [place_of[name] for name in names.values()]
        ends[min(places)] = max(ends[min(places)], *places)
    groups: list[list[str]] = []
    end = -1
    for place, name in enumerate(order):
        if place > end:
            groups.append([])
        groups[-1].append(name)
        end = max(end, ends[place])
    if len(groups) < count:
        raise StageUsageError(
            f"{len(order)} units make {len(groups)} groups, too few for {count} stages: {'; '.join(map(in_a_row, groups))}; use"
            f" fewer stages. Some units {'; others '.join(whys)}"
        )
    starts = balance([sum(prices[name] for name in group) for group in groups], count)
    return {name: sum(start <= number for start in starts) - 1 for number, group in enumerate(groups) for name in group}


def _check_together(ways: Ways, owners: Sequence[Mapping[int, int]]) -> None:
    for way, names, why in _together(ways):
        stages = {owners[way][number] for number in names}
        if len(stages) > 1:
            raise StageUsageError(
                f"units {in_a_row(dict.fromkeys(names.values()))} are on stages {', '.join(map(str, sorted(stages)))}, but"
                f" {why}, or put them on one stage"
            )


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


def in_a_row(names: Iterable[str]) -> str:
    """Names in a row, long runs of numbered ones shortened."""
    found = list(names)
    return ", ".join(found) if len(found) <= 6 else f"{', '.join(found[:3])}, … {found[-1]} ({len(found)})"
