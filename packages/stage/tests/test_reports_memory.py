"""Reports of users about memory: what lives how long, and what piles up, each with the right behaviour."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import pytest
import torch
from stage_support import Threads, build, numbers, seeded
from torch import nn

from stepwell_p2p import Handle, Op, Recv, Rules, Send, Transport
from stepwell_p2p.testing import RecordingTransport
from stepwell_stage import Executor, Schedule, lower, prove
from stepwell_stage.schedules import BY_NAME, gpipe, one_f_one_b, zb_h1

WIDTH = 4


class Layer(nn.Module):
    """Notes how many of its outputs' graphs are alive."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.alive: list[weakref.ref[Any]] = []
        self.peak = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.linear(x))
        assert h.grad_fn is not None
        self.alive = [reference for reference in self.alive if reference() is not None]
        self.alive.append(weakref.ref(h.grad_fn.metadata.setdefault("mark", Mark())))
        self.peak = max(self.peak, len(self.alive))
        return self.linear(h)


class Mark:
    """Lives as long as the graph that holds it."""


def step(executor: Executor, x: torch.Tensor) -> None:
    inputs, target = ((x,) if executor.is_first else ()), (x if executor.is_last else None)
    executor.step(*inputs, target=target, return_outputs=False)


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Without the collector of cycles, what lives shows who holds it."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class Counting(RecordingTransport):
    """Counts the received tensors that are alive, activations and gradients apart."""

    def __init__(self, inner: Transport) -> None:
        super().__init__(inner)
        self.received: dict[bool, list[weakref.ref[Any]]] = {True: [], False: []}
        self.peaks = {True: 0, False: 0}

    def post(self, batch: Sequence[Send | Recv]) -> Handle:
        # Tensors are not handed over: what the other rank keeps of its own until it has sent it is another matter.
        copies = [attrs.evolve(item, owned=False) if isinstance(item, Send) else item for item in batch]
        handle = super().post(copies)
        receives = [item.op for item in batch if isinstance(item, Recv) and item.op.microbatch >= 0]
        return _Counted(self, handle, receives) if receives else handle

    def note(self, op: Op, tensor: torch.Tensor) -> None:
        if tensor.dtype == torch.float32:  # no header
            forward = op.kind.name == "RECV_F"
            alive = [reference for reference in self.received[forward] if reference() is not None]
            self.received[forward] = [*alive, weakref.ref(tensor)]
            self.peaks[forward] = max(self.peaks[forward], len(self.received[forward]))

    @property
    def left(self) -> int:
        return sum(reference() is not None for received in self.received.values() for reference in received)


class _Counted:
    def __init__(self, counter: Counting, handle: Handle, ops: Sequence[Op]) -> None:
        self._counter, self._handle, self._ops = counter, handle, ops

    def wait(self) -> tuple[torch.Tensor, ...]:
        tensors = self._handle.wait()
        for op, tensor in zip(self._ops, tensors, strict=True):
            self._counter.note(op, tensor)
        return tensors


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_p135_p136_received_values_live_from_their_forward_to_their_backward(threads: Threads, name: str) -> None:
    """As many as the schedule has in flight, whatever M; none between steps; gradients likewise."""
    peaks = {}
    for microbatches in (8, 16):
        schedule = BY_NAME[name](2, microbatches)
        count = schedule.placement.num_stages
        bounds = prove(lower(schedule), Rules(tagged=True, rendezvous=False)).peak_activations

        def run(transport: Transport, schedule: Schedule = schedule, count: int = count) -> Any:
            counter = Counting(transport)
            executor = build(counter, seeded(*(Layer() for _ in range(count))), schedule)
            x = numbers(schedule.num_microbatches, WIDTH)
            for _ in range(2):
                step(executor, x)
            return counter.peaks[True], counter.peaks[False], counter.left

        results = threads(run, 2)
        peaks[microbatches] = results
        for (activations, gradients, left), bound in zip(results, bounds, strict=True):
            assert activations <= bound + 1, name  # the one that has just come
            assert gradients <= 2, name
            assert left == 0, name
    if name not in ("gpipe", "looped-bfs"):  # these hold all microbatches, by their nature
        assert peaks[8] == peaks[16]


class Passes(nn.Module):
    """Makes something of its input, in evaluation as in training."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zbv"])
def test_p135_evaluation_holds_one_microbatch_at_a_time(threads: Threads, name: str) -> None:
    schedule = BY_NAME[name](2, 12)
    count = schedule.placement.num_stages

    def run(transport: Transport) -> tuple[int, int]:
        counter = Counting(transport)
        executor = build(counter, seeded(*(Passes() for _ in range(count))), schedule)
        for _ in range(2):
            executor.eval(*((numbers(12, WIDTH),) if executor.is_first else ()), return_outputs=False)
        return counter.peaks[True], counter.left

    for peak, left in threads(run, 2):
        assert peak <= 2
        assert left == 0


@pytest.mark.usefixtures("no_collector")
def test_p136_the_peak_of_1f1b_does_not_depend_on_m_that_of_gpipe_does(threads: Threads) -> None:
    def run(transport: Transport, schedule: Schedule) -> int:
        modules = seeded(*(Layer() for _ in range(3)))
        executor = build(transport, modules, schedule)
        for _ in range(2):
            step(executor, numbers(schedule.num_microbatches, WIDTH))
        return modules[transport.rank].peak

    for microbatches in (6, 12):
        assert threads(run, 3, one_f_one_b(3, microbatches)) == [3, 2, 1]
        assert threads(run, 3, gpipe(3, microbatches)) == [microbatches] * 3


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("make", [one_f_one_b, zb_h1])
def test_p138_the_gradient_of_an_input_goes_when_it_is_sent(threads: Threads, make: Any) -> None:
    class Watches(RecordingTransport):
        """Counts the gradients that were sent and are still there when the next one is."""

        def __init__(self, inner: Transport) -> None:
            super().__init__(inner)
            self.sent: list[weakref.ref[Any]] = []
            self.peak = 0

        def post(self, batch: Sequence[Send | Recv]) -> Handle:
            copies = []
            for item in batch:
                if isinstance(item, Send) and item.op.kind.name == "SEND_B" and item.op.microbatch >= 0:
                    self.sent = [one for one in self.sent if one() is not None] + [weakref.ref(item.tensor)]
                    self.peak = max(self.peak, len(self.sent))
                    item = attrs.evolve(item, tensor=item.tensor.clone())  # what the other rank keeps is its own matter
                copies.append(item)
            return super().post(copies)

    def run(transport: Transport) -> tuple[int, int]:
        watches = Watches(transport)
        executor = build(watches, seeded(*(Layer() for _ in range(3))), make(3, 9))
        for _ in range(2):
            step(executor, numbers(9, WIDTH))
        return watches.peak, sum(one() is not None for one in watches.sent)

    results = threads(run, 3)
    assert results[0] == (0, 0)  # nothing to send
    assert results[1:] == [(1, 0)] * 2  # each is gone when the next one goes


@pytest.mark.parametrize("make", [one_f_one_b, zb_h1])
def test_p139_hooks_on_what_was_received_do_not_pile_up(threads: Threads, make: Any) -> None:
    """The received tensor is another object each time: a hook that a module puts on its input fires for that microbatch alone."""

    class Hooked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)
            self.fired: list[int] = []
            self.number = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.number += 1
            if x.requires_grad:
                x.register_hook(lambda _, number=self.number: self.fired.append(number))
            return self.linear(x)

    def run(transport: Transport) -> list[list[int]]:
        modules = seeded(Hooked(), Hooked())
        executor = build(transport, modules, make(2, 3))
        found = []
        for _ in range(5):
            module: Any = modules[transport.rank]
            module.fired.clear()
            step(executor, numbers(6, WIDTH))
            found.append(sorted(module.fired))
        return found

    first, second = threads(run, 2)
    assert first == [[]] * 5
    assert second == [[3 * number + m for m in (1, 2, 3)] for number in range(5)]


def resident() -> int:
    """Bytes that this process has in memory."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * 4096


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize(
    ("name", "options", "steps"), [("1f1b", {}, 200), ("zbv", {}, 60), ("1f1b", {"shapes": "dynamic"}, 60)]
)
def test_p140_p141_many_steps_leave_nothing_behind(
    threads: Threads, name: str, options: dict[str, Any], steps: int
) -> None:
    """With the collector of cycles off: no tensor, no graph and no memory is left of a step, with evaluations between."""
    schedule = BY_NAME[name](2, 2)
    count = schedule.placement.num_stages

    together = threading.Barrier(2)

    def run(transport: Transport) -> Any:
        executor = build(transport, seeded(*(Passes() for _ in range(count))), schedule, stage_options=options)
        found = []
        for number in range(steps):
            step(executor, numbers(4 + number % 3, WIDTH))
            if number % 10 == 0:
                executor.eval(*((numbers(3, WIDTH),) if executor.is_first else ()))
            if number in (steps // 3 + 1, steps - 1):
                together.wait(20)  # neither rank is within a step now
                things = sum(type(thing) in (torch.Tensor, nn.Parameter) for thing in gc.get_objects())
                found.append((things, resident()))
                together.wait(20)
        return found

    for (before, memory), (after, more) in threads(run, 2):
        assert after == before
        assert more - memory < 16 * 2**20
