"""What all stages agree on before the first step of a kind.

Two sweeps along the stages, of one small message per boundary. Downstream, each stage adds what it knows: the first how the
batch was cut, every one its vote and its declared outputs, which the next compares with its declared inputs. Upstream, the
outcome comes back. So every rank goes on with the same facts, or raises the same error, and none waits for one that gave up.

Where every rank is given the batch, a few numbers that stand for it travel with the word that begins each step; see
:class:`LooksAtBatch`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import attrs

from stepwell_meta import (
    AnyMeta,
    BackwardMeta,
    ForwardMeta,
    InferenceMode,
    PipeliningMetadataError,
    decode,
    encode,
    validate,
)
from stepwell_p2p import Edge, Op, OpKind, Placement, Transport, Wire, receive_values, send_values

from ..plan._wiring import Wiring
from ._classes import with_classes
from ._looks import LinkLooks, select

if TYPE_CHECKING:
    from ._microbatch import Batch
    from ._stage import PipelineStage


class LooksAtBatch(Protocol):
    """Says whether a rank is given what the first stage's rank is given."""

    def look(self, batch: Batch) -> GivenBatch:
        """Begin to look at the batch of one step."""
        ...


class GivenBatch(Protocol):
    """What a rank is given for one step."""

    def numbers(self, *, wait: bool) -> Sequence[int]:
        """What stands for it, and for what the step before was given; with ``wait``, also for what must be waited for."""
        ...

    def other(self, theirs: Sequence[int], *, wait: bool) -> str | None:
        """What is not as another rank was given it, by that one's numbers; None if there is nothing."""
        ...

    def begin(self) -> None:
        """Remember it: the step begins."""
        ...


@attrs.frozen
class Cut:
    """How the first stage's batch was cut.

    Attributes:
        sizes: samples of each microbatch.
        groups: for each microbatch a number; microbatches of one number have the same signature.
        shapes: the signature of each group, see :func:`~._microbatch.signature`; only the first stage's rank knows them.
    """

    sizes: tuple[int, ...]
    groups: tuple[int, ...]
    shapes: tuple[tuple[Any, ...], ...] = ()

    def describe(self) -> str:
        """For messages."""
        return "; ".join(", ".join(f"{kind} {what}" for what, kind in group) for group in self.shapes)


@attrs.frozen
class Agreement:
    """The outcome, the same on every rank.

    Attributes:
        mode: STATIC if every stage declared its values.
        cut: how the batch was cut.
        looks: in STATIC mode, for each link to a stage of this rank what crosses it.
    """

    mode: InferenceMode
    cut: Cut
    looks: Mapping[tuple[int, int], LinkLooks]


@attrs.frozen
class Word:
    """What travels downstream; its fields are what the codec knows."""

    error: str | None
    static: bool
    shapes: str
    wires: tuple[tuple[int, int, int, int], ...] | None
    parts: str
    sizes: tuple[int, ...]
    groups: tuple[int, ...]
    declared: tuple[tuple[ForwardMeta, tuple[AnyMeta | None, ...] | None] | None, ...] = ()

    def to_bytes(self) -> bytes:
        return encode(attrs.astuple(self, recurse=False))

    @classmethod
    def from_bytes(cls, data: bytes) -> Word:
        return cls(*decode(data))


def agree(
    stages: Sequence[PipelineStage],
    placement: Placement,
    wiring: Wiring,
    transport: Transport,
    *,
    cut: Cut | None,
    has_backward: bool,
    problem: str | None = None,
) -> Agreement:
    """Run both sweeps. A collective of all ranks of the pipeline.

    Args:
        stages: this rank's stages.
        placement: the rank of each stage.
        wiring: which output goes where, as this rank was told.
        transport: what carries the messages.
        cut: on the first stage's rank, how the batch was cut; elsewhere None.
        has_backward: whether the step to come has one.
        problem: what is wrong on this rank, if it knows already.

    Raises:
        PipeliningMetadataError: what is wrong, on whichever rank; on all of them.
    """
    looks: dict[tuple[int, int], LinkLooks] = {}

    def down(stage: PipelineStage, incoming: bytes | None) -> bytes:
        before = None if incoming is None else Word.from_bytes(incoming)
        word, found = pass_on(stage, before, wiring, cut=cut, has_backward=has_backward)
        looks.update(found)
        return attrs.evolve(word, error=word.error or problem).to_bytes()

    outcome = sweep(stages, placement, transport, down, upstream=False)

    def up(stage: PipelineStage, incoming: bytes | None) -> bytes:
        return outcome[stage.stage_index] if incoming is None else incoming

    agreed = sweep(stages, placement, transport, up, upstream=True)
    word = Word.from_bytes(next(iter(agreed.values())))
    if word.error is not None:
        raise PipeliningMetadataError(word.error)
    mode = InferenceMode.STATIC if word.static else InferenceMode.DYNAMIC
    return Agreement(mode, Cut(word.sizes, word.groups), looks)


def pass_on(
    stage: PipelineStage, before: Word | None, wiring: Wiring, *, cut: Cut | None, has_backward: bool
) -> tuple[Word, dict[tuple[int, int], LinkLooks]]:
    """What one stage adds to the word that comes downstream, and what it hears in it of the links that lead to it.

    Args:
        stage: the stage.
        before: the word of the stage before; None on the first.
        wiring: which output goes where, as this rank was told.
        cut: on the first stage, how the batch was cut; elsewhere not needed.
        has_backward: whether the step to come has one.
    """
    wires = None if wiring.wires is None else tuple(attrs.astuple(wire) for wire in wiring.wires)
    if before is None:
        assert cut is not None  # the first stage's rank cut the batch
        before = Word(_misfit(stage, cut), True, stage.shapes, wires, stage.parts, cut.sizes, cut.groups)
    static = before.static and stage.vote(has_backward=has_backward) is InferenceMode.STATIC
    error = before.error
    if before.shapes != stage.shapes:
        error = (
            error
            or f"stage 0 has shapes={before.shapes!r}, stage {stage.stage_index} {stage.shapes!r}: make them equal"
        )
    if before.wires != wires:
        error = error or f"stage 0 was given other wires than stage {stage.stage_index}: give every stage the same"
    if before.parts != stage.parts:
        error = error or (
            f"the rank of stage 0 cut the model otherwise than that of stage {stage.stage_index}: split it with the same"
            " arguments on every rank; costs that are measured differ, so give those of one rank to all, as costs="
        )
    if static and len(set(before.groups)) > 1:
        error = error or (
            f"stages declare the shape of one microbatch, but the batch is cut into microbatches of sizes {before.sizes};"
            " use a batch that the number of microbatches divides, or declare nothing"
        )
    looks: dict[tuple[int, int], LinkLooks] = {}
    if error is None:
        try:
            looks = _incoming(stage, wiring, before.declared)
        except PipeliningMetadataError as found:
            error = str(found)
    outputs = stage.declared_outputs
    declared = None if outputs is None else (outputs, stage.declared.output_grads)
    return attrs.evolve(before, error=error, static=static, declared=(*before.declared, declared)), looks


def declared_looks(stage: PipelineStage, wires: tuple[Wire, ...] | None) -> LinkLooks:
    """What a stage that declares its outputs says of a link that starts there."""
    assert stage.declared_outputs is not None
    return _across(stage.declared_outputs, stage.declared.output_grads, wires)


def _across(
    outputs: ForwardMeta, grads: tuple[AnyMeta | None, ...] | None, wires: tuple[Wire, ...] | None
) -> LinkLooks:
    """What of a stage's declared outputs, and of their gradients, crosses a link."""
    values = select(outputs, wires)
    looks = LinkLooks({0: values})
    if grads is not None:
        chosen = grads if wires is None else tuple(grads[wire.output] for wire in wires)
        looks.grads[0] = BackwardMeta(
            [grad for grad, meta in zip(chosen, values.outputs, strict=True) if meta.requires_grad]
        )
    return looks


def _misfit(stage: PipelineStage, cut: Cut) -> str | None:
    """Why the batch is not what the first stage declares it takes."""
    if stage.declared.inputs is None:
        return None
    declared = tuple((meta.shape, meta.dtype) for meta in stage.declared.inputs)
    for shapes in cut.shapes:
        if shapes[: len(declared)] != declared:
            return (
                f"stage 0 declares inputs of {Cut((), (), (declared,)).describe()}, but the batch's microbatches are of"
                f" {cut.describe()}; give such a batch, or declare what is given"
            )
    return None


def _incoming(
    stage: PipelineStage,
    wiring: Wiring,
    declared: Sequence[tuple[ForwardMeta, tuple[AnyMeta | None, ...] | None] | None],
) -> dict[tuple[int, int], LinkLooks]:
    """What is declared of the values that a stage takes, by link.

    Raises:
        PipeliningMetadataError: earlier stages declare other values, or gradients, than this one.
    """
    index = stage.stage_index
    found: dict[tuple[int, int], LinkLooks] = {}
    values: dict[int, AnyMeta] = {}
    grads: dict[int, AnyMeta | None] = {}
    for source in wiring.sources(index):
        told = declared[source]
        if told is None:
            return found
        wires = wiring.between(source, index)
        looks = found[source, index] = _across(with_classes(told[0], stage.classes), told[1], wires)
        metas = looks.values[0].outputs
        places = range(len(metas)) if wires is None else [wire.input for wire in wires]
        values.update(zip(places, metas, strict=True))
        if told[1] is not None:
            chosen = told[1] if wires is None else [told[1][wire.output] for wire in wires]
            grads.update(zip(places, chosen, strict=True))
    if not found:
        return found
    hint = f"Declare the same in {{}} of stage {index} and in {{}} of the stages that its inputs come from."
    if stage.declared.inputs is not None:
        expected = stage.declared.inputs
        actual = [values[place] for place in sorted(values)]
        validate(expected, actual, what="input", stage=index, hint=hint.format("input_args", "output_args"))
    if stage.declared.input_grads is not None and len(grads) == len(values):
        actual_grads = [grads[place] for place in sorted(grads)]
        hint = hint.format("input_grads", "output_grads")
        validate(stage.declared.input_grads, actual_grads, what="input gradient", stage=index, hint=hint)
    return found


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
