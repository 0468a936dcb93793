"""What counts as a class with fields, and making an instance of one."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, namedtuple
from typing import Any, NamedTuple

import attrs
import pytest

from stepwell_meta import MetadataError
from stepwell_meta._classes import Fields, class_map, class_name, fields_of, make


class Pair(NamedTuple):
    a: int
    b: int = 2


class PairWithMethods(namedtuple("PairWithMethods", "a b")):
    def total(self) -> int:
        return int(self.a + self.b)


@dataclasses.dataclass(kw_only=True)
class Data:
    a: int
    b: int = dataclasses.field(init=False, default=2)


@attrs.frozen
class Attrs:
    _a: int
    b: int = attrs.field(alias="bee")
    c: int = attrs.field(init=False, default=3)


@dataclasses.dataclass
class Demanding:
    a: int

    def __init__(self, a: int, more: int) -> None:
        self.a = a + more


@dataclasses.dataclass
class Told:
    """Keeps something that it is told and that is no field."""

    a: int
    more: dataclasses.InitVar[int] = 1

    def __post_init__(self, more: int) -> None:
        self.kept = more


@dataclasses.dataclass
class Mixed(OrderedDict[str, Any]):
    a: int = 0


class TupleLike(tuple[int, ...]):
    _fields = "not a tuple of names"


@pytest.mark.parametrize(
    ("cls", "expected"),
    [
        (Pair, Fields("named tuple", ("a", "b"), ("a", "b"))),
        (PairWithMethods, Fields("named tuple", ("a", "b"), ("a", "b"))),
        (Data, Fields("dataclass", ("a", "b"), ("a", None))),
        (Attrs, Fields("attrs class", ("_a", "b", "c"), ("a", "bee", None))),
        (Demanding, None),
        (Told, None),
        (Mixed, None),
        (TupleLike, None),
        (tuple, None),
        (int, None),
        (OrderedDict, None),
    ],
)
def test_fields_of_classes(cls: type, expected: Fields | None) -> None:
    assert fields_of(cls) == expected


@pytest.mark.parametrize("cls", [Pair, PairWithMethods, Data])
def test_instances_are_made_from_values(cls: type) -> None:
    fields = fields_of(cls)
    assert fields is not None
    made = make(cls, fields, [5, 6])
    assert type(made) is cls
    assert (made.a, made.b) == (5, 6)


def test_fields_that_the_constructor_does_not_take_are_set_on_frozen_classes_too() -> None:
    fields = fields_of(Attrs)
    assert fields is not None
    made = make(Attrs, fields, [5, 6, 7])
    assert (made._a, made.b, made.c) == (5, 6, 7)


@dataclasses.dataclass
class Halved:
    a: float

    def __post_init__(self) -> None:
        self.a = self.a / 2
        self.kept = 1


@attrs.define
class Doubled:
    a: float = attrs.field(converter=lambda a: a * 2)


@pytest.mark.parametrize("cls", [Halved, Doubled])
def test_what_a_constructor_makes_of_a_field_is_made_once(cls: type) -> None:
    """A stage's output whose ``__post_init__`` scales a tensor was scaled once more on every stage that rebuilt it."""
    fields = fields_of(cls)
    assert fields is not None
    made = cls(3.0)
    again = make(cls, fields, [made.a])
    assert again == made
    assert again.a == made.a
    assert getattr(again, "kept", 1) == 1  # what is no field is the constructor's own doing


def test_names_of_classes() -> None:
    assert class_name(int) == "builtins:int"
    assert class_name(Pair) == f"{__name__}:Pair"
    assert class_map([int, str, int]) == {"builtins:int": int, "builtins:str": str}
    assert class_map(()) == {}


def test_two_classes_of_one_name_are_refused() -> None:
    other = type("Pair", (), {"__module__": __name__})
    with pytest.raises(MetadataError, match=r"two different classes are called \S+:Pair: rename one of them"):
        class_map([Pair, other])
