"""The battery for stage programs: ours pass it, and each check notices what it is there for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from stepwell_p2p import Transport
from stepwell_stage import EagerProgram, Executor, Kind, PipelineStage, StageProgram
from stepwell_stage.exceptions import StageUsageError
from stepwell_stage.schedules import gpipe, zb_h1
from stepwell_stage.testing import PROGRAM_CHECKS, FakeProgram, ProgramCheck, ProgramCheckError, check_stage_program

Threads = Callable[..., list[Any]]


class Times(nn.Module):
    """What a FakeProgram computes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(1.5))

    def forward(self, a: torch.Tensor, b: torch.Tensor, ids: torch.Tensor) -> Any:
        return self.weight * a, self.weight * b, ids


def parts(count: int = 3) -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        [
            torch.randn(2, 3, generator=generator).requires_grad_(),
            torch.randn(2, generator=generator),
            torch.arange(2),
        ]
        for _ in range(count)
    ]


class Checkpointed(nn.Module):
    """Whole in I, where autograd's own nodes cannot be split."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, a: torch.Tensor, b: torch.Tensor, ids: torch.Tensor) -> Any:
        hidden = self.first(a) + b[:, None]
        return [checkpoint(self.second, hidden, use_reentrant=False), ids]


class OneByOne:
    """A program that keeps inputs instead of graphs, and runs the forward again where gradients are due.

    What an implementation over captured graphs does too: its outputs are leaves, from which backward takes the gradients.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.kept: dict[int, tuple[Any, ...]] = {}
        self.later: dict[int, Callable[[], None]] = {}

    def forward(self, microbatch: int, received: Sequence[torch.Tensor], call: Any) -> Any:
        with torch.no_grad():
            args, kwargs = call([tensor.detach() for tensor in received])
            outputs = self.module(*args, **kwargs)
        if not torch.is_grad_enabled():
            return outputs
        flat, tree = torch.utils._pytree.tree_flatten(outputs)
        _, again = self._again(received, call)
        for leaf, other in zip(flat, again, strict=True):
            leaf.requires_grad_(other.requires_grad)
        # Outputs that are somebody else's memory would be leaves twice.
        self.kept[microbatch] = (received, call, [leaf for leaf in flat if leaf.requires_grad])
        return torch.utils._pytree.tree_unflatten(flat, tree)

    def _again(self, received: Sequence[torch.Tensor], call: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        leaves = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in received]
        with torch.enable_grad():
            args, kwargs = call(leaves)
            return leaves, torch.utils._pytree.tree_leaves(self.module(*args, **kwargs))

    def backward(self, microbatch: int, kind: Kind, roots: Any, grads: Any) -> tuple[torch.Tensor | None, ...]:
        if kind is Kind.W:
            self.later.pop(microbatch)()
            return ()
        if kind not in (Kind.B, Kind.I):
            raise StageUsageError(f"a backward is B, I or W, got {kind.value}")
        received, call, outputs = self.kept.pop(microbatch)
        if roots:
            torch.autograd.backward(roots, grads)
        leaves, again = self._again(received, call)
        pairs = [(root, leaf.grad) for root, leaf in zip([a for a in again if a.requires_grad], outputs, strict=True)]
        pairs = [(root, grad) for root, grad in pairs if grad is not None]
        weights = [p for p in self.module.parameters() if p.requires_grad]
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        found = (
            torch.autograd.grad(
                [root for root, _ in pairs], wanted + weights, [grad for _, grad in pairs], allow_unused=True
            )
            if pairs and wanted + weights
            else [None] * len(wanted + weights)
        )

        def accumulate() -> None:
            for parameter, grad in zip(weights, found[len(wanted) :], strict=True):
                if grad is not None:
                    parameter.grad = grad if parameter.grad is None else parameter.grad + grad

        if kind is Kind.B:
            accumulate()
        else:
            self.later[microbatch] = accumulate
        of_inputs = iter(found)
        return tuple(next(of_inputs) if leaf.requires_grad else None for leaf in leaves)

    def unshard(self) -> None: ...
    def reshard(self) -> None: ...
    def reduce_grads(self) -> None: ...


@pytest.mark.parametrize("check", PROGRAM_CHECKS, ids=lambda check: check.name)
@pytest.mark.parametrize("make", [EagerProgram, OneByOne])
def test_programs_that_run_any_module(make: Callable[[nn.Module], StageProgram], check: ProgramCheck) -> None:
    check_stage_program(make, checks=[check])


def test_programs_of_certain_things() -> None:
    check_stage_program(lambda module: FakeProgram(module.weight), module=Times(), microbatches=parts())
    check_stage_program(EagerProgram, module=Checkpointed(), microbatches=parts(4))


class Odd(EagerProgram):
    """Ours, with something wrong."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.held: list[Any] = []


class Detached(Odd):
    def forward(self, microbatch: int, received: Any, call: Any) -> Any:
        outputs = super().forward(microbatch, received, call)
        return {**outputs, "hidden": outputs["hidden"].detach()}


class LeavesGrad(Odd):
    def backward(self, microbatch: int, kind: Kind, roots: Any, grads: Any) -> Any:
        leaves = self._leaves.get(microbatch, ())
        found = super().backward(microbatch, kind, roots, grads)
        for leaf, grad in zip(leaves, found, strict=False):
            leaf.grad = grad
        return found


class ForgetsWeights(Odd):
    def backward(self, microbatch: int, kind: Kind, roots: Any, grads: Any) -> Any:
        if kind is Kind.W:
            self._left.pop(microbatch)
            return ()
        return super().backward(microbatch, kind, roots, grads)


class KnowsOneMicrobatch(Odd):
    def backward(self, microbatch: int, kind: Kind, roots: Any, grads: Any) -> Any:
        if kind is Kind.I:
            self._left.clear()
        return super().backward(microbatch, kind, roots, grads)


class StartsAnew(Odd):
    def unshard(self) -> None:
        self.module.zero_grad()


class DoublesLosses(Odd):
    def backward(self, microbatch: int, kind: Kind, roots: Any, grads: Any) -> Any:
        grads = [torch.tensor(2.0) if grad is None else grad for grad in grads]
        return super().backward(microbatch, kind, roots, grads)


class MakesZeros(Odd):
    def backward(self, microbatch: int, kind: Kind, roots: Any, grads: Any) -> Any:
        found = super().backward(microbatch, kind, roots, grads)
        return found if roots else tuple(torch.zeros(1) for _ in found)


class DropsNames(Odd):
    def forward(self, microbatch: int, received: Any, call: Any) -> Any:
        return super().forward(microbatch, received, lambda tensors: (call(tensors)[0], {}))


class TrainsAll(Odd):
    def __init__(self, module: nn.Module) -> None:
        super().__init__(module.requires_grad_())


class KeepsEvaluations(Odd):
    def forward(self, microbatch: int, received: Any, call: Any) -> Any:
        self.held = [] if torch.is_grad_enabled() else list(received)
        return super().forward(microbatch, received, call)


class KeepsOutputs(Odd):
    def forward(self, microbatch: int, received: Any, call: Any) -> Any:
        self.held = list(received)
        return super().forward(microbatch, received, call)


class ClearsHalf(Odd):
    def clear(self) -> None:
        self._leaves.clear()


class TakesAnything(Odd):
    def backward(self, microbatch: int, kind: Kind, roots: Any, grads: Any) -> Any:
        if kind is Kind.W and microbatch not in self._left:
            return ()
        return super().backward(microbatch, kind, roots, grads)


@pytest.mark.parametrize(
    ("kind", "check", "words"),
    [
        (Detached, "forward_is_the_modules", "output 0: expected requires_grad=True, got False"),
        (LeavesGrad, "whole_backward", "returned, not left in .grad"),
        (ForgetsWeights, "backward_in_two_parts", "the gradient of parameter 'bias': expected"),
        (KnowsOneMicrobatch, "microbatches_in_flight", "W of microbatch 1 needs its I first"),
        (StartsAnew, "gradients_add_up", "the gradient of parameter"),
        (DoublesLosses, "starts_from_a_loss", "the gradient of input 0"),
        (MakesZeros, "nothing_to_start_from", "expected None for each of 3 inputs"),
        (DropsNames, "first_stage", "missing 3 required positional arguments"),
        (TrainsAll, "frozen_parameters", "the gradient of parameter 'weight': expected None"),
        (KeepsEvaluations, "evaluation", "an evaluation keeps tensors"),
        (KeepsOutputs, "nothing_is_kept", "after B it holds 3 of 6 inputs and outputs"),
        (ClearsHalf, "nothing_is_kept_of_a_step_that_failed", r"after clear\(\) it holds 2 of 12 inputs and outputs"),
        (TakesAnything, "errors_come_through", "W without its I: expected an error"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_each_check_notices_what_it_is_there_for(kind: type[Odd], check: str, words: str) -> None:
    (one,) = [known for known in PROGRAM_CHECKS if known.name == check]
    with pytest.raises(ProgramCheckError, match=f"check '{check}' failed: .*({words})"):
        check_stage_program(kind, checks=[one])


def test_every_check_has_something_to_notice() -> None:
    (mark,) = test_each_check_notices_what_it_is_there_for.pytestmark
    assert sorted(check for _, check, _ in mark.args[1]) == sorted(check.name for check in PROGRAM_CHECKS)


def test_what_the_battery_needs() -> None:
    with pytest.raises(StageUsageError, match="give a module and microbatches"):
        check_stage_program(EagerProgram, module=Times())
    with pytest.raises(StageUsageError, match="need 3 microbatches or more, got 2"):
        check_stage_program(EagerProgram, module=Times(), microbatches=parts(2))


def test_a_fake_under_the_executor(threads: Threads) -> None:
    """Its gradients, and what it was asked for in which order."""
    x, y = torch.randn(4, 2), torch.randn(4, 2)

    def run(transport: Transport) -> tuple[list[str], torch.Tensor | None]:
        program = FakeProgram(nn.Parameter(torch.tensor(2.0 + transport.rank)))
        stage = PipelineStage(program, transport.rank, 2, "cpu")
        executor = Executor(stage, zb_h1(2, 2), functional.mse_loss, transport=transport)
        executor.step(*([x] if executor.is_first else []), target=y if executor.is_last else None)
        return program.calls, program.weight.grad

    (first, one), (last, other) = threads(run, 2)
    weights = [torch.tensor(value, requires_grad=True) for value in (2.0, 3.0)]
    functional.mse_loss(x * weights[0] * weights[1], y).backward()
    torch.testing.assert_close([one, other], [weight.grad for weight in weights])
    assert first == ["unshard", "F0", "F1", "I0", "W0", "I1", "W1", "reduce_grads", "reshard"]
    assert last == ["unshard", "F0", "I0", "F1", "I1", "W0", "W1", "reduce_grads", "reshard"]


def test_a_fake_on_one_rank() -> None:
    """The example of its docstring."""
    program = FakeProgram(nn.Parameter(torch.tensor(2.0)))
    executor = Executor(PipelineStage(program, 0, 1, "cpu"), gpipe(1, 2), functional.mse_loss)
    executor.step(torch.ones(4), target=torch.zeros(4))
    assert program.calls == ["unshard", "F0", "F1", "B0", "B1", "reduce_grads", "reshard"]
