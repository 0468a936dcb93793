from __future__ import annotations

from typing import Any

import graphpasses_support as support
import pytest
import torch

from stepwell_graphpasses import GraphCompiler, PassConfig, PassContract, shard, verify
from stepwell_graphpasses._collectives import starts
from stepwell_graphpasses._signature import compare, first_difference, signature
from stepwell_graphpasses.exceptions import LintError, NumericsError, PeerMismatchError
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
            double = joint.graph.call_function(torch.ops.aten.mul.Tensor, (node, 2.0))
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
