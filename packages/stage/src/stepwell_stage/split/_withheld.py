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


def filled(result: Any, maker_of: Callable[[torch.Tensor], str | None]) -> tuple[tuple[int, frozenset[str]], ...]:
    """Which of the objects in a result hold what is made within units, and these units.

    Args:
        result: what the model returned.
        maker_of: the unit within which a tensor is made, if there is one.
    """
    objects: list[Any] = []
    structure(result, [], objects)
    makers = (frozenset(map(maker_of, shown_by(one))) for one in objects)
    return tuple((number, frozenset(filter(None, some))) for number, some in enumerate(makers) if some - {None})


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
