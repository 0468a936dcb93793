"""The schedule classes of ``torch.distributed.pipelining``, by name and arguments, over :class:`Executor`.

A script written for torch changes its imports. Each class makes an executor with a schedule of ours and calls it; what only these
classes have (``loss_kwargs``, a cleared list of losses, files loaded into a schedule) is here and nowhere else.
"""
# ruff: noqa: FBT001, FBT002 - the arguments are torch's, in torch's order

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, MutableSequence, Sequence
from typing import Any, Literal, get_args

import torch

from ..exceptions import StageUsageError
from ..plan._action import Action
from ..plan._csv import from_csv, to_csv
from ..plan._lower import PREFETCH, Plan
from ..plan._schedule import Schedule
from ..plan.schedules._dualpipe_v import dualpipe_v
from ..plan.schedules._forward_only import forward_only
from ..plan.schedules._gpipe import gpipe
from ..plan.schedules._interleaved_1f1b import interleaved_1f1b
from ..plan.schedules._looped_bfs import looped_bfs
from ..plan.schedules._one_f_one_b import one_f_one_b
from ..plan.schedules._zbv import zbv
from ..plan.schedules._zero_bubble import interleaved_zero_bubble
from ._executor import Executor
from ._stage import PipelineStage

Loss = Callable[..., torch.Tensor]
Format = Literal["compute_only", "compute_comms"]


class _TorchSchedule:
    """What all have: an executor, made for a schedule, and torch's methods on it. Mutable like the executor."""

    def __init__(
        self,
        stages: Sequence[PipelineStage],
        n_microbatches: int,
        loss_fn: Loss | None,
        *,
        args_chunk_spec: Sequence[Any] | None,
        kwargs_chunk_spec: Mapping[str, Any] | None,
        output_merge_spec: Any,
        scale_grads: bool,
        backward_requires_autograd: bool = True,
        defer_pp_recv: bool = False,
    ) -> None:
        if not backward_requires_autograd:
            raise StageUsageError(
                "backward_requires_autograd=False is for torch's custom functions, which run a backward of their own under"
                " torch.no_grad(); leave it out, and give Executor a StageProgram that has its own backward"
            )
        self._stages = () if isinstance(stages, PipelineStage) else tuple(stages)
        if not self._stages or not all(isinstance(stage, PipelineStage) for stage in self._stages):
            raise StageUsageError(
                f"{type(self).__name__} takes this rank's PipelineStages: one where torch's takes one, else a list of at least"
                f" one; got {stages!r}"
            )
        self._scale_grads = scale_grads
        self._n_microbatches = n_microbatches
        self._loss_fn = loss_fn
        self._loss_kwargs: Mapping[str, Any] = {}
        self._options: dict[str, Any] = {
            "prefetch": 0 if defer_pp_recv else PREFETCH,
            "args_chunk_spec": args_chunk_spec,
            "kwargs_chunk_spec": kwargs_chunk_spec,
            "output_merge_spec": output_merge_spec,
            "loss_weights": "mean" if scale_grads else "sum",
        }
        self._executor: Executor | None = None

    @property
    def executor(self) -> Executor:
        """What runs the steps; for :func:`tie` and everything else that torch's classes do not have."""
        if self._executor is None:
            raise StageUsageError(
                f"{type(self).__name__} has no schedule yet: call _load_csv(), or use one of the classes that have their own"
            )
        return self._executor

    @property
    def scale_grads(self) -> bool:
        """Whether gradients are those of a mean over the batch; said when the schedule is made."""
        return self._scale_grads

    @property
    def pipeline_order(self) -> dict[int, list[Action]]:
        """For each rank its compute actions in order."""
        return {rank: list(row) for rank, row in enumerate(self.executor.plan.schedule.actions)}

    @property
    def stage_index_to_group_rank(self) -> dict[int, int]:
        """The rank of each stage."""
        return dict(enumerate(self.executor.plan.placement.ranks))

    def step(
        self,
        *args: Any,
        target: Any = None,
        losses: MutableSequence[torch.Tensor] | None = None,
        return_outputs: bool = True,
        loss_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run one batch: :meth:`Executor.step`, or where no ``loss_fn`` was given :meth:`Executor.eval`.

        ``losses`` holds the losses of this batch alone afterwards; ``loss_kwargs`` go to the loss function with every microbatch.
        """
        run = self.executor.eval if self._loss_fn is None else self.executor.step
        options = kwargs | {"return_outputs": return_outputs, "loss_kwargs": loss_kwargs}
        return self._call(run, args, target=target, losses=losses, **options)

    def eval(
        self, *args: Any, target: Any = None, losses: MutableSequence[torch.Tensor] | None = None, **kwargs: Any
    ) -> Any:
        """Run one batch forward: :meth:`Executor.eval`; arguments as for :meth:`step`."""
        return self._call(self.executor.eval, args, target=target, losses=losses, **kwargs)

    def register_custom_function(self, computation_type: Any, custom_function: Any) -> None:
        """Torch's functions take torch's own context, so they are refused.

        Raises:
            StageUsageError: always; says what to use.
        """
        raise StageUsageError(
            f"a custom function for {computation_type} reaches into torch's runtime, which does not run here:"
            " give Executor handlers={Kind.B: …}, or a StageProgram"
        )

    def _use(self, schedule: Schedule | Plan) -> None:
        """Run this from now on."""
        if isinstance(schedule, Schedule) and self._loss_fn is None:
            schedule = forward_only(schedule.placement, schedule.num_microbatches)
        loss_fn = None if self._loss_fn is None else functools.partial(self._loss, self._loss_fn)
        self._executor = Executor(self._stages, schedule, loss_fn, **self._options)

    def _loss(self, loss_fn: Loss, *values: Any) -> torch.Tensor:
        return loss_fn(*values, **self._loss_kwargs)

    def _call(
        self,
        run: Callable[..., Any],
        args: tuple[Any, ...],
        /,
        *,
        losses: MutableSequence[torch.Tensor] | None,
        loss_kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Any:
        # What is no list the executor refuses, on every rank.
        found: Any = [] if losses is None or isinstance(losses, MutableSequence) else losses
        self._loss_kwargs = loss_kwargs or {}
        try:
            result = run(*args, losses=found, **options)
        finally:
            self._loss_kwargs = {}
        if losses is not None and self.executor.is_last:
            losses[:] = found
        return result


class PipelineScheduleSingle(_TorchSchedule):
    """Torch's schedules with one stage a rank; each class says its order.

    Args:
        stage: this rank's stage.
        n_microbatches: M, any number from 1.
        loss_fn: from outputs and target of a microbatch to its loss; on every rank, as with torch. Without, steps run forward
            only.
        args_chunk_spec: as :class:`Executor` takes it, and likewise the next two.
        kwargs_chunk_spec: see there.
        output_merge_spec: see there.
        scale_grads: True where ``loss_fn`` averages: gradients are those of the mean over the batch, which is a division by M
            where microbatches are equally large; False where it sums.

    Raises:
        StageUsageError: as :class:`Executor`.
    """

    def __init__(
        self,
        stage: PipelineStage,
        n_microbatches: int,
        loss_fn: Loss | None = None,
        args_chunk_spec: Sequence[Any] | None = None,
        kwargs_chunk_spec: Mapping[str, Any] | None = None,
        output_merge_spec: Any = None,
        scale_grads: bool = True,
    ) -> None:
        super().__init__(
            (stage,),
            n_microbatches,
            loss_fn,
            args_chunk_spec=args_chunk_spec,
            kwargs_chunk_spec=kwargs_chunk_spec,
            output_merge_spec=output_merge_spec,
            scale_grads=scale_grads,
        )
        self._use(self._order(stage.num_stages, n_microbatches))

    def _order(self, num_ranks: int, n_microbatches: int) -> Schedule:
        raise StageUsageError(f"{type(self).__name__} has no order of its own: use ScheduleGPipe or Schedule1F1B")


class ScheduleGPipe(PipelineScheduleSingle):
    """:func:`stepwell_stage.schedules.gpipe`."""

    def _order(self, num_ranks: int, n_microbatches: int) -> Schedule:
        return gpipe(num_ranks, n_microbatches)


class Schedule1F1B(PipelineScheduleSingle):
    """:func:`stepwell_stage.schedules.one_f_one_b`; M may be smaller than the number of stages."""

    def _order(self, num_ranks: int, n_microbatches: int) -> Schedule:
        return one_f_one_b(num_ranks, n_microbatches)


class PipelineScheduleMulti(_TorchSchedule):
    """Torch's schedules with several stages a rank. By itself it has no order: load one with ``_load_csv``, as with torch.

    Args:
        stages: this rank's stages.
        n_microbatches: as for :class:`PipelineScheduleSingle`, and likewise the next five.
        loss_fn: see there.
        args_chunk_spec: see there.
        kwargs_chunk_spec: see there.
        output_merge_spec: see there.
        use_full_backward: torch does not use it any more either.
        scale_grads: see :class:`PipelineScheduleSingle`.
        backward_requires_autograd: True only.
        defer_pp_recv: whether a receive is posted just before its use instead of some actions ahead.

    Raises:
        StageUsageError: as :class:`Executor`; or for an argument that has no meaning here.
    """

    def __init__(
        self,
        stages: Sequence[PipelineStage],
        n_microbatches: int,
        loss_fn: Loss | None = None,
        args_chunk_spec: Sequence[Any] | None = None,
        kwargs_chunk_spec: Mapping[str, Any] | None = None,
        output_merge_spec: Any = None,
        use_full_backward: bool | None = None,
        scale_grads: bool = True,
        backward_requires_autograd: bool = True,
        defer_pp_recv: bool = False,
    ) -> None:
        if use_full_backward is not None:
            raise StageUsageError("use_full_backward has no meaning any more, with torch neither: leave it out")
        super().__init__(
            stages,
            n_microbatches,
            loss_fn,
            args_chunk_spec=args_chunk_spec,
            kwargs_chunk_spec=kwargs_chunk_spec,
            output_merge_spec=output_merge_spec,
            scale_grads=scale_grads,
            backward_requires_autograd=backward_requires_autograd,
            defer_pp_recv=defer_pp_recv,
        )

    def _load_csv(self, filename: str | os.PathLike[str], format: Format = "compute_only") -> None:
        """Run what a file says: a schedule, or with ``format="compute_comms"`` a plan.

        Raises:
            ScheduleError: the file holds none; says where and why.
            StageUsageError: it holds the other of the two, or is for another number of microbatches; or as :class:`Executor`.
        """
        _check_format(format)
        loaded = from_csv(filename)
        found = "compute_only" if isinstance(loaded, Schedule) else "compute_comms"
        if found != format:
            raise StageUsageError(f"{filename} is {found}, but format={format!r}: pass format={found!r}")
        if loaded.num_microbatches != self._n_microbatches:
            raise StageUsageError(
                f"{filename} is for {loaded.num_microbatches} microbatches, but n_microbatches is {self._n_microbatches}"
            )
        self._use(loaded)

    def _dump_csv(self, filename: str | os.PathLike[str], format: Format = "compute_comms") -> None:
        """Write what runs to a file that torch reads too."""
        plan = self.executor.plan
        _check_format(format)
        to_csv(plan if format == "compute_comms" else plan.schedule, filename, for_torch=True)


def _check_format(format: str) -> None:
    if format not in get_args(Format):
        raise StageUsageError(f"format must be one of {', '.join(get_args(Format))}, got {format!r}")


class _Multi(PipelineScheduleMulti):
    """The arguments of torch's schedules that have an order of their own."""

    def __init__(
        self,
        stages: Sequence[PipelineStage],
        n_microbatches: int,
        loss_fn: Loss | None = None,
        args_chunk_spec: Sequence[Any] | None = None,
        kwargs_chunk_spec: Mapping[str, Any] | None = None,
        output_merge_spec: Any = None,
        scale_grads: bool = True,
        backward_requires_autograd: bool = True,
        defer_pp_recv: bool = False,
    ) -> None:
        super().__init__(
            stages,
            n_microbatches,
            loss_fn,
            args_chunk_spec,
            kwargs_chunk_spec,
            output_merge_spec,
            scale_grads=scale_grads,
            backward_requires_autograd=backward_requires_autograd,
            defer_pp_recv=defer_pp_recv,
        )
        every_stage = len(self._stages) == self._stages[0].num_stages
        self._use(self._order(1 if every_stage else self._stages[0].group_size, len(self._stages)))

    def _order(self, num_ranks: int, stages_per_rank: int) -> Schedule:
        raise NotImplementedError


class ScheduleInterleaved1F1B(_Multi):
    """:func:`stepwell_stage.schedules.interleaved_1f1b`; any M."""

    def _order(self, num_ranks: int, stages_per_rank: int) -> Schedule:
        return interleaved_1f1b(num_ranks, self._n_microbatches, stages_per_rank=stages_per_rank)


class ScheduleInterleavedZeroBubble(_Multi):
    """:func:`stepwell_stage.schedules.interleaved_zero_bubble`; any M."""

    def _order(self, num_ranks: int, stages_per_rank: int) -> Schedule:
        return interleaved_zero_bubble(num_ranks, self._n_microbatches, stages_per_rank=stages_per_rank)


class ScheduleZBVZeroBubble(_Multi):
    """:func:`stepwell_stage.schedules.zbv`; any M."""

    def _order(self, num_ranks: int, stages_per_rank: int) -> Schedule:
        return zbv(num_ranks, self._n_microbatches)


class ScheduleDualPipeV(_Multi):
    """:func:`stepwell_stage.schedules.dualpipe_v`; M may be smaller than the number of stages."""

    def _order(self, num_ranks: int, stages_per_rank: int) -> Schedule:
        return dualpipe_v(num_ranks, self._n_microbatches)


class ScheduleLoopedBFS(_Multi):
    """:func:`stepwell_stage.schedules.looped_bfs`; without chunk specs, as with torch."""

    def __init__(
        self,
        stages: Sequence[PipelineStage],
        n_microbatches: int,
        loss_fn: Loss | None = None,
        output_merge_spec: Any = None,
        scale_grads: bool = True,
        backward_requires_autograd: bool = True,
        defer_pp_recv: bool = False,
    ) -> None:
        super().__init__(
            stages,
            n_microbatches,
            loss_fn,
            output_merge_spec=output_merge_spec,
            scale_grads=scale_grads,
            backward_requires_autograd=backward_requires_autograd,
            defer_pp_recv=defer_pp_recv,
        )

    def _order(self, num_ranks: int, stages_per_rank: int) -> Schedule:
        return looped_bfs(num_ranks, self._n_microbatches, stages_per_rank=stages_per_rank)


_CLASSES: dict[str, type[PipelineScheduleSingle] | type[PipelineScheduleMulti]] = {
    "1F1B": Schedule1F1B,
    "Interleaved1F1B": ScheduleInterleaved1F1B,
    "GPipe": ScheduleGPipe,
    "LoopedBFS": ScheduleLoopedBFS,
    "InterleavedZeroBubble": ScheduleInterleavedZeroBubble,
    "PipelineScheduleSingle": PipelineScheduleSingle,
    "PipelineScheduleMulti": PipelineScheduleMulti,
    "ZBVZeroBubble": ScheduleZBVZeroBubble,
    "DualPipeV": ScheduleDualPipeV,
}


def get_schedule_class(schedule_name: str) -> type[PipelineScheduleSingle] | type[PipelineScheduleMulti]:
    """The class that torch calls by this name, such as ``Interleaved1F1B``, in upper or lower case.

    Raises:
        StageUsageError: there is none; lists them.
    """
    found = {name.lower(): cls for name, cls in _CLASSES.items()}.get(schedule_name.lower())
    if found is None:
        raise StageUsageError(f"there is no schedule class {schedule_name!r}: choose one of {', '.join(_CLASSES)}")
    return found
