"""Stages cut out of the graph of one step, in a pipeline of stepwell-stage: losses and gradients are those of one process."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import stepwell
import stepwell_stage
from stepwell.exceptions import PipelineError
from stepwell_graphpasses import GraphProgram, GraphStages, PassConfig, automatic_owners, shard, split_stages, trace
from stepwell_graphpasses.exceptions import CaptureError, GraphUsageError
from stepwell_meta.testing import WorkerPool
from stepwell_p2p import C10dTransport
from stepwell_stage import StageProgram, clip_grad_norm_, load_state_dict, schedules, state_dict
from stepwell_stage.exceptions import StageExecutionError
from stepwell_stage.testing import PROGRAM_CHECKS, ProgramCheck, check_stage_program

# Every promise of a stage program.


class First(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.linear(x)
        return torch.tanh(hidden), torch.sin(hidden.detach())


class Middle(nn.Module):
    """What programs are tried on: values with and without gradient, a weight used twice, one that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4))
        self.table, self.unused = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(2))

    def forward(self, tanh: torch.Tensor, sin: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found = torch.tanh(F.linear(tanh, self.weight, self.bias)) + self.table[ids]
        found = F.linear(found, self.weight)
        return found, found * tanh + sin.mean(), ids > 0


class Last(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, mm: torch.Tensor, add_1: torch.Tensor, gt: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
        loss = ((self.linear(mm) + add_1).sum(1) * gt).square().mean()
        return loss, {"rows": gt.sum(), "number": 3}


class Around(nn.Module):
    """Three stages: what the middle one takes is made before it, and read behind it."""

    def __init__(self, middle: nn.Module | None = None, last: nn.Module | None = None) -> None:
        super().__init__()
        self.first, self.middle, self.last = First(), middle or Middle(), last or Last()

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
        return self.last(*self.middle(*self.first(x), ids))  # type: ignore[no-any-return]


def around_step(model: nn.Module, x: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
    return model(x, ids)  # type: ignore[no-any-return]


def cut_around(index: int, module: nn.Module) -> GraphProgram:
    """A program for one of the three stages, with this module in it."""
    model = Around(**{("", "middle", "last")[index]: module})
    step = trace(model, around_step, {"x": torch.randn(2, 4), "ids": torch.randint(3, (2,))})
    return split_stages(step, {"first": 0, "middle": 1, "last": 2}).program(index, model)


@pytest.mark.parametrize("check", PROGRAM_CHECKS, ids=lambda check: check.name)
@pytest.mark.parametrize("index", [1, 2], ids=["middle", "last"])
def test_a_stage_of_a_step_keeps_every_promise_of_a_stage_program(index: int, check: ProgramCheck) -> None:
    torch.manual_seed(0)
    module = (First, Middle, Last)[index]()
    microbatches = [
        [torch.randn(2, 4).requires_grad_(), torch.randn(2, 4).requires_grad_(index == 2), torch.randint(3, (2,))]
        for _ in range(4)
    ]
    for part in microbatches if index == 2 else ():
        part[2] = part[2] > 0
    assert isinstance(cut_around(index, module), StageProgram)
    check_stage_program(functools.partial(cut_around, index), module=module, microbatches=microbatches, checks=[check])


# Whole pipelines.


class Block(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """Odd widths; the embedding goes round all blocks to the head (a wire past stages), and may be the head's weight."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 7)
        self.layers = nn.ModuleList(Block(7, 9 + 2 * number) for number in range(4))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.head = nn.Linear(7, 13, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        embedded = x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head((x + embedded) * self.scale)  # type: ignore[no-any-return]


def train_fn(model: nn.Module, tokens: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()), {"top": logits.detach().max()}


def made(*, tied: bool = False) -> Model:
    torch.manual_seed(0)
    return Model(tied=tied)


def batch(seed: int, rows: int = 8) -> torch.Tensor:
    return torch.randint(13, (rows, 6), generator=torch.Generator().manual_seed(seed))


def one_process(model: nn.Module, tokens: torch.Tensor, weight: float = 1.0) -> tuple[float, float]:
    """Gradients of four microbatches; their mean loss and named loss."""
    losses, tops = [], []
    for part in tokens.split(2):
        loss, named = train_fn(model, part)
        (loss * (weight / 4)).backward()
        losses.append(loss.double().item() / 4)
        tops.append(named["top"].double().item() / 4)
    return sum(losses), sum(tops)


@contextmanager
def one_thread() -> Iterator[None]:
    """As ranks that are threads of one process compute; sums of matrix products depend on it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def cut(model: nn.Module, stages: int) -> GraphStages:
    return split_stages(trace(model, train_fn, {"tokens": batch(0, 2)}), automatic_owners(model, stages))


@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
@pytest.mark.parametrize(
    ("ranks", "schedule"),
    [
        (2, "gpipe"),
        (2, "1f1b"),
        (4, "1f1b"),
        (4, "zb-h1"),
        (2, "interleaved-1f1b"),
        (2, "interleaved-zero-bubble"),
        (2, "zbv"),
    ],
)
def test_loss_and_gradients_are_those_of_one_process_bit_for_bit(ranks: int, schedule: str, tied: bool) -> None:
    def main(world: stepwell.World) -> Any:
        pipe = stepwell.graph_pipeline(stages, model, world, schedule=plan)
        for seed in range(2):
            for parameter in pipe.parameters():
                parameter.grad = None
            result = pipe.step(tokens=batch(seed))
        return result.loss, pipe.executor.named_losses, dict(pipe.named_parameters())

    reference = made(tied=tied)
    model = copy.deepcopy(reference)  # of all ranks, as threads share it; a tied weight is copied for its second stage
    plan = schedules.BY_NAME[schedule](ranks, 4)
    stages = cut(reference, plan.placement.num_stages)
    found = stepwell.launch(main, ranks=ranks)
    with one_thread():
        for seed in range(2):
            reference.zero_grad()
            expected = one_process(reference, batch(seed))
    names = set()
    for loss, named, parameters in found:
        assert (loss, float(named["top"])) == pytest.approx(expected, rel=1e-15)
        for name, parameter in parameters.items():
            other = reference.get_parameter(name)
            if tied and "embed" in name:  # its parts are summed over microbatches first
                assert torch.allclose(parameter.grad, other.grad, rtol=1e-5, atol=1e-7)
            else:
                assert torch.equal(parameter.grad, other.grad), name
            names.add(name)
    assert names == {name for name, _ in reference.named_parameters()}


def test_ranks_that_are_threads_may_each_capture_and_cut_the_model() -> None:
    """Captures of one model took each other's parameters, and left their hooks in it; cuts of one graph gave stages on "meta"."""

    def main(world: stepwell.World) -> Any:
        first = cut(model, 4)
        second = split_stages(shared, automatic_owners(model, 4))
        losses = []
        for stages in (first, second):
            pipe = stepwell.graph_pipeline(stages, model, world, schedule="1f1b", microbatches=4)
            losses.append(pipe.step(tokens=batch(0)).loss)
            for parameter in pipe.parameters():
                parameter.grad = None
        assert losses[0] == losses[1]
        return losses[0]

    model, fast = made(tied=False), torch.backends.mkldnn.enabled
    shared = trace(model, train_fn, {"tokens": batch(0, 2)})
    found = stepwell.launch(main, ranks=4)
    with one_thread():
        expected, _ = one_process(copy.deepcopy(model), batch(0))
    assert found == [pytest.approx(expected, rel=1e-15)] * 4
    assert torch.backends.mkldnn.enabled == fast
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def over_gloo(schedule: str, mode: str, replicas: int, tied: bool) -> dict[str, Any]:
    """Largest differences from one process, relative to the largest gradient; and a checkpoint there and back."""
    ranks = dist.get_world_size() // replicas
    axis = "dp_replicate" if mode == "ddp" else "fsdp"
    mesh = init_device_mesh("cpu", (ranks, replicas), mesh_dim_names=("pp", axis))
    replica = mesh.get_local_rank(axis)
    world = stepwell.World(mesh.get_local_rank("pp"), ranks, torch.device("cpu"), C10dTransport(mesh.get_group("pp")))
    model, reference = made(tied=tied), made(tied=tied)
    made_schedule = schedules.BY_NAME[schedule](ranks, 4)
    pipe = stepwell.graph_pipeline(
        cut(model, made_schedule.placement.num_stages),
        model,
        world,
        schedule=made_schedule,
        config=PassConfig(dp_mode=mode),
        plan=shard("embed", "layers.*"),
        mesh=mesh[axis] if replicas > 1 else None,
    )
    saved = state_dict(pipe.executor, to=0)
    before = {name: value.clone() for name, value in state_dict(pipe.executor).items()}
    found = {"loss": 0.0, "gradient": 0.0, "sharded": 0, "saved": sorted(saved)}
    for seed in range(2):
        result = pipe.step(tokens=batch(10 * seed + replica))
        for other in range(replicas):
            loss, _ = one_process(reference, batch(10 * seed + other), 1 / replicas)
            if other == replica:
                found["loss"] = max(found["loss"], abs(result.loss - loss))
    norm = clip_grad_norm_(pipe.executor, float("inf"))
    expected = torch.nn.utils.clip_grad_norm_(reference.parameters(), float("inf"))
    found["norm"] = abs(float(norm - expected) / float(expected))
    for name, parameter in pipe.named_parameters():
        whole = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
        other = reference.get_parameter(name).grad
        found["gradient"] = max(found["gradient"], float((whole - other).abs().max() / other.abs().max()))
        found["sharded"] += isinstance(parameter, DTensor)
    torch.optim.SGD(list(pipe.parameters()), lr=0.1).step()
    torch.optim.SGD(reference.parameters(), lr=0.1).step()
    stepped = state_dict(pipe.executor, to=0)
    if stepped:  # on rank 0
        state = reference.state_dict()
        found["stepped"] = max(float((stepped[name] - state[name]).abs().max()) for name in state)
    load_state_dict(pipe.executor, before)
    again = pipe.step(tokens=batch(replica))
    found["again"] = abs(again.loss - one_process(made(tied=tied), batch(replica))[0])
    return found


@pytest.mark.parametrize(
    ("ranks", "schedule", "mode", "replicas", "tied"),
    [
        (2, "1f1b", "fsdp", 1, True),
        (4, "zb-h1", "fsdp", 1, False),
        (2, "interleaved-1f1b", "fsdp", 1, True),
        (4, "1f1b", "fsdp", 2, True),
        (4, "zb-h1", "ddp", 2, True),
        (4, "interleaved-1f1b", "fsdp", 2, False),
    ],
)
def test_over_gloo_with_and_without_data_parallel_stages(
    workers: WorkerPool, ranks: int, schedule: str, mode: str, replicas: int, tied: bool
) -> None:
    for rank, found in enumerate(workers.run(over_gloo, ranks, schedule, mode, replicas, tied, deadline=110)):
        assert found["loss"] <= 1e-6
        assert found["again"] <= 1e-6
        assert found["norm"] <= 1e-6
        assert (
            found["gradient"] <= 1e-6
        )  # some roundings of the largest term: other threads, replicas, and orders of sums
        assert (found["sharded"] > 0) == (replicas > 1 and mode == "fsdp")
        if rank == 0:
            assert found["saved"] == sorted(made(tied=tied).state_dict())
            assert found["stepped"] <= 1e-6


def test_what_does_not_fit_is_refused_on_every_rank_before_anything_runs() -> None:
    model = made()

    def run(stages: int, message: str, error: type[Exception], act: Callable[[stepwell.Pipeline], Any]) -> None:
        def main(world: stepwell.World) -> None:
            act(stepwell.graph_pipeline(made_stages, copy.deepcopy(model), world, microbatches=4))

        made_stages = cut(model, stages)

        with pytest.raises(error, match=message):
            stepwell.launch(main, ranks=2)

    run(3, "1f1b on 2 ranks has 2 stages, but the step was cut into 3", PipelineError, lambda pipe: None)
    for act, message in (
        (lambda pipe: pipe.step(tokens=batch(0, 7)), r"tokens: expected shape \(2, 6\), got \(1, 6\)"),
        (lambda pipe: pipe.step(tokens=batch(0), target=batch(0)), "the loss is computed within the graph"),
        (
            lambda pipe: pipe.step(tokens=batch(0) if pipe.executor.is_first else None),
            "tokens: expected a tensor, got NoneType",
        ),
    ):
        run(2, message, (StageExecutionError, GraphUsageError), act)  # type: ignore[arg-type]


class Masked(nn.Module):
    """A transformer in small whose glue makes a mask that every block reads."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 8)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 12, 0.0, batch_first=True) for _ in range(4))
        self.head = nn.Linear(8, 13)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        mask = torch.full((x.shape[1], x.shape[1]), -torch.inf).triu(1) + (tokens[:1] == 0).float() * -9.0
        for layer in self.layers:
            x = layer(x, src_mask=mask)
        return self.head(x)  # type: ignore[no-any-return]


def test_a_stage_of_split_is_refused_and_the_graph_is_cut_instead() -> None:
    """A capture took all that such a stage computes for absent, and spoke of another way than the example's."""
    torch.manual_seed(0)
    model = Masked()
    models = [copy.deepcopy(model) for _ in range(2)]
    pieces = stepwell_stage.split(model, 2, example=(batch(0, 2),))
    placement = schedules.one_f_one_b(2, 4).placement
    (stage,) = pieces.stages(placement, 0, "cpu")
    with pytest.raises(CaptureError, match=r"a stage that stepwell_stage\.split\(\) made.* split_stages\(trace\(model"):
        GraphProgram(stage.submodule)
    stages = cut(model, 2)

    def main(world: stepwell.World) -> Any:
        pipe = stepwell.graph_pipeline(stages, models[world.rank], world, schedule="1f1b", microbatches=4)
        return pipe.step(tokens=batch(1)).loss, dict(pipe.named_parameters())

    found = stepwell.launch(main, ranks=2)
    with one_thread():
        loss, _ = one_process(model, batch(1))
    assert [result[0] for result in found] == pytest.approx([loss] * 2, rel=1e-15)
    for _, parameters in found:
        for name, parameter in parameters.items():
            assert torch.equal(parameter.grad, model.get_parameter(name).grad), name
