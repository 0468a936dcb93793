"""Runs a plan's actions for one rank."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, MutableSequence, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import nn

from stepwell_p2p import C10dTransport, LoopbackFabric, Placement, Transport, Wire, chain_wires

from ..exceptions import StageUsageError
from ..plan._action import Action, Kind
from ..plan._lower import PREFETCH, Plan, lower
from ..plan._schedule import Schedule
from ..plan._timeline import Event
from ..plan._wiring import same_wiring
from ..plan.schedules._forward_only import forward_only
from ._bind import Around, Handlers, check_handlers
from ._cutter import Cutter
from ._draws import are_threads
from ._loss import LossWeights, check_weights, pack_losses, unpack_losses, weights_of
from ._microbatch import Batch, merge
from ._program import is_reduced, is_sharded
from ._run import Run, Trace
from ._stage import PipelineStage
from ._stage_run import StepData


@runtime_checkable
class OpensChannels(Protocol):
    """A transport that makes and connects its channels when it is told the pipeline; called once, on every rank together."""

    def open(self, placement: Placement, wires: Sequence[Wire]) -> None:
        """Make the channels that these wires need."""
        ...


class Executor:
    """Runs a schedule over this rank's stages.

    Making one opens nothing and sends nothing; the schedule is lowered and proved under the transport's rules. The first step,
    and the first evaluation, agree with the other ranks on what will cross. Mutable; used by one thread.

    Example::

        executor = Executor(stages, one_f_one_b(4, 8), loss_fn=cross_entropy)
        executor.step(inputs)             # on the rank of the first stage
        executor.step(target=targets)     # on the rank of the last
        executor.step()                   # between

    Args:
        stages: this rank's stage or stages, all that the schedule places here.
        schedule: what to run; a :class:`Plan` if it is lowered already.
        loss_fn: on the last stage's rank: from the outputs and the target of one microbatch to a tensor with one element; or to a
            dict or tuple of such, whose sum is the loss; or to such a tensor and a dict of named ones to report. Called with the
            outputs alone where no target is given.
        transport: what carries values; by default that of the stages, else the default process group of torch.distributed,
            else, for a schedule of one rank, none is needed.
        loss_weights: what each microbatch's loss counts in the gradient. ``"mean"``: its share of the samples, so that the
            gradient is that of a mean over the batch; ``"sum"``: 1; M numbers; or a function of the target, such as one that
            counts its tokens: its share of the sum over all microbatches. Needed on the last stage's rank only.
        args_chunk_spec: for each positional input, along which dim it is cut, as a :class:`TensorChunkSpec`, or None for one that
            every microbatch gets whole. By default tensors are cut along dim 0.
        kwargs_chunk_spec: likewise by name; keyword inputs that it does not name follow the default.
        output_merge_spec: likewise for the outputs that :meth:`step` puts together; None there for a value that is the same for
            every microbatch.
        prefetch: how many compute actions ahead of its use a receive is posted, in a schedule and in evaluation; a :class:`Plan`
            says for itself. More hides more of the way between ranks, less needs less memory.
        share_loss: whether every rank gets the loss, with one more small message for each stage and step. The same on every rank.
        trace: whether to note when each action starts and ends, in :attr:`events`.
        handlers: what runs in place of actions, by :class:`Kind`, or for custom actions by name. A handler is given an
            :class:`ActionCall`; what the executor would do itself it runs with ``call.run()``, once, and other things before,
            after or around it. Gathering and reducing (UNSHARD, RESHARD, REDUCE_GRAD) it may do its own way. The waiting for
            what an action receives comes before its handler.
        around_action: functions from an action to a context, such as ``lambda action: nvtx.range(str(action))``, that is entered
            before each action of the plan and left after it.

    Attributes:
        loss: on the last stage's rank, and with ``share_loss`` on every rank, the loss of the last step's or eval's batch: the
            weighted sum of its microbatches' losses, a float64 scalar; else None.
        named_losses: likewise of the named parts that ``loss_fn`` returned.
        around_step: entered around every :meth:`step`, in order; see :func:`tie`.

    Raises:
        StageUsageError: the stages are not those that the schedule places on this rank, or something that they need is missing.
        ScheduleError: the schedule cannot be carried out.
    """

    def __init__(
        self,
        stages: PipelineStage | Sequence[PipelineStage],
        schedule: Schedule | Plan,
        loss_fn: Callable[..., torch.Tensor] | None = None,
        *,
        transport: Transport | None = None,
        loss_weights: LossWeights = "mean",
        args_chunk_spec: Sequence[Any] | None = None,
        kwargs_chunk_spec: Mapping[str, Any] | None = None,
        output_merge_spec: Any = None,
        prefetch: int = PREFETCH,
        share_loss: bool = False,
        trace: bool = False,
        handlers: Handlers | None = None,
        around_action: Sequence[Around] = (),
    ) -> None:
        self.stages = (stages,) if isinstance(stages, PipelineStage) else tuple(stages)
        self.wiring = same_wiring([stage.wires for stage in self.stages], schedule.placement.num_stages)
        self.plan = schedule if isinstance(schedule, Plan) else lower_for(self.stages, schedule, prefetch)
        if self.plan.links != self.wiring.links:
            raise StageUsageError(
                f"{self.plan.schedule.name} was lowered for the links {self.plan.links}, but the stages' wires make the links"
                f" {self.wiring.links}: pass the schedule, or lower it with these links"
            )
        self.transport = _find_transport(self.stages, self.plan, transport)
        self.share_loss = share_loss
        self.trace = trace
        self._trace = Trace()
        self.loss: torch.Tensor | None = None
        self.named_losses: dict[str, torch.Tensor] = {}
        self.around_step: list[Callable[[], contextlib.AbstractContextManager[None]]] = []
        self._loss_fn = loss_fn
        self._loss_weights = loss_weights
        self._args_spec = args_chunk_spec
        self._kwargs_spec = kwargs_chunk_spec
        self._output_spec = output_merge_spec
        self._prefetch = prefetch
        check_handlers(handlers or {}, around_action, self.plan, self.transport.rank)
        self._cutter = Cutter(self.plan.num_microbatches, args_chunk_spec, kwargs_chunk_spec)
        self._handlers = dict(handlers or {})
        if Kind.OVERLAP not in self._handlers:
            # Forwards first: what they made leaves before the backward begins, and the gradient has more time to arrive.
            self.plan = self.plan.with_pairs_apart()
        self._around_action = tuple(around_action)
        _check_stages(self.stages, self.plan, self.transport, loss_fn)
        check_weights(loss_weights, self.plan.num_microbatches)
        _check_options(loss_fn, args_chunk_spec, kwargs_chunk_spec)
        self._train = self._make_run(self.plan)
        self._eval: Run | None = None
        self._is_open = False
        self._busy = threading.Lock()

    @property
    def is_first(self) -> bool:
        """Whether this rank holds the first stage, and so takes the inputs."""
        return any(stage.is_first for stage in self.stages)

    @property
    def is_last(self) -> bool:
        """Whether this rank holds the last stage, and so takes the targets and gives outputs and losses."""
        return any(stage.is_last for stage in self.stages)

    @property
    def events(self) -> tuple[Event, ...]:
        """With ``trace``, what this rank did in the last step or eval, and when, in seconds of ``time.perf_counter``."""
        return self._trace.events()

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of this rank's stages, for an optimizer; one that several stages share once."""
        modules = (stage.submodule for stage in self.stages if isinstance(stage.submodule, nn.Module))
        yield from dict.fromkeys(parameter for module in modules for parameter in module.parameters())

    def step(
        self,
        *args: Any,
        target: Any = None,
        losses: MutableSequence[torch.Tensor] | None = None,
        return_outputs: bool = True,
        arg_mbs: Sequence[tuple[Any, ...]] | None = None,
        kwarg_mbs: Sequence[Mapping[str, Any]] | None = None,
        target_mbs: Sequence[Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run one batch through the schedule: forward, loss and backward. Gradients accumulate in ``.grad``.

        Args:
            args: the batch's inputs, on the first stage's rank only. Tensors are cut along dim 0 into microbatches; those of no
                dimension, or of size 1 there, go to every microbatch.
            target: the batch's targets, on the last stage's rank only; cut likewise.
            losses: a list that gets the loss of each microbatch, on the last stage's rank.
            return_outputs: whether to keep and return the outputs.
            arg_mbs: instead of ``args``: the positional inputs of each microbatch, cut by the caller into parts of any size.
            kwarg_mbs: likewise keyword inputs; others may be given whole beside them.
            target_mbs: likewise targets.
            kwargs: keyword inputs of this rank's stages; cut likewise.

        Returns:
            On the last stage's rank the outputs of the whole batch, detached, if asked for; elsewhere None.

        Raises:
            StageUsageError: the arguments do not fit.
            PipeliningMetadataError: stages disagree about what crosses, or an output is not what was agreed on.
            StageExecutionError: a stage or the loss function raised, on this rank.
            PeerFailure: another rank failed; says which, where, and its error.
            TransportError: the network failed.
        """
        if not self._train.has_backward:
            raise StageUsageError(f"{self.plan.schedule.name} has no backward: call eval()")
        with self._alone(), contextlib.ExitStack() as around:
            batch = Batch(args, kwargs, target, arg_mbs, kwarg_mbs, target_mbs)
            return self._run(self._train, batch, losses, around, return_outputs=return_outputs)

    def eval(
        self,
        *args: Any,
        target: Any = None,
        losses: MutableSequence[torch.Tensor] | None = None,
        return_outputs: bool = True,
        arg_mbs: Sequence[tuple[Any, ...]] | None = None,
        kwarg_mbs: Sequence[Mapping[str, Any]] | None = None,
        target_mbs: Sequence[Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run one batch forward without gradients. Arguments, result and errors are those of :meth:`step`.

        A batch of fewer samples than microbatches runs in as many microbatches as it has samples. The loss is computed where
        there is a target. Modules stay in the mode they are in: call ``module.eval()`` yourself. Gradients are not touched.
        """
        with self._alone(), torch.no_grad():
            if self._eval is None:
                plan = self.plan
                if self._train.has_backward:
                    forwards = forward_only(plan.placement, plan.num_microbatches)
                    plan = lower_for(self.stages, forwards, self._prefetch)
                self._eval = self._make_run(plan)
            batch = Batch(args, kwargs, target, arg_mbs, kwarg_mbs, target_mbs)
            return self._run(self._eval, batch, losses, None, return_outputs=return_outputs)

    def twin(self, around_action: Sequence[Around]) -> Executor:
        """Another for the same steps of the same stages, traced, within contexts of its own and with none around its steps."""
        return Executor(
            self.stages,
            self.plan,
            self._loss_fn,
            transport=self.transport,
            loss_weights=self._loss_weights,
            args_chunk_spec=self._args_spec,
            kwargs_chunk_spec=self._kwargs_spec,
            output_merge_spec=self._output_spec,
            prefetch=self._prefetch,
            share_loss=self.share_loss,
            trace=True,
            handlers=self._handlers,
            around_action=around_action,
        )

    def output_bytes(self) -> dict[int, int]:
        """Of each of this rank's stages the bytes of one microbatch's outputs, the most that crossed so far."""
        return {k: v for run in (self._eval, self._train) if run is not None for k, v in run.output_bytes().items()}

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Refuse a step, of which the other ranks know nothing, in the middle of another."""
        if not self._busy.acquire(blocking=False):
            raise StageUsageError(
                f"rank {self.transport.rank} called step() or eval() while a step of the same executor is under way, in what"
                " this calls (a stage, the loss, a handler, around_action) or in another thread: call it when that has returned"
            )
        try:
            yield
        finally:
            self._busy.release()

    def _make_run(self, plan: Plan) -> Run:
        return Run(
            self.stages,
            plan,
            self.wiring,
            self.transport,
            self._loss_fn,
            share_loss=self.share_loss,
            handlers=self._handlers,
            around_action=self._around_action,
        )

    def _run(
        self,
        run: Run,
        batch: Batch,
        losses: MutableSequence[torch.Tensor] | None,
        around: contextlib.ExitStack | None,
        *,
        return_outputs: bool,
    ) -> Any:
        """A step, with what is to be entered around it; without, an evaluation."""
        # Casts of weights that a surrounding autocast keeps are of the weights before the last optimizer step.
        torch.clear_autocast_cache()
        if not self._is_open:
            if isinstance(self.transport, OpensChannels):
                wires = self.wiring.wires or chain_wires(self.wiring.num_stages)
                self.transport.open(self.plan.placement, wires)
            self._is_open = True
        data = StepData((), (), None, (), return_outputs)
        # On the first microbatch alone, a spec that does not fit is found before anything runs backward.
        data.check_output = lambda output: merge([output], self._output_spec)
        try:
            if around is not None:
                for enter in self.around_step:
                    around.enter_context(enter())
                self._check_gradients()
            self._check(batch)
            if losses is not None and not isinstance(losses, MutableSequence):
                raise StageUsageError(f"losses is a list, to which those of the batch are added, got {losses!r}")
            cut = None
            if self.is_first:
                data.args, data.kwargs, cut = self._cutter.inputs(batch, fewer=around is None)
                data.targets = self._cutter.targets(batch, cut.sizes)
            alike = self.stages[0].alike if self.transport.size > 1 else None
            given = None if alike is None else alike.look(batch)
        except BaseException as error:  # also of the batch's own containers and of contexts, and an interrupt
            run.refuse(str(error) if isinstance(error, StageUsageError) else f"{type(error).__name__}: {error}")
            raise
        sizes = run.prepare(cut, given).sizes
        try:
            if not self.is_first:
                data.args, data.kwargs = [()] * len(sizes), self._cutter.keywords(batch, sizes)
                data.targets = self._cutter.targets(batch, sizes)
            if self.is_last and (around is not None or data.targets is not None):
                data.weights = weights_of(self._loss_weights, sizes, data.targets)
        except BaseException as error:
            run.fail(f"{type(error).__name__}: {error}")
            raise
        self.loss, self.named_losses = None, {}
        self._trace = run.go(data, trace=self.trace)
        if data.losses:
            self.loss = _weighted(data.losses, data.weights)
            names = {name: None for parts in data.named.values() for name in parts}
            self.named_losses = {
                name: _weighted({m: parts[name] for m, parts in data.named.items() if name in parts}, data.weights)
                for name in names
            }
        if self.share_loss:
            word = run.share(pack_losses(self.loss, self.named_losses) if self.is_last else None)
            if not self.is_last:
                self.loss, self.named_losses = unpack_losses(word)
        if losses is not None:
            losses.extend(data.losses[microbatch] for microbatch in sorted(data.losses))
        if self.is_last and return_outputs:
            try:
                return merge([data.outputs[microbatch] for microbatch in sorted(data.outputs)], self._output_spec)
            except BaseException as error:  # the other ranks would begin a next step
                run.fail(f"{type(error).__name__}: {error}")
                raise
        return None

    def _check_gradients(self) -> None:
        """Refuse a step whose gradients would not be made, or not be those of the model."""
        if not torch.is_grad_enabled():
            raise StageUsageError(
                "step() runs backward, but gradients are disabled here; leave torch.no_grad() or call eval()"
            )
        for stage in self.stages:
            if stage.to_tie:
                raise StageUsageError(
                    f"the model was cut through tied parameters ({', '.join(stage.to_tie)}), and nothing keeps their copies"
                    " equal: call tie(executor, split.tied) before the first step"
                )

    def _check(self, batch: Batch) -> None:
        """Refuse what is given on a rank where it does not belong."""
        batch.check()
        if batch.has_args and not self.is_first:
            given = f"{len(batch.args)} positional inputs" if batch.args else "arg_mbs"
            raise StageUsageError(
                f"rank {self.transport.rank} was given {given}, but these enter at the first stage, which"
                " is on another rank; pass what later stages need as keyword arguments"
            )
        if batch.has_target and not self.is_last:
            raise StageUsageError(
                f"rank {self.transport.rank} was given a target, but the loss is computed by the last stage, on another rank"
            )


def lower_for(stages: Sequence[PipelineStage], schedule: Schedule, prefetch: int) -> Plan:
    """The plan for these stages of one rank: their wires, and what those of them that are data parallel do.

    What such stages of other ranks do is of no concern here: it changes no message.

    Raises:
        ScheduleError: the stages' wires do not fit the schedule, or one another.
    """
    wiring = same_wiring([stage.wires for stage in stages], schedule.placement.num_stages)
    sharded = [stage.stage_index for stage in stages if is_sharded(stage.program)]
    reduced = [stage.stage_index for stage in stages if is_reduced(stage.program)] if schedule.has_backward else []
    return lower(schedule, wiring.links, prefetch=prefetch, sharded=sharded, reduced=reduced)


def _find_transport(stages: Sequence[PipelineStage], plan: Plan, transport: Transport | None) -> Transport:
    given = {id(stage.transport): stage.transport for stage in stages if stage.transport is not None}
    if transport is None and len(given) > 1:
        raise StageUsageError("the stages of a rank use one transport, but were given different ones")
    found = transport or next(iter(given.values()), None)
    if found is None:
        if plan.placement.num_ranks == 1:
            found = LoopbackFabric(1).transport(0)
        elif dist.is_available() and dist.is_initialized():
            found = C10dTransport()
        else:
            raise StageUsageError(
                f"{plan.schedule.name} runs on {plan.placement.num_ranks} ranks and needs a transport: pass transport=, or"
                " initialise torch.distributed first"
            )
    if found.size != plan.placement.num_ranks:
        raise StageUsageError(
            f"{plan.schedule.name} runs on {plan.placement.num_ranks} ranks, but the transport has {found.size}"
        )
    return found


def _check_stages(
    stages: Sequence[PipelineStage],
    plan: Plan,
    transport: Transport,
    loss_fn: Callable[..., torch.Tensor] | None,
) -> None:
    expected = plan.placement.stages_of(transport.rank)
    got = tuple(sorted(stage.stage_index for stage in stages))
    if got != expected:
        raise StageUsageError(
            f"{plan.schedule.name} places stages {list(expected)} on rank {transport.rank}, but it was given {list(got)};"
            f" the placement is {list(plan.placement.ranks)} (the rank of each stage)"
        )
    for stage in stages:
        if stage.num_stages != plan.placement.num_stages:
            raise StageUsageError(
                f"stage {stage.stage_index} says that there are {stage.num_stages} stages, the schedule has"
                f" {plan.placement.num_stages}"
            )
        if stage.needs_process and are_threads(transport):
            raise StageUsageError(f"{stage.needs_process}: run each rank in a process of its own, with torchrun")
        if stage.is_last and plan.schedule.has_backward and loss_fn is None:
            raise StageUsageError(f"{plan.schedule.name} runs backward, so the last stage's rank needs a loss_fn")
        if plan.schedule.has_backward and is_reduced(stage.program):
            reduce = Action(stage.stage_index, Kind.REDUCE_GRAD)
            if reduce not in plan.actions[transport.rank]:
                raise StageUsageError(
                    f"stage {stage.stage_index} is data parallel, but {plan.schedule.name} was lowered without {reduce}, so its"
                    f" gradients would differ between replicas: pass the schedule, or lower it with reduced=[{stage.stage_index}]"
                )


def _check_options(loss_fn: object, args_spec: object, kwargs_spec: object) -> None:
    if loss_fn is not None and not callable(loss_fn):
        raise StageUsageError(f"loss_fn must be a function of outputs and target, got {loss_fn!r}")
    if args_spec is not None and not isinstance(args_spec, Sequence):
        raise StageUsageError(
            f"args_chunk_spec has one spec for each positional input, as in (TensorChunkSpec(0),), got {args_spec!r}"
        )
    if kwargs_spec is not None and not isinstance(kwargs_spec, Mapping):
        raise StageUsageError(
            f'kwargs_chunk_spec has specs by name, as in {{"mask": TensorChunkSpec(0)}}, got {kwargs_spec!r}'
        )


def _weighted(losses: Mapping[int, torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    """The sum; a microbatch of no weight (all its tokens masked, say) does not count, even if its loss is NaN."""
    counted = [m for m in sorted(losses) if weights[m] != 0]
    if not counted:
        return torch.zeros((), dtype=torch.float64)
    values, factors = torch.stack([losses[m] for m in counted]).double(), [weights[m] for m in counted]
    alike = all(factor == factors[0] for factor in factors)  # as they are nearly always
    return (values * (factors[0] if alike else values.new_tensor(factors))).sum()
