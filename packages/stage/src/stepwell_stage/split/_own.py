"""A model's structure with some of its parameters: what one stage holds.

The structure is a copy, all of it; parameters and buffers are the model's own where the stage holds them. The others are absent, and
only there while the forward runs: outside of it they are None, so that optimizers, state dicts and ``to`` never meet them.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ..exceptions import StageUsageError
from ._absent import Absence
from ._glue import Glue

_OWN = "_stepwell_split"


class Control:
    """What the units of one copy have in common. Mutable: the forward under way.

    Args:
        named: every parameter and buffer of the copy, absent or not, by name.
        absent: the absent parameters and buffers of each module.
    """

    def __init__(
        self, named: dict[str, torch.Tensor], absent: list[tuple[dict[str, Any], dict[str, torch.Tensor]]]
    ) -> None:
        self.glue: Glue | None = None
        self.named = named
        self._absent = absent
        self._none = [(place, dict.fromkeys(tensors)) for place, tensors in absent]

    @contextlib.contextmanager
    def running(self, glue: Glue) -> Iterator[None]:
        """Meanwhile units ask ``glue``, and absent parameters are there."""
        for place, tensors in self._absent:
            place.update(tensors)
        self.glue = glue
        try:
            with glue:
                yield
        finally:
            self.glue = None
            for place, nothing in self._none:
                place.update(nothing)


def copy_structure(
    model: nn.Module, units: Mapping[str, nn.Module], held: Collection[str], copied: Collection[str], absence: Absence
) -> tuple[nn.Module, Control]:
    """The model's structure with these parameters and buffers.

    Args:
        model: the model. It is left as it is.
        units: its units by name.
        held: names of parameters and buffers that the copy holds.
        copied: of these, those of which it gets a copy of its own.
        absence: makes the others.

    Raises:
        StageUsageError: something in the model cannot be copied.
    """
    memo: dict[int, Any] = {}
    kept: set[int] = set()
    for name, tensor in named_tensors(model):
        if name in held:
            kept.add(id(tensor))
    for name, tensor in named_tensors(model):
        if id(tensor) in memo:
            continue
        if id(tensor) not in kept:
            memo[id(tensor)] = absence.parameter(tensor)
        elif name in copied:
            memo[id(tensor)] = _copied(tensor)
        else:
            memo[id(tensor)] = tensor
    memo_before = dict(memo)
    try:
        new = copy.deepcopy(model, memo)
    except Exception as error:
        raise StageUsageError(
            f"{type(model).__name__} cannot be cut, for its structure cannot be copied: {error}; wrap parts in DDP or FSDP2, compile"
            " or otherwise change them after the split, on the stages' modules"
        ) from error
    absent = {id(tensor) for key, tensor in memo_before.items() if key not in kept}
    named = dict(named_tensors(new))
    hidden = []
    for module in new.modules():
        for place in (module._parameters, module._buffers):
            mine = {name: tensor for name, tensor in place.items() if tensor is not None and id(tensor) in absent}
            if mine:
                hidden.append((place, mine))
                place.update(dict.fromkeys(mine))
    control = Control(named, hidden)
    for name, unit in units.items():
        own = memo[id(unit)]
        vars(own)[_OWN] = (control, name)
        own.__class__ = _unit_class(own.__class__)
    return new, control


def named_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers under all their names."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


@functools.cache
def _unit_class(kind: type[nn.Module]) -> type[nn.Module]:
    """The same class, whose instances ask how they are to be called."""

    def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        control, name = vars(self)[_OWN]
        call = functools.partial(kind.__call__, self)
        if control.glue is None or control.glue.inside:
            return call(*args, **kwargs)
        return control.glue.unit(name, self, call, args, kwargs)

    return type(kind.__name__, (kind,), {"__call__": __call__, "__module__": kind.__module__, "__doc__": kind.__doc__})


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(tensor.detach().clone(), requires_grad=tensor.requires_grad)
    return tensor.detach().clone()
