"""Classes that a structure may contain: what fields they have, and how one is put together again."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Iterable, Sequence
from typing import Any

import attrs

from .exceptions import MetadataError

__all__ = ["Fields", "class_map", "class_name", "fields_of", "make", "why_not"]


@attrs.frozen
class Fields:
    """The fields of a class, in the order in which they are taken apart.

    Attributes:
        kind: "named tuple", "dataclass" or "attrs class".
        names: Every field.
        arguments: For each field, the argument of the constructor that sets it, or None where none does.
    """

    kind: str
    names: tuple[str, ...]
    arguments: tuple[str | None, ...]


def class_name(cls: type) -> str:
    """The name under which a class is known on every rank."""
    return f"{cls.__module__}:{cls.__qualname__}"


def class_map(classes: Iterable[type]) -> dict[str, type]:
    """Classes by name.

    Raises:
        MetadataError: Two classes have one name.
    """
    found: dict[str, type] = {}
    for cls in classes:
        name = class_name(cls)
        if found.setdefault(name, cls) is not cls:
            raise MetadataError(f"two different classes are called {name}: rename one of them")
    return found


@functools.lru_cache(maxsize=1024)
def fields_of(cls: type) -> Fields | None:
    """The fields of a named tuple, dataclass or attrs class; None for any other class.

    A container (a subclass of tuple, list, dict or set) that is also a dataclass has contents beside its fields, so it is
    none of these; nor is a class whose constructor takes more than its fields, for what that was is kept nowhere.
    """
    names = getattr(cls, "_fields", None)
    if issubclass(cls, tuple) and hasattr(cls, "_make") and isinstance(names, tuple):
        return Fields("named tuple", names, names)
    if issubclass(cls, tuple | list | dict | set | frozenset):
        return None
    if dataclasses.is_dataclass(cls):
        own = dataclasses.fields(cls)
        arguments = tuple(field.name if field.init else None for field in own)
        fields = Fields("dataclass", tuple(field.name for field in own), arguments)
    elif attrs.has(cls):
        members = attrs.fields(cls)
        arguments = tuple(member.alias if member.init else None for member in members)
        fields = Fields("attrs class", tuple(member.name for member in members), arguments)
    else:
        return None
    return fields if _can_be_called_with(cls, fields.arguments) else None


def why_not(value: Any) -> str:
    """What a message says of an instance of a class of fields that cannot be taken apart, and what to do; else nothing."""
    cls = type(value)
    if not (dataclasses.is_dataclass(cls) or attrs.has(cls)) or issubclass(cls, tuple | list | dict | set | frozenset):
        return ""
    fields = fields_of(cls)
    if fields is None:
        what = "its constructor takes other arguments than its fields: make each argument a field"
    else:
        missing = next(name for name in fields.names if not hasattr(value, name))
        what = f"its field {missing!r} is not set: set it, with None where it has no value"
    return f"{what}, or register the class with torch's pytree"


def _can_be_called_with(cls: type, arguments: Sequence[str | None]) -> bool:
    try:
        signature = inspect.signature(cls)
        signature.bind(**{name: None for name in arguments if name is not None})
    except (TypeError, ValueError):
        return False
    return not any(
        parameter.name not in arguments and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        for parameter in signature.parameters.values()
    )


def make(cls: type, fields: Fields, values: Sequence[Any]) -> Any:
    """An instance whose fields hold exactly ``values``, made by the class's own constructor.

    The constructor sets what the class keeps beside its fields. What it makes of the fields themselves was done once, when
    the value was made first: a ``__post_init__`` or converter that scales a tensor must not scale it a second time. So
    every field that does not hold its value is set afterwards, also on frozen classes.
    """
    if fields.kind == "named tuple":
        return cls._make(values)  # type: ignore[attr-defined]
    pairs = tuple(zip(fields.names, fields.arguments, values, strict=True))
    made = cls(**{argument: value for _, argument, value in pairs if argument is not None})
    for name, _, value in pairs:
        if getattr(made, name, made) is not value:  # the instance itself stands for "not set"
            object.__setattr__(made, name, value)
    return made
