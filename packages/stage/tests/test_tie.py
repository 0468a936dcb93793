"""Tied parameters against the one-process model, where a tie is one tensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn import functional

from stepwell_meta.testing import WorkerPool
from stepwell_p2p import C10dTransport, Handle, LoopbackFabric, Placement, Recv, Send, Transport
from stepwell_p2p.exceptions import PeerFailure
from stepwell_stage import Action, Executor, Kind, PipelineStage, Schedule, tie
from stepwell_stage.exceptions import StageUsageError
from stepwell_stage.schedules import gpipe, one_f_one_b

Threads = Callable[..., list[Any]]
Groups = Mapping[str, Sequence[tuple[int, str]]]
WIDTH, VOCABULARY = 4, 7


class Embed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.tokens(x) * self.scale


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(x).tanh()


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.out = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(x * self.scale)


def build(stages: int, seed: int = 0) -> list[nn.Module]:
    modules = [Embed(), *(Block() for _ in range(stages - 2)), Head()]
    generator = torch.Generator().manual_seed(seed)
    for module in modules:
        for parameter in module.parameters():
            nn.init.uniform_(parameter, -1, 1, generator=generator)
    return modules


def tied_groups(stages: int) -> Groups:
    last = stages - 1
    return {"tokens": [(0, "tokens.weight"), (last, "out.weight")], "scale": [(0, "scale"), (last, "scale")]}


def batch(rows: int = 6, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(VOCABULARY, (rows, 3), generator=generator) for _ in range(2))  # type: ignore[return-value]


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())


def plain(
    stages: int, steps: int, accumulate: int, microbatches: int, scale: float = 1.0
) -> list[dict[str, torch.Tensor]]:
    """Each step's gradients, and at the end the parameters, of the one-process model."""
    modules = build(stages)
    modules[-1].out.weight = modules[0].tokens.weight
    modules[-1].scale = modules[0].scale
    model = nn.Sequential(*modules)
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    found = []
    for step in range(steps):
        for turn in range(accumulate):
            x, y = batch(seed=10 * step + turn)
            for part, target in zip(x.tensor_split(microbatches), y.tensor_split(microbatches), strict=True):
                (loss(model(part), target) * scale * (len(part) / len(x))).backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad /= scale
        found.append({name: p.grad.clone() for name, p in model.named_parameters(remove_duplicate=False)})
        optimizer.step()
        optimizer.zero_grad()
    return [*found, {name: p.detach().clone() for name, p in model.named_parameters(remove_duplicate=False)}]


def piped(
    transport: Transport, schedule: Schedule, steps: int, accumulate: int, scale: float = 1.0
) -> list[dict[str, torch.Tensor]]:
    """The same of this rank's stages."""
    count = schedule.placement.num_stages
    # Every stage but the first starts with other values, which must not count.
    stages = [
        PipelineStage(build(count, seed=0 if 0 < index < count - 1 or index == 0 else 9)[index], index, count, "cpu")
        for index in schedule.placement.stages_of(transport.rank)
    ]
    executor = Executor(stages, schedule, lambda o, t: loss(o, t) * scale, transport=transport)
    groups = tied_groups(count)
    tie(executor, groups if transport.rank % 2 else dict(reversed(groups.items())))  # P088: any order
    optimizer = torch.optim.AdamW(executor.parameters(), 0.1)

    def named(value: Callable[[torch.Tensor], Any]) -> dict[str, torch.Tensor]:
        return {
            f"{stage.stage_index}.{name}": value(parameter)
            for stage in stages
            for name, parameter in stage.submodule.named_parameters(remove_duplicate=False)
        }

    found = []
    for step in range(steps):
        for turn in range(accumulate):
            x, y = batch(seed=10 * step + turn)
            executor.step(*((x,) if executor.is_first else ()), target=y if executor.is_last else None)
        for parameter in executor.parameters():
            assert parameter.grad is not None
            parameter.grad /= scale
        found.append(named(lambda parameter: parameter.grad.clone()))
        optimizer.step()
        optimizer.zero_grad()
    return [*found, named(lambda parameter: parameter.detach().clone())]


def check(results: list[list[dict[str, torch.Tensor]]], expected: list[dict[str, torch.Tensor]], last: int) -> None:
    for found, known in zip(zip(*results, strict=True), expected, strict=True):
        merged = {name: value for part in found for name, value in part.items()}
        assert merged.keys() == known.keys()
        for name, value in merged.items():
            # One process adds both uses within a microbatch first, here those of a rank are added first.
            torch.testing.assert_close(value, known[name], rtol=1e-4, atol=1e-5, msg=name)
        assert torch.equal(merged["0.tokens.weight"], merged[f"{last}.out.weight"])
        assert torch.equal(merged["0.scale"], merged[f"{last}.scale"])


def filled(placement: Placement, microbatches: int) -> Schedule:
    """All forwards, then all backwards, on any placement."""
    count = range(microbatches)
    return Schedule(
        "filled",
        placement,
        microbatches,
        tuple(
            tuple(Action(stage, Kind.F, m) for stage in own for m in count)
            + tuple(Action(stage, Kind.B, m) for stage in reversed(own) for m in count)
            for own in (placement.stages_of(rank) for rank in range(placement.num_ranks))
        ),
    )


SCHEDULES = {
    "1f1b-2": one_f_one_b(2, 3),
    "1f1b-4": one_f_one_b(4, 4),
    "v": filled(Placement.v(4, 2), 2),  # both ends on one rank
    "loop": filled(Placement.loop(4, 2), 3),
    "one-rank": filled(Placement.loop(3, 1), 2),
}


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("name", SCHEDULES)
def test_p081_p083_p084_p086_p088_tied_gradients_are_the_one_process_sum_on_every_holder(
    threads: Threads, name: str, accumulate: int
) -> None:
    """Also after several accumulated steps, where what was summed is not summed again, and after optimizer steps."""
    schedule = SCHEDULES[name]
    results = threads(piped, schedule.placement.num_ranks, schedule, 2, accumulate)
    count = schedule.placement.num_stages
    check(results, plain(count, 2, accumulate, schedule.num_microbatches), count - 1)


@pytest.mark.parametrize("name", ["1f1b-4", "v"])
def test_on_gloo(workers: WorkerPool, name: str) -> None:
    def on_gloo(schedule: Schedule) -> Any:
        return piped(C10dTransport(), schedule, 2, 2)

    schedule = SCHEDULES[name]
    results = workers.run(on_gloo, schedule.placement.num_ranks, schedule, deadline=30)
    count = schedule.placement.num_stages
    check(results, plain(count, 2, 2, schedule.num_microbatches), count - 1)


def test_a_scaled_loss_and_one_microbatch_are_exact(threads: Threads) -> None:
    """Scaling by a power of two changes no bit, and with one microbatch there is only one order to add two uses in."""
    schedule = one_f_one_b(2, 1)
    results = threads(piped, 2, schedule, 1, 1, 2.0**10)
    for found, known in zip(zip(*results, strict=True), plain(2, 1, 1, 1), strict=True):
        merged = {name: value for part in found for name, value in part.items()}
        assert all(torch.equal(merged[name], value) for name, value in known.items())


def test_the_same_order_of_addition_on_three_holders(threads: Threads) -> None:
    """Three ranks add three contributions to the same bits; a rank without one of them takes no part."""

    def step(transport: Transport) -> torch.Tensor | None:
        modules = [nn.Linear(5, 5) for _ in range(4)]
        generator = torch.Generator().manual_seed(transport.rank)
        for module in modules:
            for parameter in module.parameters():
                nn.init.uniform_(parameter, -1, 1, generator=generator)
        stage = PipelineStage(modules[transport.rank], transport.rank, 4, "cpu")
        executor = Executor(stage, one_f_one_b(4, 3), functional.mse_loss, transport=transport)
        tie(executor, {"w": [(3, "weight"), (0, "weight"), (2, "weight")]})
        x = torch.randn(6, 5, generator=torch.Generator().manual_seed(5))
        for _ in range(2):
            executor.step(*((x,) if executor.is_first else ()), target=x if executor.is_last else None)
        return stage.submodule.weight.grad

    first, own, third, fourth = threads(step, 4)
    assert torch.equal(first, third)
    assert torch.equal(first, fourth)
    assert not torch.equal(first, own)


class Maybe(nn.Module):
    """Uses its parameter, or not."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.other = nn.Parameter(torch.ones(WIDTH))
        self.used = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.other * (self.weight if self.used else 1)


def test_a_gradient_that_no_holder_has_stays_none(threads: Threads) -> None:
    """An optimizer with weight decay changes a parameter whose gradient is zero, and not one whose gradient is None."""

    def step(transport: Transport) -> list[torch.Tensor | None]:
        stage = PipelineStage(Maybe(), transport.rank, 2, "cpu")
        executor = Executor(stage, gpipe(2, 2), functional.mse_loss, transport=transport)
        tie(executor, {"w": [(0, "weight"), (1, "weight")]})
        x, y = torch.full((2, WIDTH), 2.0), torch.zeros(2, WIDTH)
        found = []
        for first, second in ((False, False), (True, False), (False, False), (True, True)):
            stage.submodule.used = (first, second)[transport.rank]
            executor.step(*((x,) if executor.is_first else ()), target=y if executor.is_last else None)
            grad = stage.submodule.weight.grad
            found.append(None if grad is None else grad[0].item())
        return found

    assert threads(step, 2) == [[None, 2.0, 2.0, 6.0]] * 2  # d/dw of (2w)²/4 over 4 columns: 2; of (2w²)²: 4


def test_frozen_tied_parameters_cost_nothing(threads: Threads) -> None:
    def step(transport: Transport) -> bool:
        modules = build(2)
        modules[0].tokens.weight.requires_grad_(False)
        modules[1].out.weight.requires_grad_(False)
        stage = PipelineStage(modules[transport.rank], transport.rank, 2, "cpu")
        executor = Executor(stage, gpipe(2, 2), loss, transport=transport)
        tie(executor, tied_groups(2))
        x, y = batch()
        executor.step(*((x,) if executor.is_first else ()), target=y if executor.is_last else None)
        return [name for name, parameter in stage.submodule.named_parameters() if parameter.grad is not None]

    assert threads(step, 2) == [["scale"], ["scale"]]


def test_buffers_start_equal_and_are_left_alone(threads: Threads) -> None:
    def step(transport: Transport) -> torch.Tensor:
        module = nn.Linear(3, 3)
        module.register_buffer("table", torch.full((2,), float(transport.rank)))
        executor = Executor(
            PipelineStage(module, transport.rank, 2, "cpu"), gpipe(2, 1), functional.mse_loss, transport=transport
        )
        tie(executor, {"table": [(0, "table"), (1, "table")]})
        x = torch.ones(1, 3)
        executor.step(*((x,) if executor.is_first else ()), target=x if executor.is_last else None)
        return module.table

    assert [table.tolist() for table in threads(step, 2)] == [[0, 0], [0, 0]]


def test_broadcast_gives_the_first_copy_again(threads: Threads) -> None:
    def load(transport: Transport) -> torch.Tensor:
        stage = PipelineStage(build(2)[transport.rank], transport.rank, 2, "cpu")
        executor = Executor(stage, gpipe(2, 1), loss, transport=transport)
        tied = tie(executor, tied_groups(2))
        assert [group.name for group in tied.groups] == ["scale", "tokens"]
        with torch.no_grad():
            stage.submodule.scale.fill_(transport.rank + 5.0)
        tied.broadcast()
        return stage.submodule.scale.detach()

    assert [scale.tolist() for scale in threads(load, 2)] == [[5.0] * WIDTH] * 2


def test_a_refused_step_keeps_the_gradients_that_were_there(threads: Threads) -> None:
    def step(transport: Transport) -> list[bool]:
        stage = PipelineStage(build(2)[transport.rank], transport.rank, 2, "cpu")
        executor = Executor(stage, gpipe(2, 4), loss, transport=transport)
        tie(executor, tied_groups(2))
        x, y = batch()
        target = y if executor.is_last else None
        executor.step(*((x,) if executor.is_first else ()), target=target)
        before = [parameter.grad.clone() for parameter in executor.parameters()]
        with pytest.raises(StageUsageError, match="a batch of 3 cannot be cut into 4"):
            executor.step(*((x[:3],) if executor.is_first else ()), target=target)
        return [torch.equal(a, p.grad) for a, p in zip(before, executor.parameters(), strict=True)]

    assert all(same for result in threads(step, 2) for same in result)


# Errors, the same on every rank.


def refused(transport: Transport, modules: list[nn.Module], groups: list[Groups]) -> str:
    executor = Executor(
        PipelineStage(modules[transport.rank], transport.rank, 2, "cpu"), gpipe(2, 1), loss, transport=transport
    )
    with pytest.raises(StageUsageError) as failure:
        tie(executor, groups[transport.rank % len(groups)])
    assert not executor.around_step
    return str(failure.value)


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        ([{"a": [(0, "scale")]}], "tied 'a' has 1 holders"),
        ([{"a": [(0, "scale"), (2, "scale")]}], "names stage 2, but there are 2 stages"),
        ([{"a": [(0, "scale"), (1, "scale")], "b": [(0, "scale"), (1, "scale")]}], "'scale' of stage 0 is named twice"),
        ([{"a": [(0, "scale"), (1, "nothing")]}], "rank 1: stage 1 has no parameter or buffer 'nothing'"),
        ([{"a": [(0, "scale"), (1, "out")]}], "rank 1: stage 1 has no parameter or buffer 'out'"),
        ([{"a": [(0, "scale"), (1, "out.weight")]}], r"shape mismatch: expected (4,), got (7, 4)"),
        ([{"a": [(0, "scale"), (1, "scale")]}, {}], "'a' is ((0, 'scale'), (1, 'scale')) on rank 0 and None on rank 1"),
    ],
)
def test_groups_that_do_not_fit_are_refused_on_every_rank(threads: Threads, groups: list[Groups], words: str) -> None:
    first, second = threads(refused, 2, build(2), groups)
    assert first == second
    assert words in first


def test_tensors_that_cannot_be_one_are_refused(threads: Threads) -> None:
    frozen, other, meta = build(2), build(2), build(2)
    frozen[1].out.weight.requires_grad_(False)
    other[1].double()
    meta[1].to("meta")
    for modules, words in (
        (frozen, "requires_grad mismatch: expected True, got False"),
        (other, "dtype mismatch: expected torch.float32, got torch.float64"),
        (meta, "is on the meta device; a tie made there is lost"),  # P085
    ):
        first, second = threads(refused, 2, modules, [tied_groups(2)])
        assert first == second
        assert words in first


def test_a_tensor_is_tied_once(threads: Threads) -> None:
    def twice(transport: Transport) -> str:
        executor = Executor(
            PipelineStage(build(2)[transport.rank], transport.rank, 2, "cpu"), gpipe(2, 1), loss, transport=transport
        )
        tie(executor, tied_groups(2))
        with pytest.raises(StageUsageError) as failure:
            tie(executor, {"again": [(0, "scale"), (1, "scale")]})
        return str(failure.value)

    assert all("is tied already, as 'scale'" in words for words in threads(twice, 2))


def test_p085_a_tie_that_was_lost_is_an_error_on_every_rank(threads: Threads) -> None:
    def lose(transport: Transport) -> BaseException:
        stage = PipelineStage(build(2)[transport.rank], transport.rank, 2, "cpu")
        executor = Executor(stage, gpipe(2, 1), loss, transport=transport)
        tie(executor, tied_groups(2))
        if transport.rank == 1:
            stage.submodule.scale = nn.Parameter(torch.ones(WIDTH))
        x, y = batch()
        with pytest.raises((StageUsageError, PeerFailure)) as failure:
            executor.step(*((x,) if executor.is_first else ()), target=y if executor.is_last else None)
        return failure.value

    first, second = threads(lose, 2)
    assert "'scale' of stage 1 is not the tensor that was tied as 'scale': it was replaced since" in str(second)
    assert isinstance(first, PeerFailure)
    assert "it was replaced since" in str(first)


def test_parallel_wrappers_on_one_rank_are_refused(workers: WorkerPool) -> None:
    """Sharing a parameter between two DDP modules would leave one of them with a parameter that it does not reduce."""

    def wrap() -> str:
        stages = [PipelineStage(nn.parallel.DistributedDataParallel(m), i, 2, "cpu") for i, m in enumerate(build(2))]
        executor = Executor(stages, filled(Placement.loop(2, 1), 1), loss, transport=LoopbackFabric(1).transport(0))
        with pytest.raises(StageUsageError) as failure:
            tie(executor, tied_groups(2))
        return str(failure.value)

    assert all("use the same parameter in both before wrapping" in words for words in workers.run(wrap, 2, deadline=30))


class Counting:
    """A transport that counts what is sent outside microbatches."""

    def __init__(self, inner: Transport) -> None:
        self.inner = inner
        self.rank, self.size, self.rules = inner.rank, inner.size, inner.rules
        self.counts: dict[int, int] = {}

    def post(self, batch: Sequence[Send | Recv]) -> Handle:
        for item in batch:
            if isinstance(item, Send) and item.op.microbatch < 0:
                self.counts[item.op.microbatch] = self.counts.get(item.op.microbatch, 0) + 1
        return self.inner.post(batch)

    def abort(self, reason: str, **where: Any) -> None:
        self.inner.abort(reason, **where)

    def close(self) -> None:
        self.inner.close()


def test_p086_both_ends_on_one_rank_share_one_parameter_and_send_nothing(threads: Threads) -> None:
    def step(transport: Transport) -> tuple[int, bool, int]:
        counting = Counting(transport)
        placement = Placement.v(4, 2)
        stages = [PipelineStage(build(4)[s], s, 4, "cpu") for s in placement.stages_of(transport.rank)]
        executor = Executor(stages, filled(placement, 2), loss, transport=counting)
        tie(executor, tied_groups(4))
        x, y = batch()
        executor.step(*((x,) if executor.is_first else ()), target=y if executor.is_last else None)
        one = transport.rank == 1 or stages[0].submodule.tokens.weight is stages[1].submodule.out.weight
        return counting.counts.get(-6, 0) + counting.counts.get(-7, 0), one, len(list(executor.parameters()))

    assert threads(step, 2) == [(0, True, 2), (0, True, 4)]


class Sharded(nn.Module):
    """A layer whose weight is sharded over a tensor-parallel mesh."""

    def __init__(self, weight: torch.Tensor, mesh: DeviceMesh) -> None:
        super().__init__()
        self.weight = nn.Parameter(distribute_tensor(weight, mesh, [Shard(0)]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.weight.full_tensor()).tanh()


def test_sharded_parameters_are_tied_shard_by_shard(workers: WorkerPool) -> None:
    """Two stages of two ranks: each shard of the embedding meets the same shard of the head."""

    def on_gloo() -> torch.Tensor:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
        transport = C10dTransport(mesh.get_group("pp"))
        generator = torch.Generator().manual_seed(transport.rank)
        stage = PipelineStage(
            Sharded(torch.randn(WIDTH, WIDTH, generator=generator), mesh["tp"]), transport.rank, 2, "cpu"
        )
        executor = Executor(stage, gpipe(2, 1), functional.mse_loss, transport=transport)
        tie(executor, {"w": [(0, "weight"), (1, "weight")]})
        x = torch.linspace(0, 1, 2 * WIDTH).reshape(2, WIDTH)
        for _ in range(2):
            executor.step(*((x,) if executor.is_first else ()), target=x if executor.is_last else None)
        assert isinstance(stage.submodule.weight.grad, DTensor)
        return stage.submodule.weight.grad.full_tensor()

    weight = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(0)).requires_grad_()
    x = torch.linspace(0, 1, 2 * WIDTH).reshape(2, WIDTH)
    for _ in range(2):
        functional.mse_loss(functional.linear(functional.linear(x, weight).tanh(), weight).tanh(), x).backward()
    assert weight.grad is not None
    for grad in workers.run(on_gloo, 4, deadline=30):
        torch.testing.assert_close(grad, weight.grad)
