"""Which parameters and buffers each stage holds."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import attrs
from torch import nn

from ..exceptions import StageUsageError
from ._demand import StagePlan
from ._own import named_tensors


@attrs.frozen
class Holding:
    """What each stage holds.

    Attributes:
        units: the units in its module: those that it computes, and those of which its glue reads a parameter.
        names: its parameters and buffers, by all names that they have in its module.
        tied: what several stages hold, by its first name: stage, and name there.
    """

    units: tuple[frozenset[str], ...]
    names: tuple[frozenset[str], ...]
    tied: Mapping[str, tuple[tuple[int, str], ...]]


def hold(
    model: nn.Module,
    units: Mapping[str, nn.Module],
    parts: Sequence[Iterable[str]],
    plans: Sequence[StagePlan],
    rewritten: Collection[str],
) -> Holding:
    """Decide who holds what. What nobody needs is on the last stage, so that nothing is lost.

    Args:
        model: the model.
        units: its units.
        parts: those of each stage.
        plans: what each stage's glue reads.
        rewritten: what units change of what they have.

    Raises:
        StageUsageError: a unit that has state beside its parameters is called on several stages.
    """
    own = of_units(model, units)
    every = list(named_tensors(model))
    beside = {name for name, _ in model.named_buffers(remove_duplicate=False) if name not in own}
    wanted = []
    for part, plan in zip(parts, plans, strict=True):
        mine = set(part)
        wanted.append({name for name, unit in own.items() if unit in mine} | set(plan.held) | beside)
    taken = {id(tensor) for name, tensor in every if any(name in names for names in wanted)}
    wanted[-1] |= {name for name, tensor in every if id(tensor) not in taken}
    present = [
        frozenset((*part, *(own[name] for name in plan.held if name in own)))
        for part, plan in zip(parts, plans, strict=True)
    ]
    held = []
    for here, names in zip(present, wanted, strict=True):
        kept = {id(tensor) for name, tensor in every if name in names}
        seen = (name for name, tensor in every if id(tensor) in kept and (name not in own or own[name] in here))
        held.append(frozenset(seen))
    return Holding(tuple(present), tuple(held), _tied(model, own, held, rewritten))


def of_units(model: nn.Module, units: Mapping[str, nn.Module]) -> dict[str, str]:
    """The unit of each parameter and buffer that is in one, by all its names there."""
    names = {id(module): name for name, module in units.items()}
    own: dict[str, str] = {}
    for path, module in model.named_modules(remove_duplicate=False):  # what holds another first
        if id(module) in names:
            for name, _ in named_tensors(module):
                own.setdefault(f"{path}.{name}", names[id(module)])
    return own


def constants(model: nn.Module, own: Mapping[str, str]) -> set[str]:
    """Buffers beside the units that have a value: every stage has them, for glue."""
    buffers = model.named_buffers(remove_duplicate=False)
    return {name for name, tensor in buffers if name not in own and not tensor.is_meta}


def _tied(
    model: nn.Module, own: Mapping[str, str], held: Sequence[frozenset[str]], rewritten: Collection[str]
) -> dict[str, tuple[tuple[int, str], ...]]:
    saved = set(model.state_dict(keep_vars=True))
    tensors = dict(named_tensors(model))
    groups: dict[int, dict[tuple[int, str], None]] = {}
    for stage, names in enumerate(held):
        for name in tensors:
            if name in names:
                groups.setdefault(id(tensors[name]), {})[stage, name] = None
    tied = {}
    for holders in groups.values():
        stages = sorted({stage for stage, _ in holders})
        first = next(iter(holders))[1]
        is_parameter = isinstance(tensors[first], nn.Parameter)
        is_changed = any(name in rewritten for _, name in holders)
        if len(stages) < 2 or not (is_parameter or first in saved or is_changed):
            continue
        if first in own and not is_parameter:
            raise StageUsageError(
                f"the buffer {first!r} of unit {own[first]!r}, which is part of its state, is needed on stages"
                f" {', '.join(map(str, stages))}, and would be another on each: put the units that have it on one stage, with a"
                " mapping from names of units to stages, and do not read it outside of them"
            )
        if tensors[first]._backward_hooks or getattr(tensors[first], "_post_accumulate_grad_hooks", None):
            raise StageUsageError(
                f"{first!r} is used on stages {', '.join(map(str, stages))}, each of which has a part of its gradient, so a"
                " hook on it would see no whole one: change the gradient after the step, before the optimizer's"
            )
        tied[first] = tuple(holders)
    return tied
