"""A stage of a pipeline as graphs, beside the module that autograd runs."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import graphpasses_support as support
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from stepwell_graphpasses import GraphProgram, PassConfig
from stepwell_graphpasses._collectives import starts
from stepwell_graphpasses.exceptions import CaptureError, ConfigError, GradientError
from stepwell_graphpasses.testing import fake_world


class Stage(nn.Module):
    """Draws, writes to buffers, hands one input on as it came, and needs another for nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Linear(9, 6)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor, skipped: torch.Tensor, scale: float = 1.0) -> dict[str, Any]:
        return {"x": x + self.down(self.drop(self.norm(self.up(x)))) * scale, "skipped": (skipped, 3)}


def inputs(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(4, 6, generator=generator).requires_grad_() for _ in range(2)]


def run(program: GraphProgram, kinds: Sequence[str]) -> tuple[list[Any], dict[str, Any]]:
    torch.manual_seed(3)
    found = []
    outputs = {
        number: program.forward(number, inputs(number), lambda tensors: (tuple(tensors), {"scale": 0.5}))
        for number in range(3)
    }
    program.unshard()
    order = (1, 0, 2)
    for place, number in enumerate(order):
        roots = [outputs[number]["x"], outputs[number]["skipped"][0]]
        found.append(program.backward(number, kinds[0], roots, [root.detach().cos() for root in roots]))
        if "W" in kinds and place:  # lags one behind
            assert program.backward(order[place - 1], "W", (), ()) == ()
    if "W" in kinds:
        program.backward(order[-1], "W", (), ())
    program.reshard()
    program.reduce_grads()
    gradients = {name: parameter.grad for name, parameter in program.module.named_parameters()}
    return found, gradients | dict(program.module.named_buffers())


def test_whole_and_split_backward_are_those_of_autograd_with_draws_and_buffers() -> None:
    module = support.seeded(Stage)
    torch.manual_seed(3)
    reference = copy.deepcopy(module)
    outputs, expected = {}, {}
    for number in range(3):
        expected[number] = inputs(number)
        outputs[number] = reference(*expected[number], scale=0.5)
    for number in (1, 0, 2):
        roots = [outputs[number]["x"], outputs[number]["skipped"][0]]
        torch.autograd.backward(roots, [root.detach().cos() for root in roots])
    for kinds in (("B",), ("I", "W")):
        found, state = run(GraphProgram(copy.deepcopy(module)), kinds)
        for number, gradients in zip((1, 0, 2), found, strict=True):
            for gradient, tensor in zip(gradients, expected[number], strict=True):
                assert torch.equal(gradient, tensor.grad)
        for name, parameter in reference.named_parameters():
            assert torch.equal(state[name], parameter.grad), name
        for name, buffer in reference.named_buffers():
            assert torch.equal(state[name], buffer), name


def test_i_computes_no_gradient_of_a_weight_and_w_all_of_them() -> None:
    program = GraphProgram(support.seeded(lambda: support.MLP(6, 6, 6)))
    program.forward(0, inputs(0)[:1], lambda tensors: (tuple(tensors), {}))
    (capture,) = program._captures
    products = {
        kind: sum("mm" in str(node.target) for node in ready.piece.module.graph.nodes)
        for kind, ready in capture.pieces.items()
    }
    assert products == {"forward": 2, "backward_input": 2, "backward_weight": 2}


def test_pieces_of_a_sharded_stage_gather_once_and_reduce_once() -> None:
    with fake_world(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "fsdp"))
        program = GraphProgram(
            support.seeded(lambda: support.MLP(6, 6, 6)), PassConfig(dp_mode="hsdp", bucket_by="bytes"), mesh=mesh
        )
        outputs = {n: program.forward(n, inputs(n)[:1], lambda tensors: (tuple(tensors), {})) for n in range(2)}
        capture = program._captures[0]
        graphs = {kind: ready.piece.module.graph for kind, ready in capture.pieces.items()}
        assert {kind: len(starts(graph)) for kind, graph in graphs.items()} == {
            "unshard": 1,
            "forward": 0,
            "backward_input": 0,
            "backward_weight": 0,
        }
        whole = capture.whole
        for number, output in outputs.items():
            program.backward(number, "B", [output], [torch.ones_like(output)])
        assert capture.whole is whole  # gathered once for both
        program.reshard()
        assert capture.whole is None
        assert all(parameter.grad is None for parameter in program.module.parameters())
        program.reduce_grads()
        assert all(parameter.grad is not None for parameter in program.module.parameters())


def test_what_a_program_refuses() -> None:
    program = GraphProgram(support.seeded(lambda: support.MLP(6, 6)))
    with pytest.raises(GradientError, match="W of microbatch 0 needs its I first"):
        program.backward(0, "W", (), ())
    with pytest.raises(GradientError, match="B of microbatch 2 needs its F first"):
        program.backward(2, "B", (), ())
    program.forward(0, inputs(0)[:1], lambda tensors: (tuple(tensors), {}))
    with pytest.raises(GradientError, match="a backward is B, I or W, got F"):
        program.backward(0, "F", (), ())
    with fake_world(2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
        with pytest.raises(ConfigError, match="fsdp_degree=4, but the mesh has 2"):
            GraphProgram(nn.Linear(2, 2), PassConfig(fsdp_degree=4), mesh=mesh)

    class Nothing(nn.Module):
        def forward(self, x: torch.Tensor) -> None:
            return None

    with pytest.raises(CaptureError, match="the stage returns no tensor"):
        GraphProgram(Nothing()).forward(0, inputs(0)[:1], lambda tensors: (tuple(tensors), {}))
