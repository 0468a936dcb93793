"""What torch's eager and graph stages do while computing and before the first step, line by line."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from stage_support import Calls, X, prepare, scaled, stages_of, vote
from torch import fx, nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn import functional

from stepwell_meta import MetadataError, MetadataWarning
from stepwell_meta.exceptions import PipeliningMetadataError
from stepwell_meta.testing import WorkerPool
from stepwell_p2p import C10dTransport, LoopbackFabric, Placement, Wire
from stepwell_stage import Executor, Kind, PipelineStage, build_stage
from stepwell_stage.exceptions import StageExecutionError, StageUsageError
from stepwell_stage.schedules import looped_bfs


def test_a17_backward_has_three_kinds() -> None:
    (stage,) = stages_of(lambda w, x: w * x)
    grads = {}
    for kind in (Kind.B, Kind.I):
        x = X.clone().requires_grad_()
        value = stage.program.forward(0, [x], lambda received: (tuple(received), {}))
        (grads[kind],) = stage.program.backward(0, kind, [value], [torch.ones(2, 3)])
        if kind is Kind.I:
            assert stage.program.backward(0, Kind.W, [], []) == ()
        assert stage.submod.weight.grad == X.sum()
        stage.submod.weight.grad = None
    assert torch.equal(grads[Kind.B], grads[Kind.I])
    stage.program.forward(1, [X], lambda received: (tuple(received), {}))
    with pytest.raises(StageUsageError, match="a backward is B, I or W, got F"):
        stage.program.backward(1, Kind.F, [], [])


def test_a18_forward_keeps_an_output_if_asked() -> None:
    (stage,) = stages_of(scaled)
    prepare([stage], X)
    first = stage.forward_one_chunk(0, (X,), save_forward_output=False)
    assert first.requires_grad
    assert stage.output_chunks == []
    stage.forward_one_chunk(1, (X + 1,))
    (kept,) = stage.output_chunks
    assert torch.equal(kept, X + 1)
    assert not kept.requires_grad  # better: what is kept for the caller holds no graph
    prepare([stage], X, backward=False)
    assert not stage.forward_one_chunk(0, (X,)).requires_grad  # better: nor does an evaluation


def test_a18_what_a_module_raises_says_where() -> None:
    def fails(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 20:
            raise RuntimeError("too much")
        return w * x

    (stage,) = stages_of(fails)
    prepare([stage], X)
    with pytest.raises(StageExecutionError, match="stage 0, microbatch 1, action 0F1: RuntimeError: too much"):
        stage.forward_one_chunk(1, (X * 10,))


def test_a19_backward_starts_from_the_loss_else_the_output() -> None:
    (stage,) = stages_of(lambda w, x: (w * x).sum())
    prepare([stage], X)
    for loss_of in (None, lambda value: 2 * value):
        stage.submod.weight.grad = None
        value = stage.forward_one_chunk(0, (X,))
        stage.backward_one_chunk(0, loss=None if loss_of is None else loss_of(value))
        assert stage.submod.weight.grad == X.sum() * (1 if loss_of is None else 2)
    prepare([stage], X, backward=False)
    stage.submod.weight.grad = None
    stage.forward_one_chunk(0, (X,))
    stage.backward_one_chunk(0)
    assert stage.submod.weight.grad is None


def test_a19_one_gradient_for_each_stage_input_and_kwargs_stay_here() -> None:
    stages = stages_of(lambda w, x: (w * x, 3 * x), lambda w, a, b, *, mask: w * a * mask)
    prepare_with_mask = torch.ones(3, requires_grad=True)
    vote(stages)
    handed = stages[0]._prepare_forward_infra(2, (X,), {}, has_backward=True)
    stages[1]._prepare_forward_infra(2, handed, {"mask": prepare_with_mask}, has_backward=True)
    for stage in reversed(stages):
        stage._prepare_backward_infra(2)
    value = stages[0].forward_one_chunk(0, (X,))
    stages[1].set_local_fwd_input(value, 0)
    result = stages[1].forward_one_chunk(0, (), {"mask": prepare_with_mask})
    stages[1].backward_one_chunk(0, loss=result.sum())
    grads = stages[1].get_local_bwd_output(0)
    assert len(grads) == 2
    assert torch.equal(grads[0], torch.ones(2, 3))
    assert grads[1] is None
    assert torch.equal(prepare_with_mask.grad, X.sum(0))  # and not touched by what ran before


@pytest.mark.parametrize("full", [True, False])
def test_a19_a20_dw_builder(*, full: bool) -> None:
    done: list[str] = []

    def build() -> Callable[[], None]:
        done.append("built")
        return lambda: done.append("run")

    stages = stages_of(scaled, scaled, options=[{}, {"dw_builder": build}])
    prepare(stages, X)
    assert done == []
    stages[1].set_local_fwd_input(stages[0].forward_one_chunk(0, (X,)), 0)
    loss = stages[1].forward_one_chunk(0).sum()
    stages[1].backward_one_chunk(0, loss=loss, full_backward=full)
    assert done == (["built", "run"] if full else ["built"])
    if not full:
        stages[1].backward_weight_one_chunk(0)
        assert done == ["built", "run"]


def test_a20_weights_come_after_inputs() -> None:
    stages = stages_of(scaled, scaled)
    prepare(stages, X)
    stages[1].set_local_fwd_input(stages[0].forward_one_chunk(0, (X,)), 0)
    loss = stages[1].forward_one_chunk(0).sum()
    with pytest.raises(StageUsageError, match="W of microbatch 0 needs its I first"):
        stages[1].backward_weight_one_chunk(0)
    stages[1].backward_one_chunk(0, loss=loss, full_backward=False)
    stages[0].set_local_bwd_input(stages[1].get_local_bwd_output(0), 0)
    stages[0].backward_one_chunk(0, full_backward=False)
    assert stages[0].submod.weight.grad is None  # the first stage does all of it in W
    for stage in stages:
        stage.backward_weight_one_chunk(0)
        assert stage.submod.weight.grad == X.sum()


# A22 to A25: graphs made by hand, so that they can be wrong.


def graph_module(inputs: int, outputs: Any = 1, *, with_meta: bool = True) -> fx.GraphModule:
    graph = fx.Graph()
    nodes = [graph.placeholder(f"x{i}") for i in range(inputs)]
    for node in nodes if with_meta else ():
        node.meta["val"] = torch.zeros(2, 3)
    made = graph.call_function(torch.add, (nodes[0], 1))
    made.meta["val"] = torch.zeros(2, 3)
    graph.output(made if outputs == 1 else [made, outputs])
    return fx.GraphModule(nn.Module(), graph)


class Info:
    """What pipe.info() gives."""

    def __init__(self, graph: fx.Graph, num_stages: int) -> None:
        self.graph, self.num_stages = graph, num_stages


def chain_of(stages: int, *, extra: Callable[[fx.Graph, fx.Node], Any] = lambda graph, node: node) -> Info:
    graph = fx.Graph()
    value: Any = graph.placeholder("x")
    for index in range(stages):
        value = graph.create_node("call_module", f"submod_{index}", (value,))
        if index < stages - 1:
            value = extra(graph, value)
    graph.output(value)
    return Info(graph, stages)


def test_a22_a_graph_that_does_not_fit_is_refused() -> None:
    with pytest.raises(PipeliningMetadataError, match="calls 2 submodules, but there are 3 stages"):
        build_stage(graph_module(1), 0, Info(chain_of(2).graph, 3), "cpu")
    with pytest.raises(PipeliningMetadataError, match="calls it with 1 values, but its module takes 2"):
        build_stage(graph_module(2), 1, chain_of(2), "cpu")
    with pytest.raises(PipeliningMetadataError, match=r"input 'x0': the graph does not say what it looks like"):
        build_stage(graph_module(1, with_meta=False), 1, chain_of(2), "cpu")
    other = chain_of(2, extra=lambda graph, node: graph.call_function(torch.relu, (node,)))
    with pytest.raises(PipeliningMetadataError, match="comes from call_function <built-in method relu"):
        build_stage(graph_module(1), 1, other, "cpu")
    with pytest.raises(PipeliningMetadataError, match=r"expected the fx.GraphModule that pipe.get_stage_module\(1\)"):
        build_stage(nn.Linear(3, 3), 1, chain_of(2), "cpu")


def test_a22_receives_are_read_off_the_graph() -> None:
    graph = fx.Graph()
    x, mask = graph.placeholder("x"), graph.placeholder("mask")
    first = graph.create_node("call_module", "submod_0", (x,))
    one = graph.call_function(operator.getitem, (first, 0))
    other = graph.call_function(operator.getitem, (first, 1))
    second = graph.create_node("call_module", "submod_1", (other, mask, one))
    third = graph.create_node("call_module", "submod_2", (second, one))
    graph.output(third)
    stage = build_stage(graph_module(3), 1, Info(graph, 3), "cpu")
    found = {(wire.source, wire.output, wire.destination, wire.input) for wire in stage.wires}
    assert found == {(0, 1, 1, 0), (0, 0, 1, 1), (1, 0, 2, 0), (0, 0, 2, 1)}  # A23: each consuming stage once
    with pytest.raises(PipeliningMetadataError, match=r"takes the model's arguments \['mask'\] from the caller"):
        stage.program.forward(0, [X, X], lambda received: (tuple(received), {}))
    with pytest.raises(
        PipeliningMetadataError, match=r"traced with torch.float32 of shape \(2, 3\), but got .*\(3, 3\)"
    ):
        stage.program.forward(0, [X, X], lambda received: (tuple(received), {"mask": torch.zeros(3, 3)}))


def test_a23_what_cannot_cross_is_refused() -> None:
    with pytest.raises(PipeliningMetadataError, match="stage 0, output 1 is 5, of which the graph does not say"):
        build_stage(graph_module(1, 5), 0, chain_of(2), "cpu")
    assert build_stage(graph_module(1, 5), 1, chain_of(2), "cpu").is_last  # what the last stage returns crosses nothing


class TwoTakers(nn.Module):
    """One output has two takers, one needs no grad, one has no taker."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.full((3,), float(i + 1))) for i in range(3))

    def forward(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        h = x * self.weights[0]
        up = index + 1
        pipelining.pipe_split()
        g = h * self.weights[1]
        pipelining.pipe_split()
        return (h + g)[up] * self.weights[2]


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # of torch's own, while it traces
def test_a24_gradients_of_several_takers_are_summed() -> None:
    """Torch refuses the first; under ours they add up. Torch sends an integer's missing gradient nowhere, as ours."""
    index = torch.tensor([0, -1])
    pipe = pipelining.pipeline(TwoTakers(), (X, index))
    model = TwoTakers()
    model(X, index).sum().backward()
    transport = LoopbackFabric(1).transport(0)
    stages = [build_stage(pipe.get_stage_module(i), i, pipe.info(), "cpu", transport=transport) for i in range(3)]
    schedule = looped_bfs(1, 1, stages_per_rank=3)
    Executor(stages, schedule, lambda value: value.sum(), transport=transport, loss_weights="sum").step(X, index)
    found = {name: p.grad for stage in stages for name, p in stage.submod.named_parameters()}
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad)


def test_a25_meta_parameters_stay_where_they_are() -> None:
    with torch.device("meta"):
        module = nn.Linear(3, 3)
    assert PipelineStage(module, 0, 1, "cpu").submod.weight.is_meta
    graph = graph_module(1)
    graph.register_parameter("late", nn.Parameter(torch.zeros(1, device="meta")))
    assert build_stage(graph, 0, chain_of(1), "cpu").submod.late.is_meta


def test_a26_examples_are_values_or_tuples() -> None:
    leaf = X.clone().requires_grad_()
    one = PipelineStage(nn.Linear(3, 3), 1, 2, "cpu", leaf, leaf, X, X)
    many = PipelineStage(nn.Linear(3, 3), 1, 2, "cpu", (leaf,), (leaf,), (X,), (X,))
    assert one.declared == many.declared
    with pytest.raises(MetadataError, match="one input gradient, or None, for each of 2 inputs, got 1"):
        PipelineStage(nn.Linear(3, 3), 1, 2, "cpu", input_args=(leaf, leaf), input_grads=(X,))
    with pytest.raises(PipeliningMetadataError, match="output gradient 0"):
        PipelineStage(nn.Linear(3, 3), 1, 2, "cpu", output_args=X, output_grads=X)


def test_a27_static_takes_all_from_the_user_dynamic_learns() -> None:
    leaf = X.clone().requires_grad_()
    calls: list[int] = []

    def counted(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return w * x

    declared = [{"input_args": X, "output_args": leaf}, {"input_args": leaf, "output_args": leaf}]
    assert prepare(stages_of(counted, counted, options=declared), X) == [1, 1]
    assert calls == []  # nothing ran
    assert prepare(stages_of(counted, counted, options=[declared[0], {}]), X) == [0, 0]
    assert calls == [1, 1]
    calls.clear()
    assert prepare(stages_of(counted, counted, options=[{"input_args": X}, {}])) == [0, 0]  # no arguments: the examples
    assert calls == [1, 1]
    with pytest.raises(PipeliningMetadataError, match="no arguments to learn from, and no input_args were declared"):
        prepare(stages_of(counted, counted))


def test_a27_stages_that_declare_different_things_are_refused() -> None:
    """Torch sends, and the receiver waits, or reads something else."""
    wide = torch.zeros(2, 4, requires_grad=True)
    leaf = X.clone().requires_grad_()
    stages = stages_of(
        scaled, scaled, options=[{"input_args": X, "output_args": leaf}, {"input_args": wide, "output_args": wide}]
    )
    with pytest.raises(
        PipeliningMetadataError, match=r"stage 1: input 0: shape mismatch: expected \(2, 4\), got \(2, 3\)"
    ):
        vote(stages)


def voting() -> list[list[int]]:
    """Over several placements, each with every stage declared but one, or all."""
    transport = C10dTransport()
    leaf = X.clone().requires_grad_()
    outcomes = []
    for placement in (Placement.loop(transport.size, transport.size), Placement.v(2 * transport.size, transport.size)):
        for silent in (None, 0, placement.num_stages - 1):
            stages = [
                PipelineStage(
                    Calls(scaled),
                    index,
                    placement.num_stages,
                    "cpu",
                    *(() if index == silent else (leaf, leaf)),
                    transport=transport,
                )
                for index in placement.stages_of(transport.rank)
            ]
            for stage in stages:
                stage.stage_index_to_group_rank = dict(enumerate(placement.ranks))
            outcomes.append(vote(stages))
    transport.close()
    return outcomes


def test_a28_all_vote_and_all_hear_the_outcome(workers: WorkerPool) -> None:
    for outcomes in workers.run(voting, 4, deadline=40):
        assert outcomes == [[1], [0], [0], [1, 1], [0, 0], [0, 0]]


def test_a28_on_one_rank_and_without_a_hand_over() -> None:
    leaf = X.clone().requires_grad_()
    assert vote(stages_of(scaled, scaled, options=[{"input_args": leaf, "output_args": leaf}] * 2)) == [1, 1]
    first, last = stages_of(scaled, scaled)
    with pytest.raises(PipeliningMetadataError, match="stage 0 is on the same rank and hands over"):
        last._warmup_forward_vote(True)
    word = first._warmup_forward_vote(True)
    last._warmup_forward_vote(True, received_acc=word)
    with pytest.raises(PipeliningMetadataError, match="stage 1 is on the same rank and hands over"):
        first._warmup_backward_result()


def test_a29_the_first_microbatch_runs_through_once() -> None:
    """Torch gives later stages uninitialised memory; ours the values themselves, so that an index is one."""
    seen: list[Any] = []

    def second(w: torch.Tensor, index: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        seen.append((index.clone(), table.requires_grad, torch.is_grad_enabled()))
        return w * table[index]

    for backward in (True, False):
        stages = stages_of(lambda w, x: (torch.tensor([1, 0, 1]), w * x), second)
        seen.clear()
        prepare(stages, X, backward=backward)
        ((index, requires_grad, enabled),) = seen
        assert index.tolist() == [1, 0, 1]
        assert (requires_grad, enabled) == (backward, backward)
        assert stages[0]._torch.probe is None
        assert stages[0]._torch.value is None
        assert all(stage.submod.weight.grad is None for stage in stages)
    first, last = stages_of(scaled, scaled)
    vote([first, last])
    first._prepare_forward_infra(2, (X,), {}, has_backward=True)
    with pytest.raises(PipeliningMetadataError, match="hands over what it found out, a HandedForward, but None came"):
        last._prepare_forward_infra(2, None, {}, has_backward=True)


def on_meshes(sizes: tuple[int, int]) -> None:
    """A30 and A13: two tensor-parallel stages, whose activations are sharded and whose gradients are placed otherwise."""
    pipeline, tensor = sizes
    world = init_device_mesh("cpu", (pipeline, tensor), mesh_dim_names=("pp", "tp"))
    mesh, index = world["tp"], world.get_local_rank("pp")
    torch.manual_seed(0)
    weights = [torch.randn(4, 4), torch.randn(4, 4)]
    x, y = torch.randn(8, 4), torch.randn(8, 4)

    def plain() -> list[torch.Tensor]:
        leaves = [w.clone().requires_grad_() for w in weights]
        (functional.mse_loss(torch.relu(x @ leaves[0]) @ leaves[1], y)).backward()
        return [leaf.grad for leaf in leaves]

    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(
                DTensor.from_local(weights[0].chunk(tensor, 1)[mesh.get_local_rank()], mesh, [Shard(1)])
            )

        def forward(self, x: torch.Tensor) -> DTensor:
            return torch.relu(DTensor.from_local(x, mesh, [Replicate()]) @ self.w)

    class Second(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(
                DTensor.from_local(weights[1].chunk(tensor, 0)[mesh.get_local_rank()], mesh, [Shard(0)])
            )

        def forward(self, h: DTensor) -> torch.Tensor:
            assert isinstance(h, DTensor)
            assert h.placements == (Shard(1),)
            return (h @ self.w).redistribute(placements=[Replicate()]).to_local()

    group = world["pp"].get_group()
    stage = PipelineStage((First, Second)[index](), index, 2, "cpu", group=group, get_mesh=lambda key: mesh)
    for make in (pipelining.ScheduleGPipe, pipelining.Schedule1F1B):
        schedule = make(stage, 4, functional.mse_loss)
        for _ in range(2):
            stage.submod.zero_grad()
            schedule.step(*((x,) if index == 0 else ()), target=y if index else None)
            torch.testing.assert_close(stage.submod.w.grad.full_tensor(), plain()[index])
    if index == 0:
        (info,) = stage.grad_recv_info[0]
        assert info.tensor_meta.placements in ((Shard(1),), (Replicate(),), (Partial(),))
    stage.transport.close()


def test_a30_a13_gradients_of_dtensors_are_found_out(workers: WorkerPool) -> None:
    workers.run(on_meshes, 4, (2, 2), deadline=80)


def test_a26_meshes_of_examples_are_known(workers: WorkerPool) -> None:
    workers.run(meshes_of_examples, 1, deadline=30)


def meshes_of_examples() -> None:
    mesh = DeviceMesh("cpu", [0])
    spread = DTensor.from_local(X.clone(), mesh, [Replicate()]).requires_grad_()
    grad = DTensor.from_local(X.clone(), mesh, [Partial()])
    stage = PipelineStage(nn.Linear(3, 3), 0, 1, "cpu", input_args=spread, input_grads=grad)
    assert stage.meshes.get(stage.declared.inputs[0].mesh_key) is mesh
    with pytest.raises(PipeliningMetadataError, match="input gradient 0"):
        PipelineStage(nn.Linear(3, 3), 0, 1, "cpu", input_args=spread, input_grads=X)


def missing_loss() -> None:
    mesh = DeviceMesh("cpu", [0])
    transport = LoopbackFabric(1).transport(0)
    functions = [lambda w, x: DTensor.from_local(w * x, mesh, [Replicate()]), lambda w, d: (w * d).to_local()]
    stages = [
        PipelineStage(Calls(f), i, 2, "cpu", transport=transport, get_mesh=lambda key: mesh)
        for i, f in enumerate(functions)
    ]
    for stage in stages:
        stage.stage_index_to_group_rank = {0: 0, 1: 0}
    with pytest.raises(PipeliningMetadataError, match="needs a loss function and a target; or declare input_grads"):
        prepare(stages, X)
    with pytest.raises(PipeliningMetadataError, match="a HandedBackward, but None came"):
        stages[0]._prepare_backward_infra(2)


def test_a30_needs_a_loss_where_there_are_dtensors(workers: WorkerPool) -> None:
    """Better: for plain tensors, whose gradients look like themselves, nothing runs backward beforehand."""
    workers.run(missing_loss, 1, deadline=30)
    (stage,) = stages_of(scaled)
    with pytest.raises(PipeliningMetadataError, match="_prepare_forward_infra comes before"):
        stage._prepare_backward_infra(2)
    prepare([stage], X)  # no loss function


class Stateful(nn.Module):
    """Moves buffers on, also one under two names, puts a new one in the place of another, and draws random numbers."""

    def __init__(self, *, fails: bool) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("again", self.count)
        self.register_buffer("last", torch.zeros(2, 3))
        self.fails = fails

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        self.last = x.detach() + torch.rand(())
        value = functional.dropout(self.norm(x))
        if self.fails:
            raise RuntimeError("in the middle")
        return value


@pytest.mark.parametrize("fails", [False, True])
def test_a31_what_runs_beforehand_leaves_no_trace(*, fails: bool) -> None:
    module = Stateful(fails=fails)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    objects = dict(module.named_buffers(remove_duplicate=False))
    random = torch.get_rng_state()
    x = X.clone()
    if fails:
        with pytest.raises(StageExecutionError, match="in the middle"):
            prepare(stages_of(module), x)
    else:
        prepare(stages_of(module), x)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert all(value is objects[name] for name, value in module.named_buffers(remove_duplicate=False))
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.equal(x, X)


def test_a31_what_was_declared_and_is_not_so_warns() -> None:
    options = [{"input_args": torch.zeros(2, 4), "output_args": torch.zeros(2, 5)}, {}]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        prepare(stages_of(scaled, scaled, options=options), X)
    texts = [str(one.message) for one in caught if one.category is MetadataWarning]
    assert any("stage 0: input 0: shape mismatch: expected (2, 4), got (2, 3)" in text for text in texts)
    assert any("output 0: shape mismatch: expected (2, 5), got (2, 3)" in text for text in texts)


def test_a31_a_stage_may_hand_over_no_tensor_at_all() -> None:
    """Torch refuses outputs without tensors; here static values cross as part of the structure."""
    stages = stages_of(lambda w, x: {"rows": len(x)}, lambda w, d: w * torch.ones(d["rows"]))
    prepare(stages, X)
    stages[1].set_local_fwd_input(stages[0].forward_one_chunk(0, (X,)), 0)
    assert torch.equal(stages[1].forward_one_chunk(0), torch.ones(2))


def test_another_version_of_torch_is_named() -> None:
    (stage,) = stages_of(scaled)
    pipelining.PipelineStage.newer_method = None
    try:
        with pytest.raises(AttributeError, match=r"has PipelineStage.newer_method, and stepwell-stage"):
            _ = stage.newer_method
    finally:
        del pipelining.PipelineStage.newer_method
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        _ = stage.nonsense


def test_values_that_skip_a_stage_of_the_same_rank_need_the_executor() -> None:
    wires = [Wire(0, 0, 1, 0), Wire(0, 0, 2, 1), Wire(1, 0, 2, 0)]
    stages = stages_of(scaled, scaled, lambda w, a, b: w * a + b, options=[{"wires": wires}] * 3)
    with pytest.raises(
        PipeliningMetadataError, match=r"stage 2 takes values of stage 0, .* with stepwell_stage\.Executor"
    ):
        prepare(stages, X)


def test_dynamic_shapes_and_torchs_buffers_do_not_go_together() -> None:
    stage = PipelineStage(Calls(scaled), 0, 1, "cpu", shapes="dynamic")
    with pytest.raises(StageUsageError, match=r"run the stages with stepwell_stage\.Executor"):
        stage._prepare_forward_infra(2, (X,))


def test_ranks_of_the_process_group_are_used_by_default(workers: WorkerPool) -> None:
    def default() -> tuple[int, int]:
        stage = PipelineStage(nn.Linear(2, 2), dist.get_rank(), 2, "cpu")
        return stage.group_rank, stage.group_size

    assert workers.run(default, 2, deadline=30) == [(0, 2), (1, 2)]
