"""Models that take derivatives in their forward, on ranks that are threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from split_support import check
from torch import Tensor, nn


def of_torch_func(layer: nn.Module, x: Tensor) -> Tensor:
    y, slope = torch.func.jvp(lambda z: layer(z).tanh(), (x,), (torch.ones_like(x),))
    return y + slope  # type: ignore[no-any-return]


def of_a_level(layer: nn.Module, x: Tensor) -> Tensor:
    with forward_ad.dual_level():
        y, slope = forward_ad.unpack_dual(layer(forward_ad.make_dual(x, torch.ones_like(x))).tanh())
    return y + slope


def of_many(layer: nn.Module, x: Tensor) -> Tensor:
    return torch.func.vmap(lambda z: layer(z).tanh())(x)  # type: ignore[no-any-return]


def backward(layer: nn.Module, x: Tensor) -> Tensor:
    return x + torch.func.grad(lambda z: layer(z).tanh().sum())(x)  # type: ignore[no-any-return]


class Derived(nn.Module):
    def __init__(self, how: Callable[..., Tensor]) -> None:
        super().__init__()
        self.inner, self.how = nn.Linear(4, 4), how

    def forward(self, x: Tensor) -> Tensor:
        return self.how(self.inner, x)


class Row(nn.Module):
    def __init__(self, how: Callable[..., Tensor], *, between: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) if between else Derived(how) for _ in range(4))
        self.how, self.between = how, between

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            x = self.how(torch.sin, x) if self.between else x
        return x


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own derivatives in forward mode use it
@pytest.mark.parametrize("between", [False, True])
@pytest.mark.parametrize("how", [of_torch_func, of_a_level, of_many, backward])
def test_derivatives_in_a_forward(threads: Callable[..., Any], how: Any, between: bool) -> None:
    """In forward mode torch has one level for all threads: one rank left it while another was in it, which was a RuntimeError
    in one run of three, and could as well have been a derivative of zero.
    """
    torch.manual_seed(0)
    parts = [{"x": torch.randn(2, 4).double()} for _ in range(6)]
    for _ in range(3):
        check(threads, Row(how, between=between).double(), parts[:1], [parts] * 2, "1f1b", 3)
