"""A stage of a pipeline as graphs, beside the module that autograd runs."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import graphpasses_support as support
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from stepwell_graphpasses import GraphProgram, PassConfig
from stepwell_graphpasses._collectives import starts
from stepwell_graphpasses.exceptions import CaptureError, ConfigError, GradientError, ModelStateError, PeerMismatchError
from stepwell_graphpasses.testing import LiveBytes, fake_world
from stepwell_meta.testing import WorkerPool


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
    assert products == {"forward": 2, "backward_input": 2, "backward_weight": 2, "backward": 4}


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
            "backward": 0,
        }
        (whole,) = program._whole.values()
        for number, output in outputs.items():
            program.backward(number, "B", [output], [torch.ones_like(output)])
        assert list(program._whole.values()) == [whole]  # gathered once for both
        program.reshard()
        assert not program._whole
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


def test_the_back_end_that_a_configuration_names_serves_stages_too() -> None:
    """A program built its passes without it: torch's own were asked for, and ours ran with no word."""
    with fake_world(2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
        config = PassConfig(pass_backend="torch", bucket_by="bytes")
        program = GraphProgram(support.seeded(lambda: support.MLP(6, 6)), config, mesh=mesh)
        program.forward(0, inputs(0)[:1], lambda tensors: (tuple(tensors), {}))
        (capture,) = program._captures
        assert any("chosen and merged by torch" in text for _, text in capture.joint.notes)


def take(program: GraphProgram, number: int, *values: torch.Tensor) -> Any:
    return program.forward(number, values, lambda tensors: (tuple(tensors), {}))


def test_a_parameter_without_gradient_gets_zeros_where_these_are_asked_for() -> None:
    """The graph that reduces gave one gradient more than it was given, and nobody knew whose."""

    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.unused = nn.Linear(6, 6), nn.Linear(2, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.first(x)

    program = GraphProgram(support.seeded(Unused), PassConfig(unused="zeros"))
    output = take(program, 0, *inputs(0)[:1])
    program.backward(0, "B", [output], [torch.ones_like(output)])
    program.reduce_grads()
    assert torch.equal(program.module.unused.weight.grad, torch.zeros(3, 2))
    assert torch.equal(program.module.first.bias.grad, torch.full((6,), 4.0))


def replica_without_weight() -> list[torch.Tensor | None]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
    program = GraphProgram(support.seeded(lambda: support.MLP(6, 6)), mesh=mesh)
    output = take(program, 0, *inputs(dist.get_rank())[:1])
    roots = [output] if dist.get_rank() == 0 else []
    program.backward(0, "B", roots, [torch.ones_like(root) for root in roots])
    program.reduce_grads()
    return [support.full(parameter.grad) for parameter in program.module.parameters()]


def test_a_replica_whose_microbatches_have_no_weight_reduces_all_the_same(workers: WorkerPool) -> None:
    """It had no gradients, and so it did not take part: the other replicas waited for it."""
    first, second = workers.run(replica_without_weight, 2, deadline=60)
    model = support.seeded(lambda: support.MLP(6, 6))
    model(inputs(0)[0]).sum().backward()
    for found, other, parameter in zip(first, second, model.parameters(), strict=True):
        assert torch.equal(found, other)
        assert torch.allclose(found, parameter.grad / 2)


def test_gradients_that_are_given_out_have_memory_of_their_own() -> None:
    """A sum passes its gradient on: both inputs, and the parameter, were given the tensor that had come in."""

    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shift = nn.Parameter(torch.zeros(4, 6))

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return x + y + self.shift

    program = GraphProgram(Sum())
    seed = torch.randn(4, 6)
    output = take(program, 0, *inputs(0))
    found = program.backward(0, "B", [output], [seed])
    program.reduce_grads()
    everything = [*found, program.module.shift.grad, seed]
    assert all(torch.equal(gradient, seed) for gradient in everything)
    assert len({gradient.data_ptr() for gradient in everything}) == 4


def test_backward_reads_a_buffer_as_its_own_forward_left_it() -> None:
    """The forward of a later microbatch counts on, and the backward of an earlier one took that count."""

    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6)
            self.register_buffer("count", torch.zeros(6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count += 1
            return self.linear(x) * self.count

    program = GraphProgram(support.seeded(Counts))
    outputs = [take(program, number, *inputs(number)[:1]) for number in range(3)]
    seed = torch.ones(4, 6)
    grads = [program.backward(number, "B", [output], [seed])[0] for number, output in enumerate(outputs)]
    for number, gradient in enumerate(grads, 1):
        assert torch.equal(gradient, number * seed @ program.module.linear.weight)
    assert torch.equal(program.module.count, torch.full((6,), 3.0))


def test_pieces_run_in_the_dtypes_that_they_were_captured_with() -> None:
    """Under autocast, operators of the graph were cast once more; and a graph from outside was used inside."""
    program = GraphProgram(support.seeded(lambda: support.MLP(6, 6)))
    plain = take(program, 0, *inputs(0)[:1])
    assert plain.dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = program.backward(0, "B", [plain], [torch.ones_like(plain)])
        cast = take(program, 1, *inputs(0)[:1])
        expected = program.module(inputs(0)[0])
    assert found[0].dtype == torch.float32
    assert torch.equal(cast, expected)
    assert not torch.equal(cast.float(), plain)


def test_a_gradient_that_lies_otherwise_is_laid_out_as_the_graph_expects() -> None:
    class Flat(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.reshape(-1).cos().reshape(4, 6)

    program = GraphProgram(Flat())
    for seed in (torch.ones(()).expand(4, 6), torch.randn(6, 4).t(), torch.randn(4, 12)[:, ::2]):
        (x, _) = inputs(0)
        output = take(program, 0, x)
        (found,) = program.backward(0, "B", [output], [seed])
        assert torch.equal(found, torch.autograd.grad(Flat()(x), x, seed)[0])


def uneven_replicas(backend: str) -> list[torch.Tensor | None]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
    config = PassConfig(pass_backend=backend)
    program = GraphProgram(support.seeded(lambda: support.MLP(6, 6)), config, mesh=mesh)
    for number in range(2):
        rows = 3 if dist.get_rank() == number == 1 else 4
        output = take(program, number, inputs(number)[0][:rows].detach().requires_grad_())
        program.backward(number, "B", [output], [torch.ones_like(output)])
    program.reduce_grads()
    return [support.full(parameter.grad) for parameter in program.module.parameters()]


@pytest.mark.parametrize("backend", ["stepwell", "torch"])
def test_replicas_may_have_microbatches_of_different_sizes(workers: WorkerPool, backend: str) -> None:
    """A new size was captured, and gathered, by all replicas together: one that met it alone waited for the others.

    With torch's passes it also asked them for their costs.
    """
    first, second = workers.run(uneven_replicas, 2, backend, deadline=30)
    model = support.seeded(lambda: support.MLP(6, 6))
    for rank in range(2):
        for number in range(2):
            (model(inputs(number)[0][: 3 if rank == number == 1 else 4]).sum() / 2).backward()
    for found, other, parameter in zip(first, second, model.parameters(), strict=True):
        assert torch.equal(found, other)
        assert torch.allclose(found, parameter.grad, rtol=1e-5)


def trained_on_one_rank() -> str:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
    module = support.seeded(lambda: support.MLP(6, 6))
    if dist.get_rank() == 1:
        module(inputs(0)[0]).sum().backward()
    with pytest.raises((ModelStateError, PeerMismatchError)) as error:
        take(GraphProgram(module, mesh=mesh), 0, *inputs(0)[:1])
    return str(error.value)


def test_one_replica_whose_module_was_trained_on_is_an_error_on_all(workers: WorkerPool) -> None:
    """The others waited for it."""
    for message in workers.run(trained_on_one_rank, 2, deadline=30):
        assert "gradients from before compilation" in message


def test_a_stage_with_other_modules_than_when_it_was_captured_is_refused() -> None:
    program = GraphProgram(support.MLP(6, 6, 6))
    take(program, 0, *inputs(0)[:1])
    program.module.layers[1] = nn.Linear(6, 6)
    with pytest.raises(ModelStateError, match=r"layers .* has other modules"):
        take(program, 1, *inputs(0)[:1])


def test_a_backward_holds_no_more_than_autograd_does() -> None:
    """It ran as I and W, so that the gradients of all layers' outputs lived until the end, beside all that forward had kept."""

    def peak(kinds: str) -> float:
        module = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8, bias=False), nn.Tanh()) for _ in range(12)))
        x = torch.randn(4096, 8).requires_grad_()
        if kinds == "eager":
            output = module(x)
            with LiveBytes() as live:
                output.backward(torch.ones_like(output))
        else:
            program = GraphProgram(module)
            for _ in range(2):  # the first run looks at every result
                output = take(program, 0, x)
                with LiveBytes() as live:
                    for kind in kinds:
                        program.backward(0, kind, *(([output], [torch.ones_like(output)]) if kind != "W" else ((), ())))
        return live.peak / (x.numel() * x.element_size())

    eager = peak("eager")
    assert eager < 6
    assert peak("B") <= eager + 2
    assert peak("IW") > eager + 2  # which the two apart need
