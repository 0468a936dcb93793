"""A model's structure with some of its parameters: what one stage holds.

The structure is a copy, all of it; parameters and buffers are the model's own where the stage holds them. The others are
absent, and only there while the forward runs, as the units of other stages are: outside of it they are None, so that
optimizers, state dicts, wrappers and ``to`` never meet them.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
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
        root: the copy.
        named: every parameter and buffer of the copy, absent or not, by name.
        hidden: what is there only while the forward runs: places (parameters, buffers or children of a module) and what goes
        there.
        foreign: units of other stages.
        units: all units of the copy.
    """

    def __init__(
        self,
        root: nn.Module,
        named: dict[str, torch.Tensor],
        hidden: Sequence[tuple[dict[str, Any], dict[str, Any]]],
        foreign: Sequence[nn.Module],
        units: Sequence[nn.Module],
    ) -> None:
        self.glue: Glue | None = None
        self.named = named
        self.units = units
        self._root = root
        self._foreign = foreign
        self._hidden = hidden
        self._nothing = [(place, dict.fromkeys(what)) for place, what in hidden]
        self._training = root.training
        self.hide()

    def hide(self) -> None:
        """Take away what belongs to others."""
        for place, nothing in self._nothing:
            place.update(nothing)

    @contextlib.contextmanager
    def running(self, glue: Glue) -> Iterator[None]:
        """Meanwhile units ask ``glue``, and what is absent is there."""
        if self._training != self._root.training:
            self._training = self._root.training
            for unit in self._foreign:
                unit.train(self._training)
        for place, what in self._hidden:
            place.update(what)
        self.glue = glue
        try:
            with glue:
                yield
        finally:
            self.glue = None
            self.hide()


def copy_structure(
    model: nn.Module,
    units: Mapping[str, nn.Module],
    own: Collection[str],
    held: Collection[str],
    copied: Collection[str],
    absence: Absence,
) -> tuple[nn.Module, Control]:
    """The model's structure with these parameters and buffers.

    Args:
        model: the model. It is left as it is.
        units: its units by name.
        own: names of those that are there also when the forward does not run.
        held: names of parameters and buffers that the copy holds.
        copied: of these, those of which it gets a copy of its own.
        absence: makes the others.

    Raises:
        StageUsageError: something in the model cannot be copied.
    """
    every = list(named_tensors(model))
    kept = {id(tensor) for name, tensor in every if name in held}
    doubled = {id(tensor) for name, tensor in every if name in copied}
    memo: dict[int, Any] = {}
    for _, tensor in every:
        if id(tensor) in memo:
            continue
        if id(tensor) not in kept:
            memo[id(tensor)] = absence.parameter(tensor)
        else:
            memo[id(tensor)] = _copied(tensor) if id(tensor) in doubled else tensor
    memo_before = dict(memo)
    try:
        new = copy.deepcopy(model, memo)
    except Exception as error:
        raise StageUsageError(
            f"{type(model).__name__} cannot be cut, for its structure cannot be copied: {error}; wrap parts in DDP or FSDP2,"
            " compile or otherwise change them after the split, on the stages' modules"
        ) from error
    foreign = [memo[id(unit)] for name, unit in units.items() if name not in own]
    absent = {id(tensor) for key, tensor in memo_before.items() if key not in kept}
    absent |= _forget_meta(new, foreign, absence)
    named = dict(named_tensors(new))
    away = absent.union(map(id, foreign))
    hidden = []
    for module in new.modules():
        for place in (module._parameters, module._buffers, module._modules):
            mine = {name: value for name, value in place.items() if id(value) in away}
            if mine:
                hidden.append((place, mine))
    control = Control(new, named, hidden, foreign, [memo[id(unit)] for unit in units.values()])
    for name, unit in units.items():
        mine = memo[id(unit)]
        vars(mine)[_OWN] = (control, name)
        mine.__class__ = _unit_class(mine.__class__)
    return new, control


def _forget_meta(root: nn.Module, foreign: Sequence[nn.Module], absence: Absence) -> set[int]:
    """Make absent what foreign units have on the meta device: it is held under another name, and gets its values only there.

    Returns:
        The absent tensors, by identity.
    """
    here = {id(module) for module in _outside(root, set(map(id, foreign)))}
    made: dict[int, torch.Tensor] = {}
    for module in (module for unit in foreign for module in unit.modules() if id(module) not in here):
        places: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for place in places:
            for name, tensor in place.items():
                if tensor is not None and tensor.is_meta:
                    place[name] = made.setdefault(id(tensor), absence.parameter(tensor))
    return set(map(id, made.values()))


def _outside(module: nn.Module, units: set[int]) -> Iterator[nn.Module]:
    """What is reached without going into these units."""
    if id(module) not in units:
        yield module
        for child in module.children():
            yield from _outside(child, units)


def named_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers under all their names."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


@functools.cache
def _unit_class(kind: type[nn.Module]) -> type[nn.Module]:
    """The same class, whose instances ask how they are to be called, also where their forward is called by its name."""

    def asking(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():  # what compiles a unit is within it
                return method(self, *args, **kwargs)
            control, name = vars(self)[_OWN]
            if control.glue is None or control.glue.inside:
                return method(self, *args, **kwargs)
            return control.glue.unit(name, self, functools.partial(method, self), args, kwargs)

        return call

    methods = {"__call__": asking(kind.__call__), "forward": asking(kind.forward)}
    return type(kind.__name__, (kind,), {**methods, "__module__": kind.__module__, "__doc__": kind.__doc__})


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(tensor.detach().clone(), requires_grad=tensor.requires_grad)
    return tensor.detach().clone()
