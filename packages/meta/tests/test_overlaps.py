"""overlaps: which tensors have a byte of memory in common."""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings, strategies
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from stepwell_meta import _overlaps, overlaps
from stepwell_meta._compat import AsyncCollectiveTensor, FakeTensor
from stepwell_meta.testing import WorkerPool, count_calls


def test_tensors_of_one_memory() -> None:
    x = torch.arange(24.0).reshape(4, 6)
    assert overlaps([x, x]) == {0: 1, 1: 0}
    assert overlaps([x, x.clone(), x[1]]) == {0: 2, 2: 0}
    assert overlaps([x[:, :3], x[:, 3:]]) == {}
    assert overlaps([x[::2], x[1::2], x[2:]]).keys() == {0, 1, 2}
    assert overlaps([x[0].expand(5, 6), x[0]]).keys() == {0, 1}
    assert overlaps([x[0].expand(5, 6), x[1]]) == {}
    assert overlaps([x.t(), x[1, 2]]).keys() == {0, 1}
    assert overlaps([nn.Parameter(x), x.requires_grad_()]).keys() == {0, 1}
    x = x.detach()
    assert overlaps([x.unfold(0, 2, 1), x.new_zeros(4, 6)]) == {}  # has elements twice, but all of them are its own
    assert overlaps([x] * 256).keys() == set(range(256))


def test_tensors_of_several_dtypes() -> None:
    z = torch.zeros(3, dtype=torch.complex64)
    assert overlaps([torch.view_as_real(z), z]).keys() == {0, 1}
    assert overlaps([z.real, z.imag]) == {}
    memory = torch.zeros(64, dtype=torch.uint8)
    single, double = memory[:32].view(torch.float32), memory[32:].view(torch.float64)
    assert overlaps([single, double]) == {}
    assert overlaps([double, memory[31:33], single]).keys() == {0, 1, 2}


def test_tensors_without_memory() -> None:
    class Named(torch.Tensor):
        pass

    x = torch.zeros(4)
    assert overlaps([x[:0], x[:0], x]) == {}
    assert overlaps([torch.zeros(4, device="meta")] * 2) == {}
    assert overlaps([x.to_sparse()] * 2) == {}
    assert overlaps([torch.nested.nested_tensor([x, x], layout=torch.jagged)] * 2) == {}
    assert overlaps([AsyncCollectiveTensor(x), x]) == {}
    freed = [torch.zeros(4), torch.zeros(4)]
    for one in freed:
        one.untyped_storage().resize_(0)
    assert overlaps(freed) == {}
    assert overlaps([x.as_subclass(Named), x]).keys() == {0, 1}  # of a subclass, but with memory


def test_fake_tensors_have_no_memory() -> None:
    with pytest.importorskip("torch._subclasses").FakeTensorMode():
        fake = torch.zeros(4)
    assert isinstance(fake, FakeTensor)
    assert overlaps([fake, fake]) == {}


def parts_of_dtensors() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    local = torch.zeros(2, 4, requires_grad=True)
    whole = DTensor.from_local(local * 1, mesh, (Shard(0),))
    assert overlaps([whole, whole[:, :2], whole.to_local()[:, 2:]]) == {0: 1, 1: 0, 2: 0}


def test_dtensors_are_their_local_parts(workers: WorkerPool) -> None:
    workers.run(parts_of_dtensors, 2)


def places(memory: torch.Tensor, tensor: torch.Tensor) -> set[int]:
    numbers = torch.arange(memory.numel())
    strides = [stride * tensor.itemsize for stride in tensor.stride()]
    starts = numbers.as_strided(tensor.shape, strides, tensor.storage_offset() * tensor.itemsize)
    return {start + at for start in starts.flatten().tolist() for at in range(tensor.itemsize)}


@strategies.composite
def views(draw: strategies.DrawFn, memory: torch.Tensor) -> torch.Tensor:
    room = memory.view(draw(strategies.sampled_from([torch.uint8, torch.int16, torch.float32, torch.complex64])))
    left = room.numel() - 1
    shape, strides = [], []
    for _ in range(draw(strategies.integers(0, 4))):
        size = draw(strategies.integers(0 if not shape else 1, 6))
        stride = draw(strategies.integers(0, left // max(size - 1, 1)))
        left -= max(size - 1, 0) * stride
        shape.append(size)
        strides.append(stride)
    return room.as_strided(shape, strides, draw(strategies.integers(0, left)))


@settings(deadline=None, derandomize=True, max_examples=300)
@given(data=strategies.data())
def test_each_byte_that_two_tensors_have_in_common_is_found(data: strategies.DataObject) -> None:
    memory = torch.zeros(192, dtype=torch.uint8)
    tensors = [data.draw(views(memory)) for _ in range(data.draw(strategies.integers(2, 4)))]
    taken = [places(memory, tensor) for tensor in tensors]
    meet = {(i, j) for i, mine in enumerate(taken) for j, other in enumerate(taken) if i != j and mine & other}
    for few in (_overlaps._FEW, 0):  # by tries and by masks
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_overlaps, "_FEW", few)
            found = overlaps(tensors)
        assert found.keys() == {i for i, _ in meet}
        assert set(found.items()) <= meet


def test_far_reaching_tensors_take_little_work() -> None:
    """A mask of all that the tensors reach over was made for each pair of columns."""
    table = torch.zeros(200_000, 96)
    columns = list(table.unbind(1))
    assert count_calls(lambda: overlaps(columns)) < 5 * 96**2 / 2
    assert overlaps(columns) == {}
    assert overlaps([*columns, table[-1:, 7:9]]) == {7: 96, 96: 7, 8: 96}
    flat = table.view(-1)
    for tensors, found in (
        ([flat[::96], flat[7::61]], {0, 1}),
        ([flat[::2], table[:, 1::2], table[5, 3::4]], {1, 2}),
        ([flat[::3], table[:, 1::3], flat[2::6]], set()),
        ([table.view(1000, 200, 96)[:, ::7, 5], flat[6::768], flat.view(-1, 64)[::9, 5]], {0, 2}),
    ):
        assert overlaps(tensors).keys() == found
        assert count_calls(lambda tensors=tensors: overlaps(tensors)) < 1000  # type: ignore[misc]


def test_tensors_that_lie_apart_are_only_sorted() -> None:
    few, many = ([torch.zeros(3) for _ in range(count)] for count in (20, 80))
    assert count_calls(lambda: overlaps(many)) < 4.5 * count_calls(lambda: overlaps(few))


def test_made_up_strides_take_no_more_than_a_mask() -> None:
    """Sums of steps were tried by the hundred thousand, and of larger tensors for minutes."""
    memory, some = torch.zeros(1 << 22, dtype=torch.uint8), random.Random(10)
    steps = [some.randint((1 << 22) // 80, (1 << 22) // 26) for _ in range(22)]
    pair = [memory.as_strided((2,) * 11, strides, at) for strides, at in ((steps[:11], 0), (steps[11:], 7))]
    assert count_calls(lambda: overlaps(pair)) < 1000
    assert bool(overlaps(pair)) is bool(places(memory, pair[0]) & places(memory, pair[1]))
