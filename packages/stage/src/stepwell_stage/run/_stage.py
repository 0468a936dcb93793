"""One stage of a pipeline: a piece of the model with its place and what was declared of its values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from stepwell_meta import (
    AnyMeta,
    ForwardMeta,
    InferenceMode,
    StageMeta,
    TensorMeta,
    extract_metas,
    needs_dynamic,
    normalize_outputs,
)
from stepwell_meta.exceptions import PipeliningMetadataError
from stepwell_p2p import C10dTransport, Transport

from ..exceptions import StageUsageError
from ._program import EagerProgram, StageProgram


class PipelineStage:
    """A piece of the model that is stage ``stage_index`` of ``num_stages``.

    Mutable only in what it holds, the module. How many microbatches it runs, in which order, and what it exchanges with whom is
    the :class:`Executor`'s matter.

    Example::

        stage = PipelineStage(layers, 0, num_stages=4, device="cpu")

    Args:
        submodule: the module, or any :class:`StageProgram`. It gets the previous stage's outputs as positional arguments (the
            first stage: the caller's). A module is moved to the device, unless it has parameters on the meta device.
        stage_index: its number, from 0 along the data flow.
        num_stages: how many stages the pipeline has.
        device: where it computes.
        input_args: example of one microbatch's inputs: a tensor or a tuple of tensors.
        output_args: likewise of its outputs, in their structure; outputs that depend on parameters or on inputs that require grad
            require grad here too. If every stage declares inputs and outputs, nothing about values is exchanged before or
            during the first step; otherwise all learn from the first microbatch.
        group: a process group of torch.distributed whose ranks are the pipeline's; shorthand for
            ``transport=C10dTransport(group)``.
        transport: what carries values to other ranks. All stages of a rank use one.

    Raises:
        StageUsageError: the index does not fit the number of stages, the submodule is neither module nor program, or both group
            and transport are given.
    """

    def __init__(
        self,
        submodule: nn.Module | StageProgram,
        stage_index: int,
        num_stages: int,
        device: torch.device | str,
        input_args: Any = None,
        output_args: Any = None,
        *,
        group: Any = None,
        transport: Transport | None = None,
    ) -> None:
        if not 0 <= stage_index < num_stages:
            raise StageUsageError(
                f"stage_index must be 0 to {num_stages - 1} for {num_stages} stages, got {stage_index}"
            )
        if group is not None and transport is not None:
            raise StageUsageError("give a stage a group or a transport, not both: a group becomes C10dTransport(group)")
        self.stage_index = stage_index
        self.num_stages = num_stages
        self.device = torch.device(device)
        self.transport = C10dTransport(group) if group is not None else transport
        self.submodule = submodule
        self.program: StageProgram
        if isinstance(submodule, nn.Module):
            if not any(parameter.is_meta for parameter in submodule.parameters()):
                submodule.to(self.device)
            self.program = EagerProgram(submodule)
        elif isinstance(submodule, StageProgram):
            self.program = submodule
        else:
            raise StageUsageError(f"a stage runs an nn.Module or a StageProgram, got {type(submodule).__qualname__}")
        self.declared_inputs = None if input_args is None else _declared_inputs(input_args, stage_index)
        self.declared_outputs = None if output_args is None else forward_meta(output_args, stage_index)

    @property
    def is_first(self) -> bool:
        """Whether the caller's arguments enter here."""
        return self.stage_index == 0

    @property
    def is_last(self) -> bool:
        """Whether its outputs are the model's."""
        return self.stage_index == self.num_stages - 1

    def vote(self, *, has_backward: bool) -> InferenceMode:
        """Whether what was declared is enough to run this stage, or its values must be learned from the first microbatch."""
        outputs = None if self.declared_outputs is None else self.declared_outputs.outputs
        dynamic = needs_dynamic(StageMeta(self.declared_inputs, outputs), has_backward=has_backward)
        return InferenceMode.DYNAMIC if dynamic else InferenceMode.STATIC

    def __repr__(self) -> str:
        return f"PipelineStage({self.stage_index} of {self.num_stages}, {type(self.submodule).__name__}, {self.device})"


def forward_meta(value: Any, stage: int) -> ForwardMeta:
    """Metas and structure of a stage's outputs, or of an example of them."""
    outputs = normalize_outputs(value)
    return ForwardMeta(plain(extract_metas(outputs.leaves), stage), outputs.structure)


def plain(metas: Sequence[AnyMeta], stage: int) -> tuple[TensorMeta, ...]:
    """The metas, if all are of plain tensors.

    Raises:
        PipeliningMetadataError: one is of a DTensor, which does not cross between stages as it is.
    """
    found = []
    for index, meta in enumerate(metas):
        if not isinstance(meta, TensorMeta):
            raise PipeliningMetadataError(
                f"stage {stage}, value {index} is a DTensor, but plain tensors cross between stages: return its to_local(),"
                " and make it a DTensor again (DTensor.from_local) in the stage that takes it",
                stage=stage,
            )
        found.append(meta)
    return tuple(found)


def _declared_inputs(example: Any, stage: int) -> tuple[TensorMeta, ...]:
    args = tuple(example) if isinstance(example, tuple | list) else (example,)
    return plain(extract_metas(normalize_outputs(args).leaves), stage)
