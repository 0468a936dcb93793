"""Which parameters are sharded, and which modules form a stage: patterns in, names out.

A pattern is a dotted name. Each component may hold ``*`` and ``?``, which do not cross dots, or be a range of numbers
(``layers.0-3``); ``**`` stands for any number of components. A pattern that names a module covers everything below it; a pattern
may also name one parameter.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import attrs

from .exceptions import PlanError


@functools.lru_cache(maxsize=4096)
def _component(pattern: str) -> re.Pattern[str]:
    return re.compile("".join(".*" if c == "*" else "." if c == "?" else re.escape(c) for c in pattern))


def matches(pattern: str, name: str) -> bool:
    """Whether a pattern names ``name`` exactly (not merely something above it).

    Example::

        matches("layers.0-3", "layers.2")   # True
        matches("layers.*", "layers.2.norm")   # False
        matches("**.norm", "layers.2.norm")   # True
    """
    return _match(tuple(pattern.split(".")), tuple(name.split(".")))


def _match(pattern: tuple[str, ...], name: tuple[str, ...]) -> bool:
    if not pattern:
        return not name
    head, rest = pattern[0], pattern[1:]
    if head == "**":
        return any(_match(rest, name[i:]) for i in range(len(name) + 1))
    if not name or not _match_component(head, name[0]):
        return False
    return _match(rest, name[1:])


def _match_component(pattern: str, part: str) -> bool:
    if bounds := re.fullmatch(r"(\d+)-(\d+)", pattern):
        return part.isdecimal() and int(bounds[1]) <= int(part) <= int(bounds[2])
    return _component(pattern).fullmatch(part) is not None


def ancestors(name: str) -> Iterable[str]:
    """The name itself, then each module above it, without the root: ``a.b.c``, ``a.b``, ``a``."""
    while name:
        yield name
        name = name.rpartition(".")[0]


def find_owner(pattern: str, name: str) -> str | None:
    """The outermost of ``name`` and the modules above it that the pattern names; None where it names none."""
    found = [part for part in ancestors(name) if matches(pattern, part)]
    return found[-1] if found else None


def last_match(rules: Iterable[tuple[str, bool]], name: str) -> bool | None:
    """The value of the last rule whose pattern covers ``name``; None where none does."""
    value = None
    for pattern, answer in rules:
        if find_owner(pattern, name) is not None:
            value = answer
    return value


@attrs.frozen
class ResolvedPlan:
    """What a plan says about one model.

    Attributes:
        units: for each parameter that the plan shards, the module (or the parameter itself) that a pattern named.
        whole: the parameters that it does not shard: replicated, and reduced.
    """

    units: dict[str, str]
    whole: tuple[str, ...]


@attrs.frozen
class ParallelPlan:
    """What to shard and where to cut; every method returns a new plan.

    Example::

        plan = ParallelPlan().shard("layers.*", "embed").stage(0, "embed", "layers.0-3").stage(1, "layers.4-7", "head")

    Attributes:
        shards: patterns of modules and parameters to shard.
        stages: for each stage index, the patterns of what it runs.
    """

    shards: tuple[str, ...] = ()
    stages: tuple[tuple[int, tuple[str, ...]], ...] = ()

    def shard(self, *patterns: str) -> ParallelPlan:
        """A plan that also shards what the patterns name."""
        return attrs.evolve(self, shards=self.shards + _patterns_given(patterns, "shard"))

    def stage(self, index: int, *patterns: str) -> ParallelPlan:
        """A plan in which stage ``index`` runs what the patterns name."""
        if isinstance(index, bool) or not isinstance(index, int) or index < 0:
            raise PlanError(f"a stage index is a whole number from 0 up; got {index!r}")
        if any(known == index for known, _ in self.stages):
            raise PlanError(f"stage {index} is given twice; name all of its modules in one call")
        return attrs.evolve(self, stages=(*self.stages, (index, _patterns_given(patterns, f"stage {index}"))))

    def resolve(self, parameters: Sequence[str], *, modules: Collection[str] = ()) -> ResolvedPlan:
        """Apply the shard patterns to the names of one model.

        Args:
            parameters: names of all parameters, aliases too.
            modules: names of all modules; only for near names in errors.

        Raises:
            PlanError: a pattern names nothing that holds a parameter, or the plan has no pattern.
        """
        if not self.shards:
            raise PlanError(
                'the plan shards nothing; add patterns, for instance ParallelPlan().shard("*") (each method returns a new plan)'
            )
        units: dict[str, str] = {}
        for pattern in self.shards:
            owners = {name: find_owner(pattern, name) for name in parameters}
            owned = {name: owner for name, owner in owners.items() if owner is not None}
            if not owned:
                raise _nothing_found("shard pattern", pattern, [*modules, *parameters], hint="a module with parameters")
            for name, owner in owned.items():
                units.setdefault(name, owner)
        return ResolvedPlan(units, tuple(name for name in parameters if name not in units))

    def resolve_stages(self, modules: Sequence[str]) -> dict[str, int]:
        """The stage of each module that a stage pattern names.

        Raises:
            PlanError: a pattern names no module, two stages claim one module, or a stage index is missing.
        """
        owner: dict[str, int] = {}
        for index, patterns in sorted(self.stages):
            for pattern in patterns:
                found = [name for name in modules if name and matches(pattern, name)]
                if not found:
                    raise _nothing_found(f"stage {index} pattern", pattern, modules, hint="a module")
                for name in found:
                    if owner.setdefault(name, index) != index:
                        raise PlanError(
                            f"{name} is claimed by stage {owner[name]} and by stage {index}", pattern=pattern
                        )
        indices = [index for index, _ in sorted(self.stages)]
        if indices != list(range(len(indices))):
            raise PlanError(f"stages must be numbered 0 to {len(indices) - 1} without a gap; got {indices}")
        return owner

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain lists and dicts."""
        return {"shard": list(self.shards), "stages": {index: list(patterns) for index, patterns in self.stages}}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ParallelPlan:
        """The plan that :meth:`to_dict` describes.

        Raises:
            PlanError: an unknown key, or a value of the wrong type.
        """
        if not isinstance(data, Mapping):
            raise PlanError(f"a plan is a mapping with the keys 'shard' and 'stages'; got {type(data).__name__}")
        plan = cls()
        for key, value in data.items():
            plan = plan._with_entry(key, value)
        return plan

    def _with_entry(self, key: Any, value: Any) -> ParallelPlan:
        """A plan that also has what one key of a dict says; None says nothing."""
        if key == "shard":
            patterns = _patterns(value, "shard")
            return self.shard(*patterns) if patterns else self
        if key != "stages":
            raise PlanError(f"unknown key {key!r} in a plan; a plan has 'shard' and 'stages'")
        if value is not None and not isinstance(value, Mapping):
            raise PlanError(f"'stages' maps stage numbers to lists of patterns; got {type(value).__name__}")
        plan = self
        for index, patterns in (value or {}).items():
            plan = plan._with_stage(index, patterns)
        return plan

    def _with_stage(self, key: Any, value: Any) -> ParallelPlan:
        if isinstance(key, bool) or not isinstance(key, int | str) or not str(key).isdecimal():
            raise PlanError(f"a stage index is a whole number from 0 up; got {key!r}")
        return self.stage(int(key), *_patterns(value, f"stages[{key}]"))

    def to_json(self) -> str:
        """:meth:`to_dict` as JSON."""
        return json.dumps(self.to_dict(), indent=2)

    @classmethod
    def from_json(cls, text: str) -> ParallelPlan:
        """The plan in a JSON text; see :meth:`from_dict`.

        Raises:
            PlanError: the text is not JSON, or not a plan.
        """
        try:
            data = json.loads(text, object_pairs_hook=_without_repeats)
        except json.JSONDecodeError as error:
            raise PlanError(f"not a JSON text: {error}") from error
        return cls.from_dict(data)

    def to_yaml(self) -> str:
        """:meth:`to_dict` as YAML.

        Raises:
            PlanError: PyYAML is not installed.
        """
        text: str = _yaml().safe_dump(self.to_dict(), sort_keys=False)
        return text

    @classmethod
    def from_yaml(cls, text: str) -> ParallelPlan:
        """The plan in a YAML text; see :meth:`from_dict`. Each name in it is a string: modules may be called ``0`` or ``no``.

        Example::

            plan = ParallelPlan.from_yaml("{shard: ['layers.*', embed], stages: {0: [embed, layers.0-3], 1: [layers.4-7]}}")

        Raises:
            PlanError: the text is not YAML, or not a plan; says in which line. Or PyYAML is not installed.
        """
        yaml = _yaml()
        try:
            root = yaml.compose(text, Loader=yaml.SafeLoader)
        except yaml.YAMLError as error:
            hint = "\na name that begins with * must be in quotes" if "alias" in str(error) else ""
            raise PlanError(f"not a YAML text: {error}{hint}") from error
        plan = cls()
        for key, node in _pairs(root, "a plan is a mapping with the keys 'shard' and 'stages'"):
            if key.value == "stages" and not _is_empty(node):
                for index, patterns in _pairs(node, "'stages' maps stage numbers to lists of patterns"):
                    with _in_line(index):
                        plan = plan._with_stage(index.value, _plain(patterns))
            else:
                with _in_line(key):
                    plan = plan._with_entry(key.value, _plain(node))
        return plan


def shard(*patterns: str) -> ParallelPlan:
    """Short for ``ParallelPlan().shard(*patterns)``."""
    return ParallelPlan().shard(*patterns)


def require_match(rules: Iterable[tuple[str, bool]], names: Sequence[str], *, what: str) -> None:
    """Refuse rules with a pattern that covers none of the names.

    Raises:
        PlanError: such a pattern; lists near names.
    """
    for pattern, _ in rules:
        if all(find_owner(pattern, name) is None for name in names):
            everything = dict.fromkeys(part for name in names for part in ancestors(name))
            raise _nothing_found(what, pattern, list(everything), hint="a module with parameters")


def _patterns_given(patterns: tuple[str, ...], where: str) -> tuple[str, ...]:
    if not patterns:
        raise PlanError(f"{where} needs at least one pattern")
    return check_patterns(patterns, where)


def check_patterns(patterns: tuple[str, ...], where: str) -> tuple[str, ...]:
    """The patterns, if each of them is one.

    Raises:
        PlanError: one of them is not.
    """
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise PlanError(f"{where}: a pattern is a string; got {pattern!r} ({type(pattern).__name__})")
        if not pattern.strip() or any(not part for part in pattern.split(".")):
            raise PlanError(f"{where}: {pattern!r} is no dotted name; write for instance 'layers.*'", pattern=pattern)
        for part in pattern.split("."):
            if (bounds := re.fullmatch(r"(\d+)-(\d+)", part)) and int(bounds[1]) > int(bounds[2]):
                raise PlanError(
                    f"{where}: the range {part} in {pattern!r} is empty; write {bounds[2]}-{bounds[1]}", pattern=pattern
                )
    return patterns


def _patterns(value: Any, where: str) -> tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list | tuple):
        raise PlanError(f"{where} is a list of patterns; got {value!r} ({type(value).__name__})")
    return tuple(value)


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise PlanError(f"the key {key!r} is given twice; put what belongs to it into one list")
        found[key] = value
    return found


def _nothing_found(what: str, pattern: str, names: Iterable[str], *, hint: str) -> PlanError:
    known = [name for name in dict.fromkeys(names) if name]
    near = difflib.get_close_matches(pattern, known, n=5, cutoff=0.5)
    shown = near or sorted(known, key=lambda name: (name.count("."), name))[:8]
    label = "near names" if near else "there are"
    return PlanError(
        f"{what} {pattern!r} names no {hint.removeprefix('a ')}; {label}: {', '.join(shown)}",
        pattern=pattern,
        near=near,
    )


# YAML is read by its nodes: they know their lines, and have not been made numbers and truth values yet.


def _yaml() -> Any:
    try:
        return importlib.import_module("yaml")
    except ImportError as error:
        raise PlanError(
            "plans in YAML need PyYAML: pip install 'stepwell-graphpasses[yaml]', or use to_json and from_json"
        ) from error


def _pairs(node: Any, what: str) -> list[tuple[Any, Any]]:
    """Keys and values of a mapping; no key twice."""
    if node is None:
        raise PlanError(f"{what}; got an empty text")
    with _in_line(node):
        if node.id != "mapping":
            raise PlanError(f"{what}; got a {node.id}")
    lines: dict[str, int] = {}
    for key, _ in node.value:
        with _in_line(key):
            if key.id != "scalar":
                raise PlanError(f"a key is a name or a number; got a {key.id}")
            if key.value in lines:
                raise PlanError(f"the key {key.value!r} is given twice, first in line {lines[key.value]}")
        lines[key.value] = key.start_mark.line + 1
    return list(node.value)


def _plain(node: Any) -> Any:
    """A name, a list of names, or None."""
    if _is_empty(node):
        return None
    if node.id == "scalar":
        return node.value
    for item in node.value if node.id == "sequence" else (node,):
        with _in_line(item):
            if item.id != "scalar" or _is_empty(item):
                raise PlanError(f"expected a pattern or a list of patterns; got {_kind(item)}")
    return [item.value for item in node.value]


def _kind(node: Any) -> str:
    return "nothing" if _is_empty(node) else f"a {node.id}"


def _is_empty(node: Any) -> bool:
    return bool(node.id == "scalar" and node.tag == "tag:yaml.org,2002:null")


@contextmanager
def _in_line(node: Any) -> Iterator[None]:
    """Errors within say in which line they are, unless they do already."""
    try:
        yield
    except PlanError as error:
        if str(error).startswith("line "):
            raise
        line = f"line {node.start_mark.line + 1}: {error}"
        raise PlanError(line, pattern=error.pattern, near=error.near) from error
