"""Reshard: free a gathered parameter after forward, gather it again for backward.

Nothing frees memory explicitly. A value is freed when its last reader has run, so all it takes is that no backward node reads
what was gathered in forward, neither directly nor through a view: each backward reader gets the same view of a second gather::

    forward   gather → wait → W → t → addmm             (last reader: memory is freed)
    backward  gather → wait → W' → t' → mm              (rebuilt before the first backward reader)
"""

from __future__ import annotations

import warnings

import torch
from torch import fx

from .. import _compat as compat
from .._collectives import Comm, comm_of, is_start
from .._graph import (
    JointGraph,
    first_of,
    is_getitem,
    is_view,
    phase_of,
    positions,
)
from .._memory import writers_of_memory
from .._pass import PassContext, PassContract
from ..exceptions import GraphWarning

# Copies that are rebuilt like views: a cast weight kept for backward would cost as much as the weight.
COPIES = frozenset({compat.CAST, torch.ops.aten.clone.default})


class ReshardPass:
    """Gathers again in backward what forward has gathered, for the parameters that the configuration reshards.

    Args:
        keep_last: leave the unit that forward gathers last as it is, since backward reads it first.
    """

    name = "reshard"
    contract = PassContract(
        requires=frozenset({"collectives"}),
        provides=frozenset({"resharded"}),
        conflicts=frozenset({"resharded", "bucketed", "split"}),
    )

    def __init__(self, *, keep_last: bool = False) -> None:
        self.keep_last = keep_last

    def run(self, joint: JointGraph, context: PassContext) -> None:
        """Rewrite the graph."""
        position = positions(joint.graph)
        written = writers_of_memory(joint.graph)
        gathers = [n for n in joint.graph.nodes if is_start(n, "gather") and phase_of(n) == "forward"]
        last_unit = joint.units[_comm(gathers[-1]).params[0]] if gathers and self.keep_last else None
        kept: dict[str, str] = {}
        for gather in gathers:
            (name,) = _comm(gather).params
            if not any(context.config.reshards(alias) for alias in joint.table[name].names):
                kept[name] = "stays gathered: reshard_after_forward is False for it"
            elif last_unit is not None and joint.units[name] == last_unit:
                kept[name] = "stays gathered: backward reads the last unit first"
            elif (reason := _gather_again(joint, gather, position, written)) is not None:
                kept[name] = f"stays gathered: {reason}"
                warnings.warn(f"parameter {name} {kept[name]}", GraphWarning, stacklevel=2)
        joint.notes += list(kept.items())
        joint.kept |= frozenset(kept)


def _gather_again(
    joint: JointGraph, gather: fx.Node, position: dict[fx.Node, int], written: dict[fx.Node, fx.Node]
) -> str | None:
    """Give backward readers a second gather; or say why that cannot be."""
    graph = joint.graph
    family = _family(gather, written)
    readers = [
        user
        for node in family
        for user in node.users
        if user not in family and phase_of(user) == "backward" and user.op != "output"
    ]
    if not readers:
        return None
    if (writer := written.get(gather)) is not None:
        return f"{writer.target} in {writer.meta['fqn'] or 'the train step'} writes to it"
    first = first_of(readers, position)
    copies: dict[fx.Node, fx.Node] = {}

    def again(node: fx.Node) -> fx.Node:
        if node not in family and not _prelude(node):
            return node
        if node not in copies:
            sources = [again(source) for source in node.all_input_nodes]
            copy = graph.node_copy(node, dict(zip(node.all_input_nodes, sources, strict=True)).__getitem__)
            copy.meta = {**node.meta, "phase": "backward"}
            if comm_of(copy) is None:  # a rebuilt view is communication's business: it may be moved with the gather
                copy.meta["comm"] = Comm("view", _comm(gather).params)
            copies[node] = copy
        return copies[node]

    with graph.inserting_before(first):
        for reader in dict.fromkeys(readers):
            for source in reader.all_input_nodes:
                if source in family:
                    reader.replace_input_with(source, again(source))
    return None


def _family(gather: fx.Node, written: dict[fx.Node, fx.Node]) -> dict[fx.Node, None]:
    """The gather and everything in forward that is nothing but another look at what it brought, in graph order."""
    family = {gather: None}
    waiting = [gather]
    while waiting:
        for user in waiting.pop().users:
            if user in family or user.op != "call_function" or phase_of(user) == "backward":
                continue
            looks = is_view(user) or is_getitem(user) or user.target in COPIES or comm_of(user) is not None
            if looks and user not in written and all(source in family for source in user.all_input_nodes):
                family[user] = None
                waiting.append(user)
    return family


def _prelude(node: fx.Node) -> bool:
    """Whether a node makes a gather's input from the stored shard."""
    comm = comm_of(node)
    return comm is not None and comm.kind == "cast" and node.op == "call_function"


def _comm(node: fx.Node) -> Comm:
    comm = comm_of(node)
    assert comm is not None
    return comm
