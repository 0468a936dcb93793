"""A message of more than 2 GiB, in a few megabytes of memory."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys

import pytest
import torch

from stepwell_meta import TensorMeta
from stepwell_meta.testing import WorkerPool
from stepwell_p2p import C10dTransport, Edge, Op, OpKind, Placement, Recv, Send

CHUNK = 3 * (1 << 20) + mmap.PAGESIZE  # divides no power of two: what lands a power of two beside its place shows
COUNT = (1 << 31) // CHUNK + 2
MAP_FIXED = 0x10


def again_and_again(memory: int, count: int) -> torch.Tensor:
    """A tensor in which the same memory lies this many times, one behind the other."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.mmap.restype = ctypes.c_void_p
    whole = mmap.mmap(-1, CHUNK * count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    room = (ctypes.c_uint8 * len(whole)).from_buffer(whole)
    for number in range(count):
        place = ctypes.addressof(room) + number * CHUNK
        flags = mmap.MAP_SHARED | MAP_FIXED
        assert libc.mmap(place, CHUNK, mmap.PROT_READ | mmap.PROT_WRITE, flags, memory, 0) == place
    return torch.frombuffer(room, dtype=torch.uint8)


def carry_more_than_an_int_counts() -> bool:
    memory = os.memfd_create("chunk")
    os.ftruncate(memory, CHUNK)
    value = again_and_again(memory, COUNT)
    os.close(memory)
    assert value.numel() > 1 << 31
    pattern = torch.arange(CHUNK).remainder(251).to(torch.uint8)
    op = Op(OpKind.SEND_F, Edge(0, 1), 0, 0)
    transport = C10dTransport(placement=Placement.loop(2, 2))
    if transport.rank == 0:
        value[:CHUNK] = pattern
        transport.post([Send(op, value)]).wait()
    else:
        meta = TensorMeta(tuple(value.shape), (1,), torch.uint8)
        (got,) = transport.post([Recv(op.mirror, meta, value)]).wait()
        assert got is value
    transport.close()
    return torch.equal(value[:CHUNK], pattern)


@pytest.mark.skipif(sys.platform != "linux", reason="lays memory out through mmap")
def test_a_message_of_more_than_2_gib_arrives(workers: WorkerPool) -> None:
    """Sizes that do not fit into an int of C had no test: the memory for two such values is more than many machines have."""
    assert workers.run(carry_more_than_an_int_counts, 2, deadline=60.0) == [True, True]
