"""Joins pieces of a model, a schedule and a world into something that trains."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import nn

from stepwell_stage import (
    Executor,
    LossWeights,
    ModelSplit,
    PipelineStage,
    Schedule,
    Timeline,
    schedules,
    split_sequential,
    tie,
)

from ._gather import gather_timeline
from ._launch import World
from .exceptions import PipelineError


@attrs.frozen(eq=False)
class StepResult:
    """What a step or an evaluation came to.

    Attributes:
        loss: the batch's loss (the weighted sum of its microbatches'), on every rank; None in an evaluation without target.
        outputs: the model's outputs for the whole batch, on the rank of the last stage, if asked for; elsewhere None.
    """

    loss: float | None
    outputs: Any


def pipeline(
    pieces: nn.Module | ModelSplit | Sequence[nn.Module | Callable[[], nn.Module]],
    world: World,
    *,
    loss_fn: Callable[..., torch.Tensor],
    schedule: str | Schedule = "1f1b",
    microbatches: int | None = None,
    loss_weights: LossWeights = "mean",
    init_fn: Callable[[nn.Module], object] | None = None,
    trace: bool = False,
) -> Pipeline:
    """A pipeline over the ranks of ``world``.

    Args:
        pieces: the model, if it runs its layers one after the other: it is cut into stages by
            :func:`stepwell_stage.split_sequential`, with as even numbers of parameters as can be, and tied parameters stay tied.
            Any other model as :func:`stepwell_stage.split` cut it, into as many stages as the schedule has.
            Or modules that run one after the other, each with the outputs of the one before as its positional arguments.
            Consecutive pieces are put together to as many stages as the schedule has, as evenly as their number allows; those of
            different stages share no parameters. A piece may be a function that makes the module, called only on the rank that
            runs it.
        world: which rank this is; see :func:`stepwell.launch`.
        loss_fn: from the model's outputs and a target to the loss of one microbatch.
        schedule: a name (one of ``stepwell_stage.schedules.BY_NAME``), or a schedule for as many ranks as there are.
        microbatches: how many microbatches a batch is cut into; needed with a name, and by default as many as ranks.
        loss_weights: see :class:`stepwell_stage.Executor`.
        init_fn: gives values to this rank's part of a whole model that is on the meta device; see
            :meth:`stepwell_stage.SequentialSplit.module` and :meth:`stepwell_stage.ModelSplit.module`.
        trace: whether to note what happens when, for :meth:`Pipeline.timeline`.

    Raises:
        StageUsageError: the model cannot be cut; names the line that forbids it.
        PipelineError: the pieces, the schedule and the number of ranks do not fit together.
    """
    plan = make_schedule(schedule, world.size, microbatches)
    if isinstance(pieces, nn.Module | ModelSplit):
        cut = split_sequential(pieces, plan.placement.num_stages) if isinstance(pieces, nn.Module) else pieces
        stages = cut.stages(plan.placement, world.rank, world.device, init_fn=init_fn)
        tied = cut.tied
    else:
        if init_fn is not None:
            raise PipelineError("init_fn is for a whole model; give pieces as functions that make them, values and all")
        stages, tied = _stages_of_pieces(pieces, plan, world), {}
    executor = Executor(
        stages, plan, loss_fn, transport=world.transport, loss_weights=loss_weights, share_loss=True, trace=trace
    )
    if tied:
        tie(executor, tied)
    return Pipeline(executor, world, cut=pieces if isinstance(pieces, ModelSplit) else None)


class Pipeline:
    """A model over all ranks, in terms of the whole model: every rank passes the whole batch, and gets the loss.

    Made by :func:`stepwell.pipeline`. Every method is called on every rank.

    Attributes:
        executor: what runs this rank's stages.
        world: which rank this is.
        last_rank: the rank of the last stage, which gets outputs and timelines.
    """

    def __init__(self, executor: Executor, world: World, *, cut: ModelSplit | None = None) -> None:
        self.executor = executor
        self.world = world
        self._cut = cut
        self.last_rank = executor.plan.placement.ranks[-1]

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of this rank's stages, for an optimizer."""
        return self.executor.parameters()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Likewise with names that are the same however the pieces are spread: the piece's number, and the name in it."""
        for stage in self.executor.stages:
            if isinstance(stage.submodule, nn.Module):
                yield from stage.submodule.named_parameters()

    def train(self, *, mode: bool = True) -> None:
        """Put this rank's modules into training mode, or out of it."""
        for stage in self.executor.stages:
            if isinstance(stage.submodule, nn.Module):
                stage.submodule.train(mode)

    def step(
        self,
        *args: Any,
        target: Any = None,
        return_outputs: bool = False,
        arg_mbs: Sequence[tuple[Any, ...]] | None = None,
        kwarg_mbs: Sequence[Mapping[str, Any]] | None = None,
        target_mbs: Sequence[Any] | None = None,
        **kwargs: Any,
    ) -> StepResult:
        """Run a batch forward and backward; gradients accumulate in ``.grad``.

        Args:
            args: the model's inputs: of the whole batch, on every rank.
            target: what ``loss_fn`` gets. Only the last stage's rank uses it.
            return_outputs: whether the result shall hold the outputs.
            arg_mbs: instead of ``args``: those of each microbatch, cut by the caller into parts of any size.
            kwarg_mbs: likewise of ``kwargs``.
            target_mbs: likewise of ``target``.
            kwargs: keyword inputs of this rank's stages.

        Raises:
            PipelineError: of a model that :func:`stepwell_stage.split` cut, some inputs are given whole and others in
                microbatches, or not equally many of them.
            StageUsageError: the arguments do not fit; and see :meth:`stepwell_stage.Executor.step`.
        """
        args, given = self._given(args, kwargs, target, arg_mbs, kwarg_mbs, target_mbs)
        outputs = self.executor.step(*args, return_outputs=return_outputs, **given)
        return StepResult(self._loss(), outputs)

    def eval(
        self,
        *args: Any,
        target: Any = None,
        return_outputs: bool = True,
        arg_mbs: Sequence[tuple[Any, ...]] | None = None,
        kwarg_mbs: Sequence[Mapping[str, Any]] | None = None,
        target_mbs: Sequence[Any] | None = None,
        **kwargs: Any,
    ) -> StepResult:
        """Run a batch forward, without gradients; arguments as in :meth:`step`.

        The loss is computed if a target is given. Modules stay in the mode they are in, see :meth:`train`.
        """
        args, given = self._given(args, kwargs, target, arg_mbs, kwarg_mbs, target_mbs)
        outputs = self.executor.eval(*args, return_outputs=return_outputs, **given)
        return StepResult(self._loss(), outputs)

    def timeline(self) -> Timeline | None:
        """What all ranks did in the last step, on the rank of the last stage; None elsewhere. Needs ``trace=True``.

        Times are comparable where ranks share a clock, which they do on one host.

        Raises:
            PipelineError: no step was traced on this rank.
        """
        if not self.executor.events:
            raise PipelineError("nothing was traced: pass trace=True to pipeline(), and take a step first")
        return gather_timeline(self.executor, to=self.last_rank)

    def _given(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        target: Any,
        arg_mbs: Sequence[tuple[Any, ...]] | None,
        kwarg_mbs: Sequence[Mapping[str, Any]] | None,
        target_mbs: Sequence[Any] | None,
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What this rank's executor is given of the whole batch."""
        is_first, is_last = self.executor.is_first, self.executor.is_last
        targets = {"target": target if is_last else None, "target_mbs": target_mbs if is_last else None}
        if self._cut is None:
            mine = {"arg_mbs": arg_mbs if is_first else None, "kwarg_mbs": kwarg_mbs}
            return args if is_first else (), {**kwargs, **targets, **mine}
        is_wanted = is_first or self._cut.inputs == "every"
        if arg_mbs is None and kwarg_mbs is None:
            return (), {**(self._cut.keywords(*args, **kwargs) if is_wanted else {}), **targets}
        if args or kwargs:
            raise PipelineError("some inputs are given whole and others in microbatches: cut all of them, or none")
        count = len(arg_mbs if arg_mbs is not None else kwarg_mbs or ())
        if arg_mbs is not None and kwarg_mbs is not None and len(kwarg_mbs) != count:
            raise PipelineError(f"arg_mbs has {count} microbatches, kwarg_mbs {len(kwarg_mbs)}: give as many of both")
        if not is_wanted:
            return (), targets
        parts = zip(arg_mbs or [()] * count, kwarg_mbs or [{}] * count, strict=True)
        return (), {"kwarg_mbs": [self._cut.keywords(*part, **keywords) for part, keywords in parts], **targets}

    def _loss(self) -> float | None:
        return None if self.executor.loss is None else self.executor.loss.item()


class _Chain(nn.Module):
    """Consecutive pieces as one stage, under the numbers that they have in the whole model."""

    def __init__(self, pieces: Sequence[nn.Module], first: int) -> None:
        super().__init__()
        for number, piece in enumerate(pieces, first):
            self.add_module(str(number), piece)

    def forward(self, *values: Any, **kwargs: Any) -> Any:
        """Run the pieces one after the other; keyword inputs go to the first."""
        result: Any = values
        for piece in self.children():
            result = piece(*(result if isinstance(result, tuple | list) else (result,)), **kwargs)
            kwargs = {}
        return result


def _stages_of_pieces(
    pieces: Sequence[nn.Module | Callable[[], nn.Module]], plan: Schedule, world: World
) -> list[PipelineStage]:
    """This rank's stages, of consecutive pieces, as evenly as their number allows."""
    if not isinstance(pieces, Sequence):
        raise PipelineError(
            f"pieces must be a module or a list of modules, got {type(pieces).__name__}: make a list of it"
        )
    num_stages = plan.placement.num_stages
    if len(pieces) < num_stages:
        raise PipelineError(
            f"{plan.name} on {world.size} ranks has {num_stages} stages, but the model has {len(pieces)} pieces;"
            " use fewer ranks or cut the model into more pieces"
        )
    bounds = [len(pieces) * bound // num_stages for bound in range(num_stages + 1)]
    _refuse_shared_parameters(pieces, bounds)
    stages = []
    for index in plan.placement.stages_of(world.rank):
        start, end = bounds[index : index + 2]
        own = [_made(pieces[number], number) for number in range(start, end)]
        stages.append(PipelineStage(_Chain(own, start), index, num_stages, world.device))
    return stages


def _made(piece: object, number: int) -> nn.Module:
    made = piece() if callable(piece) and not isinstance(piece, nn.Module) else piece
    if not isinstance(made, nn.Module):
        how = "is" if made is piece else "made"
        raise PipelineError(f"piece {number} must be a module, or a function that makes one, but it {how} {made!r}")
    return made


def _refuse_shared_parameters(pieces: Sequence[nn.Module | Callable[[], nn.Module]], bounds: Sequence[int]) -> None:
    """Refuse pieces that hold one parameter and run on different stages: nothing would keep its copies equal."""
    seen: dict[nn.Parameter, tuple[int, str]] = {}
    for start, end in itertools.pairwise(bounds):
        found: dict[nn.Parameter, tuple[int, str]] = {}
        for number in range(start, end):
            piece = pieces[number]
            for name, parameter in piece.named_parameters() if isinstance(piece, nn.Module) else ():
                if parameter in seen:
                    other, its_name = seen[parameter]
                    raise PipelineError(
                        f"pieces {other} and {number} share a parameter ({its_name} and {name}), but run on different stages,"
                        " where its copies would drift apart: pass the whole model, whose tied parameters stay tied, or put"
                        " these pieces together"
                    )
                found.setdefault(parameter, (number, name))
        seen |= found


def make_schedule(schedule: str | Schedule, ranks: int, microbatches: int | None) -> Schedule:
    """The schedule of a name, or the given one, if it fits.

    Raises:
        PipelineError: it does not, or nothing has that name.
    """
    if isinstance(schedule, Schedule):
        if microbatches not in (None, schedule.num_microbatches):
            raise PipelineError(
                f"{schedule.name} was made for {schedule.num_microbatches} microbatches, but microbatches={microbatches}"
            )
        if schedule.placement.num_ranks != ranks:
            raise PipelineError(
                f"{schedule.name} was made for {schedule.placement.num_ranks} ranks, but there are {ranks}"
            )
        return schedule
    if not isinstance(schedule, str):
        raise PipelineError(
            f"schedule must be a name or a Schedule, such as one_f_one_b({ranks}, 8), got a {type(schedule).__name__}"
        )
    make = schedules.BY_NAME.get(schedule)
    if make is None:
        raise PipelineError(f"unknown schedule {schedule!r}; known are {', '.join(schedules.BY_NAME)}")
    return make(ranks, ranks if microbatches is None else microbatches)
