"""What of a backward its first part runs, and what it leaves for the second; the rules are in ``_backward.py``.

Graphs of one stage's microbatches are made anew each time and look alike. So each is only walked through, and what follows from
its looks is worked out once (:class:`Divisions`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import attrs
from torch.autograd.graph import Node

from .._compat import has_post_hooks, has_saved_tensor_hooks

Key: TypeAlias = tuple[Any, ...]

# Nodes that compute, of the gradients of their operands, exactly those that are wanted, and share no work between them. (A batch
# or group norm does share: the sums that its input's gradient needs are its weights' gradients.)
_SEPARABLE = frozenset(
    {
        "AddBackward0",
        "AddmmBackward0",
        "BaddbmmBackward0",
        "BmmBackward0",
        "ConvolutionBackward0",
        "ConvolutionOverrideableBackward0",
        "DivBackward0",
        "FusedRmsNormBackward0",
        "GroupedMmBackward0",
        "LinearBackward0",
        "MmBackward0",
        "MulBackward0",
        "NativeLayerNormBackward0",
        "SubBackward0",
    }
)
_MOST = 64  # looks that are remembered; a stage that takes ever new ways through its code has ever new ones


@attrs.frozen
class Later:
    """What a node of the path leaves for later. All in numbers of nodes in :attr:`Walk.nodes`.

    Attributes:
        node: the node.
        sides: which of its results are left: their places among them, the node that each goes to, and where it enters there.
        leaves: the leaves that they lead to.
    """

    node: int
    sides: tuple[tuple[int, int, int], ...]
    leaves: tuple[int, ...]


@attrs.frozen
class Division:
    """How a backward is divided; likewise in numbers.

    Attributes:
        inputs: of the wanted inputs the leaves of those that are reached; none: there is nothing to run first.
        now: leaves whose gradients the first part makes too.
        later: what is left, from the nodes nearest to the inputs to those nearest to the outputs.
        apart: outputs that no input reaches, as places among the starts.
        apart_leaves: the leaves of those that are left for later.
        must_stay_whole: the name of a node that demands a backward that is not split; None where there is none.
    """

    inputs: tuple[int, ...]
    now: tuple[int, ...]
    later: tuple[Later, ...]
    apart: tuple[int, ...]
    apart_leaves: tuple[int, ...]
    must_stay_whole: str | None


class Walk:
    """The autograd graph below some nodes, each node once.

    Args:
        starts: the outputs' nodes.
        inputs: ids of the tensors whose gradients are wanted, all leaves.

    Attributes:
        nodes: the nodes; those of outputs come first.
        children: of each the numbers of those it gives gradients to, -1 for none, each followed by its place there.
        starts: the outputs' numbers.
        inputs: numbers of leaves whose gradients are wanted.
        key: equal for graphs that look alike.
    """

    def __init__(self, starts: Sequence[Node], inputs: set[int]) -> None:
        self.nodes = nodes = list(dict.fromkeys(starts))
        self.children: list[list[int]] = []
        numbers = {node: number for number, node in enumerate(nodes)}
        self.starts = [numbers[node] for node in starts]
        self.inputs: list[int] = []
        key: list[Any] = [*self.starts]
        for node in nodes:  # grows meanwhile
            mine: list[int] = []
            for child, place in node.next_functions:
                if child is None:
                    mine.append(-1)
                else:
                    number = numbers.get(child)
                    if number is None:
                        number = numbers[child] = len(nodes)
                        nodes.append(child)
                    mine.append(number)
                mine.append(place)
            if not mine and inputs and id(getattr(node, "variable", None)) in inputs:
                self.inputs.append(len(self.children))
            self.children.append(mine)
            kind = type(node)
            key.append(node.name() if kind.__name__ == "CppFunction" else kind)
            key += mine
        self.key: Key = (*key, *self.inputs)

    def __len__(self) -> int:
        return len(self.nodes)


class Divisions:
    """The divisions of one stage's graphs, by their looks; mutable: it remembers."""

    def __init__(self) -> None:
        self._known: dict[Key, tuple[tuple[int, ...], dict[tuple[bool, ...], Division]]] = {}

    def of(self, walk: Walk) -> Division:
        """How the backward of a graph is divided."""
        known = self._known.get(walk.key)
        if known is None:
            if len(self._known) >= _MOST:
                self._known.clear()
            known = self._known[walk.key] = _Looks(walk).watched(), {}
        watched, by_hooks = known
        hooked = tuple([_is_hooked(walk.nodes[number]) for number in watched])
        found = by_hooks.get(hooked)
        if found is None:
            found = by_hooks[hooked] = _Looks(walk).divide({n for n, yes in zip(watched, hooked, strict=True) if yes})
        return found


def _is_hooked(node: Node) -> bool:
    return has_saved_tensor_hooks(node) or (node.name() in _SEPARABLE and has_post_hooks(node))


class _Looks:
    """Works out a division."""

    def __init__(self, walk: Walk) -> None:
        self._starts = walk.starts
        self._inputs = walk.inputs
        self._names = [node.name() for node in walk.nodes]
        self._edges = [list(zip(mine[::2], mine[1::2], strict=True)) for mine in walk.children]
        self._path: dict[int, None] = {}  # nodes from which an input is reached, those nearest to the inputs first
        self._below: dict[int, frozenset[int]] = {}  # of the others: the leaves they reach
        inputs = set(self._inputs)
        for number in self._children_first():
            children = self._children(number)
            if number in inputs or any(child in self._path for child in children):
                self._path[number] = None
            else:
                leaves = frozenset[int]().union(*(self._below[child] for child in children))
                self._below[number] = leaves if children else frozenset((number,))

    def watched(self) -> tuple[int, ...]:
        """The nodes of which it matters whether they have hooks."""
        sides = {node for node, _ in self._sides()}
        return tuple(n for n in range(len(self._names)) if n in self._below or n in sides)

    def divide(self, hooked: set[int]) -> Division:
        """The division, where these nodes have hooks: on what they make, or before what they saved."""
        whole = (name for name in self._names if "Checkpoint" in name or name.startswith("CompiledFunction"))
        sides: list[tuple[int | None, int]] = [*self._sides()]
        sides += [(None, start) for start in self._starts if start in self._below]
        now = {leaf for node in hooked & self._below.keys() for leaf in self._below[node]}
        users: dict[int, int | None] = {}
        for node, child in sides:
            separable = node is None or (self._names[node] in _SEPARABLE and node not in hooked)
            for leaf in self._below[child]:
                if not separable or users.setdefault(leaf, node) is not node:
                    now.add(leaf)
        # What lies between the path and leaves runs once: all its leaves in I, or all in W.
        grows = True
        while grows:
            before = len(now)
            for _, child in sides:
                if not self._below[child].isdisjoint(now):
                    now |= self._below[child]
            grows = len(now) > before
        left = {child: self._below[child] - now for _, child in sides}
        later = []
        for node in self._path:
            mine = [(at, *edge) for at, edge in enumerate(self._edges[node]) if left.get(edge[0])]
            if mine:
                leaves = set[int]().union(*(left[child] for _, child, _ in mine))
                later.append(Later(node, tuple(mine), tuple(sorted(leaves))))
        apart = tuple(at for at, start in enumerate(self._starts) if start in self._below)
        return Division(
            tuple(number for number in self._inputs if number in self._path),
            tuple(sorted(now)),
            tuple(later),
            apart,
            tuple(sorted(set[int]().union(*(left[self._starts[at]] for at in apart)))),
            next(whole, None),
        )

    def _sides(self) -> list[tuple[int, int]]:
        """Where something hangs off the path: the node of the path, and what hangs there."""
        return [(node, child) for node in self._path for child in self._children(node) if child in self._below]

    def _children(self, number: int) -> list[int]:
        return [child for child, _ in self._edges[number] if child >= 0]

    def _children_first(self) -> list[int]:
        """Every node after those below it."""
        found: list[int] = []
        seen = set[int]()
        stack = [(-1, iter(self._starts))]
        while stack:
            number, children = stack[-1]
            for child in children:
                if child not in seen:
                    seen.add(child)
                    stack.append((child, iter(self._children(child))))
                    break
            else:
                stack.pop()
                if number >= 0:
                    found.append(number)
        return found
