"""One forward of a stage.

Counts what glue does, takes what comes from elsewhere in place of computing it, and keeps what is sent.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from .._compat import FakeTensor, pop_function_mode, push_function_mode
from ..exceptions import StageUsageError
from ._absent import BY_SHAPE, HOOKS, Absence, NeedsDataError
from ._example import Example
from ._frames import is_asked_by_model, source_line
from ._leaves import Given, tensors_in, with_tensors
from ._questions import FOLLOWED, MEASURES, UNTOLD
from ._templates import Templates
from ._ways import Route

# What every tensor has; reading it computes nothing. The others give tensors.
_TENSOR_ATTRIBUTES = frozenset(("T", "mT", "H", "mH", "data", "grad", "real", "imag"))


# Python puts a comparison to its right side first, the other way round, if the class of that is below the left one's, as an
# absent tensor's is. So both are one operation, for either side may be absent.
_MIRRORED = {"gt": "lt", "ge": "le"}


class DoneError(BaseException):
    """Nothing that a stage must compute or send is left. Not an ``Exception``, which the model's own code might catch."""


class Glue(TorchFunctionMode):
    """Sees every call of a unit and every operation between them, and numbers those that give tensors.

    Numbers are the same on every stage, for all run the same code. Within units nothing is counted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.inside = False  # of a unit

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """One operation."""
        name = func.__name__
        if name in ("__get__", "__set__"):
            attribute: str = func.__self__.__name__  # type: ignore[attr-defined]
            if name == "__get__" and (attribute in FOLLOWED or attribute in UNTOLD):
                self.asked(attribute, args[0])
            elif attribute in MEASURES:
                self.measured(args[0])
            if attribute not in _TENSOR_ATTRIBUTES or (name == "__set__" and attribute != "data"):
                return func(*args, **(kwargs or {}))
        elif name in UNTOLD:
            for tensor in tensors_in(args):
                self.asked(name, tensor)
        elif name in MEASURES or name in BY_SHAPE:
            for tensor in tensors_in(args[:1]):
                self.measured(tensor)
        return self.operation(func, _MIRRORED.get(name, name), args, kwargs or {})

    def operation(self, func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """One operation of glue."""
        raise NotImplementedError

    def asked(self, what: str, tensor: torch.Tensor) -> None:
        """Python asks for something of a tensor that is neither its data nor its shape.

        Raises:
            StageUsageError: it is not here.
        """
        raise NotImplementedError

    def measured(self, tensor: torch.Tensor) -> None:
        """Python asks for the shape of a tensor."""

    def unit(
        self, name: str, module: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """One call of a unit. What happens meanwhile is not seen."""
        seeing = pop_function_mode()
        if seeing is not self:
            if seeing is not None:
                push_function_mode(seeing)
            raise StageUsageError(
                f"unit {name!r} is called under a torch function mode that the model's own forward entered, so its operations"
                " cannot be told from glue: enter the mode around the step instead"
            )
        self.inside = True
        try:
            return self.unit_call(name, module, call, args, kwargs)
        finally:
            push_function_mode(self)
            self.inside = False

    def unit_call(
        self, name: str, module: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """What :meth:`unit` does while nothing is seen."""
        raise NotImplementedError


class StageGlue(Glue):
    """Glue as one stage runs it, for one microbatch after the other. Mutable: the microbatch's.

    Args:
        examples: of each way, for units that decide by data, by the number of the call: what it took and gave.
        outputs: how many the stage has.
        absence: makes absent tensors.
        templates: what units of other stages return.
        shadows: of the stage's own units, what other stages have in their place.
        measures: whether the shapes of what units make matter to anybody.

    Attributes:
        route: of the ways, those that it may still be.
        unit_seconds: how long its own units took.
    """

    def __init__(
        self,
        examples: Sequence[Mapping[int, Example]],
        outputs: int,
        absence: Absence,
        templates: Templates,
        shadows: Mapping[str, nn.Module],
        *,
        measures: bool,
    ) -> None:
        super().__init__()
        self.route: Route
        self._sent: list[torch.Tensor | None]
        self.unit_seconds = 0.0
        self._received: Sequence[torch.Tensor]
        self._examples = examples
        self._outputs = outputs
        self._absence = absence
        self._templates = templates
        self._shadows = shadows
        self._measures = measures

    def begin(self, route: Route, received: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """Another microbatch.

        Args:
            route: what the stage does.
            received: the stage's inputs.

        Returns:
            The stage's outputs, as they are made.
        """
        self.count = 0
        self._templates.forward += 1
        self.route = route
        self._sent = [None] * self._outputs
        self.unit_seconds = 0.0
        self._received = received
        return self._sent

    def end(self) -> None:
        """Let go of the microbatch's tensors."""
        self._sent, self._received = [], ()

    def operation(self, func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """See :meth:`Glue.operation`."""
        number, route = self.count, self.route
        if name in HOOKS and not self._absence.is_absent(args[0]):
            self._check_hook(name)
            if any(args[0] is one for one in self._received):
                return RemovableHandle(OrderedDict())  # on the stage that made it
        if number == route.parts_at:
            route = route.branches.get(name, route)
        taken = route.part.takes.get(number)
        if taken is not None and route.names[number] != name:
            taken = None
        if taken is not None and len(taken) == 1 and 0 in taken and number in route.singles:
            out: Any = self._received[taken[0]]
        else:
            try:
                out = self._templates.operation(number, func, args, kwargs)
            except NeedsDataError as error:
                raise StageUsageError(
                    f"{error.what} looks at a value that this stage does not have: no example looked at it there; split with an"
                    " example for this way too (ways=)"
                ) from error
            if taken is not None:
                out = self._with(out, taken)
        if isinstance(out, torch.Tensor) or next(tensors_in(out), None) is not None:
            self._made(self._follow(name), name, out)
        return out

    def asked(self, what: str, tensor: torch.Tensor) -> None:
        """See :meth:`Glue.asked`."""
        is_absent = self._absence.is_absent(tensor)
        if is_absent and what in FOLLOWED and not self._absence.tracks and not isinstance(tensor, nn.Parameter):
            raise StageUsageError(
                f"{source_line(what)} asks a value that this stage does not have, and no example asked there: split with an"
                " example for this way too (ways=)"
            )
        if is_absent or any(tensor is one for one in self._received):
            check_told(what, tensor)

    def _check_hook(self, name: str) -> None:
        """Refuse what no example showed: several stages may have a part of this gradient, or the one that has it has stopped."""
        if self.count not in self.route.hooked:
            raise StageUsageError(
                f"{source_line(name)} asks for a gradient where no example did: split with an example for this way too (ways=),"
                " and with gradients enabled; or make the module that does it a unit (units=)"
            )

    def unit_call(
        self, name: str, module: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """See :meth:`Glue.unit`."""
        number, route, given = self.count, self._follow(name), Given(args, kwargs)
        example = self._examples[route.ways[0]].get(number)
        if number in route.part.owned:
            if any(map(self._absence.is_absent, given.tensors)):
                raise StageUsageError(
                    f"unit {name!r} is given a value that this stage does not have: the forward went another way than with the"
                    " example, or a hook took the value out of a unit of another stage; split with an example for this way too"
                    " (ways=)"
                )
            known = self._templates.elsewhere(name, module, self._shadows[name], given, example)
            start = time.perf_counter()
            out = call(*args, **kwargs)
            self.unit_seconds += time.perf_counter() - start
            if type(out) is FakeTensor:
                raise StageUsageError(
                    f"unit {name!r} is given all that it takes, and gives a tensor without data: it finds a table that was left"
                    " in a class, or in what functools.lru_cache remembers, when a model was split; run the model once before"
                    " that, in a new process"
                )
            if known is not None:
                known.check(name, out, needs=self._absence.tracks, shapes=self._measures)
                if given.objects:
                    known.check_left(name, given, by_data=example is not None, shapes=self._measures)
        else:
            out = self._templates.known(name, module, call, given, example).result(self._templates.forward)
            taken = route.part.takes.get(number)
            if taken is not None:
                out = self._with(out, taken)
        self._made(route, name, out)
        return out

    def _with(self, out: Any, taken: Mapping[int, int]) -> Any:
        if isinstance(out, torch.Tensor):
            return self._received[taken[0]]

        def tensors() -> Iterator[torch.Tensor]:
            for index, tensor in enumerate(tensors_in(out)):
                yield self._received[taken[index]] if index in taken else tensor

        return with_tensors(out, tensors())

    def _made(self, route: Route, name: str, out: Any) -> None:
        number = self.count
        self.count += 1
        gives = route.part.gives.get(number)
        if gives is not None:
            leaves = [out] if isinstance(out, torch.Tensor) else list(tensors_in(out))
            for index, output, is_copied in gives:
                tensor = leaves[index]
                if self._absence.is_absent(tensor):
                    raise StageUsageError(
                        f"{name!r} is to be sent, but this stage did not compute it: a forward went another way than the"
                        " example's; split with an example for this way too (ways=)"
                    )
                self._sent[output] = tensor.clone() if is_copied else tensor
        if route.last is not None and number >= route.last:
            raise DoneError

    def _follow(self, name: str) -> Route:
        """The route, of what comes now.

        Raises:
            StageUsageError: no example went there.
        """
        number, route = self.count, self.route
        if number == route.parts_at:
            branch = route.branches.get(name)
            if branch is not None:
                self.route = branch
                return branch
            expected = [repr(one) if one else "nothing more" for one in route.branches]
        elif number < len(route.names) and route.names[number] == name:
            return route
        else:
            expected = [repr(route.names[number]) if number < len(route.names) else "nothing more"]
        raise StageUsageError(
            f"the model's forward went another way than with {'the example' if len(self._examples) == 1 else 'any example'}:"
            f" {' or '.join(expected)} came there, and now {source_line(repr(name))}; stages are cut for the ways that"
            " examples show, and what hooks take out of other stages' units is not there: split with an example for this way too"
            " (ways=), or make what decides part of a unit (units=)"
        )


def check_told(what: str, tensor: torch.Tensor) -> None:
    """Refuse what of a tensor that stages have not in common cannot be told, unless torch's own code asks for it.

    Raises:
        StageUsageError: it cannot.
    """
    if what in ("requires_grad", "is_leaf") or (what in FOLLOWED and tensor.grad_fn is None) or not is_asked_by_model():
        return
    raise StageUsageError(
        f"{source_line(what)} asks for {what} of a value that units make, which is another on each stage, or none: make the"
        " module that asks for it a unit (units=)"
    )
