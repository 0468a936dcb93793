from __future__ import annotations

from collections.abc import Callable
from typing import Any

import graphpasses_support as support
import pytest
import torch
import torch.nn.functional as F
from graphpasses_support import check, run
from torch import nn
from torch.utils.checkpoint import checkpoint

from stepwell_graphpasses import trace
from stepwell_graphpasses.exceptions import CaptureError


def test_s22_s37_a_checkpointed_region_keeps_its_masks_and_writes_its_buffers_once() -> None:
    inputs = {"x": torch.randn(6, 4), "y": torch.randn(6, 4)}
    plain = trace(support.seeded(lambda: support.Checkpointed(fold=False)), support.mse_loss, inputs)
    model = support.seeded(support.Checkpointed)
    joint = trace(model, support.mse_loss, inputs)
    assert len(joint.graph.nodes) == len(plain.graph.nodes)
    assert sum(node.meta.get("recompute", False) for node in joint.graph.nodes) > 10
    reference = support.seeded(lambda: support.Checkpointed(fold=False))
    torch.manual_seed(5)
    outputs = run(joint, model, inputs)
    torch.manual_seed(5)
    expected = support.local_gradients(reference, support.mse_loss, inputs)
    assert support.difference(dict(zip(joint.gradients, outputs[1:], strict=True)), expected) == 0.0
    assert int(model.norm.num_batches_tracked) == int(reference.norm.num_batches_tracked) == 2


class WritesBehindItsRegion(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.linear, self.out = kind, nn.Linear(4, 5), nn.Linear(5, 3)

    def region(self, x: torch.Tensor) -> torch.Tensor:
        h = self.linear(x)
        if self.kind == "also within":
            h = h.relu()
            h.mul_(2)
            return h.sigmoid()
        if self.kind == "mask":
            h = F.dropout(h, 0.3)
        return torch.relu(h)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = checkpoint(self.region, x, use_reentrant=False)
        (y[:2] if self.kind == "view" else y).add_(1)
        return self.out(y.sin())


@pytest.mark.parametrize("kind", ["whole", "view", "mask", "also within"])
def test_s22_what_is_written_behind_a_checkpointed_region_is_read_as_it_was(kind: str) -> None:
    """Backward read what the write had left, where eager computes the region's result again: gradients were wrong."""
    check(lambda: WritesBehindItsRegion(kind), support.mse_loss, support.pair((4, 3), rank=0))


class WritesBetween(nn.Module):
    """A cosine of a region's result before the write, and one after it, which is the derivative of the sine."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def region(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.linear(x)
        return h, h.cos()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, z = checkpoint(self.region, x, use_reentrant=False)
        y[:1].mul_(2)
        return y.sin() + z


def test_s22_what_is_computed_of_a_value_before_and_after_a_write_differs() -> None:
    """Backward took the one for a repetition of the other, for both are of the same tensor: gradients were wrong."""
    check(WritesBetween, support.mse_loss, support.pair((4, 3), rank=0))


class WritesWithin(nn.Module):
    """What is computed of a value before a write and after it, or of two that are alike until one is written to."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.linear = kind, nn.Linear(4, 3)

    def region(self, x: torch.Tensor) -> torch.Tensor:
        h = self.linear(x)
        if self.kind == "alike":
            other = self.linear(x)
            h.relu_()
            return h.cos() * other.sin()
        if self.kind == "one of two":
            self.linear(x)
            h[:1].mul_(2)
            return h.cos()
        if self.kind == "between":
            other = self.linear(x)
            h[:1].mul_(2)
            between = other.cos()
            h[:1].mul_(2)
            return between
        before = h.cos()
        h[:1].mul_(2)
        if self.kind == "twice":
            h[:1].mul_(2)
        return before * h.cos()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.region, x, use_reentrant=False).sin()


@pytest.mark.parametrize("kind", ["alike", "one of two", "between", "once", "twice"])
def test_s22_writes_within_a_checkpointed_region_tell_apart_what_is_alike(kind: str) -> None:
    """What the region computed again was taken for the first that was computed in the same way, before the write; or, where a
    layer was called twice on one input, for what came of the other call. Gradients were wrong.
    """
    check(lambda: WritesWithin(kind), support.mse_loss, support.pair((4, 3), rank=0))


class Behind(nn.Module):
    """A region, and what is done with its results."""

    def __init__(
        self,
        region: Callable[[Behind, torch.Tensor], Any],
        behind: Callable[[Any], torch.Tensor],
        *,
        plain: bool = False,
    ) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 3), nn.BatchNorm1d(3)
        self.region, self.behind, self.plain = region, behind, plain

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 2
        y = self.region(self, x) if self.plain else checkpoint(self.region, self, x, use_reentrant=False)
        return self.behind(y)


def differences(region: Any, behind: Any = torch.sin, *, plain: bool) -> tuple[float, float]:
    """Between graph and eager, of gradients and of buffers."""
    model = support.seeded(lambda: Behind(region, behind))
    reference = support.seeded(lambda: Behind(region, behind, plain=plain))
    inputs = support.pair((4, 3), rank=0)
    joint = trace(model, support.mse_loss, inputs)
    torch.manual_seed(5)
    outputs = run(joint, model, inputs)
    torch.manual_seed(5)
    expected = support.local_gradients(reference, support.mse_loss, inputs)
    found = dict(zip(joint.gradients, outputs[1:], strict=True))
    return (
        support.difference(found, {name: expected[name] for name in found}),
        support.difference(dict(model.named_buffers()), dict(reference.named_buffers())),
    )


def test_s37_draws_that_are_alike_keep_each_its_own_mask() -> None:
    """They were refused, for nothing told which of them was to be repeated."""

    def region(model: Behind, x: torch.Tensor) -> torch.Tensor:
        return model.linear(F.dropout(x, 0.5) * 3 + F.dropout(x, 0.5)).sin()

    assert differences(region, plain=True) == (0.0, 0.0)


def test_s22_a_normalised_value_that_is_written_behind_its_region_is_read_as_it_was() -> None:
    """Its operator also writes running statistics and is not repeated, so backward read its result as the write had left it."""

    def region(model: Behind, x: torch.Tensor) -> Any:
        y = model.norm(model.linear(x))
        return y, y[1:].sin()

    def behind(results: Any) -> torch.Tensor:
        y, sine = results
        y.mul_(2)
        return y.tanh() + F.pad(sine, (0, 0, 1, 0))

    gradients, _ = differences(region, behind, plain=False)  # whose eager run counts batches twice
    assert gradients == 0.0
    model = support.seeded(lambda: Behind(region, behind))
    run(trace(model, support.mse_loss, support.pair((4, 3), rank=0)), model, support.pair((4, 3), rank=0))
    assert int(model.norm.num_batches_tracked) == 1


def test_s37_a_mask_that_is_written_behind_its_region_is_read_as_it_was() -> None:
    """It was refused."""

    def region(model: Behind, x: torch.Tensor) -> Any:
        mask = torch.rand(4, 3)
        return mask, model.linear(x) * mask

    def behind(results: Any) -> torch.Tensor:
        results[0].zero_()
        return results[1].sin()

    assert differences(region, behind, plain=False) == (0.0, 0.0)


def test_a_region_within_a_region_keeps_its_masks_and_writes() -> None:
    def inner(model: Behind, x: torch.Tensor) -> torch.Tensor:
        y = F.dropout(model.norm(model.linear(x)), 0.5)
        y[:1].mul_(2)
        return y.sin()

    def region(model: Behind, x: torch.Tensor) -> torch.Tensor:
        y = inner(model, x) if model.plain else checkpoint(inner, model, x, use_reentrant=False)
        y[1:].add_(inner(model, x.cos())[1:])
        return y

    assert differences(region, plain=True) == (0.0, 0.0)


def test_a_weight_that_autocast_has_cast_before_the_region_is_the_same_within() -> None:
    """Its cast is kept in forward, and made again in backward; behind it nothing would be found again."""

    def region(model: Behind, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(model.linear(x), 0.5).float()

    class Cast(Behind):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                self.linear(x)
                return super().forward(x)

    check(lambda: Cast(region, torch.sin), support.mse_loss, support.pair((4, 3), rank=0))


def test_s37_what_draws_only_when_its_region_runs_again_is_refused() -> None:
    """What a region does otherwise the second time cannot be told to be a repetition."""
    calls: list[int] = []

    def region(model: Behind, x: torch.Tensor) -> torch.Tensor:
        calls.append(0)
        return model.linear(x).sin() if len(calls) == 1 else F.dropout(model.linear(x), 0.5).sin()

    with pytest.raises(CaptureError, match=r"bernoulli_.* runs again in backward .* do the same each time"):
        trace(Behind(region, torch.sin), support.mse_loss, support.pair((4, 3), rank=0))


@pytest.mark.parametrize("draws", [True, False])
def test_s37_a_region_that_another_function_runs_again_is_refused_where_it_draws_or_writes(*, draws: bool) -> None:
    """A draw that was alike in forward was taken for the one that it repeats, be it or not."""
    layer = nn.Dropout(0.5) if draws else nn.BatchNorm1d(4, affine=False)

    class Again(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return layer(x) * 2

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            (x,) = ctx.saved_tensors
            return gradient * layer(x)

    model = nn.Sequential(nn.Linear(4, 4), layer, nn.Linear(4, 3))

    def step(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(model[2](Again.apply(model[0](x))), y)

    with pytest.raises(CaptureError, match=r"runs again in backward"):
        trace(model, step, support.pair((4, 3), rank=0))
