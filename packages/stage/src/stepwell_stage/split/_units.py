"""Which submodules are never cut.

The items of the model's containers of layers (the blocks of a transformer, of a ResNet's stages), and what owns parameters beside
them (embeddings, norms, heads). A container of plain layers, such as the ``Sequential`` within a block, is no place to cut,
unless the model has too few other ones: then the largest units are opened.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase

import attrs

from ..exceptions import StageUsageError


@attrs.frozen
class Branch:
    """One module of a model, as far as this matters.

    Attributes:
        name: its first name in the model; the model's own is ``""``.
        is_container: whether it only holds others, as ``nn.ModuleList``, ``ModuleDict`` and ``Sequential`` do.
        is_called: whether it can be called, as the first two cannot.
        size: how many numbers its parameters and saved buffers hold, those of its children included.
        children: the modules in it, each once in the whole tree.
    """

    name: str
    is_container: bool
    is_called: bool
    size: int
    children: tuple[Branch, ...] = ()

    @property
    def with_state(self) -> list[Branch]:
        """Those of the children that hold anything."""
        return [child for child in self.children if child.size]

    def walk(self) -> Iterator[Branch]:
        """This one and all below, above first."""
        yield self
        for child in self.children:
            yield from child.walk()


def choose_units(model: Branch, at_least: int, *, called: Collection[str] | None = None) -> tuple[str, ...]:
    """The units of a model.

    Args:
        model: the model.
        at_least: how many are wanted; large ones are opened until there are so many, if that can be.
        called: count these names alone, where it is known which modules are called.
    """
    units = list(_found(model))
    while sum(called is None or unit.name in called for unit in units) < at_least:
        openable = [unit for unit in units if unit.with_state]
        if not openable:
            break
        largest = max(openable, key=lambda unit: unit.size)
        position = units.index(largest)
        units[position : position + 1] = [one for child in largest.with_state for one in _callable(child)]
    return tuple(unit.name for unit in units)


def given_units(model: Branch, patterns: Sequence[str]) -> tuple[str, ...]:
    """The units that names and globs choose, and what owns parameters beside them.

    Raises:
        StageUsageError: a pattern fits no module that has parameters, or one unit would be inside another.
    """
    branches = [branch for branch in model.walk() if branch.size]
    chosen: dict[str, None] = {}
    for pattern in patterns:
        fitting = matching(pattern, [branch.name for branch in branches])
        if not fitting:
            raise StageUsageError(f"no module with parameters is called {pattern!r}; {near(pattern, branches)}")
        chosen |= dict.fromkeys(fitting)
    for name in chosen:
        outer = next(
            (other for other in chosen if other != name and name.startswith(f"{other}." if other else "")), None
        )
        if outer is not None:
            raise StageUsageError(
                f"units are never cut, so {name!r} cannot be one beside {outer!r}, which holds it: leave out one"
            )

    def beside(branch: Branch) -> Iterator[str]:
        if branch.name in chosen:
            yield branch.name
        elif any(name.startswith(f"{branch.name}." if branch.name else "") for name in chosen):
            for child in branch.with_state:
                yield from beside(child)
        else:
            yield from (unit.name for unit in _found(branch))

    return tuple(beside(model))


def matching(pattern: str, names: Iterable[str]) -> list[str]:
    """The names that a name or glob fits; ``*`` does not go beyond a dot."""
    parts = pattern.split(".")

    def fits(name: str) -> bool:
        others = name.split(".")
        return len(others) == len(parts) and all(map(fnmatchcase, others, parts))

    return [name for name in names if name == pattern or fits(name)]


def near(pattern: str, branches: Iterable[Branch]) -> str:
    """Some names, for a message: those that share most with a pattern first."""
    words = set(pattern.replace("*", "").split("."))
    names = sorted(
        (branch.name for branch in branches if branch.name), key=lambda name: -len(words & set(name.split(".")))
    )
    return f"there are {', '.join(names[:8])}{', …' if len(names) > 8 else ''}"


def _found(branch: Branch, *, is_item: bool = False) -> Iterator[Branch]:
    """Units at or below a module. The model itself is none."""
    has_rows = any(map(_is_row, branch.walk()))
    if not branch.size:
        return
    if branch.is_called and branch.name and (not has_rows or (is_item and not branch.is_container)):
        yield branch
        return
    for child in branch.with_state:
        yield from _found(child, is_item=_is_row(branch) or (is_item and not branch.is_called))


def _is_row(branch: Branch) -> bool:
    """Whether a module is a container of layers that are modules of several others."""
    items = branch.with_state
    return branch.is_container and len(items) > 1 and any(item.with_state for item in items)


def _callable(branch: Branch) -> Iterator[Branch]:
    """The module, or what can be called in it."""
    if branch.is_called:
        yield branch
    else:
        for child in branch.with_state:
            yield from _callable(child)
