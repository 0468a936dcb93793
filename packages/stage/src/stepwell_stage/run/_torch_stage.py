"""The methods by which torch's own schedules drive a stage.

A mix-in of :class:`~stepwell_stage.PipelineStage`. Computing, messages and checks are those of the executor; here are torch's
names for them, and what torch does before the first step: the stages vote whether what they were told of their values is
enough, and if not, the first microbatch runs through all of them once, so that each learns what crosses.

=====================================================  =====================================================================
torch's schedule calls, for each stage of its rank     in order to
=====================================================  =====================================================================
``_warmup_forward_vote``, ``_warmup_backward_result``  find out whether all stages declared their values
``_prepare_forward_infra``, ``_prepare_backward_…``    learn what crosses; prepare for M microbatches
``_post_metadata_inference_cleanup``                   let go of what was only for learning
``get_…_recv_ops``, ``get_…_send_ops``                 get the messages, which it sends itself
``set_local_…``, ``get_local_bwd_output``              hand values and gradients over between two stages of the rank
``forward_one_chunk``, ``backward…_one_chunk``         compute
``perform_reduce_grad``, ``scale_grads``               end the step
``clear_runtime_states``                               begin the next
=====================================================  =====================================================================

Seen in torch 2.13. Versions without the votes run too: there the first microbatch always runs through.
"""

# ruff: noqa: FBT001, FBT002 -- the signatures are torch's

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from stepwell_meta import normalize_outputs

from ..exceptions import StageUsageError
from ..plan._action import Kind
from ._torch_prepare import TorchPrepare
from ._torch_run import TorchRun
from ._torch_state import RecvInfo


class TorchStage(TorchPrepare):
    """See the module. Everything here has torch's name and meaning, but for what the docstrings say."""

    # Messages.

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """The receives of a microbatch's inputs; none on the first stage."""
        run = self._running(fwd_chunk_id)
        run.expect(fwd_chunk_id, forward=True)
        run.recv_f(fwd_chunk_id)
        infos = [info for info in self.args_recv_info[fwd_chunk_id] if not info.is_root_arg]
        return self._taken(sorted(infos, key=lambda info: info.order))

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """The sends of a microbatch's outputs; none on the last stage."""
        self._running(fwd_chunk_id).send_f(fwd_chunk_id)
        return self._taken()

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """The receives of the gradients of a microbatch's outputs; none without backward and on the last stage."""
        run = self._running(bwd_chunk_id)
        if not self.has_backward or self.is_last:
            return []
        run.expect(bwd_chunk_id, forward=False)
        run.recv_b(bwd_chunk_id)
        return self._taken([info for info in self.grad_recv_info[bwd_chunk_id] if info.tensor_meta is not None])

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """The sends of the gradients of a microbatch's inputs; none without backward and on the first stage."""
        run = self._running(bwd_chunk_id)
        if not self.has_backward or self.is_first:
            return []
        self._compute("SEND_B", bwd_chunk_id, lambda: run.give_grads(bwd_chunk_id))
        run.send_b(bwd_chunk_id)
        return self._taken()

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        """Take the outputs of the stage before, on the same rank: detached copies of them.

        Raises:
            StageUsageError: this is the first stage, which takes the caller's arguments.
            PipeliningMetadataError: there are not as many as expected.
        """
        run = self._running(mb_index)
        if self.is_first:
            raise StageUsageError("stage 0 takes the caller's arguments, not another stage's outputs")
        run.hand_in(mb_index, normalize_outputs(prev_stage_outputs).leaves)

    def get_local_bwd_output(self, mb_index: int) -> tuple[torch.Tensor | None, ...]:
        """The gradients of the inputs, for the stage before on the same rank; without backward there are none.

        Raises:
            StageUsageError: this is the first stage, before which there is none.
        """
        run = self._running(mb_index)
        if self.is_first:
            raise StageUsageError("there is no stage before stage 0 to take gradients")
        if not self.has_backward:
            return ()
        parts = run.parts(run.grads_of(mb_index))
        return next((tuple(part) for link, part in parts if link.place.source == self.stage_index - 1), ())

    def set_local_bwd_input(self, next_stage_bwd_outputs: tuple[torch.Tensor | None, ...], mb_index: int) -> None:
        """Take the gradients of the outputs from the stage after, on the same rank; None counts as zeros.

        Raises:
            StageUsageError: this is the last stage, they are no tuple, or there is no backward and yet there are some.
            PipeliningMetadataError: there are not as many as values that the stage took.
        """
        run = self._running(mb_index)
        if not isinstance(next_stage_bwd_outputs, tuple):
            raise StageUsageError(f"expected a tuple of gradients, got {type(next_stage_bwd_outputs).__qualname__}")
        if self.is_last:
            raise StageUsageError(f"there is no stage after stage {self.stage_index} to give gradients")
        if self.has_backward:
            run.hand_back(mb_index, next_stage_bwd_outputs)
        elif next_stage_bwd_outputs:
            raise StageUsageError(f"stage {self.stage_index} has no backward, and was given gradients")

    # Computing.

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        save_forward_output: bool = True,
    ) -> Any:
        """Run the module on a microbatch.

        Args:
            fwd_chunk_id: which microbatch.
            args: the first stage's arguments; others take what they received.
            kwargs: keyword arguments, of any stage.
            save_forward_output: whether the last stage keeps its outputs in :attr:`output_chunks`.

        Returns:
            What the module returned. Without backward no gradient can be computed from it.

        Raises:
            StageExecutionError: the module raised.
            PipeliningMetadataError: the inputs are not here, or the outputs look otherwise than agreed.
        """
        self._post_metadata_inference_cleanup()  # versions of torch that know no such step
        run = self._running(fwd_chunk_id)
        run.arrive(fwd_chunk_id, forward=True)
        for info in self.args_recv_info[fwd_chunk_id]:
            info.buffer = None
        run.args[fwd_chunk_id], run.kwargs[fwd_chunk_id] = tuple(args), dict(kwargs or {})
        run.data.keep_outputs = save_forward_output
        with torch.set_grad_enabled(self.has_backward and torch.is_grad_enabled()):
            value = self._compute("F", fwd_chunk_id, lambda: run.forward(fwd_chunk_id))
        if fwd_chunk_id in run.data.outputs:
            self.output_chunks.append(run.data.outputs.pop(fwd_chunk_id))
        return value

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: torch.Tensor | None = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        """Run the backward of a microbatch, or its first part; without backward, nothing.

        Args:
            bwd_chunk_id: which microbatch.
            loss: on the last stage, where to start; the outputs if None.
            full_backward: the whole; else only the gradients of the inputs, and :meth:`backward_weight_one_chunk` the rest.
            last_backward: whether it is the last of the step. The program needs no such word: it reduces in
                :meth:`perform_reduce_grad`.
        """
        run = self._running(bwd_chunk_id)
        if self.has_backward:
            run.arrive(bwd_chunk_id, forward=False)
            for info in self.grad_recv_info[bwd_chunk_id]:
                info.buffer = None
            kind = Kind.B if full_backward else Kind.I
            self._compute(kind.value, bwd_chunk_id, lambda: run.run_backward(bwd_chunk_id, kind, loss))

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """Run the second part of a microbatch's backward; without backward, nothing.

        Raises:
            StageUsageError: the first part has not run.
        """
        run = self._running(bwd_chunk_id)
        if self.has_backward:
            self._compute("W", bwd_chunk_id, lambda: run.run_backward(bwd_chunk_id, Kind.W, None))

    def scale_grads(self, grad_scale_factor: int) -> None:
        """Divide every gradient of the module by a number."""
        if grad_scale_factor != 1 and isinstance(self.submodule, nn.Module):
            for parameter in self.submodule.parameters():
                if parameter.grad is not None:
                    parameter.grad.div_(grad_scale_factor)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Reduce gradients over data-parallel replicas, then scale them; without backward, nothing."""
        if self._torch.ops is not None:
            self._torch.ops.finish()
        if self.has_backward:
            self._compute("REDUCE_GRAD", None, self.program.reduce_grads)
            self.program.reshard()  # some schedules have no action for it, and scaled are the sharded parameters' gradients
            self.scale_grads(grad_scale_factor)

    def clear_runtime_states(self) -> None:
        """Let go of all that belongs to one step."""
        self.output_chunks.clear()
        for infos in (*self.args_recv_info.values(), *self.grad_recv_info.values()):
            for info in infos:
                info.buffer = None
        if self._torch.ops is not None:
            self._torch.ops.clear()
        if self._torch.run is not None:
            self._torch.run.clear()

    # Helpers.

    def _running(self, microbatch: int) -> TorchRun:
        """What runs the step.

        Raises:
            StageUsageError: the schedule has not prepared this stage, or there is no such microbatch.
        """
        state = self._torch
        if state.run is None or state.chunks is None:
            raise StageUsageError(f"stage {self.stage_index} is not prepared: a schedule's step() does that first")
        if not 0 <= microbatch < state.chunks:
            raise StageUsageError(
                f"stage {self.stage_index}: microbatches are 0 to {state.chunks - 1}, got {microbatch}"
            )
        return state.run

    def _taken(self, receiving: Sequence[RecvInfo] = ()) -> list[dist.P2POp]:
        """The ops that were made; receives put their buffers down where they can be looked at."""
        ops = [] if self._torch.ops is None else self._torch.ops.take()
        for info, op in zip(receiving, ops, strict=False):
            info.buffer = op.tensor
        return ops
