"""The model's inputs by name, so that every rank can pass them as keywords."""

from __future__ import annotations

import inspect
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from ..exceptions import StageUsageError
from ._leaves import structure, tensors_in, with_tensors

# What ``Executor.step`` and ``eval`` call their own arguments.
TAKEN = frozenset(("target", "losses", "return_outputs", "arg_mbs", "kwarg_mbs", "target_mbs"))


def _key(name: str) -> str:
    """What an input is called as an argument of the executor: what is its own argument's name has a ``_`` more."""
    return f"{name}_" if name.rstrip("_") in TAKEN else name


def _of_model(key: str) -> str:
    return key[:-1] if key.rstrip("_") in TAKEN else key


class Inputs:
    """Names of a model's inputs.

    One of ``*args`` is called by the parameter's name and its place, as in ``args.0``; one that is called as an argument of the
    executor's own has a ``_`` behind its name.

    Args:
        model: the model.
        positional: how many of them it is given by position, which hooks may go by.

    Attributes:
        defaults: of those that may be left out.
    """

    def __init__(self, model: nn.Module, *, positional: int = 0) -> None:
        self._positional = positional
        self._signature = inspect.signature(model.forward)
        self._model = type(model).__name__
        self.defaults = {
            _key(name): parameter.default
            for name, parameter in self._signature.parameters.items()
            if parameter.default is not inspect.Parameter.empty
        }

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
        return {_key(name): value for name, value in found.items()}

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
        kwargs = {_of_model(name): value for name, value in named.items()}
        rows = {
            name: [kwargs.pop(one) for one in list(kwargs) if one.startswith(f"{name}.")]
            for name, parameter in self._signature.parameters.items()
            if parameter.kind is inspect.Parameter.VAR_POSITIONAL
        }
        for number, (name, parameter) in enumerate(self._signature.parameters.items()):
            by_position = any(rows.values()) or number == len(args) < self._positional
            if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
                args += rows[name]
            elif name in kwargs and (
                parameter.kind is inspect.Parameter.POSITIONAL_ONLY
                or (parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD and by_position)
            ):
                args.append(kwargs.pop(name))
        return args, kwargs


class Kinds:
    """Which of the examples the inputs of a step are like.

    Where every stage is given the inputs, they are of one kind if the same of them hold tensors. Where only the first is, what is
    no tensor must be as in the example too: the others have it from there.

    Args:
        inputs: of the model.
        examples: inputs by name.
        everywhere: whether every stage is given the inputs.

    Attributes:
        inputs: of the model.
        examples: the examples, with their inputs in one order.
        kinds: of each example.
    """

    def __init__(self, inputs: Inputs, examples: Sequence[Mapping[str, Any]], *, everywhere: bool) -> None:
        self.inputs = inputs
        self._everywhere = everywhere
        self._names = list(dict.fromkeys(name for example in examples for name in example))
        self.examples = [{name: example[name] for name in self._names if name in example} for example in examples]
        self.kinds = tuple(map(self._kind, self.examples))
        self._first = {kind: way for way, kind in reversed([*enumerate(self.kinds)])}

    def like(self, stage: int, named: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
        """The first of the examples that are of the same kind, and the inputs with what was left out.

        Args:
            stage: which was given them.
            named: the inputs by name.

        Raises:
            StageUsageError: there is no such example; or what was left out is one thing in one and another in the next.
        """
        held = _held(named)
        if (
            self._everywhere
            and held in self._first
            and len(named) == len(self._names)
            and all(map(named.__contains__, self._names))
        ):
            return self._first[held], {name: named[name] for name in self._names}
        fitting = [way for way in range(len(self.kinds)) if self._fits(way, named)]
        fitting = [way for way in fitting if _held(self.examples[way]) == held] or fitting
        if not self._everywhere:
            fitting = [way for way in fitting if self.kinds[way] == self._kind(named)] or fitting
        kinds = {self.kinds[way] for way in fitting}
        if len(kinds) != 1:
            raise StageUsageError(self._refusal(stage, named, fitting))
        (kind,) = kinds
        ways = [way for way, other in enumerate(self.kinds) if other == kind]
        full = {}
        for name in self._names:
            if name in named:
                full[name] = named[name]
                continue
            looks = {_look(self.examples[way].get(name, self.inputs.defaults.get(name))) for way in ways}
            having = [way for way in ways if name in self.examples[way]]
            if len(looks) == 1 and having:
                self._check_default(stage, name, self.examples[having[0]][name])
                full[name] = self.examples[having[0]][name]
            elif len(having) == len(ways):
                raise StageUsageError(
                    f"stage {stage} was given no {name}, which is another in one example than in the next: pass it"
                )
        return ways[0], full | {name: value for name, value in named.items() if name not in full}

    def _check_default(self, stage: int, name: str, value: Any) -> None:
        """What is left out is what the model takes it for, not what it was in the example."""
        defaults = self.inputs.defaults
        if name in defaults and _look(value) != _look(defaults[name]):
            raise StageUsageError(
                f"stage {stage} was given no {name}, which is {value!r} in the example and {defaults[name]!r} where the model is"
                " called without it: pass it with every step"
            )

    def _fits(self, way: int, named: Mapping[str, Any]) -> bool:
        example = self.examples[way]
        if not _held(example) <= _held(named) or not self._said(named).keys() <= example.keys():
            return False
        return self._everywhere or self._kind({**example, **named}) == self.kinds[way]

    def _kind(self, named: Mapping[str, Any]) -> Hashable:
        if self._everywhere:
            return _held(named)
        return frozenset((name, _look(value)) for name, value in self._said(named).items())

    def _said(self, named: Mapping[str, Any]) -> dict[str, Any]:
        """The inputs without those that could as well be left out."""
        defaults = self.inputs.defaults
        return {
            name: value
            for name, value in named.items()
            if name not in defaults or _look(value) != _look(defaults[name])
        }

    def _refusal(self, stage: int, named: Mapping[str, Any], fitting: Sequence[int]) -> str:
        said, several = self._said(named), len(self.examples) > 1
        odd = [name for name in sorted(said) if all(name not in example for example in self.examples)]
        if odd:
            whose = "no example has" if several else "the example did not have"
            return (
                f"stage {stage} was given {', '.join(odd)}, which {whose}: split with an example that has every input"
            )
        if fitting:
            return f"stage {stage} was given {_row(said)}, which may be like several examples: pass all inputs"
        lacking = [name for name in self._names if name in _held(self.examples[0]) and name not in _held(named)]
        if lacking and (not several or not _held(named)):
            return (
                f"stage {stage} was given no {', '.join(lacking)}: every rank passes the model's inputs by name,"
                ' step(**split.keywords(...)); or split with inputs="first"'
            )
        if any(_held(example) == _held(named) for example in self.examples):
            plain = ", ".join(
                f"{name}={value!r}" for name, value in said.items() if next(tensors_in(value), None) is None
            )
            what = ", or ".join(filter(None, (plain, "tensors in another structure")))
            return (
                f"stage {stage} was given {what}, unlike any example, and stages that are not given the inputs go by these:"
                ' split with an example for this too (ways=), or with inputs="every"'
            )
        return (
            f"stage {stage} was given {_row(_held(named))}, and no example has these and no others:"
            f" {'; '.join(_row(_held(example)) for example in self.examples)}; split with an example for this too (ways=)"
        )


def _held(named: Mapping[str, Any]) -> frozenset[str]:
    """Which of the inputs hold tensors."""
    return frozenset(name for name, value in named.items() if next(tensors_in(value), None) is not None)


def _look(value: Any) -> Hashable:
    """What of an input is no tensor. Objects of other kinds are what they are."""
    objects: list[Any] = []
    look = structure(value, [], objects)
    return id(value) if objects else look


def _row(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "nothing"


def replaced(named: Mapping[str, Any], tensors: Mapping[int, Any]) -> dict[str, Any]:
    """The inputs with some of their tensors, by number, replaced."""

    def every() -> Iterator[Any]:
        for number, tensor in enumerate(one for value in named.values() for one in tensors_in(value)):
            yield tensors.get(number, tensor)

    following = every()
    return {name: with_tensors(value, following) for name, value in named.items()}
