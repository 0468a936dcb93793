"""Buffers between units that a forward puts another tensor in the place of, as ``self.mean = 0.9 * self.mean + …`` does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stepwell_p2p import Transport
from stepwell_stage import Executor, schedules, split, tie
from stepwell_stage.exceptions import StageExecutionError

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)).double()


class Row(nn.Module):
    def __init__(self, *, persistent: bool = True) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.register_buffer("mean", torch.zeros(4), persistent=persistent)
        self.register_buffer("count", torch.zeros(()), persistent=persistent)

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.mean.cos()
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
            self.count = self.count + 1
        y = y - self.mean / (1 + self.count)
        for layer in self.layers:
            y = layer(y).tanh()
        return y


class InPlace(Row):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        for layer in self.layers:
            x = layer(x).tanh() * self.mean
        return x


def test_buffers_that_are_changed_in_place_between_a_forward_and_its_backward(threads: Callable[..., Any]) -> None:
    """In one process nothing runs in between, and torch's own sentence, of versions of a tensor, did not say what to change."""
    schedule = schedules.one_f_one_b(2, 3)

    def on_rank(transport: Transport) -> None:
        cut = split(InPlace(persistent=False).double(), 2, example={"x": X[:2]})
        stages = cut.stages(schedule.placement, transport.rank, "cpu", transport=transport)
        Executor(stages, schedule, Tensor.sum).step(x=X, return_outputs=False)

    with pytest.raises(StageExecutionError, match=r"put a new tensor there instead: self\.mean = "):
        threads(on_rank, 2)


@pytest.mark.parametrize("persistent", [True, False])
def test_replaced_buffers(threads: Callable[..., Any], persistent: bool) -> None:
    """Those that are part of the state were refused in the second step: they were not the tensors that had been tied."""
    torch.manual_seed(0)
    model = Row(persistent=persistent).double()
    models = [copy.deepcopy(model) for _ in range(2)]
    schedule = schedules.one_f_one_b(2, 3)

    def on_rank(transport: Transport) -> tuple[list[Any], dict[str, Tensor]]:
        cut = split(models[transport.rank], 2, example={"x": X[:2]})
        executor = Executor(
            cut.stages(schedule.placement, transport.rank, "cpu", transport=transport),
            schedule,
            lambda y: y.square().mean(),
        )
        tied = tie(executor, cut.tied) if cut.tied else None
        losses: list[Any] = []
        for _ in range(2):
            executor.step(x=X, return_outputs=False)
            losses.append(executor.loss)
        module = executor.stages[0].submodule
        assert isinstance(module, nn.Module)
        module.eval()
        losses.append(executor.eval(x=X))
        if tied is not None:
            if transport.rank:
                module.mean.zero_()  # type: ignore[operator, union-attr]
            tied.broadcast()  # of what is there now
        return losses, dict(module.named_buffers())

    wanted: list[Any] = []
    for _ in range(2):
        wanted.append(torch.stack([model(part).square().mean().detach() for part in X.chunk(3)]).mean())
    model.eval()
    wanted.append(model(X).detach())
    found = threads(on_rank, 2)
    torch.testing.assert_close(found[1][0], wanted)
    for _, buffers in found:
        torch.testing.assert_close(buffers, dict(model.named_buffers()))
