"""Random numbers within checkpoints, on ranks that are threads."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from stage_support import Threads, assert_like, build, grads_of, numbers, seeded, step
from torch import nn
from torch.distributed._composable.checkpoint_activation import checkpoint as checkpoint_by_hooks
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn import functional
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from stepwell_meta.testing import WorkerPool
from stepwell_p2p import C10dTransport, Transport
from stepwell_stage.exceptions import StageUsageError
from stepwell_stage.run._draws import Draws
from stepwell_stage.schedules import gpipe, one_f_one_b

WIDTH, ROWS, M = 6, 12, 4
REFUSED = r"stage 1( or its loss)? draws random numbers \(torch\.ops\.aten\..*within a checkpoint.*torchrun"


class Block(nn.Module):
    """A layer, and what is done with its output, in a checkpoint of some kind."""

    def __init__(self, inner: Callable[[torch.Tensor], torch.Tensor], how: Callable[..., Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.inner = inner
        self.how = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.how(lambda y: self.inner(self.layer(y)), x)  # type: ignore[no-any-return]


def by_hooks(function: Callable[..., Any], x: torch.Tensor) -> Any:
    part = nn.Identity()
    part.forward = function  # type: ignore[method-assign]
    return checkpoint_by_hooks(part)(x)


def selective(function: Callable[..., Any], x: torch.Tensor) -> Any:
    def contexts() -> Any:
        return create_selective_checkpoint_contexts([torch.ops.aten.tanh.default])

    return checkpoint(function, x, use_reentrant=False, context_fn=contexts)


def wrapped(function: Callable[..., Any], x: torch.Tensor) -> Any:
    part = nn.Identity()
    part.forward = function  # type: ignore[method-assign]
    return checkpoint_wrapper(part)(x)


def attention(dropout: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def attend(x: torch.Tensor) -> torch.Tensor:
        heads = x.view(1, 1, -1, WIDTH)
        return functional.scaled_dot_product_attention(heads, heads, heads, dropout_p=dropout).view(-1, WIDTH)

    return attend


def drop(x: torch.Tensor) -> torch.Tensor:
    return functional.dropout(x, 0.5)


KINDS: dict[str, Callable[..., Any]] = {
    "as a graph": lambda f, x: checkpoint(f, x, use_reentrant=False),
    "reentrant": lambda f, x: checkpoint(f, x, use_reentrant=True),
    "by hooks": by_hooks,
    "selective": selective,
    "wrapped": wrapped,
}
DRAWN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "dropout": drop,
    "noise": lambda x: x + torch.randn_like(x),
    "attention": attention(0.5),
    "gumbel": lambda x: functional.gumbel_softmax(x),
    "in place": lambda x: x * torch.empty_like(x).uniform_(),
}
NOT_DRAWN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "attention without dropout": attention(0.0),
    "no dropout": lambda x: functional.dropout(x, 0.0),
    "evaluation": lambda x: functional.dropout(x, 0.5, training=False),
}


def modules_of(inner: Callable[[torch.Tensor], torch.Tensor], how: Callable[..., Any]) -> list[nn.Module]:
    return seeded(nn.Linear(WIDTH, WIDTH), Block(inner, how), nn.Linear(WIDTH, WIDTH))


def train(transport: Transport, make: Callable[[], list[nn.Module]], steps: int = 1) -> dict[int, list[Any]]:
    executor = build(transport, make(), one_f_one_b(transport.size, M))
    for _ in range(steps):
        step(executor, numbers(ROWS, WIDTH), numbers(ROWS, WIDTH, seed=2))
    return grads_of(executor)


@pytest.mark.parametrize("how", KINDS.values(), ids=KINDS)
def test_dropout_in_a_checkpoint_of_any_kind_is_refused_on_threads(threads: Threads, how: Callable[..., Any]) -> None:
    """Masks that a checkpoint drew again were others where ranks are threads: gradients were wrong, and nothing said so."""
    with pytest.raises(StageUsageError, match=REFUSED):
        threads(train, 3, lambda: modules_of(drop, how))


@pytest.mark.parametrize("inner", DRAWN.values(), ids=DRAWN)
def test_whatever_is_drawn_is_seen(threads: Threads, inner: Callable[[torch.Tensor], torch.Tensor]) -> None:
    with pytest.raises(StageUsageError, match=REFUSED):
        threads(train, 3, lambda: modules_of(inner, KINDS["as a graph"]))


@pytest.mark.parametrize("how", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("inner", NOT_DRAWN.values(), ids=NOT_DRAWN)
def test_checkpoints_without_random_numbers_run(
    threads: Threads, inner: Callable[[torch.Tensor], torch.Tensor], how: Callable[..., Any]
) -> None:
    x, y = numbers(ROWS, WIDTH), numbers(ROWS, WIDTH, seed=2)
    modules = modules_of(inner, how)
    for part, target in zip(x.tensor_split(M), y.tensor_split(M), strict=True):
        (functional.mse_loss(nn.Sequential(*modules)(part), target) / M).backward()
    assert_like(threads(train, 3, lambda: modules_of(inner, how)), modules)


def test_dropout_beside_a_checkpoint_runs_and_a_generator_of_ones_own_is_not_the_process_s(threads: Threads) -> None:
    def inner(x: torch.Tensor) -> torch.Tensor:
        return x * torch.rand(x.shape, generator=torch.Generator().manual_seed(3))

    def make() -> list[nn.Module]:
        modules = modules_of(inner, KINDS["as a graph"])
        modules[1] = nn.Sequential(nn.Dropout(0.5), modules[1], nn.Dropout(0.5))
        return modules

    threads(train, 3, make, 2)


def test_what_only_a_later_step_or_microbatch_draws_is_seen(threads: Threads) -> None:
    """Dropout starts when a module is put in training mode, and a model may drop a layer in one microbatch and not in others."""

    def later(transport: Transport, *, only_in_training: bool) -> None:
        block = Block(nn.Dropout(0.5), lambda f, x: ways[block.training](f, x))
        ways = [(lambda f, x: f(x)) if only_in_training else KINDS["as a graph"], KINDS["as a graph"]]
        executor = build(transport, seeded(nn.Linear(WIDTH, WIDTH), block.eval()), gpipe(2, M))
        step(executor, numbers(ROWS, WIDTH), numbers(ROWS, WIDTH))
        block.train()
        step(executor, numbers(ROWS, WIDTH), numbers(ROWS, WIDTH))

    for only in (False, True):
        with pytest.raises(StageUsageError, match=REFUSED):
            threads(functools.partial(later, only_in_training=only), 2)

    def only_long(transport: Transport) -> None:
        block = Block(
            lambda x: drop(x) if len(x) > ROWS // M else x,
            lambda f, x: KINDS["as a graph"](f, x) if len(x) > 3 else f(x),
        )
        executor = build(transport, seeded(nn.Linear(WIDTH, WIDTH), block), gpipe(2, M))
        step(executor, numbers(ROWS, WIDTH), numbers(ROWS, WIDTH))
        step(executor, numbers(2 * ROWS, WIDTH), numbers(2 * ROWS, WIDTH))

    with pytest.raises(StageUsageError, match=REFUSED):
        threads(only_long, 2)

    calls = []

    def sometimes(x: torch.Tensor) -> torch.Tensor:
        calls.append(torch.rand(()))
        return KINDS["as a graph"](drop, x) if len(calls) == M else x  # type: ignore[no-any-return]

    with pytest.raises(StageUsageError, match=REFUSED):
        threads(train, 3, lambda: modules_of(sometimes, lambda f, x: f(x)))


@pytest.mark.parametrize(
    ("inner", "how", "looks"),
    [
        (torch.tanh, lambda f, x: f(x), [1, 0, 0, 1, 0]),
        (drop, lambda f, x: f(x), [M, 1, 1, M, 1]),
        (torch.tanh, KINDS["as a graph"], [1, 1, 1, 1, 1]),
    ],
    ids=["nothing", "dropout", "a checkpoint"],
)
def test_forwards_are_looked_at_where_that_may_show_something(
    threads: Threads, monkeypatch: pytest.MonkeyPatch, inner: Any, how: Any, looks: list[int]
) -> None:
    """Each look takes longer than a small stage."""
    seen: list[int] = []
    enter = Draws.__enter__

    def counting(self: Draws) -> Draws:
        seen.append(self._stage.stage_index)
        return enter(self)

    monkeypatch.setattr(Draws, "__enter__", counting)

    def steps(transport: Transport) -> list[int]:
        executor = build(transport, modules_of(inner, how), one_f_one_b(3, M))
        counts = []
        for rows in (ROWS, ROWS, ROWS, 2 * ROWS, ROWS):
            before = seen.count(1)
            step(executor, numbers(rows, WIDTH), numbers(rows, WIDTH))
            counts.append(seen.count(1) - before)
        return counts

    assert threads(steps, 3)[1] == looks


def under_no_grad(function: Callable[..., Any], x: torch.Tensor) -> Any:
    with torch.no_grad():
        taught = KINDS["as a graph"](function, x)
    return x + taught


def without_grad_within(function: Callable[..., Any], x: torch.Tensor) -> Any:
    def inner(y: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            mask = drop(torch.ones_like(y))
        return function(y) * mask

    return KINDS["as a graph"](inner, x)


def with_hooks_within(function: Callable[..., Any], x: torch.Tensor) -> Any:
    def inner(y: torch.Tensor) -> Any:
        with torch.autograd.graph.save_on_cpu():
            return function(y)

    return KINDS["as a graph"](inner, x)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True:UserWarning")  # of the reentrant one
def test_checkpoints_that_never_run_again_may_draw(threads: Threads) -> None:
    """Dropout in a checkpoint of a teacher under no_grad, or of a frozen first stage, was refused: it is drawn once."""
    threads(train, 3, lambda: modules_of(drop, under_no_grad), 2)

    def frozen(how: str) -> list[nn.Module]:
        first = Block(drop, KINDS[how]).requires_grad_(False)
        return seeded(first, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))

    for how in KINDS:
        threads(train, 3, functools.partial(frozen, how), 2)


@pytest.mark.parametrize("how", [without_grad_within, with_hooks_within])
def test_what_is_drawn_without_gradients_in_a_checkpoint_with_them_is_seen(
    threads: Threads, how: Callable[..., Any]
) -> None:
    with pytest.raises(StageUsageError, match=REFUSED):
        threads(train, 3, lambda: modules_of(drop, how))


@pytest.mark.parametrize("how", KINDS.values(), ids=KINDS)
def test_frozen_stages_through_which_gradients_flow_are_seen(threads: Threads, how: Callable[..., Any]) -> None:
    def make() -> list[nn.Module]:
        modules = modules_of(drop, how)
        modules[1].requires_grad_(False)
        return modules

    with pytest.raises(StageUsageError, match=REFUSED):
        threads(train, 3, make)


def test_what_requires_grad_after_it_was_drawn_is_seen(threads: Threads) -> None:
    class Shift(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            def shifted(y: torch.Tensor) -> torch.Tensor:
                return drop(y) * torch.ones(WIDTH, requires_grad=True)

            return KINDS["as a graph"](shifted, x)  # type: ignore[no-any-return]

    with pytest.raises(StageUsageError, match="stage 0 draws random numbers"):
        threads(train, 2, lambda: seeded(Shift(), nn.Linear(WIDTH, WIDTH)))


def test_a_checkpoint_switched_on_between_steps_is_seen(threads: Threads) -> None:
    """After gradient_checkpointing_enable() gradients were those of other masks: only the first step was looked at."""

    def train_on(transport: Transport) -> None:
        ways = ["plain"]
        ways_of: dict[str, Callable[..., Any]] = {"plain": lambda f, x: f(x), "checkpoint": KINDS["as a graph"]}
        executor = build(transport, modules_of(drop, lambda f, x: ways_of[ways[-1]](f, x)), gpipe(3, M))
        for way in ("plain", "plain", "checkpoint"):
            ways.append(way)
            step(executor, numbers(ROWS, WIDTH), numbers(ROWS, WIDTH))

    with pytest.raises(StageUsageError, match=REFUSED):
        threads(train_on, 3)


def test_a_loss_that_draws_in_a_checkpoint_is_named(threads: Threads) -> None:
    """The sentence said that the stage draws, where the loss did."""

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return functional.mse_loss(KINDS["as a graph"](drop, output), target)

    def train_with(transport: Transport) -> None:
        executor = build(transport, seeded(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)), gpipe(2, M), loss)
        step(executor, numbers(ROWS, WIDTH), numbers(ROWS, WIDTH))

    with pytest.raises(StageUsageError, match="stage 1 or its loss draws random numbers"):
        threads(train_with, 2)


def test_evaluation_and_one_rank_are_not_looked_at(threads: Threads) -> None:
    def evaluate(transport: Transport) -> torch.Tensor:
        executor = build(transport, modules_of(drop, KINDS["as a graph"]), gpipe(3, M))
        return executor.eval(*((numbers(ROWS, WIDTH),) if executor.is_first else ()))  # type: ignore[no-any-return]

    assert threads(evaluate, 3)[-1].shape == (ROWS, WIDTH)

    def whole() -> list[nn.Module]:
        return seeded(nn.Sequential(*modules_of(drop, KINDS["as a graph"])))

    threads(train, 1, whole)


def train_process() -> dict[int, list[Any]]:
    torch.manual_seed(5)
    return train(C10dTransport(), lambda: modules_of(drop, KINDS["as a graph"]))


def test_in_processes_dropout_in_a_checkpoint_is_right(workers: WorkerPool) -> None:
    results = workers.run(train_process, 3, deadline=60)
    torch.manual_seed(5)  # the middle rank draws nothing but its masks
    modules = modules_of(drop, lambda f, x: f(x))
    x, y = numbers(ROWS, WIDTH), numbers(ROWS, WIDTH, seed=2)
    for part, target in zip(x.tensor_split(M), y.tensor_split(M), strict=True):
        (functional.mse_loss(nn.Sequential(*modules)(part), target) / M).backward()
    assert_like(results, modules)


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
)  # torch.compile looks at its inputs
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_stages(threads: Threads, backend: str) -> None:
    """They run a checkpoint as it is, or set the generator back for each operator."""

    def make() -> list[nn.Module]:
        modules = modules_of(drop, KINDS["as a graph"])
        modules[1].compile(backend=backend)
        return modules

    with pytest.raises(StageUsageError, match=r"stage 1 draws random numbers.*torchrun"):
        threads(train, 3, make, timeout=100)
