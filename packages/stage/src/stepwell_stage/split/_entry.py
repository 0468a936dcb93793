"""How the inputs of a step become the arguments of the model's forward, decided once for all that are alike."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import attrs

from ._inputs import Inputs, Kinds
from ._leaves import Given, renewed

_MOST = 256


@attrs.frozen(eq=False)
class Entry:
    """The way of inputs of one structure.

    Attributes:
        way: the first of the examples that they are like.
        places: of each input, in the examples' order, its place among the positional ones or its name among the others.
        left_out: inputs that were left out, as they are in the example.
        args: the model's positional arguments: which input each is.
        kwargs: its arguments by name.
    """

    way: int
    places: Mapping[str, int | str]
    left_out: Mapping[str, Any]
    args: Sequence[str]
    kwargs: Mapping[str, str]

    @classmethod
    def of_example(cls, inputs: Inputs, way: int, example: Mapping[str, Any]) -> Entry:
        """For an example itself."""
        args, kwargs = inputs.call({name: name for name in example})
        return cls(way, {name: name for name in example}, {}, args, kwargs)

    def named(self, given: Given) -> dict[str, Any]:
        """The inputs by name, in the order of the examples."""
        places = self.places.items()
        found = {name: given.args[place] if isinstance(place, int) else given.kwargs[place] for name, place in places}
        return {**found, **self.left_out} if self.left_out else found

    def call(self, named: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """The model's arguments, in containers of their own: code that takes something out of one does so in each microbatch."""
        args = [renewed(named[name]) for name in self.args]
        return args, {key: renewed(named[name]) for key, name in self.kwargs.items()}


class Entries:
    """The ways of inputs, by their structure. Mutable: it keeps them.

    Args:
        stage: which was given the inputs.
        inputs: of the model.
        kinds: which of them are of one kind.
    """

    def __init__(self, stage: int, inputs: Inputs, kinds: Kinds) -> None:
        self._stage = stage
        self._inputs = inputs
        self._kinds = kinds
        self._known: dict[Hashable, Entry] = {}

    def of(self, given: Given) -> Entry:
        """The way of these.

        Args:
            given: positional inputs, and those by name.

        Raises:
            StageUsageError: see :meth:`Inputs.named` and :meth:`Kinds.like`.
        """
        if given.objects:  # which may be others under the same look
            return self._find(given.args, given.kwargs)
        entry = self._known.get(given.structure)
        if entry is None:
            if len(self._known) >= _MOST:
                self._known.clear()
            entry = self._known[given.structure] = self._find(given.args, given.kwargs)
        return entry

    def _find(self, received: Sequence[Any], inputs: Mapping[str, Any]) -> Entry:
        way, named = self._kinds.like(self._stage, self._inputs.joined(received, inputs))
        places = self._inputs.joined(range(len(received)), {name: name for name in inputs})
        args, kwargs = self._inputs.call({name: name for name in named})
        return Entry(
            way,
            {name: places[name] for name in named if name in places},
            {name: value for name, value in named.items() if name not in places},
            args,
            kwargs,
        )
