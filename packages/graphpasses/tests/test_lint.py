"""Damage to finished graphs: each kind must be seen, by the rules of the graph itself or by what ranks compare."""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable
from typing import Any

import attrs
import graphpasses_support as support
import pytest
import torch
from torch import fx

from stepwell_graphpasses import GraphCompiler, JointGraph, PassConfig
from stepwell_graphpasses._collectives import comm_of, starts, wait_of
from stepwell_graphpasses._graph import emit, value_of
from stepwell_graphpasses._lint import find_problems
from stepwell_graphpasses._order import rearrange
from stepwell_graphpasses._signature import Vote, _difference, first_difference, signature
from stepwell_graphpasses.passes import BucketPass, DataParallelPass, ReshardPass
from stepwell_graphpasses.testing import fake_world

aten = torch.ops.aten
BATCH = {"tokens": support.tokens(rank=0)}


def joint(config: PassConfig | None = None, **options: Any) -> JointGraph:
    c = GraphCompiler(support.seeded(lambda: support.TinyGPT(layers=2)), support.gpt_loss, config, **options)
    return c.compile(**BATCH).graph()


def write_to(graph: JointGraph, node: fx.Node, before: fx.Node) -> None:
    """``node`` is written in place at some point."""
    with graph.graph.inserting_before(before):
        emit(graph.graph, aten.mul_.Tensor, (node, 2.0), like=node, mode=graph.mode)


def read(graph: JointGraph, node: fx.Node, before: fx.Node) -> None:
    with graph.graph.inserting_before(before):
        emit(graph.graph, aten.neg.default, (node,), like=node, mode=graph.mode)


ALONE = {"passes": [DataParallelPass()]}


def test_whole_graphs_keep_all_rules() -> None:
    """Each pass of a pipeline is followed by the same look, so that whole ones stand for their parts; see one of each too."""
    with fake_world(4):
        for mode, extra in (("fsdp", {}), ("ddp", {}), ("hsdp", {"fsdp_degree": 2})):
            for unused in ("none", "zeros"):
                assert find_problems(joint(PassConfig(dp_mode=mode, unused=unused, **extra))) == []
        for options in (ALONE, {"passes": [DataParallelPass(), ReshardPass(), BucketPass()]}):
            assert find_problems(joint(PassConfig(dp_mode="hsdp", fsdp_degree=2), **options)) == []


def alike(graph: JointGraph) -> list[tuple[fx.Node, fx.Node]]:
    """Pairs of collectives that peers cannot tell apart by what they carry."""

    def looks(node: fx.Node) -> Any:
        value = value_of(node.args[0])
        return str(node.target), tuple(value.shape), value.dtype

    return [(a, b) for a, b in itertools.combinations(starts(graph.graph), 2) if looks(a) == looks(b)]


def swap_sources(graph: JointGraph, a: fx.Node, b: fx.Node) -> None:
    one, other = a.args[0], b.args[0]
    a.args, b.args = (other, *a.args[1:]), (one, *b.args[1:])


def swap_places(graph: JointGraph, a: fx.Node, b: fx.Node) -> None:
    swap_sources(graph, a, b)
    a.meta["comm"], b.meta["comm"] = comm_of(b), comm_of(a)


@pytest.mark.parametrize("damage", [swap_sources, swap_places])
def test_s23_any_two_collectives_of_one_shape_that_one_rank_swaps_are_told_apart(
    damage: Callable[[JointGraph, fx.Node, fx.Node], None],
) -> None:
    with fake_world(2):
        graph = joint(**ALONE)
        whole = signature(graph)
        pairs = alike(graph)
        assert len(pairs) > 50
        for pair in pairs:
            damaged = graph.copy()
            named = {node.name: node for node in damaged.graph.nodes}
            a, b = (named[node.name] for node in pair)
            damage(damaged, a, b)
            rearrange(damaged.graph)  # data first
            assert first_difference(whole, signature(damaged)) is not None, (a, b)


def test_gradients_whose_results_are_swapped_are_seen() -> None:
    with fake_world(4):
        for config in (
            PassConfig(bucket_by="none"),
            PassConfig(dp_mode="hsdp", fsdp_degree=2),
            PassConfig(dp_mode="ddp"),
        ):
            graph = joint(config)
            names = [n for n in graph.gradients if n.endswith("norm1.weight")]
            outputs = dict(graph.gradient_nodes)
            outputs[names[0]], outputs[names[1]] = outputs[names[1]], outputs[names[0]]
            graph.set_gradients(outputs)
            found = find_problems(graph)
            assert len(found) == 2
            assert f"the gradient of {names[0]} is" in found[0]
            assert f"was reduced for {names[1]}" in found[0]


def test_s16_a_gradient_that_is_left_without_one_of_its_reductions_is_seen() -> None:
    with fake_world(4):
        graph = joint(PassConfig(dp_mode="hsdp", fsdp_degree=2), **ALONE)
        node = next(n for n in starts(graph.graph, "all_reduce") if comm_of(n).params == ("layers.1.up.weight",))
        wait_of(node).replace_all_uses_with(node.args[0])
        graph.graph.erase_node(wait_of(node))
        graph.graph.erase_node(node)
        assert find_problems(graph) == [
            "the gradient of layers.1.up.weight is not reduced over dp_replicate, as others are"
        ]
        plain = joint(**ALONE)
        plain.set_gradients({**plain.gradient_nodes, "head.weight": next(iter(plain.gradient_nodes.values()))})
        assert any("head.weight" in problem for problem in find_problems(plain))


def test_a_gradient_of_another_shape_is_seen() -> None:
    with fake_world(2):
        graph = joint(**ALONE)
        outputs = dict(graph.gradient_nodes)
        outputs["norm.weight"] = outputs["head.weight"]
        graph.set_gradients(outputs)
        assert any(
            "the gradient of norm.weight has shape (9, 6), the parameter (6,)" in p for p in find_problems(graph)
        )


@pytest.mark.parametrize("mode", ["fsdp", "ddp"])
def test_what_a_collective_reads_is_not_written_to_until_the_wait(mode: str) -> None:
    """On CPU the data is gone by then and nobody notices; on an accelerator half of it is new."""
    with fake_world(2):
        graph = joint(PassConfig(dp_mode=mode), **ALONE)
        node = starts(graph.graph, "reduce_scatter" if mode == "fsdp" else "all_reduce")[-1]
        write_to(graph, node.args[0], before=wait_of(node))
        (problem,) = find_problems(graph)
        assert "writes to" in problem
        assert f"{node} reads until the wait for it" in problem
        after = joint(PassConfig(dp_mode=mode), **ALONE)
        node = starts(after.graph, "reduce_scatter" if mode == "fsdp" else "all_reduce")[-1]
        write_to(after, node.args[0], before=after.output_node)
        assert find_problems(after) == []


def test_what_a_collective_has_overwritten_is_not_read_by_its_old_name() -> None:
    with fake_world(2):
        for options in ({}, {"passes": [DataParallelPass(), BucketPass(pack=True)]}):
            graph = joint(PassConfig(dp_mode="ddp", bucket_by="bytes"), **options)
            (node,) = starts(graph.graph)
            source = node.all_input_nodes[0]
            before = graph.copy()
            read(graph, source, before=graph.output_node)
            (problem,) = find_problems(graph)
            assert f"reads {source}, which {node} has overwritten by then" in problem
            (first,) = starts(before.graph)
            read(before, first.all_input_nodes[0], before=first)
            assert find_problems(before) == []


def test_ranks_that_start_collectives_of_two_groups_in_another_order_are_told() -> None:
    """Each group alone saw the same order; the two of them could wait for each other."""
    votes = []
    for rank in (0, 1):  # of one shard group, in two replicate groups
        with fake_world(4, rank):
            votes.append(Vote(rank, None, signature(joint(PassConfig(dp_mode="hsdp", fsdp_degree=2), **ALONE))))
    members = (0, 1)
    assert {entry.members for entry in votes[0].signature} == {(0, 1), (0, 2)}
    assert {entry.members for entry in votes[1].signature} == {(0, 1), (1, 3)}
    assert _difference(votes, members) is None
    order = list(votes[1].signature)
    place = next(
        i for i, (a, b) in enumerate(itertools.pairwise(order)) if a.members != b.members and a.params != b.params
    )
    order[place], order[place + 1] = order[place + 1], order[place]
    error = _difference([votes[0], attrs.evolve(votes[1], signature=tuple(order))], members)
    assert error is not None
    assert "over another group" in str(error)
    assert "Give every rank the same model" in str(error)


class OnOneDevice(torch.nn.Module):
    """Makes values on its own device, as position embeddings do."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(8, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.table(torch.arange(x.shape[0], device=x.device))


def test_devices_may_differ_from_rank_to_rank_and_dims_may_not() -> None:
    """A model that made values on cuda:0 and on cuda:1 was taken for two models."""
    found = {}
    with fake_world(2):
        inputs = {"x": torch.ones(4, 6), "y": torch.ones(4, 6)}
        graph = GraphCompiler(OnOneDevice(), support.mse_loss).compile(**inputs).graph()
        for name, device in (("here", torch.device("cuda", 0)), ("there", torch.device("cuda", 1)), ("cpu", "cpu")):
            other = graph.copy()
            (node,) = [n for n in other.graph.nodes if n.target is aten.arange.default or "arange" in str(n.target)]
            node.kwargs = {**node.kwargs, "device": torch.device(device)}
            found[name] = signature(other)
        assert first_difference(found["here"], found["there"]) is None
        assert first_difference(found["here"], found["cpu"]) is not None
        gpt = joint(**ALONE)
        turned = gpt.copy()
        node = next(n for n in turned.graph.nodes if n.target is aten.sum.dim_IntList)
        node.args = (node.args[0], [1], *node.args[2:])
        assert first_difference(signature(gpt), signature(turned)) is not None


def test_functions_of_python_have_an_address_of_their_own_in_each_process() -> None:
    """As torch.sym_max has, in a graph with dynamic sizes and an as_strided: equal ranks were told that they differ."""
    with fake_world(2):
        graph = joint(**ALONE)
        found = []
        for name in ("sym_max", "sym_max", "sym_min"):
            function = getattr(torch, name)
            other = graph.copy()
            node = next(n for n in other.graph.nodes if n.target is aten.gelu.default)
            node.target = types.FunctionType(function.__code__, {}, function.__name__)  # as in another process
            node.target.__module__ = function.__module__
            found.append(signature(other))
        assert first_difference(found[0], found[1]) is None
        assert first_difference(found[0], found[2]) is not None


def test_s34_a_freed_parameter_that_backward_still_reads_is_seen() -> None:
    """Through views too; and what backward has made may not be read by forward."""
    with fake_world(2):
        graph = joint(passes=[DataParallelPass(), ReshardPass()])
        gather = next(n for n in starts(graph.graph, "gather") if comm_of(n).params == ("layers.0.up.weight",))
        read(graph, wait_of(gather), graph.output_node)
        list(graph.graph.nodes)[-2].meta["phase"] = "backward"
        (problem,) = find_problems(graph)
        assert "in backward reads" in problem
        assert "memory of layers.0.up.weight gathered in forward" in problem
        view = next(n for n in wait_of(gather).users if n.target is aten.t.default)
        list(graph.graph.nodes)[-2].args = (view,)
        (problem,) = find_problems(graph)
        assert f"reads {view}, memory of layers.0.up.weight" in problem

        graph = joint(**ALONE)
        made = next(n for n in graph.graph.nodes if n.op == "call_function" and n.meta["phase"] == "backward")
        read(graph, made, graph.output_node)
        list(graph.graph.nodes)[-2].meta["phase"] = "forward"
        (problem,) = find_problems(graph)
        assert f"belongs to forward and reads {made}, which belongs to backward" in problem
