"""Any structure of tensors ↔ flat tensors and a description of the structure.

A module may return a tensor, or tuples, lists, dicts, ordered dicts, named tuples, dataclasses, attrs classes and
containers registered with torch's pytree (as transformers does for its outputs), nested in each other. Tensors are the
leaves that travel. What else may sit in a structure is *static*: it belongs to the description. Static values are None,
bool, int, float, complex, str, bytes, torch.dtype, torch.Size and enum members; anything else is refused by name and place.

The description is data. It names classes as text, so that comparing, hashing, printing and decoding it runs no code of
any class and imports nothing. Only `Structure.rebuild` needs the classes themselves, and it takes them from three places:

- those met when the structure was made, in this process;
- those that the caller passed, to ``rebuild`` or to ``decode``;
- for registered containers, torch's own register.

A class that is in none of them is an error that says which one to pass.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any, TypeAlias

import attrs
import torch

from ._classes import class_map, class_name, fields_of, make, why_not
from ._compat import container_classes, container_rule
from ._tensor import type_name
from .exceptions import MetadataError, UnsupportedValueError

__all__ = ["LEAF", "Branch", "Leaf", "Outputs", "Static", "Structure", "Tree", "normalize_outputs"]

MAX_DEPTH = 64
STATIC_TYPES = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype})

# The kinds of branches. The position of a kind is its number on the wire: append only.
KINDS = (
    "tuple",
    "list",
    "dict",
    "ordered dict",
    "named tuple",
    "dataclass",
    "attrs class",
    "registered container",
    "enum",
    "torch.Size",
)
_SEQUENCES: dict[type, str] = {tuple: "tuple", list: "list", torch.Size: "torch.Size"}

# Where a value sits: the path of what holds it, and a last step such as "[{!r}]" with its key. Spelled out for messages only:
# printing a key may run anything, and a tensor that somebody used as one is printed by copying it from its device.
_Path: TypeAlias = "tuple[_Path, str, Any] | None"


@attrs.frozen
class Leaf:
    """A place that a tensor takes."""


def _exact(value: Any) -> Any:
    """A value together with what ``==`` forgets: its type, the sign of zero, that NaN is NaN."""
    if type(value) is float:
        return float, struct.pack("<d", value)
    if type(value) is complex:
        return complex, struct.pack("<dd", value.real, value.imag)
    return type(value), value


@attrs.frozen
class Static:
    """A value that is part of the structure. Equal only to the same value of the same type: not 1 to True."""

    value: Any = attrs.field(eq=_exact)


@attrs.frozen
class Branch:
    """A container.

    Attributes:
        kind: One of `KINDS`.
        children: What it holds, in order.
        keys: Of dicts, the keys; of classes, the names of their fields; of registered containers, the one context that
            torch's pytree keeps; of an enum, the member's name.
        type_name: ``module:qualified name`` of the class, where the kind has one.
    """

    kind: str
    children: tuple[Tree, ...]
    keys: tuple[Tree, ...] = ()
    type_name: str = ""

    def check(self) -> None:
        """Refuse what `normalize_outputs` never makes.

        Raises:
            MetadataError: The keys do not go with the kind or the children.
        """
        if any(_count(key) for key in self.keys):
            raise MetadataError(f"keys of a {self.kind} hold tensors")
        if self.kind in _SEQUENCES.values():
            fits = not self.keys and not self.type_name
        elif self.kind in ("dict", "ordered dict"):
            fits = len(self.keys) == len(self.children) and not self.type_name
        elif self.kind == "registered container":
            fits = len(self.keys) == 1
        else:
            names = 1 if self.kind == "enum" else len(self.children)
            fits = len(self.keys) == names and all(
                isinstance(key, Static) and type(key.value) is str for key in self.keys
            )
            fits = fits and not (self.kind == "enum" and self.children)
        if not fits:
            raise MetadataError(
                f"a {self.kind} of {len(self.children)} children does not go with keys {self.keys} and class {self.type_name!r}"
            )


Tree: TypeAlias = Leaf | Static | Branch
LEAF = Leaf()


@attrs.frozen
class Structure:
    """How tensors were nested. Hashable, comparable and encodable; prints with ``*`` for each tensor.

    Order counts: two dicts with the same keys in another order are two structures.

    Example:
        >>> str(normalize_outputs({"h": torch.zeros(1), "mask": None}).structure)
        "{'h': *, 'mask': None}"
    """

    root: Tree
    classes: Mapping[str, type] = attrs.field(factory=dict, eq=False, repr=False)

    @property
    def num_leaves(self) -> int:
        """Number of tensors."""
        return _count(self.root)

    @property
    def class_names(self) -> frozenset[str]:
        """``module:qualified name`` of every class that the structure names, for looking them up before `rebuild`."""
        return frozenset(_class_names(self.root))

    def rebuild(self, leaves: Sequence[Any], *, classes: Iterable[type] = ()) -> Any:
        """The nested value, with ``leaves`` in the tensors' places.

        Args:
            leaves: One value for each tensor, in order.
            classes: Named tuples, dataclasses, attrs classes and enums that the structure may name, beside those that it
                knows already. Needed for a structure that another process encoded.

        Raises:
            MetadataError: The number of leaves is wrong, a class is not known here or has other fields than where the
                structure was made, or a class refuses its values.
        """
        if len(leaves) != self.num_leaves:
            raise MetadataError(f"expected {self.num_leaves} tensors for {self}, got {len(leaves)}")
        known = {**self.classes, **class_map(classes)}
        try:
            return _build(self.root, iter(leaves), known)
        except MetadataError:
            raise
        except Exception as error:  # a class's own constructor may raise anything
            raise MetadataError(f"cannot rebuild {self}: {type(error).__name__}: {error}") from error

    def __str__(self) -> str:
        """The structure as Python would show it, with ``*`` for each tensor."""
        return _show(self.root)


@attrs.frozen(eq=False)
class Outputs:
    """What a module returned: its tensors, flat, and how they were nested."""

    leaves: tuple[torch.Tensor, ...]
    structure: Structure


_SINGLE = Structure(LEAF)


def normalize_outputs(value: Any) -> Outputs:
    """Take any nested value apart into its tensors, in order, and its structure.

    Args:
        value: A tensor, or any nesting of the containers and static values that the module docstring lists.

    Raises:
        UnsupportedValueError: Something else is in there; the message says what and where.
        MetadataError: Two different classes in it have one name.

    Example:
        >>> outputs = normalize_outputs((torch.zeros(1), {"scale": 2.0}))
        >>> outputs.structure.rebuild(["h"])
        ('h', {'scale': 2.0})
    """
    if isinstance(value, torch.Tensor):
        return Outputs((value,), _SINGLE)
    walker = _Walker()
    root = walker.walk(value, None, 0)
    return Outputs(tuple(walker.leaves), Structure(root, walker.classes))


class _Walker:
    """Collects tensors and classes on the way through a value. Mutable: one per call of `normalize_outputs`."""

    def __init__(self) -> None:
        self.leaves: list[torch.Tensor] = []
        self.classes: dict[str, type] = {}
        self._static_only = False

    def walk(self, value: Any, path: _Path, depth: int) -> Tree:
        cls = type(value)
        if isinstance(value, torch.Tensor) and not self._static_only:
            self.leaves.append(value)
            return LEAF
        if cls in STATIC_TYPES:
            return Static(value)
        if depth == MAX_DEPTH:
            raise UnsupportedValueError(
                f"outputs{_spell(path)}: nested deeper than {MAX_DEPTH}, or in itself",
                type_name=type_name(value),
                path=f"outputs{_spell(path)}",
            )
        depth += 1
        if (kind := _SEQUENCES.get(cls)) is not None:
            children = tuple(self.walk(item, (path, "[{}]", i), depth) for i, item in enumerate(value))
            return Branch(kind, children)
        if cls is dict or cls is OrderedDict:
            children = tuple(self.walk(item, (path, "[{!r}]", key), depth) for key, item in value.items())
            kind = "dict" if cls is dict else "ordered dict"
            return Branch(kind, children, self._static(tuple(value), (path, " keys", None), depth))
        return self._walk_class(cls, value, path, depth)

    def _walk_class(self, cls: type, value: Any, path: _Path, depth: int) -> Tree:
        name = class_name(cls)
        if isinstance(value, Enum) and type(value).__members__.get(value.name) is value:
            branch = Branch("enum", (), (Static(value.name),), name)
        elif (rule := container_rule(cls)) is not None:
            items, context = rule.flatten_fn(value)
            children = tuple(self.walk(item, (path, "[{}]", i), depth) for i, item in enumerate(items))
            place = (path, " pytree context of {}", type_name(value))
            branch = Branch("registered container", children, self._static((context,), place, depth), name)
        elif (fields := fields_of(cls)) is not None and all(hasattr(value, field) for field in fields.names):
            children = tuple(self.walk(getattr(value, field), (path, ".{}", field), depth) for field in fields.names)
            branch = Branch(fields.kind, children, tuple(Static(field) for field in fields.names), name)
        else:
            hint = why_not(value) or (
                "use tensors, None, numbers, strings, enums, and tuples, lists, dicts, named tuples, dataclasses or attrs "
                "classes of these, or register its class with torch's pytree"
            )
            raise UnsupportedValueError(
                f"outputs{_spell(path)}: cannot send a {type_name(value)} to another stage; {hint}",
                type_name=type_name(value),
                path=f"outputs{_spell(path)}",
            )
        if self.classes.setdefault(name, cls) is not cls:
            raise MetadataError(f"outputs{_spell(path)}: two different classes are called {name}: rename one of them")
        return branch

    def _static(self, values: tuple[Any, ...], path: _Path, depth: int) -> tuple[Tree, ...]:
        """Values that must not hold tensors: keys of dicts, contexts of registered containers."""
        before, self._static_only = self._static_only, True
        trees = tuple(self.walk(value, path, depth) for value in values)
        self._static_only = before
        return trees


def _spell(path: _Path) -> str:
    steps = []
    while path is not None:
        path, step, value = path
        steps.append(step.format(value))
    return "".join(reversed(steps))


def _count(tree: Tree) -> int:
    if isinstance(tree, Branch):
        return sum(_count(child) for child in tree.children)
    return 1 if isinstance(tree, Leaf) else 0


def _class_names(tree: Tree) -> Iterator[str]:
    if isinstance(tree, Branch):
        if tree.type_name:
            yield tree.type_name
        for part in (*tree.children, *tree.keys):
            yield from _class_names(part)


def _build(tree: Tree, leaves: Iterator[Any], known: Mapping[str, type]) -> Any:
    if isinstance(tree, Leaf):
        return next(leaves)
    if isinstance(tree, Static):
        return tree.value
    children = [_build(child, leaves, known) for child in tree.children]
    if tree.kind == "list":
        return children
    if tree.kind == "tuple":
        return tuple(children)
    if tree.kind == "torch.Size":
        return torch.Size(children)
    keys = [_build(key, leaves, known) for key in tree.keys]
    if tree.kind in ("dict", "ordered dict"):
        pairs = zip(keys, children, strict=True)
        built = dict(pairs) if tree.kind == "dict" else OrderedDict(pairs)
        if len(built) != len(keys):
            raise MetadataError(f"a key occurs twice in {_show(tree)}")
        return built
    return _build_class(tree, keys, children, known)


def _build_class(tree: Branch, keys: list[Any], children: list[Any], known: Mapping[str, type]) -> Any:
    cls = known.get(tree.type_name)
    if tree.kind == "registered container":
        if cls is None:
            cls = _registered_as(tree.type_name)
        rule = None if cls is None else container_rule(cls)
        if rule is None:
            raise MetadataError(
                f"{tree.type_name} is registered with torch's pytree where the value was made, but not in this process: "
                "import the module that registers it on every rank"
            )
        return rule.unflatten_fn(children, keys[0])
    if cls is None:
        raise MetadataError(f"class {tree.type_name} is not known here: pass it in `classes`")
    if tree.kind == "enum":
        if not issubclass(cls, Enum) or keys[0] not in cls.__members__:
            raise MetadataError(f"{tree.type_name} has no enum member {keys[0]!r} in this process")
        return cls[keys[0]]
    fields = fields_of(cls)
    if fields is None or (fields.kind, list(fields.names)) != (tree.kind, keys):
        here = "no class of fields" if fields is None else f"a {fields.kind} with fields {list(fields.names)}"
        raise MetadataError(
            f"{tree.type_name} is a {tree.kind} with fields {keys} where the value was made, but {here} in this process: "
            "use the same code on every rank"
        )
    return make(cls, fields, children)


def _registered_as(name: str) -> type | None:
    """The class of a name that is registered with torch's pytree."""
    found = container_classes(lambda registered: class_name(registered) == name)
    if len(found) > 1:
        raise MetadataError(
            f"{len(found)} different classes called {name} are registered with torch's pytree: rename them, or pass the one "
            "that is meant in `classes`"
        )
    return found[0] if found else None


def _show(tree: Tree) -> str:
    if isinstance(tree, Leaf):
        return "*"
    if isinstance(tree, Static):
        return repr(tree.value)
    children = [_show(child) for child in tree.children]
    keys = [_show(key) for key in tree.keys]
    if tree.kind == "list":
        return f"[{', '.join(children)}]"
    if tree.kind == "torch.Size":
        return f"torch.Size([{', '.join(children)}])"
    if tree.kind == "tuple":
        return f"({children[0]},)" if len(children) == 1 else f"({', '.join(children)})"
    if tree.kind in ("dict", "ordered dict"):
        text = "{" + ", ".join(f"{key}: {child}" for key, child in zip(keys, children, strict=True)) + "}"
        return text if tree.kind == "dict" else f"OrderedDict({text})"
    short = tree.type_name.rpartition(":")[2]
    if tree.kind == "enum":
        return f"{short}.{keys[0][1:-1]}"
    if tree.kind == "registered container":
        return f"{short}[{', '.join(children)}; {keys[0]}]"
    return f"{short}({', '.join(f'{key[1:-1]}={child}' for key, child in zip(keys, children, strict=True))})"
