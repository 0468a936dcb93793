"""Models that are legal in eager and rare: each must give eager's numbers, or be refused with a reason."""

from __future__ import annotations

from typing import Any

import graphpasses_support as support
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard

from stepwell_graphpasses import GraphCompiler, PassConfig, trace, verify
from stepwell_graphpasses.exceptions import CaptureError, ModelStateError
from stepwell_meta.testing import WorkerPool


class Strided(nn.Module):
    """Parameters whose memory is not in the order of their dims."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.out = nn.Conv2d(4, 6, 3), nn.Parameter(torch.randn(3, 6).t())
        self.conv.to(memory_format=torch.channels_last)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv(x.view(-1, 4, 5, 5)).mean((2, 3))
        return x @ self.out + self.out.reshape(-1)[:3] + self.conv.weight.flatten()[:3]


class OneNormUnderTwoNames(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = self.second = nn.BatchNorm1d(100)
        self.out = nn.Linear(100, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.second(self.first(x)))


class ComplexWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix, self.out = nn.Parameter(torch.randn(5, 100, dtype=torch.complex64)), nn.Linear(5, 3).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out((x.to(torch.complex64) @ self.mix.t()).abs().double())


MODELS = [Strided, OneNormUnderTwoNames, ComplexWeight]


def compare(make: Any, configs: list[dict[str, Any]]) -> list[tuple[float, float]]:
    inputs = support.pair((100, 3))
    found = []
    for config in configs:
        loss, error, compiler = support.compiled_against_reference(make, support.mse_loss, inputs, PassConfig(**config))
        largest = max(float(g.abs().max()) for g in support.gradients(compiler.model).values() if g is not None)
        found.append((loss, error / largest))
    return found


@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_odd_models_on_several_ranks(workers: WorkerPool, make: Any) -> None:
    # A parameter in channels-last or transposed memory was captured as if it were contiguous: under ddp the step then failed with
    # "view size is not compatible". A module under two names made the check of its buffers ask a tensor for its truth.
    for results in workers.run(compare, 2, make, [{"dp_mode": "ddp"}, {}], deadline=60):
        for loss, error in results:
            assert loss <= 1e-6
            assert error <= 1e-6


@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_odd_models_on_one_rank(make: Any) -> None:
    model, eager, inputs = support.seeded(make), support.seeded(make), support.pair((100, 3), rank=0)
    compiler = GraphCompiler(model, support.mse_loss)
    for step in range(2):
        if step:  # the memory of a parameter may be laid out anew, as loading a checkpoint may do
            for parameter in model.parameters():
                parameter.data = parameter.data.clone(memory_format=torch.preserve_format)
        model.zero_grad()
        compiler.forward_backward(**inputs)
        expected = support.local_gradients(eager, support.mse_loss, inputs)
        assert support.difference(support.gradients(model), expected) == 0.0
        for (name, ours), (_, theirs) in zip(model.named_buffers(), eager.named_buffers(), strict=True):
            assert torch.equal(ours, theirs), name


def test_a_parameter_that_lies_otherwise_than_when_it_was_captured() -> None:
    model = support.seeded(lambda: support.MLP(4, 3))
    compiler = GraphCompiler(
        model, lambda model, x: F.linear(x, model.layers[0].weight.view(4, 3).t().reshape(3, 4)).sum()
    )
    inputs = {"x": torch.randn(2, 4)}
    compiler.forward_backward(**inputs)
    before = model.layers[0].weight.grad.clone()
    model.zero_grad()
    weight = model.layers[0].weight
    weight.data = weight.data.t().contiguous().t()
    compiler.forward_backward(**inputs)
    assert torch.equal(model.layers[0].weight.grad, before)


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_gradient_hooks_of_parameters_are_refused(kind: str) -> None:
    # They were left out without a word: a hook that doubles a gradient in eager did nothing in a graph.
    model = support.MLP(4, 3)
    handle = getattr(model.layers[0].weight, kind)(lambda tensor: None)
    inputs = support.pair((4, 3), rank=0)
    with pytest.raises(CaptureError, match=r"parameter layers\.0\.weight has a gradient hook .*remove it"):
        trace(model, support.mse_loss, inputs)
    handle.remove()
    trace(model, support.mse_loss, inputs)


class Mixed(nn.Module):
    """Layers of three precisions, complex numbers, rows that three ranks cannot share evenly, and a few that stay whole."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(100, 13).double(), nn.Linear(13, 13).bfloat16()
        self.mix = nn.Parameter(torch.randn(5, 13, dtype=torch.complex128))
        self.turn, self.out = nn.Parameter(torch.tensor(1 + 2j)), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x.double())).bfloat16()
        x = torch.tanh(self.second(x)).to(torch.complex128)
        return self.out((x @ self.mix.t() * self.turn).abs().float())


def on_three_ranks() -> list[tuple[float, float, int]]:
    found = []
    for config in (
        {"min_shard_numel": 14},
        {"dp_mode": "ddp"},
        {"bucket_by": "bytes", "prefetch": 3},
        {"reshard_after_forward": False, "bucket_by": "none"},
    ):
        inputs = support.pair((100, 3))
        loss, _, compiler = support.compiled_against_reference(Mixed, support.mse_loss, inputs, PassConfig(**config))
        errors = verify(compiler, inputs).gradient_errors
        found.append((loss, max(errors.values()), sum(layout.sharded for layout in compiler.layouts.values())))
    return found


def test_three_ranks_odd_widths_and_several_precisions_in_one_model(workers: WorkerPool) -> None:
    for results in workers.run(on_three_ranks, 3, deadline=90):
        assert [loss for loss, _, _ in results] == [0.0] * 4
        assert max(error for _, error, _ in results) <= 2**-6  # bfloat16 has 8 bits, and three summands
        assert [sharded for _, _, sharded in results] == [4, 0, 7, 7]


def shard_twice() -> tuple[str, str, float]:
    inputs = support.pair((4, 3))
    model = support.seeded(lambda: support.MLP(4, 7, 3))
    first = GraphCompiler(model, support.mse_loss)
    first.forward_backward(**inputs)
    before = support.gradients(model)
    messages = []
    for other in (model, support.seeded(lambda: support.MLP(4, 7, 3))):
        if other is not model:
            fully_shard(other)
        try:
            GraphCompiler(other, support.mse_loss).compile(**inputs)
        except ModelStateError as error:
            messages.append(str(error))
    model.zero_grad()
    first.forward_backward(**inputs)
    return messages[0], messages[1], support.difference(support.gradients(model), before)


def test_a_model_that_is_sharded_already_is_refused(workers: WorkerPool) -> None:
    # A second compiler on a model failed while it captured: "got mixed torch.Tensor and DTensor".
    for twice, eager, difference in workers.run(shard_twice, 2, deadline=60):
        assert "layers.0.weight is laid out over 'fsdp_shard' already, by another compiler or by fully_shard" in twice
        assert "already, by another compiler or by fully_shard" in eager
        assert difference == 0.0
