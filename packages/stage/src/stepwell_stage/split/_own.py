"""A model's structure with some of its parameters: what one stage holds.

The structure is a copy, all of it; parameters and buffers are the model's own where the stage holds them. The others are
absent, and only there while the forward runs, as the units of other stages are: outside of it they are None, so that
optimizers, state dicts, wrappers and ``to`` never meet them.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from .._compat import pop_function_mode, push_function_mode
from ..exceptions import StageUsageError
from ._absent import Absence
from ._glue import Glue
from ._reached import reach_copies

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
        shadows: of units that are there, by name, what other stages have in their place.
        shared: where a tensor is that is there, and where the same one is in what is there only while the forward runs: for who
            wraps or ties it may put another in its place.
    """

    def __init__(
        self,
        root: nn.Module,
        named: dict[str, torch.Tensor],
        hidden: Sequence[tuple[dict[str, Any], dict[str, Any]]],
        foreign: Sequence[nn.Module],
        units: Sequence[nn.Module],
        shadows: Mapping[str, nn.Module],
        shared: Sequence[tuple[dict[str, Any], str, dict[str, Any], str]],
    ) -> None:
        self.glue: Glue | None = None
        self.named = named
        self.units = units
        self.shadows = shadows
        self._shared = shared
        self.root = root
        self._foreign = (*foreign, *shadows.values())
        self._hidden = hidden
        self._training = root.training
        vars(root)["train"] = functools.update_wrapper(functools.partial(self._train, root.train), root.train)
        self.hide()

    def show(self) -> None:
        """Put it there."""
        for place, what in self._hidden:
            place.update(what)

    def hide(self) -> None:
        """Take away what belongs to others."""
        for place, what in self._hidden:
            for name in what:
                place[name] = None

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        """Meanwhile what is absent is there."""
        self.show()
        try:
            yield
        finally:
            self.hide()

    def _train(self, plain: Callable[..., nn.Module], *args: Any, **kwargs: Any) -> nn.Module:
        """The model's own way to go into training or evaluation, which may name any of its modules."""
        if self.glue is not None:
            return plain(*args, **kwargs)
        with self.shown():
            model = plain(*args, **kwargs)
            for name, shadow in self.shadows.items():
                for module, other in zip(self.root.get_submodule(name).modules(), shadow.modules(), strict=True):
                    other.training = module.training
        self._training = self.root.training
        return model

    def running(self, glue: Glue) -> _Running:
        """Likewise; and units ask ``glue``."""
        if self._training != self.root.training:
            self._training = self.root.training
            for unit in self._foreign:
                unit.train(self._training)
        for source, key, place, name in self._shared:
            place[name] = source[key]
        return _Running(self, glue)


class _Running:
    """What :meth:`Control.running` gives: no generator, for it is entered in every forward."""

    __slots__ = ("_control", "_glue")

    def __init__(self, control: Control, glue: Glue) -> None:
        self._control = control
        self._glue = glue

    def __enter__(self) -> None:
        self._control.show()
        self._control.glue = self._glue
        push_function_mode(self._glue)

    def __exit__(self, *error: object) -> None:
        pop_function_mode()
        self._control.glue = None
        self._control.hide()


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
    absent = {id(one) for identity, one in memo.items() if identity not in kept}
    inside = {name: unit for name, unit in units.items() if name in own}
    shadow_memo = {identity: absence.parameter(one) if identity in kept else one for identity, one in memo.items()}
    # Copying these takes as long as all else: a module has a dozen.
    empty = [
        id(table) for one in model.modules() for table in vars(one).values() if type(table) is OrderedDict and not table
    ]
    for known in (memo, shadow_memo):
        known.update((identity, OrderedDict()) for identity in empty)
    try:
        new = copy.deepcopy(model, memo)
        shadows = copy.deepcopy(inside, shadow_memo)  # own units as they are on stages that do not have them
    except Exception as error:
        raise StageUsageError(
            f"{type(model).__name__} cannot be cut, for its structure cannot be copied: {error}; wrap parts in DDP or FSDP2,"
            " compile or otherwise change them after the split, on the stages' modules"
        ) from error
    reach_copies(new.modules(), memo)
    for shadow in shadows.values():
        reach_copies(shadow.modules(), {**memo, **shadow_memo})
    foreign = [memo[id(unit)] for name, unit in units.items() if name not in own]
    absent |= _forget_meta(new, foreign, absence)
    named = dict(named_tensors(new))
    away = absent.union(map(id, foreign))
    hidden = []
    for module in _outside(new, set(map(id, foreign))):  # what is in a foreign unit is away with it
        for place in (module._parameters, module._buffers, module._modules):
            mine = {name: value for name, value in place.items() if id(value) in away}
            if mine:
                hidden.append((place, mine))
    control = Control(
        new, named, hidden, foreign, [memo[id(unit)] for unit in units.values()], shadows, _shared(new, foreign, absent)
    )
    for name, unit in units.items():
        _watch(memo[id(unit)], control, name)
    return new, control


def _shared(
    root: nn.Module, foreign: Sequence[nn.Module], absent: set[int]
) -> list[tuple[dict[str, Any], str, dict[str, Any], str]]:
    """Places of one tensor that is there, of which one is outside of foreign units and the other within."""
    outside = list(_outside(root, set(map(id, foreign))))
    every = ((place, name, one) for module in outside for place, name, one in _places(module))
    here = {id(one): (place, name) for place, name, one in every if id(one) not in absent}
    known = set(map(id, outside))
    inside = [module for unit in foreign for module in unit.modules() if id(module) not in known]
    return [
        (*here[id(one)], place, name) for module in inside for place, name, one in _places(module) if id(one) in here
    ]


def _places(module: nn.Module) -> Iterator[tuple[dict[str, Any], str, torch.Tensor]]:
    places: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
    for place in places:
        yield from ((place, name, one) for name, one in place.items() if one is not None)


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


def _watch(unit: nn.Module, control: Control, name: str) -> None:
    """Let a unit ask how it is to be called, also where its forward is called by its name; its class stays what it is.

    Only a class that has a ``__call__`` of its own is another one then, for Python takes that from the class.
    """
    inside = vars(unit)
    inside[_OWN] = (control, name)
    inside["forward"] = functools.partial(_ask, unit, unit.forward)
    if type(unit).__call__ is not nn.Module.__call__:
        unit.__class__ = _unit_class(type(unit))  # type: ignore[arg-type]
        return
    inside["_compiled_call_impl"] = functools.partial(_ask, unit, unit._call_impl)
    inside["compile"] = functools.partial(_compile, unit)
    for method in ("forward", "compile"):
        functools.update_wrapper(inside[method], getattr(type(unit), method))


def _ask(unit: nn.Module, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    if torch.compiler.is_compiling():  # what compiles a unit is within it
        return method(*args, **kwargs)
    control, name = vars(unit)[_OWN]
    if control.glue is None or control.glue.inside:
        return method(*args, **kwargs)
    return control.glue.unit(name, unit, method, args, kwargs)


def _compile(unit: nn.Module, *args: Any, **kwargs: Any) -> None:
    """What ``compile`` of a module does, within what is asked."""
    vars(unit)["_compiled_call_impl"] = functools.partial(_ask, unit, torch.compile(unit._call_impl, *args, **kwargs))


@functools.cache
def _unit_class(kind: type[nn.Module]) -> type[nn.Module]:
    """The same class, whose instances ask how they are to be called."""

    @functools.wraps(kind.__call__)
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return _ask(self, functools.partial(kind.__call__, self), *args, **kwargs)

    return type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__, "__doc__": kind.__doc__})


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(tensor.detach().clone(), requires_grad=tensor.requires_grad)
    return tensor.detach().clone()
