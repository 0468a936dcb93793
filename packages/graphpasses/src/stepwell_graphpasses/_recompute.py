"""What activation checkpointing leaves in a captured graph, and how it is taken out again.

A checkpointed region runs again in backward. Captured naively, its random draws would give other masks and its buffers would
be written twice. So what a region computed again is folded onto what it computed first, and the forward nodes are marked
``recompute``: :class:`RematPass` then recomputes them in a way that is safe for draws and writes.

The second run calls the same operators in the same order as the first, writes among them, until backward has all it needs.
So the memory of the first holds what that of the second would, unless it was written to once more: behind the region, or in the
part of it that did not run again. Backward then reads a copy from before that write::

    forward    y = linear(x)                             y = linear(x)
               z = sin(y)                                z = sin(y)
                                              →          kept = clone(y)
               mul_(y, 2)  # behind the region           mul_(y, 2)
    backward   y_1 = linear(x)  # again
               g * cos(y_1)                              g * cos(kept)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from . import _compat as compat
from ._graph import emit, is_mutation, is_random, is_view, mutated_arguments, phase_of, value_of
from ._memory import memory_roots
from .exceptions import CaptureError


def fold_recomputed(module: fx.GraphModule, *, recomputed: bool, mode: compat.ExampleMode) -> None:
    """Replace nodes of a region's second run by those of its first.

    Args:
        module: an annotated graph; its nodes forget their ``runs``.
        recomputed: whether a module ran again during backward otherwise than by torch's checkpointing.
        mode: the mode of example values.

    Raises:
        CaptureError: what draws or writes ran again in backward, and it is not known what it repeats.
    """
    graph = module.graph
    nodes = list(graph.nodes)
    roots = memory_roots(graph)
    writes: dict[fx.Node, list[fx.Node]] = {}
    for node in nodes:
        for target in mutated_arguments(node):
            for root in roots[target]:
                writes.setdefault(root, []).append(node)
    same = _matched(module, nodes, roots, writes)
    for node in nodes:
        again = _second_run(node)
        if node in same or phase_of(node) == "forward" or not (again or recomputed):
            continue
        reads = again is not None and not is_view(node) and not isinstance(value_of(node), int | torch.SymInt)
        met = {
            root for source in (node.all_input_nodes if reads else mutated_arguments(node)) for root in roots[source]
        }
        if is_random(node) or any(root in writes if reads else phase_of(root) == "forward" for root in met):
            raise CaptureError(
                f"{node.target} in {node.meta['fqn'] or 'the train step'} runs again in backward (activation checkpointing), and"
                " what draws or writes there must be told to be a repetition of what ran in forward, which it is not; use"
                " torch.utils.checkpoint.checkpoint(…, use_reentrant=False), on regions that do the same each time"
            )
    repeated = {(_second_run(node), first) for node, first in same.items()}
    for node, first in same.items():
        if node.op == "call_function":
            first.meta["recompute"] = True
        value: Any = first
        root, *_ = roots[node]
        if root in same:
            spoiling = [
                write
                for write in writes.get(same[root], ())
                if write not in same and (_second_run(node), write) not in repeated
            ]
            if spoiling and node is root:
                waited = next((user for user in first.users if user.target is compat.WAIT), first)
                with graph.inserting_before(spoiling[0]):
                    value = emit(graph, torch.ops.aten.clone.default, (waited,), like=first, mode=mode)
            elif spoiling and (is_mutation(node) or node.target is compat.WAIT):
                value = node.args[0]  # the copy, which is written and waited for
            elif spoiling:
                continue  # a view, of the copy now
        node.replace_all_uses_with(value)
        graph.erase_node(node)
    for node in graph.nodes:
        node.meta.pop("runs", None)


def _matched(
    module: fx.GraphModule,
    nodes: Sequence[fx.Node],
    roots: Mapping[fx.Node, tuple[fx.Node, ...]],
    writes: Mapping[fx.Node, Sequence[fx.Node]],
) -> dict[fx.Node, fx.Node]:
    """For nodes of a region's second run those that they repeat.

    Of several that are alike the first repeats the first, and so on. A value that the first run had from before the region, such
    as a weight that autocast had cast already, is that one, if it is never written.
    """
    same: dict[fx.Node, fx.Node] = {}
    first_runs: dict[Any, list[fx.Node]] = {}
    constants: dict[Any, fx.Node] = {}
    counts: Counter[Any] = Counter()
    for node in nodes:
        if node.op not in ("call_function", "get_attr"):
            continue
        key = _key(module, node, same)
        touched = {root for source in (node, *node.all_input_nodes) for root in roots[source]}
        is_constant = not is_random(node) and touched.isdisjoint(writes)
        if again := _second_run(node):
            candidates = first_runs.get((again[0], key), [])[counts[again, key] :]
            counts[again, key] += 1
            if candidates:
                same[node] = candidates[0]
            elif is_constant and key in constants:
                same[node] = constants[key]
        elif is_constant and phase_of(node) == "forward":
            constants.setdefault(key, node)
        for region, number in node.meta["runs"]:
            if not number:
                first_runs.setdefault((region, key), []).append(same.get(node, node))
    return same


def _second_run(node: fx.Node) -> tuple[int, int] | None:
    """The region whose repetition made a node, and the number of that run; of nested ones the outermost."""
    return next(((region, number) for region, number in node.meta["runs"] if number), None)


def _key(module: fx.GraphModule, node: fx.Node, same: Mapping[fx.Node, fx.Node]) -> Any:
    """Equal for nodes that do the same with the same."""
    if node.op == "get_attr":
        value = getattr(module, str(node.target))
        if isinstance(value, torch.Tensor) and value.numel() <= 4096 and value.device.type == "cpu":
            return ("constant", value.dtype, tuple(value.shape), value.reshape(-1).tolist().__repr__())
        return ("constant", node.target)
    return (node.target, _freeze(node.args, same), _freeze(node.kwargs, same))


def _origin(node: fx.Node, same: Mapping[fx.Node, fx.Node]) -> fx.Node:
    """What a node repeats, before writes in place: they follow one another alike in both runs, so order tells them apart."""
    while node in same or (is_mutation(node) and node.args[:1] == mutated_arguments(node)):
        node = same[node] if node in same else node.args[0]  # type: ignore[assignment]
    return node


def _freeze(value: Any, same: Mapping[fx.Node, fx.Node]) -> Any:
    """An argument as a part of a key: nodes by what they repeat, containers as tuples, constants by their text."""
    if isinstance(value, fx.Node):
        return _origin(value, same)
    if isinstance(value, list | tuple):
        return tuple(_freeze(item, same) for item in value)
    if isinstance(value, dict):
        return tuple((key, _freeze(item, same)) for key, item in value.items())
    if isinstance(value, slice):
        return ("slice", *(_freeze(item, same) for item in (value.start, value.stop, value.step)))
    return (type(value), str(value))
