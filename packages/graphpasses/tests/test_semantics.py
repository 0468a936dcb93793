"""What a train step must still mean: scale, dtypes, uneven shards, shared, frozen and unused parameters, accumulation."""

from __future__ import annotations

import copy
from typing import Any

import graphpasses_support as support
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from stepwell_graphpasses import (
    FULL,
    FULL_AFTER_NONE,
    FULL_AFTER_SCATTER,
    NONE,
    GraphCompiler,
    PassConfig,
    Variant,
    shard,
    trace,
)
from stepwell_graphpasses._collectives import Scaling, Writer, comm_of, contributions, scaling, starts
from stepwell_graphpasses.exceptions import ConfigError
from stepwell_meta.testing import WorkerPool

MODES: dict[str, dict[str, Any]] = {
    "fsdp": {"dp_mode": "fsdp"},
    "ddp": {"dp_mode": "ddp"},
    "hsdp": {"dp_mode": "hsdp", "fsdp_degree": 2},
}


def mlp() -> nn.Module:
    return support.MLP(4, 7, 3)


def everything() -> nn.Module:
    model = support.TinyGPT(tied=True, unused=True, scalar=True, layers=1)
    model.layers[0].up.requires_grad_(False)
    return model


def compiler(config: PassConfig, make: Any = mlp, train_fn: Any = support.mse_loss, **options: Any) -> GraphCompiler:
    return GraphCompiler(support.seeded(make), train_fn, config, **options)


def s01(configs: list[dict[str, Any]]) -> list[tuple[float, float, float]]:
    results = []
    for config in configs:
        inputs = {"tokens": support.tokens()}
        loss, error, c = support.compiled_against_reference(everything, support.gpt_loss, inputs, PassConfig(**config))
        largest = torch.tensor(max(float(g.abs().max()) for g in support.gradients(c.model).values() if g is not None))
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        results.append((loss, error, float(largest)))
    return results


@pytest.mark.parametrize("ranks", [2, 4])
def test_s01_every_gradient_is_the_mean_of_the_local_ones(workers: WorkerPool, ranks: int) -> None:
    configs = [config for mode, config in MODES.items() if ranks == 4 or mode != "hsdp"]
    for results in workers.run(s01, ranks, configs, deadline=110):
        for loss, error, largest in results:
            assert loss == 0.0
            # Two floats have one sum. Four have several, each of whose three roundings is half a unit of the last place.
            assert error <= (0.0 if ranks == 2 else 3 * 2**-23 * largest)


def s02_s03(modes: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for mode in modes:
        inputs = support.pair((4, 3))
        by_reduce = {}
        for reduce in ("avg", "sum", 3.0):
            c = compiler(PassConfig(**MODES[mode], reduce=reduce))
            c.forward_backward(**inputs)
            by_reduce[reduce] = support.gradients(c.model)
            ops = {comm_of(n).op for n in starts(c.graph().graph, "reduce_scatter", "all_reduce")}
            found[mode, reduce, "op"] = ops
        w = dist.get_world_size()
        for reduce, factor in (("avg", w), (3.0, 3)):
            scaled = {name: g * factor for name, g in by_reduce[reduce].items()}
            found[mode, reduce] = support.difference(scaled, by_reduce["sum"])
    return found


def test_s02_s03_mean_sum_and_factor_differ_by_what_they_say_once_over_both_axes(workers: WorkerPool) -> None:
    found = workers.run(s02_s03, 4, ["fsdp", "ddp", "hsdp"], deadline=110)[0]
    for mode in MODES:
        assert found[mode, "avg", "op"] == {"avg"}
        assert found[mode, "sum", "op"] == found[mode, 3.0, "op"] == {"sum"}
        assert found[mode, "avg"] <= 1e-6
        assert found[mode, 3.0] <= 1e-6


def test_s04_one_rank_has_no_collective_and_no_division() -> None:
    for reduce in ("avg", "sum"):
        c = compiler(PassConfig(reduce=reduce, reduce_dtype=torch.float16))
        inputs = support.pair((4, 3), rank=0)
        c.forward_backward(**inputs)
        graph = c.graph().graph
        assert starts(graph) == []
        assert not [n for n in graph.nodes if (comm := comm_of(n)) is not None and comm.kind == "scale"]
    exact = compiler(PassConfig())
    exact.forward_backward(**inputs)
    expected = support.local_gradients(support.seeded(mlp), support.mse_loss, inputs)
    assert support.difference(support.gradients(exact.model), expected) == 0.0


@pytest.mark.parametrize(
    ("reduce", "dtype", "ranks", "expected"),
    [
        ("avg", torch.float32, 8, Scaling("avg")),
        ("avg", torch.bfloat16, 8, Scaling("avg")),
        ("sum", torch.float16, 8, Scaling("sum")),
        (6.0, torch.float32, 8, Scaling("sum", after=6.0)),
        ("avg", torch.float16, 1, Scaling("sum")),
        ("avg", torch.float16, 4, Scaling("sum", before=2.0, after=2.0)),
        ("avg", torch.float16, 8, Scaling("sum", before=4.0, after=2.0)),
        ("avg", torch.float16, 64, Scaling("sum", before=8.0, after=8.0)),
        ("avg", torch.float16, 6, Scaling("sum", before=4.0, after=1.5)),
        (3.0, torch.float16, 4, Scaling("sum", before=2.0, after=1.5)),
    ],
)
def test_s05_where_to_divide(reduce: Any, dtype: torch.dtype, ranks: int, expected: Scaling) -> None:
    assert scaling(reduce, dtype, ranks) == expected


def s05() -> list[float]:
    def step(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return support.mse_loss(model, x, y) * scale  # the sum of four such gradients is no float16

    scale = 1.0
    inputs = support.pair((4, 3), rank=0)
    plain = support.local_gradients(support.seeded(mlp), step, inputs)
    scale = 25000 / max(float(g.abs().max()) for g in plain.values())
    results = []
    for mode in ("fsdp", "hsdp"):
        c = compiler(PassConfig(**MODES[mode], reduce_dtype=torch.float16), train_fn=step)
        c.forward_backward(**inputs)
        expected = support.local_gradients(support.seeded(mlp), step, inputs)
        largest = max(float(g.abs().max()) for g in expected.values())
        assert largest * 4 > 65504
        results.append(support.difference(support.gradients(c.model), expected) / largest)
    return results


def test_s05_float16_reductions_do_not_overflow(workers: WorkerPool) -> None:
    for results in workers.run(s05, 4, deadline=60):
        assert max(results) < 2e-3


def s06() -> list[float]:
    def step(model: nn.Module, x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(model(x), y, reduction="sum") * weight

    everyone = [support.pair((4, 3), rank=r, batch=2 + 3 * r) for r in range(dist.get_world_size())]
    joined = {key: torch.cat([inputs[key] for inputs in everyone]) for key in ("x", "y")}
    count = sum(inputs["y"].numel() for inputs in everyone)
    expected = support.local_gradients(support.seeded(mlp), step, {**joined, "weight": torch.tensor(1 / count)})
    results = []
    for reduce in ("avg", "sum", 5.0):
        c = compiler(PassConfig(reduce=reduce), train_fn=step)
        inputs = everyone[dist.get_rank()]
        c.forward_backward(**inputs, weight=c.token_weight(inputs["y"].numel()))
        results.append(support.difference(support.gradients(c.model), expected))
    return results


def test_s06_unequal_batches_weighted_by_tokens_give_the_global_mean(workers: WorkerPool) -> None:
    for results in workers.run(s06, 2, deadline=60):
        assert max(results) < 1e-6


def s07_s08_s10() -> dict[str, Any]:
    inputs = support.pair((4, 3))
    w = dist.get_world_size()
    found: dict[str, Any] = {}
    exact = support.averaged(support.local_gradients(support.seeded(mlp), support.mse_loss, inputs))
    for name, reduce_dtype in (("fp32", torch.float32), ("none", None)):
        c = compiler(PassConfig(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype))
        c.forward_backward(**inputs)
        graph = c.graph().graph
        found[name, "gathered"] = {v.dtype for n in starts(graph, "gather") for v in contributions(n)}
        found[name, "reduced"] = {v.dtype for n in starts(graph, "reduce_scatter") for v in contributions(n)}
        found[name, "stored"] = {p.dtype for p in c.model.parameters()}
        found[name, "grads"] = {p.grad.dtype for p in c.model.parameters()}
        ours = support.gradients(c.model)
        found[name, "error"] = support.difference(ours, exact) / max(float(g.abs().max()) for g in exact.values())
        eager = support.seeded(mlp)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
        for layer in eager.layers:
            fully_shard(layer, mp_policy=policy)
        fully_shard(eager, mp_policy=policy)
        support.mse_loss(eager, **inputs).backward()
        found[name, "against eager"] = support.difference(ours, support.gradients(eager))
    assert w == 2
    return found


def test_s07_s08_s10_dtypes_of_parameters_and_reductions(workers: WorkerPool) -> None:
    found = workers.run(s07_s08_s10, 2, deadline=60)[0]
    for name, reduced in (("fp32", torch.float32), ("none", torch.bfloat16)):
        assert found[name, "gathered"] == {torch.bfloat16}
        assert found[name, "reduced"] == {reduced}
        assert found[name, "stored"] == found[name, "grads"] == {torch.float32}
        assert found[name, "error"] < 2e-2  # bfloat16 has 8 bits
        assert found[name, "against eager"] == 0.0


def test_s12_the_mean_of_integers_is_refused_when_the_graph_is_built() -> None:
    joint = trace(mlp(), support.mse_loss, support.pair((4, 3), rank=0))
    graph = joint.graph
    with graph.inserting_before(joint.output_node):
        node = graph.call_function(torch.ops.aten.zeros.default, ([4],), {"dtype": torch.int64})
        with joint.mode:
            node.meta = {"val": torch.zeros(4, dtype=torch.int64), "fqn": "", "phase": "backward"}
        writer = Writer(joint.mode, graph, like=node, params=("count",))
        for write in (writer.reduce_scatter, writer.all_reduce):
            with pytest.raises(ConfigError, match=r"mean of torch.int64 values \(count\).*'sum'"):
                write(node, "avg", "group", 2)


def s13_s14_s15() -> dict[str, Any]:
    model = nn.Module()
    model.a, model.b = nn.Linear(4, 7), nn.Linear(7, 3)

    def step(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(model.b(model.a(x).tanh()), y)

    c = GraphCompiler(model, step, PassConfig())
    optimizer = torch.optim.AdamW(model.parameters())
    c.forward_backward(**support.pair((4, 3)))
    optimizer.step()
    state = model.state_dict()
    return {
        "local": {name: tuple(p.to_local().shape) for name, p in model.named_parameters()},
        "grad": {name: tuple(p.grad.to_local().shape) for name, p in model.named_parameters()},
        "global": {name: tuple(t.shape) for name, t in state.items()},
        "state": {tuple(s["exp_avg"].to_local().shape) for s in optimizer.state.values()},
        "padded": any(n.meta["comm"].kind == "pad" for n in c.graph().graph.nodes if n.meta.get("comm") is not None),
        "text": str(c.graph().graph),
    }


@pytest.mark.parametrize("ranks", [2, 4])
def test_s13_s14_s15_uneven_rows_padding_stays_inside_and_all_ranks_have_one_graph(
    workers: WorkerPool, ranks: int
) -> None:
    results = workers.run(s13_s14_s15, ranks, deadline=60)
    rows = {2: {"a": (4, 3), "b": (2, 1)}, 4: {"a": (2, 2, 2, 1), "b": (1, 1, 1, 0)}}[ranks]
    for rank, result in enumerate(results):
        expected = {
            "a.weight": (rows["a"][rank], 4),
            "a.bias": (rows["a"][rank],),
            "b.weight": (rows["b"][rank], 7),
            "b.bias": (rows["b"][rank],),
        }
        assert result["local"] == result["grad"] == expected
        assert result["state"] == set(expected.values())
        assert result["global"] == {"a.weight": (7, 4), "a.bias": (7,), "b.weight": (3, 7), "b.bias": (3,)}
        assert result["padded"]
        assert result["text"] == results[0]["text"]


def train(c: GraphCompiler, steps: int, make_inputs: Any) -> None:
    optimizer = torch.optim.SGD(c.model.parameters(), lr=0.5)
    for step in range(steps):
        c.forward_backward(**make_inputs(step))
        optimizer.step()
        optimizer.zero_grad()


def s16_s18_s19_s20(mode: str) -> dict[str, Any]:
    def make() -> nn.Module:
        return support.TinyGPT(vocab=9, tied=True, frozen=True, scalar=True, layers=2)

    def batch(step: int) -> dict[str, Any]:
        return {"tokens": support.tokens(step, vocab=9)}

    c = compiler(PassConfig(**MODES[mode]), make, support.gpt_loss, plan=shard("layers.*", "embed"))
    before = support.parameters(c.model)
    reference = support.seeded(make)
    train(c, 3, batch)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.5)
    for step in range(3):
        found = support.averaged(support.local_gradients(reference, support.gpt_loss, batch(step)))
        for name, p in reference.named_parameters():
            p.grad = found[name]
        optimizer.step()
    after = support.parameters(c.model)
    graph = c.graph().graph
    served = [name for n in starts(graph, "reduce_scatter", "all_reduce") for name in n.meta["comm"].params]
    whole = {
        name: p.to_local() if isinstance(p, DTensor) else p.detach()
        for name, p in c.model.named_parameters()
        if not c.layouts[name].sharded
    }
    gathered = {name: [torch.empty_like(value) for _ in range(dist.get_world_size())] for name, value in whole.items()}
    for name, copies in gathered.items():
        dist.all_gather(copies, whole[name].contiguous())
    return {
        "difference": support.difference(after, support.parameters(reference)),
        "replicas": all(torch.equal(copy, whole[name]) for name, copies in gathered.items() for copy in copies),
        "whole": sorted(whole),
        "tied": c.model.head.weight is c.model.embed.weight,
        "aliases": support.difference({"a": after["head.weight"]}, {"a": after["embed.weight"]}),
        "embed reduced": served.count("embed.weight"),
        "rows moved": bool(((after["embed.weight"] - before["embed.weight"]).abs().amax(1) > 0).all()),
        "frozen": [n for n, p in c.model.named_parameters() if not p.requires_grad],
        "frozen moved": max(
            float((after[n] - before[n]).abs().max()) for n, p in c.model.named_parameters() if not p.requires_grad
        ),
        "frozen sharded": c.layouts["layers.0.up.weight"].sharded,
        "frozen reduced": any(name.startswith("layers.0.") for name in served),
        "frozen grads": any(p.grad is not None for p in c.model.layers[0].parameters()),
    }


@pytest.mark.parametrize("mode", ["fsdp", "hsdp"])
def test_s16_s18_s19_s20_three_steps_with_replicated_tied_and_frozen_parameters(workers: WorkerPool, mode: str) -> None:
    ranks = 4
    for result in workers.run(s16_s18_s19_s20, ranks, mode, deadline=110):
        assert result["difference"] <= 2e-6
        assert result["replicas"]  # S16: what the plan leaves whole is reduced too
        assert result["whole"] == ["norm.bias", "norm.weight", "scale"]
        assert result["tied"]  # S18: through compile and step
        assert result["aliases"] == 0.0
        assert result["embed reduced"] == (1 if mode == "fsdp" else 2)  # S18: once along each axis
        assert result["rows moved"]  # S19: 9 rows on 2 or 4 ranks
        assert len(result["frozen"]) == 12  # S20
        assert result["frozen moved"] == 0.0
        assert result["frozen sharded"]
        assert not result["frozen reduced"]
        assert not result["frozen grads"]


def s17() -> tuple[float, float, float]:
    inputs = {"tokens": support.tokens()}
    c = compiler(PassConfig(), everything, support.gpt_loss, plan=shard("layers.*", "embed"))
    c.forward_backward(**inputs)
    reference = support.seeded(everything)
    found = support.averaged(support.local_gradients(reference, support.gpt_loss, inputs))
    for name, p in reference.named_parameters():
        p.grad = found[name]
    expected = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
    norm = torch.nn.utils.clip_grad_norm_(c.model.parameters(), 0.1)
    clipped = support.difference(support.gradients(c.model), support.gradients(reference))
    return float(support.full(norm)), float(expected), clipped


def test_s17_clipping_by_norm_over_uneven_shards(workers: WorkerPool) -> None:
    for norm, expected, clipped in workers.run(s17, 4, deadline=60):
        assert norm == pytest.approx(expected, rel=1e-6)
        assert clipped <= 1e-7


def s20_unfreeze() -> dict[str, Any]:
    inputs = support.pair((4, 3))
    model = support.seeded(mlp)
    model.layers[0].requires_grad_(False)
    c = GraphCompiler(model, support.mse_loss, PassConfig(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    c.forward_backward(**inputs)
    before = [p.grad is None for p in model.parameters()]
    model.zero_grad()
    model.layers[0].requires_grad_(True)
    c.forward_backward(**inputs)
    reduced = {value.dtype for n in starts(c.graph().graph, "reduce_scatter") for value in contributions(n)}
    fresh = compiler(PassConfig(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    fresh.forward_backward(**inputs)
    return {
        "before": before,
        "reduced": reduced,
        "difference": support.difference(support.gradients(model), support.gradients(fresh.model)),
    }


def test_s20_unfreezing_later_plans_again_with_the_same_reduce_dtype(workers: WorkerPool) -> None:
    for result in workers.run(s20_unfreeze, 2, deadline=60):
        assert result["before"] == [True, True, False, False]
        assert result["reduced"] == {torch.float32}
        assert result["difference"] == 0.0


def s21() -> list[Any]:
    results = []
    for policy in ("none", "zeros"):
        c = compiler(PassConfig(unused=policy), lambda: support.TinyGPT(unused=True, layers=1), support.gpt_loss)
        c.forward_backward(tokens=support.tokens())
        grads = [p.grad for p in c.model.unused.parameters()]
        with c.no_sync():
            c.forward_backward(tokens=support.tokens())
        c.forward_backward(tokens=support.tokens())
        results.append([None if g is None else (float(g.full_tensor().abs().max()), tuple(g.shape)) for g in grads])
    return results


def test_s21_unused_parameters_have_no_gradient_or_zeros(workers: WorkerPool) -> None:
    for none, zeros in workers.run(s21, 2, deadline=60):
        assert none == [None, None]
        assert zeros == [(0.0, (5, 3)), (0.0, (5,))]


def s29_s30_s31(mode: str, grad_sync: str) -> dict[str, Any]:
    config = PassConfig(**MODES[mode], grad_sync=grad_sync, reduce_dtype=torch.float32)
    parts = [support.pair((4, 3), step) for step in range(3)]
    expected: dict[str, Any] = {}
    reference = support.seeded(mlp)
    for inputs in parts:
        for name, g in support.averaged(
            support.local_gradients(copy.deepcopy(reference), support.mse_loss, inputs)
        ).items():
            expected[name] = g if name not in expected else expected[name] + g
    c = compiler(config)
    with c.no_sync():
        c.forward_backward(**parts[0])
    c.forward_backward(**parts[1], sync=False)
    between = [p.grad is None for p in c.model.parameters()]
    carried = c._carried or c._carried_parts
    kept = {name: (tuple(g.shape), g.dtype) for name, g in carried.items()}
    c.forward_backward(**parts[2])
    once = support.gradients(c.model)
    c.model.zero_grad()
    for inputs in parts:
        c.forward_backward(**inputs)
    each = support.gradients(c.model)
    variant = c._variant(sync=False)
    last = FULL_AFTER_SCATTER if grad_sync == "scatter" else FULL_AFTER_NONE

    def reductions(*variants: Variant) -> int:
        return sum(len(starts(c.graph(v).graph, "reduce_scatter", "all_reduce")) for v in variants)

    return {
        "reductions": (reductions(variant, variant, last), reductions(FULL, FULL, FULL)),
        "once": support.difference(once, expected),
        "each": support.difference(each, expected),
        "between": all(between),
        "kept": kept,
        "nodes": [n.meta["comm"].kind for n in starts(c.graph(variant).graph, "reduce_scatter", "all_reduce")],
    }


@pytest.mark.parametrize(
    ("mode", "grad_sync"),
    [("fsdp", "none"), ("ddp", "none"), ("hsdp", "none"), ("hsdp", "scatter"), ("fsdp", "scatter")],
)
def test_s29_s30_s31_microbatches_are_reduced_once(workers: WorkerPool, mode: str, grad_sync: str) -> None:
    for result in workers.run(s29_s30_s31, 4 if mode == "hsdp" else 2, mode, grad_sync, deadline=60):
        assert result["between"]
        assert result["once"] <= 3e-7
        assert result["each"] <= 3e-7
        kinds = set(result["nodes"])
        assert kinds == (set() if grad_sync == "none" else {"reduce_scatter"})  # hsdp: one all-reduce at the end
        rows = 7 if grad_sync == "none" else 4
        once, each = result["reductions"]  # S30: three microbatches take three times as many
        assert each == 3 * once if grad_sync == "none" else once <= each
        assert once < each or mode == "fsdp"  # where each is scattered, only the all-reduce of hsdp is saved
        assert result["kept"]["layers.0.weight"] == ((rows, 4), torch.float32)


def s09() -> list[Any]:
    c = compiler(PassConfig(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    with c.no_sync():
        for step in range(2):
            c.forward_backward(**support.pair((4, 3), step))
    return [
        {(tuple(g.shape), g.dtype) for g in c._carried.values()},
        [p.grad for p in c.model.parameters()],
        len(starts(c.graph(NONE).graph, "reduce_scatter", "all_reduce")),
    ]


def test_s09_accumulation_without_sync_is_in_the_reduce_dtype_on_whole_gradients(workers: WorkerPool) -> None:
    for kept, grads, reductions in workers.run(s09, 2, deadline=60):
        assert kept == {((7, 4), torch.float32), ((7,), torch.float32), ((3, 7), torch.float32), ((3,), torch.float32)}
        assert grads == [None] * 4
        assert reductions == 0


def s28() -> dict[str, Any]:
    c = compiler(PassConfig(**MODES["hsdp"], bucket_by="none"), lambda: support.MLP(4, 8, 4))
    c.compile(**support.pair((4, 4)))
    graph = c.graph().graph
    scatters = starts(graph, "reduce_scatter")
    reduces = starts(graph, "all_reduce")
    sources = []
    for node in reduces:
        source = node.args[0]
        while source.meta["comm"].kind != "wait":
            source = source.args[0]
        sources.append(source.meta["comm"].waits_for)
    return {
        "scattered": sum(n.args[0].meta["val"].numel() for n in scatters),
        "reduced": sum(n.args[0].meta["val"].numel() for n in reduces),
        "sources": set(sources),
        "groups": [{n.meta["comm"].group for n in nodes} for nodes in (scatters, reduces)],
    }


def test_s28_hsdp_scatters_on_the_shard_axis_then_reduces_the_part(workers: WorkerPool) -> None:
    result = workers.run(s28, 4, deadline=60)[0]
    assert result["scattered"] == 2 * result["reduced"]
    assert result["sources"] == {"reduce_scatter"}
    assert result["groups"] == [{"fsdp"}, {"dp_replicate"}]


def s36() -> float:
    def make() -> nn.Module:
        return support.TinyGPT(dropout=0.3, layers=1)

    inputs = {"tokens": support.tokens()}
    c = compiler(PassConfig(), make, support.gpt_loss)
    eager = support.seeded(make)
    for layer in eager.layers:
        fully_shard(layer)
    fully_shard(eager)
    torch.manual_seed(11)
    state = torch.get_rng_state()
    c.compile(**inputs)
    assert torch.equal(torch.get_rng_state(), state)
    c.forward_backward(**inputs)
    torch.manual_seed(11)
    support.gpt_loss(eager, **inputs)[0].backward()
    return support.difference(support.gradients(c.model), support.gradients(eager))


def test_s36_dropout_masks_are_those_of_eager_fsdp2(workers: WorkerPool) -> None:
    assert max(workers.run(s36, 2, deadline=60)) == 0.0
