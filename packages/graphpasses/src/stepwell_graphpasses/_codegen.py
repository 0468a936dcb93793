"""A graph as a Python function that costs little besides its operators.

An FX graph can run itself, but each of its calls goes through several Python frames, and its inputs live as long as their caller
holds them. Here a graph becomes straight code over names that are bound once, and forgets each value behind its last reader::

    def step(inputs):
        p_weight, i_x = inputs
        inputs.clear()
        t = call_0(p_weight)
        mm = call_1(i_x, t); p_weight = t = None  # layers.0
        return (mm,)
"""

from __future__ import annotations

import keyword
import linecache
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx, nn

from . import _compat as compat

_COUNT = iter(range(2**63))


def compile_graph(graph: fx.Graph, root: nn.Module) -> Callable[[list[Any]], tuple[Any, ...]]:
    """A function that runs the graph on a list of its inputs, which it empties.

    Its text is known to tracebacks, with the module of each line.

    Args:
        graph: of placeholders, calls and constants.
        root: holds the constants.
    """
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
            if last[node]:
                lines[-1] += f"; {' = '.join(last[node])} = None"
            if node.meta.get("fqn"):
                lines[-1] += f"  # {node.meta['fqn']}"
    source = "\n".join(lines) + "\n"
    filename = f"<stepwell graph {next(_COUNT)}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    exec(compile(source, filename, "exec"), writer.bound)
    function: Callable[[list[Any]], tuple[Any, ...]] = writer.bound["step"]
    return function


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
            return f"{node.name} = {self._bind('held', value)}"
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
            return repr(value) if plain else self._bind("constant", value)
        if isinstance(value, slice):
            return f"slice({self.text(value.start)}, {self.text(value.stop)}, {self.text(value.step)})"
        if isinstance(value, dict):
            return "{" + ", ".join(f"{key!r}: {self.text(item)}" for key, item in value.items()) + "}"
        items = "".join(self.text(item) + ", " for item in value)
        return f"({items})" if isinstance(value, tuple) else f"[{items}]"

    def _call(self, target: Any) -> str:
        if target not in self._calls:
            self._calls[target] = self._bind("call", compat.direct_call(target))
        return self._calls[target]

    def _bind(self, kind: str, value: Any) -> str:
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
