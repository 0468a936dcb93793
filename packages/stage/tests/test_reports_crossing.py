"""Reports of users about what crosses between stages, missing gradients and skip connections, each with the right behaviour."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from stage_support import Threads, build, grads_of, numbers, seeded, step
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn import functional

from stepwell_meta.exceptions import PipeliningMetadataError
from stepwell_meta.testing import WorkerPool
from stepwell_p2p import C10dTransport, Transport, Wire
from stepwell_p2p.exceptions import PeerFailure
from stepwell_stage import Executor, PipelineStage, Schedule
from stepwell_stage.exceptions import StageExecutionError
from stepwell_stage.schedules import BY_NAME, gpipe, interleaved_1f1b, one_f_one_b

WIDTH = 4


def assert_like_plain(
    threads: Threads,
    make: Callable[[], list[nn.Module]],
    schedule: Schedule,
    x: torch.Tensor,
    y: torch.Tensor,
    forward: Callable[..., Any] = lambda modules, x: nn.Sequential(*modules)(x),
    bitwise: bool = True,
    **options: Any,
) -> None:
    """Two steps; every gradient is that of the one-process modules, and bitwise where microbatches are added in order."""

    def run(transport: Transport) -> dict[int, list[Any]]:
        executor = build(transport, make(), schedule, stage_options=options)
        for _ in range(2):
            step(executor, x, y)
        return grads_of(executor)

    modules = make()
    count = schedule.num_microbatches
    for _ in range(2):
        for part, target in zip(x.tensor_split(count), y.tensor_split(count), strict=True):
            (functional.mse_loss(forward(modules, part), target) * (len(part) / len(x))).backward()
    results = threads(run, schedule.placement.num_ranks)
    found = {stage: grads for result in results for stage, grads in result.items()}
    for stage, module in enumerate(modules):
        for grad, parameter in zip(found[stage], module.parameters(), strict=True):
            if bitwise and schedule.name in ("gpipe", "1f1b"):
                assert torch.equal(grad, parameter.grad), stage
            else:
                torch.testing.assert_close(grad, parameter.grad)


# Values.


class Embeds(nn.Module):
    """Returns values and where they belong: indices that an uninitialised tensor could not stand in for."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.linear(x), (x[:, 0] > 0).long() + 5


class Looks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, h: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        assert set(index.tolist()) <= {5, 6}  # nobody runs this on made-up values, not even to learn shapes
        return self.linear(h) + self.table(index)


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_p051_p145_indices_between_stages_are_never_made_up(threads: Threads, name: str) -> None:
    x, y = numbers(6, WIDTH), numbers(6, WIDTH, seed=2)
    assert_like_plain(
        threads, lambda: seeded(Embeds(), Looks()), BY_NAME[name](2, 3), x, y, lambda m, part: m[1](*m[0](part))
    )


@pytest.mark.parametrize("kind", ["more outputs", "other call"])
def test_p049_p058_the_error_names_stage_output_and_counts(threads: Threads, kind: str) -> None:
    """Two stages a rank, so the rank alone would not say which of them it was."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)
            self.calls = 0

        def forward(self, x: torch.Tensor) -> Any:
            self.calls += 1
            h = self.linear(x)
            return (h, h) if kind == "other call" or self.calls == 3 else h

    def run(transport: Transport) -> str:
        modules = seeded(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), Odd(), nn.Linear(WIDTH, WIDTH))
        executor = build(transport, modules, interleaved_1f1b(2, 4))
        with pytest.raises((PipeliningMetadataError, StageExecutionError, PeerFailure)) as failure:
            step(executor, numbers(8, WIDTH), numbers(8, WIDTH))
        return str(failure.value)

    for message in threads(run, 2):
        if kind == "more outputs":
            assert "stage 2" in message
            assert "outputs: count mismatch: expected 1, got 2" in message
        else:
            assert "stage 3" in message
            assert "takes 2 positional arguments but 3 were given" in message


class Conv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)
        self.layouts: list[bool] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.layouts.append(x.is_contiguous(memory_format=torch.channels_last))
        return torch.tanh(self.conv(x))


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1"])
def test_p065_channels_last_survives_with_its_values(threads: Threads, name: str) -> None:
    made: list[Conv] = []

    def make() -> list[nn.Module]:
        modules = seeded(*(Conv() for _ in range(2)))
        for module in modules:
            module.to(memory_format=torch.channels_last)
        made.extend(modules)
        return modules

    x = numbers(4, 3, 5, 5).to(memory_format=torch.channels_last)
    # A convolution's kernel adds in an order that depends on how many threads it gets.
    assert_like_plain(threads, make, BY_NAME[name](2, 2), x, numbers(4, 3, 5, 5, seed=2), bitwise=False)
    assert all(all(conv.layouts) for conv in made)


# Gradients that are missing, or that come late.


class Sometimes(nn.Module):
    """Uses its second input in some microbatches only, by what the data say."""

    def __init__(self, *, in_first: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.in_first = in_first

    def forward(self, h: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        is_first = bool(h[0, -1] > 50)
        return self.linear(h) + other if is_first is self.in_first else self.linear(h)


class Two(nn.Module):
    """Marks the first microbatch in its last column."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.linear(x) + x[:, -1:] * torch.tensor([0.0, 0, 0, 1]), self.other(x)


@pytest.mark.parametrize("in_first", [True, False])
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1"])
def test_p069_a_gradient_that_only_some_microbatches_have(threads: Threads, name: str, *, in_first: bool) -> None:
    x = numbers(6, WIDTH)
    x[:, -1] = torch.tensor([100.0, 100, 0, 0, 0, 0])
    assert_like_plain(
        threads,
        lambda: seeded(Two(), Sometimes(in_first=in_first)),
        BY_NAME[name](2, 3),
        x,
        numbers(6, WIDTH, seed=2),
        lambda m, part: m[1](*m[0](part)),
    )


def weights() -> list[torch.Tensor]:
    return [numbers(WIDTH, WIDTH, seed=seed) for seed in (3, 4, 5)]


class ShardedTwo(nn.Module):
    def __init__(self, mesh: Any) -> None:
        super().__init__()
        first, other, _ = weights()
        self.first = nn.Parameter(distribute_tensor(first, mesh, [Shard(1)]))
        self.other = nn.Parameter(distribute_tensor(other, mesh, [Shard(1)]))
        self.mesh = mesh

    def forward(self, x: torch.Tensor) -> tuple[DTensor, DTensor]:
        whole = DTensor.from_local(x, self.mesh, [Replicate()], run_check=False)
        return whole @ self.first, whole @ self.other


class ShardedSometimes(nn.Module):
    """Which microbatches use the second input is counted, so that the plain model can do the same."""

    def __init__(self, mesh: Any, *, in_first: bool) -> None:
        super().__init__()
        self.last = nn.Parameter(distribute_tensor(weights()[2], mesh, [Shard(0)]))
        self.in_first = in_first
        self.calls = 0

    def forward(self, h: DTensor, other: DTensor) -> torch.Tensor:
        uses = (self.calls % 3 == 0) is self.in_first
        self.calls += 1
        out: Any = h @ self.last + (other @ self.last if uses else 0)
        return out.redistribute(placements=[Replicate()]).to_local()


def sharded_steps(*, in_first: bool) -> list[torch.Tensor]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    stage = dist.get_rank() // 2
    module = ShardedTwo(mesh["tp"]) if stage == 0 else ShardedSometimes(mesh["tp"], in_first=in_first)
    transport = C10dTransport(mesh["pp"].get_group())
    executor = Executor(
        PipelineStage(module, stage, 2, "cpu", get_mesh=lambda key: mesh["tp"]),
        one_f_one_b(2, 3),
        functional.mse_loss,
        transport=transport,
    )
    for _ in range(2):
        step(executor, numbers(6, WIDTH), numbers(6, WIDTH, seed=2))
    transport.close()
    return [parameter.grad.full_tensor() for parameter in executor.parameters()]


@pytest.mark.parametrize("in_first", [True, False])
def test_p069_dtensor_gradients_that_only_some_microbatches_have(workers: WorkerPool, *, in_first: bool) -> None:
    results = workers.run(sharded_steps, 4, in_first=in_first, deadline=90)
    first, other, last = (weight.requires_grad_() for weight in weights())
    for _ in range(2):
        parts = zip(numbers(6, WIDTH).tensor_split(3), numbers(6, WIDTH, seed=2).tensor_split(3), strict=True)
        for number, (x, y) in enumerate(parts):
            uses = (number == 0) is in_first
            out = x @ first @ last + (x @ other @ last if uses else 0)
            (functional.mse_loss(out, y) / 3).backward()
    for rank, grads in enumerate(results):
        expected = [first.grad, other.grad] if rank < 2 else [last.grad]
        for grad, wanted in zip(grads, expected, strict=True):
            torch.testing.assert_close(grad, wanted, rtol=1e-5, atol=1e-5)


class Turns(nn.Module):
    """Its output needs a gradient in the first microbatch or in the others, by what the data say."""

    def __init__(self, *, in_first: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.in_first = in_first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.linear(x)
        return h if bool(x[0, -1] > 50) is self.in_first else h.detach()


@pytest.mark.parametrize("in_first", [True, False])
def test_p069_an_output_that_needs_a_gradient_only_sometimes(threads: Threads, *, in_first: bool) -> None:
    """From yes to no is right as it is; from no to yes is refused by the stage, and right with dynamic shapes."""
    x = numbers(6, WIDTH)
    x[:, -1] = torch.tensor([100.0, 100, 0, 0, 0, 0])
    y = numbers(6, WIDTH, seed=2)

    def make() -> list[nn.Module]:
        return seeded(Turns(in_first=in_first), nn.Linear(WIDTH, WIDTH))

    assert_like_plain(threads, make, one_f_one_b(2, 3), x, y, shapes="dynamic")
    if in_first:
        assert_like_plain(threads, make, one_f_one_b(2, 3), x, y)
    else:
        with pytest.raises(PipeliningMetadataError, match=r"requires_grad mismatch(.|\n)*shapes=\"dynamic\""):
            assert_like_plain(threads, make, one_f_one_b(2, 3), x, y)


class OwnAttention(torch.autograd.Function):
    """An attention kernel with a backward of its own, which gives all gradients at once."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        weights = torch.softmax(q @ k.transpose(-1, -2), -1)
        ctx.save_for_backward(q, k, v, weights)
        return weights @ v

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        q, k, v, weights = ctx.saved_tensors
        inner = grad @ v.transpose(-1, -2)
        scores = weights * (inner - (inner * weights).sum(-1, keepdim=True))
        return scores @ k, scores.transpose(-1, -2) @ q, weights.transpose(-1, -2) @ grad


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return OwnAttention.apply(*self.qkv(x).chunk(3, -1))


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_p073_an_attention_kernel_first_on_an_input_without_grad(threads: Threads, name: str) -> None:
    x, y = numbers(6, 3, WIDTH), numbers(6, 3, WIDTH, seed=2)
    assert_like_plain(threads, lambda: seeded(Attends(), Attends()), BY_NAME[name](2, 3), x, y)


# Skip connections.


class Residual(nn.Module):
    """Attends to the outputs of all stages before it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, *before: torch.Tensor) -> torch.Tensor:
        total = before[0]
        for other in before[1:]:
            total = total + other
        return torch.tanh(self.linear(total)) * 2


def run_residual(modules: Sequence[nn.Module], x: torch.Tensor) -> torch.Tensor:
    outputs = [modules[0](x)]
    for module in modules[1:]:
        outputs.append(module(*outputs))
    return outputs[-1]


@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_p076_p079_p080_every_stage_reads_all_before_it(threads: Threads, name: str) -> None:
    """Each value is sent once to each stage that reads it; microbatches under way at once do not take each other's."""
    schedule = BY_NAME[name](2, 5)
    count = schedule.placement.num_stages
    wires = [Wire(source, 0, stage, source) for stage in range(1, count) for source in range(stage)]
    x, y = numbers(10, WIDTH), numbers(10, WIDTH, seed=2)
    assert_like_plain(
        threads, lambda: seeded(*(Residual() for _ in range(count))), schedule, x, y, run_residual, wires=wires
    )


@pytest.mark.parametrize("schedule", [gpipe(4, 5), one_f_one_b(4, 5)], ids=lambda schedule: schedule.name)
def test_p080_gradients_of_several_users_are_added_in_the_order_of_one_process(
    threads: Threads, schedule: Schedule
) -> None:
    """Bitwise: the latest user's gradient first, as autograd does."""
    wires = [Wire(source, 0, stage, source) for stage in range(1, 4) for source in range(stage)]
    x, y = numbers(10, WIDTH), numbers(10, WIDTH, seed=2)
    assert_like_plain(
        threads, lambda: seeded(*(Residual() for _ in range(4))), schedule, x, y, run_residual, wires=wires
    )
