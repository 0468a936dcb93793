"""How many bytes a graph holds at once, from its example values."""

from __future__ import annotations

from collections.abc import Collection

import attrs
import torch
from torch import fx

from . import _compat as compat
from ._graph import JointGraph, emit, is_getitem, is_mutation, is_view, mutated_arguments, value_of


@attrs.frozen
class Peak:
    """The most bytes alive at once, inputs not counted, and the node at which that is."""

    bytes: int
    node: str


def storage_bytes(value: object) -> int:
    """Bytes of a value's own memory."""
    if isinstance(value, torch.Tensor):
        return int(value.untyped_storage().nbytes())
    return 0


def memory_roots(graph: fx.Graph) -> dict[fx.Node, tuple[fx.Node, ...]]:
    """For each node the nodes whose memory its value lies in: itself, unless it is a view or was written in place.

    Several results of one operator lie apart, so each that is picked has its own.
    """
    roots: dict[fx.Node, tuple[fx.Node, ...]] = {}
    for node in graph.nodes:
        shares = (is_view(node) or is_mutation(node) or _is_pick(node) or node.target is compat.WAIT) and node.args
        source = node.args[0] if shares else None
        roots[node] = roots[source] if isinstance(source, fx.Node) else (node,)
    return roots


def _is_pick(node: fx.Node) -> bool:
    """Whether a node picks one of several views."""
    return is_getitem(node) and (is_view(node.args[0]) or is_mutation(node.args[0]))  # type: ignore[arg-type]


def writers_of_memory(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """For each value whose memory is written in place, also through a view, the last node that does so."""
    roots = memory_roots(graph)
    return {root: node for node in graph.nodes for target in mutated_arguments(node) for root in roots[target]}


def give_own_memory(joint: JointGraph, outputs: Collection[int], *, apart: bool = False) -> None:
    """Copy what lies in the memory of an input: whoever gets these outputs may write to them, or keep them while inputs change.

    Args:
        joint: the graph.
        outputs: numbers of the outputs.
        apart: whether they lie apart from one another too.
    """
    roots = memory_roots(joint.graph)
    found = list(joint.outputs)
    taken: set[fx.Node] = set()
    for index in outputs:
        node = found[index]
        if taken.intersection(roots[node]) or any(root.op != "call_function" for root in roots[node]):
            with joint.graph.inserting_before(joint.output_node):
                clone = torch.ops.aten.clone.default
                found[index] = emit(joint.graph, clone, (node,), like=node, phase="backward", mode=joint.mode)
        taken.update(roots[node] if apart else ())
    joint.output_node.args = (tuple(found),)


def estimate_peak(joint: JointGraph) -> Peak:
    """The peak of a run of the graph in order, each value freed after its last reader.

    A bound from above: a backend may let go of what a collective reads before the wait for it.
    """
    roots = memory_roots(joint.graph)
    order = list(joint.graph.nodes)
    last: dict[fx.Node, int] = {}
    for index, node in enumerate(order):
        # What a collective reads is held until it has been waited for.
        held = (
            [s for start in node.all_input_nodes for s in start.all_input_nodes] if node.target is compat.WAIT else []
        )
        for source in (*node.all_input_nodes, *held, node):
            for root in roots[source]:
                last[root] = index
    frees: dict[int, list[fx.Node]] = {}
    for root, index in last.items():
        frees.setdefault(index, []).append(root)
    alive, best = 0, Peak(0, "")
    sizes: dict[fx.Node, int] = {}
    for index, node in enumerate(order):
        if node.op == "call_function" and roots[node] == (node,) and not is_getitem(node):
            picks = [user for user in node.users if is_getitem(user) and roots[user] == (user,)]
            for root in picks or [node]:
                sizes[root] = storage_bytes(value_of(root))
                alive += sizes[root]
            if alive > best.bytes:
                best = Peak(alive, node.name)
        for root in frees.get(index, ()):
            alive -= sizes.pop(root, 0)
    return best
