"""What a rank holds while it runs a plan, and after a step that failed."""

from __future__ import annotations

import copy
import gc
import itertools
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from stepwell_meta.testing import WorkerPool
from stepwell_p2p import C10dTransport, Transport
from stepwell_p2p.exceptions import PeerFailure
from stepwell_stage import Executor, PipelineStage
from stepwell_stage.exceptions import StageExecutionError
from stepwell_stage.run import _run
from stepwell_stage.schedules import one_f_one_b, zb_h1

Threads = Callable[..., list[Any]]
WIDTH = 1 << 15  # a value of 128 KiB, which is large enough for its memory to be kept


class Scales(nn.Module):
    """Writes to what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((), 1.25))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.add_(1).relu_() * self.scale


def many_microbatches(count: int) -> tuple[torch.Tensor, int, int]:
    transport = C10dTransport()
    module = Scales()
    executor = Executor(
        PipelineStage(module, transport.rank, 4, "cpu"), one_f_one_b(4, count), functional.mse_loss, transport=transport
    )
    x = torch.linspace(-2, 2, count)[:, None].expand(count, WIDTH).contiguous()
    parts = [(part.clone(),) for part in x.split(1)] if executor.is_first else None
    executor.step(arg_mbs=parts, target=x if executor.is_last else None, return_outputs=False)
    found = transport.buffers.allocated, transport.buffers.in_flight
    transport.close()
    assert module.scale.grad is not None
    return module.scale.grad, *found


def test_p135_64_microbatches_take_as_many_receive_buffers_as_are_in_flight(workers: WorkerPool) -> None:
    """Under 1F1B, through stages that work in place: gradients are those of one process, bit by bit."""
    count = 64
    results = workers.run(many_microbatches, 4, count)
    layers = nn.Sequential(*(Scales() for _ in range(4)))
    x = torch.linspace(-2, 2, count)[:, None].expand(count, WIDTH).contiguous()
    for part in x.split(1):
        (functional.mse_loss(layers(part.clone()), part) / count).backward()
    for rank, (grad, allocated, in_flight) in enumerate(results):
        assert torch.equal(grad, layers[rank].scale.grad)
        # Values live from their receive, two actions ahead, to their backward; gradients until they are used.
        values, gradients = (4 - rank) + 1 if rank > 0 else 0, 3 if rank < 3 else 0
        assert 0 < allocated <= values + gradients
        assert in_flight == 0


class Fails(nn.Module):
    """Remembers weakly what went through it, and raises in one call."""

    def __init__(self, at_call: int) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.at_call = at_call
        self.seen: list[weakref.ref[torch.Tensor]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(self.seen) == 2 * self.at_call:
            raise ZeroDivisionError("the user's own mistake")
        y = self.linear(x)
        self.seen += [weakref.ref(x), weakref.ref(y)]
        return y


def failed_step(transport: Transport, name: str) -> tuple[int, int]:
    """How many tensors the module saw in the step that failed, and how many of them are alive."""
    module = Fails(4 if transport.rank == 1 else -1)
    make = {"1f1b": one_f_one_b, "zb-h1": zb_h1}[name]
    executor = Executor(
        PipelineStage(module, transport.rank, 4, "cpu"), make(4, 8), functional.mse_loss, transport=transport
    )
    x = torch.ones(8, 4)
    inputs, target = ((x,) if executor.is_first else ()), (x if executor.is_last else None)
    gc.disable()  # no cycles: what is not needed goes at once
    try:
        executor.step(*inputs, target=target)
    except (PeerFailure, StageExecutionError):
        pass  # an error that is kept keeps its frames, and with them the module's variables
    finally:
        alive = sum(reference() is not None for reference in module.seen)
        gc.enable()
    return len(module.seen), alive


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_a_failed_step_keeps_no_activation(threads: Threads, workers: WorkerPool, name: str) -> None:
    def on_gloo() -> tuple[int, int]:
        transport = C10dTransport()
        try:
            found = failed_step(transport, name)
            deadline = time.monotonic() + 5
            while transport.pending() and time.monotonic() < deadline:  # messages go when the news has come
                time.sleep(0.02)
            assert transport.pending() == ()
            return found
        finally:
            transport.close()

    for found in (threads(failed_step, 4, name), workers.run(on_gloo, 4)):
        assert all(seen > 0 for seen, _ in found)
        assert [alive for _, alive in found] == [0] * 4


def test_ever_other_ways_of_cutting_leave_little_behind(monkeypatch: pytest.MonkeyPatch, threads: Threads) -> None:
    """Which microbatch is the first of its sizes was kept for every way in which sizes had come together, and never let go."""
    monkeypatch.setattr(_run, "_MOST_FIRSTS", 8)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))

    def run(transport: Transport) -> int:
        executor = Executor(
            PipelineStage(model[transport.rank], transport.rank, 2, "cpu"),
            one_f_one_b(2, 4),
            functional.mse_loss,
            transport=transport,
        )
        for sizes in itertools.product((1, 2), repeat=4):
            parts = torch.ones(sum(sizes), 2).split(sizes)
            inputs = [(part,) for part in parts] if executor.is_first else None
            executor.step(arg_mbs=inputs, target_mbs=None if executor.is_first else parts)
        return len(executor._train._first)

    assert max(threads(run, 2)) <= 8
    alone = copy.deepcopy(model)
    alone.zero_grad()
    for sizes in itertools.product((1, 2), repeat=4):
        for part in torch.ones(sum(sizes), 2).split(sizes):
            (functional.mse_loss(alone(part), part) * len(part) / sum(sizes)).backward()
    torch.testing.assert_close([p.grad for p in model.parameters()], [p.grad for p in alone.parameters()])
