"""What all stages agree on before the first step of a kind.

Two sweeps along the stages, of one small message per boundary. Downstream, each stage adds what it knows: the first how the
batch was cut, every one its vote and its declared outputs, which the next compares with its declared inputs. Upstream, the
outcome comes back. So every rank goes on with the same facts, or raises the same error, and none waits for one that gave up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from stepwell_meta import ForwardMeta, InferenceMode, PipeliningMetadataError, decode, encode, validate
from stepwell_p2p import Edge, Op, OpKind, Placement, Transport, receive_values, send_values

from ._stage import PipelineStage


@attrs.frozen
class Cut:
    """How the first stage's batch was cut.

    Attributes:
        sizes: samples of each microbatch.
        groups: for each microbatch a number; microbatches of one number have the same shapes and dtypes.
        shapes: shapes and dtypes of each group; only the first stage's rank knows them.
    """

    sizes: tuple[int, ...]
    groups: tuple[int, ...]
    shapes: tuple[tuple[Any, ...], ...] = ()

    def describe(self) -> str:
        """For messages."""
        return "; ".join(", ".join(f"{dtype} {shape}" for shape, dtype in group) for group in self.shapes)


@attrs.frozen
class Agreement:
    """The outcome, the same on every rank, and this rank's share of the static metadata.

    Attributes:
        mode: STATIC if every stage declared its values.
        cut: how the batch was cut.
        inputs: in STATIC mode, for each stage of this rank but the first what the stage before it hands over.
    """

    mode: InferenceMode
    cut: Cut
    inputs: Mapping[int, ForwardMeta]


@attrs.frozen
class _Word:
    """What travels downstream; its fields are what the codec knows."""

    error: str | None
    static: bool
    sizes: tuple[int, ...]
    groups: tuple[int, ...]
    outputs: ForwardMeta | None = None

    def to_bytes(self) -> bytes:
        return encode((self.error, self.static, self.sizes, self.groups, self.outputs))

    @classmethod
    def from_bytes(cls, data: bytes) -> _Word:
        return cls(*decode(data))


def agree(
    stages: Sequence[PipelineStage],
    placement: Placement,
    transport: Transport,
    *,
    cut: Cut | None,
    has_backward: bool,
) -> Agreement:
    """Run both sweeps. A collective of all ranks of the pipeline.

    Args:
        stages: this rank's stages.
        placement: the rank of each stage.
        transport: what carries the messages.
        cut: on the first stage's rank, how the batch was cut; elsewhere None.
        has_backward: whether the step to come has one.

    Raises:
        PipeliningMetadataError: what is wrong, on whichever rank; on all of them.
    """
    inputs: dict[int, ForwardMeta] = {}

    def down(stage: PipelineStage, incoming: bytes | None) -> bytes:
        if incoming is None:
            assert cut is not None  # the first stage's rank cut the batch
            word = _Word(_misfit(stage, cut), True, cut.sizes, cut.groups)
        else:
            word = _Word.from_bytes(incoming)
        found = word.error
        static = word.static and stage.vote(has_backward=has_backward) is InferenceMode.STATIC
        if word.outputs is not None:
            inputs[stage.stage_index] = word.outputs
            found = found or _disagreement(stage, word.outputs)
        if static and len(set(word.groups)) > 1:
            found = found or (
                f"stages declare the shape of one microbatch, but the batch is cut into microbatches of sizes {word.sizes};"
                " use a batch that the number of microbatches divides, or declare nothing"
            )
        return attrs.evolve(word, error=found, static=static, outputs=stage.declared_outputs).to_bytes()

    outcome = sweep(stages, placement, transport, down, upstream=False)

    def up(stage: PipelineStage, incoming: bytes | None) -> bytes:
        return outcome[stage.stage_index] if incoming is None else incoming

    agreed = sweep(stages, placement, transport, up, upstream=True)
    word = _Word.from_bytes(next(iter(agreed.values())))
    if word.error is not None:
        raise PipeliningMetadataError(word.error)
    mode = InferenceMode.STATIC if word.static else InferenceMode.DYNAMIC
    return Agreement(mode, Cut(word.sizes, word.groups), inputs)


def _misfit(stage: PipelineStage, cut: Cut) -> str | None:
    """Why the batch is not what the first stage declares it takes."""
    if stage.declared_inputs is None:
        return None
    declared = tuple((meta.shape, meta.dtype) for meta in stage.declared_inputs)
    for shapes in cut.shapes:
        if shapes[: len(declared)] != declared:
            return (
                f"stage 0 declares inputs of {Cut((), (), (declared,)).describe()}, but the batch's microbatches are of"
                f" {cut.describe()}; give such a batch, or declare what is given"
            )
    return None


def _disagreement(stage: PipelineStage, before: ForwardMeta) -> str | None:
    """Why what the stage before declares it hands over is not what this stage declares it takes."""
    if stage.declared_inputs is None:
        return None
    try:
        validate(
            stage.declared_inputs,
            before.outputs,
            what="input",
            stage=stage.stage_index,
            hint=f"Declare the same in output_args of stage {stage.stage_index - 1} and input_args of stage {stage.stage_index}.",
        )
    except PipeliningMetadataError as error:
        return str(error)
    return None


def sweep(
    stages: Sequence[PipelineStage],
    placement: Placement,
    transport: Transport,
    step: Callable[[PipelineStage, bytes | None], bytes],
    *,
    upstream: bool,
) -> dict[int, bytes]:
    """Run ``step`` on every stage of the pipeline in order, each with the result of the one before.

    Args:
        stages: this rank's stages.
        placement: the rank of each stage.
        transport: what carries results to other ranks.
        step: from a stage and the previous stage's result (None for the one that begins) to its own.
        upstream: from the last stage to the first, instead of from the first to the last.

    Returns:
        The results of this rank's stages, by stage index.
    """
    toward = -1 if upstream else 1
    results: dict[int, bytes] = {}
    handles = []
    for stage in sorted(stages, key=lambda stage: stage.stage_index, reverse=upstream):
        index = stage.stage_index
        before, after = index - toward, index + toward
        incoming = None
        if 0 <= before < placement.num_stages:
            incoming = results.get(before)
            if incoming is None:
                incoming, _ = receive_values(transport, _op(placement, before, index, upstream=upstream, sends=False))
        results[index] = step(stage, incoming)
        if 0 <= after < placement.num_stages and placement.ranks[after] != transport.rank:
            op = _op(placement, index, after, upstream=upstream, sends=True)
            handles.append(send_values(transport, op, results[index]))
    for handle in handles:
        handle.wait()
    return results


def _op(placement: Placement, source: int, destination: int, *, upstream: bool, sends: bool) -> Op:
    kinds = (OpKind.SEND_B, OpKind.RECV_B) if upstream else (OpKind.SEND_F, OpKind.RECV_F)
    edge = Edge(placement.ranks[source], placement.ranks[destination])
    return Op(kinds[0] if sends else kinds[1], edge, source, -1)
