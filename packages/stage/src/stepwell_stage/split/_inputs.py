"""The model's inputs by name, so that every rank can pass them as keywords."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from ..exceptions import StageUsageError
from ._leaves import tensors_in, with_tensors

# What ``Executor.step`` and ``eval`` call their own arguments.
TAKEN = frozenset(("target", "losses", "return_outputs", "arg_mbs", "kwarg_mbs", "target_mbs"))


class Inputs:
    """Names of a model's inputs.

    One of ``*args`` is called by the parameter's name and its place, as in ``args.0``; one that is called as an argument of the
    executor's own has a ``_`` behind its name.
    """

    def __init__(self, model: nn.Module) -> None:
        self._signature = inspect.signature(model.forward)
        self._model = type(model).__name__

    def named(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The inputs of one call, by name.

        Raises:
            StageUsageError: they do not fit the model's forward.
        """
        try:
            bound = self._signature.bind(*args, **kwargs)
        except TypeError as error:
            raise StageUsageError(
                f"{self._model}.forward{self._signature} does not take these inputs: {error}"
            ) from error
        found: dict[str, Any] = {}
        for name, value in bound.arguments.items():
            kind = self._signature.parameters[name].kind
            if kind is inspect.Parameter.VAR_POSITIONAL:
                found |= {f"{name}.{number}": one for number, one in enumerate(value)}
            elif kind is inspect.Parameter.VAR_KEYWORD:
                found |= value
            else:
                found[name] = value
        return {f"{name}_" if name in TAKEN else name: value for name, value in found.items()}

    def joined(self, args: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any]:
        """The inputs by name, of which some may be positional.

        Raises:
            StageUsageError: as :meth:`named`.
        """
        if not args:
            return dict(named)
        others, kwargs = self.call(named)
        return self.named((*args, *others), kwargs)

    def call(self, named: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Positional and keyword arguments from the inputs by name."""
        args: list[Any] = []
        kwargs = {name[:-1] if name[:-1] in TAKEN else name: value for name, value in named.items()}
        rows = {
            name: [kwargs.pop(one) for one in list(kwargs) if one.startswith(f"{name}.")]
            for name, parameter in self._signature.parameters.items()
            if parameter.kind is inspect.Parameter.VAR_POSITIONAL
        }
        for name, parameter in self._signature.parameters.items():
            if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
                args += rows[name]
            elif name in kwargs and (
                parameter.kind is inspect.Parameter.POSITIONAL_ONLY
                or (parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD and any(rows.values()))
            ):
                args.append(kwargs.pop(name))
        return args, kwargs


def replaced(named: Mapping[str, Any], tensors: Mapping[int, Any]) -> dict[str, Any]:
    """The inputs with some of their tensors, by number, replaced."""

    def every() -> Iterator[Any]:
        for number, tensor in enumerate(one for value in named.values() for one in tensors_in(value)):
            yield tensors.get(number, tensor)

    following = every()
    return {name: with_tensors(value, following) for name, value in named.items()}
