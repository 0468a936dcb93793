"""What the passes do to a graph, and that results stay the same."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from typing import Any

import graphpasses_support as support
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from stepwell_graphpasses import GraphCompiler, PassConfig, PassContract, shard
from stepwell_graphpasses._collectives import collective_bytes, comm_of, results_of, starts, wait_of, waits_of
from stepwell_graphpasses._graph import is_random, phase_of, positions
from stepwell_graphpasses._lint import find_problems
from stepwell_graphpasses._memory import estimate_peak
from stepwell_graphpasses.exceptions import GraphWarning, PassError
from stepwell_graphpasses.passes import (
    BucketPass,
    DataParallelPass,
    DeadCollectivePass,
    OverlapPass,
    RematPass,
    ReshardPass,
    default_passes,
)
from stepwell_graphpasses.testing import LiveBytes, check_graph_pass, fake_world
from stepwell_meta.testing import WorkerPool

GPT = {"tokens": support.tokens(rank=0)}


def gpt(**options: Any) -> Any:
    return lambda: support.TinyGPT(**options)


def compiled(config: PassConfig | None = None, make: Any = None, inputs: Any = None, **options: Any) -> GraphCompiler:
    train_fn = options.pop("train_fn", support.gpt_loss)
    make = make or gpt(layers=3)
    return GraphCompiler(support.seeded(make), train_fn, config, **options).compile(**(inputs or GPT))


class Views(nn.Module):
    """Looks at its parameters in every way that forward saves for backward."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.stacked = nn.Parameter(torch.randn(4, width, width))
        self.wide = nn.Parameter(torch.randn(3 * width, width))
        self.flat = nn.Parameter(torch.randn(width * width))
        self.row = nn.Parameter(torch.randn(1, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b, c = self.wide.chunk(3)
        d, e = self.wide.split([12, 6])
        x = (
            torch.tanh(x @ a.t())
            @ b
            @ c[:, 1:].t().contiguous().t().mT.expand(5, 6).permute(1, 0).to(torch.float64).float()
        )
        x = torch.tanh(x @ self.flat.view(6, 6)[:5] * self.row.expand(x.shape[0], -1))
        return torch.tanh(
            torch.bmm(x.expand(2, -1, -1), self.stacked[1:3].transpose(1, 2)).sum(0) @ self.stacked[0] @ e
        ) + (d.sum() * self.stacked.select(0, 3).mean())


XY = {"x": torch.randn(4, 6, generator=torch.Generator().manual_seed(1)), "y": torch.zeros(4, 6)}


def trained(make: Any, config: dict[str, Any], train_fn: Any, inputs: Any) -> tuple[torch.Tensor, Any, GraphCompiler]:
    c = GraphCompiler(support.seeded(make), train_fn, PassConfig(**config))
    loss, _ = c.forward_backward(**inputs)
    return loss.clone(), support.gradients(c.model), c


def bits(left: Any, right: Any) -> tuple[float, float]:
    return float((left[0] - right[0]).abs()), support.difference(left[1], right[1])


def gathers(item: Any) -> int:
    return len(starts(item[2].graph().graph, "gather"))


def s32_s34() -> dict[str, Any]:
    mine = {"x": XY["x"] + dist.get_rank(), "y": XY["y"]}
    off = trained(Views, {"reshard_after_forward": False, "bucket_by": "none"}, support.mse_loss, mine)
    on = trained(Views, {"bucket_by": "none"}, support.mse_loss, mine)
    packed = trained(Views, {"bucket_by": "bytes"}, support.mse_loss, mine)
    return {
        "bits": [bits(off, on), bits(off, packed)],
        "gathers": (gathers(off), gathers(on)),
        "kept": on[2].graph().kept,
    }


def test_s32_s34_every_view_of_a_freed_parameter_is_rebuilt(workers: WorkerPool) -> None:
    found = workers.run(s32_s34, 2, deadline=90)[0]
    assert found["bits"] == [(0.0, 0.0)] * 2
    before, after = found["gathers"]
    assert before == 4
    assert after > before  # S32: what is read again is gathered again
    assert found["kept"] == frozenset()


def s32_s35() -> dict[str, Any]:
    tokens = {"tokens": support.tokens()}
    off = trained(gpt(), {"reshard_after_forward": False, "bucket_by": "none", "prefetch": 0}, support.gpt_loss, tokens)
    module = trained(gpt(), {}, support.gpt_loss, tokens)
    last = trained(
        gpt(), {"prefetch": 3, "reshard_after_forward": {"**": True, "layers.1": False}}, support.gpt_loss, tokens
    )
    return {
        "bits": [bits(off, module), bits(off, last)],
        "gathers": (gathers(module), gathers(last)),
        "kept": {name.split(".")[1] for name in last[2].graph().kept},
    }


def test_s32_s35_bits_stay_when_parameters_are_freed_and_the_last_block_may_keep_them(workers: WorkerPool) -> None:
    found = workers.run(s32_s35, 2, deadline=90)[0]
    assert found["bits"] == [(0.0, 0.0)] * 2
    assert found["kept"] == {"1"}
    assert found["gathers"][1] == found["gathers"][0] - 1


def s11_s27() -> dict[str, Any]:
    def mixed() -> nn.Module:
        model = support.MLP(6, 6, 6, 6)
        model.layers[1].to(torch.bfloat16)
        return model

    def step(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for layer in model.layers:
            x = layer(x.to(layer.weight.dtype)).tanh()
        return F.mse_loss(x.float(), y)

    mine = {"x": XY["x"] + dist.get_rank(), "y": XY["y"]}
    apart, together = (trained(mixed, {"bucket_by": by}, step, mine) for by in ("none", "bytes"))
    ddp = [trained(mixed, {"dp_mode": "ddp", "bucket_by": by}, step, mine) for by in ("none", "bytes")]
    table = together[2].graph().table
    return {
        "bits": [bits(apart, together), bits(*ddp)],
        "dtypes": {str(g.dtype) for g in together[1].values()},
        "in one bucket": {len({table[n].dtype for n in comm_of(s).params}) for s in starts(together[2].graph().graph)},
        "reductions": [len(starts(item[2].graph().graph)) for item in ddp],
    }


def test_s11_s27_members_of_a_bucket_keep_their_dtype_and_their_bits(workers: WorkerPool) -> None:
    found = workers.run(s11_s27, 2, deadline=90)[0]
    assert found["bits"] == [(0.0, 0.0)] * 2
    assert found["dtypes"] == {"torch.float32", "torch.bfloat16"}
    assert found["in one bucket"] == {1}
    assert found["reductions"] == [6, 2]


def apart_and_packed() -> list[Any]:
    found: list[Any] = []
    tokens = {"tokens": support.tokens()}
    for mode, kind in (("fsdp", "gather"), ("ddp", "all_reduce")):
        steps = []
        for pack in (None, True):
            passes = [DataParallelPass(), ReshardPass(), BucketPass(pack=pack), OverlapPass()]
            c = GraphCompiler(
                support.seeded(gpt(tied=True)),
                support.gpt_loss,
                PassConfig(dp_mode=mode, bucket_by="bytes"),
                passes=passes,
            )
            steps.append((c.forward_backward(**tokens)[0], support.gradients(c.model), c))
        results = [[len(results_of(n)) for n in starts(step[2].graph().graph, kind)] for step in steps]
        found.append((bits(*steps), results))
    return found


def test_members_of_a_bucket_travel_apart_over_gloo_and_packed_elsewhere_with_the_same_bits(
    workers: WorkerPool,
) -> None:
    fsdp, ddp = workers.run(apart_and_packed, 2, deadline=60)[0]
    assert fsdp == ((0.0, 0.0), [[27, 19], [1, 1]])
    assert ddp == ((0.0, 0.0), [[1], [1]])


class SharesGradients(nn.Module):
    """Both biases get one gradient, which a sum in place would add up twice."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.zeros(6)), nn.Parameter(torch.zeros(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.a + self.b


def gradients_in_place() -> float:
    mine = {"x": XY["x"] + dist.get_rank(), "y": XY["y"]}
    config = PassConfig(dp_mode="ddp", bucket_by="bytes")
    return support.compiled_against_reference(SharesGradients, support.mse_loss, mine, config)[1]


def test_a_gradient_that_two_parameters_share_is_not_summed_in_place(workers: WorkerPool) -> None:
    assert workers.run(gradients_in_place, 2, deadline=60) == [0.0, 0.0]


def s33() -> dict[str, int]:
    peaks = {}
    tokens = {"tokens": torch.randint(17, (1, 4))}
    for name, config in {
        "kept": {"reshard_after_forward": False},
        "resharded": {},
    }.items():
        make = gpt(width=64, hidden=256, layers=5)
        c = GraphCompiler(support.seeded(make), support.gpt_loss, PassConfig(**config)).compile(**tokens)
        with LiveBytes() as live:
            c.forward_backward(**tokens)
        peaks[name] = live.peak
        peaks[name, "estimated"] = estimate_peak(c.graph()).bytes
        peaks["parameters"] = sum(p.numel() * 4 for p in c.model.parameters())
        peaks["layer"] = sum(p.numel() * 4 for p in c.model.layers[0].parameters())
    return peaks


def test_s33_measured_peak_falls_to_the_working_set(workers: WorkerPool) -> None:
    peaks = workers.run(s33, 2, deadline=110)[0]
    gradients = peaks["parameters"] / 2  # this rank's parts: the step's result
    assert peaks["kept"] > 1.1 * peaks["parameters"]
    # Two layers gathered (one in use, one ahead), one layer's gradients, and the packed rows of them.
    assert peaks["resharded"] < gradients + 6 * peaks["layer"]
    assert peaks["resharded"] < 0.85 * peaks["kept"]
    for name in ("kept", "resharded"):
        # The estimate holds what a collective reads until the wait for it; gloo may be done with it before.
        assert 0.95 * peaks[name] <= peaks[name, "estimated"] <= 1.35 * peaks[name]


def test_s24_waits_and_s34_lifetimes_hold_on_64_ranks() -> None:
    with fake_world(64):
        for mode, extra in (("fsdp", {}), ("hsdp", {"fsdp_degree": 8}), ("ddp", {})):
            joint = compiled(PassConfig(dp_mode=mode, **extra)).graph()
            assert find_problems(joint) == []
            for node in starts(joint.graph):
                assert len(waits_of(node)) == len(results_of(node))
                assert all(wait.users for wait in waits_of(node))


def test_s25_decisions_do_not_depend_on_hashes() -> None:
    script = textwrap.dedent(
        """
        import sys, torch
        from torch import nn
        from stepwell_graphpasses import GraphCompiler, PassConfig
        from stepwell_graphpasses.testing import fake_world
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)) for _ in range(3)))
        with fake_world(4):
            c = GraphCompiler(model, lambda m, x: m(x).sum(), PassConfig(prefetch=2)).compile(x=torch.randn(2, 6))
            sys.stdout.write(str(c.graph().graph) + c.explain())
        """
    )
    running = [
        subprocess.Popen(
            [sys.executable, "-c", script], env={"PYTHONHASHSEED": seed}, stdout=subprocess.PIPE, text=True
        )
        for seed in ("1", "2")
    ]
    first, second = (process.communicate(timeout=110)[0] for process in running)
    assert first.count("all_gather_into_tensor") >= 5
    assert first == second


def test_b11_b12_reductions_are_where_gradients_are_made_and_gathers_at_the_first_use() -> None:
    with fake_world(2):
        joint = compiled(passes=[DataParallelPass()]).graph()
    order = positions(joint.graph)
    for node in starts(joint.graph, "gather"):
        wait = wait_of(node)
        reader = min((order[user] for user in wait.users), default=0)
        assert reader - order[node] <= 6  # what the same reader needs may be gathered in between
    reductions = starts(joint.graph, "reduce_scatter")
    assert order[reductions[0]] < len(order) * 0.6  # not parked before the output
    assert all(phase_of(node) == "backward" for node in reductions)


def test_b11_all_readers_read_the_gathered_value_and_what_nobody_reads_is_not_gathered() -> None:
    with fake_world(2):
        c = compiled(make=gpt(unused=True, layers=1), passes=[DataParallelPass()])
    joint = c.graph()
    for name, node in joint.parameter_nodes.items():
        assert [comm_of(user).kind for user in node.users] == ([] if name.startswith("unused") else ["gather"])
    assert "not gathered: the step does not read it" in c.explain("unused.weight")


def test_b12_loss_and_named_losses_are_untouched_and_gradients_must_be_those_of_trainable_parameters() -> None:
    class Freezes:
        name = "freezes"
        contract = PassContract()

        def run(self, joint: Any, context: Any) -> None:
            joint.table = joint.table.with_trainable({"head.weight": False})

    with fake_world(2):
        joint = compiled(passes=[DataParallelPass()]).graph()
        assert [comm_of(node) for node in joint.outputs[:2]] == [None, None]
        assert all(
            comm_of(node).waits_for == "reduce_scatter" for node in joint.outputs[2:] if comm_of(node).kind == "wait"
        )
        with pytest.raises(PassError, match=r"gradients of frozen parameters: head\.weight"):
            compiled(passes=[Freezes(), DataParallelPass()])


def test_b13_added_nodes_say_what_they_are() -> None:
    with fake_world(4):
        joint = compiled(PassConfig(dp_mode="hsdp", fsdp_degree=2, reduce=3.0), plan=shard("layers.*")).graph()
    kinds = {comm_of(n).kind for n in joint.graph.nodes if comm_of(n) is not None}
    assert {"gather", "reduce_scatter", "all_reduce", "wait", "scale", "pack", "unpack"} <= kinds
    for node in joint.graph.nodes:
        comm = comm_of(node)
        if comm is None:
            continue
        assert comm.params
        assert set(comm.params) <= set(joint.table.names)
        if comm.kind in ("gather", "reduce_scatter", "all_reduce", "wait"):
            assert (comm.group, comm.size) in (("fsdp", 2), ("dp_replicate", 2))
        assert (comm.kind == "wait") == (comm.waits_for is not None)
        if comm.kind in ("reduce_scatter", "all_reduce"):
            assert comm.op == "sum"
            assert phase_of(node) == "backward"


def test_b14_a_parameter_that_is_written_stays_gathered_and_a_warning_says_so() -> None:
    with fake_world(2):
        c = compiled(passes=[DataParallelPass()], make=Views, train_fn=support.mse_loss, inputs=XY)
        joint = c.graph().copy()
        graph = joint.graph
        view = next(n for n in graph.nodes if n.target is torch.ops.aten.view.default and n.args[1] == [6, 6])
        with graph.inserting_after(view):
            write = graph.call_function(torch.ops.aten.mul_.Scalar, (view, 1.0))
            write.meta = dict(view.meta)
        with pytest.warns(GraphWarning, match=r"parameter flat stays gathered: aten.mul_.Scalar .* writes to it"):
            ReshardPass().run(joint, c._context(c._live, c._variant(sync=True)))
        assert joint.kept == {"flat"}
        assert ("flat", "stays gathered: aten.mul_.Scalar in the train step writes to it") in joint.notes


def test_a_write_to_a_sharded_parameter_is_refused() -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(6, 6)
            self.table = nn.Parameter(torch.ones(6, 6), requires_grad=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.table.t().mul_(0.5)
            return self.up(x) @ self.table

    with fake_world(2), pytest.raises(PassError, match=r"writes to parameter table \(aten.mul_.Tensor\)"):
        compiled(make=Writes, train_fn=support.mse_loss, inputs=XY)


def test_b14_the_last_unit_may_stay() -> None:
    with fake_world(2):
        c = compiled(passes=[DataParallelPass(), ReshardPass(keep_last=True), BucketPass()])
        joint = c.graph()
    assert joint.kept == {"head.weight"}
    assert find_problems(joint) == []


def test_buckets_follow_modules_or_bytes_and_say_why_they_end() -> None:
    with fake_world(2):
        by_module = compiled(PassConfig(reshard_after_forward=False))
        gathers = [comm_of(n).params for n in starts(by_module.graph().graph, "gather")]
        assert [params[0].rpartition(".")[0] for params in gathers] == [
            "embed",
            "layers.0.norm1",
            "layers.1.norm1",
            "layers.2.norm1",
            "norm",
            "head",
        ]
        assert "module 'layers.1' has no more" in by_module.explain("bucket 2")
        capped = compiled(PassConfig(bucket_by="bytes", bucket_mb=1000 / 2**20, reshard_after_forward=False))
        assert "more than 1000" in capped.explain("bucket 0")
        assert "it was the last gather" in capped.explain()
        for node in starts(capped.graph().graph):
            assert collective_bytes(node) <= 1000 or len(comm_of(node).params) == 1
        phases = compiled(PassConfig(bucket_by="bytes"))
        assert "has another phase" in phases.explain()
        for node in starts(phases.graph().graph, "gather"):
            users = {phase_of(user) for wait in waits_of(node) for user in wait.users}
            assert users == {phase_of(node)}


@pytest.mark.parametrize("bucket_by", ["bytes", "module"])
def test_what_stays_gathered_is_in_no_bucket_with_what_is_freed(bucket_by: Any) -> None:
    """A bucket held both, of which backward read a part, and the configuration was refused as a fault of the pass."""
    with fake_world(2):
        c = compiled(PassConfig(bucket_by=bucket_by, reshard_after_forward={"layers.0.**": False, "**.qkv": False}))
        joint = c.graph()
        for node in starts(joint.graph, "gather"):
            assert len({name in joint.kept for name in comm_of(node).params}) == 1
    if bucket_by == "bytes":
        assert "has another reshard_after_forward" in c.explain()


def test_gathers_are_prefetched_and_reductions_waited_for_late() -> None:
    def distance(prefetch: int) -> tuple[int, int]:
        """Of gathers ahead of use, and of reductions under way, the most at one time."""
        joint = compiled(PassConfig(prefetch=prefetch)).graph()
        order = positions(joint.graph)
        ahead = under_way = most_ahead = most = 0
        events = []
        for node in starts(joint.graph):
            kind = 0 if comm_of(node).kind == "gather" else 1
            events += [(order[node], 1, kind), (min(order[wait] for wait in waits_of(node)), -1, kind)]
        for _, step, kind in sorted(events):
            ahead += step * (kind == 0)
            under_way += step * (kind == 1)
            most_ahead, most = max(most_ahead, ahead), max(most, under_way)
        return most_ahead, most

    with fake_world(2):
        assert distance(0) == (1, 1)
        assert distance(1)[0] == 1
        assert distance(2)[0] == 2
        shallow, deep = (compiled(PassConfig(prefetch=k)).graph() for k in (0, 1))
    for joint, early in ((shallow, False), (deep, True)):
        order = positions(joint.graph)
        gathers = [n for n in starts(joint.graph, "gather") if phase_of(n) == "forward"]
        computed = [n for n in joint.graph.nodes if n.op == "call_function" and comm_of(n) is None]
        arrived = {a: min(order[wait] for wait in waits_of(a)) for a in gathers}
        between = [any(order[a] < order[n] < arrived[a] for n in computed) for a in gathers[1:]]
        assert any(between) == early


def test_overlap_is_bounded_by_bytes() -> None:
    with fake_world(2):
        free = compiled(PassConfig(prefetch=4)).graph()
        bound = compiled(passes=[DataParallelPass(), ReshardPass(), BucketPass(), OverlapPass(max_bytes=1)]).graph()
    assert estimate_peak(bound).bytes < estimate_peak(free).bytes
    for node in starts(bound.graph, "gather"):
        order = positions(bound.graph)
        arrived = min(order[wait] for wait in waits_of(node))
        assert not [n for n in bound.graph.nodes if comm_of(n) is None and order[node] < order[n] < arrived]


def costs_differ() -> str:
    class Measured:
        def compute(self, node: Any) -> float:
            return 1.0 + dist.get_rank()

        def collective(self, kind: str, size: int, nbytes: int) -> float:
            return nbytes * (0.02 if dist.get_rank() else 0.001)

    passes = [DataParallelPass(), ReshardPass(), BucketPass(), OverlapPass(costs=Measured())]
    return str(compiled(PassConfig(prefetch=2), passes=passes).graph().graph)


def test_s25_costs_are_agreed_on_before_they_steer_the_order(workers: WorkerPool) -> None:
    first, second = workers.run(costs_differ, 2, deadline=60)
    assert first == second


class Noise(nn.Module):
    """Draws without writing in place, as a dropout's mask does not."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rand_like(x)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 48), nn.ReLU(), nn.Dropout(0.3), nn.BatchNorm1d(48), Noise(), nn.Linear(48, 6))
            for _ in range(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return x


def s22_s26_s37() -> dict[str, Any]:
    inputs = {"x": XY["x"].repeat(16, 1), "y": XY["y"].repeat(16, 1)}
    found: dict[str, Any] = {}
    results = {}
    for name, passes in {
        "saved": [DataParallelPass(), BucketPass()],
        "recomputed": [DataParallelPass(), RematPass(), ReshardPass(), BucketPass(), OverlapPass()],
    }.items():
        c = GraphCompiler(support.seeded(Checkpointed), support.mse_loss, passes=passes)
        c.compile(**inputs)
        torch.manual_seed(5)
        with LiveBytes() as live:
            c.forward_backward(**inputs)
        results[name] = (support.gradients(c.model), {n: b.clone() for n, b in c.model.named_buffers()})
        found[name, "peak"] = live.peak
        graph = c.graph().graph
        found[name, "draws"] = sum(is_random(n) for n in graph.nodes)
        found[name, "again"] = sum("recompute_of" in n.meta for n in graph.nodes)
        found[name, "notes"] = c.explain("blocks")
    found["gradients"] = support.difference(results["saved"][0], results["recomputed"][0])
    found["buffers"] = support.difference(results["saved"][1], results["recomputed"][1])
    found["calls"] = int(results["recomputed"][1]["blocks.0.3.num_batches_tracked"])
    return found


def test_s22_s26_s37_recomputing_keeps_masks_and_writes_once(workers: WorkerPool) -> None:
    found, other = workers.run(s22_s26_s37, 2, deadline=90)
    assert found["gradients"] == found["buffers"] == 0.0
    assert found["calls"] == 1
    assert found["saved", "draws"] == found["recomputed", "draws"] == 6
    assert found["saved", "again"] == 0
    assert found["recomputed", "again"] == other["recomputed", "again"] > 0  # S26: one decision for all ranks
    assert "its random draws are kept" in found["recomputed", "notes"]
    assert "its forward is recomputed" in found["recomputed", "notes"]


def test_a_policy_says_what_is_recomputed() -> None:
    with fake_world(2):
        all_of_it = compiled(passes=[DataParallelPass(), RematPass([("layers.*", True)])]).graph()
        but_one = compiled(passes=[DataParallelPass(), RematPass([("layers.*", True), ("layers.1", False)])]).graph()
        plain = compiled(passes=[DataParallelPass()]).graph()
        with pytest.raises(PassError, match=r"recompute pattern 'layer.0' names no .*layers\.0"):
            compiled(passes=[DataParallelPass(), RematPass([("layer.0", True)])])
    modules = [
        {n.meta["fqn"].split(".")[1] for n in joint.graph.nodes if "recompute_of" in n.meta}
        for joint in (all_of_it, but_one)
    ]
    assert modules == [{"0", "1", "2"}, {"0", "2"}]
    assert estimate_peak(all_of_it).bytes < estimate_peak(plain).bytes


def test_a_gather_that_nobody_reads_goes_with_its_wait_on_all_ranks() -> None:
    class DropGradients:
        name = "drop_gradients"
        contract = DeadCollectivePass.contract

        def run(self, joint: Any, context: Any) -> None:
            joint.set_gradients({})

    texts = []
    for rank in (0, 1):
        with fake_world(2, rank):
            config = PassConfig(bucket_by="none")
            before = compiled(config, passes=[DataParallelPass(), ReshardPass(), DropGradients()]).graph()
            after = compiled(
                config, passes=[DataParallelPass(), ReshardPass(), DropGradients(), DeadCollectivePass()]
            ).graph()
        assert len(starts(before.graph, "reduce_scatter")) > 10
        assert starts(after.graph, "reduce_scatter") == []
        assert {phase_of(n) for n in starts(after.graph, "gather")} == {"forward"}
        assert find_problems(after) == []
        texts.append(str(after.graph))
    assert texts[0] == texts[1]


def battery() -> None:
    config = PassConfig(prefetch=2)
    for make in (DeadCollectivePass, RematPass, ReshardPass, BucketPass, OverlapPass):
        check_graph_pass(
            make,
            lambda: support.seeded(lambda: support.MLP(4, 7, 3)),
            support.mse_loss,
            support.pair((4, 3)),
            config=config,
            before=(DataParallelPass(),),
        )
    check_graph_pass(
        OverlapPass, lambda: support.seeded(lambda: support.MLP(4, 7, 3)), support.mse_loss, support.pair((4, 3))
    )


def test_every_pass_stands_the_battery(workers: WorkerPool) -> None:
    workers.run(battery, 2, deadline=110)


class Broken:
    """A pass that does one thing wrong."""

    name = "broken"
    contract = DeadCollectivePass.contract

    def __init__(self, how: str) -> None:
        self.how = how

    def run(self, joint: Any, context: Any) -> None:
        graph = joint.graph
        start = starts(graph, "reduce_scatter")[0]
        if self.how == "unwaited":
            wait_of(start).replace_all_uses_with(start)
        elif self.how == "never":
            wait = wait_of(start)
            wait.replace_all_uses_with(start)
            graph.erase_node(wait)
        elif self.how == "again":
            with graph.inserting_after(wait_of(start)):
                graph.node_copy(wait_of(start))
        elif self.how == "marks":
            del start.meta["val"]
        elif self.how == "inputs":
            with graph.inserting_after(joint.placeholders[-1]):
                graph.placeholder("more")
        elif self.how == "outputs":
            joint.output_node.args = (joint.outputs[:-1],)
        elif self.how == "order":
            graph.output_node().prepend(joint.placeholders[0])
        elif self.how == "twice":
            with graph.inserting_after(start):
                again = graph.node_copy(start)
            with graph.inserting_after(again):
                wait = graph.node_copy(wait_of(start), lambda n: again)
            joint.output_node.args = ((*joint.outputs[:-1], wait),)
        elif self.how == "numbers":
            node = joint.outputs[-1]
            with graph.inserting_after(node):
                scaled = graph.call_function(torch.ops.aten.mul.Tensor, (node, 2.0))
            scaled.meta = {k: v for k, v in node.meta.items() if k != "comm"}
            joint.output_node.args = ((*joint.outputs[:-1], scaled),)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("unwaited", "before the wait for it"),
        ("never", "is waited for 0 times, must be once"),
        ("again", "is waited for 2 times, must be once"),
        ("marks", "has no val"),
        ("inputs", "inputs, the calling convention has"),
        ("outputs", "outputs, expected the loss"),
        ("order", "no valid FX graph"),
        ("twice", "reduced 2 times over fsdp"),
    ],
)
def test_s24_a_pass_that_breaks_a_rule_is_caught_by_name(how: str, message: str) -> None:
    with fake_world(2), pytest.raises(PassError, match=f"(?s)pass broken.*({message})") as error:
        compiled(PassConfig(bucket_by="none"), passes=[DataParallelPass(), Broken(how)])
    assert error.value.pass_name == "broken"


def test_the_battery_catches_a_pass_that_changes_numbers() -> None:
    with fake_world(2), pytest.raises(AssertionError, match="gradient of"):
        check_graph_pass(
            lambda: Broken("numbers"),
            lambda: support.seeded(lambda: support.MLP(4, 8, 4)),
            support.mse_loss,
            support.pair((4, 4), rank=0),
            before=(DataParallelPass(),),
        )


def test_default_passes_follow_the_configuration() -> None:
    def names(**config: Any) -> list[str]:
        return [item.name for item in default_passes(PassConfig(**config))]

    assert names() == ["data_parallel", "dead_collectives", "remat", "reshard", "bucket", "overlap"]
    assert "reshard" not in names(reshard_after_forward=False)
    assert "bucket" not in names(bucket_by="none")
