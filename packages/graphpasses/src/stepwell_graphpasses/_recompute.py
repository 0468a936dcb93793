"""What activation checkpointing leaves in a captured graph, and how it is taken out again.

A checkpointed region runs again in backward. Captured naively, its random draws would give other masks and its buffers would
be written twice. So what a region computed again is folded onto what it computed first, and the forward nodes are marked
``recompute``: :class:`RematPass` then recomputes them in a way that is safe for draws and writes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from ._graph import is_mutation, is_random, mutated_arguments, phase_of
from ._memory import memory_roots
from .exceptions import CaptureError


def fold_recomputed(module: fx.GraphModule, *, recomputed: bool) -> None:
    """Replace backward nodes that repeat forward nodes by them.

    Args:
        module: an annotated graph.
        recomputed: whether a module ran again during backward.

    Raises:
        CaptureError: a random draw was repeated and cannot be told from another draw.
    """
    graph = module.graph
    if not recomputed and not any(_repeats_effects(node) for node in graph.nodes):
        return
    keys: dict[fx.Node, Any] = {}
    numbers: dict[Any, int] = {}
    originals: dict[int, list[fx.Node]] = {}
    nodes = [node for node in graph.nodes if node.op != "output"]
    roots = memory_roots(graph)
    # By phase and memory the last write to it, for what is read there before a write and after it differs. By phase, since the
    # second run of a region means its inputs as the first one saw them.
    written: dict[str, dict[fx.Node, int]] = {}
    for node in nodes:
        last = written.setdefault(phase_of(node), {})

        def read(source: fx.Node, last: dict[fx.Node, int] = last) -> tuple[int, ...]:
            start = _before_writes(source)
            return keys[start], *(last[root] for root in roots[start] if root in last)

        keys[node] = numbers.setdefault(_key(module, node, read), len(numbers))
        if phase_of(node) == "forward":
            originals.setdefault(keys[node], []).append(node)
        for target in mutated_arguments(node):
            last.update((root, keys[node]) for root in roots[target] if root.op == "call_function")
    spoiled = _spoiled(nodes, keys, roots)
    for node in nodes:
        found = originals.get(keys[node], [])
        if phase_of(node) == "forward":
            continue
        if is_random(node) and len(found) != 1 and (found or recomputed):
            raise CaptureError(
                f"the random operator {node.target} in {node.meta['fqn'] or 'the train step'} runs again in backward"
                f" (activation checkpointing), and {len(found)} draws of forward could be the one that it must repeat."
                " Give each of them another input, or leave them out of the checkpointed region"
            )
        if not found:
            continue
        # Which of several it repeats, where one of them is written to, cannot be told.
        is_one = len({roots[one] for one in found}) == 1
        is_written = any(written["forward"].keys() & roots[one] for one in found)
        is_there = not is_written or (is_one and not spoiled.intersection(roots[found[0]]))
        if not is_there or any(phase_of(target) != "forward" for target in mutated_arguments(node)):
            # What forward computed is no longer there: it is computed again, and what is written to it written again.
            if is_random(node):
                raise CaptureError(
                    f"what {node.target} in {node.meta['fqn'] or 'the train step'} draws in a checkpointed region is written to"
                    " behind that region, and backward needs it as it was; write to a clone() of it"
                )
            continue
        reads = {root for source in node.all_input_nodes for root in roots[source]}
        if spoiled & reads and not is_random(node) and not is_mutation(node):
            continue  # no repetition, but another value: it reads what the write left, and forward what was there before
        if node.op == "call_function":
            found[0].meta["recompute"] = True
        node.replace_all_uses_with(found[0])
        graph.erase_node(node)


def _spoiled(
    nodes: Sequence[fx.Node], keys: Mapping[fx.Node, int], roots: Mapping[fx.Node, tuple[fx.Node, ...]]
) -> set[fx.Node]:
    """Values of forward that forward writes to where backward does not repeat the write: behind the region that made them."""
    repeated = {keys[node] for node in nodes if phase_of(node) == "backward"}
    return {
        root
        for node in nodes
        if phase_of(node) == "forward" and keys[node] not in repeated
        for target in mutated_arguments(node)
        for root in roots[target]
        if root.op == "call_function"
    }


def _repeats_effects(node: fx.Node) -> bool:
    if node.op != "call_function" or phase_of(node) == "forward":
        return False
    return is_random(node) or any(target.op == "placeholder" for target in mutated_arguments(node))


def _key(module: fx.GraphModule, node: fx.Node, read: Callable[[fx.Node], tuple[int, ...]]) -> Any:
    """Equal for nodes that compute the same; unlike the nodes it is made of, it can be a dict's key."""
    if node.op == "placeholder":
        return ("placeholder", node.name)
    if node.op == "get_attr":
        value = getattr(module, str(node.target))
        if isinstance(value, torch.Tensor) and value.numel() <= 4096 and value.device.type == "cpu":
            return ("constant", value.dtype, tuple(value.shape), value.reshape(-1).tolist().__repr__())
        return ("constant", node.target)
    return (node.target, _freeze(node.args, read), _freeze(node.kwargs, read), is_mutation(node))


def _before_writes(node: fx.Node) -> fx.Node:
    """The input that a chain of in-place writes started from: the second run of a region means it as the first one saw it."""
    start = node
    while is_mutation(start) and len(written := mutated_arguments(start)) == 1:
        start = written[0]
    return start if start.op == "placeholder" else node


def _freeze(value: Any, read: Callable[[fx.Node], tuple[int, ...]]) -> Any:
    """An argument as a part of a key: nodes by their numbers, containers as tuples, constants by their text."""
    if isinstance(value, fx.Node):
        return ("node", *read(value))
    if isinstance(value, list | tuple):
        return tuple(_freeze(item, read) for item in value)
    if isinstance(value, dict):
        return tuple((key, _freeze(item, read)) for key, item in value.items())
    if isinstance(value, slice):
        return ("slice", *(_freeze(item, read) for item in (value.start, value.stop, value.step)))
    return (type(value), str(value))
