"""What a stage does under torch's schedules before the first step: vote, and learn what crosses. See ``_torch_stage.py``."""

# ruff: noqa: FBT001 -- the signatures are torch's

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

import attrs
import torch
import torch.distributed as dist
from torch import nn

from stepwell_meta import AnyMeta, ForwardMeta, StageMeta, TensorMeta, extract_metas, normalize_outputs, validate
from stepwell_meta.exceptions import PipeliningMetadataError, StepwellError
from stepwell_p2p import (
    C10dTransport,
    Edge,
    LoopbackFabric,
    Op,
    OpKind,
    Recv,
    Send,
    Transport,
    Wire,
    receive_values,
    send_values,
)
from stepwell_p2p.exceptions import TransportError

from .._compat import is_torch_stage_name, join_torch_stages, tree_map
from ..exceptions import StageExecutionError, StageUsageError
from ..plan._action import Kind
from ..plan._wiring import Wiring
from ._agree import Cut, Word, declared_looks, pass_on
from ._looks import LinkLooks, select
from ._probe import Probe, undisturbed
from ._program import StageProgram
from ._torch_run import OpsTransport, TorchRun
from ._torch_state import HandedBackward, HandedForward, RecvInfo, TorchState, Verdict, describe, input_metas, own

if TYPE_CHECKING:
    from ._stage import PipelineStage
    from ._tie import TiedGroup

_Result = TypeVar("_Result")


class TorchPrepare:
    """The part of :class:`TorchStage` that is called before the first step, and says who the stage is."""

    stage_index: int
    num_stages: int
    device: torch.device
    transport: Transport | None
    submodule: Any
    program: StageProgram
    declared: StageMeta
    declared_outputs: ForwardMeta | None
    wires: tuple[Wire, ...] | None
    shapes: str
    tied: dict[str, TiedGroup]
    to_tie: tuple[str, ...]

    if TYPE_CHECKING:

        @property
        def is_first(self) -> bool:
            """See PipelineStage."""

        @property
        def is_last(self) -> bool:
            """See PipelineStage."""

    _state: TorchState | None = None

    @property
    def _torch(self) -> TorchState:
        if self._state is None:
            self._state = TorchState()
        return self._state

    # Who and where.

    @property
    def submod(self) -> Any:
        """The module."""
        return self.submodule

    @property
    def group_rank(self) -> int:
        """This rank in the pipeline's group; without a process group, the stage's index."""
        if self.transport is not None:
            return self.transport.rank
        return dist.get_rank() if dist.is_available() and dist.is_initialized() else self.stage_index

    @property
    def group_size(self) -> int:
        """Ranks of the pipeline's group; without a process group, the number of stages."""
        if self.transport is not None:
            return self.transport.size
        return dist.get_world_size() if dist.is_available() and dist.is_initialized() else self.num_stages

    @property
    def has_backward(self) -> bool:
        """Whether backwards follow the forwards; the schedule says so."""
        return self._torch.has_backward

    @has_backward.setter
    def has_backward(self, value: bool) -> None:
        join_torch_stages(type(self))  # a schedule is about to run this stage
        self._torch.has_backward = bool(value)

    @property
    def stage_index_to_group_rank(self) -> dict[int, int]:
        """The rank of each stage; stage mod ranks until the schedule says otherwise."""
        if self._torch.ranks is None:
            return {stage: stage % self.group_size for stage in range(self.num_stages)}
        return self._torch.ranks

    @stage_index_to_group_rank.setter
    def stage_index_to_group_rank(self, ranks: Mapping[int, int]) -> None:
        self._torch.ranks = dict(ranks)

    @property
    def chunks(self) -> int | None:
        """Number of microbatches, once prepared."""
        return self._torch.chunks

    @property
    def args_recv_info(self) -> dict[int, tuple[RecvInfo, ...]]:
        """For each microbatch, what the module's inputs are and where they come from."""
        return self._torch.args_recv_info

    @property
    def grad_recv_info(self) -> dict[int, tuple[RecvInfo, ...]]:
        """For each microbatch, what gradients of the outputs come, and from where."""
        return self._torch.grad_recv_info

    @property
    def act_send_info(self) -> dict[int, list[int]]:
        """For each output, the stages that take it."""
        return self._torch.act_send_info

    @property
    def output_chunks(self) -> list[Any]:
        """Of the last stage, the outputs of the microbatches that ran, detached."""
        return self._torch.output_chunks

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("__") and is_torch_stage_name(name):
            raise AttributeError(
                f"torch {torch.__version__} has PipelineStage.{name}, and stepwell-stage, which knows the stages of torch 2.13,"
                " does not: run the schedule with stepwell_stage.Executor, or use a version of torch that both know"
            )
        raise AttributeError(f"{type(self).__qualname__} has no attribute {name!r}")

    # Before the first step: the vote.

    def _warmup_forward_vote(self, has_backward: bool, received_acc: Verdict | None = None) -> Verdict:
        """Hear what the stages before said, add this one's word, and pass it on."""
        state = self._torch
        state.has_backward = has_backward
        before = None
        if not self.is_first:
            before = self._hear(received_acc, self.stage_index - 1, OpKind.RECV_F).word
        word, state.heard = pass_on(self._whole, before, self._wiring, cut=Cut((), (0,)), has_backward=has_backward)
        verdict = Verdict(attrs.evolve(word, error=word.error or self._problem()))
        self._say(verdict, self.stage_index + 1, OpKind.SEND_F)
        return verdict

    def _warmup_backward_result(self, received_result: Verdict | None = None) -> Verdict:
        """Hear the outcome from the last stage's side, and pass it on.

        Raises:
            PipeliningMetadataError: on every rank, when all its stages have passed the outcome on: the stages were told different
                things, or one of them cannot run under a schedule of torch's.
        """
        if self.is_last:
            verdict = self._handed(received_result, Verdict, self.stage_index)
        else:
            verdict = self._hear(received_result, self.stage_index + 1, OpKind.RECV_B)
        self._say(verdict, self.stage_index - 1, OpKind.SEND_B)
        if verdict.word.error is not None and not any(self._is_here(stage) for stage in range(self.stage_index)):
            raise PipeliningMetadataError(verdict.word.error)
        self._torch.verdict = verdict
        return verdict

    def _tied_parameters(self) -> set[str]:
        """Names of what is tied and gets gradients; buffers get none."""
        module = self.submodule
        buffers = {name for name, _ in module.named_buffers()} if isinstance(module, nn.Module) else set()
        tied = {group.name for name, group in self.tied.items() if name not in buffers}
        return tied.union(self.to_tie) - buffers

    def _problem(self) -> str | None:
        """Why this stage cannot run under a schedule of torch's, if it cannot."""
        ranks, index = self.stage_index_to_group_rank, self.stage_index
        if self.group_size > self.num_stages:
            return f"the pipeline's group has {self.group_size} ranks for {self.num_stages} stages: give every rank a stage"
        if self.shapes == "dynamic":
            return (
                'torch\'s schedules receive into buffers made beforehand, so shapes="dynamic" does not go with them: run the'
                " stages with stepwell_stage.Executor"
            )
        beyond = [source for source in self._wiring.sources(index) if source != index - 1]
        if beyond and (self._torch.ranks is not None or any(ranks[source] == ranks[index] for source in beyond)):
            return (
                f"stage {index} takes values of stage {beyond[0]}, and torch's schedules of several stages a rank carry values"
                " only to the next stage: run such wires with stepwell_stage.Executor"
            )
        shared = sorted(self._tied_parameters()) if self._torch.has_backward else []
        if shared:
            return (
                f"stage {index}: parameters are tied ({', '.join(shared)}), and torch's schedules do not add up their"
                " gradients over the stages: run the stages with stepwell_stage.Executor, or tie nothing"
            )
        return None

    def _hear(self, handed: Verdict | None, neighbour: int, kind: OpKind) -> Verdict:
        if self._is_here(neighbour):
            return self._handed(handed, Verdict, neighbour)
        payload, _ = receive_values(self._pipe, self._op(neighbour, kind, -1))
        return Verdict(Word.from_bytes(payload))

    def _say(self, verdict: Verdict, neighbour: int, kind: OpKind) -> None:
        if 0 <= neighbour < self.num_stages and not self._is_here(neighbour):
            send_values(self._pipe, self._op(neighbour, kind, -1), verdict.word.to_bytes()).wait()

    def _handed(self, value: object, kind: type[_Result], neighbour: int) -> _Result:
        if not isinstance(value, kind):
            raise PipeliningMetadataError(
                f"stage {self.stage_index}: stage {neighbour} is on the same rank and hands over what it found out, a"
                f" {kind.__name__}, but {value!r} came",
                stage=self.stage_index,
            )
        return value

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """One number each way with each neighbour on another rank, each into a buffer of its own."""
        meta = TensorMeta((1,), (1,), torch.float32)
        ops = OpsTransport(self._pipe, self.stage_index_to_group_rank, has_backward=False)
        for neighbour, send, receive in (
            (self.stage_index - 1, OpKind.SEND_B, OpKind.RECV_F),
            (self.stage_index + 1, OpKind.SEND_F, OpKind.RECV_B),
        ):
            if 0 <= neighbour < self.num_stages and not self._is_here(neighbour):
                number = torch.full((1,), float(self.stage_index), device=self.device)
                ops.post([Recv(self._op(neighbour, receive, -4), meta), Send(self._op(neighbour, send, -4), number)])
        return ops.take()

    # Before the first step: what crosses.

    def _prepare_forward_infra(
        self,
        num_microbatches: int,
        args: Any = None,
        kwargs: Mapping[str, Any] | None = None,
        has_backward: bool | None = None,
    ) -> HandedForward | None:
        """Learn what crosses forward, and be ready for ``num_microbatches``.

        Args:
            num_microbatches: M.
            args: on the first stage, one microbatch's arguments, or none to use the examples that were declared; on another, what
                the stage before on the same rank handed over.
            kwargs: one microbatch's keyword arguments.
            has_backward: whether backwards follow.

        Returns:
            What the next stage takes, if it is on the same rank and nothing was declared.
        """
        if has_backward is not None:
            self._torch.has_backward = has_backward
        return self._compute("PREPARE", None, lambda: self._prepare_forward(num_microbatches, args, kwargs or {}))

    def _prepare_forward(self, num_microbatches: int, args: Any, kwargs: Mapping[str, Any]) -> HandedForward | None:
        state = self._torch
        problem = self._problem()
        if problem is not None:  # without a vote it comes to light here
            raise StageUsageError(problem)
        state.chunks = num_microbatches
        handed = None
        if state.verdict is not None and state.verdict.word.static:
            outputs = self.declared_outputs
            looks = dict(state.heard)
            for destination in self._wiring.destinations(self.stage_index):
                place = (self.stage_index, destination)
                looks[place] = declared_looks(self._whole, self._wiring.between(*place))
        else:
            probe, handed = self._infer_forward(args, kwargs)
            outputs, looks = probe.output_meta, probe.looks
        state.ops = None
        if self.group_size > 1:
            state.ops = OpsTransport(self._pipe, self.stage_index_to_group_rank, has_backward=state.has_backward)
        transport = state.ops or self._pipe
        state.run = self._new_run(transport, num_microbatches, self.program)
        state.run.learn(looks, outputs)
        describe(state, state.run, args)
        return handed

    def _infer_forward(self, args: Any, kwargs: Mapping[str, Any]) -> tuple[TorchRun, HandedForward | None]:
        """Run the first microbatch through, with its real values."""
        state, index = self._torch, self.stage_index
        probe = state.probe = self._new_run(self._pipe, 1, Probe(self.program))
        links = [*probe.in_links.values(), *probe.out_links.values()]
        probe.learn({(link.place.source, link.place.destination): LinkLooks() for link in links}, None, first=True)
        probe.kwargs[0] = tree_map(own, dict(kwargs))
        if self.is_first:
            probe.args[0] = tree_map(own, tuple(args) if args else self._examples(optional=bool(kwargs)))
        elif self._is_here(index - 1):
            before = self._handed(args, HandedForward, index - 1)
            probe.looks[index - 1, index].values[0] = select(before.look, self._wiring.between(index - 1, index))
            probe.hand_in(0, before.values)
        for link in probe.in_links.values():
            if not link.is_local:
                probe.expect(0, forward=True)
                link.recv(0)
        with undisturbed(self.submodule, self.device), torch.set_grad_enabled(state.has_backward):
            probe.arrive(0, forward=True)
            state.value = self._compute("F", 0, lambda: probe.forward(0))
        self._compare("input", self.declared.inputs, input_metas(probe, probe.args[0]))
        if self.is_last:
            return probe, None
        probe.send_f(0)
        assert probe.output_meta is not None  # forward has run
        for out in probe.out_links.values():
            look = probe.looks[index, out.place.destination]
            look.values.setdefault(0, select(probe.output_meta, out.place.wires))
        if not self._is_here(index + 1):
            return probe, None
        leaves = [leaf.detach().clone() for leaf in normalize_outputs(state.value).leaves]
        return probe, HandedForward(leaves, probe.output_meta)

    def _prepare_backward_infra(
        self,
        num_microbatches: int,
        loss_fn: Callable[..., torch.Tensor] | None = None,
        target: Any = None,
        received_grad_meta: HandedBackward | None = None,
        loss_kwargs: Mapping[str, Any] | None = None,
    ) -> HandedBackward | None:
        """Learn what crosses backward.

        Gradients of plain tensors look like the tensors. Only those of DTensors are found out, by a backward of the first
        microbatch in which no parameter takes part.
        """
        state = self._torch
        if state.run is None:
            raise PipeliningMetadataError(
                f"stage {self.stage_index}: _prepare_forward_infra comes before _prepare_backward_infra",
                stage=self.stage_index,
            )
        run, probe = state.run, state.probe
        state.chunks = num_microbatches
        handed = None
        if probe is not None and any(look.grads_of(0) is None for look in probe.looks.values()):
            handed = self._compute(
                "PREPARE",
                None,
                lambda: self._infer_backward(probe, loss_fn, target, received_grad_meta, loss_kwargs or {}),
            )
            run.learn(probe.looks, probe.output_meta)
        describe(state, run, None)
        return handed

    def _infer_backward(
        self,
        probe: TorchRun,
        loss_fn: Callable[..., torch.Tensor] | None,
        target: Any,
        received: Any,
        loss_kwargs: Mapping[str, Any],
    ) -> HandedBackward | None:
        """Find out how gradients of DTensors are placed, from the last stage to this one."""
        index, loss = self.stage_index, None
        with undisturbed(self.submodule, self.device):
            if self.is_last:
                if loss_fn is None or target is None:
                    raise PipeliningMetadataError(
                        f"stage {index} takes DTensors, whose gradients can be placed otherwise than themselves: finding out how"
                        " needs a loss function and a target; or declare input_grads",
                        stage=index,
                    )
                loss = loss_fn(self._torch.value, tree_map(own, target), **loss_kwargs)
            for out in probe.out_links.values():
                known = probe.looks[index, out.place.destination].grads_of(0)
                if known is not None:
                    out.put(0, [meta.empty(self.device).fill_(1) for meta in known if isinstance(meta, TensorMeta)])
                    probe.expect(0, forward=False)
                elif out.is_local:
                    probe.hand_back(0, self._handed(received, HandedBackward, index + 1).values)
                else:
                    out.recv(0)
                    out.arrive(0)
            self._compute("B", 0, lambda: probe.run_backward(0, Kind.B, loss))
        found = probe.grads_of(0)
        for link, part in probe.parts(found):
            if not link.is_local and probe.looks[link.place.source, index].grads_of(0) is None:
                link.give(0, part)
                link.send(0)
        if self.is_first:
            return None
        self._compare("input gradient", self.declared.input_grads, extract_metas(found, allow_none=True))
        return HandedBackward(found) if self._is_here(index - 1) else None

    def _post_metadata_inference_cleanup(self) -> None:
        """Let go of what was only for learning, once it is with the neighbours."""
        state = self._torch
        if state.probe is not None:
            state.probe.wait_f(0)
            state.probe.wait_b(0)
            self.program.reshard()
            state.probe = state.value = None

    # Helpers.

    @property
    def _whole(self) -> PipelineStage:
        return cast("PipelineStage", self)

    @property
    def _wiring(self) -> Wiring:
        return Wiring(self.num_stages, self.wires)

    @property
    def _pipe(self) -> Transport:
        """What carries messages before the first step, and makes ops afterwards."""
        if self.transport is None and self._torch.transport is None:
            alone = self.group_size == 1 or not dist.is_initialized()
            self._torch.transport = LoopbackFabric(1).transport(0) if alone else C10dTransport()
        found = self.transport or self._torch.transport
        assert found is not None
        return found

    def _is_here(self, stage: int) -> bool:
        return self.stage_index_to_group_rank.get(stage) == self.group_rank

    def _op(self, neighbour: int, kind: OpKind, number: int) -> Op:
        ranks = self.stage_index_to_group_rank
        ends = (self.stage_index, neighbour) if kind.is_send else (neighbour, self.stage_index)
        return Op(kind, Edge(ranks[ends[0]], ranks[ends[1]]), ends[0], number)

    def _new_run(self, transport: Transport, chunks: int, program: StageProgram) -> TorchRun:
        ranks = self.stage_index_to_group_rank
        return TorchRun(
            self._whole, transport, ranks, chunks=chunks, has_backward=self._torch.has_backward, program=program
        )

    def _compute(self, action: str, microbatch: int | None, call: Callable[[], _Result]) -> _Result:
        """Call it; what a module raises gets the place where it happened, and other ranks hear of it instead of waiting."""
        name = f"{self.stage_index}{action}{'' if microbatch is None else microbatch}"
        try:
            return call()
        except TransportError:  # every rank learns of that by itself
            raise
        except BaseException as error:
            if self._pipe.size > 1:
                reason = str(error) if isinstance(error, StepwellError) else f"{type(error).__name__}: {error}"
                self._pipe.abort(reason, stage=self.stage_index, microbatch=microbatch, action=name)
            if isinstance(error, StepwellError) or not isinstance(error, Exception):
                raise
            where = "" if microbatch is None else f" microbatch {microbatch},"
            raise StageExecutionError(
                f"rank {self.group_rank}, stage {self.stage_index},{where} action {name}: {type(error).__name__}: {error}",
                rank=self.group_rank,
                stage=self.stage_index,
                microbatch=microbatch,
                action=name,
            ) from error

    def _examples(self, *, optional: bool) -> tuple[torch.Tensor, ...]:
        """Stand-ins for the arguments that were declared, or nothing where there are others.

        Raises:
            PipeliningMetadataError: none were, and there are no others.
        """
        if self.declared.inputs is None and optional:
            return ()
        if self.declared.inputs is None:
            raise PipeliningMetadataError(
                "stage 0 got no arguments to learn from, and no input_args were declared: pass a batch on its rank",
                stage=0,
            )
        return tuple(
            meta.without_grad().empty(self.device).zero_()
            for meta in self.declared.inputs
            if isinstance(meta, TensorMeta)
        )

    def _compare(self, what: str, declared: Sequence[AnyMeta | None] | None, actual: Sequence[AnyMeta | None]) -> None:
        """Say where what was declared differs from what was found; the latter counts."""
        if declared is not None:
            hint = "What was found counts, since not every stage declares its values."
            validate(declared, actual, what=what, stage=self.stage_index, mode="warn", hint=hint)
