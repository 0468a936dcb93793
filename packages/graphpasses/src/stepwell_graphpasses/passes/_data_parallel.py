"""Data parallelism: gathers before parameters are read, reductions where gradients are made.

For a parameter of 7 rows on 2 ranks, with every step that is not needed left out::

    p (4 rows here, 3 + 1 of padding there) → cast → gather → wait → first 7 rows → readers
    gradient (7 rows) → cast → + carried → divide → pad to 8 rows → reduce-scatter → wait [→ all-reduce → wait] → divide → cast

Every rank has the same graph: a rank with fewer rows is handed a padded shard and hands out a padded gradient, so that padding is
data and not structure.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import fx

from .._collectives import Writer, scaling
from .._graph import JointGraph, first_of, phase_of, positions, value_of
from .._memory import writers_of_memory
from .._pass import PassContext, PassContract
from .._table import Layout, Parameter
from ..exceptions import GradientError, PlanError


class DataParallelPass:
    """Puts the collectives of fsdp, ddp or hsdp into a graph; keeps nothing between graphs."""

    name = "data_parallel"
    contract = PassContract(provides=frozenset({"collectives"}), conflicts=frozenset({"collectives", "split"}))

    def run(self, joint: JointGraph, context: PassContext) -> None:
        """Rewrite the graph for the context's topology and variant."""
        position = positions(joint.graph)
        writers = writers_of_memory(joint.graph)
        nodes = joint.parameter_nodes
        for parameter in joint.table:
            layout = context.layouts[parameter.name]
            joint.units[parameter.name] = layout.unit
            joint.notes.append((parameter.name, layout.reason))
            _enter(joint, context, parameter, layout, nodes[parameter.name], position, writers)
        _leave(joint, context)


def _enter(
    joint: JointGraph,
    context: PassContext,
    parameter: Parameter,
    layout: Layout,
    placeholder: fx.Node,
    position: Mapping[fx.Node, int],
    writers: Mapping[fx.Node, fx.Node],
) -> None:
    """Make the placeholder this rank's stored part, and give readers the whole in the compute dtype."""
    readers = list(placeholder.users)
    graph = joint.graph
    whole = value_of(placeholder)
    with joint.mode:
        if layout.sharded:
            shape = (layout.padded_rows, *parameter.shape[1:])
            placeholder.meta["val"] = torch.empty(shape, dtype=parameter.dtype, device=whole.device)
        else:
            placeholder.meta["val"] = parameter.empty(parameter.dtype, whole.device)
    if not readers:
        joint.notes.append((parameter.name, "not gathered: the step does not read it"))
        return
    if not layout.sharded and parameter.dtype == parameter.compute_dtype:
        return
    if (writer_node := writers.get(placeholder)) is not None:
        raise PlanError(
            f"the step writes to parameter {parameter.name} ({writer_node.target}), which a gathered or cast copy would lose;"
            " leave it out of the plan, or make it a buffer"
        )
    first = first_of(readers, position)
    writer = Writer(
        joint.mode,
        graph,
        like=first,
        params=(parameter.name,),
        phase="forward" if first.op == "output" else phase_of(first),
        fqn=placeholder.meta["fqn"],
    )
    with graph.inserting_before(first):
        node = writer.cast(placeholder, parameter.compute_dtype)
        if layout.sharded:
            group, size = shard_group(context)
            node = writer.first_rows(writer.gather(node, group, size), parameter.shape[0])
    for reader in readers:
        reader.replace_input_with(placeholder, node)


def _leave(joint: JointGraph, context: PassContext) -> None:
    """Reduce each gradient where it is made."""
    gradients = joint.gradient_nodes
    trainable = [parameter for parameter in joint.table if parameter.trainable]
    if stray := [name for name in gradients if not joint.table[name].trainable]:
        raise GradientError(f"the graph has gradients of frozen parameters: {', '.join(stray)}")
    carried: list[tuple[str, fx.Node]] = []
    results: dict[str, fx.Node] = {}
    for parameter in trainable:
        layout = context.layouts[parameter.name]
        node = gradients.get(parameter.name)
        if node is not None:
            results[parameter.name] = _reduce(joint, context, parameter, layout, node, carried)
        elif joint.gradients and context.config.unused == "zeros" and context.variant.reduce == "full":
            results[parameter.name] = _zeros(joint, parameter, layout)
        elif joint.gradients:
            joint.notes.append((parameter.name, "no gradient: the loss does not depend on it"))
    joint.set_gradients(results)
    joint.extra_inputs = (*joint.extra_inputs, *(name for name, _ in carried))


def _reduce(
    joint: JointGraph,
    context: PassContext,
    parameter: Parameter,
    layout: Layout,
    node: fx.Node,
    carried: list[tuple[str, fx.Node]],
) -> fx.Node:
    gradient = value_of(node)
    if tuple(gradient.shape) != parameter.shape:
        raise GradientError(
            f"the gradient of {parameter.name} has shape {tuple(gradient.shape)}, the parameter {parameter.shape}"
        )
    variant, config = context.variant, context.config
    dtype = config.reduce_dtype or gradient.dtype
    ranks = 1 if context.topology is None else context.topology.degrees.total
    scale = scaling(config.reduce, dtype, ranks)
    graph = joint.graph
    writer = Writer(
        joint.mode, graph, like=node, params=(parameter.name,), phase="backward", fqn=node.meta.get("fqn") or None
    )
    place = _after(joint, node)
    with graph.inserting_before(place):
        node = writer.cast(node, dtype)
        if variant.reduce == "none":
            return node
        if variant.carries == "whole":
            node = _add_carried(joint, writer, parameter.name, node, carried)
        node = writer.scale(node, scale.before)
        if layout.sharded:
            group, size = shard_group(context)
            node = writer.pad_rows(node, layout.padded_rows * size)
            node = writer.reduce_scatter(node, scale.op, group, size)
        elif context.topology is not None and context.topology.degrees.shard > 1:
            node = writer.all_reduce(node, scale.op, *shard_group(context))
        if variant.reduce == "scatter":
            return node
        if variant.carries == "parts":
            node = _add_carried(joint, writer, parameter.name, node, carried)
        if context.topology is not None and context.topology.degrees.replicate > 1:
            assert context.topology.replicate_group is not None
            node = writer.all_reduce(
                node, scale.op, context.topology.replicate_group, context.topology.degrees.replicate
            )
        node = writer.scale(node, scale.after)
        return writer.cast(node, parameter.dtype)


def _add_carried(
    joint: JointGraph, writer: Writer, name: str, node: fx.Node, carried: list[tuple[str, fx.Node]]
) -> fx.Node:
    """A new input with the sum of earlier gradients, added to this one."""
    graph = joint.graph
    last = joint.placeholders[-1] if not carried else carried[-1][1]
    with graph.inserting_after(last):
        entry = graph.placeholder("c_" + "".join(c if c.isalnum() else "_" for c in name))
    value = value_of(node)
    with joint.mode:
        entry.meta = {"val": torch.empty(value.shape, dtype=value.dtype, device=value.device)}
    entry.meta |= {"fqn": name.rpartition(".")[0], "phase": "forward", "input": "c_" + name}
    carried.append((name, entry))
    return writer.call("carry", torch.ops.aten.add.Tensor, entry, node)


def _zeros(joint: JointGraph, parameter: Parameter, layout: Layout) -> fx.Node:
    """A gradient for a parameter that the loss does not depend on; zeros need no reduction, and none is carried."""
    shape = (layout.padded_rows, *parameter.shape[1:]) if layout.sharded else parameter.shape
    placeholder = joint.parameter_nodes[parameter.name]
    joint.notes.append((parameter.name, "gradient of zeros: the loss does not depend on it"))
    with joint.graph.inserting_before(joint.output_node):
        writer = Writer(joint.mode, joint.graph, like=placeholder, params=(parameter.name,), phase="backward")
        kwargs = {"dtype": parameter.dtype, "device": value_of(placeholder).device}
        return writer.call("pad", torch.ops.aten.zeros.default, list(shape), kwargs=kwargs)


def _after(joint: JointGraph, node: fx.Node) -> fx.Node:
    """The first place at which ``node`` may be read."""
    following = node.next
    while following.op in ("placeholder", "get_attr"):
        following = following.next
    return following


def shard_group(context: PassContext) -> tuple[str, int]:
    """Registered name and size of the shard axis's group."""
    topology = context.topology
    assert topology is not None
    assert topology.shard_group is not None
    return topology.shard_group, topology.degrees.shard
