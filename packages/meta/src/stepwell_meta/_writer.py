"""Values → bytes: one function for each type, found by the exact type. `_wire` has the format in words."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from . import _format as fmt
from ._dtensor import DTensorMeta
from ._mesh_key import MeshKey
from ._stage import BackwardMeta, ForwardMeta, StageMeta
from ._tensor import TensorMeta, type_name
from ._tree import KINDS, Leaf, Static, Structure, Tree
from .exceptions import MetadataError, UnsupportedValueError

__all__ = ["put"]

_DTYPE_NAMES = {dtype: bytes([len(name)]) + name for name, dtype in fmt.DTYPES.items()}


def put(out: bytearray, value: Any, depth: int = 0) -> None:
    """Append a value of any type that the format knows.

    Raises:
        UnsupportedValueError: The format does not know the value's type.
        MetadataError: The value is nested too deeply, or an int is too long.
    """
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


def _put_none(out: bytearray, value: None, depth: int) -> None:
    pass  # the tag says it


def _put_int(out: bytearray, value: int, depth: int) -> None:
    size = (value.bit_length() + 8) // 8
    if size > fmt.MAX_INT_BYTES:
        raise MetadataError(f"an int of {size} bytes is longer than the {fmt.MAX_INT_BYTES} that a peer accepts")
    _put_bytes(out, value.to_bytes(size, "little", signed=True))


def _put_tuple(out: bytearray, values: tuple[Any, ...], depth: int) -> None:
    _check_depth(depth)
    _put_uint(out, len(values))
    for value in values:
        put(out, value, depth + 1)


def _check_depth(depth: int) -> None:
    if depth >= fmt.MAX_NESTING:
        raise MetadataError(f"metadata is nested deeper than {fmt.MAX_NESTING}")


def _put_layout(out: bytearray, shape: tuple[int, ...], stride: tuple[int, ...], flags: int) -> None:
    row_major = stride == fmt.row_major(shape)
    out.append(flags | fmt.ROW_MAJOR if row_major else flags)
    out.append(len(shape))
    _put_uints(out, shape)
    if not row_major:
        _put_uints(out, stride)


def _put_tensor_meta(out: bytearray, meta: TensorMeta, depth: int) -> None:
    out += _DTYPE_NAMES[meta.dtype]
    _put_layout(out, meta.shape, meta.stride, fmt.GRAD if meta.requires_grad else 0)


def _put_dtensor_meta(out: bytearray, meta: DTensorMeta, depth: int) -> None:
    out += _DTYPE_NAMES[meta.dtype]
    _put_layout(out, meta.shape, meta.stride, fmt.GRAD if meta.requires_grad else 0)
    _put_layout(out, meta.global_shape, meta.global_stride, 0)
    _put_mesh_key(out, meta.mesh_key, depth)
    for placement in meta.placements:
        _put_placement(out, placement)


def _put_placement(out: bytearray, placement: Any) -> None:
    if type(placement) is Replicate:
        out.append(fmt.REPLICATE)
    elif type(placement) is Shard:
        out.append(fmt.SHARD)
        _put_uint(out, placement.dim)
    elif type(placement) is Partial:
        out.append(fmt.PARTIAL)
        _put_str(out, placement.reduce_op)
    else:  # a strided shard: DTensorMeta lets no other kind in
        out.append(fmt.STRIDED_SHARD)
        _put_uint(out, placement.dim)
        _put_uint(out, placement.split_factor)


def _put_mesh_key(out: bytearray, key: MeshKey, depth: int) -> None:
    out.append((0 if key.axis_names is None else fmt.NAMES) | (0 if key.offsets is None else fmt.OFFSETS))
    _put_uint(out, len(key.shape))
    _put_uints(out, key.shape)
    for name in key.axis_names or ():
        _put_str(out, name)
    _put_sints(out, key.stride if key.offsets is None else key.offsets)


def _put_stage_meta(out: bytearray, meta: StageMeta, depth: int) -> None:
    for metas in (meta.inputs, meta.outputs, meta.input_grads, meta.output_grads):
        put(out, metas, depth)


def _put_forward_meta(out: bytearray, meta: ForwardMeta, depth: int) -> None:
    put(out, meta.outputs, depth)
    _put_tree(out, meta.structure.root, depth)


def _put_backward_meta(out: bytearray, meta: BackwardMeta, depth: int) -> None:
    put(out, meta.input_grads, depth)


def _put_structure(out: bytearray, structure: Structure, depth: int) -> None:
    _put_tree(out, structure.root, depth)


def _put_tree(out: bytearray, tree: Tree, depth: int) -> None:
    if isinstance(tree, Leaf):
        out.append(fmt.LEAF_NODE)
    elif isinstance(tree, Static):
        out.append(fmt.STATIC_NODE)
        put(out, tree.value, depth)
    else:
        _check_depth(depth)
        out.append(fmt.BRANCH_NODE)
        out.append(KINDS.index(tree.kind))
        _put_str(out, tree.type_name)
        for trees in (tree.keys, tree.children):
            _put_uint(out, len(trees))
            for child in trees:
                _put_tree(out, child, depth + 1)


_WRITERS: dict[type, tuple[int, Callable[[bytearray, Any, int], None]]] = {
    type(None): (fmt.NONE, _put_none),
    bool: (fmt.BOOL, lambda out, value, depth: out.append(value)),
    int: (fmt.INT, _put_int),
    float: (fmt.FLOAT, lambda out, value, depth: out.extend(struct.pack("<d", value))),
    complex: (fmt.COMPLEX, lambda out, value, depth: out.extend(struct.pack("<dd", value.real, value.imag))),
    str: (fmt.STR, lambda out, value, depth: _put_str(out, value)),
    bytes: (fmt.BYTES, lambda out, value, depth: _put_bytes(out, value)),
    torch.dtype: (fmt.DTYPE, lambda out, value, depth: out.extend(_DTYPE_NAMES[value])),
    tuple: (fmt.TUPLE, _put_tuple),
    TensorMeta: (fmt.TENSOR, _put_tensor_meta),
    DTensorMeta: (fmt.DTENSOR, _put_dtensor_meta),
    MeshKey: (fmt.MESH_KEY, _put_mesh_key),
    StageMeta: (fmt.STAGE, _put_stage_meta),
    ForwardMeta: (fmt.FORWARD, _put_forward_meta),
    BackwardMeta: (fmt.BACKWARD, _put_backward_meta),
    Structure: (fmt.STRUCTURE, _put_structure),
}
