"""What functions over the whole model share: this rank's stages, their transport, and decisions that every rank hears."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from stepwell_p2p import C10dTransport, Edge, LoopbackFabric, Op, OpKind, Transport, receive_values, send_values

from ..exceptions import StageUsageError
from ._executor import Executor
from ._stage import PipelineStage

Stages: TypeAlias = Executor | PipelineStage | Sequence[PipelineStage]
"""One rank's part of a pipeline: its executor, or its stage or stages."""

Word: TypeAlias = tuple[bytes, Sequence[torch.Tensor]]
"""What one rank says: bytes and tensors."""

# Messages outside microbatches, by what they are for. Smaller numbers are the executor's and the step's own.
TIE, TIED_GRADS, DECIDE, COLLECT = -6, -7, -8, -9


def stages_of(stages: Stages) -> tuple[PipelineStage, ...]:
    """This rank's stages in the order of the data flow."""
    if isinstance(stages, PipelineStage):
        return (stages,)
    found = stages.stages if isinstance(stages, Executor) else stages
    return tuple(sorted(found, key=lambda stage: stage.stage_index))


def module_of(stage: PipelineStage) -> nn.Module:
    """The stage's module, out of its data-parallel wrapper.

    Raises:
        StageUsageError: the stage runs a program that is no module.
    """
    module = stage.submodule
    if not isinstance(module, nn.Module):
        raise StageUsageError(
            f"stage {stage.stage_index} runs a {type(module).__qualname__}, which has no named parameters: this works on"
            " stages that are modules"
        )
    return module.module if isinstance(module, DistributedDataParallel) else module


def find(stage: PipelineStage, name: str) -> torch.Tensor | None:
    """A parameter or buffer of the stage's module, or None."""
    for get in (module_of(stage).get_parameter, module_of(stage).get_buffer):
        try:
            return get(name)
        except AttributeError:
            continue
    return None


def transport_of(stages: Stages, transport: Transport | None = None) -> Transport:
    """What joins this rank to the others.

    Raises:
        StageUsageError: stages of a pipeline of several ranks came without any.
    """
    if transport is not None:
        return transport
    if isinstance(stages, Executor):
        return stages.transport
    own = stages_of(stages)
    given = next((stage.transport for stage in own if stage.transport is not None), None)
    if given is not None:
        return given
    if own and len(own) == own[0].num_stages:
        return LoopbackFabric(1).transport(0)
    if dist.is_available() and dist.is_initialized():
        return C10dTransport()
    raise StageUsageError(
        f"this rank holds {len(own)} stages of more, and nothing says how to reach the others: pass the executor,"
        " or transport="
    )


def decide(transport: Transport, word: Word, rule: Callable[[Sequence[Word]], Word]) -> Word:
    """Bring every rank's word to rank 0, where ``rule`` makes one of them all, and give that to every rank.

    A collective of all ranks of the transport.

    Args:
        transport: carries the words.
        word: this rank's.
        rule: from all words, by rank, to the outcome. Called on rank 0 only.
    """
    words = collect(transport, word, to=0)
    if words is None:
        return receive_values(transport, _op(0, transport.rank, DECIDE, sends=False))
    try:
        payload, tensors = rule(words)
    except BaseException as error:  # the other ranks wait for the outcome
        transport.abort(f"{type(error).__name__}: {error}")
        raise
    handles = [
        send_values(transport, _op(0, rank, DECIDE, sends=True), payload, tensors) for rank in range(1, transport.size)
    ]
    for handle in handles:
        handle.wait()
    return payload, tensors


def collect(transport: Transport, word: Word, *, to: int) -> list[Word] | None:
    """Every rank's word, by rank, on rank ``to``; None elsewhere. A collective of all ranks of the transport."""
    if transport.rank != to:
        send_values(transport, _op(transport.rank, to, COLLECT, sends=True), *word).wait()
        return None
    return [
        word if rank == to else receive_values(transport, _op(rank, to, COLLECT, sends=False))
        for rank in range(transport.size)
    ]


def _op(source: int, destination: int, number: int, *, sends: bool) -> Op:
    return Op(OpKind.SEND_F if sends else OpKind.RECV_F, Edge(source, destination), 0, number)
