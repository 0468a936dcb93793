"""Collectives whose result nobody reads go away with the waits for them: on every rank, for all ranks have the same graph."""

from __future__ import annotations

from torch import fx

from .. import _compat as compat
from .._graph import JointGraph, is_view, remove_dead
from .._pass import PassContext, PassContract


class DeadCollectivePass:
    """Removes collectives without readers."""

    name = "dead_collectives"
    contract = PassContract(requires=frozenset({"collectives"}))

    def run(self, joint: JointGraph, context: PassContext) -> None:
        """Rewrite the graph."""
        graph = joint.graph
        removed = True
        while removed:
            remove_dead(graph)
            removed = False
            for wait in [n for n in reversed(list(graph.nodes)) if n.target is compat.WAIT]:
                if not wait.users:
                    source = wait.args[0]
                    graph.erase_node(wait)
                    removed = True
                    if isinstance(source, fx.Node) and not source.users and not is_view(source):
                        joint.notes.append((source.name, "collective removed: nobody reads its result"))
                        graph.erase_node(source)
