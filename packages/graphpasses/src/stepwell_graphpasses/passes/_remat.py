"""Recompute instead of keeping: forward values that backward reads are computed a second time, right before it does.

A value is only recomputed if that gives the same bits: operators that draw random numbers, write in place, or communicate keep
their results, and so does whatever reads memory that is written later. What was kept is where recomputation starts from.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from .. import _compat as compat
from .._collectives import comm_of
from .._graph import JointGraph, is_getitem, is_mutation, is_random, mutated_arguments, phase_of, positions
from .._memory import memory_roots
from .._pass import PassContext, PassContract
from .._plan import find_owner, require_match


class RematPass:
    """Recomputes modules that a policy names, and what the model itself has put under activation checkpointing.

    Args:
        policy: pairs of a module pattern and True (recompute) or False (keep); the last pattern that covers a module decides.
            What no pattern covers is recomputed where the model's own checkpointing says so.
    """

    name = "remat"
    contract = PassContract(
        requires=frozenset({"collectives"}),
        provides=frozenset({"rematerialized"}),
        conflicts=frozenset({"resharded", "bucketed", "rematerialized", "split"}),
    )

    def __init__(self, policy: Iterable[tuple[str, bool]] = ()) -> None:
        self.policy = tuple(policy)

    def run(self, joint: JointGraph, context: PassContext) -> None:
        """Rewrite the graph.

        Raises:
            PlanError: a pattern of the policy names no module of the graph.
        """
        graph = joint.graph
        modules = list(dict.fromkeys(n.meta["fqn"] for n in graph.nodes if n.meta.get("fqn")))
        require_match(self.policy, modules, what="recompute pattern")
        wanted = {node for node in graph.nodes if self._wants(node)}
        if not wanted:
            return
        unsafe = _unsafe(graph)
        again = {node for node in wanted if node not in unsafe}
        copies: dict[fx.Node, fx.Node] = {}
        for node in list(graph.nodes):
            if node.op != "call_function" or phase_of(node) != "backward":
                continue
            for source in node.all_input_nodes:
                if source in again:
                    with graph.inserting_before(node):
                        node.replace_input_with(source, _copy(graph, source, again, copies))
        kept = sorted({n.meta["fqn"] for n in wanted & unsafe if is_random(n)})
        joint.notes += [(name, "its random draws are kept, not recomputed") for name in kept]
        joint.notes += [
            (name, "its forward is recomputed in backward") for name in sorted({n.meta["fqn"] for n in copies})
        ]

    def _wants(self, node: fx.Node) -> bool:
        if node.op != "call_function" or phase_of(node) != "forward":
            return False
        answer = bool(node.meta.get("recompute", False))
        for pattern, recompute in self.policy:
            if find_owner(pattern, node.meta["fqn"]) is not None:
                answer = recompute
        return answer


def _copy(graph: fx.Graph, node: fx.Node, again: set[fx.Node], copies: dict[fx.Node, fx.Node]) -> fx.Node:
    """The second computation of a node at the insert point, and of what it needs."""
    stack = [node]
    while stack:
        current = stack[-1]
        missing = [s for s in current.all_input_nodes if s in again and s not in copies]
        if current in copies:
            stack.pop()
        elif missing:
            stack += missing
        else:
            stack.pop()
            copy = graph.node_copy(current, lambda n: copies.get(n, n))
            copy.meta = {**current.meta, "phase": "backward", "recompute_of": current.name}
            copies[current] = copy
    return copies[node]


def _unsafe(graph: fx.Graph) -> set[fx.Node]:
    """Nodes whose second computation might differ from the first, or would have an effect."""
    position = positions(graph)
    roots = memory_roots(graph)
    last_write: dict[fx.Node, int] = {}
    for node in graph.nodes:
        for written in mutated_arguments(node):
            for root in roots[written]:
                last_write[root] = position[node]
    unsafe = set()
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        touched = [root for source in (node, *node.all_input_nodes) for root in roots[source]]
        if (
            is_random(node)
            or is_mutation(node)
            or mutated_arguments(node)
            or comm_of(node) is not None
            or node.target is compat.WAIT
            or compat.is_functional_collective(node.target)
            or any(last_write.get(root, -1) >= position[node] for root in touched)
            or (is_getitem(node) and node.args[0] in unsafe)
        ):
            unsafe.add(node)
    return unsafe
