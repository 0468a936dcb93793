"""EagerProgram: parts of a backward, and split schedules against the plain model."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from stepwell_meta.testing import WorkerPool
from stepwell_p2p import C10dTransport, Placement, Transport
from stepwell_stage import Action, EagerProgram, Executor, Kind, PipelineStage, Schedule, StageProgram
from stepwell_stage.exceptions import SplitBackwardWarning, StageUsageError
from stepwell_stage.run._program import is_reduced, is_sharded
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

Threads = Callable[..., list[Any]]
WIDTH, ROWS = 6, 8


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, w = ctx.saved_tensors
        return grad * w, (grad * x).sum((0, 1))


class Block(nn.Module):
    """A bit of everything: attention, a custom function, a chunked gate, a shared layer, a checkpoint, in-place changes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.gate = nn.Linear(WIDTH, 2 * WIDTH)
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.empty(WIDTH))
        self.unused = nn.Linear(1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm(x)
        x = x + self.attention(normed, normed, normed, need_weights=False)[0]
        left, right = self.gate(x).chunk(2, -1)
        x = self.shared(functional.silu(left) * Scale.apply(right, self.scale))
        return functional.leaky_relu(checkpoint(self.shared, x, use_reentrant=False), 0.5, inplace=True)


def build_layers(count: int = 8) -> list[nn.Module]:
    generator = torch.Generator().manual_seed(0)
    layers = [Block() for _ in range(count)]
    for layer in layers:
        for parameter in layer.parameters():
            nn.init.uniform_(parameter, -0.5, 0.5, generator=generator)
    return list(layers)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randn(ROWS, 3, WIDTH, generator=generator) for _ in range(2))  # type: ignore[return-value]


def part_of(layers: list[nn.Module], stage: int, count: int) -> nn.Module:
    return nn.Sequential(*layers[len(layers) * stage // count : len(layers) * (stage + 1) // count])


def grads_of(module: nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: parameter.grad for name, parameter in module.named_parameters()}


def plain(layers: list[nn.Module], microbatches: int) -> tuple[list[torch.Tensor], dict[str, torch.Tensor | None]]:
    model = nn.Sequential(*layers)
    losses = []
    for x, y in zip(*(t.tensor_split(microbatches) for t in batch()), strict=True):
        loss = functional.mse_loss(model(x), y)
        (loss * (len(x) / ROWS)).backward()
        losses.append(loss.detach())
    return losses, grads_of(model)


def run_stages(
    transport: Transport, schedule: Schedule, build: Callable[[], list[nn.Module]]
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor | None]]:
    """One step on one rank; gradients by their names in the plain model."""
    layers = build()
    count = schedule.placement.num_stages
    own = schedule.placement.stages_of(transport.rank)
    stages = [PipelineStage(part_of(layers, s, count), s, count, "cpu") for s in own]
    executor = Executor(stages, schedule, functional.mse_loss, transport=transport)
    x, y = batch()
    losses: list[torch.Tensor] = []
    executor.step(*((x,) if executor.is_first else ()), target=y if executor.is_last else None, losses=losses)
    found = {}
    for stage in stages:
        offset = len(layers) * stage.stage_index // count
        for name, grad in grads_of(stage.submodule).items():  # type: ignore[arg-type]
            number, rest = name.split(".", 1)
            found[f"{int(number) + offset}.{rest}"] = grad
    return losses, found


def assert_same(results: list[Any], expected: tuple[list[torch.Tensor], dict[str, torch.Tensor | None]]) -> None:
    losses = next(losses for losses, _ in results if losses)
    assert [loss.item() for loss in losses] == [loss.item() for loss in expected[0]]
    found = {name: grad for _, grads in results for name, grad in grads.items()}
    assert found.keys() == expected[1].keys()
    for name, grad in expected[1].items():
        assert (found[name] is None) == (grad is None), name
        if grad is not None:
            torch.testing.assert_close(found[name], grad, msg=lambda text, name=name: f"{name}: {text}")


SPLIT = [zb_h1, interleaved_zero_bubble, zbv, dualpipe_v]
WHOLE = [gpipe, one_f_one_b, interleaved_1f1b, looped_bfs]


@functools.cache
def plain_blocks(microbatches: int) -> tuple[list[torch.Tensor], dict[str, torch.Tensor | None]]:
    return plain(build_layers(), microbatches)


@pytest.mark.parametrize(("ranks", "counts"), [(1, (5,)), (2, (5,)), (4, (1, 5, 8))])
@pytest.mark.parametrize("make", SPLIT + WHOLE)
def test_p066_p089_p090_p091_p093_every_schedule_equals_the_plain_model_on_threads(
    threads: Threads, make: Callable[..., Schedule], ranks: int, counts: tuple[int, ...]
) -> None:
    """Also fewer microbatches than the schedule wants."""
    for microbatches in counts:
        schedule = make(ranks, microbatches)
        assert_same(threads(run_stages, ranks, schedule, build_layers), plain_blocks(microbatches))


def split_schedules_on_gloo() -> dict[str, Any]:
    found = {}
    for make in SPLIT:
        transport = C10dTransport()
        found[make.__name__] = run_stages(transport, make(transport.size, 5), build_layers)
        transport.close()
    return found


@pytest.mark.parametrize("ranks", [2, 4])
def test_split_schedules_equal_the_plain_model_on_gloo(workers: WorkerPool, ranks: int) -> None:
    results = workers.run(split_schedules_on_gloo, ranks, deadline=60)
    expected = plain_blocks(5)
    for make in SPLIT:
        assert_same([found[make.__name__] for found in results], expected)


def frozen(*which: int) -> Callable[[], list[nn.Module]]:
    def build() -> list[nn.Module]:
        layers = build_layers(4)
        for number in which:
            layers[number].requires_grad_(False)
        return layers

    return build


@pytest.mark.parametrize("which", [(0,), (0, 1), (1, 2), (3,), (0, 1, 2)])
@pytest.mark.parametrize("make", [one_f_one_b, zb_h1])
def test_p070_p071_frozen_stages(threads: Threads, make: Callable[..., Schedule], which: tuple[int, ...]) -> None:
    """First, middle, last; a stage behind frozen ones has nothing to do in I and all in W."""
    build = frozen(*which)
    assert_same(threads(run_stages, 4, make(4, 5), build), plain(build(), 5))


class Both(nn.Module):
    """Returns a value of its input and one of a parameter alone."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.p = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.empty(WIDTH))

    def forward(self, x: torch.Tensor, *before: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.linear(x) + sum(before), torch.tanh(self.p).expand(x.shape)


class First(nn.Module):
    def forward(self, pair: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return pair[0] * pair[1]


def both_step(transport: Transport) -> list[Any]:
    modules = nn.ModuleList([Both(), Both(), Both()])
    generator = torch.Generator().manual_seed(0)
    for parameter in modules.parameters():
        nn.init.uniform_(parameter, -0.5, 0.5, generator=generator)
    x, y = batch()
    if transport.size == 1:  # the plain model
        for part, target in zip(x.tensor_split(4), y.tensor_split(4), strict=True):
            values: tuple[torch.Tensor, ...] = (part,)
            for module in modules:
                values = module(*values)
            (functional.mse_loss(values[0] * values[1], target) / 4).backward()
        return [grads_of(module) for module in modules]
    stage = PipelineStage(modules[transport.rank], transport.rank, 3, "cpu")
    executor = Executor(
        stage, zb_h1(3, 4), lambda pair, y: functional.mse_loss(pair[0] * pair[1], y), transport=transport
    )
    executor.step(*((x,) if executor.is_first else ()), target=y if executor.is_last else None, return_outputs=False)
    return [grads_of(modules[transport.rank])]


def test_p075_a_parameter_whose_path_does_not_touch_the_input(threads: Threads) -> None:
    (expected,) = threads(both_step, 1)
    found = [grads for (grads,) in threads(both_step, 3)]
    for stage in range(3):
        for name, grad in expected[stage].items():
            torch.testing.assert_close(found[stage][name], grad)


def test_p098_gradients_go_to_the_microbatch_they_belong_to(threads: Threads) -> None:
    """Backwards one after the other, sends after them, W in reverse."""
    rows = [
        [Action(rank, Kind.F, m) for m in range(4)]
        + [Action(rank, Kind.I if m % 2 else Kind.B, m) for m in (2, 0, 3, 1)]
        + [Action(rank, Kind.W, m) for m in (1, 3)]
        for rank in range(3)
    ]
    schedule = Schedule("shuffled", Placement.loop(3, 3), 4, rows)
    assert_same(threads(run_stages, 3, schedule, build_layers), plain(build_layers(), 4))


class Reentrant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.linear, torch.tanh(x), use_reentrant=True)


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"
)  # torch.compile looks at its inputs
def test_p094_p101_p104_a_stage_whose_backward_cannot_be_split_says_so_once_and_is_right() -> None:
    """Its W is empty. Whole backwards, and a first stage, whose W is all of it, have nothing to say."""

    def compiled() -> nn.Module:
        return torch.compile(nn.Linear(WIDTH, WIDTH), backend="aot_eager")

    x = torch.randn(2, WIDTH, requires_grad=True)
    for make, words in ((Reentrant, "use_reentrant=False"), (compiled, "do not compile this stage")):
        module = make()
        program = EagerProgram(module)

        def forward(microbatch: int, value: torch.Tensor = x, program: EagerProgram = program) -> torch.Tensor:
            return program.forward(microbatch, [value], lambda received: (tuple(received), {}))

        (whole,) = program.backward(0, Kind.B, [forward(0).sum()], [None])
        expected = [parameter.grad.clone() for parameter in module.parameters()]
        module.zero_grad()
        with pytest.warns(SplitBackwardWarning, match=f"cannot be split, since its graph holds .*{words}"):
            (grad,) = program.backward(1, Kind.I, [forward(1).sum()], [None])
        program.backward(1, Kind.W, (), ())
        assert torch.equal(grad, whole)
        assert all(torch.equal(p.grad, right) for p, right in zip(module.parameters(), expected, strict=True))
        program.backward(2, Kind.I, [forward(2).sum()], [None])  # says no more


# dw_builder.


class LaterLinear(torch.autograd.Function):
    """A linear layer that leaves its weight's gradient in a list."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, later: list[Any]) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.later = later
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        ctx.later.append((grad, x.detach()))
        return grad @ weight, None, None


class Later(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(WIDTH, WIDTH))
        self.noted: list[Any] = []
        self.log: list[str] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(LaterLinear.apply(x, self.weight, self.noted))

    def build(self) -> Callable[..., None]:
        noted, self.noted[:] = list(self.noted), []
        self.log.append("build")

        def run() -> None:
            self.log.append("run")
            with torch.no_grad():
                for grad, x in noted:
                    part = grad.flatten(0, 1).t() @ x.flatten(0, 1)
                    self.weight.grad = part if self.weight.grad is None else self.weight.grad + part

        return run


def later_step(transport: Transport, schedule: Schedule | None) -> list[Any]:
    layers = [Later() for _ in range(2)]
    generator = torch.Generator().manual_seed(0)
    for layer in layers:
        nn.init.uniform_(layer.weight, -0.5, 0.5, generator=generator)
    x, y = batch()
    if schedule is None:
        for part, target in zip(x.tensor_split(3), y.tensor_split(3), strict=True):
            for layer in layers:
                part = torch.tanh(part @ layer.weight.t())
            (functional.mse_loss(part, target) * (len(part) / ROWS)).backward()
        return [layer.weight.grad for layer in layers]
    layer = layers[transport.rank]
    stage = PipelineStage(layer, transport.rank, 2, "cpu", dw_builder=layer.build)
    executor = Executor(stage, schedule, functional.mse_loss, transport=transport)
    executor.step(*((x,) if executor.is_first else ()), target=y if executor.is_last else None)
    return [layer.weight.grad, layer.log]


def test_a_callers_own_weight_step_runs_at_once_or_in_weight(threads: Threads) -> None:
    """A19, A20."""
    (expected,) = threads(later_step, 1, None)
    for make, log in ((one_f_one_b, ["build", "run"] * 3), (zb_h1, None)):
        results = threads(later_step, 2, make(2, 3))
        for (grad, found), wanted in zip(results, expected, strict=True):
            torch.testing.assert_close(grad, wanted)
            assert sorted(found) == ["build"] * 3 + ["run"] * 3
            assert log is None or found == log
    # The second rank of ZB-H1 lets its W lag one microbatch behind.
    assert found[:3] == ["build", "build", "run"]


def test_dw_builder_needs_a_module() -> None:
    with pytest.raises(StageUsageError, match="dw_builder is for modules"):
        PipelineStage(EagerProgram(nn.Linear(1, 1)), 0, 1, "cpu", dw_builder=lambda: lambda: None)


# The program by itself.


def test_weight_without_input_is_refused() -> None:
    """A20."""
    with pytest.raises(StageUsageError, match="W of microbatch 3 needs its I first"):
        EagerProgram(nn.Linear(1, 1)).backward(3, Kind.W, (), ())


def test_other_programs_are_told_of_everything() -> None:
    class Other:
        def forward(self, microbatch: int, received: Any, call: Any) -> Any: ...
        def backward(self, microbatch: int, kind: Kind, roots: Any, grads: Any) -> Any: ...
        def unshard(self) -> None: ...
        def reshard(self) -> None: ...
        def reduce_grads(self) -> None: ...

    other = Other()
    assert isinstance(other, StageProgram)
    assert is_sharded(other)
    assert is_reduced(other)
    plain_one = EagerProgram(nn.Linear(1, 1))
    assert not is_sharded(plain_one)
    assert not is_reduced(plain_one)
    plain_one.unshard()
    plain_one.reshard()
    plain_one.reduce_grads()


# Memory.


class Watched(nn.Module):
    """Counts the microbatches whose activations live."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Block()
        self.alive: list[weakref.ref[Any]] = []
        self.peak = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.inner(x)
        self.alive = [reference for reference in self.alive if reference() is not None]
        self.alive.append(weakref.ref(hidden.grad_fn.next_functions[0][0].metadata.setdefault("mark", Mark())))
        self.peak = max(self.peak, len(self.alive))
        return hidden * 2


class Mark:
    """Lives as long as the graph that holds it."""


@pytest.mark.parametrize(("make", "bounds"), [(zb_h1, [3, 3, 3]), (one_f_one_b, [3, 2, 1])])
def test_p096_p136_activations_live_from_forward_to_the_last_part_of_backward(
    threads: Threads, make: Callable[..., Schedule], bounds: list[int]
) -> None:
    """As many microbatches as the schedule bounds, and none after the step; with the collector off."""

    def steps(transport: Transport) -> tuple[int, int]:
        module = Watched()
        executor = Executor(
            PipelineStage(module, transport.rank, 3, "cpu"), make(3, 9), functional.mse_loss, transport=transport
        )
        x = torch.randn(9, 3, WIDTH)
        for _ in range(3):
            executor.step(*((x,) if executor.is_first else ()), target=x if executor.is_last else None)
        return module.peak, sum(reference() is not None for reference in module.alive)

    gc.disable()
    try:
        results = threads(steps, 3)
    finally:
        gc.enable()
    assert [left for _, left in results] == [0, 0, 0]
    assert all(peak <= bound for (peak, _), bound in zip(results, bounds, strict=True)), results


def test_p140_memory_is_flat_over_200_steps() -> None:
    """Resident memory and the number of tensors."""
    layers = nn.Sequential(Block(), Block())
    rows = [[a for m in range(2) for a in (Action(0, Kind.F, m), Action(0, Kind.I, m), Action(0, Kind.W, m))]]
    schedule = Schedule("split", Placement.loop(1, 1), 2, rows)
    executor = Executor(PipelineStage(layers, 0, 1, "cpu"), schedule, functional.mse_loss)
    x, y = (torch.randn(2, 64, WIDTH) for _ in range(2))

    def tensors() -> int:
        return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())  # isinstance would wake proxies

    counts, resident = [], []
    for step in range(200):
        executor.step(x, target=y, return_outputs=False)
        if step in (20, 199):
            counts.append(tensors())
            with open("/proc/self/statm") as statm:
                resident.append(int(statm.read().split()[1]) * 4096)
    assert counts[1] <= counts[0]  # others may leave a tensor that goes meanwhile
    assert resident[1] - resident[0] < 8 * 2**20
