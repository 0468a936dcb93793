"""What the stages of a pipeline really take, measured through their executor."""

from __future__ import annotations

import contextlib
import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import torch
from torch import nn

from ..exceptions import StageUsageError
from ..plan._action import Action, Kind
from ..plan._costs import Costs
from ..plan._count import whole
from ..plan._timeline import Event, Timeline
from ._executor import Executor
from ._measure import synchronize
from ._probe import undisturbed
from ._stage import PipelineStage
from ._whole import Word, decide


def profile_stages(executor: Executor, *args: Any, target: Any = None, repeats: int = 3, **kwargs: Any) -> Costs:
    """Costs of a pipeline's stages, from steps that leave no trace: for :func:`simulate`, :func:`plan_search` and pictures.

    A collective of every rank: call it where :meth:`Executor.step` would be called, with the same arguments. Gradients, buffers
    and random numbers are afterwards as before; hooks of modules and parameters run.

    Example::

        costs = profile_stages(executor, inputs)    # on the rank of the first stage
        simulate(executor.plan, costs).makespan

    Args:
        executor: of this rank's stages. What it surrounds its steps with, such as tied gradients, is left out.
        args: as for the step.
        target: as for the step.
        repeats: how many steps are timed, after one to warm up.
        kwargs: as for the step.

    Returns:
        The same on every rank: of each stage the median time of its F, and of its B or of its I and W, of one microbatch; bytes
        that its F saves for backward, parameters apart, and that it sends on; what overlapped pairs save, where a handler runs
        them. Messages take no time: ``attrs.evolve`` says
        otherwise.

    Raises:
        StageUsageError: ``repeats`` is below 1; or as :meth:`Executor.step`, with all else that a step raises.
    """
    if whole(repeats, "repeats", StageUsageError) < 1:
        raise StageUsageError(f"repeats must be at least 1, got {repeats}")
    saved = _Saved(executor.stages)
    with contextlib.ExitStack() as stack:
        for stage in executor.stages:
            stack.enter_context(_without_trace(stage))
        first = executor.twin([saved.around])
        _run(first)(*args, target=target, return_outputs=False, **kwargs)
        timed = executor.twin([_synchronized(executor.stages)])
        events: list[Event] = []
        for _ in range(repeats):
            _run(timed)(*args, target=target, return_outputs=False, **kwargs)
            events += timed.events
    sent = first.output_bytes()
    mine = [
        [
            stage.stage_index,
            saved.most.get(stage.stage_index, 0),
            sent.get(stage.stage_index, 0),
            _medians(events, stage),
            _pairs(events, stage),
        ]
        for stage in executor.stages
    ]
    payload, _ = decide(executor.transport, (json.dumps(mine).encode(), ()), _together)
    return _costs(json.loads(payload))


def _run(executor: Executor) -> Callable[..., Any]:
    return executor.step if executor.plan.schedule.has_backward else executor.eval


def _medians(events: Sequence[Event], stage: PipelineStage) -> dict[str, float]:
    own = [event for event in events if event.action.stage == stage.stage_index]
    kinds = {event.action.kind for event in own} & {Kind.F, Kind.B, Kind.I, Kind.W}
    return {kind.value: statistics.median(e.seconds for e in own if e.action.kind is kind) for kind in kinds}


def _pairs(events: Sequence[Event], stage: PipelineStage) -> list[tuple[int, str, float]]:
    """Overlapped pairs that a handler ran, by their forward's stage: stage and kind of their backward, and the median time."""
    found: dict[tuple[int, str], list[float]] = {}
    for event in events:
        if event.action.parts and event.action.stage == stage.stage_index:
            backward = event.action.parts[1]
            found.setdefault((backward.stage, backward.kind.value), []).append(event.seconds)
    return [(*backward, statistics.median(seconds)) for backward, seconds in found.items()]


def _together(words: Sequence[Word]) -> Word:
    return json.dumps([row for payload, _ in words for row in json.loads(payload)]).encode(), ()


def _costs(rows: list[tuple[int, int, int, dict[str, float], list[tuple[int, str, float]]]]) -> Costs:
    rows = sorted(rows)
    events = [
        Event(0, Action(stage, Kind(kind), 0), 0.0, seconds)
        for stage, _, _, medians, _ in rows
        for kind, seconds in medians.items()
    ]
    events += [
        Event(0, Action.overlap(Action(stage, Kind.F, 1), Action(other, Kind(kind), 0)), 0.0, seconds)
        for stage, _, _, _, pairs in rows
        for other, kind, seconds in pairs
    ]
    times = Costs.measured(Timeline(events), len(rows))
    return attrs.evolve(times, activation_bytes=[row[1] for row in rows], output_bytes=[row[2] for row in rows])


class _Saved:
    """Counts what forwards save for backward. Mutable: the most bytes of one microbatch, by stage."""

    def __init__(self, stages: Sequence[PipelineStage]) -> None:
        self.most: dict[int, int] = {}
        modules = [stage.submodule for stage in stages if isinstance(stage.submodule, nn.Module)]
        self._parameters = [parameter for module in modules for parameter in module.parameters()]

    @contextlib.contextmanager
    def around(self, action: Action) -> Iterator[None]:
        """Count during an F."""
        if action.leaves[0].kind is not Kind.F:
            yield
            return
        sizes: dict[int, int] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            with contextlib.suppress(NotImplementedError, RuntimeError):  # a tensor without storage holds no memory
                storage = tensor.untyped_storage()
                sizes[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield
        for parameter in self._parameters:
            with contextlib.suppress(NotImplementedError, RuntimeError):
                sizes.pop(parameter.untyped_storage().data_ptr(), None)
        self.most[action.stage] = max(self.most.get(action.stage, 0), sum(sizes.values()))


def _synchronized(stages: Sequence[PipelineStage]) -> Callable[[Action], contextlib.AbstractContextManager[None]]:
    """A context at whose end a device has done what it was given, so that clocks see it."""
    devices = {stage.stage_index: stage.device for stage in stages}

    @contextlib.contextmanager
    def around(action: Action) -> Iterator[None]:
        yield
        synchronize(devices[action.stage])

    return around


@contextlib.contextmanager
def _without_trace(stage: PipelineStage) -> Iterator[None]:
    module = stage.submodule
    parameters = list(module.parameters()) if isinstance(module, nn.Module) else []
    grads = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        with undisturbed(module, stage.device):
            yield
    finally:
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad = grad
