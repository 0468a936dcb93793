"""Metas and structures ↔ bytes, never by pickle: what is not written here cannot be said.

An encoding is the two bytes ``SW``, a version, and one value. A value is a tag and what the tag asks for; counts and sizes
are unsigned LEB128. Classes and dtypes go by name. Decoding allocates nothing that the bytes do not pay for: a count is
checked against the bytes that are left, a name against the names there are, nesting against a limit. It imports nothing and
calls no code but the constructors of stepwell-meta's own records and of torch's placements.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn, TypeAlias

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from ._classes import class_map
from ._compat import StridedShard
from ._dtensor import DTensorMeta
from ._mesh_key import MAX_AXES, MAX_RANK, MeshKey
from ._stage import BackwardMeta, ForwardMeta, StageMeta
from ._tensor import MAX_DIMS, TensorMeta, type_name
from ._tree import KINDS, LEAF, STATIC_TYPES, Branch, Leaf, Static, Structure, Tree
from .exceptions import DecodeError, MetadataError, UnsupportedValueError

__all__ = ["MAX_ENCODED_BYTES", "decode", "encode"]

MAGIC = b"SW"
VERSION = 1
MAX_ENCODED_BYTES = 1 << 20
MAX_NESTING = 128
MAX_INT_BYTES = 1024

_DTYPES = {
    name.encode(): value
    for name, value in vars(torch).items()
    if type(value) is torch.dtype and str(value) == f"torch.{name}"
}
_DTYPE_NAMES = {dtype: bytes([len(name)]) + name for name, dtype in _DTYPES.items()}

_GRAD, _ROW_MAJOR = 1, 2  # flags of a tensor
_NAMES, _OFFSETS = 1, 2  # flags of a mesh key
_REPLICATE, _SHARD, _PARTIAL, _STRIDED_SHARD = range(4)
_LEAF, _STATIC, _BRANCH = range(3)


def encode(value: Any) -> bytes:
    """Metadata as bytes.

    Args:
        value: A TensorMeta, DTensorMeta, MeshKey, StageMeta, ForwardMeta, BackwardMeta or Structure, None, a bool, int,
            float, complex, str, bytes or torch.dtype, or a tuple of any of these, nested.

    Raises:
        UnsupportedValueError: ``value`` is or holds something else.
        MetadataError: It is nested too deeply or takes more than `MAX_ENCODED_BYTES`.

    Example:
        >>> decode(encode((MeshKey(None, (4,), (1,)), "tp")))
        (MeshKey(axis_names=None, shape=(4,), stride=(1,), offsets=None), 'tp')
    """
    out = bytearray(MAGIC)
    out.append(VERSION)
    _put(out, value, 0)
    if len(out) > MAX_ENCODED_BYTES:
        raise MetadataError(f"metadata takes {len(out)} bytes, more than the {MAX_ENCODED_BYTES} that a peer accepts")
    return bytes(out)


def decode(data: bytes | bytearray | memoryview, *, classes: Iterable[type] = ()) -> Any:
    """The value that `encode` was given.

    Args:
        data: All the bytes of one encoding and nothing more.
        classes: Named tuples, dataclasses, attrs classes and enums that structures may be rebuilt with. Names of classes in
            the bytes select among these and never import anything; a class that is missing is an error only on
            `Structure.rebuild`.

    Raises:
        DecodeError: The bytes are cut short, altered, or of another version.
        MetadataError: The bytes describe something that cannot be, such as requires_grad on integers.
    """
    size = memoryview(data).nbytes
    if size > MAX_ENCODED_BYTES:
        raise DecodeError(f"{size} bytes of metadata are more than {MAX_ENCODED_BYTES}", offset=0)
    reader = _Reader(bytes(data), class_map(classes))
    try:
        return reader.message()
    except (IndexError, struct.error) as error:
        raise DecodeError(f"metadata is cut short after {size} bytes", offset=size) from error
    except UnicodeDecodeError as error:
        raise DecodeError(
            f"metadata has a string that is not UTF-8 before byte {reader.at}", offset=reader.at
        ) from error


# Writing: one function for each type, found by the exact type.


def _put_uint(out: bytearray, value: int) -> None:
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)


def _put_uints(out: bytearray, values: tuple[int, ...]) -> None:
    for value in values:
        _put_uint(out, value)


def _put_sints(out: bytearray, values: tuple[int, ...]) -> None:
    for value in values:
        _put_uint(out, value << 1 if value >= 0 else ~(value << 1))


def _put_bytes(out: bytearray, value: bytes) -> None:
    _put_uint(out, len(value))
    out += value


def _put_str(out: bytearray, value: str) -> None:
    _put_bytes(out, value.encode("utf-8", "surrogatepass"))


def _row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a contiguous tensor, as torch gives them: a size of 0 counts as 1."""
    step = 1
    stride = []
    for size in reversed(shape):
        stride.append(step)
        step *= size or 1
    return tuple(reversed(stride))


def _put_layout(out: bytearray, shape: tuple[int, ...], stride: tuple[int, ...], flags: int) -> None:
    row_major = stride == _row_major(shape)
    out.append(flags | _ROW_MAJOR if row_major else flags)
    out.append(len(shape))
    _put_uints(out, shape)
    if not row_major:
        _put_uints(out, stride)


def _put_tensor_meta(out: bytearray, meta: TensorMeta, depth: int) -> None:
    out += _DTYPE_NAMES[meta.dtype]
    _put_layout(out, meta.shape, meta.stride, _GRAD if meta.requires_grad else 0)


def _put_dtensor_meta(out: bytearray, meta: DTensorMeta, depth: int) -> None:
    out += _DTYPE_NAMES[meta.dtype]
    _put_layout(out, meta.shape, meta.stride, _GRAD if meta.requires_grad else 0)
    _put_layout(out, meta.global_shape, meta.global_stride, 0)
    _put_mesh_key(out, meta.mesh_key, depth)
    for placement in meta.placements:
        _put_placement(out, placement)


def _put_placement(out: bytearray, placement: Any) -> None:
    if type(placement) is Replicate:
        out.append(_REPLICATE)
    elif type(placement) is Shard:
        out.append(_SHARD)
        _put_uint(out, placement.dim)
    elif type(placement) is Partial:
        out.append(_PARTIAL)
        _put_str(out, placement.reduce_op)
    else:  # DTensorMeta lets no other kind in
        out.append(_STRIDED_SHARD)
        _put_uint(out, placement.dim)
        _put_uint(out, placement.split_factor)


def _put_mesh_key(out: bytearray, key: MeshKey, depth: int) -> None:
    out.append((_NAMES if key.axis_names is not None else 0) | (_OFFSETS if key.offsets is not None else 0))
    _put_uint(out, len(key.shape))
    _put_uints(out, key.shape)
    for name in key.axis_names or ():
        _put_str(out, name)
    _put_sints(out, key.stride if key.offsets is None else key.offsets)


def _put_stage_meta(out: bytearray, meta: StageMeta, depth: int) -> None:
    for metas in (meta.inputs, meta.outputs, meta.input_grads, meta.output_grads):
        _put(out, metas, depth)


def _put_forward_meta(out: bytearray, meta: ForwardMeta, depth: int) -> None:
    _put(out, meta.outputs, depth)
    _put_tree(out, meta.structure.root, depth)


def _put_backward_meta(out: bytearray, meta: BackwardMeta, depth: int) -> None:
    _put(out, meta.input_grads, depth)


def _put_structure(out: bytearray, structure: Structure, depth: int) -> None:
    _put_tree(out, structure.root, depth)


def _put_tree(out: bytearray, tree: Tree, depth: int) -> None:
    if isinstance(tree, Leaf):
        out.append(_LEAF)
    elif isinstance(tree, Static):
        out.append(_STATIC)
        _put(out, tree.value, depth)
    else:
        _check_depth(depth)
        out.append(_BRANCH)
        out.append(KINDS.index(tree.kind))
        _put_str(out, tree.type_name)
        for trees in (tree.keys, tree.children):
            _put_uint(out, len(trees))
            for child in trees:
                _put_tree(out, child, depth + 1)


def _put_tuple(out: bytearray, values: tuple[Any, ...], depth: int) -> None:
    _check_depth(depth)
    _put_uint(out, len(values))
    for value in values:
        _put(out, value, depth + 1)


def _check_depth(depth: int) -> None:
    if depth >= MAX_NESTING:
        raise MetadataError(f"metadata is nested deeper than {MAX_NESTING}")


def _put_int(out: bytearray, value: int, depth: int) -> None:
    size = (value.bit_length() + 8) // 8
    if size > MAX_INT_BYTES:
        raise MetadataError(f"an int of {size} bytes is longer than the {MAX_INT_BYTES} that a peer accepts")
    _put_bytes(out, value.to_bytes(size, "little", signed=True))


def _put(out: bytearray, value: Any, depth: int) -> None:
    entry = _WRITERS.get(type(value))
    if entry is None:
        raise UnsupportedValueError(
            f"expected metadata, a plain scalar, or a tuple of these, got {type_name(value)}: normalize_outputs describes "
            "other containers",
            type_name=type_name(value),
        )
    tag, write = entry
    out.append(tag)
    write(out, value, depth)


_Write: TypeAlias = Callable[[bytearray, Any, int], None]

# The tags of values. A tag never changes its meaning; another meaning is another version.
_WRITERS: dict[type, tuple[int, _Write]] = {
    type(None): (0, lambda out, value, depth: None),
    bool: (1, lambda out, value, depth: out.append(value)),
    int: (2, _put_int),
    float: (3, lambda out, value, depth: out.extend(struct.pack("<d", value))),
    complex: (4, lambda out, value, depth: out.extend(struct.pack("<dd", value.real, value.imag))),
    str: (5, lambda out, value, depth: _put_str(out, value)),
    bytes: (6, lambda out, value, depth: _put_bytes(out, value)),
    torch.dtype: (7, lambda out, value, depth: out.extend(_DTYPE_NAMES[value])),
    tuple: (8, _put_tuple),
    TensorMeta: (9, _put_tensor_meta),
    DTensorMeta: (10, _put_dtensor_meta),
    MeshKey: (11, _put_mesh_key),
    StageMeta: (12, _put_stage_meta),
    ForwardMeta: (13, _put_forward_meta),
    BackwardMeta: (14, _put_backward_meta),
    Structure: (15, _put_structure),
}

_NONE, _TUPLE = _WRITERS[type(None)][0], _WRITERS[tuple][0]
_META_TAGS = frozenset({_NONE, _WRITERS[TensorMeta][0], _WRITERS[DTensorMeta][0]})
_STATIC_TAGS = frozenset(_WRITERS[static][0] for static in STATIC_TYPES)


class _Reader:
    """Reads one message from the front. Mutable: it moves through the bytes."""

    def __init__(self, data: bytes, classes: Mapping[str, type]) -> None:
        self.data = data
        self.at = 0
        self.classes = classes

    def fail(self, what: str) -> NoReturn:
        raise DecodeError(f"metadata has {what} before byte {self.at}", offset=self.at)

    def message(self) -> Any:
        if self.take(2) != MAGIC:
            self.fail("no stepwell header")
        version = self.byte()
        if version != VERSION:
            self.fail(
                f"format version {version}, while this stepwell-meta reads version {VERSION} (install the same "
                "stepwell-meta on all ranks)"
            )
        value = self.value(0)
        if self.at != len(self.data):
            self.fail(f"{len(self.data) - self.at} bytes too many")
        return value

    def value(self, depth: int) -> Any:
        tag = self.byte()
        if tag >= len(_READERS):
            self.fail(f"an unknown tag {tag}")
        return _READERS[tag](self, depth)

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
        byte = self.data[self.at]
        self.at += 1
        if byte < 0x80:
            return byte
        value, shift = byte & 0x7F, 7
        while True:
            byte = self.data[self.at]
            self.at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
            shift += 7
            if shift > 63:
                self.fail("a number of more than 64 bits")

    def sint(self) -> int:
        value = self.uint()
        return ~(value >> 1) if value & 1 else value >> 1

    def count(self) -> int:
        """A number of things that follow, each of which takes a byte or more."""
        count = self.uint()
        if count > len(self.data) - self.at:
            raise IndexError
        return count

    def bytes_(self) -> bytes:
        return self.take(self.uint())

    def str_(self) -> str:
        return self.bytes_().decode("utf-8", "surrogatepass")

    def dtype(self) -> torch.dtype:
        name = self.take(self.byte())
        dtype = _DTYPES.get(name)
        if dtype is None:
            self.fail(f"a dtype {name!r} that this torch does not have")
        return dtype

    def uints(self, count: int) -> tuple[int, ...]:
        return tuple([self.uint() for _ in range(count)])

    def bool_(self) -> bool:
        byte = self.byte()
        if byte > 1:
            self.fail(f"a bool {byte}")
        return byte == 1

    def int_(self) -> int:
        data = self.bytes_()
        if len(data) > MAX_INT_BYTES:
            self.fail(f"an int of {len(data)} bytes")
        return int.from_bytes(data, "little", signed=True)

    def tuple_(self, depth: int) -> tuple[Any, ...]:
        if depth >= MAX_NESTING:
            self.fail(f"values nested deeper than {MAX_NESTING}")
        return tuple([self.value(depth + 1) for _ in range(self.count())])

    def layout(self) -> tuple[tuple[int, ...], tuple[int, ...], bool]:
        flags = self.byte()
        if flags > _GRAD | _ROW_MAJOR:
            self.fail(f"unknown flags {flags} of a tensor")
        ndim = self.count()
        if ndim > MAX_DIMS:
            self.fail(f"a tensor of {ndim} dims")
        shape = self.uints(ndim)
        stride = _row_major(shape) if flags & _ROW_MAJOR else self.uints(ndim)
        return shape, stride, bool(flags & _GRAD)

    def tensor_meta(self) -> TensorMeta:
        dtype = self.dtype()
        shape, stride, requires_grad = self.layout()
        return TensorMeta(shape, stride, dtype, requires_grad)

    def dtensor_meta(self) -> DTensorMeta:
        dtype = self.dtype()
        shape, stride, requires_grad = self.layout()
        global_shape, global_stride, _ = self.layout()
        key = self.mesh_key()
        placements = [self.placement() for _ in key.shape]
        return DTensorMeta(shape, stride, dtype, requires_grad, global_shape, global_stride, placements, key)

    def placement(self) -> Placement:
        kind = self.byte()
        if kind == _REPLICATE:
            return Replicate()
        if kind == _PARTIAL:
            return Partial(self.str_())
        if kind != _SHARD and (kind != _STRIDED_SHARD or StridedShard is None):
            self.fail(f"a placement {kind} that this torch does not have")
        dim = self.uint()
        if dim > MAX_DIMS:
            self.fail(f"a shard of dim {dim}")
        if kind == _SHARD:
            return Shard(dim)
        split_factor = self.uint()
        if not 1 <= split_factor <= MAX_RANK:
            self.fail(f"a strided shard with split factor {split_factor}")
        return StridedShard(dim, split_factor=split_factor)

    def mesh_key(self) -> MeshKey:
        flags = self.byte()
        if flags > _NAMES | _OFFSETS:
            self.fail(f"unknown flags {flags} of a mesh key")
        ndim = self.count()
        if ndim > MAX_AXES:
            self.fail(f"a mesh of {ndim} axes")
        shape = self.uints(ndim)
        names = [self.str_() for _ in shape] if flags & _NAMES else None
        if not flags & _OFFSETS:
            return MeshKey(names, shape, [self.sint() for _ in shape])
        ranks = math.prod(shape)
        if ranks > len(self.data) - self.at:
            raise IndexError
        return MeshKey(names, shape, (), [self.sint() for _ in range(ranks)])

    def metas(self) -> tuple[Any, ...] | None:
        tag = self.byte()
        if tag == _NONE:
            return None
        if tag != _TUPLE:
            self.fail(f"a value of tag {tag} in place of metas")
        return tuple([self.one_of(_META_TAGS) for _ in range(self.count())])

    def one_of(self, tags: frozenset[int]) -> Any:
        """A value that holds no other values, so that it needs no depth."""
        if self.data[self.at] not in tags:
            self.fail(f"a value of tag {self.data[self.at]} that may not be here")
        return self.value(MAX_NESTING)

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
        if form == _LEAF:
            return LEAF
        if form == _STATIC:
            return Static(self.one_of(_STATIC_TAGS))
        if form != _BRANCH or depth >= MAX_NESTING:
            self.fail(f"a structure of form {form} at depth {depth}")
        kind = self.byte()
        if kind >= len(KINDS):
            self.fail(f"an unknown container {kind}")
        name = self.str_()
        keys = tuple([self.tree(depth + 1) for _ in range(self.count())])
        children = tuple([self.tree(depth + 1) for _ in range(self.count())])
        branch = Branch(KINDS[kind], children, keys, name)
        branch.check()
        return branch


_Read: TypeAlias = Callable[[_Reader, int], Any]

_READERS: tuple[_Read, ...] = (
    lambda reader, depth: None,
    lambda reader, depth: reader.bool_(),
    lambda reader, depth: reader.int_(),
    lambda reader, depth: struct.unpack("<d", reader.take(8))[0],
    lambda reader, depth: complex(*struct.unpack("<dd", reader.take(16))),
    lambda reader, depth: reader.str_(),
    lambda reader, depth: reader.bytes_(),
    lambda reader, depth: reader.dtype(),
    _Reader.tuple_,
    lambda reader, depth: reader.tensor_meta(),
    lambda reader, depth: reader.dtensor_meta(),
    lambda reader, depth: reader.mesh_key(),
    lambda reader, depth: reader.stage_meta(),
    _Reader.forward_meta,
    lambda reader, depth: reader.backward_meta(),
    _Reader.structure,
)
