from __future__ import annotations

import operator
from typing import Any

import graphpasses_support as support
import pytest
import torch
from torch import nn

from stepwell_graphpasses import (
    FULL_AFTER_NONE,
    FULL_AFTER_SCATTER,
    NONE,
    SCATTER,
    GraphCompiler,
    PassConfig,
    PassContract,
    shard,
    verify,
)
from stepwell_graphpasses._collectives import starts
from stepwell_graphpasses._graph import emit
from stepwell_graphpasses._signature import compare, first_difference, signature
from stepwell_graphpasses.exceptions import GuardError, LintError, NumericsError, PeerMismatchError
from stepwell_graphpasses.passes import DataParallelPass, default_passes
from stepwell_graphpasses.testing import fake_world
from stepwell_meta.testing import WorkerPool


def verified(mode: dict[str, Any]) -> Any:
    make = lambda: support.TinyGPT(tied=True, unused=True, scalar=True, layers=1, dropout=0.2)  # noqa: E731
    inputs = {"tokens": support.tokens()}
    c = GraphCompiler(support.seeded(make), support.gpt_loss, PassConfig(**mode), shard("layers.*", "embed"))
    c.forward_backward(**inputs)
    before, state = support.gradients(c.model), torch.get_rng_state()
    report = verify(c, inputs)
    assert support.difference(before, support.gradients(c.model)) == 0.0
    assert torch.equal(state, torch.get_rng_state())
    return report.collectives, report.loss_error, max(report.gradient_errors.values()), len(report.gradient_errors)


@pytest.mark.parametrize(
    "mode",
    [
        {},
        {"dp_mode": "ddp", "reduce": "sum"},
        {"dp_mode": "hsdp", "fsdp_degree": 2, "reduce": 3.0},
        {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32},
    ],
    ids=["fsdp", "ddp", "hsdp", "bf16"],
)
def test_a_right_step_is_verified(workers: WorkerPool, mode: dict[str, Any]) -> None:
    for collectives, loss, gradient, number in workers.run(
        verified, 4 if "fsdp_degree" in mode else 2, mode, deadline=90
    ):
        assert collectives > 2
        assert loss <= 1e-6
        assert gradient <= 1e-5
        assert number == 16


class Doubles:
    name = "doubles"
    contract = PassContract(changes_numerics=True)

    def run(self, joint: Any, context: Any) -> None:
        node = joint.outputs[-1]
        with joint.graph.inserting_after(node):
            double = joint.graph.call_function(operator.mul, (node, 2.0))
        double.meta = {k: v for k, v in node.meta.items() if k != "comm"}
        joint.output_node.args = ((*joint.outputs[:-1], double),)


def test_wrong_numbers_are_found_by_parameter() -> None:
    inputs = support.pair((4, 3), rank=0)
    c = GraphCompiler(support.MLP(4, 3), support.mse_loss, passes=[DataParallelPass(), Doubles()]).compile(**inputs)
    with pytest.raises(NumericsError, match=r"gradients: layers.0.bias by 1.0e\+00") as error:
        verify(c, inputs)
    assert error.value.errors["layers.0.weight"] <= 1e-6


def joint_on(rank: int, size: int = 64, mode: str = "fsdp", passes: Any = None) -> Any:
    with fake_world(size, rank):
        config = PassConfig(dp_mode=mode, **({"fsdp_degree": 8} if mode == "hsdp" else {}))
        c = GraphCompiler(support.seeded(lambda: support.MLP(4, 4, 4)), support.mse_loss, config, passes=passes)
        c.compile(**support.pair((4, 4), rank=0))
        assert verify(c).loss_error is None
        return signature(c.graph())


def test_s23_sixty_four_ranks_in_one_process_have_one_sequence() -> None:
    for mode in ("fsdp", "hsdp"):
        ranks = (0, 7, 8, 63)
        signatures = [joint_on(rank, mode=mode) for rank in ranks]
        if mode == "fsdp":
            compare(list(zip(ranks, signatures, strict=True)))
            assert {entry.members for entry in signatures[0]} == {tuple(range(64))}
        else:
            assert {entry.members for entry in signatures[1]} == {tuple(range(8)), tuple(range(7, 64, 8))}
            compare([(0, signatures[0][:2]), (7, signatures[1][:2])])
            with pytest.raises(PeerMismatchError):
                compare([(0, signatures[0]), (8, signatures[2])])


def test_s23_what_differs_is_said() -> None:
    entries = joint_on(0, size=2)
    assert first_difference(entries, entries) is None
    assert "against" in first_difference(entries, entries[::-1])
    assert f"{len(entries)} collectives against {len(entries) - 1}" in first_difference(entries, entries[:-1])
    with pytest.raises(PeerMismatchError, match="rank 3 against rank 5") as error:
        compare([(3, entries), (4, entries), (5, entries[:-1])])
    assert error.value.ranks == (5,)


def test_a_graph_that_was_damaged_after_compilation_is_found() -> None:
    with fake_world(2):
        c = GraphCompiler(support.MLP(4, 4), support.mse_loss, passes=default_passes(PassConfig()))
        c.compile(**support.pair((4, 4), rank=0))
        del starts(c.graph().graph)[0].meta["val"]
        with pytest.raises(LintError, match="has no val"):
            verify(c)


class Changes:
    """Does something to a graph, on chosen ranks."""

    name = "changes"
    contract = PassContract(changes_numerics=True)

    def __init__(self, what: str) -> None:
        self.what = what

    def run(self, joint: Any, context: Any) -> None:
        place = joint.placeholders[len(joint.table)] if self.what == "buffer" else joint.outputs[1]
        target = torch.ops.aten.add_.Tensor if self.what == "buffer" else torch.ops.aten.mul.Tensor
        with joint.graph.inserting_before(joint.output_node):
            node = emit(joint.graph, target, (place, 2.0), like=place, mode=joint.mode)
        if self.what != "buffer":
            joint.output_node.args = ((joint.outputs[0], node, *joint.outputs[2:]),)


class Counts(nn.Module):
    """Counts its steps in a buffer, and puts a new tensor in place of another."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        self.mean.lerp_(y.detach().mean(0), 0.5)
        self.steps += 1
        return y - self.mean


def named(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Any:
    loss = support.mse_loss(model, x, y)
    return loss, {"twice": loss.detach() * 2, "constant": 3}


@pytest.mark.parametrize(("what", "message"), [("loss", "the named loss twice"), ("buffer", "the buffer mean")])
def test_named_losses_and_buffers_are_compared_too(what: str, message: str) -> None:
    inputs = support.pair((4, 3), rank=0)
    model = support.seeded(Counts)
    verify(GraphCompiler(model, named).compile(**inputs), inputs)
    assert float(model.mean.abs().max()) == int(model.steps) == 0
    c = GraphCompiler(support.seeded(Counts), named, passes=[DataParallelPass(), Changes(what)]).compile(**inputs)
    with pytest.raises(NumericsError, match=rf"gradients: none; also {message}\. .*passes=\[DataParallelPass\(\)\]"):
        verify(c, inputs)


def wrong_on_one_rank() -> tuple[str, str]:
    double = Doubles()
    passes = [DataParallelPass(), *([double] if torch.distributed.get_rank() == 1 else [])]
    inputs = support.pair((4, 3))
    c = GraphCompiler(support.seeded(lambda: support.MLP(4, 3)), support.mse_loss, passes=passes).compile(**inputs)
    with pytest.raises((NumericsError, PeerMismatchError)) as error:
        verify(c, inputs)
    return type(error.value).__name__, str(error.value)


def test_numbers_that_are_wrong_on_one_rank_are_an_error_on_all(workers: WorkerPool) -> None:
    """The rank that was right went on, to the next collective, and waited there for the one that had raised."""
    right, wrong = workers.run(wrong_on_one_rank, 2, deadline=60)
    assert wrong[0] == "NumericsError"
    assert right[0] == "PeerMismatchError"
    assert "rank 1 found a fault, so all ranks raise: NumericsError: the graph differs from eager" in right[1]


@pytest.mark.parametrize(
    ("grad_sync", "variant"),
    [("none", NONE), ("none", FULL_AFTER_NONE), ("scatter", SCATTER), ("scatter", FULL_AFTER_SCATTER)],
)
def test_graphs_of_accumulation_are_checked_too(grad_sync: Any, variant: Any) -> None:
    with fake_world(2):
        c = GraphCompiler(support.MLP(4, 4), support.mse_loss, PassConfig(grad_sync=grad_sync))
        c.compile(**support.pair((4, 4), rank=0))
        verify(c)
        del starts(c.graph(variant).graph)[0].meta["val"]
        with pytest.raises(LintError, match="has no val"):
            verify(c)


@pytest.mark.filterwarnings("ignore:Complex modules are a new feature")
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex64], ids=str)
def test_a_step_in_another_dtype_is_verified(dtype: torch.dtype) -> None:
    """The reference lost what float32 does not hold, an imaginary part too; and a model in bfloat16 was held to float32."""

    def step(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (model(x) - y).abs().square().mean()

    inputs = {name: value.to(dtype) for name, value in support.pair((4, 3), rank=0).items()}
    c = GraphCompiler(support.seeded(lambda: support.MLP(4, 7, 3)).to(dtype), step).compile(**inputs)
    found = verify(c, inputs)
    assert found.loss_error == max(found.gradient_errors.values()) == 0.0
    changed = GraphCompiler(support.MLP(4, 3).to(dtype), step, passes=[DataParallelPass(), Doubles()]).compile(**inputs)
    with pytest.raises(NumericsError, match=r"layers\.0\.bias by 1\.0e"):
        verify(changed, inputs)


def inputs_that_do_not_fit() -> str:
    inputs = support.pair((4, 3))
    c = GraphCompiler(support.seeded(lambda: support.MLP(4, 3)), support.mse_loss).compile(**inputs)
    with pytest.raises((GuardError, PeerMismatchError)) as error:
        verify(c, support.pair((4, 3), batch=4 + torch.distributed.get_rank()))
    return str(error.value)


def test_inputs_that_do_not_fit_on_one_rank_are_an_error_on_all(workers: WorkerPool) -> None:
    """The other rank ran its step, alone."""
    for message in workers.run(inputs_that_do_not_fit, 2, deadline=30):
        assert "x: expected shape (4, 4), got (5, 4)" in message
