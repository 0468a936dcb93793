"""The graph of a train step as the passes see it: its record, its node marks, and what may be said about a node."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import attrs
import torch
from torch import fx, nn

from . import _compat as compat
from ._inputs import InputGuards
from ._table import ParameterTable

Phase = Literal["forward", "backward"]

OpOverload = type(torch.ops.aten.t.default)  # torch.ops is public, the class of its members has no public name
# Their schemas do not say that they write to the running statistics (arguments 3 and 4) in training (argument 5).
BATCH_NORMS = frozenset(
    getattr(torch.ops.aten, name).default for name in ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm")
)


@attrs.frozen
class Buffer:
    """One buffer of the model, its other names, and what it looks like."""

    name: str
    aliases: tuple[str, ...]
    shape: torch.Size
    dtype: torch.dtype


@attrs.define(eq=False)
class JointGraph:
    """Forward and backward of one train step in one graph.

    Calling convention: the placeholders are the parameters in table order, the buffers, then the tensor inputs; passes may
    append more (:attr:`extra_inputs`). The outputs are the loss, the named losses, then one gradient for each name of
    :attr:`gradients`. Nothing else enters or leaves; buffers are written in place.

    Mutable, because passes rewrite it; each pipeline works on its own :meth:`copy`.

    Attributes:
        graph: the FX graph.
        root: holds the constants that the graph looks up.
        table: the parameters.
        buffers: the buffers.
        guards: what the graph assumes about the inputs.
        losses: names of the named losses, with the value of those that are constants.
        gradients: names of the parameters whose gradient is an output, in order.
        mode: the mode in which the nodes' example values live.
        units: module of the plan for each parameter; filled by data parallelism.
        containers: names of the modules that only hold others (lists, sequences, dicts).
        kept: parameters that stay gathered between forward and backward although others are freed.
        facts: what passes have provided so far.
        extra_inputs: names of the placeholders that passes have appended, in order.
        notes: what passes want explained: ``(subject, sentence)``.
    """

    graph: fx.Graph
    root: nn.Module
    table: ParameterTable
    buffers: tuple[Buffer, ...]
    guards: InputGuards
    losses: tuple[tuple[str, Any], ...]
    gradients: tuple[str, ...]
    mode: compat.ExampleMode
    units: dict[str, str] = attrs.field(factory=dict)
    containers: frozenset[str] = frozenset()
    kept: frozenset[str] = frozenset()
    facts: frozenset[str] = frozenset()
    extra_inputs: tuple[str, ...] = ()
    notes: list[tuple[str, str]] = attrs.field(factory=list)

    @property
    def module(self) -> fx.GraphModule:
        """The graph as it is now, callable with the placeholders' values; its ``code`` is the graph's text. Made at each call."""
        return fx.GraphModule(self.root, self.graph)

    @property
    def placeholders(self) -> list[fx.Node]:
        """All inputs in order."""
        return self.graph.find_nodes(op="placeholder")

    @property
    def parameter_nodes(self) -> dict[str, fx.Node]:
        """The placeholder of each parameter by canonical name."""
        return dict(zip(self.table.names, self.placeholders, strict=False))

    @property
    def output_node(self) -> fx.Node:
        """The output node."""
        node: fx.Node = next(iter(reversed(self.graph.nodes)))
        return node

    @property
    def outputs(self) -> tuple[Any, ...]:
        """All outputs in order."""
        return tuple(self.output_node.args[0])  # type: ignore[arg-type]

    @property
    def gradient_nodes(self) -> dict[str, Any]:
        """The node of each gradient by the name of its parameter."""
        if not self.gradients:
            return {}
        return dict(zip(self.gradients, self.outputs[-len(self.gradients) :], strict=True))

    def set_gradients(self, gradients: Mapping[str, fx.Node]) -> None:
        """Replace the gradient outputs, and their names."""
        head = self.outputs[: len(self.outputs) - len(self.gradients)]
        self.output_node.args = ((*head, *gradients.values()),)
        self.gradients = tuple(gradients)

    def copy(self) -> JointGraph:
        """A graph of its own with the same values behind it."""
        graph = fx.Graph()
        val_map: dict[fx.Node, fx.Node] = {}
        graph.output(graph.graph_copy(self.graph, val_map))
        output = next(iter(reversed(graph.nodes)))
        output.meta = dict(self.output_node.meta)
        for node in val_map.values():
            node.meta = dict(node.meta)
        return attrs.evolve(self, graph=graph, units=dict(self.units), notes=list(self.notes))


def phase_of(node: fx.Node) -> Phase:
    """The phase a node belongs to."""
    return node.meta.get("phase", "forward")  # type: ignore[no-any-return]


def value_of(node: fx.Node) -> Any:
    """The example value of a node: a fake tensor, a number, a symbol, or a tuple of them."""
    return node.meta.get("val")


def emit(
    graph: fx.Graph,
    target: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    *,
    like: fx.Node,
    phase: Phase | None = None,
    mode: compat.ExampleMode,
    **marks: Any,
) -> fx.Node:
    """Write a call at the graph's insert point, with its example value, and marks taken from ``like``.

    Args:
        graph: the graph.
        target: an operator.
        args: nodes and constants.
        kwargs: the same by name.
        like: the node whose module and phase the new one belongs to.
        phase: another phase.
        mode: the mode of example values.
        marks: further entries of the node's meta.
    """
    node = graph.call_function(target, args, kwargs)
    values, named = fx.node.map_arg((args, kwargs or {}), value_of)
    node.meta = {
        "val": example(target, values, named, mode=mode),
        "fqn": like.meta.get("fqn", ""),
        "phase": phase or phase_of(like),
        **marks,
    }
    return node


def example(target: Callable[..., Any], args: Any, kwargs: Mapping[str, Any], *, mode: compat.ExampleMode) -> Any:
    """What an operator gives for example values.

    Layers are alike, so the same question comes again and again: its answer is kept, unless a size is a symbol.
    """
    if target is operator.getitem:  # nothing to ask, and what it picks from may be long
        return args[0][args[1]]
    key = _question((target, *args, *sorted(kwargs.items())))
    if key is not None and key in mode.known:
        return mode.known[key]
    with mode:
        value = target(*args, **kwargs)
    if key is not None:
        mode.known[key] = value
    return value


def _question(value: Any) -> Any:
    """A key for arguments, equal for those that an operator cannot tell apart; None where there is none."""
    if isinstance(value, torch.Tensor):
        layout = (*value.shape, *value.stride(), value.storage_offset(), value.untyped_storage().nbytes())
        if not all(type(size) is int for size in layout):
            return None
        return (value.dim(), layout, value.dtype, value.device)
    if isinstance(value, list | tuple):
        parts = tuple(_question(item) for item in value)
        return None if None in parts else (type(value), parts)
    return None if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool | slice) else (type(value), value)


def is_mutation(node: fx.Node) -> bool:
    """Whether a node writes to one of its arguments."""
    return isinstance(node.target, OpOverload) and node.target._schema.is_mutable


def mutated_arguments(node: fx.Node) -> tuple[fx.Node, ...]:
    """The arguments that a node writes to."""
    if node.target in BATCH_NORMS and node.args[5]:
        return tuple(n for n in node.args[3:5] if isinstance(n, fx.Node))
    if not is_mutation(node):
        return ()
    assert isinstance(node.target, OpOverload)
    found: list[fx.Node] = []
    for position, argument in enumerate(node.target._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
        found += [n for n in (value if isinstance(value, list | tuple) else [value]) if isinstance(n, fx.Node)]
    return tuple(found)


def is_random(node: fx.Node) -> bool:
    """Whether a node draws from a random generator (attention without dropout carries the tag, and does not)."""
    if not isinstance(node.target, OpOverload) or torch.Tag.nondeterministic_seeded not in node.target.tags:
        return False
    for position, argument in enumerate(node.target._schema.arguments):
        if argument.name == "dropout_p":
            given = node.args[position] if position < len(node.args) else node.kwargs.get("dropout_p", 0.0)
            return bool(given != 0.0)
    return True


def is_view(node: fx.Node) -> bool:
    """Whether the result shares the memory of an argument without writing to it."""
    if node.target is compat.UNSAFE_VIEW:  # shares memory although its schema does not say so
        return True
    if not isinstance(node.target, OpOverload) or is_mutation(node) or not node.all_input_nodes:  # as of a number
        return False
    return any(r.alias_info is not None for r in node.target._schema.returns)


def is_getitem(node: fx.Node) -> bool:
    """Whether a node picks one of several results."""
    return node.target is operator.getitem


def is_removable(node: fx.Node) -> bool:
    """Whether nobody would notice if a node without users were gone."""
    if node.op == "get_attr":
        return True
    if node.op != "call_function" or is_mutation(node) or mutated_arguments(node) or is_random(node):
        return False
    return node.target is not compat.WAIT and not compat.is_functional_collective(node.target)


def remove_dead(graph: fx.Graph) -> int:
    """Remove nodes that compute what nobody reads; random draws, writes and collectives stay. Returns their number."""
    removed = 0
    for node in reversed(list(graph.nodes)):
        if not node.users and is_removable(node):
            graph.erase_node(node)
            removed += 1
    return removed


def tensor_bytes(value: Any) -> int:
    """Bytes of a value; sizes that are symbols count with their example."""
    if isinstance(value, torch.Tensor):
        return int(value.numel()) * value.element_size()
    if isinstance(value, list | tuple):
        return sum(map(tensor_bytes, value))
    return 0


def positions(graph: fx.Graph) -> dict[fx.Node, int]:
    """The place of each node in the graph."""
    return {node: index for index, node in enumerate(graph.nodes)}


def first_of(nodes: Iterable[fx.Node], position: Mapping[fx.Node, int]) -> fx.Node:
    """The node that comes first in the graph."""
    return min(nodes, key=position.__getitem__)
