"""Forwards with variables of many kinds: cut or not, they compute what the model does, or are refused with their line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from stepwell_stage import split_sequential
from stepwell_stage.exceptions import StageUsageError

WIDTH = 4


class Layers(nn.Module):
    """What the forwards below use."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.heads = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def outputs_and_grads(model: nn.Module, run: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
    x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(1)).requires_grad_()
    model.zero_grad()
    output = run(x)
    output.square().sum().backward()
    return [output.detach(), *(p.grad for p in model.parameters() if p.grad is not None), x.grad]  # type: ignore[list-item]


def assert_parts_are_the_model(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model = kind()
    wanted = outputs_and_grads(model, model)
    for count in (1, 2, 3):
        split = split_sequential(model, count)
        parts = [split.module(stage) for stage in range(count)]

        def run(x: torch.Tensor, parts: Any = parts) -> Any:
            values: Any = (x,)
            for part in parts:
                values = part(*values)
            return values

        found = outputs_and_grads(model, run)
        assert len(found) == len(wanted)
        assert all(map(torch.equal, found, wanted)), count


# A comprehension, a lambda or an assignment may use a name that a loop over layers used before. The part took the loop's last
# layer, or number, for it: another result, and nobody said so.


class Comprehension(Layers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        outputs = [layer(x) for layer in self.heads]
        return torch.cat(outputs)


class Nested(Layers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, layer in enumerate(self.layers):
            x = layer(x) + sum(x[:, i : i + 1] * j for i in range(2) for j in range(i, 3))
            named = {i: layer for i, layer in enumerate((x, x + i))}  # noqa: C416 - the names are what is tested
            x = named[0] + named[1] * i
        return x


class Lambda(Layers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, layer in enumerate(self.layers):
            twice = (lambda i: i * 2)(layer(x))
            x = (lambda k, i=i: k * i + k)(twice)
        return x + i


class Condition(Layers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, layer in enumerate(self.layers):
            if i == 0:
                i = 7
            x = layer(x) * (i + 1)
        return x


class Count(Layers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, layer in enumerate(self.layers):
            i += 1
            x = layer(x) * i
            x = x * ((i := 5) + i)
            match x.dim():
                case i:
                    x = x * i
            i, j = i + 1, i
            x = x + i * j
        return x


class Rebound(Layers):
    """A loop that is left whole may use the name of one that is not."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        with torch.autograd.set_detect_anomaly(False):
            for layer in self.heads:
                x = layer(x)
        for layer, size in zip(self.net, (1, 2, 3), strict=True):
            x = layer(x) * size
        return x


class Several(Layers):
    """Layers that were named two at once were taken for values that cross, and refused in the first step."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = again = self.layers[0]
        second, third = self.layers[1], self.net
        second, third = third, second
        x = again(x) + first.bias
        return third(second(x))


@pytest.mark.parametrize("kind", [Comprehension, Nested, Lambda, Condition, Count, Rebound, Several])
def test_a_name_means_in_a_part_what_it_means_in_the_model(kind: type[nn.Module]) -> None:
    assert_parts_are_the_model(kind)


class Either(Layers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if x.shape[0] > 3:
                layer = self.net
            x = layer(x)
        return x


class First(Layers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        layer = self.layers[0]
        while len(x) > 1:
            x = layer(x)[1:]
            layer = self.net
        return x


class Shadowed(Layers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = (lambda self: self + 1)(x)
        return self.net(x)


class Hidden(Layers):
    """The layers of a plain list went to the last stage, whichever ran them: their gradients never met the optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.pair = [self.net, self.heads[0]]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.pair[0](x)
        return self.layers[0](x)


class HiddenInAMethod(Hidden):
    def run(self, x: torch.Tensor) -> torch.Tensor:
        return self.pair[1](x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.run(x)
        return self.layers[0](x)


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (Either, r"'layer': it is the layer 'layers.0', or another one"),
        (First, r"layer is the layer 'layers.0' at first, and may be another one later"),
        (Shadowed, r"self is not the model in it"),
        (Hidden, r"'self.pair': it holds layers in a plain container: use nn.ModuleList"),
        (HiddenInAMethod, r"'self.pair': it holds layers in a plain container"),
    ],
)
def test_what_is_known_at_run_time_only_is_refused(kind: type[nn.Module], why: str) -> None:
    with pytest.raises(StageUsageError, match=rf"{kind.__name__} cannot be cut: .*test_reader.py:\d+: .*{why}"):
        split_sequential(kind(), 2)


class Follows(Layers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x)
        x = self.net(x)
        return self.heads[0](x)


class ForwardOfItsOwn(Follows):
    """A Sequential was opened though its object had a forward of its own, which was then passed over."""

    def __init__(self) -> None:
        super().__init__()
        self.net.forward = lambda x: x * 2  # type: ignore[method-assign]


class BackwardHook(Follows):
    """A Sequential was opened though it had a backward hook, which then did not run."""

    def __init__(self) -> None:
        super().__init__()
        self.net.register_full_backward_hook(lambda module, grads, _: (grads[0] * 3,))


@pytest.mark.parametrize("kind", [Follows, ForwardOfItsOwn, BackwardHook])
def test_only_a_sequential_that_calls_its_layers_and_no_more_is_opened(kind: type[nn.Module]) -> None:
    assert_parts_are_the_model(kind)


def test_a_model_with_a_backward_hook_is_refused() -> None:
    model = Follows()
    model.register_full_backward_hook(lambda module, grads, _: None)
    with pytest.raises(StageUsageError, match="Follows has hooks of its own"):
        split_sequential(model, 2)
