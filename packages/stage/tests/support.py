"""What many tests of this layer set up in the same way; imported as ``stage_support``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from stepwell_p2p import LoopbackFabric, Transport
from stepwell_stage import Executor, PipelineStage, Schedule

Threads = Callable[..., list[Any]]
"""The type of the fixture ``threads``."""


def seeded(*modules: nn.Module) -> list[nn.Module]:
    """The same weights on every rank."""
    generator = torch.Generator().manual_seed(0)
    for parameter in nn.ModuleList(modules).parameters():
        nn.init.uniform_(parameter, -0.5, 0.5, generator=generator)
    return list(modules)


def numbers(*shape: int, seed: int = 1) -> torch.Tensor:
    """The same values on every rank."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def build(
    transport: Transport,
    modules: Sequence[nn.Module],
    schedule: Schedule,
    loss_fn: Callable[..., Any] = functional.mse_loss,
    *,
    stage_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> Executor:
    """An executor over one module per stage."""
    stages = [
        PipelineStage(modules[index], index, len(modules), "cpu", **stage_options or {})
        for index in schedule.placement.stages_of(transport.rank)
    ]
    return Executor(stages, schedule, loss_fn, transport=transport, **options)


def step(executor: Executor, x: Any, y: Any, **options: Any) -> Any:
    """A step; inputs enter on the first stage's rank, targets on the last one's."""
    return executor.step(*((x,) if executor.is_first else ()), target=y if executor.is_last else None, **options)


def grads_of(executor: Executor) -> dict[int, list[Any]]:
    """Gradients of this rank's stages, by stage."""
    return {stage.stage_index: [p.grad for p in stage.submodule.parameters()] for stage in executor.stages}


def assert_like(results: Sequence[Mapping[int, list[Any]]], modules: Sequence[nn.Module], same: Any = None) -> None:
    """Every stage's gradients are those of the one-process modules: to the last bit, or as ``same`` compares."""
    found = {stage: grads for result in results for stage, grads in result.items()}
    assert sorted(found) == list(range(len(modules)))
    for stage, module in enumerate(modules):
        for grad, parameter in zip(found[stage], module.parameters(), strict=True):
            if same is None:
                assert torch.equal(grad, parameter.grad), stage
            else:
                same(grad, parameter.grad)


# Stages as torch's schedules drive them.

X = torch.arange(6.0).reshape(2, 3)


class Calls(nn.Module):
    """Calls a function; a parameter makes it a stage that learns."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self.weight, *args, **kwargs)


def scaled(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return weight * x


def stages_of(*functions: Any, options: Sequence[Mapping[str, Any]] | None = None) -> list[PipelineStage]:
    """Stages, of modules or functions, on the one rank of this process."""
    transport = LoopbackFabric(1).transport(0)
    made = []
    for index, function in enumerate(functions):
        module = function if isinstance(function, nn.Module) else Calls(function)
        extra = options[index] if options else {}
        made.append(PipelineStage(module, index, len(functions), "cpu", transport=transport, **extra))
        made[-1].stage_index_to_group_rank = dict.fromkeys(range(len(functions)), 0)
    return made


def vote(stages: Sequence[PipelineStage], *, backward: bool = True) -> list[int]:
    """What a schedule of torch does first; what each stage heard, 1 for static."""
    word: Any = None
    for stage in stages:
        stage.has_backward = backward
        word = stage._warmup_forward_vote(backward, received_acc=word)
    heard = []
    for stage in reversed(stages):
        word = stage._warmup_backward_result(received_result=word)
        heard.append(word.item())
    return heard


def prepare(
    stages: Sequence[PipelineStage], *args: Any, backward: bool = True, loss_fn: Any = None, target: Any = None
) -> list[int]:
    """What a schedule of torch does before its first step, for two microbatches."""
    heard = vote(stages, backward=backward)
    handed: Any = None
    for stage in stages:
        handed = stage._prepare_forward_infra(2, args if stage.is_first else handed, {}, has_backward=backward)
    handed = None
    for stage in reversed(stages) if backward else ():
        handed = stage._prepare_backward_infra(2, loss_fn, target, received_grad_meta=handed)
    for stage in stages:
        stage._post_metadata_inference_cleanup()
    return heard
