"""Models that are legal in eager and rare: each must give eager's numbers, or be refused with a reason."""

from __future__ import annotations

from typing import Any

import graphpasses_support as support
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard

from stepwell_graphpasses import (
    BucketPass,
    DataParallelPass,
    GraphCompiler,
    OverlapPass,
    PassConfig,
    ReshardPass,
    trace,
    verify,
)
from stepwell_graphpasses.exceptions import CaptureError, ModelStateError
from stepwell_graphpasses.testing import fake_world
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


class TakesWhatItReads(torch.autograd.Function):
    """A product with a gradient that is one of its factors itself, in that one's memory."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return (weight * x).sum()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.saved_tensors[0], None


class GivesItsInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.other = nn.Parameter(torch.randn(5)), nn.Parameter(torch.randn(5))
        self.register_buffer("seen", torch.arange(5.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        product = TakesWhatItReads.apply
        return product(self.weight, x) + product(self.other, self.weight.detach()) + product(self.other, self.seen)


def test_a_gradient_that_is_an_input_itself_has_memory_of_its_own() -> None:
    """The gradient was the caller's own tensor: the second step added to it there, and so to what the caller gave next."""
    model, x = support.seeded(GivesItsInput), torch.randn(5)
    before, weight = x.clone(), model.weight.detach().clone()
    compiler = GraphCompiler(model, lambda model, x: model(x))
    for _ in range(3):
        compiler.forward_backward(x=x)
    assert torch.equal(x, before)
    assert torch.equal(model.weight, weight)
    assert torch.equal(model.seen, torch.arange(5.0))
    torch.testing.assert_close(model.weight.grad, 3 * before)
    torch.testing.assert_close(model.other.grad, 3 * (weight + model.seen))


def reuse_the_memory_of_inputs(config: dict[str, Any]) -> float:
    model, x = support.seeded(GivesItsInput), torch.full((5,), 1.0 + dist.get_rank())
    compiler = GraphCompiler(model, lambda model, x: model(x), PassConfig(**config))
    with compiler.no_sync():
        compiler.forward_backward(x=x)
    x.fill_(7.0)  # the next microbatch, where the one before was
    compiler.forward_backward(x=x)
    return float((support.full(model.weight.grad) - (7.0 + 1.5)).abs().max())


@pytest.mark.parametrize("config", [{}, {"dp_mode": "ddp"}, {"min_shard_numel": 100}])
def test_microbatches_may_lie_in_the_memory_of_those_before(workers: WorkerPool, config: dict[str, Any]) -> None:
    """A gradient kept back by no_sync was the first microbatch's tensor, which became the second: that counted twice."""
    assert workers.run(reuse_the_memory_of_inputs, 2, config, deadline=60) == [0.0, 0.0]


class Shares(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
        flat = torch.randn(48)
        if kind == "beside":
            self.embed.weight, self.head.weight = (nn.Parameter(part.view(6, 4)) for part in flat.chunk(2))
        elif kind == "parameter":
            self.head.weight = nn.Parameter(self.embed.weight)
        elif kind == "part":
            self.head.weight = nn.Parameter(flat.view(12, 4)[:6])
            self.embed.weight = nn.Parameter(flat.view(12, 4)[5:11])
        elif kind == "columns":
            self.embed.weight, self.head.weight = (nn.Parameter(part) for part in flat.view(6, 8).chunk(2, dim=1))
        elif kind == "column":
            self.embed.weight = nn.Parameter(flat[:42].view(6, 7)[:, :4])
            self.head.weight = nn.Parameter(flat[:42].view(6, 7)[:, 3:])
        else:
            self.register_buffer("old", self.head.weight.data)
        if kind == "frozen":
            self.head.requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.embed(tokens))
        return logits.logsumexp(-1).mean() + (self.old.sum() if hasattr(self, "old") else 0.0)


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("parameter", "embed.weight and head.weight|head.weight and embed.weight"),
        ("part", "head.weight and embed.weight"),
        ("column", "embed.weight and head.weight"),
        ("buffer", "head.weight and old|old and head.weight"),
    ],
)
def test_parameters_that_share_memory_and_are_not_one_are_refused(kind: str, names: str) -> None:
    """In eager an optimizer's step on one changes the other; as shards they lay apart, and trained apart without a word. Columns
    of one matrix, which share no element, were refused too.
    """
    inputs = {"tokens": torch.tensor([[0, 3]])}
    with fake_world(2):
        model = Shares(kind)
        before = dict(model.named_parameters())
        with pytest.raises(ModelStateError, match=rf"^({names}) are two tensors in the same memory"):
            GraphCompiler(model, lambda model, tokens: model(tokens)).compile(**inputs)
        assert all(tensor is before[name] for name, tensor in model.named_parameters())
        for legal, mode in ((kind, "ddp"), ("beside", "fsdp"), ("columns", "fsdp"), ("frozen", "fsdp")):
            GraphCompiler(Shares(legal), lambda model, tokens: model(tokens), PassConfig(dp_mode=mode)).compile(
                **inputs
            )


class RareBuffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, rank = nn.Linear(4, 3), dist.get_rank()
        kinds = (torch.int16, torch.uint16, torch.complex64, torch.bool, torch.float8_e4m3fn)
        for kind in kinds:
            self.register_buffer(str(kind).removeprefix("torch."), torch.tensor([1.0, rank]).to(kind))
        self.register_buffer("expanded", torch.full((1, 3), float(rank)).expand(2, 3))
        self.register_buffer("strided", torch.full((2, 3), rank, dtype=torch.int16).t())
        self.register_buffer("single", torch.tensor(rank, dtype=torch.int16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


def start_with_rare_buffers() -> list[list[float]]:
    model = RareBuffers()
    compiler = GraphCompiler(model, support.mse_loss).compile(**support.pair((4, 3)))
    verify(compiler, support.pair((4, 3)))
    return [buffer.to(torch.complex64).real.flatten().tolist() for buffer in model.buffers()]


def test_buffers_of_any_dtype_start_as_those_of_the_first_rank(workers: WorkerPool) -> None:
    """Gloo does not know the dtypes of some, and expanded ones cannot be written to: such models could not be compiled."""
    expected = [[1.0, 0.0]] * 5 + [[0.0] * 6, [0.0] * 6, [0.0]]
    assert workers.run(start_with_rare_buffers, 2, deadline=60) == [expected, expected]


class RareWeights(nn.Module):
    """Several complex weights, which are gathered together, and frozen ones of dtypes that gloo does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.randn(5, 5, dtype=torch.complex64)) for _ in range(2))
        self.phase = nn.Parameter(torch.randn(5, dtype=torch.complex128))
        kinds = (torch.int16, torch.uint16, torch.float8_e4m3fn)
        self.scales = nn.ParameterList(nn.Parameter(torch.arange(1, 4).to(kind), requires_grad=False) for kind in kinds)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        product = (x.to(torch.complex64) @ self.first @ self.second.t() * self.phase).abs().float()[:, :3]
        for scale in self.scales:
            product = product * scale.float()
        return product


def gather_rare_weights(passes: list[Any]) -> tuple[float, float]:
    inputs = support.pair((5, 3))
    config = PassConfig(bucket_by="bytes")
    loss, error, compiler = support.compiled_against_reference(
        RareWeights, support.mse_loss, inputs, config, passes=passes
    )
    return loss, max(error, *verify(compiler, inputs).gradient_errors.values())


@pytest.mark.parametrize("pack", [None, True])
def test_weights_of_dtypes_that_a_backend_does_not_know_are_gathered(workers: WorkerPool, pack: bool | None) -> None:
    """Several complex weights, or one of small integers, failed in the first step: "Invalid scalar type"."""
    passes = [DataParallelPass(), ReshardPass(), BucketPass(pack=pack), OverlapPass()]
    for loss, error in workers.run(gather_rare_weights, 2, passes, deadline=60):
        assert loss == 0.0
        assert error <= 1e-6
