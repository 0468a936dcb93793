"""What a unit of another stage would have returned: absent tensors, in the unit's own structure."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn

from .._compat import FakeTensor, is_own_attribute, unsaved
from ..exceptions import StageUsageError
from ._absent import Absence, look_alike, versions
from ._example import Effects, Example
from ._filling import Filling, Untold, Watched
from ._leaves import Given, contents, rebuilt, shown_by, structure, tensors_in, with_tensors
from ._needs import needing
from ._reached import DeepCopies, as_copy
from ._shadow import Attributes
from ._state import plain_in

_Content: TypeAlias = "tuple[Hashable, ...]"
"""What of an object may decide what a unit that is given it does."""


_NONE = Effects((), ())
_MOST = 4096
_FUNCTIONS = (types.FunctionType, types.BuiltinMethodType, functools.partial)


class Templates:
    """Results of units and of glue, by what they depend on. Mutable: each is run once for each look of its inputs.

    A unit is run on absent tensors, with absent parameters. One that decides by data what it computes cannot be; then its
    results look as they did in the example, with dims that follow those of its inputs.

    Args:
        absence: makes absent tensors.

    Attributes:
        forward: which one is under way.
    """

    def __init__(self, absence: Absence) -> None:
        self._absence = absence
        self._known: dict[Hashable, Known] = {}
        self._attributes: dict[str, Attributes] = {}
        self.forward = 0

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self._known)

    def known(
        self,
        name: str,
        module: nn.Module,
        call: Callable[..., Any],
        given: Given,
        example: Example | None = None,
        *,
        anew: bool = False,
    ) -> Known:
        """What a unit of another stage returns, and does; objects that it is given are filled as it would fill them.

        Args:
            name: of the unit.
            module: the unit.
            call: runs it.
            given: what it takes.
            example: if it decides by data: what it took and gave in the example.
            anew: whether it is run also where what it does is known, if it is given objects.
        """
        if anew and given.objects:  # nobody asks for it again: no need to know when it would be the same
            return self._make(name, call, given, example, compares=False)
        key = self._key((name, module.training), given, example)
        known = self._known.get(key)
        if known is None:
            return self._keep(key, self._make(name, call, given, example))
        if known.filling is not None:
            known.filling.again(given.objects, self._absence.like)
        return known

    def elsewhere(
        self, name: str, unit: nn.Module, shadow: nn.Module, given: Given, example: Example | None
    ) -> Known | None:
        """What stages that do not have a unit take it to return, and to do.

        Args:
            name: of the unit.
            unit: the unit.
            shadow: the unit as these stages have it.
            given: what it takes.
            example: see :meth:`known`.

        Returns:
            None where it is given objects that it might change, and that cannot be copied.
        """
        key = self._key((name, shadow.training), given, example)
        known = self._known.get(key)
        if known is None:
            if given.objects:
                absent = {id(one): self._absence.like(one) for one in shown_by((given.args, given.kwargs))}
                try:
                    given = Given(*_as_copies((given.args, dict(given.kwargs)), DeepCopies(absent)))
                except Exception:  # whatever their own code says
                    return None
            with self._attributes.setdefault(name, Attributes()).given(unit, shadow):
                known = self._keep(key, self._make(name, shadow, given, example))
        return known

    def operation(self, number: int, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """What an operation of glue gives: of absent tensors alone, it always looks the same.

        Raises:
            NeedsDataError: see :meth:`Absence.run`.
        """
        if not self._absence.gives_absent(func.__name__, args, kwargs):
            return self._absence.run(func, args, kwargs)
        given = Given(args, kwargs)
        if given.objects:
            return self._absence.run(func, args, kwargs)
        key = self._key((number, func.__name__), given, None)
        known = self._known.get(key)
        if known is None:
            before = versions(given.tensors)
            out = self._absence.run(func, args, kwargs)
            if versions(given.tensors) != before:  # it changes what it is given, to be done each time
                return out
            known = self._keep(key, Known(out))
        return known.result(self.forward)

    def _key(self, what: tuple[str, bool] | tuple[int, str], given: Given, example: Example | None) -> Hashable:
        """What a result depends on.

        Args:
            what: of a unit its name and whether it is in training, of an operation its number and name.
            given: what it takes.
            example: see :meth:`known`.
        """
        needs: Hashable = None
        if self._absence.tracks:
            needs = (torch.is_grad_enabled(), *[tensor.requires_grad for tensor in given.tensors])
        kind = self._absence.device.type
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        key: list[Hashable] = [what, example, autocast, torch.get_default_dtype(), needs, given.structure]
        for tensor in given.tensors:
            key += (
                tensor.shape,
                tensor.stride() if tensor.layout is torch.strided else None,
                tensor.dtype,
                tensor.layout,
            )
        if given.objects:
            key.append(_left_in(given))
        return tuple(key)

    def _keep(self, key: Hashable, known: Known) -> Known:
        if len(self._known) >= _MOST:  # a number among what units are given may be another each time
            self._known.clear()
        if known.is_told:
            self._known[key] = known
        return known

    def _make(
        self, name: str, call: Callable[..., Any], given: Given, example: Example | None, *, compares: bool = True
    ) -> Known:
        if example is not None:
            scaled, filling = example.scaled(name, given.tensors, self._absence)
            if filling is not None:
                filling.again(given.objects, self._absence.like)
            return Known(scaled, example.effects, filling, _left_in(given))
        absent = [self._absence.like(tensor) for tensor in given.tensors]
        following = iter(absent)
        args, kwargs = with_tensors(given.args, following), with_tensors(dict(given.kwargs), following)
        watched = called = Watched(given.objects)
        if any(isinstance(one, _FUNCTIONS) and next(shown_by(one), None) is not None for one in given.objects):
            args, kwargs = self._remembering((args, kwargs))
            called = Watched(Given(args, kwargs).objects)  # these have variables of their own
        before, content = versions(absent), contents((args, kwargs))
        # What autocast keeps of a weight that is here would be absent, and be given to others.
        keeps = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)
        try:
            with (
                torch.set_grad_enabled(self._absence.tracks and torch.is_grad_enabled()),
                self._absence.mode,
                unsaved(),
            ):
                result = call(*args, **kwargs)
        finally:
            torch.set_autocast_cache_enabled(keeps)
        check_content(name, content, result)
        effects = Effects.of(absent, before, list(tensors_in(result)))
        try:
            if called is not watched and watched.places() != called.places():
                raise StageUsageError(
                    f"unit {name!r} is given a function that sets a variable around it (nonlocal), which other stages do not see:"
                    " let it append to a list instead, or return what it makes"
                )
            filling = watched.filling(self._absence.like) if compares else None
            return Known(result, effects, filling, _left_in(given) if compares else ())
        except Untold:
            return Known(result, effects, None, _left_in(given), is_told=False)

    def _remembering(self, value: Any) -> Any:
        """The same with functions that remember absent tensors."""
        if not isinstance(value, _FUNCTIONS):
            return rebuilt(value, self._remembering)
        return as_copy(value, {id(one): self._absence.like(one) for one in shown_by(value)}, {})


class Known:
    """One result. Mutable: what glue changed in place is made anew.

    Attributes:
        effects: what else the call does.
        filling: what it puts into objects that it is given.
        is_told: whether that is all that it does to them.
        attributes: names of what it puts into attributes of the tensors.
    """

    def __init__(
        self,
        result: Any,
        effects: Effects = _NONE,
        filling: Filling | None = None,
        left: Sequence[_Content] = (),
        *,
        is_told: bool = True,
    ) -> None:
        self.effects = effects
        self.filling = filling
        self.is_told = is_told
        self._left = left
        leaves: list[torch.Tensor] = []
        self._structure = structure(result, leaves, [])
        self.attributes = [name for leaf in leaves for name in vars(leaf) if is_own_attribute(name)]
        self._needs = [leaf.requires_grad for leaf in leaves]
        self._kept = [leaf.detach() for leaf in leaves]
        self._leaves = [self._leaf(number) if self._needs[number] else leaf for number, leaf in enumerate(leaves)]
        self._as_made = self._now()
        self._forward: int | None = None
        self._is_one = isinstance(result, torch.Tensor)
        self._result = with_tensors(result, iter(self._leaves))

    def result(self, forward: int | None = None) -> Any:
        """It, in containers of its own; with tensors of its own as well, or with those of the forward before.

        Args:
            forward: which one is under way. In one, tensors of two calls are not the same, and those that were changed, or have
                got attributes, do not come again.
        """
        now = self._now()
        if forward is None or forward == self._forward or now != self._as_made:
            for number in range(len(self._leaves)):
                self._leaves[number] = self._leaf(number)
            self._as_made = self._now()
        self._forward = forward
        return self._leaves[0] if self._is_one else with_tensors(self._result, iter(self._leaves), anew=True)

    def _now(self) -> list[int]:
        """What of the tensors is another when glue has changed them, or given them attributes."""
        return [
            (0 if leaf.is_inference() else leaf._version) + len(vars(leaf)) + leaf.requires_grad
            for leaf in self._leaves
        ]

    def _leaf(self, number: int) -> torch.Tensor:
        kept = self._kept[number]
        if isinstance(kept, FakeTensor) and kept.layout is torch.strided:
            leaf = look_alike(kept, kept.fake_mode, kept.device)
        else:
            leaf = torch.empty_like(kept)
        return needing(leaf) if self._needs[number] else leaf

    def check_left(self, name: str, given: Given, *, by_data: bool, shapes: bool) -> None:
        """A unit really has left in objects what stages that do not have it find there.

        Args:
            name: of the unit.
            given: what it took.
            by_data: whether it decides by data, so that nobody may look at plain values that it put there.
            shapes: whether it matters what shapes there are.

        Raises:
            StageUsageError: it has not.
        """

        def tensors(content: _Content) -> list[Hashable]:
            found = (one for one in content if isinstance(one, tuple) and len(one) == 3)
            return [one if shapes else one[::2] for one in found]

        now = _left_in(given)
        if now == self._left or (by_data and list(map(tensors, now)) == list(map(tensors, self._left))):
            return
        kinds = " or ".join(sorted({type(one).__name__ for one in given.objects}))
        raise StageUsageError(
            f"unit {name!r} leaves something else in the {kinds} that it is given than in the example or before,"
            " and other stages do not see it: return it as a tensor"
        )

    def check(self, name: str, result: Any, *, needs: bool, shapes: bool) -> None:
        """What a unit gives really is what stages that do not have it take it to give, wherever Python may look at that.

        Args:
            name: of the unit.
            result: what it gave.
            needs: whether it matters which tensors need a gradient.
            shapes: whether it matters what shapes they have.

        Raises:
            StageUsageError: it is not.
        """
        if self._is_one and not (needs or shapes) and isinstance(result, torch.Tensor):
            return
        leaves: list[torch.Tensor] = []
        if structure(result, leaves, []) != self._structure:
            raise StageUsageError(
                f"unit {name!r} gives Python another number, or structure, than in the example or before, and other stages do not"
                " see it: return a tensor in its place"
            )
        for leaf, kept, needed in zip(leaves, self._kept, self._needs, strict=True):
            if shapes and leaf.shape != kept.shape:
                raise StageUsageError(
                    f"unit {name!r} gives a tensor of shape {tuple(leaf.shape)}, which stages that do not have it take to be of"
                    f" shape {tuple(kept.shape)}, and the forward asks for shapes: what is no size of its inputs decides it, such"
                    " as data or an attribute; make the module that asks a unit (units=)"
                )
            if needs and leaf.requires_grad != needed:
                raise StageUsageError(
                    f"unit {name!r} gives a tensor that {'needs' if leaf.requires_grad else 'does not need'} a gradient, which"
                    " stages that do not have it cannot know, and the forward asks for that: freeze and unfreeze parameters"
                    " before the model is split"
                )


def check_content(name: str, before: Sequence[tuple[Any, list[Any]]], result: Any) -> None:
    """A unit does not change the containers that it is given: other stages would not see it, unless it returns them.

    Args:
        name: of the unit.
        before: the containers, and what was in them before the call.
        result: what it returned.

    Raises:
        StageUsageError: it has.
    """
    returned = {id(container) for container, _ in contents(result)}
    for container, content in before:
        if id(container) not in returned and contents(container)[0][1] != content:
            raise StageUsageError(
                f"unit {name!r} changes a {type(container).__name__} that it is given, which other stages do not see: return it,"
                " or make the module that holds both a unit (units=)"
            )


def _as_copies(value: Any, copies: DeepCopies) -> Any:
    """Arguments of a unit with copies of all that it might change, also in what functions remember."""
    if isinstance(value, _FUNCTIONS):
        return as_copy(value, copies, {})
    new = rebuilt(value, lambda one: _as_copies(one, copies))
    return copies.get(id(value), value) if new is value else new


def _left_in(given: Given) -> tuple[_Content, ...]:
    return tuple(tuple(_kept_in(one)) for one in given.objects)


def _kept_in(value: Any) -> Iterator[Hashable]:
    """What of an object may decide what a unit that is given it does."""
    if isinstance(value, nn.Module | type):
        yield value
    elif isinstance(value, types.BuiltinFunctionType):  # also a method, whose object may hold a microbatch's tensors
        if isinstance(value.__self__, types.ModuleType | type | None):
            yield value
        else:
            yield value.__name__
            yield from _kept_in(value.__self__)
    elif isinstance(value, types.FunctionType):
        yield value.__code__  # it may be made anew for each call
        cells = [cell.cell_contents for cell in value.__closure__ or () if cell != types.CellType()]
        yield from _kept_in([*cells, *(value.__defaults__ or ())])
    elif isinstance(value, functools.partial):
        yield from (*_kept_in(value.func), *_kept_in([*value.args, *value.keywords.items()]))
    else:
        for name, _, _, one in plain_in([value], "", set()):
            yield (name, one.shape, one.dtype) if isinstance(one, torch.Tensor) else (name, one)
