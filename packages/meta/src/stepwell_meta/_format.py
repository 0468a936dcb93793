"""The numbers of the wire format, for the side that writes and the side that reads. Any change is another version."""

from __future__ import annotations

import torch

HEADER = b"SW\x01"  # two letters and the version
MAX_ENCODED_BYTES = 1 << 20
MAX_NESTING = 128
MAX_INT_BYTES = 1024

# What a value starts with.
NONE, BOOL, INT, FLOAT, COMPLEX, STR, BYTES, DTYPE, TUPLE = range(9)
TENSOR, DTENSOR, MESH_KEY, STAGE, FORWARD, BACKWARD, STRUCTURE = range(9, 16)

# What a node of a structure starts with.
LEAF_NODE, STATIC_NODE, BRANCH_NODE = range(3)

# What a placement starts with.
REPLICATE, SHARD, PARTIAL, STRIDED_SHARD = range(4)

# Bits of a tensor's layout: requires_grad is set; the strides are those of a contiguous tensor and left out.
GRAD, ROW_MAJOR = 1, 2

# Bits of a mesh key: it has axis names; it has offsets in place of strides.
NAMES, OFFSETS = 1, 2

# Dtypes go by name, so that both sides need not have the same ones. Read from what is there, never by getattr with a
# name from the wire: torch imports submodules on getattr.
DTYPES = {
    name.encode(): value
    for name, value in vars(torch).items()
    if type(value) is torch.dtype and str(value) == f"torch.{name}"
}


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a contiguous tensor, as torch gives them: a size of 0 counts as 1."""
    step = 1
    stride = []
    for size in reversed(shape):
        stride.append(step)
        step *= size or 1
    return tuple(reversed(stride))
