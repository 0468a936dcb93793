"""Cutting a step into the pieces of a pipeline."""

from __future__ import annotations

from typing import Any

import graphpasses_support as support
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from stepwell_graphpasses import (
    GraphCompiler,
    JointGraph,
    ParallelPlan,
    PassConfig,
    PassContext,
    PassPipeline,
    SplitGraph,
    SplitPass,
    automatic_owners,
    pieces,
    planned_owners,
    trace,
)
from stepwell_graphpasses._collectives import is_start
from stepwell_graphpasses._stages import balance
from stepwell_graphpasses.exceptions import PassError, SplitError
from stepwell_graphpasses.passes import BucketPass, DataParallelPass, ReshardPass
from stepwell_meta.testing import WorkerPool

TOKENS = {"tokens": support.tokens(rank=0)}


def split(joint: JointGraph, owners: dict[str, int]) -> SplitGraph:
    return pieces(PassPipeline([SplitPass(owners)]).run(joint, PassContext(PassConfig(), None, {})))


def values(joint: JointGraph, model: nn.Module, inputs: dict[str, Any]) -> list[torch.Tensor]:
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    return [
        *(parameters[name].detach() for name in joint.table.names),
        *(buffers[buffer.name] for buffer in joint.buffers),
        *joint.guards.flatten(inputs),
    ]


def recombines(model: nn.Module, train_fn: Any, inputs: Any, owners: dict[str, int], **options: Any) -> SplitGraph:
    joint = trace(model, train_fn, inputs, **options)
    parts = split(joint, owners)
    torch.manual_seed(2)
    with torch.no_grad():
        expected = joint.module(*values(joint, model, inputs))
    torch.manual_seed(2)
    found = parts.run(*values(joint, model, inputs))
    assert len(found) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    torch.manual_seed(2)
    again = parts.run(*values(joint, model, inputs), whole_backward=True)
    assert all(torch.equal(a, b) for a, b in zip(again, expected, strict=True))
    return parts


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=7), st.integers(1, 4))
def test_balance_has_the_smallest_largest_part(costs: list[int], parts: int) -> None:
    if parts > len(costs):
        with pytest.raises(SplitError, match="blocks cannot be cut"):
            balance(costs, parts)
        return
    owner = balance(costs, parts)
    assert owner == sorted(owner)
    assert set(owner) == set(range(parts))

    def largest(cuts: list[int]) -> int:
        return max(sum(costs[a:b]) for a, b in zip([0, *cuts], [*cuts, len(costs)], strict=True))

    def best(start: int, left: int) -> int:
        if left == 1:
            return sum(costs[start:])
        return min(max(sum(costs[start:end]), best(end, left - 1)) for end in range(start + 1, len(costs) - left + 2))

    cuts = [i for i in range(1, len(costs)) if owner[i] != owner[i - 1]]
    assert largest(cuts) == best(0, parts)


def test_b16_an_even_split_over_the_largest_container_with_glue_following_its_consumers() -> None:
    model = support.seeded(lambda: support.TinyGPT(layers=4, dropout=0.2))
    owners = automatic_owners(model, 2)
    assert owners == {"layers.0": 0, "layers.1": 0, "layers.2": 1, "layers.3": 1}
    parts = recombines(model, support.gpt_loss, TOKENS, owners)
    assert parts.stages == 2
    forward = [c for c in parts.crossings if c.phase == "forward"]
    backward = [c for c in parts.crossings if c.phase == "backward" and c.source > c.target]
    assert [(c.source, c.target) for c in forward] == [(0, 1)]  # one activation
    assert [(c.source, c.target) for c in backward] == [(1, 0)]  # and its gradient
    kept = {c.name for c in parts.crossings} - {c.name for c in (*forward, *backward)}
    assert kept == set()  # backward reads nothing of another stage that did not come with these
    last = parts.piece(1, "forward")
    assert any("log_softmax" in str(node.target) for node in last.module.graph.nodes)  # the loss follows
    first = parts.piece(0, "forward")
    assert any("embedding" in str(node.target) for node in first.module.graph.nodes)
    assert parts.piece(0, "backward_input") is None  # nobody waits for stage 0
    assert parts.piece(1, "backward_input") is not None
    assert parts.piece(0, "unshard") is None


def test_splits_by_parameters_and_by_measured_cost() -> None:
    model = support.TinyGPT(layers=3)
    model.layers[0].up = nn.Linear(6, 500)
    assert list(automatic_owners(model, 2, by="parameters").values()) == [0, 1, 1]
    assert list(automatic_owners(model, 2, cost=lambda name: 9.0 if name.endswith("2") else 1.0).values()) == [0, 0, 1]
    for build, message in (
        (lambda: automatic_owners(nn.Linear(2, 2), 2), "no ModuleList or Sequential"),
        (lambda: automatic_owners(model, 4), "3 blocks cannot be cut into 4 stages"),
        (lambda: automatic_owners(model, 2, by="time"), "split by 'count' or 'parameters'"),
        (lambda: planned_owners(model, ParallelPlan()), "the plan names no stages"),
        (lambda: pieces(trace(support.MLP(4, 3), support.mse_loss, support.pair((4, 3), rank=0))), "not split yet"),
    ):
        with pytest.raises(SplitError, match=message):
            build()


class Skips(nn.Module):
    """A U shape: early values are read by a late stage; and a parent-level residual around each block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = self.blocks[0](x)
        b = a + self.blocks[1](a).relu()
        return self.blocks[2](b).view(x.shape[0], -1) * a + x


def test_values_that_skip_a_stage_cross_in_both_directions() -> None:
    model = support.seeded(Skips)
    inputs = {"x": torch.randn(4, 6), "y": torch.randn(4, 6)}
    plan = ParallelPlan().stage(0, "blocks.0").stage(1, "blocks.1").stage(2, "blocks.2")
    parts = recombines(model, support.mse_loss, inputs, planned_owners(model, plan))
    ways = {(c.source, c.target, c.phase) for c in parts.crossings}
    assert {(0, 1, "forward"), (1, 2, "forward"), (0, 2, "forward")} <= ways
    assert {(2, 1, "backward"), (1, 0, "backward"), (2, 0, "backward")} <= ways


class Views(nn.Module):
    """What crosses are views: one of two halves, and one that lies in another order; and a pair, picked apart behind the cut."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = self.blocks[0](x).chunk(2, dim=1)
        c, index = torch.stack([a, b]).transpose(0, 1).max(1)
        return self.blocks[1](torch.cat([c, b], dim=1)) * index.repeat(1, 2) + a.t().t().repeat(1, 2)


def test_views_and_single_results_cross() -> None:
    inputs = {"x": torch.randn(4, 6), "y": torch.randn(4, 6)}
    parts = recombines(support.seeded(Views), support.mse_loss, inputs, {"blocks.0": 0, "blocks.1": 1})
    assert {c.phase for c in parts.crossings if c.source < c.target} == {"forward"}
    made = {name for piece in parts.pieces for name in piece.outputs}
    assert {c.name for c in parts.crossings} <= made


def test_a_backward_is_its_two_parts_in_one() -> None:
    model = support.seeded(lambda: support.TinyGPT(layers=2))
    parts = recombines(model, support.gpt_loss, TOKENS, automatic_owners(model, 2))
    whole, *halves = (parts.piece(1, kind) for kind in ("backward", "backward_input", "backward_weight"))
    count = [sum(node.op == "call_function" for node in piece.module.graph.nodes) for piece in (whole, *halves)]
    assert count[0] == count[1] + count[2]
    assert set(whole.outputs) <= {name for half in halves for name in half.outputs}
    assert set(whole.inputs) <= {name for half in halves for name in half.inputs}
    assert [piece.stage for piece in parts.backwards] == [1, 0]


class IntoASlice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.second(self.first(x)) * 1.0
        y[:, :2] = 0.0
        return self.last(y)  # type: ignore[no-any-return]


def test_a_write_into_a_slice_is_cut_with_who_reads_it() -> None:
    """Backward writes into memory of its own, which no data flow shows, and the write was put behind those who read."""
    inputs = {"x": torch.randn(4, 6), "y": torch.randn(4, 6)}
    recombines(support.seeded(IntoASlice), support.mse_loss, inputs, {"first": 0, "second": 1, "last": 2})


def test_what_is_written_between_pieces_is_refused() -> None:
    """Stage 0 wrote to a value after stage 1 had read it: run in pieces, stage 1 read what was written."""

    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            a = self.blocks[0](x).detach()
            row = a[0]
            b = self.blocks[1](a * 2)
            row.zero_()
            return b

    joint = trace(support.seeded(Late), support.mse_loss, {"x": torch.randn(4, 6), "y": torch.randn(4, 6)})
    with pytest.raises((PassError, SplitError), match="must not be written in place"):
        split(joint, {"blocks.0": 0, "blocks.1": 1})


def test_sizes_cross_too_when_shapes_are_dynamic() -> None:
    model = support.seeded(Skips)
    inputs = {"x": torch.randn(4, 6), "y": torch.randn(4, 6)}
    recombines(model, support.mse_loss, inputs, automatic_owners(model, 3), dynamic_arg_dims={"x": [0], "y": [0]})


def test_a_tied_weight_is_read_by_two_stages() -> None:
    model = support.seeded(lambda: support.TinyGPT(layers=2, tied=True, frozen=True))
    recombines(model, support.gpt_loss, TOKENS, automatic_owners(model, 2))


def test_cuts_that_cannot_be_are_refused() -> None:
    model = support.TinyGPT(layers=2)
    joint = trace(model, support.gpt_loss, TOKENS)
    with pytest.raises(PassError, match=r"stage 1 \(layers.0.* is read by .* of stage 0"):
        split(joint, {"layers.0": 1, "layers.1": 0})

    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.Linear(6, 6), nn.ReLU(inplace=True)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.blocks[1](self.blocks[0](x))

    joint = trace(InPlace(), support.mse_loss, {"x": torch.randn(4, 6), "y": torch.randn(4, 6)})
    with pytest.raises(PassError, match="must not be written in place behind a cut"):
        split(joint, {"blocks.0": 0, "blocks.1": 1})


def split_after_data_parallelism(passes_kind: str) -> dict[str, Any]:
    passes = {
        "plain": [DataParallelPass()],
        "resharded": [DataParallelPass(), ReshardPass()],
        "bucketed": [DataParallelPass(), BucketPass()],
    }[passes_kind]
    model = support.seeded(lambda: support.TinyGPT(layers=2))
    inputs = {"tokens": support.tokens()}
    c = GraphCompiler(model, support.gpt_loss, passes=passes).compile(**inputs)
    whole = c.run(inputs)
    joint = c.graph()
    parts = split(joint, automatic_owners(model, 2))
    flat = [*c.live.values(), *c.live.buffer_values(joint.buffers), *joint.guards.flatten(inputs)]
    found = parts.run(*flat)
    gradients = dict(zip(joint.gradients, found[-len(joint.gradients) :], strict=True))

    def collectives(kind: str) -> set[str]:
        return {
            n.meta["comm"].kind for p in parts.pieces if p.kind == kind for n in p.module.graph.nodes if is_start(n)
        }

    return {
        "difference": support.difference(gradients, whole.gradients),
        "unshard": collectives("unshard"),
        "forward": collectives("forward"),
        "backward": collectives("backward_input") | collectives("backward_weight"),
        "reduce": collectives("reduce"),
    }


@pytest.mark.parametrize("kind", ["plain", "resharded", "bucketed"])
def test_pieces_of_a_data_parallel_step_recombine_bit_for_bit(workers: WorkerPool, kind: str) -> None:
    for result in workers.run(split_after_data_parallelism, 2, kind, deadline=60):
        assert result["difference"] == 0.0
        assert result["unshard"] == {"gather"}
        assert result["forward"] == set()
        assert result["backward"] == ({"gather"} if kind == "resharded" else set())
        assert result["reduce"] == {"reduce_scatter"}
