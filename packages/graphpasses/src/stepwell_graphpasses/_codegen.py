"""A graph as a Python function that costs little besides its operators.

An FX graph can run itself, but each of its calls goes through several Python frames, and its inputs live as long as their caller
holds them. Here a graph becomes straight code over names that are bound once, and forgets each value behind its last reader::

    def step(inputs):
        p_weight, i_x = inputs
        inputs.clear()
        t = call_0(p_weight)
        mm = call_1(i_x, t); p_weight = t = None  # layers.0
        return (mm,)

The graph was captured on fake tensors, and a few operators lay their results out otherwise than these said (the backward of a
layer norm is one). What follows counts on the layout: a view would fail, or ``as_strided`` read other elements. So the first run
looks at every result, and those that came otherwise are from then on copied into the layout that was captured.
"""

from __future__ import annotations

import functools
import keyword
import linecache
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import fx, nn

from . import _compat as compat

_COUNT = iter(range(2**63))

Step: TypeAlias = Callable[[list[Any]], tuple[Any, ...]]
Order: TypeAlias = tuple[int, ...]


def compile_graph(graph: fx.Graph, root: nn.Module) -> Step:
    """A function that runs the graph on a list of its inputs, which it empties.

    Its text is known to tracebacks, with the module of each line.

    Args:
        graph: of placeholders, calls and constants; it stays as it is until the first run is over.
        root: holds the constants.
    """
    known: list[Step] = []

    def step(inputs: list[Any]) -> tuple[Any, ...]:
        if known:
            return known[0](inputs)
        orders, odd = dict(_orders(graph)), set[str]()
        looks = {name: functools.partial(_look, order, name, odd) for name, order in orders.items()}
        result = _code(graph, root, looks)(inputs)
        known.append(_code(graph, root, {name: functools.partial(_laid_out, orders[name]) for name in odd}))
        return result

    return step


def _code(graph: fx.Graph, root: nn.Module, after: Mapping[str, Callable[[Any], Any]]) -> Step:
    """The graph as a function; results of these names go through these functions."""
    writer = _Writer(root)
    inputs = graph.find_nodes(op="placeholder")
    lines = ["def step(inputs):"]
    if inputs:
        lines += [f"    {', '.join(node.name for node in inputs)}, = inputs", "    inputs.clear()"]
    last = _last_readers(graph)
    for node in graph.nodes:
        if node.op == "output":
            lines.append(f"    return {writer.text(node.args[0])}")
        elif node.op != "placeholder":
            lines.append(f"    {writer.statement(node)}")
            if node.name in after:
                lines[-1] += f"; {node.name} = {writer.bind('after', after[node.name])}({node.name})"
            if last[node]:
                lines[-1] += f"; {' = '.join(last[node])} = None"
            if node.meta.get("fqn"):
                lines[-1] += f"  # {node.meta['fqn']}"
    source = "\n".join(lines) + "\n"
    filename = f"<stepwell graph {next(_COUNT)}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    exec(compile(source, filename, "exec"), writer.bound)
    function: Step = writer.bound["step"]
    weakref.finalize(function, linecache.cache.pop, filename, None).atexit = False
    return function


def _orders(graph: fx.Graph) -> Iterator[tuple[str, Order]]:
    """Of every result that fills its memory, by name: its dims from the largest stride to the smallest, as they were captured."""
    for node in graph.nodes:
        value = node.meta.get("val") if node.op == "call_function" else None
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
            continue
        shape, strides = tuple(map(_number, value.shape)), tuple(map(_number, value.stride()))
        order = tuple(sorted(range(len(shape)), key=lambda dim: (-strides[dim], dim)))
        if _is_laid_out(shape, strides, order):
            yield node.name, order


def _number(size: int | torch.SymInt) -> int:
    """The size, or that in the example where it may differ."""
    return size.node.hint if isinstance(size, torch.SymInt) else size


def _is_laid_out(shape: Sequence[int], strides: Sequence[int], order: Order) -> bool:
    expected = 1
    for dim in reversed(order):
        if shape[dim] != 1:
            if strides[dim] != expected:
                return 0 in shape
            expected *= shape[dim]
    return True


def _look(order: Order, name: str, odd: set[str], value: torch.Tensor) -> torch.Tensor:
    if _is_laid_out(value.shape, value.stride(), order):
        return value
    odd.add(name)
    return _laid_out(order, value)


def _laid_out(order: Order, value: torch.Tensor) -> torch.Tensor:
    """The same values, with these dims from the largest stride to the smallest."""
    if _is_laid_out(value.shape, value.stride(), order):
        return value
    return torch.empty_permuted(value.shape, order, dtype=value.dtype, device=value.device).copy_(value)


class _Writer:
    """Writes arguments, and binds what has no text of its own to a name."""

    def __init__(self, root: nn.Module) -> None:
        self.bound: dict[str, Any] = {}
        self._root = root
        self._calls: dict[Any, str] = {}

    def statement(self, node: fx.Node) -> str:
        if node.op == "get_attr":
            value: Any = self._root
            for part in str(node.target).split("."):
                value = getattr(value, part)
            return f"{node.name} = {self.bind('held', value)}"
        if node.op != "call_function":
            raise NotImplementedError(f"a captured graph holds no {node.op} ({node})")
        arguments = [self.text(arg) for arg in node.args]
        arguments += [
            f"**{{{name!r}: {self.text(value)}}}" if keyword.iskeyword(name) else f"{name}={self.text(value)}"
            for name, value in node.kwargs.items()
        ]
        return f"{node.name} = {self._call(node.target)}({', '.join(arguments)})"

    def text(self, value: Any) -> str:
        """An argument as code."""
        if isinstance(value, fx.Node):
            return value.name
        if not _holds_nodes(value):
            plain = value is None or type(value) in (bool, int, str)
            return repr(value) if plain else self.bind("constant", value)
        if isinstance(value, slice):
            return f"slice({self.text(value.start)}, {self.text(value.stop)}, {self.text(value.step)})"
        if isinstance(value, dict):
            return "{" + ", ".join(f"{key!r}: {self.text(item)}" for key, item in value.items()) + "}"
        items = "".join(self.text(item) + ", " for item in value)
        return f"({items})" if isinstance(value, tuple) else f"[{items}]"

    def _call(self, target: Any) -> str:
        if target not in self._calls:
            self._calls[target] = self.bind("call", compat.direct_call(target))
        return self._calls[target]

    def bind(self, kind: str, value: Any) -> str:
        name = f"{kind}_{len(self.bound)}"
        self.bound[name] = value
        return name


def _holds_nodes(value: Any) -> bool:
    if isinstance(value, fx.Node):
        return True
    if isinstance(value, slice):
        return any(_holds_nodes(item) for item in (value.start, value.stop, value.step))
    if isinstance(value, dict):
        return any(map(_holds_nodes, value.values()))
    return isinstance(value, list | tuple) and any(map(_holds_nodes, value))


def _last_readers(graph: fx.Graph) -> dict[fx.Node, list[str]]:
    """For each node the names of the values that nobody reads after it."""
    seen: set[fx.Node] = set()
    found: dict[fx.Node, list[str]] = {}
    for node in reversed(list(graph.nodes)):
        sources: Sequence[fx.Node] = node.all_input_nodes
        fresh = [source for source in sources if source not in seen]
        seen.update(fresh)
        unread = [] if node.users else [node]
        found[node] = [source.name for source in (*fresh, *unread)]
    return found
