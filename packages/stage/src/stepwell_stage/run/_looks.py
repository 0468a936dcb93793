"""What is known of the values that cross a link, and what follows from it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import torch
from torch.distributed.tensor import DTensor

from stepwell_meta import (
    AnyMeta,
    BackwardMeta,
    DTensorMeta,
    ForwardMeta,
    Structure,
    TensorMeta,
    extract_metas,
    normalize_outputs,
)
from stepwell_meta.exceptions import PipeliningMetadataError
from stepwell_p2p import Packing, Wire

from ._laid_out import gaps_of


@attrs.define
class LinkLooks:
    """What crosses a link, by group of microbatches. Mutable: it is learned.

    Attributes:
        values: the values, and how they are put together to arguments.
        grads: the gradients of those values that require grad, in order. Known beforehand for plain tensors, whose gradients look
            like themselves; learned from the first that comes where there are DTensors, whose gradients may be placed otherwise.
        shared: which of the values share memory with other outputs of their stage.
    """

    values: dict[int, ForwardMeta] = attrs.field(factory=dict)
    grads: dict[int, BackwardMeta] = attrs.field(factory=dict)
    shared: dict[int, tuple[int, ...]] = attrs.field(factory=dict)

    def grads_of(self, group: int) -> Sequence[AnyMeta | None] | None:
        """What the gradients look like, or None where that is not known."""
        if group in self.grads:
            return self.grads[group].input_grads
        metas = [meta for meta in self.values[group].outputs if meta.requires_grad]
        if any(isinstance(meta, DTensorMeta) for meta in metas):
            return None
        return [meta.without_grad() for meta in metas]


def select(outputs: ForwardMeta, wires: tuple[Wire, ...] | None) -> ForwardMeta:
    """What of a stage's outputs crosses a link.

    Raises:
        PipeliningMetadataError: a wire starts at an output that is not there.
    """
    if wires is None:
        return outputs
    missing = [wire for wire in wires if wire.output >= len(outputs.outputs)]
    if missing:
        raise PipeliningMetadataError(
            f"{missing[0]} starts at output {missing[0].output} of stage {missing[0].source}, which returns"
            f" {len(outputs.outputs)} tensors",
            stage=missing[0].source,
        )
    flat = normalize_outputs(tuple(torch.empty(0) for _ in wires)).structure
    return ForwardMeta(tuple(outputs.outputs[wire.output] for wire in wires), flat)


_TENSOR = normalize_outputs(torch.empty(0)).structure.root


@attrs.frozen(eq=False)
class Crossing:
    """What crosses a link in each microbatch of a group, and what follows from that: worked out once, from metas alone.

    Attributes:
        structure: how the values are put together to arguments.
        metas: of the values.
        wanted: which values require grad.
        back: which values bring a gradient back; None while that is not known (the first of DTensors).
        back_metas: what these gradients look like.
        values_packing: how the values travel.
        grads_packing: how the gradients travel.
        has_dtensors: whether a received tensor may be a shard that is to be made whole.
        is_flat: whether the received tensors, in order, are the arguments.
        lent: which values are not the taker's alone.
        gaps: which values, but DTensors, have gaps or are expanded where they are made, and strides that have them too.
    """

    structure: Structure
    metas: tuple[AnyMeta, ...]
    wanted: tuple[int, ...]
    back: tuple[int, ...] | None
    back_metas: tuple[AnyMeta, ...]
    values_packing: Packing
    grads_packing: Packing
    has_dtensors: bool
    is_flat: bool
    lent: tuple[int, ...]
    gaps: tuple[tuple[int, tuple[int, ...]], ...]

    @classmethod
    def of(cls, looks: LinkLooks, group: int, *, packs: bool, lent: Sequence[int] = ()) -> Crossing:
        """From what is known of a group, whose values are."""
        values, options = looks.values[group], {} if packs else {"small": -1}
        metas = tuple(values.outputs)
        wanted = tuple(number for number, meta in enumerate(metas) if meta.requires_grad)
        grad_looks = looks.grads_of(group)
        pairs = list(zip(wanted, grad_looks or (), strict=grad_looks is not None))
        back = tuple(number for number, look in pairs if look is not None)
        back_metas = tuple(look for _, look in pairs if look is not None)
        root = values.structure.root
        parts = getattr(root, "children", ()) if getattr(root, "kind", None) in ("tuple", "list") else (root,)
        return cls(
            values.structure,
            metas,
            wanted,
            None if grad_looks is None else back,
            back_metas,
            Packing([_local(meta) for meta in metas], **options),
            Packing([_local(meta) for meta in back_metas], **options),
            any(isinstance(meta, DTensorMeta) for meta in (*metas, *back_metas)) or grad_looks is None,
            all(part == _TENSOR for part in parts),
            tuple({*lent, *looks.shared.get(group, ())}),
            tuple(
                (n, strides)
                for n, meta in enumerate(metas)
                if isinstance(meta, TensorMeta) and (strides := gaps_of(meta)) is not None
            ),
        )


def forward_meta(value: Any) -> ForwardMeta:
    """Metas and structure of a stage's outputs, or of an example of them."""
    outputs = normalize_outputs(value)
    return ForwardMeta(extract_metas(outputs.leaves), outputs.structure)


def same_look(tensor: torch.Tensor, meta: AnyMeta) -> bool:
    """Whether a tensor fits a meta in all that crosses: shape, dtype, and how it is spread over a mesh."""
    if isinstance(meta, DTensorMeta):
        return isinstance(tensor, DTensor) and DTensorMeta.from_dtensor(tensor).without_grad() == meta.without_grad()
    return tensor.shape == meta.shape and tensor.dtype == meta.dtype and not isinstance(tensor, DTensor)


def _local(meta: AnyMeta) -> TensorMeta:
    return (meta.local if isinstance(meta, DTensorMeta) else meta).without_grad()
