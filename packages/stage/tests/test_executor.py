"""The executor against the plain model: the same loss and gradients, to the last bit."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from stepwell_meta.testing import WorkerPool
from stepwell_p2p import C10dTransport, LoopbackFabric, Placement, Rules, Transport
from stepwell_p2p.exceptions import DeadlockError, PeerFailure
from stepwell_stage import Action, Executor, Kind, PipelineStage, Schedule, TensorChunkSpec, lower
from stepwell_stage.exceptions import StageExecutionError, StageUsageError
from stepwell_stage.schedules import forward_only, gpipe, interleaved_1f1b, one_f_one_b

Threads = Callable[..., list[Any]]
WIDTH = 6


class Layer(nn.Module):
    """A layer whose output is changed in place by the next one, as ReLU(inplace=True) after a convolution is."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(functional.leaky_relu(x, 0.5, inplace=True))


def seeded(*modules: nn.Module) -> list[nn.Module]:
    """The same weights on every rank. Threads share torch's own generator, so it would not do."""
    generator = torch.Generator().manual_seed(0)
    for module in modules:
        for parameter in module.parameters():
            nn.init.uniform_(parameter, -0.5, 0.5, generator=generator)
    return list(modules)


def build_layers(count: int = 4) -> list[nn.Module]:
    return seeded(nn.Linear(WIDTH, WIDTH), *(Layer() for _ in range(count - 1)))


def batch(rows: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, WIDTH, generator=generator), torch.randn(rows, WIDTH, generator=generator)


def stages_for(transport: Transport, placement: Placement, layers: Sequence[nn.Module]) -> list[PipelineStage]:
    """Layers spread over the stages, those of this rank."""
    count = placement.num_stages
    return [
        PipelineStage(
            nn.Sequential(*layers[len(layers) * s // count : len(layers) * (s + 1) // count]), s, count, "cpu"
        )
        for s in placement.stages_of(transport.rank)
    ]


def plain_loop(
    x: torch.Tensor, y: torch.Tensor, microbatches: int
) -> tuple[list[torch.Tensor], list[torch.Tensor], Any]:
    """The one-process loop over the same microbatches: losses, gradients, outputs."""
    model = nn.Sequential(*build_layers())
    losses, outputs = [], []
    for part, target in zip(x.tensor_split(microbatches), y.tensor_split(microbatches), strict=True):
        output = model(part)
        loss = functional.mse_loss(output, target)
        (loss * (len(part) / len(x))).backward()
        losses.append(loss.detach())
        outputs.append(output.detach())
    return losses, [parameter.grad for parameter in model.parameters()], torch.cat(outputs)


def one_step(transport: Transport, schedule: Schedule, rows: int, **options: Any) -> tuple[list[Any], list[Any], Any]:
    """A step on one rank: its losses, gradients and outputs."""
    x, y = batch(rows)
    executor = Executor(
        stages_for(transport, schedule.placement, build_layers()),
        schedule,
        functional.mse_loss,
        transport=transport,
        **options,
    )
    losses: list[torch.Tensor] = []
    outputs = executor.step(*((x,) if executor.is_first else ()), target=y if executor.is_last else None, losses=losses)
    return losses, [parameter.grad for parameter in executor.parameters()], outputs


def assert_same(results: list[Any], expected: tuple[list[Any], list[Any], Any]) -> None:
    losses, grads, outputs = expected
    assert [loss.item() for loss in results[-1][0]] == [loss.item() for loss in losses]
    found = [grad for result in results for grad in result[1]]
    assert len(found) == len(grads)
    assert all(torch.equal(a, b) for a, b in zip(found, grads, strict=True))
    assert torch.equal(results[-1][2], outputs)
    assert all(result[2] is None for result in results[:-1])


@pytest.mark.parametrize("make", [gpipe, one_f_one_b])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_p006_p008_p029_p031_bitwise_as_one_process_on_threads(
    threads: Threads, make: Callable[..., Schedule], ranks: int
) -> None:
    """M from 1 to 9: also fewer microbatches than stages, and microbatches of different sizes."""
    for microbatches in range(1, 10):
        x, y = batch(11)
        results = threads(one_step, ranks, make(ranks, microbatches), 11)
        assert_same(results, plain_loop(x, y, microbatches))


@pytest.mark.parametrize("prefetch", [0, 1, 4, 100])
def test_prefetch_moves_receives_and_nothing_else(threads: Threads, prefetch: int) -> None:
    """What holds for a step holds for an evaluation. It was 1, of which only those knew who lowered schedules themselves."""
    schedule = interleaved_1f1b(2, 5)

    def run(transport: Transport) -> tuple[Any, bool]:
        stages = stages_for(transport, schedule.placement, build_layers())
        executor = Executor(stages, schedule, functional.mse_loss, transport=transport, prefetch=prefetch)
        assert executor.plan == lower(schedule, prefetch=prefetch)
        x, y = batch(10)
        given, target = (x,) if executor.is_first else (), y if executor.is_last else None
        losses: list[torch.Tensor] = []
        outputs = executor.step(*given, target=target, losses=losses)
        again = executor.eval(*given, target=target)
        alike = outputs is None or torch.equal(again, outputs)
        return (losses, [p.grad for p in executor.parameters()], outputs), alike

    (first, _), (second, alike) = threads(run, 2)
    assert alike
    losses, grads, outputs = plain_loop(*batch(10), 5)
    assert [loss.item() for loss in second[0]] == [loss.item() for loss in losses]
    assert all(map(torch.equal, [*first[1][:2], *second[1][:2], *first[1][2:], *second[1][2:]], grads))
    assert torch.equal(second[2], outputs)


@pytest.mark.parametrize("rendezvous", [True, False])
@pytest.mark.parametrize("tagged", [True, False])
def test_p025_bitwise_under_every_rule_of_the_transport(threads: Threads, *, rendezvous: bool, tagged: bool) -> None:
    for make in (gpipe, one_f_one_b):
        results = threads(one_step, 4, make(4, 6), 12, rules=Rules(tagged=tagged, rendezvous=rendezvous))
        assert_same(results, plain_loop(*batch(12), 6))


def all_steps_on_gloo() -> dict[tuple[str, int], Any]:
    transport = C10dTransport()
    found = {}
    for microbatches in range(1, 10):
        for make in (gpipe, one_f_one_b):
            schedule = make(transport.size, microbatches)
            found[schedule.name, microbatches] = one_step(transport, schedule, 11)
    transport.close()
    return found


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_bitwise_as_one_process_on_gloo(workers: WorkerPool, ranks: int) -> None:
    by_rank = workers.run(all_steps_on_gloo, ranks, deadline=60)
    for name, microbatches in by_rank[0]:
        results = [found[name, microbatches] for found in by_rank]
        assert_same(results, plain_loop(*batch(11), microbatches))


def test_several_stages_on_a_rank(threads: Threads) -> None:
    """Values between stages of one rank are handed over without a message, and without being shared."""
    kinds = [Kind.F, Kind.B]
    for placement in (Placement.loop(4, 2), Placement.v(4, 2), Placement.loop(4, 1)):
        rows = []
        for rank in range(placement.num_ranks):
            own = placement.stages_of(rank)
            order = [(kind, stage) for kind in kinds for stage in (own if kind is Kind.F else own[::-1])]
            rows.append([Action(stage, kind, m) for kind, stage in order for m in range(3)])
        schedule = Schedule("looped", placement, 3, rows)
        results = threads(one_step, placement.num_ranks, schedule, 8)
        losses, grads, outputs = plain_loop(*batch(8), 3)
        last = results[placement.ranks[-1]]
        assert [loss.item() for loss in last[0]] == [loss.item() for loss in losses]
        assert torch.equal(last[2], outputs)
        stage_grads: dict[int, list[Any]] = {}
        for rank, result in enumerate(results):
            for number, stage in enumerate(placement.stages_of(rank)):
                stage_grads[stage] = result[1][2 * number : 2 * number + 2]
        found = [grad for stage in range(4) for grad in stage_grads[stage]]
        assert all(torch.equal(a, b) for a, b in zip(found, grads, strict=True))


# Steps one after the other.


def many_steps(transport: Transport) -> Any:
    schedule = one_f_one_b(transport.size, 3)
    executor = Executor(
        stages_for(transport, schedule.placement, build_layers()), schedule, functional.mse_loss, transport=transport
    )
    results = []
    for rows in (6, 8, 3, 8, 6):  # cut in new ways and in ways seen before
        x, y = batch(rows, seed=rows)
        inputs, target = ((x,) if executor.is_first else ()), (y if executor.is_last else None)
        executor.step(*inputs, target=target, return_outputs=False)
        before = [parameter.grad.clone() for parameter in executor.parameters()]
        output = executor.eval(*inputs, target=target)
        assert all(torch.equal(a, p.grad) for a, p in zip(before, executor.parameters(), strict=True))
        results.append((output, None if executor.loss is None else executor.loss.item()))
    return results, [parameter.grad for parameter in executor.parameters()]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_p035_p041_p105_p114_p131_any_step_may_have_other_shapes_and_gradients_add_up(
    threads: Threads, ranks: int
) -> None:
    """Shapes change from step to step, eval stands between, gradients are summed."""
    results = threads(many_steps, ranks)
    model = nn.Sequential(*build_layers())
    for number, rows in enumerate((6, 8, 3, 8, 6)):
        x, y = batch(rows, seed=rows)
        for part, target in zip(x.tensor_split(3), y.tensor_split(3), strict=True):
            (functional.mse_loss(model(part), target) * (len(part) / rows)).backward()
        with torch.no_grad():
            parts = [model(part) for part in x.tensor_split(3)]
        output, loss = results[-1][0][number]
        assert torch.equal(output, torch.cat(parts))
        torch.testing.assert_close(loss, functional.mse_loss(torch.cat(parts), y).item(), rtol=1e-6, atol=0)
    found = [grad for _, grads in results for grad in grads]
    # Each gradient is the sum of 15 terms, added in the same order as here.
    assert all(torch.equal(a, p.grad) for a, p in zip(found, model.parameters(), strict=True))


def test_p146_p149_forward_runs_once_for_each_microbatch_and_buffers_are_as_in_one_process(threads: Threads) -> None:
    """Nothing is run to find out shapes, so BatchNorm sees each microbatch once, also in the first step."""

    def build() -> list[nn.Module]:
        return seeded(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)) for _ in range(2)))

    def step(transport: Transport) -> Any:
        schedule = gpipe(2, 4)
        module = build()[transport.rank]
        calls = []
        module.register_forward_hook(lambda *_: calls.append(1))
        stage = PipelineStage(module, transport.rank, 2, "cpu")
        executor = Executor(stage, schedule, functional.mse_loss, transport=transport)
        x, y = batch(16)
        executor.step(*((x,) if executor.is_first else ()), target=y if executor.is_last else None)
        return len(calls), dict(module.named_buffers())

    results = threads(step, 2)
    model = nn.Sequential(*build())
    for part in batch(16)[0].tensor_split(4):
        model(part)
    assert [calls for calls, _ in results] == [4, 4]
    for layer, (_, buffers) in zip(model, results, strict=True):
        for name, expected in layer.named_buffers():
            assert torch.equal(buffers[name], expected), name


# What may cross.


class Many(nn.Module):
    """Returns a float that is used, one that is not, one without grad, an integer and a bool."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = self.linear(x)
        positions = torch.arange(len(x))
        return h, h * 2, x.detach() * 3, positions, positions > 0


class Uses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(
        self, h: torch.Tensor, unused: torch.Tensor, table: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        assert not table.requires_grad
        return self.linear(h + table) * positions[:, None] * mask[:, None]


def many_step(transport: Transport) -> list[Any]:
    modules = seeded(Many(), Uses())
    stage = PipelineStage(modules[transport.rank], transport.rank, 2, "cpu")
    executor = Executor(stage, one_f_one_b(2, 3), functional.mse_loss, transport=transport)
    x, y = batch(7)
    executor.step(*((x,) if executor.is_first else ()), target=y if executor.is_last else None)
    return [parameter.grad for parameter in executor.parameters()]


def test_p019_p050_p055_p056_p068_several_values_of_several_kinds_cross(threads: Threads, workers: WorkerPool) -> None:
    """Integers, masks, tables without grad, and outputs that nobody uses."""
    first, second = seeded(Many(), Uses())
    x, y = batch(7)
    for part, target in zip(x.tensor_split(3), y.tensor_split(3), strict=True):
        (functional.mse_loss(second(*first(part)), target) * (len(part) / 7)).backward()
    expected = [parameter.grad for parameter in (*first.parameters(), *second.parameters())]
    for results in (threads(many_step, 2), workers.run(lambda: many_step(C10dTransport()), 2)):
        found = [grad for grads in results for grad in grads]
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_p070_a_frozen_first_stage_sends_no_gradients(threads: Threads) -> None:
    """Nothing upstream needs a gradient, so none crosses, and the schedule still completes."""

    def step(transport: Transport) -> list[Any]:
        layers = build_layers()
        for parameter in layers[0].parameters():
            parameter.requires_grad_(False)
        executor = Executor(
            stages_for(transport, Placement.loop(4, 4), layers),
            one_f_one_b(4, 5),
            functional.mse_loss,
            transport=transport,
        )
        x, y = batch(10)
        executor.step(*((x,) if executor.is_first else ()), target=y if executor.is_last else None)
        return [parameter.grad for parameter in executor.parameters()]

    results = threads(step, 4)
    _, grads, _ = plain_loop(*batch(10), 5)
    assert results[0] == [None, None]
    found = [grad for result in results[1:] for grad in result]
    assert all(torch.equal(a, b) for a, b in zip(found, grads[2:], strict=True))


@pytest.mark.parametrize("weights", ["sum", [0.5, 0.25, 0.0]])
def test_loss_weights(threads: Threads, weights: Any) -> None:
    results = threads(one_step, 2, gpipe(2, 3), 9, loss_weights=weights)
    model = nn.Sequential(*build_layers())
    factors = [1.0, 1.0, 1.0] if weights == "sum" else weights
    for factor, part, target in zip(factors, *(t.tensor_split(3) for t in batch(9)), strict=True):
        (functional.mse_loss(model(part), target) * factor).backward()
    found = [grad for result in results for grad in result[1]]
    assert all(torch.equal(a, p.grad) for a, p in zip(found, model.parameters(), strict=True))


def test_p043_p060_keyword_inputs_and_values_for_all_microbatches(threads: Threads) -> None:
    """Keyword inputs enter at the stage of the rank that is given them; a mask of size 1 and a number go to every microbatch."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor, *, scale: torch.Tensor, mask: torch.Tensor, power: int) -> torch.Tensor:
            return self.linear(x) * scale[:, None] ** power * mask

    def build() -> list[nn.Module]:
        return seeded(Scaled(), Scaled())

    scales = [torch.arange(1.0, 8.0), torch.arange(2.0, 9.0)]
    mask = torch.tensor([[1.0, 0, 1, 1, 0, 1]])

    def step(transport: Transport) -> list[Any]:
        stage = PipelineStage(build()[transport.rank], transport.rank, 2, "cpu")
        executor = Executor(stage, one_f_one_b(2, 3), functional.mse_loss, transport=transport)
        x, y = batch(7)
        executor.step(
            *((x,) if executor.is_first else ()),
            target=y if executor.is_last else None,
            scale=scales[transport.rank],
            mask=mask,
            power=2,
        )
        return [parameter.grad for parameter in executor.parameters()]

    first, second = build()
    x, y = batch(7)
    parts = zip(*(t.tensor_split(3) for t in (x, y, *scales)), strict=True)
    for part, target, scale_0, scale_1 in parts:
        output = second(first(part, scale=scale_0, mask=mask, power=2), scale=scale_1, mask=mask, power=2)
        (functional.mse_loss(output, target) * (len(part) / 7)).backward()
    expected = [parameter.grad for parameter in (*first.parameters(), *second.parameters())]
    found = [grad for grads in threads(step, 2) for grad in grads]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


# Errors.


class Boom(nn.Module):
    def __init__(self, at_call: int) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.calls = 0
        self.at_call = at_call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == self.at_call:
            raise ZeroDivisionError("the user's own mistake")
        return self.linear(x)


def failing_step(transport: Transport) -> BaseException:
    module = Boom(at_call=4 if transport.rank == 1 else 0)
    executor = Executor(
        PipelineStage(module, transport.rank, transport.size, "cpu"),
        one_f_one_b(transport.size, 6),
        functional.mse_loss,
        transport=transport,
    )
    x, y = batch(12)
    arguments = (x,) if executor.is_first else ()
    target = y if executor.is_last else None
    with pytest.raises((PeerFailure, StageExecutionError)) as failure:
        executor.step(*arguments, target=target)
    with pytest.raises(StageUsageError, match=r"earlier step failed.*make a new"):
        executor.step(*arguments, target=target)
    return failure.value


def test_p150_a_stage_that_raises_ends_every_rank_with_the_place_and_the_first_error(
    threads: Threads, workers: WorkerPool
) -> None:
    """On threads and on gloo, where the failing process lives on."""

    def on_gloo() -> BaseException:
        return failing_step(C10dTransport())

    for errors in (threads(failing_step, 4), workers.run(on_gloo, 4, deadline=15)):
        own = errors[1]
        assert isinstance(own, StageExecutionError)
        assert "rank 1, stage 1, microbatch 3, action 1F3: ZeroDivisionError: the user's own mistake" in str(own)
        assert ">>1F3<<" in str(own)
        for rank in (0, 2, 3):
            assert isinstance(errors[rank], PeerFailure), errors[rank]
            assert errors[rank].rank == 1
            assert (errors[rank].stage, errors[rank].microbatch, errors[rank].action) == (1, 3, "1F3")
            assert "the user's own mistake" in str(errors[rank])


class FailsOnce(nn.Module):
    """A layer that raises in its third call, and never again."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.calls = layer, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == 3:
            raise ZeroDivisionError("for once")
        return self.layer(x)


def test_p150_after_a_failure_the_same_stages_train_over_a_new_transport(threads: Threads) -> None:
    """Nothing of the step that failed is left in them but what it added to gradients."""
    layers = build_layers(3)
    modules = [layers[0], FailsOnce(layers[1]), layers[2]]
    stages = [PipelineStage(module, index, 3, "cpu") for index, module in enumerate(modules)]
    x, y = batch(12)

    def step(transport: Transport) -> None:
        executor = Executor(stages[transport.rank], one_f_one_b(3, 4), functional.mse_loss, transport=transport)
        executor.step(*((x,) if executor.is_first else ()), target=y if executor.is_last else None)

    with pytest.raises(StageExecutionError, match="for once"):
        threads(step, 3)
    for module in modules:
        module.zero_grad()
    threads(step, 3)
    model = nn.Sequential(*build_layers(3))
    for part, target in zip(x.tensor_split(4), y.tensor_split(4), strict=True):
        (functional.mse_loss(model(part), target) / 4).backward()
    found = [parameter.grad for module in modules for parameter in module.parameters()]
    assert all(torch.equal(a, b.grad) for a, b in zip(found, model.parameters(), strict=True))


def refused_batch(transport: Transport, steps_before: int) -> list[str]:
    executor = Executor(
        stages_for(transport, Placement.loop(2, 2), build_layers()),
        gpipe(2, 4),
        functional.mse_loss,
        transport=transport,
    )
    x, y = batch(8)
    inputs, target = ((x,) if executor.is_first else ()), (y if executor.is_last else None)
    for _ in range(steps_before):
        executor.step(*inputs, target=target)
    with pytest.raises(StageUsageError) as failure:
        executor.step(*((x[:3],) if executor.is_first else ()), target=target)
    executor.step(*inputs, target=target)  # nothing is broken
    return [str(failure.value)]


@pytest.mark.parametrize("steps_before", [0, 2])
def test_a_batch_that_the_first_rank_refuses_is_refused_on_every_rank_and_the_next_runs(
    threads: Threads, steps_before: int
) -> None:
    own, other = threads(refused_batch, 2, steps_before)
    assert "a batch of 3 cannot be cut into 4 microbatches" in own[0]
    assert other == [f"the first stage's rank refused the step: {own[0]}"]


class Unreadable(dict[str, torch.Tensor]):
    """A container whose own code fails."""

    def keys(self) -> Any:
        raise RuntimeError("no keys")


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("how", ["gradients", "container"])
def test_a_rank_that_cannot_begin_a_step_tells_the_others(threads: Threads, rank: int, how: str) -> None:
    """Without gradients, or where a container of the batch raised, it raised before it told them: they waited for it."""

    def run(transport: Transport) -> str:
        stages = stages_for(transport, Placement.loop(2, 2), build_layers())
        executor = Executor(stages, gpipe(2, 2), functional.mse_loss, transport=transport)
        x, y = batch(4)
        fails = transport.rank == rank
        kwargs = {"kwarg_mbs": [Unreadable(), Unreadable()]} if fails and how == "container" else {}
        with (
            torch.set_grad_enabled(not (fails and how == "gradients")),
            pytest.raises((StageUsageError, PeerFailure, RuntimeError)) as raised,
        ):
            executor.step(*((x,) if executor.is_first else ()), target=y if executor.is_last else None, **kwargs)
        return str(raised.value)

    words = "gradients are disabled here" if how == "gradients" else "no keys"
    assert all(words in said for said in threads(run, 2, timeout=10.0))


def test_a_rank_that_evaluates_while_others_train_is_an_error_on_both(threads: Threads) -> None:
    def confused(transport: Transport) -> str:
        executor = Executor(
            stages_for(transport, Placement.loop(2, 2), build_layers()),
            gpipe(2, 2),
            functional.mse_loss,
            transport=transport,
        )
        x, y = batch(4)

        def act() -> None:
            if executor.is_first:
                executor.eval(x)
                executor.eval(x)  # the first has only sent, and may be over before the other rank complains
            else:
                executor.step(target=y)

        with pytest.raises((StageUsageError, PeerFailure)) as failure:
            act()
        return str(failure.value)

    first, second = threads(confused, 2)
    assert "rank 1 is in step() while rank 0 is in eval()" in first
    assert "rank 1 is in step() while rank 0 is in eval(): call the same on every rank" in second


@pytest.mark.parametrize(
    "others", [[gpipe(2, 8), one_f_one_b(2, 8)], [gpipe(2, 4), gpipe(2, 8)], [gpipe(2, 8), gpipe(2, 4)]]
)
def test_ranks_with_different_schedules_are_an_error_on_both(threads: Threads, others: list[Schedule]) -> None:
    """They waited for each other until the transport had enough of it; or one did half of its microbatches and said nothing."""

    def run(transport: Transport) -> str:
        schedule = others[transport.rank]
        stages = stages_for(transport, schedule.placement, build_layers())
        executor = Executor(stages, schedule, functional.mse_loss, transport=transport)
        x, y = batch(8)
        with pytest.raises((StageUsageError, PeerFailure)) as failure:
            executor.step(*((x,) if executor.is_first else ()), target=y if executor.is_last else None)
        return str(failure.value)

    name, count = others[1].name, others[1].num_microbatches
    words = f"rank 1 runs {name} with {count} microbatches, rank 0 another schedule or another number of microbatches"
    assert all(words in said for said in threads(run, 2))


def test_p039_an_output_that_changes_is_refused_before_it_is_sent(threads: Threads) -> None:
    """The error is on the rank that made it, and names stage, value and both shapes."""

    class Shrinks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)
            self.calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return self.linear(x)[:, : 4 if self.calls == 3 else WIDTH]

    def step(transport: Transport) -> str:
        module = Shrinks() if transport.rank == 0 else nn.Linear(WIDTH, WIDTH)
        executor = Executor(
            PipelineStage(module, transport.rank, 2, "cpu"), gpipe(2, 4), functional.mse_loss, transport=transport
        )
        x, y = batch(8)
        with pytest.raises(Exception) as failure:  # noqa: PT011 - which error on which rank is asserted below
            executor.step(*((x,) if executor.is_first else ()), target=y if executor.is_last else None)
        return f"{type(failure.value).__name__}: {failure.value}"

    first, second = threads(step, 2)
    assert first.startswith("PipeliningMetadataError: stage 0")
    assert "output 0: shape mismatch: expected (2, 6), got (2, 4)" in first
    assert "microbatch 2" in first
    assert second.startswith("PeerFailure: rank 0, stage 0, microbatch 2, action 0F2 failed")


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda e, x, y: e.step(x), "1 positional inputs, but these enter at the first stage"),
        (lambda e, x, y: e.step(target=y[:1]), "a batch of 1 cannot be cut into 2 microbatches"),
    ],
)
def test_p060_inputs_on_the_wrong_rank_are_refused(threads: Threads, call: Any, words: str) -> None:
    """Nothing is dropped in silence."""

    def step(transport: Transport) -> str:
        executor = Executor(
            stages_for(transport, Placement.loop(2, 2), build_layers()),
            gpipe(2, 2),
            functional.mse_loss,
            transport=transport,
        )
        x, y = batch(4)
        act = call if transport.rank == 1 else lambda executor, x, y: executor.step(x)
        with pytest.raises((StageUsageError, PeerFailure)) as failure:
            act(executor, x, y)
        return str(failure.value)

    results = threads(step, 2)
    assert all(words in result for result in results)


def test_a_target_on_the_first_rank_is_refused(threads: Threads) -> None:
    def step(transport: Transport) -> str:
        executor = Executor(
            stages_for(transport, Placement.loop(2, 2), build_layers()),
            gpipe(2, 2),
            functional.mse_loss,
            transport=transport,
        )
        x, y = batch(4)
        with pytest.raises(StageUsageError) as failure:
            executor.step(*((x,) if executor.is_first else ()), target=y)
        return str(failure.value)

    results = threads(step, 2)
    assert "the loss is computed by the last stage, on another rank" in results[0]
    assert results[0] in results[1]


def one_rank(**options: Any) -> Executor:
    options = {"loss_fn": functional.mse_loss, "schedule": gpipe(1, 2)} | options
    return Executor(PipelineStage(nn.Linear(WIDTH, WIDTH), 0, 1, "cpu"), **options)


def test_an_output_that_cannot_be_put_together_is_named() -> None:
    """It was said that it cannot be sent to another stage, which nobody had wanted."""

    class Keeps(nn.Linear):
        def forward(self, x: torch.Tensor) -> Any:
            return {"y": super().forward(x), "cache": [object()]}

    executor = Executor(
        PipelineStage(Keeps(WIDTH, WIDTH), 0, 1, "cpu"), gpipe(1, 2), lambda out, y: functional.mse_loss(out["y"], y)
    )
    x, y = batch(2)
    with pytest.raises(StageUsageError, match=r"outputs\['cache'\]\[0\] is a object, .* or pass return_outputs=False"):
        executor.step(x, target=y)
    executor.step(x, target=y, return_outputs=False)


def test_wrong_arguments_are_refused_before_anything_runs() -> None:
    two = [PipelineStage(nn.Linear(WIDTH, WIDTH), stage, 2, "cpu") for stage in range(2)]
    with pytest.raises(StageUsageError, match=r"needs a transport: pass transport="):
        Executor(two[0], gpipe(2, 2), functional.mse_loss)
    with pytest.raises(StageUsageError, match=r"places stages \[0\] on rank 0, but it was given \[0, 1\]"):
        Executor(two, gpipe(1, 2), functional.mse_loss)
    with pytest.raises(StageUsageError, match="says that there are 2 stages, the schedule has 1"):
        Executor(two[0], gpipe(1, 2), functional.mse_loss)
    with pytest.raises(StageUsageError, match="needs a loss_fn"):
        one_rank(loss_fn=None)
    with pytest.raises(StageUsageError, match=r"'mean', 'sum', one number per microbatch or a function"):
        one_rank(loss_weights="average")
    with pytest.raises(StageUsageError, match="one number for each of 2 microbatches, got 3"):
        one_rank(loss_weights=[1, 2, 3])
    with pytest.raises(StageUsageError, match=r"forward-only has no backward: call eval\(\)"):
        one_rank(schedule=forward_only(Placement.loop(1, 1), 2)).step(batch(2)[0])
    with torch.no_grad(), pytest.raises(StageUsageError, match=r"gradients are disabled here"):
        one_rank().step(batch(2)[0], target=batch(2)[1])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"loss_fn": 5}, "loss_fn must be a function of outputs and target, got 5"),
        (
            {"args_chunk_spec": TensorChunkSpec(0)},
            r"args_chunk_spec has one spec for each positional input, as in \(Tensor",
        ),
        (
            {"kwargs_chunk_spec": (TensorChunkSpec(0),)},
            r"kwargs_chunk_spec has specs by name, as in \{\"mask\": Tensor",
        ),
    ],
)
def test_options_of_another_kind_are_refused_at_once(options: dict[str, Any], words: str) -> None:
    """They were errors of Python's own, in the first step."""
    with pytest.raises(StageUsageError, match=words):
        one_rank(**options)


@pytest.mark.parametrize("losses", [(), {}, torch.zeros(2)])
def test_losses_that_are_no_list_are_refused_before_anything_runs(losses: Any) -> None:
    """The step was done, and its result lost, when they were found to have no extend."""
    executor = one_rank()
    with pytest.raises(StageUsageError, match="losses is a list"):
        executor.step(batch(2)[0], target=batch(2)[1], losses=losses)
    assert all(parameter.grad is None for parameter in executor.parameters())


def test_a_loss_that_is_no_scalar_is_named() -> None:
    words = r"must return a tensor with one element, or named ones, got a tensor of shape \(1, 6\)"
    with pytest.raises(StageUsageError, match=words):
        one_rank(loss_fn=lambda output, target: output - target).step(*batch(2)[:1], target=batch(2)[1])


def test_one_rank_goes_on_after_an_error() -> None:
    executor = one_rank(loss_fn=lambda output, target: output.sum() / (0 if target.sum() == 0 else 1))
    with pytest.raises(StageExecutionError, match="TypeError"):
        executor.step("no tensor", target=torch.zeros(2))
    executor.step(batch(2)[0], target=batch(2)[1])
    assert executor.loss is not None


def test_p061_p115_the_loss_of_a_step_and_a_loss_without_target() -> None:
    """A loss that takes no target; each microbatch has its own."""
    executor = one_rank(loss_fn=lambda output: output.pow(2).mean())
    losses: list[torch.Tensor] = []
    x = batch(3)[0]
    executor.step(x, losses=losses)
    assert len(losses) == 2
    assert executor.loss is not None
    expected = 2 / 3 * losses[0].double() + 1 / 3 * losses[1].double()
    assert executor.loss.item() == expected.item()


def test_trace_says_what_ran_when() -> None:
    executor = one_rank(trace=True)
    executor.step(batch(4)[0], target=batch(4)[1])
    assert [str(event.action) for event in executor.events] == ["0F0", "0F1", "0B0", "0B1"]
    times = [time for event in executor.events for time in (event.start, event.end)]
    assert times == sorted(times)


def test_a_trace_costs_two_calls_of_builtins_for_each_action() -> None:
    """A clock is read and its time kept; events are made where they are asked for: few of a small step's calls."""
    counts = []
    for trace in (False, True):
        executor, found = one_rank(schedule=one_f_one_b(1, 8), trace=trace), Counter[str]()
        x, y = batch(16)
        executor.step(x, target=y)
        gc.disable()  # what dies in a collection calls functions of its own
        sys.setprofile(lambda frame, event, argument, found=found: found.update([event]))
        try:
            executor.step(x, target=y)
        finally:
            sys.setprofile(None)
            gc.enable()
        counts.append(found)
    plain, traced = counts
    assert traced["call"] == plain["call"]
    assert traced["c_call"] - plain["c_call"] == 2 * len(executor.events)
    assert 2 * len(executor.events) < 0.05 * (plain["call"] + plain["c_call"])


def test_p135_p141_no_tensor_outlives_the_step(threads: Threads) -> None:
    """Between steps the executor holds parameters, gradients, and nothing of the microbatches."""
    import weakref

    class Remembers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)
            self.seen: list[Any] = []

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.linear(x)
            self.seen += [weakref.ref(x), weakref.ref(y)]
            return y

    def step(transport: Transport) -> int:
        module = Remembers()
        executor = Executor(
            PipelineStage(module, transport.rank, 2, "cpu"), one_f_one_b(2, 4), functional.mse_loss, transport=transport
        )
        x, y = batch(8)
        inputs, target = ((x,) if executor.is_first else ()), (y if executor.is_last else None)
        executor.step(*inputs, target=target, return_outputs=False)
        gc.disable()  # no cycles: what is not needed goes at once (P141)
        try:
            executor.step(*inputs, target=target, return_outputs=False)
            return sum(reference() is not None for reference in module.seen[8:])
        finally:
            gc.enable()

    assert threads(step, 2) == [0, 0]


def test_an_order_that_a_shared_channel_cannot_carry_is_refused_before_anything_is_sent() -> None:
    """Both directions in one first-in-first-out channel whose sends wait for their receives: 1F1B would stand still."""
    fabric = LoopbackFabric(2, rules=Rules(tagged=False, rendezvous=True), channels="shared")
    stage = PipelineStage(nn.Linear(WIDTH, WIDTH), 0, 2, "cpu")
    with pytest.raises(DeadlockError, match="rank"):
        Executor(stage, one_f_one_b(2, 4), functional.mse_loss, transport=fabric.transport(0))
