"""The compiler: topologies, the live model, lazy and failing compilation, shapes, checkpoints."""

from __future__ import annotations

import copy
import io
import sys
import threading
from types import SimpleNamespace
from typing import Any

import graphpasses_support as support
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from stepwell_graphpasses import GraphCompiler, ParallelPlan, PassConfig, PassContract, shard, verify
from stepwell_graphpasses._collectives import starts
from stepwell_graphpasses._live import _optimizers_of
from stepwell_graphpasses._order import rearrange
from stepwell_graphpasses.exceptions import (
    CaptureError,
    ConfigError,
    GradientError,
    GuardError,
    ModelStateError,
    PassError,
    PeerMismatchError,
    PlanError,
)
from stepwell_graphpasses.passes import DataParallelPass
from stepwell_graphpasses.testing import fake_world
from stepwell_mesh.exceptions import TopologyError, TopologyWarning
from stepwell_meta.testing import WorkerPool


def mlp() -> nn.Module:
    return support.MLP(4, 7, 3)


def compiler(
    config: PassConfig | None = None, make: Any = mlp, train_fn: Any = support.mse_loss, **options: Any
) -> GraphCompiler:
    return GraphCompiler(support.seeded(make), train_fn, config, **options)


XY = support.pair((4, 3), rank=0)


@pytest.mark.parametrize("config", [{"tp_size": 2}, {"pp_enabled": True, "pp_degree": 2}, {"pp_enabled": True}])
def test_b03_tensor_or_pipeline_parallelism_needs_an_external_mesh(config: dict[str, Any]) -> None:
    with fake_world(4), pytest.raises(TopologyError, match=r"mesh"):
        compiler(PassConfig(**config))
    with pytest.raises(TopologyError, match=r"mesh"):
        compiler(PassConfig(**config))


@pytest.mark.parametrize(
    ("config", "axes", "groups", "degrees"),
    [
        ({"dp_mode": "ddp"}, ("fsdp_replicate",), ("dp_replicate",), (1, 4)),
        ({"dp_mode": "fsdp"}, ("fsdp_shard",), ("fsdp",), (4, 1)),
        ({"dp_mode": "hsdp", "fsdp_degree": 2}, ("fsdp_replicate", "fsdp_shard"), ("dp_replicate", "fsdp"), (2, 2)),
        (
            {"dp_mode": "hsdp", "dp_replicate_degree": 4},
            ("fsdp_replicate", "fsdp_shard"),
            ("dp_replicate", "fsdp"),
            (1, 4),
        ),
    ],
)
def test_b04_own_meshes_groups_and_degrees(config: Any, axes: Any, groups: Any, degrees: Any) -> None:
    with fake_world(4):
        c = compiler(PassConfig(**config))
        assert c.topology.axis_names == axes
        assert c.topology.group_names == groups
        assert (c.config.fsdp_degree, c.config.dp_replicate_degree) == degrees
        assert c.topology.mesh.device_type == "cpu"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "needs a shard degree, a replicate degree, or both"),
        ({"fsdp_degree": 3}, "shard degree must divide"),
        ({"dp_replicate_degree": 3}, "replicate degree must divide"),
        ({"fsdp_degree": 2, "dp_replicate_degree": 4}, "must be the number of ranks"),
    ],
)
def test_b05_hsdp_degrees(config: dict[str, Any], message: str) -> None:
    with fake_world(4), pytest.raises(TopologyError, match=message):
        compiler(PassConfig(dp_mode="hsdp", **config))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"tp_size": 4}, "tp_size=4, but the mesh has 2"),
        ({"pp_enabled": True, "pp_degree": 4}, "pp_degree=4, but the mesh has 2"),
    ],
)
def test_degrees_beside_data_parallelism_must_be_those_of_the_mesh(config: dict[str, Any], message: str) -> None:
    """Only the degrees of data parallelism were compared: another number of stages, or of tensor parallel ranks, went unseen."""
    right = PassConfig(tp_size=2, pp_enabled=True, pp_degree=2)
    with fake_world(8):
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "fsdp", "tp"))
        with pytest.raises(ConfigError, match=message):
            compiler(PassConfig(**config), mesh=mesh)
        assert compiler(right, mesh=mesh).config.fsdp_degree == 2
        assert compiler(PassConfig(**config), mesh=mesh["fsdp"]).config.fsdp_degree == 2  # which does not say


def test_other_threads_go_on_while_parameters_become_shards() -> None:
    """The search for optimizers took hold of all objects, also of tuples that other threads were making: these failed there."""
    failures: list[SystemError] = []
    over = threading.Event()

    def make_tuples() -> None:
        while not over.is_set() and not failures:
            try:
                tuple(number for number in range(200))
            except SystemError as error:
                failures.append(error)

    threads = [threading.Thread(target=make_tuples) for _ in range(3)]
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters())
    before = sys.getswitchinterval()
    try:
        sys.setswitchinterval(1e-6)
        for thread in threads:
            thread.start()
        for _ in range(10):
            (found,) = _optimizers_of(model.parameters())
    finally:
        over.set()
        sys.setswitchinterval(before)
        for thread in threads:
            thread.join(timeout=30)
    assert not failures
    assert found is optimizer.param_groups[0]["params"]


def test_b06_b07_external_meshes_are_found_by_axis_and_reconciled() -> None:
    with fake_world(8):
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp_replicate", "fsdp", "tp"))
        c = compiler(PassConfig(dp_mode="hsdp"), mesh=mesh)
        assert (c.config.fsdp_degree, c.config.dp_replicate_degree) == (2, 2)
        assert c.topology.axis_names == ("dp_replicate", "fsdp")
        with pytest.warns(TopologyWarning, match="hsdp"):
            assert compiler(PassConfig(dp_mode="fsdp"), mesh=mesh).config.dp_mode == "hsdp"
        with pytest.raises(TopologyError, match="ddp"):
            compiler(PassConfig(dp_mode="ddp"), mesh=mesh)
        flat = init_device_mesh("cpu", (8,), mesh_dim_names=("fsdp",))
        alone = init_device_mesh("cpu", (1, 8), mesh_dim_names=("dp_replicate", "fsdp"))
        with pytest.warns(TopologyWarning, match="fsdp"):
            assert compiler(PassConfig(dp_mode="hsdp"), mesh=alone).config.dp_mode == "fsdp"
        context = SimpleNamespace(fsdp_non_moe_mesh=flat, device_mesh=mesh)
        assert compiler(PassConfig(), mesh=context).topology.mesh is flat
        assert compiler(PassConfig(dp_mode="hsdp"), mesh=SimpleNamespace(device_mesh=mesh)).topology.mesh is mesh
        with pytest.raises(TopologyError, match=r"x"):
            compiler(PassConfig(), mesh=init_device_mesh("cpu", (8,), mesh_dim_names=("x",)))
        with pytest.raises(ConfigError, match="fsdp_degree=4, but the mesh has 8"):
            compiler(PassConfig(fsdp_degree=4), mesh=flat)


def test_b08_one_rank_or_no_process_group_means_no_collectives() -> None:
    c = compiler()
    c.forward_backward(**XY)
    assert c.topology is None
    assert starts(c.graph().graph) == []
    assert all(type(p) is nn.Parameter for p in c.model.parameters())
    assert verify(c, XY).loss_error == 0.0
    with fake_world(1):
        c = compiler()
        c.forward_backward(**XY)
        assert c.topology is None
        assert c.config.fsdp_degree == 1


def test_b08_a_compiler_keeps_nothing_of_another_and_needs_a_model() -> None:
    passes = [DataParallelPass()]
    with fake_world(2):
        first = compiler(passes=passes).compile(**XY)
        second = compiler(passes=passes, make=lambda: support.MLP(4, 3)).compile(**XY)
        assert set(second.layouts) == {"layers.0.weight", "layers.0.bias"}
        assert len(first.layouts) == 4
        with pytest.raises(PlanError, match=r"'layer' names no .*near names: .*layers"):
            compiler(plan=shard("layer")).compile(**XY)
    with pytest.raises(ConfigError, match="model must be"):
        GraphCompiler(3, support.mse_loss)
    with pytest.raises(ConfigError, match="train_fn must be callable"):
        GraphCompiler(mlp(), None)


def test_b09_a_rank_holds_the_rows_of_its_place_in_the_shard_group() -> None:
    whole = support.seeded(mlp).layers[0].weight.detach()
    with fake_world(8, rank=5):
        hsdp = compiler(PassConfig(dp_mode="hsdp", fsdp_degree=4)).compile(**XY)  # ranks 4 to 7 are the second replica
        assert torch.equal(hsdp.model.layers[0].weight.to_local(), whole[2:4])
        fsdp = compiler().compile(**XY)  # the whole world: one row for each of the first seven
        assert torch.equal(fsdp.model.layers[0].weight.to_local(), whole[5:6])
        mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("fsdp", "tp"))
        beside = compiler(mesh=mesh).compile(**XY)
        assert torch.equal(beside.model.layers[0].weight.to_local(), whole[4:6])


def test_b10_only_parameters_of_the_plan_are_sharded_by_name_or_pattern() -> None:
    with fake_world(2):
        c = GraphCompiler(
            support.TinyGPT(scalar=True), support.gpt_loss, plan=shard("layers.0.*", "head.weight", "scale")
        )
        c.compile(tokens=support.tokens(rank=0))
        sharded = {name for name, layout in c.layouts.items() if layout.sharded}
    assert sharded == {"head.weight", *(name for name in c.layouts if name.startswith("layers.0."))}
    assert "a scalar has no rows" in c.explain("scale")
    assert "no pattern of the plan covers it" in c.explain("layers.1.up.weight")


def test_b15_parameters_become_shards_in_place_and_ddp_leaves_them() -> None:
    with fake_world(2):
        c = compiler()
        old = dict(c.model.named_parameters())
        old["layers.0.weight"].decay = False
        optimizer = torch.optim.AdamW(c.model.parameters())  # built before: it follows
        c.compile(**XY)
        weight = c.model.layers[0].weight
        assert isinstance(weight, DTensor)
        assert isinstance(weight, nn.Parameter)
        assert weight.placements == (Shard(0),)
        assert weight.decay is False
        assert optimizer.param_groups[0]["params"] == list(c.model.parameters())
        hsdp = compiler(PassConfig(dp_mode="hsdp", fsdp_degree=2), plan=shard("layers.0"))
        hsdp.compile(**XY)
        assert hsdp.model.layers[0].weight.placements == (Replicate(), Shard(0))
        assert hsdp.model.layers[1].weight.placements == (Replicate(), Replicate())
        ddp = compiler(PassConfig(dp_mode="ddp"))
        old = dict(ddp.model.named_parameters())
        ddp.compile(**XY)
        assert all(old[name] is p for name, p in ddp.model.named_parameters())


def test_b15_an_optimizer_that_has_stepped_or_gradients_from_before_are_refused() -> None:
    with fake_world(2):
        c = compiler()
        optimizer = torch.optim.AdamW(c.model.parameters())
        support.mse_loss(c.model, **XY).backward()
        with pytest.raises(ModelStateError, match=r"gradients from before .*step or zero them"):
            c.compile(**XY)
        optimizer.step()
        optimizer.zero_grad()
        with pytest.raises(ModelStateError, match="AdamW has already stepped"):
            c.compile(**XY)
        assert not c.is_compiled
        assert all(type(p) is nn.Parameter for p in c.model.parameters())


def test_b16_compiles_lazily_and_accumulates() -> None:
    c = compiler()
    assert not c.is_compiled
    with pytest.raises(ModelStateError, match="compile"):
        c.graph()
    with pytest.raises(ModelStateError, match="compile the step before"):
        c.evaluate(**XY)
    loss, named = c.forward_backward(**XY)
    assert c.is_compiled
    assert named == {}
    once = support.gradients(c.model)
    c.forward_backward(**XY)
    twice = support.gradients(c.model)
    assert support.difference(twice, {name: 2 * g for name, g in once.items()}) == 0.0
    assert loss.item() == support.mse_loss(c.model, **XY).item()


def test_b16_gradients_that_do_not_fit_are_refused() -> None:
    c = compiler().compile(**XY)
    before = [p.grad for p in c.model.parameters()]
    with pytest.raises(GradientError, match=r"layers.0.bias has shape \(3,\)"):
        c.live.accumulate({"layers.0.weight": torch.zeros(7, 4), "layers.0.bias": torch.zeros(3)})
    assert [p.grad for p in c.model.parameters()] == before == [None] * 4


def test_a_model_that_changed_after_compilation_is_refused() -> None:
    c = compiler().compile(**XY)
    c.model.layers[0].bias = nn.Parameter(torch.zeros(9))
    with pytest.raises(ModelStateError, match=r"layers.0.bias is no longer what was compiled: expected \(7,\)"):
        c.forward_backward(**XY)
    del c.model.layers[0].bias
    c.model.layers[0].bias = None
    with pytest.raises(ModelStateError, match=r"layers.0.bias was removed"):
        c.forward_backward(**XY)


def test_gradients_never_share_memory() -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.a + self.b) * x

    c = GraphCompiler(Sum(), lambda model, x: model(x).sum()).compile(x=torch.ones(3))
    c.forward_backward(x=torch.ones(3))
    c.model.a.grad.mul_(5)
    assert c.model.b.grad.tolist() == [1, 1, 1]
    c.forward_backward(x=torch.ones(3))
    assert c.model.a.grad.tolist() == [6, 6, 6]


def test_evaluation_and_training_mode_have_graphs_of_their_own() -> None:
    c = compiler(make=lambda: nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Dropout(0.5)))
    c.forward_backward(**XY)
    c.model.eval()
    loss, _ = c.evaluate(**XY)
    assert loss.item() == support.mse_loss(c.model, **XY).item()
    assert starts(c.graph().graph) == []
    before = c.model[1].num_batches_tracked.item()
    c.forward_backward(**XY)  # gradients in evaluation mode
    assert c.model[1].num_batches_tracked.item() == before
    c.model.train()
    c.forward_backward(**XY)
    assert c.model[1].num_batches_tracked.item() == before + 1
    assert len(c._captures) == 3


def test_autocast_around_the_step_is_captured_and_not_applied_twice() -> None:
    c = compiler()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss, _ = c.forward_backward(**XY)
        expected = support.mse_loss(c.model, **XY)
    assert loss.item() == expected.item()
    exact, _ = c.forward_backward(**XY)
    assert exact.item() == support.mse_loss(c.model, **XY).item() != loss.item()


def test_to_moves_the_model_and_compiles_anew() -> None:
    c = compiler().compile(**XY)
    c.forward_backward(**XY)
    grads = support.gradients(c.model)
    assert c.to("cpu") is c
    assert not c.is_compiled
    c.forward_backward(**XY)
    assert support.difference(support.gradients(c.model), {n: 2 * g for n, g in grads.items()}) == 0.0


def test_describe_explain_and_print_graph() -> None:
    with fake_world(4):
        c = compiler(PassConfig(dp_mode="hsdp", fsdp_degree=2))
        assert c.describe().endswith("not compiled yet")
        c.compile(**XY)
        text = c.describe()
        assert "hsdp: 2 shards x 2 replicas, reduce=avg" in text
        assert "4 parameters: 4 sharded (4 unevenly)" in text
        assert "x gather" in text
        assert "overlap: " in text
        assert "7 rows on 2 ranks are (4, 3), padded to 4" in c.explain("layers.0.weight")
        with pytest.raises(PlanError, match=r"nothing was noted about 'nope'"):
            c.explain("nope")
        out = io.StringIO()
        c.print_graph(file=out)
        assert "all_gather_into_tensor" in out.getvalue()
        report = c.reports[-1]
        assert (report.name, report.nodes) == ("overlap", len(c.graph().graph.nodes))


class Fails:
    name = "fails"
    contract = PassContract()

    def __init__(self, ranks: tuple[int, ...] = (0, 1)) -> None:
        self.ranks = ranks

    def run(self, joint: Any, context: Any) -> None:
        if dist.get_rank() in self.ranks:
            raise RuntimeError("the pass has a bug")


class SwapsOnOneRank:
    """Swaps the data of two reductions of equal shape on rank 1: wrong numbers, and no error from the backend."""

    name = "swaps"
    contract = PassContract()

    def __init__(self, how: str) -> None:
        self.how = how

    def run(self, joint: Any, context: Any) -> None:
        rearrange(joint.graph, {n: float("inf") for n in joint.graph.nodes if n.meta.get("comm") is not None})
        if dist.get_rank() == 1:
            first, second = (n for n in starts(joint.graph, "all_reduce") if n.meta["val"].shape == (4,))
            if self.how == "data":
                first.args, second.args = (second.args[0], *first.args[1:]), (first.args[0], *second.args[1:])
            else:
                first.args = (first.args[0], "sum", *first.args[2:])


def s40() -> list[Any]:
    found: list[Any] = []
    for name, passes in {
        "everywhere": [DataParallelPass(), Fails()],
        "on rank 1": [DataParallelPass(), Fails((1,))],
        "data": [DataParallelPass(), SwapsOnOneRank("data")],
        "operator": [DataParallelPass(), SwapsOnOneRank("operator")],
    }.items():
        model = support.seeded(lambda: support.MLP(4, 4, 4))
        model.layers[0].weight.requires_grad_(False)
        before = {n: (id(p), p.requires_grad, p.detach().clone()) for n, p in model.named_parameters()}
        c = GraphCompiler(model, support.mse_loss, PassConfig(dp_mode="ddp"), passes=passes)
        groups = len(dist.distributed_c10d._world.pg_map)
        try:
            c.compile(**support.pair((4, 4)))
        except (PassError, PeerMismatchError) as error:
            found.append((name, type(error).__name__, str(error)))
        after = {n: (id(p), p.requires_grad, p.detach().clone()) for n, p in model.named_parameters()}
        assert list(after) == list(before)
        assert all(after[n][:2] == before[n][:2] and torch.equal(after[n][2], before[n][2]) for n in before)
        assert len(dist.distributed_c10d._world.pg_map) == groups
        assert not c.is_compiled
    return found


def test_s40_s23_a_failed_compile_changes_nothing_and_no_rank_goes_on_alone(workers: WorkerPool) -> None:
    first, second = workers.run(s40, 2, deadline=60)
    assert [kind for _, kind, _ in first] == [
        "PassError",
        "PeerMismatchError",
        "PeerMismatchError",
        "PeerMismatchError",
    ]
    assert [kind for _, kind, _ in second] == ["PassError", "PassError", "PeerMismatchError", "PeerMismatchError"]
    assert "rank 1 could not compile, so no rank does: PassError: pass fails failed" in first[1][2]
    assert "on data that is computed otherwise" in first[2][2]
    assert "all_reduce.default avg" in first[3][2]
    assert "all_reduce.default sum" in first[3][2]


def s38() -> list[float]:
    rank = dist.get_rank()
    c = compiler(
        PassConfig(bucket_by="bytes"),
        lambda: support.TinyGPT(layers=1),
        support.gpt_loss,
        dynamic_arg_dims={"tokens": [0, 1]},
    )
    reference = support.seeded(lambda: support.TinyGPT(layers=1))
    results = []
    for step in range(3):
        inputs = {"tokens": support.tokens(step, batch=2 + rank + step, length=4 + 2 * rank + step)}
        c.forward_backward(**inputs)
        expected = support.averaged(support.local_gradients(reference, support.gpt_loss, inputs))
        results.append(support.difference(support.gradients(c.model), expected))
        c.model.zero_grad()
    assert len(c._captures) == 1
    return results


def test_s38_one_graph_for_other_sizes_also_on_each_rank(workers: WorkerPool) -> None:
    assert max(max(results) for results in workers.run(s38, 2, deadline=60)) <= 1e-7


def s39() -> Any:
    c = compiler()
    c.forward_backward(**support.pair((4, 3)))
    before = support.gradients(c.model)
    bad = support.pair((4, 3), batch=3) if dist.get_rank() else support.pair((4, 3), batch=5)
    try:
        c.forward_backward(**bad)
    except GuardError as error:
        message = str(error)
    after = support.gradients(c.model)  # collective: nobody is stuck in another one
    c.compile(**bad)
    c.forward_backward(**bad)
    return message, support.difference(before, after)


def test_s39_a_size_the_graph_was_not_made_for_raises_before_any_collective(workers: WorkerPool) -> None:
    for message, difference in workers.run(s39, 2, deadline=60):
        assert "x: expected shape (4, 4), got" in message
        assert "Call compile with such inputs" in message
        assert difference == 0.0


def test_s38_sizes_that_get_a_graph_of_their_own() -> None:
    def batch(size: int) -> dict[str, Any]:
        return support.pair((4, 3), rank=0, batch=size)

    c = compiler(
        dynamic_arg_dims={"x": [0], "y": [0]},
        compile_sizes=[4, 8, 16],
        compile_size_input="x",
        compile_size_dim=0,
        max_specializations=2,
    )
    for size in (5, 4, 4, 8, 16, 4, 6):
        loss, _ = c.forward_backward(**batch(size))
        assert loss.item() == pytest.approx(support.mse_loss(c.model, **batch(size)).item(), rel=1e-6)
    stats = c.specialization_stats
    assert (stats.compiled, stats.hits, stats.fallbacks) == (2, 4, 1)
    with pytest.raises(ConfigError, match="compile_sizes needs compile_size_input"):
        compiler(compile_sizes=[3])
    with pytest.raises(CaptureError, match="there is no such dim of such an input; inputs are x, y"):
        compiler(compile_sizes=[3], compile_size_input="z").forward_backward(**XY)


def test_dynamic_sizes_also_work_with_dynamic_true() -> None:
    c = compiler(dynamic=True)
    for size in (5, 9):
        inputs = support.pair((4, 3), rank=0, batch=size)
        loss, _ = c.forward_backward(**inputs)
        assert loss.item() == pytest.approx(support.mse_loss(c.model, **inputs).item(), rel=1e-6)


def meta_model(path: str) -> dict[str, Any]:
    whole = support.seeded(lambda: support.MLP(4, 7, 3))
    dcp.save({"model": whole.state_dict()}, checkpoint_id=path)
    with torch.device("meta"):
        model = support.MLP(4, 7, 3)
        model.register_buffer("table", torch.zeros(3))
    made: list[int] = []

    def init(model: nn.Module) -> None:
        assert all(isinstance(p, DTensor) and not p.is_meta for p in model.parameters())
        made.append(sum(p.to_local().numel() for p in model.parameters()))
        # Whoever forgets to initialise gets no numbers.
        assert all(bool(p.to_local().isnan().all()) for p in model.parameters())
        dcp.load({"model": {name: p for name, p in model.state_dict().items() if name != "table"}}, checkpoint_id=path)
        model.table.fill_(0.0)

    c = GraphCompiler(model, support.mse_loss, device="cpu", init_fn=init)
    inputs = support.pair((4, 3))
    loss, _ = c.forward_backward(**inputs)
    return {
        "loss": float(loss - support.mse_loss(whole, **inputs).detach()),
        "parameters": support.difference(support.parameters(model), support.parameters(whole)),
        "made": sum(made) / sum(p.numel() for p in whole.parameters()),
    }


@pytest.mark.filterwarnings("ignore")
def test_a_model_from_the_meta_device_gets_memory_for_its_shards_only_and_values_from_a_checkpoint(
    workers: WorkerPool, tmp_path: Any
) -> None:
    for found in workers.run(meta_model, 2, str(tmp_path / "checkpoint"), deadline=60):
        assert found["loss"] == found["parameters"] == 0.0
        assert found["made"] < 0.65


def s41_save(path: str) -> Any:
    def make() -> nn.Module:
        model = support.MLP(4, 7, 5, 3)
        model.layers[1].weight = nn.Parameter(model.layers[1].weight.detach().clone())
        return model

    c = compiler(make=make)
    reference = support.seeded(make)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (c.model, reference)]
    for step in range(3):
        inputs = support.pair((4, 3), step)
        c.forward_backward(**inputs)
        found = support.averaged(support.local_gradients(reference, support.mse_loss, inputs))
        for name, p in reference.named_parameters():
            p.grad = found[name]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    dcp.save({"model": c.model.state_dict()}, checkpoint_id=path)
    return support.parameters(c.model), support.difference(support.parameters(c.model), support.parameters(reference))


def s41_load(path: str) -> Any:
    c = compiler(make=lambda: support.MLP(4, 7, 5, 3)).compile(**support.pair((4, 3)))
    state = {"model": c.model.state_dict()}
    dcp.load(state, checkpoint_id=path)
    c.model.load_state_dict(state["model"])
    c.forward_backward(**support.pair((4, 3)))
    return support.parameters(c.model), sorted(state["model"])


@pytest.mark.filterwarnings("ignore")
def test_s41_three_adamw_steps_and_a_checkpoint_on_other_numbers_of_ranks(workers: WorkerPool, tmp_path: Any) -> None:
    saved = workers.run(s41_save, 4, str(tmp_path / "c"), deadline=90)
    for _, difference in saved:
        assert difference <= 1e-6
    for ranks in (2, 1):
        for loaded, names in workers.run(s41_load, ranks, str(tmp_path / "c"), deadline=60):
            assert support.difference(loaded, saved[0][0]) == 0.0
            assert names == sorted(f"layers.{i}.{part}" for i in range(3) for part in ("weight", "bias"))


def tensor_parallel(shape: tuple[int, ...], names: tuple[str, ...], mode: str) -> float:
    class Feed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down, self.norm = nn.Linear(4, 12), nn.Linear(12, 6), nn.LayerNorm(6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(self.down(self.up(x).relu()))

    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    data = mesh.get_coordinate()[0] if len(shape) == 2 else mesh.get_coordinate()[0] * 2 + mesh.get_coordinate()[1]
    inputs = support.pair((4, 6), rank=data)
    model = support.seeded(Feed)
    reference = copy.deepcopy(model)
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    c = GraphCompiler(model, support.mse_loss, PassConfig(dp_mode=mode), mesh=mesh)
    expected = support.averaged(support.local_gradients(reference, support.mse_loss, inputs))
    c.forward_backward(**inputs)
    torch.nn.utils.clip_grad_norm_([p for n, p in model.named_parameters() if n.startswith("up")], 1e9)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    found = support.gradients(model)
    moved = support.parameters(model)
    stepped = {name: p.detach() - 0.1 * expected[name] for name, p in reference.named_parameters()}
    return max(support.difference(found, expected), support.difference(moved, stepped))


@pytest.mark.parametrize(
    ("shape", "names", "mode"),
    [((2, 2), ("fsdp", "tp"), "fsdp"), ((2, 2, 2), ("dp_replicate", "fsdp", "tp"), "hsdp")],
)
def test_tensor_parallel_parameters_compose(workers: WorkerPool, shape: Any, names: Any, mode: str) -> None:
    ranks = torch.Size(shape).numel()
    assert max(workers.run(tensor_parallel, ranks, shape, names, mode, deadline=110)) <= 3e-7


def test_a_plan_may_come_from_a_dict() -> None:
    with fake_world(2):
        c = compiler(plan=ParallelPlan.from_dict({"shard": ["layers.0"]})).compile(**XY)
    assert [layout.sharded for layout in c.layouts.values()] == [True, True, False, False]


def different_starts() -> bool:
    torch.manual_seed(dist.get_rank())
    model = support.MLP(4, 7, 3)
    c = GraphCompiler(model, support.mse_loss, PassConfig(dp_mode="ddp")).compile(**support.pair((4, 3)))
    mine = [p.detach() for p in c.model.parameters()]
    torch.manual_seed(0)
    return all(torch.equal(a, b) for a, b in zip(mine, support.MLP(4, 7, 3).parameters(), strict=True))


def test_ranks_that_start_from_other_values_get_those_of_the_first(workers: WorkerPool) -> None:
    assert workers.run(different_starts, 2, deadline=60) == [True, True]


def unused_differs() -> str:
    def step(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(model.layers[1](model.layers[0](x) if dist.get_rank() else F.pad(x, (0, 3))), y)

    try:
        compiler(train_fn=step).compile(**support.pair((4, 3)))
    except PeerMismatchError as error:
        return str(error)
    return ""


def test_ranks_that_use_other_parameters_are_refused_instead_of_hanging(workers: WorkerPool) -> None:
    for message in workers.run(unused_differs, 2, deadline=60):
        assert "ranks would not run the same collectives" in message
        assert "layers.0" in message
