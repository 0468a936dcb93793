"""The compiler: lazy and failing compilation, graphs of each mode, and what it tells."""

from __future__ import annotations

import io
from typing import Any

import graphpasses_support as support
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from graphpasses_support import XY, compiler, mlp
from torch import nn

from stepwell_graphpasses import FULL, GraphCompiler, ParallelPlan, PassConfig, PassContract, shard, verify
from stepwell_graphpasses._collectives import starts
from stepwell_graphpasses._order import rearrange
from stepwell_graphpasses.exceptions import (
    CaptureError,
    ConfigError,
    GraphUsageError,
    GuardError,
    ModelStateError,
    PassError,
    PeerMismatchError,
    PlanError,
)
from stepwell_graphpasses.passes import DataParallelPass, default_passes
from stepwell_graphpasses.testing import fake_world
from stepwell_meta.testing import WorkerPool


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


def state_of(model: nn.Module) -> dict[str, Any]:
    return {n: (id(p), p.requires_grad, p.detach().clone()) for n, p in model.named_parameters()}


def refused(model: nn.Module, config: PassConfig, passes: Any) -> tuple[str, str]:
    """How a compile fails, which must leave the model and the groups as they were."""
    before, groups = state_of(model), len(dist.distributed_c10d._world.pg_map)
    c = GraphCompiler(model, support.mse_loss, config, passes=passes)
    made = len(dist.distributed_c10d._world.pg_map) - groups  # with the compiler, which may be used again
    with pytest.raises((PassError, PeerMismatchError)) as error:
        c.compile(**support.pair((4, 4)))
    after = state_of(model)
    assert list(after) == list(before)
    assert all(after[n][:2] == before[n][:2] and torch.equal(after[n][2], before[n][2]) for n in before)
    assert len(dist.distributed_c10d._world.pg_map) == groups + made
    assert not c.is_compiled
    return type(error.value).__name__, str(error.value)


def frozen_in_part() -> nn.Module:
    model = support.seeded(lambda: support.MLP(4, 4, 4))
    model.layers[0].weight.requires_grad_(False)
    return model


def s40() -> list[tuple[str, str]]:
    found = []
    for passes in (
        [DataParallelPass(), Fails()],
        [DataParallelPass(), Fails((1,))],
        [DataParallelPass(), SwapsOnOneRank("data")],
        [DataParallelPass(), SwapsOnOneRank("operator")],
    ):
        found.append(refused(frozen_in_part(), PassConfig(dp_mode="ddp"), passes))
    return found


def test_s40_s23_a_failed_compile_changes_nothing_and_no_rank_goes_on_alone(workers: WorkerPool) -> None:
    first, second = workers.run(s40, 2, deadline=60)
    assert [kind for kind, _ in first] == ["PassError", "PeerMismatchError", "PeerMismatchError", "PeerMismatchError"]
    assert [kind for kind, _ in second] == ["PassError", "PassError", "PeerMismatchError", "PeerMismatchError"]
    assert "rank 1 could not compile, so no rank does: PassError: pass fails failed" in first[1][1]
    assert "on data that is computed otherwise" in first[2][1]
    assert "all_reduce.default avg" in first[3][1]
    assert "all_reduce.default sum" in first[3][1]


def s40_everywhere() -> list[tuple[str, str]]:
    config = PassConfig()
    model = frozen_in_part()
    count = len(default_passes(config))
    found = []
    for place in range(count + 1):
        passes = default_passes(config)
        found.append(refused(model, config, [*passes[:place], Fails((1,)), *passes[place:]]))
    GraphCompiler(model, support.mse_loss, config).compile(**support.pair((4, 4)))  # the same model all the time
    return found


def test_s40_a_failure_at_any_pass_changes_nothing(workers: WorkerPool) -> None:
    first, second = workers.run(s40_everywhere, 2, deadline=60)
    assert len(first) >= 5
    assert {kind for kind, _ in first} == {"PeerMismatchError"}
    assert {kind for kind, _ in second} == {"PassError"}


def other_config() -> str:
    c = compiler(PassConfig(grad_sync="scatter" if dist.get_rank() else "none"))
    with pytest.raises(PeerMismatchError) as error:
        c.compile(**support.pair((4, 3)))
    return str(error.value)


def test_ranks_with_other_configurations_are_refused(workers: WorkerPool) -> None:
    """The graphs of a whole step were alike, and so they agreed; those of a first microbatch without sync were not, and hung."""
    for message in workers.run(other_config, 2, deadline=30):
        assert "rank 0 has grad_sync='none', and rank 1 has grad_sync='scatter'" in message


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"config": {"dp_mode": "fsdp"}}, "config must be a PassConfig"),
        ({"plan": "layers.*"}, "plan must be a ParallelPlan, such as shard"),
        ({"dynamic": 1}, "dynamic must be True or False"),
        ({"init_fn": 3}, "init_fn must be callable"),
        ({"passes": DataParallelPass()}, "passes must be a list of passes"),
        ({"dynamic_arg_dims": ["x"]}, "dynamic_arg_dims must be a mapping of input names to lists of dims"),
        ({"dynamic_arg_dims": {"x": 0}}, r"dynamic_arg_dims\['x'\] must be a list of dims, such as \[0\]; got 0"),
        ({"compile_sizes": "12", "compile_size_input": "x"}, "compile_sizes must be a list of whole numbers"),
        ({"compile_sizes": [3]}, "compile_sizes needs compile_size_input"),
        ({"compile_size_dim": "last"}, "compile_size_dim must be a dim; got 'last'"),
        ({"max_specializations": -1}, "max_specializations must be a whole number from 0 up; got -1"),
        ({"device": "cuda"}, "device 'cuda' is not available here; torch sees cpu"),
        ({"device": "cpuu"}, "device 'cpuu' is not available here"),
        ({"device": "meta"}, "device 'meta' is not available here"),
    ],
)
def test_arguments_of_a_wrong_kind_are_refused_in_words(options: dict[str, Any], message: str) -> None:
    """A device that was not there ended the process, in the middle of the capture."""
    with pytest.raises(ConfigError, match=message):
        GraphCompiler(support.MLP(4, 3), support.mse_loss, **options)


def test_a_wrapped_model_is_refused() -> None:
    with fake_world(1):
        wrapped = nn.parallel.DistributedDataParallel(support.MLP(4, 3))
    compiled = torch.compile(support.MLP(4, 3), backend="eager")
    for model, message in (
        (wrapped, r"the model is wrapped in DistributedDataParallel, .* give the model within, its \.module"),
        (nn.Sequential(compiled), r"module 0 was compiled by torch\.compile"),
    ):
        with pytest.raises(ModelStateError, match=message):
            GraphCompiler(model, support.mse_loss)
    with pytest.raises(ModelStateError, match="the model has no parameters"):
        GraphCompiler(nn.Tanh(), support.mse_loss).compile(**XY)


def test_inputs_that_a_step_cannot_take_are_refused() -> None:
    """The gradient of an input was left out without a word; so whatever had made it was not trained."""
    waits = XY | {"x": XY["x"].clone().requires_grad_()}
    c = compiler()
    for _ in range(2):
        with pytest.raises(GuardError, match=r"x: it requires grad, .* detach it"):
            c.forward_backward(**waits)
        c.compile(**XY)
    assert c.evaluate(**waits)[0] == c.evaluate(**XY)[0]
    with pytest.raises(CaptureError, match=r"input x is a tensor of torch\.sparse_coo.* pass it dense"):
        compiler().compile(x=XY["x"].to_sparse(), y=XY["y"])
    with pytest.raises(GuardError, match=r"x: expected a dense tensor, got one of torch\.sparse_coo"):
        c.forward_backward(x=XY["x"].to_sparse(), y=XY["y"])
    with pytest.raises(GraphUsageError, match="sync must be True or False; got Tensor: no input may have that name"):
        c.forward_backward(**XY, sync=XY["x"])


def test_gradients_are_taken_wherever_the_caller_has_switched_them_off() -> None:
    """Under no_grad the capture said that the loss does not depend on any parameter."""
    c = compiler()
    with torch.no_grad():
        loss, _ = c.forward_backward(**XY)
    expected = support.local_gradients(support.seeded(mlp), support.mse_loss, XY)
    assert support.difference(support.gradients(c.model), expected) == 0.0
    with torch.inference_mode():
        assert c.evaluate(**XY)[0] == loss
        with pytest.raises(GraphUsageError, match=r"under torch\.inference_mode\(\) .* leave it for forward_backward"):
            c.forward_backward(**XY)
    c.forward_backward(**XY)


def test_compiling_again_takes_the_numbers_that_the_model_has_now() -> None:
    """The graph of the first time was found first, and the new one never ran."""
    c = compiler(make=lambda: nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.9)))
    c.forward_backward(**XY)
    c.model[1].p = 0.0
    c.compile(**XY)
    assert len(c._captures) == 1
    assert c.forward_backward(**XY)[0] == support.mse_loss(c.model, **XY)


def test_a_plan_may_come_from_a_dict() -> None:
    with fake_world(2):
        c = compiler(plan=ParallelPlan.from_dict({"shard": ["layers.0"]})).compile(**XY)
    assert [layout.sharded for layout in c.layouts.values()] == [True, True, False, False]


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


class FailsLater:
    """Fails on rank 1, in graphs of accumulation only."""

    name = "later"
    contract = PassContract()

    def run(self, joint: Any, context: Any) -> None:
        if dist.get_rank() == 1 and context.variant != FULL:
            raise RuntimeError("the pass has a bug")


def accumulation_fails(how: str) -> str:
    inputs = support.pair((4, 3))
    c = compiler(passes=[DataParallelPass(), FailsLater()]).compile(**inputs)
    act = {"verify": lambda: verify(c, inputs), "step": lambda: c.forward_backward(**inputs, sync=False)}[how]
    with pytest.raises((PassError, PeerMismatchError)) as error:
        act()
    c.forward_backward(**inputs)  # the whole step goes on working
    return str(error.value)


@pytest.mark.parametrize("how", ["step", "verify"])
def test_s40_graphs_that_are_made_later_are_made_by_all_ranks_or_by_none(workers: WorkerPool, how: str) -> None:
    """Each rank made them alone, at the first microbatch without sync: where one failed, the others waited in a collective."""
    right, wrong = workers.run(accumulation_fails, 2, how, deadline=30)
    assert "rank 1 could not compile, so no rank does: PassError: pass later failed" in right
    assert "pass later failed: RuntimeError: the pass has a bug" in wrong


def other_sizes(options: dict[str, Any]) -> tuple[float, Any]:
    inputs = support.pair((4, 3), batch=4 + dist.get_rank())
    c = compiler(PassConfig(pass_backend="torch"), dynamic_arg_dims={"x": [0], "y": [0]}, **options)
    reference = support.averaged(support.local_gradients(support.seeded(mlp), support.mse_loss, inputs))
    with c.no_sync():
        c.forward_backward(**inputs)
    c.forward_backward(**inputs)
    twice = {name: gradient / 2 for name, gradient in support.gradients(c.model).items()}
    return support.difference(twice, reference), c.specialization_stats


def test_a_graph_that_one_rank_makes_alone_does_not_communicate_while_it_is_made(workers: WorkerPool) -> None:
    """Costs were agreed on for it, in the middle of the step of the other rank: the process ended."""
    options = {"compile_sizes": [4], "compile_size_input": "x", "compile_size_dim": 0}
    (error, first), (other, second) = workers.run(other_sizes, 2, options, deadline=60)
    assert max(error, other) <= 1e-7
    assert (first.compiled, second.compiled) == (1, 0)
    assert first.hits + first.fallbacks == 2
