"""The name of a mesh that is the same on every stage: axis names and rank grid, without the ranks.

A mesh's rank grid is the array of global ranks that it holds. Subtract the first rank, and the grids of "my TP
mesh" on two stages become one: stage 0's ``[[0, 1], [4, 5]]`` and stage 1's ``[[2, 3], [6, 7]]`` are both
``[[0, 1], [4, 5]]``, that is shape ``(2, 2)`` and stride ``(4, 1)``: one step along an axis adds so much to the
rank. Three rules make the key of a grid unique:

- An axis of size 1 has stride 0: no step along it exists.
- Strides may be negative (ranks that fall along an axis) and are never 0 along an axis longer than 1.
- A grid that no strides describe, such as ``[0, 1, 4, 5]`` (two axes that are not neighbours, flattened into
  one), has stride ``()`` and instead ``offsets``: every rank minus the first, in row-major order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs

from .exceptions import MetadataError

__all__ = ["MeshKey"]

MAX_AXES = 32
MAX_RANK = 2**31 - 1


def _names(names: Sequence[str] | None) -> tuple[str, ...] | None:
    return None if names is None else tuple(names)


def _ints(values: Sequence[int]) -> tuple[int, ...]:
    return tuple(values)


def _optional_ints(values: Sequence[int] | None) -> tuple[int, ...] | None:
    return None if values is None else tuple(values)


def _affine_offsets(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major offsets that strides give; the first is 0. One axis after the other: the time is that of the last one."""
    offsets = [0]
    for size, step in zip(shape, stride, strict=True):
        offsets = [offset + index * step for offset in offsets for index in range(size)]
    return tuple(offsets)


def _few(values: Sequence[int]) -> str:
    """Numbers for a message, cut where they are many."""
    return str(tuple(values)) if len(values) <= 64 else f"({', '.join(map(str, values[:8]))}, … {len(values)} in all)"


@attrs.frozen
class MeshKey:
    """Axis names, shape and strides of a mesh's rank grid, relative to its first rank.

    Two meshes have equal keys exactly if they have the same axis names and differ in the first rank only. The
    module docstring has the rules for axes of size 1 and for grids without strides.

    Attributes:
        axis_names: One distinct name for each axis, or None for a mesh without names.
        shape: Size of each axis, at least 1; ``()`` is a mesh of one rank without axes.
        stride: What one step along each axis adds to the rank; ``()`` where ``offsets`` is given.
        offsets: None, or every rank minus the first in row-major order, for grids that no strides describe.

    Raises:
        MetadataError: The fields contradict each other or break one of the rules.

    Example:
        >>> str(MeshKey(("dp", "tp"), (2, 2), (4, 1)))
        '(dp=2, tp=2), stride (4, 1)'
    """

    axis_names: tuple[str, ...] | None = attrs.field(converter=_names)
    shape: tuple[int, ...] = attrs.field(converter=_ints)
    stride: tuple[int, ...] = attrs.field(converter=_ints)
    offsets: tuple[int, ...] | None = attrs.field(default=None, converter=_optional_ints)

    def __attrs_post_init__(self) -> None:
        """Refuse what no mesh can be."""
        if len(self.shape) > MAX_AXES:
            raise MetadataError(f"a mesh has at most {MAX_AXES} axes, got {len(self.shape)}")
        for size in self.shape:
            if type(size) is not int or size < 1:
                raise MetadataError(f"mesh axis sizes must be ints of at least 1, got {self.shape}")
        if math.prod(self.shape) > MAX_RANK:
            raise MetadataError(f"a mesh of shape {self.shape} has more ranks than torch can number")
        self._check_names()
        if self.offsets is None:
            self._check_stride()
        else:
            self._check_offsets(self.offsets)

    def _check_names(self) -> None:
        names = self.axis_names
        if names is None:
            return
        if any(type(name) is not str for name in names):
            raise MetadataError(f"mesh axis names must be strings, got {names}")
        if len(names) != len(self.shape):
            raise MetadataError(f"a mesh of shape {self.shape} needs {len(self.shape)} axis names, got {names}")
        if len(set(names)) != len(names):
            raise MetadataError(f"mesh axis names must differ from each other, got {names}")

    def _check_stride(self) -> None:
        if len(self.stride) != len(self.shape):
            raise MetadataError(f"a mesh of shape {self.shape} needs as many strides, got {self.stride}")
        for size, step in zip(self.shape, self.stride, strict=True):
            if type(step) is not int or (step == 0) != (size == 1) or abs(step) > MAX_RANK:
                raise MetadataError(
                    "mesh strides must be 0 along axes of size 1 and ints other than 0 along longer axes, "
                    f"got shape {self.shape} and stride {self.stride}"
                )

    def _check_offsets(self, offsets: tuple[int, ...]) -> None:
        if self.stride:
            raise MetadataError(f"a mesh key has a stride or offsets, not both, got stride {self.stride}")
        if len(offsets) != math.prod(self.shape):
            raise MetadataError(
                f"a mesh of shape {self.shape} needs {math.prod(self.shape)} offsets, got {len(offsets)}"
            )
        if any(type(offset) is not int or abs(offset) > MAX_RANK for offset in offsets):
            raise MetadataError("mesh offsets must be ints that a rank can hold")
        if offsets[0] != 0 or len(set(offsets)) != len(offsets):
            raise MetadataError(f"mesh offsets must start with 0 and differ from each other, got {_few(offsets)}")
        if _stride_of(self.shape, offsets) is not None:
            raise MetadataError(f"mesh offsets {_few(offsets)} are described by strides: use MeshKey.from_ranks")

    @classmethod
    def from_ranks(
        cls, ranks: Sequence[int], shape: Sequence[int], *, axis_names: Sequence[str] | None = None
    ) -> MeshKey:
        """The key of the grid of ``shape`` that holds ``ranks`` in row-major order.

        Raises:
            MetadataError: The number of ranks is not that of the shape, or a rank occurs twice.

        Example:
            >>> MeshKey.from_ranks([2, 3, 6, 7], (2, 2)).stride
            (4, 1)
        """
        shape = tuple(shape)
        if len(ranks) != math.prod(shape) or len(set(ranks)) != len(ranks) or not ranks:
            raise MetadataError(f"a mesh of shape {shape} needs {math.prod(shape)} distinct ranks, got {_few(ranks)}")
        offsets = tuple(rank - ranks[0] for rank in ranks)
        stride = _stride_of(shape, offsets)
        if stride is None:
            return cls(axis_names, shape, (), offsets)
        return cls(axis_names, shape, stride)

    def __str__(self) -> str:
        """Short form for messages."""
        if self.axis_names is None:
            text = str(self.shape)
        else:
            pairs = zip(self.axis_names, self.shape, strict=True)
            text = f"({', '.join(f'{name}={size}' for name, size in pairs)})"
        if self.offsets is None:
            return f"{text}, stride {self.stride}"
        return f"{text}, ranks at offsets {_few(self.offsets)}"


def _stride_of(shape: tuple[int, ...], offsets: tuple[int, ...]) -> tuple[int, ...] | None:
    """Strides that give ``offsets``, or None where there are none."""
    stride = []
    step = len(offsets)
    for size in shape:
        step //= size
        stride.append(offsets[step] if size > 1 else 0)
    found = tuple(stride)
    return found if _affine_offsets(shape, found) == offsets else None
