"""Graphs as straight Python code."""

from __future__ import annotations

import gc
import linecache
import operator
import traceback
import weakref
from typing import Any

import pytest
import torch
from torch import fx, nn

from stepwell_graphpasses._codegen import compile_graph

aten = torch.ops.aten


def graph_of(*steps: Any) -> fx.Graph:
    """A graph of two inputs; each step is given the nodes so far, and says a target, arguments and keyword arguments."""
    graph = fx.Graph()
    nodes = [graph.placeholder("x"), graph.placeholder("unused")]
    for number, step in enumerate(steps):
        target, args, kwargs = step(nodes)
        nodes.append(graph.call_function(target, args, kwargs))
        nodes[-1].meta["fqn"] = f"layers.{number}"
    graph.output((nodes[-1], [nodes[0]]))
    return graph


def test_it_computes_what_the_graph_does_with_every_kind_of_argument() -> None:
    graph = graph_of(
        lambda n: (aten.split_with_sizes.default, (n[0], [2, 2], 0), {}),
        lambda n: (getattr, (n[2], "__len__"), {}),
        lambda n: (aten.cat.default, ([n[0], n[0]], 1), {}),
        lambda n: (torch.Tensor.__getitem__, (n[4], (slice(None, 2), slice(1, 3))), {}),
        lambda n: (aten._to_copy.default, (n[5],), {"dtype": torch.float64}),
        lambda n: (aten.add.Tensor, (n[6], float("inf")), {"alpha": 1}),
        lambda n: (aten.clamp.default, (n[7], None, 1e30), {}),
    )
    x = torch.arange(8.0).reshape(4, 2)
    found, (same,) = compile_graph(graph, nn.Module())([x, None])
    assert torch.equal(found, fx.GraphModule(nn.Module(), graph)(x, None)[0])
    assert found.dtype == torch.float64
    assert same is x


def test_arguments_named_by_words_of_python() -> None:
    def take(**given: int) -> int:
        return given["from"]

    assert compile_graph(graph_of(lambda _: (take, (), {"from": 3})), nn.Module())([None, None])[0] == 3


def test_values_are_forgotten_after_their_last_reader_and_inputs_with_them() -> None:
    seen: list[Any] = []

    def remember(value: torch.Tensor) -> torch.Tensor:
        seen.append(weakref.ref(value))
        return value + 1

    def check(value: torch.Tensor) -> torch.Tensor:
        seen.append([reference() is None for reference in seen])
        return value

    graph = fx.Graph()
    node = graph.placeholder("x")
    for target in (remember, remember, check):
        node = graph.call_function(target, (node,))
    graph.output((node,))
    inputs = [torch.zeros(3)]
    assert compile_graph(graph, nn.Module())(inputs)[0].tolist() == [2.0] * 3
    assert inputs == []
    assert seen[2] == [True, True]


def test_an_error_shows_the_line_and_its_module() -> None:
    graph = graph_of(lambda n: (aten.mm.default, (n[0], n[0]), {}))
    with pytest.raises(RuntimeError) as caught:
        compile_graph(graph, nn.Module())([torch.zeros(2, 3), None])
    assert "# layers.0" in "".join(traceback.format_exception(caught.value))


def test_results_laid_out_otherwise_than_captured_are_copied_into_that_layout() -> None:
    """On a transposed input torch's fake batch norm keeps the strides, and the real one does not: PatchTST failed in a view."""
    x = torch.randn(3, 2, 5).transpose(1, 2)
    fake = torch.empty_strided((3, 5, 2), x.stride())
    graph = graph_of(
        lambda n: (aten.native_batch_norm.default, (n[0], None, None, None, None, True, 0.1, 1e-5), {}),
        lambda n: (operator.getitem, (n[2], 0), {}),
        lambda n: (aten.transpose.int, (n[3], 1, 2), {}),
        lambda n: (aten.view.default, (n[4], [6, 5]), {}),
        lambda n: (aten.as_strided.default, (n[3], [5], [2]), {}),
        lambda n: (aten.mul.Tensor, (n[5], n[6]), {}),
    )
    for name, value in {"getitem": fake, "transpose": fake.transpose(1, 2)}.items():
        next(node for node in graph.nodes if node.name.startswith(name)).meta["val"] = value
    normed = torch.native_batch_norm(x, None, None, None, None, True, 0.1, 1e-5)[0].transpose(1, 2).contiguous()
    step = compile_graph(graph, nn.Module())
    for _ in range(3):
        assert torch.equal(step([x, None])[0], normed.view(6, 5) * normed.flatten()[::2][:5])


def test_the_text_of_a_graph_goes_with_it() -> None:
    """Every graph left two texts in the cache of tracebacks for ever."""

    def texts() -> set[str]:
        return {name for name in linecache.cache if name.startswith("<stepwell graph")}

    before = texts()
    step = compile_graph(graph_of(lambda n: (aten.neg.default, (n[0],), {})), nn.Module())
    step([torch.ones(2), None])
    assert texts() - before
    del step
    gc.collect()
    assert not texts() - before
