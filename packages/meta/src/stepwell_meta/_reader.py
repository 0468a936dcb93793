"""Bytes → values: one method for each tag. `_wire` has the format in words, and what guards it."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from . import _format as fmt
from ._compat import StridedShard
from ._dtensor import DTensorMeta
from ._mesh_key import MAX_AXES, MAX_RANK, MeshKey
from ._stage import BackwardMeta, ForwardMeta, StageMeta
from ._tensor import MAX_DIMS, TensorMeta
from ._tree import KINDS, LEAF, Branch, Static, Structure, Tree
from .exceptions import DecodeError

__all__ = ["Reader"]

_META_TAGS = frozenset({fmt.NONE, fmt.TENSOR, fmt.DTENSOR})
_STATIC_TAGS = frozenset(range(fmt.TUPLE))


class Reader:
    """Reads one message from front to end. Mutable: it moves through the bytes.

    Reading past the end raises IndexError, which the caller turns into "cut short".
    """

    def __init__(self, data: bytes, classes: Mapping[str, type]) -> None:
        self.data = data
        self.at = 0
        self.classes = classes

    def message(self) -> Any:
        """The value of the whole message."""
        header = self.take(len(fmt.HEADER))
        if header[:-1] != fmt.HEADER[:-1]:
            self.fail("no stepwell header")
        if header != fmt.HEADER:
            self.fail(
                f"format version {header[-1]}, while this stepwell-meta reads version {fmt.HEADER[-1]} "
                "(install one version on all ranks)"
            )
        value = self.value(0)
        if self.at != len(self.data):
            self.fail("more bytes than its value")
        return value

    def fail(self, what: str) -> NoReturn:
        """Stop at this place."""
        raise DecodeError(f"metadata has {what} at byte {self.at}", offset=self.at)

    def value(self, depth: int) -> Any:
        """A value of any kind."""
        tag = self.byte()
        if tag >= len(_READERS):
            self.fail(f"an unknown tag {tag}")
        return _READERS[tag](self, depth)

    def one_of(self, tags: frozenset[int]) -> Any:
        """A value with one of these tags, which hold no further values and so cannot nest."""
        if self.data[self.at] not in tags:
            self.fail(f"a tag {self.data[self.at]} that may not be here")
        return self.value(fmt.MAX_NESTING)

    # Numbers and strings.

    def byte(self) -> int:
        byte = self.data[self.at]
        self.at += 1
        return byte

    def take(self, size: int) -> bytes:
        end = self.at + size
        if end > len(self.data):
            raise IndexError
        part = self.data[self.at : end]
        self.at = end
        return part

    def uint(self) -> int:
        byte = self.byte()
        if byte < 0x80:
            return byte
        value, shift = byte & 0x7F, 7
        while shift < 64:
            byte = self.byte()
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
            shift += 7
        self.fail("a number of more than 64 bits")

    def uints(self, count: int) -> tuple[int, ...]:
        part = self.data[self.at : self.at + count]
        if len(part) == count and part.isascii():  # all below 0x80: one byte each
            self.at += count
            return tuple(part)
        return tuple([self.uint() for _ in range(count)])

    def sints(self, count: int) -> tuple[int, ...]:
        return tuple([~(value >> 1) if value & 1 else value >> 1 for value in self.uints(count)])

    def count(self, limit: int, of: str) -> int:
        """A number of things that follow; each takes at least one of the bytes that are left."""
        count = self.uint()
        if count > limit:
            self.fail(f"{count} {of}, more than {limit},")
        if count > len(self.data) - self.at:
            raise IndexError
        return count

    def raw(self) -> bytes:
        return self.take(self.uint())

    def string(self) -> str:
        return self.raw().decode("utf-8", "surrogatepass")

    def boolean(self) -> bool:
        byte = self.byte()
        if byte > 1:
            self.fail(f"a bool of {byte}")
        return byte == 1

    def integer(self) -> int:
        data = self.raw()
        if len(data) > fmt.MAX_INT_BYTES:
            self.fail(f"an int of {len(data)} bytes")
        return int.from_bytes(data, "little", signed=True)

    def dtype(self) -> torch.dtype:
        name = self.take(self.byte())
        dtype = fmt.DTYPES.get(name)
        if dtype is None:
            self.fail(f"a dtype {name!r} that this torch does not have")
        return dtype

    def values(self, depth: int) -> tuple[Any, ...]:
        if depth >= fmt.MAX_NESTING:
            self.fail(f"tuples nested deeper than {fmt.MAX_NESTING}")
        return tuple([self.value(depth + 1) for _ in range(self.count(fmt.MAX_ENCODED_BYTES, "values"))])

    # Records.

    def layout(self) -> tuple[tuple[int, ...], tuple[int, ...], bool]:
        flags = self.byte()
        if flags > fmt.GRAD | fmt.ROW_MAJOR:
            self.fail(f"unknown flags {flags} of a tensor")
        shape = self.uints(self.count(MAX_DIMS, "dims"))
        stride = fmt.row_major(shape) if flags & fmt.ROW_MAJOR else self.uints(len(shape))
        return shape, stride, bool(flags & fmt.GRAD)

    def tensor_meta(self) -> TensorMeta:
        dtype = self.dtype()
        shape, stride, requires_grad = self.layout()
        return TensorMeta(shape, stride, dtype, requires_grad)

    def dtensor_meta(self) -> DTensorMeta:
        dtype = self.dtype()
        shape, stride, requires_grad = self.layout()
        global_shape, global_stride, _ = self.layout()
        key = self.mesh_key()
        return DTensorMeta(
            shape=shape,
            stride=stride,
            dtype=dtype,
            requires_grad=requires_grad,
            global_shape=global_shape,
            global_stride=global_stride,
            placements=tuple([self.placement() for _ in key.shape]),
            mesh_key=key,
        )

    def placement(self) -> Any:
        kind = self.byte()
        if kind == fmt.REPLICATE:
            return Replicate()
        if kind == fmt.PARTIAL:
            return Partial(self.string())
        if kind != fmt.SHARD and (kind != fmt.STRIDED_SHARD or StridedShard is None):
            self.fail(f"a placement {kind} that this torch does not have")
        dim = self.uint()
        if dim >= MAX_DIMS:
            self.fail(f"a shard of dim {dim}")
        if kind == fmt.SHARD:
            return Shard(dim)
        split_factor = self.uint()
        if not 1 <= split_factor <= MAX_RANK:
            self.fail(f"a strided shard with split factor {split_factor}")
        return StridedShard(dim, split_factor=split_factor)

    def mesh_key(self) -> MeshKey:
        flags = self.byte()
        if flags > fmt.NAMES | fmt.OFFSETS:
            self.fail(f"unknown flags {flags} of a mesh key")
        shape = self.uints(self.count(MAX_AXES, "mesh axes"))
        names = [self.string() for _ in shape] if flags & fmt.NAMES else None
        if not flags & fmt.OFFSETS:
            return MeshKey(names, shape, self.sints(len(shape)))
        ranks = math.prod(shape)
        if ranks > len(self.data) - self.at:
            raise IndexError
        return MeshKey(names, shape, (), self.sints(ranks))

    def metas(self) -> tuple[Any, ...] | None:
        tag = self.byte()
        if tag == fmt.NONE:
            return None
        if tag != fmt.TUPLE:
            self.fail(f"a tag {tag} in place of metas")
        return tuple([self.one_of(_META_TAGS) for _ in range(self.count(fmt.MAX_ENCODED_BYTES, "metas"))])

    def stage_meta(self) -> StageMeta:
        return StageMeta(self.metas(), self.metas(), self.metas(), self.metas())

    def forward_meta(self, depth: int) -> ForwardMeta:
        return ForwardMeta(self.metas() or (), self.structure(depth))

    def backward_meta(self) -> BackwardMeta:
        return BackwardMeta(self.metas() or ())

    def structure(self, depth: int) -> Structure:
        return Structure(self.tree(depth), self.classes)

    def tree(self, depth: int) -> Tree:
        form = self.byte()
        if form == fmt.LEAF_NODE:
            return LEAF
        if form == fmt.STATIC_NODE:
            return Static(self.one_of(_STATIC_TAGS))
        if form != fmt.BRANCH_NODE or depth >= fmt.MAX_NESTING:
            self.fail(f"a node of form {form} at depth {depth} of a structure")
        kind = self.byte()
        if kind >= len(KINDS):
            self.fail(f"an unknown kind of container {kind}")
        name = self.string()
        keys = self.trees(depth + 1)
        branch = Branch(KINDS[kind], self.trees(depth + 1), keys, name)
        branch.check()
        return branch

    def trees(self, depth: int) -> tuple[Tree, ...]:
        return tuple([self.tree(depth) for _ in range(self.count(fmt.MAX_ENCODED_BYTES, "nodes"))])


# By tag, in the order of _format.
_READERS: tuple[Callable[[Reader, int], Any], ...] = (
    lambda reader, depth: None,
    lambda reader, depth: reader.boolean(),
    lambda reader, depth: reader.integer(),
    lambda reader, depth: struct.unpack("<d", reader.take(8))[0],
    lambda reader, depth: complex(*struct.unpack("<dd", reader.take(16))),
    lambda reader, depth: reader.string(),
    lambda reader, depth: reader.raw(),
    lambda reader, depth: reader.dtype(),
    Reader.values,
    lambda reader, depth: reader.tensor_meta(),
    lambda reader, depth: reader.dtensor_meta(),
    lambda reader, depth: reader.mesh_key(),
    lambda reader, depth: reader.stage_meta(),
    Reader.forward_meta,
    lambda reader, depth: reader.backward_meta(),
    Reader.structure,
)
