"""What of a backward is left for later: worked out once for graphs that look alike, and anew where one looks otherwise."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge, save_on_cpu

from stepwell_stage import Kind, stage_backward_input, stage_backward_weight
from stepwell_stage.run import _divide
from stepwell_stage.run._program import EagerProgram

WIDTH = 8


def stage() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))


def microbatch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(3, WIDTH, generator=generator), torch.randn(3, WIDTH, generator=generator)


@pytest.fixture
def divided(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the graphs that were divided."""
    sizes: list[int] = []
    divide = _divide._Looks.divide

    def counting(looks: _divide._Looks, hooked: set[int]) -> _divide.Division:
        sizes.append(len(looks._names))
        return divide(looks, hooked)

    monkeypatch.setattr(_divide._Looks, "divide", counting)
    return sizes


def run(module: nn.Module, program: EagerProgram, seed: int, *, kinds: str = "IW") -> torch.Tensor | None:
    x, grad = microbatch(seed)
    output = program.forward(seed, [x.requires_grad_()], lambda received: (tuple(received), {}))
    (found,) = program.backward(seed, Kind(kinds[0]), [output], [grad])
    if kinds == "IW":
        program.backward(seed, Kind.W, [], [])
    return found


def equal(split: nn.Module, whole: nn.Module) -> None:
    for mine, theirs in zip(split.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


def test_graphs_that_look_alike_are_divided_once(divided: list[int]) -> None:
    split, whole = stage(), stage()
    program, other = EagerProgram(split), EagerProgram(whole)
    for seed in range(5):
        torch.testing.assert_close(run(split, program, seed), run(whole, other, seed, kinds="B"))
    equal(split, whole)
    assert len(divided) == 1


class TakesTwoWays(nn.Module):
    """One way through for some microbatches, another for others; both have the same nodes, joined otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:
            return self.left(x) + self.right(x.tanh())
        return self.right(self.left(x).tanh()) + x


def test_microbatches_that_go_another_way_are_divided_in_their_own(divided: list[int]) -> None:
    torch.manual_seed(0)
    split = TakesTwoWays()
    torch.manual_seed(0)
    whole = TakesTwoWays()
    program, other = EagerProgram(split), EagerProgram(whole)
    for seed in range(8):
        torch.testing.assert_close(run(split, program, seed), run(whole, other, seed, kinds="B"))
    equal(split, whole)
    assert len(divided) == 2


def test_hooks_before_what_one_microbatch_saved_count_for_that_one(divided: list[int]) -> None:
    """Alike to look at, but what stands behind hooks is unpacked once: such a microbatch leaves nothing of it for W."""
    split, whole = stage(), stage()
    program, other = EagerProgram(split), EagerProgram(whole)

    @contextlib.contextmanager
    def around(seed: int) -> Iterator[None]:
        with save_on_cpu() if seed % 2 else contextlib.nullcontext():
            yield

    for seed in range(4):
        x, grad = microbatch(seed)
        with around(seed):
            output = program.forward(seed, [x.requires_grad_()], lambda received: (tuple(received), {}))
        (found,) = program.backward(seed, Kind.I, [output], [grad])
        before = [None if p.grad is None else p.grad.clone() for p in split.parameters()]
        program.backward(seed, Kind.W, [], [])
        after = [p.grad for p in split.parameters()]
        same = [
            a is b is None or (a is not None and b is not None and torch.equal(a, b))
            for a, b in zip(after, before, strict=True)
        ]
        assert all(same) is (seed % 2 == 1)
        torch.testing.assert_close(found, run(whole, other, seed, kinds="B"))
    equal(split, whole)
    assert len(divided) == 2


def test_only_so_many_looks_are_remembered(monkeypatch: pytest.MonkeyPatch, divided: list[int]) -> None:
    monkeypatch.setattr(_divide, "_MOST", 2)

    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)
            self.depth = 1

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(self.depth):
                x = x.tanh()
            result: torch.Tensor = self.linear(x)
            return result

    module = Deep()
    program = EagerProgram(module)
    for seed, depth in enumerate((1, 2, 3, 1, 2, 3)):
        module.depth = depth
        run(module, program, seed)
    assert len(program._divisions._known) <= 2
    assert len(divided) == 6


def test_weight_looks_at_nothing_of_the_path() -> None:
    """An engine that starts on the path walks through all that is below it, for every layer: 16 blocks took W six times B."""
    module = nn.Sequential(*[stage() for _ in range(4)])
    x, grad = microbatch(1)
    x.requires_grad_()
    _, rest = stage_backward_input(module(x.clone()), grad, [x])
    assert len(rest) == 12
    input_node = get_gradient_edge(x).node
    for part in rest:
        below = [root.node for root in part.roots if isinstance(root, GradientEdge)]
        assert len(below) == len(part.roots)
        for node in below:
            below += [child for child, _ in node.next_functions if child is not None]
        assert input_node not in below
        assert len(below) <= 4
    stage_backward_weight([], rest)
    assert all(p.grad is not None for p in module.parameters())


def test_a_hook_on_a_value_runs_once_and_what_it_returns_counts_in_both_parts() -> None:
    calls = []

    class Doubles(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.first(x)
            hidden.register_hook(lambda grad: calls.append(1) or 2 * grad)
            result: torch.Tensor = self.second(hidden)
            return result

    split, whole = Doubles(), Doubles()
    found = run(split, EagerProgram(split), 1)
    assert calls == [1]
    torch.testing.assert_close(found, run(whole, EagerProgram(whole), 1, kinds="B"))
    equal(split, whole)
