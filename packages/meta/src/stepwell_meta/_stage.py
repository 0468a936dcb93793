"""What a stage takes and gives, and what travels between stages while that is found out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import attrs

from ._dtensor import DTensorMeta
from ._tensor import TensorMeta, type_name
from ._tree import Structure
from .exceptions import MetadataError

__all__ = ["AnyMeta", "BackwardMeta", "ForwardMeta", "StageMeta"]

AnyMeta: TypeAlias = TensorMeta | DTensorMeta


def _metas(values: Sequence[AnyMeta]) -> tuple[AnyMeta, ...]:
    return tuple(values)


def _grad_metas(values: Sequence[AnyMeta | None]) -> tuple[AnyMeta | None, ...]:
    return tuple(values)


def _optional_metas(values: Sequence[AnyMeta] | None) -> tuple[AnyMeta, ...] | None:
    return None if values is None else tuple(values)


def _optional_grad_metas(values: Sequence[AnyMeta | None] | None) -> tuple[AnyMeta | None, ...] | None:
    return None if values is None else tuple(values)


def _check(what: str, metas: Sequence[AnyMeta | None] | None, *, allow_none: bool) -> None:
    for index, meta in enumerate(metas or ()):
        if isinstance(meta, TensorMeta | DTensorMeta) or (meta is None and allow_none):
            continue
        choices = "a TensorMeta, a DTensorMeta or None" if allow_none else "a TensorMeta or a DTensorMeta"
        raise MetadataError(f"{what}[{index}]: expected {choices}, got {type_name(meta)}")


@attrs.frozen
class StageMeta:
    """All that is known of a stage's values and their gradients.

    A field that is None is not known yet. Inside a field, every value has its meta; only gradients may be None, which
    says that there is no gradient. A gradient need not look like its value: placements may differ.

    Raises:
        MetadataError: An entry is no meta, or there are not as many gradients as values.
    """

    inputs: tuple[AnyMeta, ...] | None = attrs.field(default=None, converter=_optional_metas)
    outputs: tuple[AnyMeta, ...] | None = attrs.field(default=None, converter=_optional_metas)
    input_grads: tuple[AnyMeta | None, ...] | None = attrs.field(default=None, converter=_optional_grad_metas)
    output_grads: tuple[AnyMeta | None, ...] | None = attrs.field(default=None, converter=_optional_grad_metas)

    def __attrs_post_init__(self) -> None:
        """Refuse what no stage can have."""
        _check("inputs", self.inputs, allow_none=False)
        _check("outputs", self.outputs, allow_none=False)
        _check("input_grads", self.input_grads, allow_none=True)
        _check("output_grads", self.output_grads, allow_none=True)
        for what, values, grads in (
            ("input", self.inputs, self.input_grads),
            ("output", self.outputs, self.output_grads),
        ):
            if values is not None and grads is not None and len(values) != len(grads):
                raise MetadataError(
                    f"expected one {what} gradient, or None, for each of {len(values)} {what}s, got {len(grads)}"
                )

    @property
    def has_dtensors(self) -> bool:
        """Whether any input or output is a DTensor."""
        return any(isinstance(meta, DTensorMeta) for meta in (*(self.inputs or ()), *(self.outputs or ())))


@attrs.frozen
class ForwardMeta:
    """What a stage tells the next one: its outputs, flat, and the structure that they had.

    Raises:
        MetadataError: An entry is no meta, or the structure has another number of tensors.
    """

    outputs: tuple[AnyMeta, ...] = attrs.field(converter=_metas)
    structure: Structure

    def __attrs_post_init__(self) -> None:
        """Refuse what no stage can send."""
        _check("outputs", self.outputs, allow_none=False)
        if self.structure.num_leaves != len(self.outputs):
            raise MetadataError(
                f"expected a meta for each of the {self.structure.num_leaves} tensors of {self.structure}, "
                f"got {len(self.outputs)}"
            )


@attrs.frozen
class BackwardMeta:
    """What a stage tells the previous one: the gradients of its inputs, None where there is none.

    Raises:
        MetadataError: An entry is neither a meta nor None.
    """

    input_grads: tuple[AnyMeta | None, ...] = attrs.field(converter=_grad_metas)

    def __attrs_post_init__(self) -> None:
        """Refuse what no stage can send."""
        _check("input_grads", self.input_grads, allow_none=True)
