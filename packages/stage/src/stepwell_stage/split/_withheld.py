"""Objects in what a model returns that units fill, such as a cache of keys and values: no stage has all that is in them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection
from typing import Any, NoReturn

import attrs
import torch

from ..exceptions import StageUsageError
from ._leaves import rebuilt, shown_by, structure
from ._poison import ASKING


@attrs.frozen(slots=False)  # what looks for tensors in objects asks for a __dict__
class Withheld:
    """Stands for such an object; whoever looks at it is refused.

    Attributes:
        kind: the object's class, by name.
    """

    kind: str

    def _refuse(self, *_: Any) -> NoReturn:
        raise StageUsageError(
            f"the {self.kind} that the model returns is filled by units, of which each stage has some: leave it alone, return"
            " what is needed of it as tensors, or let the model return none (use_cache=False in models of transformers)"
        )


for _name in ASKING - {"__repr__", "__str__", "__format__", "__hash__", "__eq__", "__ne__", "__copy__", "__deepcopy__"}:
    setattr(Withheld, _name, Withheld._refuse)


def filled(result: Any, is_made: Callable[[torch.Tensor], bool], seen: Collection[int]) -> frozenset[int]:
    """Which of the objects in a result hold what is made within units, and nothing else that is made.

    Args:
        result: what the model returned.
        is_made: whether a tensor is made within a unit.
        seen: identities of tensors that glue and units give.
    """
    objects: list[Any] = []
    structure(result, [], objects)
    return frozenset(
        number
        for number, one in enumerate(objects)
        if any(map(is_made, shown_by(one))) and not any(id(tensor) in seen for tensor in shown_by(one))
    )


def withhold(result: Any, numbers: Collection[int]) -> Any:
    """The result without these of its objects."""
    count = itertools.count()

    def change(value: Any) -> Any:
        new = rebuilt(value, change)
        if new is not value:
            return new
        objects: list[Any] = []
        structure(value, [], objects)
        is_object = len(objects) == 1 and objects[0] is value
        return Withheld(type(value).__name__) if is_object and next(count) in numbers else value

    return change(result)
