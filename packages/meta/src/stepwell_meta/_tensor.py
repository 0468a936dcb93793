"""What a plain tensor looks like: shape, strides, dtype, and whether it requires grad."""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs
import torch

from ._compat import AsyncCollectiveTensor, FakeTensor
from .exceptions import MetadataError, UnsupportedValueError

__all__ = ["TensorMeta", "type_name"]

MAX_DIMS = 64
MAX_BYTES = 2**63 - 1

# torch allocates these only through a quantizer, so a shape, strides and a dtype do not make one.
_QUANTIZED = frozenset(getattr(torch, name, None) for name in ("qint8", "qint32", "quint8", "quint4x2", "quint2x4"))


def type_name(value: object) -> str:
    """Qualified name of a value's type, for messages."""
    cls = type(value)
    return cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"


def to_ints(values: Sequence[int]) -> tuple[int, ...]:
    """A plain tuple, also from torch.Size."""
    return tuple(values)


def check_layout(shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> None:
    """Refuse a layout that torch could not address.

    Raises:
        MetadataError: Sizes or strides are not plain ints, negative, of unequal number, or overflow 64 bits.
    """
    if len(shape) != len(stride) or len(shape) > MAX_DIMS:
        raise MetadataError(
            f"expected as many strides as sizes, at most {MAX_DIMS}, got shape {shape} and stride {stride}"
        )
    numel = extent = 1
    for size, step in zip(shape, stride, strict=True):
        if type(size) is not int or type(step) is not int:
            raise MetadataError(
                f"sizes and strides must be plain ints, got shape {shape} and stride {stride}; "
                "give symbolic sizes their values first"
            )
        if not (0 <= size <= MAX_BYTES and 0 <= step <= MAX_BYTES):
            raise MetadataError(f"sizes and strides must fit in 63 bits, got shape {shape} and stride {stride}")
        numel *= max(size, 1)  # torch multiplies all sizes, also where one of them is 0
        extent += max(size - 1, 0) * step
    needed = numel if 0 in shape else max(numel, extent) * dtype.itemsize
    if needed > MAX_BYTES:
        raise MetadataError(f"a tensor of shape {shape}, stride {stride} and dtype {dtype} exceeds 64-bit addressing")


def check_grad(dtype: torch.dtype, *, requires_grad: bool) -> None:
    """Refuse gradients where torch has none, and dtypes that no plain tensor has.

    Raises:
        MetadataError: ``dtype`` is not a torch.dtype or is quantized, or ``requires_grad`` is set on a dtype
            that is neither floating nor complex.
    """
    if type(dtype) is not torch.dtype or dtype in _QUANTIZED:
        raise MetadataError(f"expected a torch.dtype that is not quantized, got {dtype!r}")
    if type(requires_grad) is not bool:
        raise MetadataError(f"requires_grad must be True or False, got {requires_grad!r}")
    if requires_grad and not (dtype.is_floating_point or dtype.is_complex):
        raise MetadataError(f"requires_grad is set, but a {dtype} tensor has no gradient: set it to False")


@attrs.frozen
class TensorMeta:
    """Shape, strides, dtype and requires_grad of a plain tensor. Hashable; sizes and strides in elements.

    Equality is exact. Where only what crosses a wire matters, compare with `stepwell_meta.diff`, which knows
    that strides of axes of size 1 and of expanded axes say nothing.

    Raises:
        MetadataError: The fields describe no tensor, such as requires_grad on an integer dtype.

    Example:
        >>> TensorMeta.from_tensor(torch.zeros(2, 3)).stride
        (3, 1)
    """

    shape: tuple[int, ...] = attrs.field(converter=to_ints)
    stride: tuple[int, ...] = attrs.field(converter=to_ints)
    dtype: torch.dtype
    requires_grad: bool = False

    def __attrs_post_init__(self) -> None:
        """Refuse what no tensor can be."""
        check_grad(self.dtype, requires_grad=self.requires_grad)
        check_layout(self.shape, self.stride, self.dtype)

    @classmethod
    def from_tensor(cls, tensor: torch.Tensor) -> TensorMeta:
        """Describe a plain tensor: real, fake, or on the meta device.

        Parameters, FakeTensors and results of functional collectives still in flight count as plain.

        Raises:
            UnsupportedValueError: ``tensor`` is no tensor, of another subclass (a DTensor: use
                `DTensorMeta.from_dtensor` or `extract_meta`), sparse, nested or quantized.
        """
        check_plain(tensor)
        return cls(tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the elements themselves, which is what a dense tensor of this meta occupies."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def is_dense(self) -> bool:
        """Whether the elements fill their memory without gaps or overlaps, in any order of axes."""
        if 0 in self.shape:
            return True
        expected = 1
        pairs = ((step, size) for size, step in zip(self.shape, self.stride, strict=True) if size != 1)
        for step, size in sorted(pairs):
            if step != expected:
                return False
            expected *= size
        return True

    def as_dense(self) -> TensorMeta:
        """The meta of what `empty` allocates: this one if it is dense, else with strides that are.

        Strides with gaps or overlaps (slices, expanded axes) become what ``torch.empty_like`` makes of them: the
        order of the axes in memory stays, the gaps and overlaps go.
        """
        if self.is_dense:
            return self
        source = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")
        return attrs.evolve(self, stride=torch.empty_like(source).stride())

    def without_grad(self) -> TensorMeta:
        """The same meta with requires_grad False."""
        return attrs.evolve(self, requires_grad=False) if self.requires_grad else self

    def empty(self, device: torch.device | str) -> torch.Tensor:
        """An uninitialised tensor with this shape, dtype and requires_grad, and the strides of `as_dense`."""
        return torch.empty_strided(
            self.shape,
            self.as_dense().stride,
            dtype=self.dtype,
            device=device,
            requires_grad=self.requires_grad,
        )

    def __str__(self) -> str:
        """Short form for messages."""
        grad = ", requires_grad" if self.requires_grad else ""
        return f"{self.dtype} tensor of shape {self.shape}, stride {self.stride}{grad}"


def check_plain(tensor: torch.Tensor) -> None:
    """Refuse what `TensorMeta` does not describe.

    Raises:
        UnsupportedValueError: See `TensorMeta.from_tensor`.
    """
    strange = type(tensor) not in _PLAIN
    if strange and not isinstance(tensor, torch.Tensor):
        raise UnsupportedValueError(f"expected a tensor, got {type_name(tensor)}", type_name=type_name(tensor))
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
        kind = "nested" if tensor.is_nested else "quantized" if tensor.is_quantized else str(tensor.layout)
        raise UnsupportedValueError(
            f"expected a strided tensor, got a {kind} one: convert it (to_dense, to_padded_tensor, dequantize) first",
            type_name=type_name(tensor),
        )
    if strange:
        raise UnsupportedValueError(
            "tensor subclasses other than Parameter, FakeTensor and DTensor have no meta: unwrap it to plain tensors first, "
            f"got {type_name(tensor)}",
            type_name=type_name(tensor),
        )


# An AsyncCollectiveTensor is a plain tensor whose values are on their way; tensor-parallel modules return them.
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter, FakeTensor, AsyncCollectiveTensor})
