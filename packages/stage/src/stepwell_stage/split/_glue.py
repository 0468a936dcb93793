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

from .._compat import current_function_mode
from ..exceptions import StageUsageError
from ._absent import HOOKS, Absence, NeedsDataError, source_line
from ._demand import StagePlan
from ._leaves import tensors_in, with_tensors
from ._templates import Templates
from ._values import Key

# What every tensor has; reading it computes nothing. The others give tensors.
_TENSOR_ATTRIBUTES = frozenset(("T", "mT", "H", "mH", "data", "grad", "real", "imag"))


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
            if attribute not in _TENSOR_ATTRIBUTES or (name == "__set__" and attribute != "data"):
                return func(*args, **(kwargs or {}))
        return self.operation(func, name, args, kwargs or {})

    def operation(self, func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """One operation of glue."""
        raise NotImplementedError

    def unit(
        self, name: str, module: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """One call of a unit. What happens meanwhile is not seen."""
        if current_function_mode() is not self:
            raise StageUsageError(
                f"unit {name!r} is called under a torch function mode that the model's own forward entered, so its operations"
                " cannot be told from glue: enter the mode around the step instead"
            )
        self.inside = True
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        try:
            return self.unit_call(name, module, call, args, kwargs)
        finally:
            self.__enter__()  # type: ignore[no-untyped-call]
            self.inside = False

    def unit_call(
        self, name: str, module: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """What :meth:`unit` does while nothing is seen."""
        raise NotImplementedError


class StageGlue(Glue):
    """Glue as one stage runs it, for one microbatch.

    Args:
        plan: the stage's part.
        names: of each numbered call and operation, as the example had them.
        received: values from other stages.
        absence: makes absent tensors.
        templates: what units of other stages return.
    """

    def __init__(
        self,
        plan: StagePlan,
        names: Sequence[str],
        received: Mapping[Key, torch.Tensor],
        absence: Absence,
        templates: Templates,
    ) -> None:
        super().__init__()
        self.sent: dict[Key, torch.Tensor] = {}
        self.unit_seconds = 0.0
        self._plan = plan
        self._names = names
        self._received: dict[int, dict[int, torch.Tensor]] = {}
        for (number, index), tensor in received.items():
            self._received.setdefault(number, {})[index] = tensor
        self._sends: dict[int, list[int]] = {}
        for number, index in plan.sends:
            self._sends.setdefault(number, []).append(index)
        self._absence = absence
        self._templates = templates

    def operation(self, func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """See :meth:`Glue.operation`."""
        if name in HOOKS and any(args[0] is one for row in self._received.values() for one in row.values()):
            return RemovableHandle(OrderedDict())  # on the stage that made it
        number = self.count
        taken = self._received.get(number)
        if taken is not None and self._names[number] == name and len(taken) == 1 and self._is_whole(number, taken):
            out = taken[0]
        else:
            try:
                out = self._templates.operation(number, func, args, kwargs)
            except NeedsDataError as error:
                raise StageUsageError(
                    f"{error.what} looks at a value that this stage does not have: it was not looked at in the example; split"
                    " with an example that goes the same way"
                ) from error
            if taken is not None and self._names[number] == name:
                out = self._with(out, taken)
        leaves = list(tensors_in(out))
        if leaves:
            self._made(number, name, leaves)
        return out

    def unit_call(
        self, name: str, module: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """See :meth:`Glue.unit`."""
        number = self.count
        self._check(number, name)
        if number in self._plan.owned:
            start = time.perf_counter()
            out = call(*args, **kwargs)
            self.unit_seconds += time.perf_counter() - start
            self._templates.check(number, name, out)
        else:
            out = self._templates.known(number, name, module, call, args, kwargs).result()
            taken = self._received.get(number)
            if taken is not None:
                out = self._with(out, taken)
        self._made(number, name, list(tensors_in(out)))
        return out

    def _is_whole(self, number: int, taken: Mapping[int, torch.Tensor]) -> bool:
        """Whether what is received is all that the operation gives: a single tensor."""
        return 0 in taken and self._templates.is_single(number)

    def _with(self, out: Any, taken: Mapping[int, torch.Tensor]) -> Any:
        def tensors() -> Iterator[torch.Tensor]:
            for index, tensor in enumerate(tensors_in(out)):
                yield taken.get(index, tensor)

        return with_tensors(out, tensors())

    def _made(self, number: int, name: str, leaves: Sequence[torch.Tensor]) -> None:
        self._check(number, name)
        self.count += 1
        for index in self._sends.get(number, ()):
            tensor = leaves[index]
            if self._absence.is_absent(tensor):
                raise StageUsageError(
                    f"{name!r} is to be sent, but this stage did not compute it: a forward went another way than the example's"
                )
            self.sent[number, index] = tensor.clone() if (number, index) in self._plan.copies else tensor
        if self._plan.last is not None and number >= self._plan.last:
            raise DoneError

    def _check(self, number: int, name: str) -> None:
        if number < len(self._names) and self._names[number] == name:
            return
        expected = f"{self._names[number]!r}" if number < len(self._names) else "nothing more"
        raise StageUsageError(
            f"the model's forward went another way than with the example: {expected} came there, and now"
            f" {source_line(repr(name))}; stages are cut for one way, and what hooks take out of other stages' units is not"
            " there: split with an example that goes the way of every batch, or make what decides part of a unit (units=)"
        )
