"""Collectives whose result nobody reads go away with the waits for them: on every rank, for all ranks have the same graph."""

from __future__ import annotations

from .. import _compat as compat
from .._graph import JointGraph, is_mutation, is_removable
from .._pass import PassContext, PassContract


class DeadCollectivePass:
    """Removes collectives without readers."""

    name = "dead_collectives"
    contract = PassContract(requires=frozenset({"collectives"}))

    def run(self, joint: JointGraph, context: PassContext) -> None:
        """Rewrite the graph."""
        graph = joint.graph
        for node in reversed(list(graph.nodes)):
            if node.users or node.op != "call_function" or is_mutation(node):
                continue
            if compat.is_functional_collective(node.target):
                joint.notes.append((node.name, "collective removed: nobody reads its result"))
            elif node.target is not compat.WAIT and not is_removable(node):
                continue
            graph.erase_node(node)
