"""Models and reference runs that several test files share."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from stepwell_graphpasses import GraphCompiler, JointGraph, ParallelPlan, PassConfig, trace


class Block(nn.Module):
    """A transformer block in small."""

    def __init__(self, width: int, hidden: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, c = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, 2, c // 2).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.out(a.transpose(1, 2).reshape(b, t, c)))
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))


class TinyGPT(nn.Module):
    """Embedding, blocks, head; optionally a tied head, a frozen embedding, an unused parameter and a scalar."""

    def __init__(
        self,
        *,
        vocab: int = 17,
        width: int = 6,
        hidden: int = 10,
        layers: int = 2,
        dropout: float = 0.0,
        tied: bool = False,
        frozen: bool = False,
        unused: bool = False,
        scalar: bool = False,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(Block(width, hidden, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        if frozen:
            self.layers[0].requires_grad_(False)
        if unused:
            self.unused = nn.Linear(3, 5)
        self.scale = nn.Parameter(torch.tensor(1.5)) if scalar else None

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        x = self.norm(x)
        return self.head(x if self.scale is None else x * self.scale)


def gpt_loss(model: nn.Module, tokens: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
    logits = model(tokens[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
    return loss, {"top": logits.detach().max()}


class MLP(nn.Module):
    """Linear layers of the given widths: their rows need not divide."""

    def __init__(self, *widths: int, bias: bool = True) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b, bias=bias) for a, b in itertools.pairwise(widths))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Checkpointed(nn.Module):
    def __init__(self, dropout: float = 0.4, *, fold: bool = True) -> None:
        super().__init__()
        self.fold = fold
        self.up, self.norm = nn.Linear(4, 8), nn.BatchNorm1d(8)
        self.down, self.drop = nn.Linear(8, 4), nn.Dropout(dropout)

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.dropout(self.drop(self.norm(self.up(x))).relu(), 0.25))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):  # the same modules twice: names alone cannot tell the draws apart
            x = x + (checkpoint(self.inner, x, use_reentrant=False) if self.fold else self.inner(x))
        return x


def mse_loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(model(x).float(), y)


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


def tokens(step: int = 0, *, rank: int | None = None, batch: int = 2, length: int = 5, vocab: int = 17) -> torch.Tensor:
    """This rank's batch of a step."""
    rank = dist.get_rank() if rank is None else rank
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(vocab, (batch, length), generator=generator)


def pair(widths: tuple[int, int], step: int = 0, *, rank: int | None = None, batch: int = 4) -> dict[str, torch.Tensor]:
    rank = dist.get_rank() if rank is None else rank
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return {
        "x": torch.randn(batch, widths[0], generator=generator),
        "y": torch.randn(batch, widths[1], generator=generator),
    }


def full(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """The whole of a parameter or gradient; collective for DTensors."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {
        name: None if p.grad is None else full(p.grad).clone()
        for name, p in model.named_parameters(remove_duplicate=False)
    }


def parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: full(p.detach()).clone() for name, p in model.named_parameters(remove_duplicate=False)}


def local_gradients(model: nn.Module, train_fn: Any, inputs: dict[str, Any]) -> dict[str, torch.Tensor | None]:
    """Gradients of this rank's batch in eager."""
    model.zero_grad()
    result = train_fn(model, **inputs)
    (result[0] if isinstance(result, tuple) else result).backward()
    return {
        name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters(remove_duplicate=False)
    }


def averaged(found: dict[str, torch.Tensor | None], divisor: float | None = None) -> dict[str, torch.Tensor | None]:
    """The reference for data parallelism: gradients of all ranks, averaged (or divided by something else)."""
    result: dict[str, torch.Tensor | None] = {}
    for name, gradient in found.items():
        if gradient is not None:
            gradient = gradient.clone()
            dist.all_reduce(gradient)
            gradient = gradient / (divisor or dist.get_world_size())
        result[name] = gradient
    return result


def difference(left: dict[str, torch.Tensor | None], right: dict[str, torch.Tensor | None]) -> float:
    """The largest absolute difference; infinite where one has a gradient and the other has not."""
    assert left.keys() == right.keys()
    worst = 0.0
    for name, a in left.items():
        b = right[name]
        if (a is None) != (b is None):
            return float("inf")
        if a is not None and b is not None:
            assert a.shape == b.shape, (name, a.shape, b.shape)
            worst = max(worst, float((a - b).abs().max())) if a.numel() else worst
    return worst


def compiled_against_reference(
    make: Callable[[], nn.Module],
    train_fn: Any,
    inputs: dict[str, Any],
    config: PassConfig,
    *,
    plan: ParallelPlan | None = None,
    divisor: float | None = None,
    **options: Any,
) -> tuple[float, float, GraphCompiler]:
    """Differences of loss and gradients between the compiled step and eager, and the compiler."""
    model = seeded(make)
    eager = copy.deepcopy(model)
    torch.manual_seed(7)
    expected = averaged(local_gradients(eager, train_fn, inputs), divisor)
    torch.manual_seed(7)
    result = train_fn(eager, **inputs)
    loss = (result[0] if isinstance(result, tuple) else result).detach()
    compiler = GraphCompiler(model, train_fn, config, plan, **options)
    torch.manual_seed(7)
    got, _ = compiler.forward_backward(**inputs)
    return float((got - loss).abs()), difference(gradients(model), expected), compiler


def run(joint: JointGraph, model: nn.Module, inputs: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    """The outputs of a graph on a model's own values."""
    with torch.no_grad():
        buffers = dict(model.named_buffers())
        return joint.module(
            *(dict(model.named_parameters())[name] for name in joint.table.names),
            *(buffers[buffer.name] for buffer in joint.buffers),
            *joint.guards.flatten(inputs),
        )


def check(make: Any, train_fn: Any, inputs: dict[str, Any], tolerance: float = 0.0, **options: Any) -> JointGraph:
    """Loss, gradients and buffers of the graph are those of eager, bit for bit unless said otherwise."""
    model = seeded(make)
    before, again = copy.deepcopy(model), copy.deepcopy(model)
    joint = trace(model, train_fn, inputs, **options)
    for (name, a), (_, b) in zip(model.state_dict().items(), before.state_dict().items(), strict=True):
        assert torch.equal(a, b), f"tracing changed {name}"
    torch.manual_seed(3)
    outputs = run(joint, model, inputs)
    torch.manual_seed(3)
    found = local_gradients(before, train_fn, inputs)
    torch.manual_seed(3)
    result = train_fn(again, **inputs)
    loss = result[0] if isinstance(result, tuple) else result
    assert abs(outputs[0].item() - loss.item()) <= tolerance
    got = dict(zip(joint.gradients, outputs[len(outputs) - len(joint.gradients) :], strict=True))
    expected = {name: found[name] for name in joint.table.names if found[name] is not None}
    assert got.keys() == expected.keys()
    assert difference(got, expected) <= tolerance
    for (name, a), (_, b) in zip(model.named_buffers(), before.named_buffers(), strict=True):
        assert torch.allclose(a, b), name
    return joint


def mlp() -> nn.Module:
    """The model of most tests of the compiler."""
    return MLP(4, 7, 3)


def compiler(
    config: PassConfig | None = None, make: Any = mlp, train_fn: Any = mse_loss, **options: Any
) -> GraphCompiler:
    """A compiler of a model with the same weights everywhere."""
    return GraphCompiler(seeded(make), train_fn, config, **options)


XY = pair((4, 3), rank=0)
