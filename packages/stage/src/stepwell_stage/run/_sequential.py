"""Stages from a model that runs its layers one after the other."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import attrs
import torch
from torch import nn

from stepwell_p2p import Placement, Transport

from ..exceptions import StageUsageError
from ..plan._balance import balance, check_starts
from ..plan._count import whole
from ._forward import Forward
from ._materialise import materialise
from ._reader import read_forward
from ._stage import PipelineStage


@attrs.frozen
class Unit:
    """What is never cut: a layer, with the code around it that has no layer of its own.

    Attributes:
        name: the layer's name in the model.
        start: its first step of the forward.
        uses: the modules and tensors that it needs, by name.
        line: where it stands in the source.
    """

    name: str
    start: int
    uses: tuple[str, ...]
    line: int


@attrs.frozen(eq=False)
class SequentialSplit:
    """A model cut into stages; made by :func:`split_sequential`.

    Attributes:
        model: the model. Its parts hold its own layers.
        parts: the names of the layers of each stage.
        tied: what several stages hold, for :func:`tie`: parameters that are used on several, and buffers that several read.
    """

    model: nn.Module
    parts: tuple[tuple[str, ...], ...]
    tied: Mapping[str, tuple[tuple[int, str], ...]]
    _forward: Forward
    _bounds: tuple[int, ...]
    _held: tuple[tuple[str, ...], ...]

    @property
    def num_stages(self) -> int:
        """How many stages there are."""
        return len(self.parts)

    def module(
        self,
        stage: int,
        *,
        device: torch.device | str | None = None,
        init_fn: Callable[[nn.Module], object] | None = None,
    ) -> nn.Module:
        """The part of the model that is one stage: a module of the model's class, with its names.

        Layers are the model's own, but for those with a parameter that an earlier stage has too, which are copies.

        Args:
            stage: which.
            device: where parameters and buffers that are on the meta device are made.
            init_fn: called with the part if something of it was on the meta device; gives all of it its values, by random
                initialisation or from a checkpoint: names are those of the whole model.

        Raises:
            StageUsageError: something is on the meta device and device or ``init_fn`` is missing, or ``init_fn`` left something
                without a value.
        """
        part = _build_part(self.model, self._held[stage], self._copied(stage))
        run = self._forward.compile(self._bounds[stage], self._bounds[stage + 1])
        part.__class__ = type(f"{type(self.model).__name__}Part", (type(self.model),), {"forward": run})
        materialise(part, device, init_fn, f"stage {stage}")
        return part

    def stages(
        self,
        placement: Placement,
        rank: int,
        device: torch.device | str,
        *,
        init_fn: Callable[[nn.Module], object] | None = None,
        transport: Transport | None = None,
    ) -> list[PipelineStage]:
        """The stages of one rank; only these are materialised.

        If :attr:`tied` is not empty, no step runs before ``tie(executor, split.tied)``.

        Args:
            placement: the rank of each stage, of the schedule.
            rank: this one.
            device: where it computes.
            init_fn: see :meth:`module`.
            transport: see :class:`PipelineStage`.

        Raises:
            StageUsageError: the model was cut into another number of stages; and see :meth:`module`.
        """
        if placement.num_stages != self.num_stages:
            raise StageUsageError(
                f"the model was cut into {self.num_stages} stages, but the schedule has {placement.num_stages};"
                f" use split_sequential(model, {placement.num_stages})"
            )
        stages = []
        for index in placement.stages_of(rank):
            part = self.module(index, device=device, init_fn=init_fn)
            stage = PipelineStage(part, index, self.num_stages, device, transport=transport)
            stage.to_tie, stage.parts = tuple(self.tied), repr(self.parts)
            stages.append(stage)
        return stages

    def _copied(self, stage: int) -> frozenset[str]:
        """Tensors of this stage that an earlier one has too, by all their names."""
        return frozenset(name for holders in self.tied.values() for s, name in holders if s == stage != holders[0][0])


def split_sequential(
    model: nn.Module,
    n: int | None = None,
    *,
    boundaries: Sequence[int | str] | None = None,
    costs: Sequence[float] | Mapping[str, float] | None = None,
) -> SequentialSplit:
    """Cut a model that runs its layers one after the other into stages that run the model's own forward, part by part.

    For an ``nn.Sequential``, and for a model whose forward is written as steps: an embedding, a loop over an ``nn.ModuleList`` of
    blocks, a head, and code around them. What one part computes and a later one needs crosses the cut: also several values, masks
    and plain numbers. Variables that share memory cross as separate tensors, and a part that
    writes to one of them is refused. Parts keep the names of parameters and buffers.

    The source of the forward is read for that, and nothing is run; so the model may be on the meta device, where it costs
    nothing, and each rank materialises its own part only.

    Example::

        with torch.device("meta"):
            model = GPT(config)
        split = split_sequential(model, schedule.placement.num_stages)
        stages = split.stages(schedule.placement, rank, device, init_fn=initialise)
        executor = Executor(stages, schedule, loss_fn)
        tie(executor, split.tied)

        def initialise(part):                        # or from a checkpoint
            dcp.load({"model": part.state_dict()}, checkpoint_id=path, no_dist=True)

    Args:
        model: the model. It is left as it is, but shares its layers with the parts.
        n: how many stages; or give ``boundaries``.
        boundaries: the first layer of each stage after the first, as its name or number.
        costs: what each layer costs, in order or by name, for stages as even as can be: the most expensive one is as cheap as
            possible. By default its number of parameters; :func:`measure_costs` measures time. Give the same on every rank.

    Raises:
        StageUsageError: the forward cannot be cut, with the line that forbids it; or the arguments do not fit the model's
            layers.
    """
    forward = read_forward(model)
    units = units_of(model, forward)
    names = [unit.name for unit in units]
    if (n is None) is (boundaries is None):
        raise StageUsageError("give either the number of stages or their boundaries")
    if boundaries is not None:
        if costs is not None:
            raise StageUsageError("costs decide where to cut, and so do boundaries: give one of them")
        starts = check_starts([_number(boundary, names) for boundary in boundaries], len(units))
    else:
        n = whole(n, "n", StageUsageError)
        if n > len(units):
            raise StageUsageError(
                f"{type(model).__name__} has {len(units)} layers that can be told apart, too few for {n} stages:"
                f" {', '.join(names)}; use fewer stages, or write them yourself, as modules for PipelineStage"
            )
        starts = balance(_parameters(model, units) if costs is None else _given(costs, names), n)
    ends = (*starts[1:], len(units))
    parts = [units[start:end] for start, end in zip(starts, ends, strict=True)]
    held = _held(model, parts)
    return SequentialSplit(
        model,
        tuple(tuple(unit.name for unit in part) for part in parts),
        _shared(model, parts, held),
        forward,
        (*(part[0].start for part in parts), len(forward.steps)),
        held,
    )


def units_of(model: nn.Module, forward: Forward) -> list[Unit]:
    """Steps that use something of the model, each with the steps around it that do not.

    Of the places between two of them where one could cut, the one is taken where least crosses, and of these the first.
    """
    using = [index for index, step in enumerate(forward.steps) if step.uses]
    if not using:
        raise StageUsageError(f"{type(model).__name__} uses no layers of its own, so there is nothing to cut")
    starts = [0]
    for before, after in pairwise(using):
        starts.append(min(range(before + 1, after + 1), key=lambda at: len(forward.crossing(at))))
    units = []
    seen: set[str] = set()
    for index, start in zip(using, starts, strict=True):
        step = forward.steps[index]
        name = step.uses[0]
        if name in seen:  # used again
            name = f"{name} (line {step.line}, step {index})"
        seen.add(name)
        units.append(Unit(name, start, step.uses, step.line))
    return units


def _number(boundary: int | str, names: Sequence[str]) -> int:
    if isinstance(boundary, int):
        return boundary
    if boundary not in names:
        raise StageUsageError(f"no layer is called {boundary!r}; a stage can begin at {', '.join(names)}")
    return names.index(boundary)


def _given(costs: Sequence[float] | Mapping[str, float], names: Sequence[str]) -> list[float]:
    if isinstance(costs, Mapping):
        odd = sorted(costs.keys() ^ set(names))
        if odd:
            raise StageUsageError(f"costs must name every layer, and only these: {', '.join(names)}; differs in {odd}")
        return [costs[name] for name in names]
    if len(costs) != len(names):
        raise StageUsageError(f"there are {len(costs)} costs for {len(names)} layers: {', '.join(names)}")
    return list(costs)


def _parameters(model: nn.Module, units: Sequence[Unit]) -> list[int]:
    """The number of parameters that each unit uses."""
    return [
        sum(
            {
                id(tensor): tensor.numel()
                for name in unit.uses
                for _, tensor in _named(model, name)
                if isinstance(tensor, nn.Parameter)
            }.values()
        )
        for unit in units
    ]


def _named(model: nn.Module, name: str) -> list[tuple[str, torch.Tensor]]:
    """The tensors of a module, or a tensor, by their names in the model."""
    owner, _, leaf = name.rpartition(".")
    found = getattr(model.get_submodule(owner), leaf)
    if isinstance(found, torch.Tensor):
        return [(name, found)]
    return [
        *found.named_parameters(name, remove_duplicate=False),
        *found.named_buffers(name, remove_duplicate=False),
    ]


def _held(model: nn.Module, parts: Sequence[Sequence[Unit]]) -> tuple[tuple[str, ...], ...]:
    """The modules and tensors of each stage. What the forward does not use is on the last, so that nothing is lost."""
    held = [dict.fromkeys(name for unit in part for name in unit.uses) for part in parts]
    covered = {name for uses in held for use in uses for name, _ in _named(model, use)}
    every = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    held[-1] |= dict.fromkeys(name for name, _ in every if name not in covered)
    return tuple(tuple(uses) for uses in held)


def _shared(
    model: nn.Module, parts: Sequence[Sequence[Unit]], held: Sequence[Iterable[str]]
) -> dict[str, tuple[tuple[int, str], ...]]:
    """What several stages hold, by the first one's name for it."""
    holders: dict[int, dict[tuple[int, str], None]] = {}
    for stage, uses in enumerate(held):
        for use in uses:
            for name, tensor in _named(model, use):
                holders.setdefault(id(tensor), {})[stage, name] = None
    saved = set(model.state_dict())
    found = {}
    for places in holders.values():
        stages = sorted({stage for stage, _ in places})
        if len(stages) < 2:
            continue
        first = next(iter(places))[1]
        tensor = dict(_named(model, first))[first]
        if not isinstance(tensor, nn.Parameter) and first in saved:
            _refuse_buffer(model, parts, stages, first)
        found[first] = tuple(places)
    return found


def _refuse_buffer(model: nn.Module, parts: Sequence[Sequence[Unit]], stages: Sequence[int], name: str) -> None:
    """A buffer that several stages have is fine if it is only read; a module that has one as part of its state may write it."""
    lines = [unit.line for stage in stages for unit in parts[stage] for use in unit.uses if name.startswith(f"{use}.")]
    if lines:
        raise StageUsageError(
            f"{name.rpartition('.')[0]!r} of {type(model).__name__} runs on stages {', '.join(map(str, stages))} (lines"
            f" {', '.join(map(str, lines))}), and its buffer {name!r}, which is part of its state, would be another on each:"
            " cut so that it runs on one stage, with boundaries="
        )


# The parts.


def _build_part(model: nn.Module, held: Iterable[str], copied: frozenset[str]) -> nn.Module:
    """A module of the model's class that holds only these of its modules and tensors, under their names."""
    part = _shell(model)
    copies: dict[int, Any] = {}  # so that what is shared within the part stays shared
    saved = set(model.state_dict())
    whole: set[str] = set()
    for name in sorted(held, key=lambda name: name.count(".")):
        above = name.split(".")[:-1]
        if not any(".".join(above[:count]) in whole for count in range(1, len(above) + 1)):
            whole.add(name)
    every = (model.named_modules, model.named_parameters, model.named_buffers)
    for name in [
        name for names in every for name, _ in names(remove_duplicate=False) if name in whole
    ]:  # the model's order
        *steps, leaf = name.split(".")
        owner, original = part, model
        for step in steps:
            original = original.get_submodule(step)
            known = dict(owner.named_children()).get(step)
            if known is None:
                known = _shell(original)
                owner.add_module(step, known)
            owner = known
        value = getattr(original, leaf)
        if any(known in copied for known, _ in _named(model, name)):
            value = copy.deepcopy(value, copies)
        if isinstance(value, nn.Module):
            owner.add_module(leaf, value)
        elif isinstance(value, nn.Parameter):
            owner.register_parameter(leaf, value)
        else:
            owner.register_buffer(leaf, value, persistent=name in saved)
    return part


def _shell(module: nn.Module) -> nn.Module:
    """A module of the same class with its plain attributes, and nothing of its parameters, buffers and modules."""
    shell: nn.Module = type(module).__new__(type(module))
    nn.Module.__init__(shell)
    for name, value in vars(module).items():
        if name == "training" or name not in vars(shell):
            object.__setattr__(shell, name, value)
    return shell
