"""torch's own overlap scheduling in place of ours: it decides when collectives start and are waited for.

Its scheduler reorders computation too, asks CUDA what nodes cost, and counts memory in example values. None of that may be:
computation keeps its order, costs are those that ranks agreed on, and it shall run on any device. So it gets a stand-in of the
graph: the same data flow, with a product of 1 x 1 matrices for each node that it may hide communication behind. What it makes of
that is read as wishes for where the real collectives stand, between which products.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from itertools import accumulate

import torch
from torch import fx, nn
from torch.utils.flop_counter import flop_registry

from .. import _compat as compat
from .._collectives import collective_bytes, comm_of, is_start, starts
from .._graph import JointGraph, positions, tensor_bytes, value_of
from ..exceptions import GraphError

aten = torch.ops.aten


def wishes_of_torch(
    joint: JointGraph,
    costs: Mapping[fx.Node, float],
    schedule: Callable[..., None],
    *,
    max_bytes: int | None,
    prefetch: int,
) -> dict[fx.Node, float]:
    """Where torch would start collectives and wait for them; see ``rearrange`` for wishes.

    Args:
        joint: the graph; not changed.
        costs: seconds of each node that computes and of each collective, the same on every rank.
        schedule: torch's scheduler.
        max_bytes: most bytes of collectives under way, read and written; None: what ``prefetch`` + 1 of the largest have.
        prefetch: how many collectives ahead; 0: none is started before the computation that needs it is next.
    """
    nodes = starts(joint.graph)
    if not nodes:
        return {}
    stand_in, originals = _stand_in(joint)
    if max_bytes is None:
        max_bytes = (prefetch + 1) * max(collective_bytes(node) + tensor_bytes(value_of(node)) for node in nodes)
    try:
        schedule(
            fx.GraphModule(nn.Module(), stand_in),
            custom_runtime_estimation=lambda node, _: 1e3 * costs.get(originals.get(node), 0.0),  # type: ignore[arg-type]
            collective_estimator="analytical",  # both: ask nobody else
            compute_estimator="analytical",
            pre_bucketing_fsdp_collectives=False,
            collective_bucketing=False,
            insert_overlap_deps=False,
            max_in_flight_gb=max_bytes / 2**30,
            max_compute_pre_fetch=0 if prefetch == 0 else 200,
            max_memory_increase_gb=2.0**20,  # example values differ from rank to rank, so they must not decide
        )
    except RecursionError as error:
        raise GraphError(
            f"the scheduler of torch {torch.__version__} calls itself too deep for this graph; use the backend 'stepwell'"
        ) from error
    return _wishes(joint, [originals[node] for node in stand_in.nodes if node in originals])


def is_product(node: fx.Node) -> bool:
    """Whether communication is worth hiding behind a node: a product of matrices, a convolution, an attention."""
    return comm_of(node) is None and getattr(node.target, "overloadpacket", None) in flop_registry


def _stand_in(joint: JointGraph) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
    """The same data flow in a graph that torch's scheduler understands, and what its nodes stand for."""
    graph = fx.Graph()
    there: dict[fx.Node, fx.Node] = {}

    def call(target: Callable[..., object], *args: object, size: int | None = None) -> fx.Node:
        node = graph.call_function(target, args)  # type: ignore[arg-type]
        if size is not None:
            with joint.mode:  # memory of its own: the scheduler takes equal memory for the same
                node.meta["val"] = torch.empty(size, size) if target is aten.cat.default else torch.empty(size)
        return node

    for node in joint.graph.nodes:
        sources = [there[source] for source in node.all_input_nodes]
        comm = comm_of(node)
        if node.op == "placeholder":
            there[node] = graph.placeholder(node.name)
        elif node.op == "output":
            there[node] = graph.output(tuple(sources))
        elif comm is not None and is_start(node):
            given = call(aten.cat.default, sources)
            with joint.mode:
                given.meta["val"] = torch.empty(collective_bytes(node), dtype=torch.uint8)
                brought = torch.empty(tensor_bytes(value_of(node)), dtype=torch.uint8)
            if comm.kind == "gather":
                there[node] = call(compat.ALL_GATHER, given, comm.size, comm.group)
            elif comm.kind == "reduce_scatter":
                there[node] = call(compat.REDUCE_SCATTER, given, comm.op, comm.size, comm.group)
            else:
                there[node] = call(compat.ALL_REDUCE, given, comm.op, comm.group)
            there[node].meta["val"] = brought
        elif comm is not None and comm.kind == "wait":
            start = node.all_input_nodes[0]
            there[node] = call(compat.WAIT, there[start if is_start(start) else start.all_input_nodes[0]])
        elif is_product(node):
            given = call(aten.cat.default, sources, size=1)
            there[node] = call(aten.mm.default, given, given)  # without an example value nobody asks CUDA for its speed
        else:
            there[node] = call(aten.cat.default, sources)
    return graph, {stand_in: node for node, stand_in in there.items()}


def _wishes(joint: JointGraph, order: list[fx.Node]) -> dict[fx.Node, float]:
    """Each start and each wait for a reduction goes before the node that computes next in torch's order.

    The products are in the same order there and here. A node between the same two products there and here tells a place too;
    others have been moved, and tell nothing.
    """
    position = positions(joint.graph)
    ours = [position[node] for node in joint.graph.nodes if is_product(node)]
    segments = [0, *accumulate(int(is_product(node)) for node in order)]  # products before each node there
    wishes: dict[fx.Node, float] = {}
    place = float(position[joint.output_node])
    for index in reversed(range(len(order))):
        node, comm = order[index], comm_of(order[index])
        if comm is None:
            if node.op == "call_function" and bisect_left(ours, position[node]) == segments[index]:
                place = min(place, position[node])
        elif is_start(node) or (comm.kind == "wait" and comm.waits_for != "gather"):
            wishes[node] = place - 0.5 + 0.5 * index / len(order)
    return wishes
