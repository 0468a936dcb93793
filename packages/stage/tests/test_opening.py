"""What ranks begin to receive before they hear what a step is to be, and what becomes of it where it is not as the last."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from stage_support import Threads, assert_like, build, grads_of, numbers, seeded, step
from torch import nn
from torch.nn import functional

from stepwell_meta.testing import WorkerPool
from stepwell_p2p import C10dTransport, OpKind, Transport, Wire
from stepwell_p2p.exceptions import PeerFailure
from stepwell_p2p.testing import RecordingTransport
from stepwell_stage.exceptions import StageUsageError
from stepwell_stage.schedules import BY_NAME, one_f_one_b

WIDTH = 4
SKIP = (Wire(0, 0, 1, 0), Wire(0, 1, 2, 1), Wire(1, 0, 2, 0))


class Two(nn.Linear):
    """Hands a value past the stage behind it too."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        return super().forward(x), x * 2


class Joins(nn.Linear):
    def forward(self, x: torch.Tensor, past: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x) + past


def changes(transport: Transport, name: str, order: str, *, skip: bool = False) -> Any:
    """Steps of 8 rows (t) and of 12 (T), an evaluation of 2 (e), and a batch that the first rank refuses (r)."""
    schedule = BY_NAME[name](transport.size, 4)
    modules = stages(schedule.placement.num_stages, skip=skip)
    executor = build(transport, modules, schedule, stage_options={"wires": SKIP} if skip else {})
    said = []
    for letter in order:
        rows = {"t": 8, "T": 12, "e": 2, "r": 2}[letter]
        x, y = numbers(rows, WIDTH, seed=rows), numbers(rows, WIDTH, seed=rows + 1)
        if letter == "e":
            executor.eval(*((x,) if executor.is_first else ()), target=y if executor.is_last else None)
        elif letter == "r":
            with pytest.raises(StageUsageError) as raised:
                step(executor, x, y)
            said.append(str(raised.value))
        else:
            step(executor, x, y)
    assert all("a batch of 2 cannot be cut into 4 microbatches" in one for one in said)
    return grads_of(executor)


def stages(count: int, *, skip: bool) -> list[nn.Module]:
    if skip:
        return seeded(Two(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), Joins(WIDTH, WIDTH))
    return seeded(*(nn.Linear(WIDTH, WIDTH) for _ in range(count)))


def in_one_process(count: int, order: str, *, skip: bool = False) -> list[nn.Module]:
    modules = stages(count, skip=skip)
    for letter in order:
        if letter in "tT":
            rows = 8 if letter == "t" else 12
            value, y = numbers(rows, WIDTH, seed=rows), numbers(rows, WIDTH, seed=rows + 1)
            if skip:
                value, past = modules[0](value)
                value = modules[2](modules[1](value), past)
            else:
                value = nn.Sequential(*modules)(value)
            functional.mse_loss(value, y).backward()
    return modules


ORDERS = ["ttTTt", "ttrtt", "rtrrT", "tetTe", "tTtrTet"]


@pytest.mark.parametrize("name", ["1f1b", "interleaved-1f1b", "zbv", "dualpipe-v"])
@pytest.mark.parametrize("order", ORDERS)
def test_any_step_may_be_another_than_the_last(threads: Threads, name: str, order: str) -> None:
    count = 3 if name == "1f1b" else 6
    assert_like(threads(changes, 3, name, order), in_one_process(count, order), torch.testing.assert_close)


@pytest.mark.parametrize("order", ORDERS)
def test_values_that_pass_a_stage(threads: Threads, order: str) -> None:
    """The last stage's first forward takes values of two ranks, and each of them must end what was begun."""
    found = threads(changes, 3, "1f1b", order, skip=True)
    assert_like(found, in_one_process(3, order, skip=True), torch.testing.assert_close)


def on_gloo(name: str, order: str) -> tuple[Any, list[str]]:
    transport = C10dTransport()
    found = changes(transport, name, order)
    left = [str(one.op) for one in transport.pending() if not one.op.kind.is_send]
    transport.close()
    return found, left


@pytest.mark.parametrize("name", ["1f1b", "interleaved-1f1b"])
def test_on_gloo_where_a_receive_is_never_taken_back(workers: WorkerPool, name: str) -> None:
    """One that stayed would get what comes under the same op in a later step, cut to its size."""
    order = "ttTrtteTT"
    found = workers.run(on_gloo, 3, name, order, deadline=60)
    assert all(left == [] for _, left in found)
    count = 3 if name == "1f1b" else 6
    assert_like([one for one, _ in found], in_one_process(count, order), torch.testing.assert_close)


def test_the_first_value_is_awaited_before_the_word_comes(threads: Threads) -> None:
    """Its receive began when the word was there, so that the value, sent at the same time, was a message and a half late."""

    def run(transport: Transport) -> list[list[str]]:
        recorder = RecordingTransport(transport)
        executor = build(recorder, stages(3, skip=False), one_f_one_b(3, 4))
        x, y, posts = numbers(8, WIDTH), numbers(8, WIDTH), []
        for _ in range(3):
            before = len(recorder.steps)
            step(executor, x, y)
            ops = [op for one in recorder.steps[before:] for op in getattr(one, "ops", ())]
            posts.append([op.microbatch for op in ops if op.kind is OpKind.RECV_F])
        return posts

    for first, second, third in threads(run, 3)[1:]:
        assert first[0] == -2  # the word
        assert second[:2] == third[:2] == [0, -2]
        assert sorted(second) == sorted(third) == [-2, 0, 1, 2, 3]


@contextlib.contextmanager
def interrupted(transport: Any, at: int) -> Iterator[None]:
    """Its wait for the word is interrupted, as by Ctrl-C."""
    post = transport.post

    def stop(batch: Any) -> Any:
        if batch and batch[0].op.microbatch == at:
            raise KeyboardInterrupt
        return post(batch)

    transport.post = stop
    try:
        yield
    finally:
        transport.post = post


@pytest.mark.parametrize("steps_before", [0, 2])
def test_an_interrupt_before_a_step_has_begun_ends_it_on_every_rank(threads: Threads, steps_before: int) -> None:
    """The others waited for a rank that was gone; and where it came back, it had lost the word, and waited too."""

    def run(transport: Transport) -> str:
        executor = build(transport, stages(3, skip=False), one_f_one_b(3, 4))
        x, y = numbers(8, WIDTH), numbers(8, WIDTH)

        def steps(count: int) -> None:
            for _ in range(count):
                step(executor, x, y)

        if transport.rank == 1:
            steps(steps_before)
            with interrupted(transport, -2), pytest.raises(KeyboardInterrupt):
                step(executor, x, y)
            with pytest.raises(StageUsageError) as failure:
                step(executor, x, y)
        else:
            with pytest.raises(PeerFailure) as failure:  # type: ignore[assignment]  # one may still be in the step before
                steps(steps_before + 1)
        return str(failure.value)

    assert all("KeyboardInterrupt on rank 1" in said for said in threads(run, 3, timeout=10.0))


class Interrupts(dict[str, torch.Tensor]):
    """While it is looked into, somebody presses Ctrl-C."""

    def keys(self) -> Any:
        raise KeyboardInterrupt


@pytest.mark.parametrize("where", ["first batch", "batch", "weights"])
def test_an_interrupt_while_a_batch_is_cut_ends_the_step_on_every_rank(threads: Threads, where: str) -> None:
    """Errors there were told to the others, an interrupt was not: they waited for the transport's timeout."""

    def weigh(target: torch.Tensor) -> float:
        raise KeyboardInterrupt

    at = {"first batch": 0, "batch": 1, "weights": 2}[where]

    def run(transport: Transport) -> str:
        options = {"loss_weights": weigh} if where == "weights" else {}
        executor = build(transport, stages(3, skip=False), one_f_one_b(3, 4), **options)
        kwargs = {"kwarg_mbs": [Interrupts()] * 4} if transport.rank == at and where != "weights" else {}
        with pytest.raises((KeyboardInterrupt, StageUsageError, PeerFailure)) as raised:
            step(executor, numbers(8, WIDTH), numbers(8, WIDTH), **kwargs)
        return raised.type.__name__ if transport.rank == at else str(raised.value)

    assert all("KeyboardInterrupt" in said for said in threads(run, 3, timeout=10.0))


@pytest.mark.parametrize("at", [0, 1])
def test_a_context_around_a_step_that_fails_ends_it_on_every_rank(threads: Threads, at: int) -> None:
    """The others waited for the word of a step that this rank had not begun."""

    @contextlib.contextmanager
    def fails() -> Iterator[None]:
        raise ValueError("not ready")
        yield

    def run(transport: Transport) -> str:
        executor = build(transport, stages(3, skip=False), one_f_one_b(3, 4))
        if transport.rank == at:
            executor.around_step.append(fails)
        with pytest.raises((ValueError, StageUsageError, PeerFailure)) as raised:
            step(executor, numbers(8, WIDTH), numbers(8, WIDTH))
        return str(raised.value)

    assert all("not ready" in said for said in threads(run, 3, timeout=10.0))
