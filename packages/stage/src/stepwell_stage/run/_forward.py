"""A model's forward as a row of steps, and functions that run some of them."""

from __future__ import annotations

import ast
import builtins
import copy
import functools
import inspect
import textwrap
import threading
from collections.abc import Callable, Iterable
from types import CodeType, FunctionType
from typing import Any

import attrs

from ..exceptions import StageUsageError
from ._syntax import bound

# CPython 3.11 counts the depth of syntax trees in one place for all threads, and may fail where two make trees at once.
_ONE_AT_A_TIME = threading.Lock()


@attrs.frozen(eq=False)
class Step:
    """One statement of the forward.

    Attributes:
        statement: what it does; modules are written ``self.get_submodule("name")``.
        uses: the modules and tensors of the model that it needs, by name.
        line: where it stands in the source.
    """

    statement: ast.stmt
    uses: tuple[str, ...]
    line: int

    @functools.cached_property
    def reads(self) -> frozenset[str]:
        """Variables that it may read."""
        names = {n.id for n in ast.walk(self.statement) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
        changed = {
            n.target.id
            for n in ast.walk(self.statement)
            if isinstance(n, ast.AugAssign) and isinstance(n.target, ast.Name)
        }
        return frozenset(names | changed)

    @functools.cached_property
    def writes(self) -> frozenset[str]:
        """Variables that it may write."""
        return frozenset(bound(self.statement))

    @property
    def surely_writes(self) -> frozenset[str]:
        """Variables that have another value afterwards whatever happens."""
        return self.writes if isinstance(self.statement, ast.Assign | ast.AnnAssign | ast.AugAssign) else frozenset()


@attrs.frozen(eq=False)
class Forward:
    """A forward as steps.

    Attributes:
        steps: in order; the last returns the result.
        self_name: what the first argument is called.
        arguments: of the forward, without the first.
        function: the forward itself, or None for that of a Sequential.
    """

    steps: tuple[Step, ...]
    self_name: str
    arguments: ast.arguments
    function: Callable[..., Any] | None

    @property
    def argument_names(self) -> tuple[str, ...]:
        """Every argument but the first."""
        found = self.arguments
        every = [*found.posonlyargs, *found.args, found.vararg, *found.kwonlyargs, found.kwarg]
        return tuple(argument.arg for argument in every if argument is not None)

    def crossing(self, at: int) -> tuple[str, ...]:
        """Variables that are written before step ``at`` and read from there on."""
        live: frozenset[str] = frozenset()
        for step in reversed(self.steps[at:]):
            live = (live - step.surely_writes) | step.reads
        written = frozenset(self.argument_names).union(*(step.writes for step in self.steps[:at]))
        return tuple(sorted(live & written))

    def compile(self, start: int, end: int) -> Callable[..., Any]:
        """A function that runs the steps from ``start`` to before ``end``.

        It takes the model's part, and the forward's arguments if it is the first, else what crosses the cut before it; it
        returns what crosses the cut after it, as a tuple, or the result if it is the last.
        """
        steps = self.steps[start:end]
        if start == 0:
            arguments = copy.deepcopy(self.arguments)
            arguments.defaults = [ast.Constant(None) for _ in arguments.defaults]
            arguments.kw_defaults = [
                None if default is None else ast.Constant(None) for default in arguments.kw_defaults
            ]
        else:
            arguments = plain_arguments(self.crossing(start))
        given = self.argument_names if start == 0 else self.crossing(start)
        body = [step.statement for step in steps]
        if end < len(self.steps):
            leaving = self.crossing(end)
            # What an `if` may have left without value crosses as None; where one process would go on, nobody reads it.
            sure = frozenset(given).union(*(step.surely_writes for step in steps))
            unsure = [
                ast.Assign([ast.Name(name, ast.Store())], ast.Constant(None)) for name in leaving if name not in sure
            ]
            values = ast.Tuple([ast.Name(name, ast.Load()) for name in leaving], ast.Load())
            body = [*unsure, *body, ast.Return(values)]
        arguments.posonlyargs.insert(0, ast.arg(self.self_name))
        return _build(body, arguments, self.function, with_defaults=start == 0)


def parse(function: Callable[..., Any]) -> tuple[ast.FunctionDef, str, int]:
    """The function's source: its tree, file and first line."""
    try:
        lines, first = inspect.getsourcelines(function)
        path = inspect.getsourcefile(inspect.unwrap(function)) or "<unknown>"
        with _ONE_AT_A_TIME:
            (tree,) = ast.parse(textwrap.dedent("".join(lines))).body
    except (OSError, TypeError, SyntaxError, ValueError) as error:
        raise StageUsageError(
            f"the source of {function.__qualname__} cannot be read ({error}); cut the model before it is compiled or wrapped,"
            " cut it with split(), which needs no source, or write the stages yourself, as modules for PipelineStage"
        ) from error
    if not isinstance(tree, ast.FunctionDef):
        raise StageUsageError(f"{function.__qualname__} is not written as a function; write the stages yourself")
    return tree, path, max(first, 1)


def plain_arguments(names: Iterable[str]) -> ast.arguments:
    """Arguments of these names, without defaults."""
    return ast.arguments(
        posonlyargs=[], args=[ast.arg(name) for name in names], kwonlyargs=[], kw_defaults=[], defaults=[]
    )


def _build(
    body: list[ast.stmt], arguments: ast.arguments, source: Callable[..., Any] | None, *, with_defaults: bool
) -> Callable[..., Any]:
    """A function with this body that sees what the source's function sees, also variables that it closes over."""
    closure = getattr(source, "__closure__", None) or ()
    code: CodeType | None = getattr(source, "__code__", None)
    cells = dict(zip(() if code is None else code.co_freevars, closure, strict=True))
    with _ONE_AT_A_TIME:
        tree = ast.parse("def make():\n    def forward(): ...")
    (outer,) = tree.body
    assert isinstance(outer, ast.FunctionDef)
    (inner,) = outer.body
    assert isinstance(inner, ast.FunctionDef)
    outer.args = plain_arguments(cells)
    inner.args, inner.body = arguments, copy.deepcopy(body)
    path = "<stages>" if source is None else inspect.getsourcefile(source) or "<stages>"
    made = compile_tree(ast.fix_missing_locations(tree), path, "exec")
    for _ in range(2):  # the module's code holds that of make, which holds that of forward
        made = next(part for part in made.co_consts if isinstance(part, CodeType))
    function = FunctionType(
        made,
        {"__builtins__": builtins} if source is None else source.__globals__,
        "forward",
        getattr(source, "__defaults__", None) if with_defaults else None,
        tuple(cells[name] for name in made.co_freevars),
    )
    function.__kwdefaults__ = getattr(source, "__kwdefaults__", None) if with_defaults else None
    return function


def compile_tree(tree: ast.Module | ast.Expression, path: str, mode: str) -> CodeType:
    """Code from a syntax tree."""
    with _ONE_AT_A_TIME:
        return compile(tree, path, mode)
