"""A model's forward, read as a row of steps between which it can be cut.

The source is taken apart, not run: loops over the model's own layers are unrolled, calls of its modules are lifted out of larger
expressions in the order in which they run, and an ``nn.Sequential`` is opened. Then every step is a statement of its own, and
what has to cross a cut is what later steps read and earlier ones wrote. What cannot be told apart this way (a ``with``, an
``if``, a loop that is not over layers) stays one step, whole. What cannot be cut at all is refused, with its line.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn, TypeAlias

import torch
from torch import nn

from .._compat import has_hooks, tree_flatten
from ..exceptions import StageUsageError
from ._forward import Forward, Step, compile_tree, parse, plain_arguments
from ._syntax import bound, in_order, operands, put

_Value: TypeAlias = "nn.Module | float | str"

_BUILTINS: dict[str, Any] = {
    "enumerate": enumerate,
    "len": len,
    "list": list,
    "range": range,
    "reversed": reversed,
    "zip": zip,
}
# What an expression that says which layers a loop goes over may be made of.
_FIXED = (
    *(ast.Attribute, ast.Subscript, ast.Slice, ast.Constant, ast.UnaryOp, ast.BinOp, ast.Tuple, ast.List),
    *(ast.expr_context, ast.operator, ast.unaryop, ast.keyword),
)
_MOST_STEPS = 100_000  # a loop over more is not one over layers


def read_forward(model: nn.Module) -> Forward:
    """The model's forward as steps.

    Raises:
        StageUsageError: it cannot be cut; names the line.
    """
    if has_hooks(model):
        raise StageUsageError(
            f"{type(model).__name__} has hooks of its own, which its parts would not run; put them on its layers"
        )
    if type(model).forward is nn.Sequential.forward and "forward" not in vars(model):
        call = ast.Return(None, lineno=1, col_offset=0)
        reader = _Reader(model, None, "self", "", 1)
        result = reader.open_sequential(model, "", ast.Name("x", ast.Load()), call)
        reader.emit(ast.Return(result), call, ())
        return Forward(tuple(reader.steps), "self", plain_arguments(["x"]), None)
    if "forward" in vars(model):
        raise StageUsageError(
            f"{type(model).__name__} has a forward put on the object, whose source may not be its own; cut before"
        )
    function = type(model).forward
    tree, path, first = parse(function)
    self_name = (tree.args.posonlyargs + tree.args.args)[0].arg
    reader = _Reader(model, function, self_name, path, first)
    if tree.decorator_list or inspect.unwrap(function) is not function:
        reader.refuse([*tree.decorator_list, tree][0], "a decorated forward is more than its source says")
    arguments = copy.deepcopy(tree.args)
    (arguments.posonlyargs or arguments.args).pop(0)
    for argument in ast.walk(arguments):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    reader.read(tree.body, is_whole=True)
    return Forward(tuple(reader.steps), self_name, arguments, function)


class _Reader:
    """Takes one forward apart. Mutable: it collects steps."""

    def __init__(
        self, model: nn.Module, function: Callable[..., Any] | None, self_name: str, path: str, first_line: int
    ) -> None:
        self.model = model
        self.self_name = self_name
        self.steps: list[Step] = []
        self._function = function
        self._path = path
        self._first_line = first_line
        self._values: dict[str, _Value] = {}  # variables that stand for a layer, or a number from a loop over layers
        self._names: dict[int, str] = {}
        for name, module in model.named_modules(remove_duplicate=False):
            self._names.setdefault(id(module), name)
        self._temporaries = 0
        self.unsure: dict[str, str] = {}  # variables that may or may not stand for a layer

    def refuse(self, node: ast.AST, why: str) -> NoReturn:
        """Name the line that forbids cutting."""
        line = getattr(node, "lineno", 1)
        text = ast.unparse(node).splitlines()[0]
        raise StageUsageError(
            f"{type(self.model).__name__} cannot be cut: {self._path}:{line + self._first_line - 1}: {text!r}: {why}; write the"
            " stages yourself, as modules for PipelineStage"
        )

    # Statements.

    def read(self, body: Sequence[ast.stmt], *, is_whole: bool = False) -> None:
        for position, statement in enumerate(body):
            is_last = is_whole and position == len(body) - 1
            if isinstance(statement, ast.Return) and not is_last:
                self.refuse(statement, "it returns before the end")
            self._statement(statement)
        if is_whole and not (body and isinstance(body[-1], ast.Return)):
            self.refuse(body[-1], "a forward that is cut ends in a return")

    def _statement(self, statement: ast.stmt) -> None:
        if isinstance(statement, ast.Pass) or (
            isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        ):
            return
        if isinstance(statement, ast.Delete) and all(isinstance(target, ast.Name) for target in statement.targets):
            return  # variables that nobody reads do not cross anyway
        self._check(statement)
        if isinstance(statement, ast.For) and self._unroll(statement):
            return
        if isinstance(statement, ast.Assign) and self._names_a_layer(statement):
            return
        changing = self._write_out(statement)
        changed = statement
        if (
            isinstance(statement, ast.Assign | ast.AugAssign | ast.AnnAssign | ast.Expr | ast.Return)
            and statement.value
        ):
            changed = copy.copy(statement)
            changed.value = self._lift(statement.value, statement, is_outermost=True)
        self._emit_bound(changed, statement)
        for name in bound(statement):
            self._values.pop(name, None)
            self.unsure.pop(name, None)
        self.unsure.update(changing)

    def _write_out(self, statement: ast.stmt) -> dict[str, str]:
        """Take note of what the statement may change, and may not: of numbers make variables that it can change.

        Gives the layers that variables may not stand for afterwards, by variable.
        """
        changing = bound(statement) & (self._values.keys() | self.unsure.keys())
        if isinstance(statement, ast.Assign) and not any(isinstance(n, ast.NamedExpr) for n in ast.walk(statement)):
            named = [n.id for target in statement.targets for n in in_order(target)]
            changing = {n for n in changing if named.count(n) > 1}  # a[i], i = …; others change at the end
        layers = {}
        for name in sorted(changing):
            value = self._values.pop(name, None)
            if value is not None and not isinstance(value, nn.Module):
                self.emit(ast.Assign([ast.Name(name, ast.Store())], ast.Constant(value)), statement, ())
                continue
            layers[name] = self.unsure.pop(name) if value is None else self._names[id(value)]
            if next((isinstance(n.ctx, ast.Load) for n in in_order(statement) if n.id == name), False):
                self.refuse(statement, f"{name} is the layer {layers[name]!r} at first, and may be another one later")
        return layers

    def refuse_hidden(self, node: ast.Attribute) -> None:
        """Layers in a plain list are no parts of the model that a stage could take."""
        leaves, _ = tree_flatten(vars(self.model).get(node.attr))
        if any(isinstance(leaf, nn.Module | nn.Parameter) for leaf in leaves):
            self.refuse(
                node, "it holds layers in a plain container: use nn.ModuleList, nn.ModuleDict or nn.ParameterList"
            )

    @contextlib.contextmanager
    def hiding(self, names: Iterable[str], node: ast.AST) -> Iterator[None]:
        """While what is inside a lambda or comprehension is read, whose variables have these names."""
        hidden = set(names)
        if self.self_name in hidden:
            self.refuse(node, f"{self.self_name} is not the model in it")
        outside = self._values, self.unsure
        self._values = {name: value for name, value in self._values.items() if name not in hidden}
        self.unsure = {name: layer for name, layer in self.unsure.items() if name not in hidden}
        try:
            yield
        finally:
            self._values, self.unsure = outside

    def _check(self, statement: ast.stmt) -> None:
        for node in ast.walk(statement):
            if isinstance(node, ast.Return) and node is not statement:
                self.refuse(node, "it returns before the end")
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom):
                self.refuse(
                    node, "what is defined or imported here cannot cross to another stage; move it out of the forward"
                )
            if isinstance(node, ast.Global | ast.Nonlocal | ast.Yield | ast.YieldFrom | ast.Await):
                self.refuse(node, "stages on different ranks have no state in common")
            if isinstance(node, ast.Name) and node.id in ("super", "__class__"):
                self.refuse(node, "the forward of a base class is not in this source")
            if isinstance(node, ast.Attribute | ast.Subscript) and not isinstance(node.ctx, ast.Load):
                root: ast.expr = node
                while isinstance(root, ast.Attribute | ast.Subscript):
                    root = root.value
                if isinstance(root, ast.Name) and root.id == self.self_name:
                    self.refuse(statement, "it changes the model, and a stage on another rank would not see that")

    def _unroll(self, loop: ast.For) -> bool:
        """Unroll a loop over layers; whether it is one."""
        items = self._evaluate(loop.iter)
        if items is None or loop.orelse or any(isinstance(node, ast.Break | ast.Continue) for node in ast.walk(loop)):
            return False
        for item in items:
            self._bind(loop.target, item, loop)
            self.read(loop.body)
        return True

    def _names_a_layer(self, statement: ast.Assign) -> bool:
        """Whether it only gives layers other names."""
        names: dict[str, nn.Module] = {}
        for target in statement.targets:
            pairs = [(target, statement.value)]
            if isinstance(target, ast.Tuple) and isinstance(statement.value, ast.Tuple):
                pairs = list(itertools.zip_longest(target.elts, statement.value.elts))
            for name, part in pairs:
                value = self._resolve(part)
                if not isinstance(name, ast.Name) or not isinstance(value, nn.Module) or value is self.model:
                    return False
                names[name.id] = value
        for variable, layer in names.items():
            self._set(variable, layer)
        return True

    def _set(self, name: str, value: _Value) -> None:
        self._values[name] = value
        self.unsure.pop(name, None)

    def _bind(self, target: ast.expr, item: Any, loop: ast.For) -> None:
        if isinstance(target, ast.Name):
            self._set(target.id, item)
        elif isinstance(target, ast.Tuple) and isinstance(item, tuple) and len(item) == len(target.elts):
            for part, value in zip(target.elts, item, strict=True):
                self._bind(part, value, loop)
        else:
            self.refuse(loop, "the loop's variables do not fit the layers that it goes over")

    def _evaluate(self, expression: ast.expr) -> list[Any] | None:
        """The items of a loop over layers, or over numbers that say which; None for any other loop."""
        for node in ast.walk(expression):
            if isinstance(node, ast.Name):
                known = node.id in _BUILTINS or node.id == self.self_name or node.id in self._values
            elif isinstance(node, ast.Call):
                is_method = isinstance(node.func, ast.Attribute) and node.func.attr in ("items", "keys", "values")
                known = is_method or isinstance(node.func, ast.Name)
            else:
                known = isinstance(node, _FIXED)
            if not known:
                return None
        try:
            code = compile_tree(ast.fix_missing_locations(ast.Expression(expression)), "<loop>", "eval")
            items = list(itertools.islice(eval(code, {"__builtins__": {}}, self._scope()), _MOST_STEPS + 1))
        except Exception:  # not something to go over as it is written: leave it to the run
            return None
        return items if len(items) <= _MOST_STEPS and all(self._is_simple(item) for item in items) else None

    def _scope(self) -> dict[str, Any]:
        return {**_BUILTINS, **self._values, self.self_name: self.model}

    def _is_simple(self, item: Any) -> bool:
        if isinstance(item, tuple):
            return all(self._is_simple(part) for part in item)
        return id(item) in self._names if isinstance(item, nn.Module) else type(item) in (int, float, str)

    # Expressions.

    def _lift(self, expression: ast.expr, statement: ast.stmt, *, is_outermost: bool = False) -> ast.expr:
        """The expression without the calls of modules in it, which become steps before it.

        Whatever is evaluated before a lifted call becomes a step before that call too, so that the order stays.
        """
        if not self._calls_modules(expression):
            return expression
        children = operands(expression)
        if children is None:
            return expression  # such as a lambda or a condition, which may not run: stays whole
        last = max((i for i, (_, child) in enumerate(children) if self._calls_modules(child)), default=-1)
        changed = copy.copy(expression)
        replaced: dict[str, Any] = {}
        for index, (place, child) in enumerate(children):
            lifted = self._lift(child, statement)
            if index < last and not self._is_fixed(lifted):
                lifted = self._keep(lifted, statement)
            put(changed, place, lifted, replaced)
        module = self._resolve(changed.func) if isinstance(changed, ast.Call) else None
        if not isinstance(changed, ast.Call) or not isinstance(module, nn.Module) or module is self.model:
            return changed
        name = self._names[id(module)]
        is_plain = len(changed.args) == 1 and not changed.keywords and not isinstance(changed.args[0], ast.Starred)
        if is_plain and _is_plain_sequential(module):
            return self.open_sequential(module, name, changed.args[0], statement)
        return changed if is_outermost and not isinstance(statement, ast.Return) else self._keep(changed, statement)

    def open_sequential(self, module: nn.Module, name: str, value: ast.expr, statement: ast.stmt) -> ast.expr:
        """The layers of a Sequential, one step each; the expression that has the result."""
        for key, layer in module.named_children():
            whole = f"{name}.{key}" if name else key
            if _is_plain_sequential(layer):
                value = self.open_sequential(layer, whole, value, statement)
            else:
                value = self._keep(ast.Call(self._submodule(whole), [value], []), statement, (whole,))
        return value

    def _keep(self, expression: ast.expr, statement: ast.stmt, uses: tuple[str, ...] = ()) -> ast.Name:
        """Make the expression a step whose value has a name of its own."""
        self._temporaries += 1
        name = f"_value_{self._temporaries}"
        assignment = ast.Assign([ast.Name(name, ast.Store())], expression)
        if uses:
            self.emit(assignment, statement, uses)
        else:
            self._emit_bound(assignment, statement)
        return ast.Name(name, ast.Load())

    def _calls_modules(self, expression: ast.AST) -> bool:
        return any(
            isinstance(node, ast.Call) and isinstance(self._resolve(node.func), nn.Module)
            for node in ast.walk(expression)
        )

    def _is_fixed(self, expression: ast.expr) -> bool:
        """Whether it means the same when it is evaluated later: a variable, a part of the model, an attribute of these."""
        while isinstance(expression, ast.Attribute | ast.Starred):
            expression = expression.value
        return isinstance(expression, ast.Name | ast.Constant) or self._resolve(expression) is not None

    def _resolve(self, expression: ast.AST) -> Any:
        """The model's module or tensor, or the loop's number, that the expression names as it stands; else None."""
        if isinstance(expression, ast.Name):
            return self.model if expression.id == self.self_name else self._values.get(expression.id)
        if isinstance(expression, ast.Attribute):
            owner = self._resolve(expression.value)
            if not isinstance(owner, nn.Module):
                return None
            try:
                value = getattr(owner, expression.attr)
            except AttributeError:
                self.refuse(expression, f"the model has no {expression.attr!r}")
            return value if isinstance(value, nn.Module) or _is_held(owner, expression.attr) else None
        if isinstance(expression, ast.Subscript) and isinstance(self._resolve(expression.value), nn.Module):
            items = self._evaluate(ast.List([expression], ast.Load()))
            return items[0] if items else None
        return None

    # Steps.

    def emit(self, statement: ast.stmt, source: ast.stmt, uses: Iterable[str]) -> None:
        """Add a step."""
        line = source.lineno if hasattr(source, "lineno") else 1
        ast.copy_location(statement, source)
        ast.fix_missing_locations(statement)
        ast.increment_lineno(statement, self._first_line - 1)
        self.steps.append(Step(statement, tuple(dict.fromkeys(uses)), line + self._first_line - 1))

    def _emit_bound(self, statement: ast.stmt, source: ast.stmt) -> None:
        """Add a step in whose statement the model's parts are still written as in the source."""
        binder = _Binder(self)
        self.emit(binder.visit(copy.deepcopy(statement)), source, binder.uses)

    def _submodule(self, name: str) -> ast.expr:
        get = ast.Attribute(ast.Name(self.self_name, ast.Load()), "get_submodule", ast.Load())
        return ast.Call(get, [ast.Constant(name)], [])


class _Binder(ast.NodeTransformer):
    """Writes the model's modules as ``self.get_submodule(name)``, and notes what of the model is used."""

    def __init__(self, reader: _Reader) -> None:
        self.uses: list[str] = []
        self._reader = reader

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if isinstance(node.ctx, ast.Load) and node.id == self._reader.self_name:
            self._reader.refuse(node, f"it hands {node.id} on as a whole, and a stage has only a part of the model")
        if isinstance(node.ctx, ast.Load) and node.id in self._reader.unsure:
            self._reader.refuse(node, f"it is the layer {self._reader.unsure[node.id]!r}, or another one")
        value = self._reader._values.get(node.id) if isinstance(node.ctx, ast.Load) else None
        return node if value is None else self._write(value, node)

    def visit_Lambda(self, node: ast.Lambda) -> ast.AST:
        node.args = self.visit(node.args)
        with self._reader.hiding((arg.arg for arg in ast.walk(node.args) if isinstance(arg, ast.arg)), node):
            node.body = self.visit(node.body)
        return node

    def _visit_comprehension(self, node: ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp) -> ast.AST:
        loops = node.generators
        first = self.visit(loops[0].iter)  # seen from outside, unlike all the rest
        loops[0].iter = ast.Constant(None)
        with self._reader.hiding((name.id for loop in loops for name in in_order(loop.target)), node):
            self.generic_visit(node)
        loops[0].iter = first
        return node

    visit_ListComp = visit_SetComp = visit_DictComp = visit_GeneratorExp = _visit_comprehension

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        value = self._reader._resolve(node)
        return self.generic_visit(node) if value is None else self._write(value, node)

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        reader = self._reader
        owner = reader._resolve(node.value)
        if not isinstance(owner, nn.Module):
            return self.generic_visit(node)
        value = getattr(owner, node.attr, None)
        if isinstance(value, nn.Module):
            return self._write(value, node)
        prefix = reader._names[id(owner)]
        name = f"{prefix}.{node.attr}" if prefix else node.attr
        if _is_held(owner, node.attr):
            self.uses.append(name)
        elif owner is reader.model:
            reader.refuse_hidden(node)
            self.uses += _uses_of_member(reader, node)
        elif type(value) in (int, float, str, bool, type(None)) and node.attr != "training":
            return ast.copy_location(ast.Constant(value), node)
        else:
            self.uses.append(prefix)
        holder = reader._submodule(prefix) if prefix else ast.Name(reader.self_name, ast.Load())
        return ast.copy_location(ast.Attribute(holder, node.attr, node.ctx), node)

    def _write(self, value: _Value, node: ast.expr) -> ast.AST:
        if not isinstance(value, nn.Module):
            return ast.copy_location(ast.Constant(value), node)
        if value is self._reader.model:
            self._reader.refuse(node, "it calls the model itself")
        name = self._reader._names[id(value)]
        self.uses.append(name)
        return ast.copy_location(self._reader._submodule(name), node)


def _is_plain_sequential(module: nn.Module) -> bool:
    """Whether calling it calls its layers in order, and nothing else."""
    return type(module).forward is nn.Sequential.forward and "forward" not in vars(module) and not has_hooks(module)


def _is_held(owner: nn.Module, name: str) -> bool:
    """Whether the module has a parameter or buffer of this name."""
    held = (owner.named_parameters(recurse=False, remove_duplicate=False), owner.named_buffers(recurse=False))
    return any(name == known for kind in held for known, _ in kind)


def _uses_of_member(reader: _Reader, node: ast.Attribute, seen: frozenset[str] = frozenset()) -> list[str]:
    """What of the model a method or property of it uses, by its source; a plain attribute uses nothing."""
    member = inspect.getattr_static(type(reader.model), node.attr, None)
    function = member.fget if isinstance(member, property) else member
    if not inspect.isfunction(function) or node.attr in vars(reader.model):
        return []
    if hasattr(nn.Module, node.attr):
        reader.refuse(node, "it asks about the whole model, and a stage has only a part of it")
    if node.attr in seen:
        return []
    tree, path, first = parse(function)
    inner = _Reader(reader.model, function, (tree.args.posonlyargs + tree.args.args)[0].arg, path, first)
    found: list[str] = []
    attributes = [n for n in ast.walk(tree) if isinstance(n, ast.Attribute)]
    roots = {id(n.value) for n in attributes}
    for name in ast.walk(tree):
        if isinstance(name, ast.Name) and name.id == inner.self_name and id(name) not in roots:
            inner.refuse(name, f"it hands {name.id} on as a whole, and a stage has only a part of the model")
    for attribute in attributes:
        if not (isinstance(attribute.value, ast.Name) and attribute.value.id == inner.self_name):
            continue
        if not isinstance(attribute.ctx, ast.Load):
            inner.refuse(attribute, "it changes the model, and a stage on another rank would not see that")
        value = inner._resolve(attribute)
        if isinstance(value, nn.Module):
            found.append(inner._names[id(value)])
        elif isinstance(value, torch.Tensor):
            found.append(attribute.attr)
        else:
            inner.refuse_hidden(attribute)
            found += _uses_of_member(inner, attribute, seen | {node.attr})
    return found
