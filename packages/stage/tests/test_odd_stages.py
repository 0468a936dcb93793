"""Stages that are out of the ordinary, on every schedule and on odd numbers of ranks, against the plain model."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import pytest
import torch
from stage_support import Threads, build, numbers, seeded, step
from torch import nn
from torch.distributed import pipelining
from torch.nn import functional

from stepwell_meta.testing import WorkerPool
from stepwell_p2p import C10dTransport, Transport
from stepwell_p2p.exceptions import TransportError
from stepwell_stage import Executor, PipelineStage, Schedule
from stepwell_stage.schedules import (
    dualpipe_v,
    gpipe,
    interleaved_1f1b,
    interleaved_zero_bubble,
    looped_bfs,
    one_f_one_b,
    zb_h1,
    zbv,
)

WIDTH, ROWS, MICROBATCHES = 4, 7, 5

SCHEDULES: dict[str, Callable[[int, int], Schedule]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "zb_h1": zb_h1,
    "looped_bfs": looped_bfs,
    "interleaved": interleaved_1f1b,
    "interleaved_zb": interleaved_zero_bubble,
    "zbv": zbv,
    "dualpipe_v": dualpipe_v,
}


@attrs.frozen
class Parts:
    """What may be missing."""

    hidden: torch.Tensor
    mask: torch.Tensor | None = None
    inner: Parts | None = None


class Enters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


class Lets(nn.Module):
    """Has no parameters."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *values: Any) -> Any:
        return self.function(*values)


class Leaves(nn.Module):
    def __init__(self, function: Callable[..., Any] = lambda x: x) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.function = function

    def forward(self, *values: Any) -> torch.Tensor:
        return self.linear(self.function(*values))


def same(x: Any) -> Any:
    return x


def cut(function: Callable[..., Any]) -> Callable[..., Any]:
    """Nothing flows back through it."""
    return lambda x: function(x).detach()


# By name: what stands in the second stage, and what the next one makes of it. Other stages are linear.
MIDDLES: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "itself": (same, same),
    "a view of it": (lambda x: x[:, ::2], lambda x: x.repeat(1, 2)),
    "another shape": (lambda x: x.reshape(-1, 2, 2), lambda x: x.flatten(1)),
    "itself twice": (lambda x: (x, x), lambda x, y: x * y),
    "in place": (lambda x: x.mul_(2), same),
    "none and numbers": (lambda x: Parts(x, None, Parts(x * 2)), lambda p: p.hidden + p.inner.hidden),
    "a mask": (lambda x: Parts(x, x > 0), lambda p: p.hidden * p.mask),
    "half": (lambda x: (x.half(), x.bfloat16()), lambda x, y: x.float() + y.float()),
    "complex": (lambda x: torch.view_as_complex(x.reshape(-1, 2, 2)), lambda x: torch.view_as_real(x).flatten(1)),
    "conjugate": (lambda x: torch.view_as_complex(x.reshape(-1, 2, 2)).conj(), lambda x: torch.cat((x.real, x.imag), 1)),
    "double": (lambda x: x.double(), lambda x: x.float()),
    "eight bits": (lambda x: (x, x.detach().to(torch.float8_e4m3fn)), lambda x, y: x + y.float()),
    "a scalar": (lambda x: (x, x.sum()), lambda x, s: x * s),
    "no element": (lambda x: (x, x[:0]), lambda x, y: x + y.sum()),
    "a gradient for part": (lambda x: (x.detach(), x[:, :1], torch.arange(len(x))), lambda x, y, i: x + y + i[:, None]),
    "no gradient": (cut(torch.tanh), same),
    "unused": (lambda x: (x, torch.tanh(x)), lambda x, y: x),
    "expanded": (lambda x: x[:, :1].expand(-1, WIDTH), same),
    "transposed": (lambda x: x.t(), lambda x: x.t()),
}  # fmt: skip


def modules_for(kind: str, count: int) -> list[nn.Module]:
    """Enters, the odd one, what takes it, then linear ones."""
    middle, takes = MIDDLES[kind]
    made: list[nn.Module] = [Enters(), Lets(middle), Leaves(takes)]
    return seeded(*made, *(Leaves() for _ in range(count - 3)))


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return numbers(ROWS, WIDTH), numbers(ROWS, WIDTH, seed=2)


def run(transport: Transport, modules: Sequence[nn.Module], schedule: Schedule, steps: int) -> None:
    executor = build(transport, modules, schedule)
    for _ in range(steps):
        step(executor, *batch())


def plain(modules: Sequence[nn.Module], steps: int) -> list[torch.Tensor | None]:
    x, y = batch()
    for _ in range(steps):
        for part, target in zip(x.tensor_split(MICROBATCHES), y.tensor_split(MICROBATCHES), strict=True):
            value: Any = part
            for module in modules:
                value = module(*value) if type(value) is tuple else module(value)
            (functional.mse_loss(value, target) * (len(part) / ROWS)).backward()
    return [parameter.grad for module in modules for parameter in module.parameters()]


def check(found: Sequence[torch.Tensor | None], expected: Sequence[torch.Tensor | None], name: str) -> None:
    for mine, right in zip(found, expected, strict=True):
        if right is None:
            assert mine is None or not mine.any(), name
        else:
            # Some schedules run backwards of the last microbatches first, so sums of five are rounded otherwise.
            torch.testing.assert_close(mine, right, rtol=1e-5, atol=1e-7, msg=lambda m: f"{name}: {m}")


@pytest.mark.parametrize("number", range(len(MIDDLES)), ids=list(MIDDLES))
def test_a_stage_without_parameters_in_the_middle(threads: Threads, number: int) -> None:
    """Its input, views of it, None, any dtype, with and without gradient; on three ranks, over three schedules each."""
    kind = list(MIDDLES)[number]
    for name in ("zb_h1", "zbv", list(SCHEDULES)[number % len(SCHEDULES)]):
        schedule = SCHEDULES[name](3, MICROBATCHES)
        modules, model = (modules_for(kind, schedule.placement.num_stages) for _ in range(2))
        threads(run, 3, modules, schedule, 2)
        found = [parameter.grad for module in modules for parameter in module.parameters()]
        check(found, plain(model, 2), schedule.name)


def on_five_ranks() -> dict[str, Any]:
    """By schedule and stage, gradients; ranks that torch.distributed carries."""
    found: dict[str, Any] = {}
    for name in ("1f1b", "interleaved", "interleaved_zb", "dualpipe_v"):
        transport = C10dTransport()
        schedule = SCHEDULES[name](5, MICROBATCHES)
        modules = modules_for("a scalar", schedule.placement.num_stages)
        run(transport, modules, schedule, 2)
        own = schedule.placement.stages_of(transport.rank)
        found[name] = {index: [parameter.grad for parameter in modules[index].parameters()] for index in own}
        transport.close()
    return found


def test_five_ranks(workers: WorkerPool) -> None:
    results = workers.run(on_five_ranks, 5, deadline=60)
    for name in results[0]:
        stages = {index: grads for result in results for index, grads in result[name].items()}
        expected = plain(modules_for("a scalar", len(stages)), 2)
        check([grad for index in sorted(stages) for grad in stages[index]], expected, name)


def ends_between_steps(*, torchs: bool) -> tuple[str, float]:
    """Rank 1 of three is gone after the first step; how the others' second step ends, and after how many seconds."""
    transport = C10dTransport()
    stage = PipelineStage(Leaves(), transport.rank, 3, "cpu", transport=transport)
    make = (
        (lambda: pipelining.Schedule1F1B(stage, 5, functional.mse_loss))
        if torchs
        else (lambda: Executor(stage, one_f_one_b(3, 5), functional.mse_loss, transport=transport))
    )
    runner: Any = make()
    x = torch.randn(5, WIDTH)

    def go(times: int) -> None:
        for _ in range(times):
            runner.step(*((x,) if stage.is_first else ()), target=x if stage.is_last else None)

    go(1)
    if transport.rank == 1:
        os._exit(3)
    start = time.monotonic()
    with pytest.raises(TransportError) as failure:
        go(2)
    return f"{failure.type.__name__}: {failure.value}", time.monotonic() - start


@pytest.mark.parametrize("torchs", [False, True])
def test_p150_a_rank_that_ends_between_steps(workers: WorkerPool, *, torchs: bool) -> None:
    first, second, third = workers.outcomes(ends_between_steps, 3, torchs=torchs, deadline=60)
    assert second.exit_code == 3
    for outcome in (first, third):
        assert outcome.ok, outcome.describe()
        words, seconds = outcome.value
        assert seconds < 10, words
        assert words.startswith("PeerFailure: rank 1")


class Prompted(nn.Module):
    """Adds a prompt of its caller's."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, *, prompt: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x) * scale) + prompt


@pytest.mark.parametrize("make", [one_f_one_b, zb_h1, gpipe])
def test_a19_inputs_and_keyword_inputs_of_any_stage_may_require_grad(
    threads: Threads, make: Callable[[int, int], Schedule]
) -> None:
    """The batch, a prompt that is cut, and a scale for all microbatches: each gets the gradient that one process gives it."""
    x, y = batch()
    x.requires_grad_()

    def prompts() -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [
            (numbers(ROWS, WIDTH, seed=3 + n).requires_grad_(), numbers(1, WIDTH, seed=9 + n).requires_grad_())
            for n in range(3)
        ]

    def whole(transport: Transport, given: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        executor = build(transport, modules, make(3, 3))
        prompt, scale = given[transport.rank]
        step(executor, x, y, prompt=prompt, scale=scale)

    modules, given = seeded(*(Prompted() for _ in range(3))), prompts()
    threads(whole, 3, given)
    found = [x.grad, *(tensor.grad for pair in given for tensor in pair)]
    model, again = seeded(*(Prompted() for _ in range(3))), prompts()
    x.grad = None
    cuts = [prompt.tensor_split(3) for prompt, _ in again]
    for m, (part, target) in enumerate(zip(x.tensor_split(3), y.tensor_split(3), strict=True)):
        for module, pieces, (_, scale) in zip(model, cuts, again, strict=True):
            part = module(part, prompt=pieces[m], scale=scale)
        (functional.mse_loss(part, target) * (len(target) / ROWS)).backward(retain_graph=True)
    check(found, [x.grad, *(tensor.grad for pair in again for tensor in pair)], make.__name__)
    check(*([p.grad for module in row for p in module.parameters()] for row in (modules, model)), make.__name__)


@pytest.mark.filterwarnings("ignore:Complex modules are a new feature")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.complex64])
def test_models_of_any_dtype(threads: Threads, dtype: torch.dtype) -> None:
    """Microbatches of 3, 2 and 2 rows; equal to the last bit, since the order is the same."""
    x, y = (tensor.to(dtype) for tensor in batch())

    def loss(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (out - target).abs().square().mean()

    def whole(transport: Transport) -> None:
        step(build(transport, modules, one_f_one_b(3, 3), loss), x, y)

    modules, model = ([module.to(dtype) for module in seeded(*(Leaves() for _ in range(3)))] for _ in range(2))
    threads(whole, 3)
    for part, target in zip(x.tensor_split(3), y.tensor_split(3), strict=True):
        found = loss(nn.Sequential(*model)(part), target)
        found.backward(torch.tensor(len(part) / ROWS, dtype=found.dtype))
    for module, right in zip(modules, model, strict=True):
        assert all(torch.equal(p.grad, q.grad) for p, q in zip(module.parameters(), right.parameters(), strict=True))


def counts() -> list[float]:
    """What the second of two stages got of a buffer that the first returns and moves on."""

    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("count", torch.zeros(100_000))

        def forward(self, x: torch.Tensor, count: torch.Tensor | None = None) -> Any:
            if count is not None:
                time.sleep(0.02)
                got.append(count[0].item())
                return self.linear(x)
            with torch.no_grad():
                self.count += 1
            return self.linear(x), self.count

    got: list[float] = []
    transport = C10dTransport()
    stage = PipelineStage(Counts(), transport.rank, 2, "cpu")
    executor = Executor(stage, gpipe(2, 8), functional.mse_loss, transport=transport)
    step(executor, torch.ones(8, 4), torch.ones(8, 4))
    transport.close()
    return got


def test_a_buffer_that_is_returned_crosses_as_it_was_then(workers: WorkerPool) -> None:
    """Its memory itself was given to gloo, which reads it when the receiver is there: every microbatch got the last count."""
    assert workers.run(counts, 2)[1] == [1.0, 2, 3, 4, 5, 6, 7, 8]
