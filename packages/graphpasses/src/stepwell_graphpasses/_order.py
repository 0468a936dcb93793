"""Moving communication without moving computation.

Computation keeps its order, whatever happens: a graph holds writes in place and random draws, and their order means something.
Only nodes that passes have added to communicate are free, within what their data allows.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping

from torch import fx

from ._collectives import comm_of
from ._graph import positions

Place = tuple[float, int]


def is_free(node: fx.Node) -> bool:
    """Whether a node may be moved: it serves communication, and is no part of the model's own computation."""
    return node.op == "call_function" and comm_of(node) is not None


def rearrange(graph: fx.Graph, wishes: Mapping[fx.Node, float] | None = None) -> None:
    """Put free nodes where they are wished, and as far from that as their data requires.

    Args:
        graph: reordered in place.
        wishes: for free nodes, the position (in the graph as it is) before which they would like to be; others keep theirs.
            A node never comes before what it reads, nor after what reads it.
    """
    position = positions(graph)
    wishes = wishes or {}
    nodes = list(graph.nodes)
    waiting = {node: len(node.all_input_nodes) for node in nodes}
    done: set[fx.Node] = set()
    ready: list[tuple[float, int, fx.Node]] = []
    order: list[fx.Node] = []

    def place(node: fx.Node) -> None:
        stack = [node]
        while stack:  # what a node needs comes first, even before its wish
            current = stack[-1]
            missing = [source for source in current.all_input_nodes if source not in done]
            if current in done:
                stack.pop()
            elif missing:
                stack += reversed(missing)
            else:
                stack.pop()
                done.add(current)
                order.append(current)
                for user in current.users:
                    waiting[user] -= 1
                    if waiting[user] == 0 and is_free(user):
                        heapq.heappush(ready, (wishes.get(user, position[user]), position[user], user))

    for node in nodes:
        if is_free(node):
            if not node.all_input_nodes:
                heapq.heappush(ready, (wishes.get(node, position[node]), position[node], node))
            continue
        while ready and (node.op == "output" or ready[0][0] <= position[node]):
            place(heapq.heappop(ready)[2])
        place(node)
    for index, node in enumerate(order):
        if index:
            order[index - 1].append(node)
