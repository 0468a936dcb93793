"""What was expected beside what came: every difference at once, in words."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Sequence
from typing import Any, Literal

import attrs
import torch

from ._dtensor import DTensorMeta
from ._extract import extract_meta, extract_metas
from ._stage import AnyMeta
from ._tensor import TensorMeta
from .exceptions import MetadataError, MetadataWarning, PipeliningMetadataError

__all__ = ["Difference", "diff", "validate", "validate_static_arg_grad_correspondence"]

_PLAIN_FIELDS = ("shape", "stride", "dtype", "requires_grad")
_DTENSOR_FIELDS = (*_PLAIN_FIELDS, "global_shape", "global_stride", "placements", "mesh_key")


@attrs.frozen
class Difference:
    """One thing that does not fit. Prints as ``input 0: shape mismatch: expected (4, 8), got (4, 9)``.

    Attributes:
        field: A field of the metas, or "type", "presence" (None where a tensor should be, or the reverse), "count".
        expected: What it should be.
        actual: What it is.
        where: Which value, such as "input 0"; empty where there is only one.
    """

    field: str
    expected: Any
    actual: Any
    where: str = ""

    def __str__(self) -> str:
        """One line, without the stage."""
        where = f"{self.where}: " if self.where else ""
        return f"{where}{self.field} mismatch: expected {self.expected}, got {self.actual}"


def _fits(left: AnyMeta, right: AnyMeta, field: str) -> bool:
    if field == "stride":
        return _same_order(
            TensorMeta(left.shape, left.stride, left.dtype), TensorMeta(right.shape, right.stride, right.dtype)
        )
    if field == "global_stride" and isinstance(left, DTensorMeta) and isinstance(right, DTensorMeta):
        return _same_order(left.whole, right.whole)
    return bool(getattr(left, field) == getattr(right, field))


def _same_order(left: TensorMeta, right: TensorMeta) -> bool:
    """Whether the axes that both tensors step along lie in memory in one order.

    Of dense tensors of one shape, that is whether their strides agree, but for strides of axes of size 1. Shapes that differ
    are a difference of their own and do not count once more.
    """
    if len(left.shape) != len(right.shape) or left.numel == 0 or right.numel == 0:
        return True
    axes = [axis for axis, sizes in enumerate(zip(left.shape, right.shape, strict=True)) if min(sizes) > 1]
    first, second = left.as_dense().stride, right.as_dense().stride
    return sorted(axes, key=first.__getitem__) == sorted(axes, key=second.__getitem__)


def diff(
    expected: AnyMeta | torch.Tensor | None,
    actual: AnyMeta | torch.Tensor | None,
    *,
    ignore: Collection[str] = (),
    where: str = "",
) -> tuple[Difference, ...]:
    """Every field in which two tensors or metas differ; empty if they fit.

    Strides are compared by the order of axes in memory, which is what crosses a wire: strides of axes of size 1 say nothing,
    and a tensor with gaps or overlaps counts as the dense one that `TensorMeta.as_dense` makes of it.

    Args:
        expected: A meta, a tensor to take it from, or None for no tensor.
        actual: The same, for what came.
        ignore: Fields that may differ, such as ``("requires_grad",)`` where no backward follows.
        where: Which value this is, for messages.

    Raises:
        MetadataError: ``ignore`` names no field of a meta.
        UnsupportedValueError: A value is neither a meta nor a tensor that has one.

    Example:
        >>> print(*diff(torch.zeros(4, 8), torch.zeros(4, 9), where="input 0"))
        input 0: shape mismatch: expected (4, 8), got (4, 9)
    """
    unknown = [field for field in ignore if field not in _DTENSOR_FIELDS]
    if unknown:
        raise MetadataError(f"cannot ignore {unknown}: the fields of a meta are {list(_DTENSOR_FIELDS)}")
    left = None if expected is None else extract_meta(expected)
    right = None if actual is None else extract_meta(actual)
    if left == right:
        return ()
    if left is None or right is None:
        return (Difference("presence", left, right, where),)
    differences = []
    fields: tuple[str, ...] = _PLAIN_FIELDS
    if type(left) is not type(right):
        differences.append(Difference("type", left, right, where))
    elif isinstance(left, DTensorMeta):
        fields = _DTENSOR_FIELDS
    for field in fields:
        if field not in ignore and not _fits(left, right, field):
            differences.append(Difference(field, getattr(left, field), getattr(right, field), where))
    return tuple(differences)


def validate(
    expected: Sequence[AnyMeta | torch.Tensor | None],
    actual: Sequence[AnyMeta | torch.Tensor | None],
    *,
    what: str,
    stage: int | None = None,
    mode: Literal["raise", "warn", "return"] = "raise",
    ignore: Collection[str] = (),
    hint: str = "",
) -> tuple[Difference, ...]:
    """Compare a stage's values with what was expected of them; every difference goes into one message.

    Args:
        expected: Metas, or tensors to take them from; None where no tensor is expected.
        actual: The same, for what came.
        what: What each of the values is, such as "input" or "output gradient".
        stage: The stage's index, for the message.
        mode: "raise" an error, "warn", or only "return" the differences.
        ignore: Fields that may differ; see `diff`.
        hint: What the user can change, or what happens now, as a sentence: the end of the message.

    Returns:
        All differences, in order; empty if everything fits.

    Raises:
        PipeliningMetadataError: Something differs and ``mode`` is "raise".
        UnsupportedValueError: A value is neither a meta nor a tensor that has one; the message says which.
        MetadataError: ``mode`` is none of the three, or ``ignore`` names no field of a meta.

    Example:
        >>> [str(d) for d in validate([torch.zeros(2)], [None], what="input", mode="return")]
        ['input 0: presence mismatch: expected torch.float32 tensor of shape (2,), stride (1,), got None']
    """
    if mode not in ("raise", "warn", "return"):
        raise MetadataError(f"expected mode 'raise', 'warn' or 'return', got {mode!r}")
    differences: list[Difference] = []
    if len(expected) != len(actual):
        differences.append(Difference("count", len(expected), len(actual), f"{what}s"))
    label = what if stage is None else f"stage {stage}: {what}"
    metas = (extract_metas(values, allow_none=True, what=label) for values in (expected, actual))
    for index, (left, right) in enumerate(zip(*metas, strict=False)):
        differences.extend(diff(left, right, ignore=ignore, where=f"{what} {index}"))
    found = tuple(differences)
    if found and mode != "return":
        message = _message(stage, [str(difference) for difference in found], hint)
        if mode == "raise":
            raise PipeliningMetadataError(message, stage=stage, differences=found)
        warnings.warn(message, MetadataWarning, stacklevel=2)
    return found


def _message(stage: int | None, lines: Sequence[str], hint: str) -> str:
    """One line if there is one thing to say, else a heading and a line for each."""
    head = "" if stage is None else f"stage {stage}: "
    if len(lines) == 1:
        return f"{head}{lines[0]}" + (f". {hint}" if hint else "")
    return "\n  ".join([f"{head}{len(lines)} differences:", *lines, *([hint] if hint else [])])


def validate_static_arg_grad_correspondence(
    args: Sequence[AnyMeta | torch.Tensor],
    grads: Sequence[AnyMeta | torch.Tensor | None],
    *,
    stage: int,
    kind: Literal["input", "output"],
) -> None:
    """Check the gradients that a user gave beside a stage's example values.

    The rules: as many gradients as values; a value that requires no grad has None; the gradient of a DTensor is a DTensor,
    of a plain tensor a plain one, of the same (global) shape. A value that requires grad and has None only warns: nobody
    may need that gradient.

    Args:
        args: Example values, or their metas.
        grads: Their gradients, or the metas of these, None where there is none.
        stage: The stage's index, for messages.
        kind: Whether the values are the stage's inputs or its outputs, for messages.

    Raises:
        PipeliningMetadataError: A rule is broken; the message lists every breach.
        UnsupportedValueError: An entry is no tensor; see `extract_metas`.
    """
    values = extract_metas(args, what=f"stage {stage}: {kind}")
    given = extract_metas(grads, allow_none=True, what=f"stage {stage}: {kind} gradient")
    breaches: list[Difference] = []
    missing = []
    if len(values) != len(given):
        breaches.append(Difference("count", len(values), len(given), f"{kind} gradients"))
    for index, (value, grad) in enumerate(zip(values, given, strict=False)):
        where = f"{kind} gradient {index}"
        if grad is None:
            if value.requires_grad:
                missing.append(f"{where} is None, but {kind} {index} requires grad: nothing will flow back through it")
            continue
        if not value.requires_grad:
            breaches.append(Difference("presence", f"None, because {kind} {index} requires no grad", grad, where))
        elif type(value) is not type(grad):
            breaches.append(
                Difference(
                    "type",
                    "a DTensor or None" if isinstance(value, DTensorMeta) else "a plain tensor or None",
                    grad,
                    where,
                )
            )
        elif _whole_shape(value) != _whole_shape(grad):
            breaches.append(Difference("shape", _whole_shape(value), _whole_shape(grad), where))
    if breaches:
        hint = "Give one gradient for each value, shaped like it, and None for values that require no grad."
        lines = [str(breach) for breach in breaches]
        raise PipeliningMetadataError(_message(stage, lines, hint), stage=stage, differences=tuple(breaches))
    if missing:
        warnings.warn(f"stage {stage}: " + "; ".join(missing), MetadataWarning, stacklevel=2)


def _whole_shape(meta: AnyMeta) -> tuple[int, ...]:
    return meta.global_shape if isinstance(meta, DTensorMeta) else meta.shape
