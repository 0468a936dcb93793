"""torch's own bucketing and overlap behind our passes: the same numbers, the same rules, the same graph on every rank."""

from __future__ import annotations

import copy
import functools
from typing import Any

import graphpasses_support as support
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from stepwell_graphpasses import GraphCompiler, JointGraph, PassConfig, RooflineCosts, verify
from stepwell_graphpasses import _compat as compat
from stepwell_graphpasses._collectives import comm_of, describe, starts
from stepwell_graphpasses._graph import is_random, positions
from stepwell_graphpasses._lint import find_problems
from stepwell_graphpasses._memory import estimate_peak
from stepwell_graphpasses._variants import FULL_AFTER_NONE, FULL_AFTER_SCATTER, NONE, SCATTER
from stepwell_graphpasses.exceptions import ConfigError, PassError
from stepwell_graphpasses.passes import (
    BucketPass,
    DataParallelPass,
    OverlapPass,
    ReshardPass,
    SplitPass,
    pieces,
)
from stepwell_graphpasses.testing import check_graph_pass, fake_world
from stepwell_meta.testing import WorkerPool

try:
    compat.torch_bucketing()
    compat.torch_overlap()
except ImportError as error:
    pytest.skip(f"this torch has no such passes: {error}", allow_module_level=True)

import torch._inductor.fx_passes.bucketing as torch_bucketing
import torch._inductor.fx_passes.overlap_scheduling as torch_overlap

# Rows of 11 are padded: then several gradients have the same shape and are computed alike, which torch must not mix up.
GPT: dict[str, Any] = {
    "hidden": 11,
    "layers": 2,
    "tied": True,
    "frozen": True,
    "unused": True,
    "scalar": True,
    "dropout": 0.2,
}
BATCH = {"tokens": support.tokens(rank=0)}


def gpt(**changes: Any) -> nn.Module:
    return support.seeded(lambda: support.TinyGPT(**GPT | changes))


def compiled(config: PassConfig | None = None, model: nn.Module | None = None, **options: Any) -> GraphCompiler:
    return GraphCompiler(model or gpt(), support.gpt_loss, config, **options).compile(**BATCH)


def eager(model: nn.Module, mode: str) -> nn.Module:
    """torch's own data parallelism."""
    if mode == "ddp":
        return DistributedDataParallel(model, find_unused_parameters=True)
    if mode == "hsdp":
        return fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    return fully_shard(model)


def against_torch(mode: str, bucket_by: str, extra: dict[str, Any]) -> dict[str, Any]:
    model = support.seeded(
        lambda: support.TinyGPT(**GPT | {"scalar": False, "unused": mode == "ddp"})
    )  # FSDP2: no scalars
    inputs = {"tokens": support.tokens()}
    reference = eager(copy.deepcopy(model), mode)
    torch.manual_seed(3)
    support.gpt_loss(reference, **inputs)[0].backward()
    expected = support.gradients(reference.module if mode == "ddp" else reference)
    found, graphs = {}, {}
    for name, config in {
        "alone": PassConfig(dp_mode=mode, bucket_by="none", **extra),
        "ours": PassConfig(dp_mode=mode, bucket_by=bucket_by, **extra),
        "torch": PassConfig(dp_mode=mode, bucket_by=bucket_by, pass_backend="torch", **extra),
    }.items():
        compiler = GraphCompiler(copy.deepcopy(model), support.gpt_loss, config)
        torch.manual_seed(3)
        loss, _ = compiler.forward_backward(**inputs)
        found[name] = (loss.clone(), support.gradients(compiler.model))
        graphs[name] = len(starts(compiler.graph().graph))
    compiler.model.zero_grad()
    torch.manual_seed(3)
    with compiler.no_sync():
        compiler.forward_backward(**inputs)
    torch.manual_seed(3)
    compiler.forward_backward(**inputs)
    doubled = {k: g if g is None else g / 2 for k, g in support.gradients(compiler.model).items()}
    return {
        "eager": support.difference(found["torch"][1], expected),
        "bits": support.difference(found["torch"][1], found["alone"][1]),
        "loss": float((found["torch"][0] - found["alone"][0]).abs()),
        "accumulated": support.difference(doubled, expected),
        "collectives": graphs,
        "text": str(compiler.graph().graph),
        "text of a variant": str(compiler.graph(FULL_AFTER_NONE).graph),
        "agreed": verify(compiler, inputs).collectives,
        "report": str(compiler.reports[-1]),
    }


@pytest.mark.parametrize(
    ("mode", "ranks", "bucket_by", "extra"),
    [
        ("fsdp", 2, "module", {}),
        ("fsdp", 2, "bytes", {"reshard_after_forward": False, "prefetch": 3}),
        ("ddp", 2, "bytes", {}),
        ("hsdp", 4, "bytes", {"fsdp_degree": 2}),
    ],
)
def test_gradients_are_those_of_eager_with_fewer_collectives_and_one_text_on_all_ranks(
    workers: WorkerPool, mode: str, ranks: int, bucket_by: str, extra: dict[str, Any]
) -> None:
    results = workers.run(against_torch, ranks, mode, bucket_by, extra, deadline=110)
    for found in results:
        assert found["eager"] < 1e-6
        assert found["accumulated"] < 1e-6
        assert found["bits"] == found["loss"] == 0.0
        assert found["collectives"]["torch"] < found["collectives"]["alone"] / 2
        assert found["collectives"]["torch"] == found["collectives"]["ours"] == found["agreed"]
        assert found["report"].startswith("overlap: ")
    for key in ("text", "text of a variant"):
        assert len({found[key] for found in results}) == 1


CONFIGS: list[dict[str, Any]] = [
    {},
    {"bucket_by": "bytes"},
    {"bucket_by": "bytes", "bucket_mb": 0.0005},
    {"bucket_by": "none"},
    {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32},
    {"param_dtype": torch.float16, "reduce": 3.0, "bucket_by": "bytes"},
    {"dp_mode": "ddp", "reduce": "sum"},
    {"dp_mode": "hsdp", "fsdp_degree": 2, "bucket_by": "bytes"},
]


@functools.cache
def graph_of_torch(number: int, rank: int) -> JointGraph:
    """Of one of the configurations; torch takes three times as long as we do."""
    with fake_world(4, rank):
        return compiled(PassConfig(**CONFIGS[number], pass_backend="torch")).graph()


@pytest.mark.parametrize("number", range(len(CONFIGS)))
def test_all_that_is_known_of_nodes_is_known_of_those_that_torch_writes(number: int) -> None:
    config, texts = CONFIGS[number], set()
    for rank in (0, 3):
        with fake_world(4, rank):
            ours = compiled(PassConfig(**config)).graph()
        theirs = graph_of_torch(number, rank)
        assert find_problems(theirs) == []
        texts.add(str(theirs.graph))
        kinds = {comm_of(node).kind for node in theirs.graph.nodes if comm_of(node) is not None}
        assert kinds <= {comm_of(node).kind for node in ours.graph.nodes if comm_of(node) is not None} | {"pack"}
        for node in theirs.graph.nodes:
            assert set(node.meta) <= {
                "val",
                "fqn",
                "phase",
                "comm",
                "input",
                "recompute",
                "recompute_of",
                "tensor_meta",
            }
            if (comm := comm_of(node)) is not None:
                assert comm.params
                assert set(comm.params) <= set(theirs.table.names)
        served = [
            sorted((comm_of(n).kind, *comm_of(n).params) for n in starts(joint.graph)) for joint in (ours, theirs)
        ]
        if config.get("bucket_by") != "bytes" or "bucket_mb" not in config:
            assert served[0] == served[1]  # the same parameters by the same collectives
        assert estimate_peak(theirs).bytes < 1.7 * estimate_peak(ours).bytes
    assert len(texts) == 1


@pytest.mark.parametrize("number", range(len(CONFIGS)))
def test_computation_keeps_its_order(number: int) -> None:
    def computed(joint: JointGraph) -> list[tuple[str, Any]]:
        return [(node.name, node.target) for node in joint.graph.nodes if comm_of(node) is None]

    with fake_world(4):
        before = compiled(PassConfig(**CONFIGS[number]), passes=[DataParallelPass(), ReshardPass()])
    after = graph_of_torch(number, 0)
    drawn = [node.name for node in after.graph.nodes if is_random(node)]
    assert len(drawn) == 4
    assert computed(before.graph()) == computed(after)


@pytest.mark.parametrize("config", [{}, {"dp_mode": "hsdp", "fsdp_degree": 2, "grad_sync": "scatter"}])
def test_graphs_of_accumulation_keep_the_rules_too(config: dict[str, Any]) -> None:
    with fake_world(4):
        c = compiled(PassConfig(pass_backend="torch", bucket_by="bytes", **config))
        verify(c)
        for variant in (SCATTER, FULL_AFTER_SCATTER) if "grad_sync" in config else (NONE, FULL_AFTER_NONE):
            ours = compiled(PassConfig(bucket_by="bytes", **config)).graph(variant)
            assert len(starts(c.graph(variant).graph)) == len(starts(ours.graph))


def test_a_bucket_holds_no_more_than_it_may_and_says_what_it_is() -> None:
    with fake_world(4):
        c = compiled(PassConfig(bucket_by="bytes", bucket_mb=0.0005, pass_backend="torch"))
        whole = compiled(PassConfig(bucket_by="bytes", pass_backend="torch"))
    alone = {comm_of(n).params for n in starts(c.graph().graph) if len(comm_of(n).params) == 1}
    sizes = [report.collectives for report in whole.reports if report.name == "bucket"]
    assert len(starts(c.graph().graph)) > sizes[0]
    for line, node in zip(describe(c.graph().graph), starts(c.graph().graph), strict=True):
        given = sum(value.numel() * value.element_size() for value in [node.args[0].meta["val"]])
        assert given <= 0.0005 * 2**20 or comm_of(node).params in alone, line
    assert c.explain("bucket 0").endswith("chosen and merged by torch")


def both_kinds(*, first: str, second: str) -> list[Any]:
    return [DataParallelPass(), ReshardPass(), BucketPass(backend=first), OverlapPass(backend=second)]  # type: ignore[arg-type]


def mixed() -> dict[str, Any]:
    inputs = {"tokens": support.tokens()}
    found = {}
    for first in ("stepwell", "torch"):
        for second in ("stepwell", "torch"):
            c = GraphCompiler(gpt(), support.gpt_loss, passes=both_kinds(first=first, second=second))
            torch.manual_seed(3)
            loss, _ = c.forward_backward(**inputs)
            found[first, second] = (loss.clone(), support.gradients(c.model))
    plain = found["stepwell", "stepwell"]
    return {
        key: (float((value[0] - plain[0]).abs()), support.difference(value[1], plain[1]))
        for key, value in found.items()
    }


def test_each_pass_takes_either_backend(workers: WorkerPool) -> None:
    for found in workers.run(mixed, 2, deadline=90):
        assert set(found.values()) == {(0.0, 0.0)}


def battery() -> None:
    inputs = {"tokens": support.tokens()}
    for make in (lambda: BucketPass(backend="torch"), lambda: OverlapPass(backend="torch")):
        check_graph_pass(make, gpt, support.gpt_loss, inputs)


def test_the_battery_for_passes(workers: WorkerPool) -> None:
    workers.run(battery, 2, deadline=90)


def test_a_graph_of_any_size_and_one_that_is_split_afterwards() -> None:
    with fake_world(2):
        c = compiled(PassConfig(pass_backend="torch"), dynamic_arg_dims={"tokens": [0, 1]})
        assert find_problems(c.graph()) == []
        owners = {"embed": 0, "layers.0": 0, "layers.1": 0, "layers.2": 1, "norm": 1, "head": 1}
        passes = [*both_kinds(first="torch", second="torch"), SplitPass(owners)]
        model = support.seeded(lambda: support.TinyGPT(layers=3))
        split = GraphCompiler(model, support.gpt_loss, passes=passes).compile(**BATCH)
        assert {piece.kind for piece in pieces(split.graph()).pieces} >= {"unshard", "forward", "reduce"}


def different_batches() -> str:
    """Costs come from sizes, and sizes differ."""
    rank = torch.distributed.get_rank()
    costs = RooflineCosts(flops=1e6 * (1 + 1000 * rank), latency=1e-6)
    passes = [DataParallelPass(), ReshardPass(), BucketPass(backend="torch"), OverlapPass(costs=costs, backend="torch")]
    c = GraphCompiler(gpt(), support.gpt_loss, passes=passes, dynamic_arg_dims={"tokens": [0]})
    return str(c.compile(tokens=support.tokens(batch=2 + 6 * rank)).graph().graph)


def test_ranks_with_other_sizes_and_costs_decide_alike(workers: WorkerPool) -> None:
    first, second = workers.run(different_batches, 2, deadline=60)
    assert first == second


def in_flight(joint: Any) -> int:
    """Most gathers under way at once."""
    order = positions(joint.graph)
    spans = []
    for node in starts(joint.graph, "gather"):
        wait = next(user for user in node.users if comm_of(user).kind == "wait")
        spans.append((order[node], order[wait]))
    return max(sum(start <= begin < end for start, end in spans) for begin, _ in spans)


def test_gathers_that_computation_hides_start_ahead_as_far_as_memory_allows() -> None:
    fast = RooflineCosts(latency=1e-9)

    def most(prefetch: int, **options: Any) -> int:
        passes = [
            DataParallelPass(),
            ReshardPass(),
            BucketPass(backend="torch"),
            OverlapPass(backend="torch", costs=fast, **options),
        ]
        return in_flight(compiled(PassConfig(prefetch=prefetch), gpt(layers=3), passes=passes).graph())

    with fake_world(4):
        found = [most(prefetch) for prefetch in (0, 1, 4)]
        assert found[0] <= 2  # the first product needs the embedding and the first layer
        assert found[0] < found[1] < found[2]
        assert most(4, max_bytes=1) == 1


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (torch_bucketing, "greedy_bucket_collective_by_mb"),
        (torch_bucketing, "merge_all_gather_bucket"),
        (torch_bucketing, "merge_reduce_scatter_bucket"),
        (torch_bucketing, "merge_all_reduce_bucket"),
        (torch_overlap, "schedule_overlap_bucketing"),
    ],
)
def test_a_torch_without_what_is_needed_is_refused_before_anything_happens(
    monkeypatch: pytest.MonkeyPatch, module: Any, name: str
) -> None:
    monkeypatch.delattr(module, name)
    model = gpt()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    config = PassConfig(pass_backend="torch")  # a configuration may be written where another torch is
    with pytest.raises(ConfigError, match=rf"has no {name}.*use the backend 'stepwell'") as error:
        GraphCompiler(model, support.gpt_loss, config)
    assert error.value.field == "pass_backend"
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    GraphCompiler(model, support.gpt_loss, config.evolve(pass_backend="stepwell"))


def test_a_torch_that_merges_otherwise_is_refused_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def merges_nothing(*_: Any) -> tuple[list[Any], dict[Any, Any]]:
        return [], {}

    monkeypatch.setattr(torch_bucketing, "merge_all_gather_bucket", merges_nothing)
    with fake_world(2):
        c = GraphCompiler(gpt(), support.gpt_loss, PassConfig(pass_backend="torch"))
        with pytest.raises(PassError, match=r"another way than 2\.13 does; use the backend 'stepwell'"):
            c.compile(**BATCH)
    assert not c.is_compiled
    assert not any(hasattr(p, "full_tensor") for p in c.model.parameters())


def test_a_scheduler_that_does_not_come_to_an_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's does so for some graphs under hsdp, and the bare RecursionError did not say whose it was."""

    def deeper(*args: Any, **options: Any) -> None:
        deeper()

    monkeypatch.setattr(compat, "torch_overlap", lambda: deeper)
    with fake_world(2):
        c = GraphCompiler(gpt(), support.gpt_loss, PassConfig(pass_backend="torch"))
        with pytest.raises(
            PassError, match=r"the scheduler of torch .* calls itself too deep .*; use the backend 'stepwell'"
        ):
            c.compile(**BATCH)
    assert not c.is_compiled


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: BucketPass(backend="inductor"), "'stepwell' or 'torch'; got 'inductor'"),  # type: ignore[arg-type]
        (lambda: OverlapPass(backend=None), "'stepwell' or 'torch'; got None"),  # type: ignore[arg-type]
        (lambda: BucketPass(backend="torch", pack=False), "leave pack out"),
        (lambda: OverlapPass(backend="torch", reductions=2), "leave reductions out"),
        (lambda: OverlapPass(reductions=-1), "reductions must be a whole number from 0 up; got -1"),
        (lambda: OverlapPass(max_bytes=0), "max_bytes must be a whole number from 1 up; got 0"),
        (lambda: OverlapPass(max_bytes=1.5), "max_bytes must be"),  # type: ignore[arg-type]
        (lambda: RooflineCosts(flops=0.0), "flops must be a positive number; got 0.0"),
        (lambda: RooflineCosts(link=float("nan")), "link must be a positive number"),
    ],
)
def test_arguments_that_contradict_are_refused_when_the_pass_is_made(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()
