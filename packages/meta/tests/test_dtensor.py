"""DTensorMeta and mesh_key, on real ranks: what a DTensor looks like, and the same one again from its meta."""

from __future__ import annotations

import gc
import math
from typing import Any

import attrs
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from stepwell_meta import (
    DTensorMeta,
    MeshKey,
    MetadataError,
    TensorMeta,
    UnsupportedValueError,
    decode,
    encode,
    extract_meta,
    mesh_key,
)
from stepwell_meta._compat import StridedShard
from stepwell_meta.testing import WorkerPool

TP = MeshKey(("tp",), (2,), (1,))
SHARDED = DTensorMeta((2, 8), (8, 1), torch.float32, True, (4, 8), (8, 1), (Shard(0),), TP)


def keys_of_submeshes() -> dict[str, MeshKey]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    return {
        "whole": mesh_key(mesh),
        "pp": mesh_key(mesh["pp"]),
        "tp": mesh_key(mesh["tp"]),
        "flat": mesh_key(mesh._flatten("all")),
        "unnamed": mesh_key(DeviceMesh("cpu", torch.arange(4))),
        "single": mesh_key(DeviceMesh("cpu", [[dist.get_rank()]], mesh_dim_names=("a", "b"))),
        "reversed": mesh_key(DeviceMesh("cpu", [3, 2, 1, 0])),
        "irregular": mesh_key(DeviceMesh("cpu", [[0, 1], [3, 2]])),
    }


def test_the_same_key_names_a_mesh_on_every_stage(workers: WorkerPool) -> None:
    results = workers.run(keys_of_submeshes, 4)
    assert results == [results[0]] * 4
    assert results[0] == {
        "whole": MeshKey(("pp", "tp"), (2, 2), (2, 1)),
        "pp": MeshKey(("pp",), (2,), (2,)),
        "tp": MeshKey(("tp",), (2,), (1,)),
        "flat": MeshKey(("all",), (4,), (1,)),
        "unnamed": MeshKey(None, (4,), (1,)),
        "single": MeshKey(("a", "b"), (1, 1), (0, 0)),
        "reversed": MeshKey(None, (4,), (-1,)),
        "irregular": MeshKey(None, (2, 2), (), (0, 1, 3, 2)),
    }


def keys_around_a_middle_axis() -> tuple[MeshKey, MeshKey]:
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "pp", "tp"))
    both = mesh["dp", "tp"]
    return mesh_key(both), mesh_key(both._flatten("dp_tp"))


def test_axes_that_are_not_neighbours_have_one_key_also_when_flattened(workers: WorkerPool) -> None:
    expected = (MeshKey(("dp", "tp"), (2, 2), (4, 1)), MeshKey(("dp_tp",), (4,), (), (0, 1, 4, 5)))
    assert workers.run(keys_around_a_middle_axis, 8) == [expected] * 8


def life_of_a_key() -> None:
    from stepwell_meta._dtensor import _keys  # of the process that this runs in

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    gc.collect()  # meshes of earlier calls in this process
    before = len(_keys)
    tp = mesh["tp"]
    assert mesh_key(tp) is mesh_key(tp)
    assert mesh_key(mesh["tp"]) is mesh_key(tp)  # another object for the same mesh
    assert len(_keys) == before + 1
    del tp
    gc.collect()
    assert len(_keys) == before


def test_a_key_is_computed_once_for_a_mesh_and_forgotten_with_it(workers: WorkerPool) -> None:
    workers.run(life_of_a_key, 4)


def describe_all(
    mesh_shape: tuple[int, ...], cases: list[tuple[tuple[int, ...], tuple[Any, ...]]]
) -> list[tuple[DTensorMeta, bytes]]:
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("dp", "tp")[-len(mesh_shape) :])
    return [describe(mesh, shape, placements) for shape, placements in cases]


def describe(mesh: DeviceMesh, shape: tuple[int, ...], placements: tuple[Any, ...]) -> tuple[DTensorMeta, bytes]:
    """Distribute, describe, make a DTensor from the description, and compare the two."""
    torch.manual_seed(0)
    whole = torch.randn(shape)
    if any(placement.is_partial() for placement in placements):
        source = DTensor.from_local(whole, mesh, placements, run_check=False)
    else:
        source = distribute_tensor(whole, mesh, placements)
    source.requires_grad_()
    meta = DTensorMeta.from_dtensor(source)
    assert meta == extract_meta(source) == decode(encode(meta))
    assert meta.mesh_key == mesh_key(mesh)
    assert meta.local == TensorMeta.from_tensor(source.to_local())

    made = meta.empty("cpu", mesh)
    assert type(made) is DTensor
    assert (made.shape, made.stride(), made.dtype) == (source.shape, source.stride(), source.dtype)
    assert made.placements == source.placements
    assert made.requires_grad
    assert made.is_leaf
    assert DTensorMeta.from_dtensor(made) == attrs.evolve(meta, stride=meta.local.as_dense().stride)

    rebuilt = meta.from_local(source.detach().to_local(), mesh)
    assert torch.equal(rebuilt.full_tensor(), source.full_tensor())
    return meta, encode(meta)


CASES: dict[tuple[int, ...], list[tuple[tuple[int, ...], tuple[Any, ...]]]] = {
    (2,): [
        ((8, 6), (Shard(0),)),
        ((8, 6), (Shard(1),)),
        ((7, 5), (Shard(0),)),
        ((8, 6), (Partial("sum"),)),
        ((8, 6), (Partial("avg"),)),
        ((), (Replicate(),)),
    ],
    (4,): [
        ((3, 5), (Shard(0),)),  # one rank is left without rows
        ((8, 6), (Replicate(),)),
        ((8, 6), (Partial("max"),)),
        ((0, 5), (Shard(0),)),
    ],
    (2, 2): [
        ((8, 6), (Shard(0), Shard(1))),
        ((8, 6), (Shard(0), Shard(0))),
        ((8, 6), (Replicate(), Shard(1))),
        ((8, 6), (Partial("sum"), Replicate())),
        ((7, 5), (Shard(1), Shard(1))),
        ((1, 1), (Shard(0), Shard(1))),  # one element, on one rank of four
    ],
}


@pytest.mark.parametrize("world", CASES, ids=str)
def test_a_dtensor_is_described_and_made_again(workers: WorkerPool, world: tuple[int, ...]) -> None:
    results = workers.run(describe_all, math.prod(world), world, CASES[world])
    for (shape, placements), *ranks in zip(CASES[world], *results, strict=True):
        for meta, data in ranks:
            assert decode(data) == meta
            assert (meta.global_shape, meta.placements) == (shape, placements)
            assert (meta.mesh_key, meta.global_stride) == (ranks[0][0].mesh_key, ranks[0][0].global_stride)


def describe_strided() -> tuple[str, tuple[int, ...], bool]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    # FSDP over a tensor-parallel parameter: sharded by tp first, then by dp.
    whole = torch.arange(32.0).reshape(8, 4)
    dp, tp = (mesh.get_local_rank(name) for name in ("dp", "tp"))
    local = whole.chunk(2)[tp].chunk(2)[dp]
    source = DTensor.from_local(local, mesh, (StridedShard(0, split_factor=2), Shard(0)), run_check=False)
    meta = DTensorMeta.from_dtensor(source)
    back = decode(encode(meta))
    assert back == meta
    assert type(back.placements[0]) is StridedShard
    assert back.placements[0].split_factor == 2
    assert torch.equal(back.from_local(local, mesh).full_tensor(), whole)
    return str(meta.placements), meta.global_shape, back != attrs.evolve(meta, placements=(Shard(0), Shard(0)))


def test_strided_shards_keep_their_split_factor(workers: WorkerPool) -> None:
    assert workers.run(describe_strided, 4) == [("(_StridedShard(dim=0, sf=2), Shard(dim=0))", (8, 4), True)] * 4


def describe_layouts() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    images = torch.randn(4, 6, 5, 3).to(memory_format=torch.channels_last)
    source = DTensor.from_local(images, mesh, (Shard(0),), run_check=False)
    meta = DTensorMeta.from_dtensor(source)
    assert meta.stride == images.stride()
    assert meta.empty("cpu", mesh).to_local().stride() == images.stride()
    assert not meta.empty("cpu", mesh).requires_grad

    expanded = DTensor.from_local(torch.ones(3, 1).expand(3, 4), mesh, (Replicate(),), run_check=False)
    assert DTensorMeta.from_dtensor(expanded).empty("cpu", mesh).to_local().stride() == (4, 1)

    for dtype in (torch.int64, torch.bool, torch.bfloat16, torch.complex64):
        values = DTensor.from_local(torch.ones(2, 2).to(dtype), mesh, (Shard(1),), run_check=False)
        made = DTensorMeta.from_dtensor(values).empty("cpu", mesh)
        assert (made.dtype, made.requires_grad, tuple(made.shape)) == (dtype, False, (2, 4))

    parameter = torch.nn.Parameter(source)
    assert DTensorMeta.from_dtensor(parameter) == attrs.evolve(meta, requires_grad=True)
    result = parameter * 2
    assert DTensorMeta.from_dtensor(result).requires_grad
    assert parameter.grad is None


def test_layouts_dtypes_and_parameters(workers: WorkerPool) -> None:
    workers.run(describe_layouts, 2)


def refusals() -> list[str]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    other = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    meta = DTensorMeta.from_dtensor(distribute_tensor(torch.zeros(4, 8), mesh, (Shard(0),)))
    words = []
    for attempt in (
        lambda: meta.empty("cpu", other),
        lambda: meta.from_local(torch.zeros(4, 8), mesh),
        lambda: meta.from_local(torch.zeros(2, 8, dtype=torch.float64), mesh),
        lambda: DTensorMeta.from_dtensor(torch.zeros(2)),  # type: ignore[arg-type]
        lambda: TensorMeta.from_tensor(distribute_tensor(torch.zeros(4), mesh, (Shard(0),))),
        lambda: DTensorMeta.from_dtensor(masked_partial(mesh)),
        lambda: DTensorMeta.from_dtensor(of_the_other_rank()),
    ):
        try:
            attempt()
        except MetadataError as error:
            words.append(str(error))
    return words


def of_the_other_rank() -> DTensor:
    """A DTensor on a mesh without this rank: its local shard is an empty tensor of one dim, whatever the whole."""
    meshes = [DeviceMesh("cpu", [rank]) for rank in range(2)]
    return DTensor.from_local(torch.zeros(4, 8), meshes[1 - dist.get_rank()], (Replicate(),), run_check=False)


def masked_partial(mesh: DeviceMesh) -> DTensor:
    """What looking up a row-sharded embedding gives: a sum in which each rank masks the rows of the others."""
    table = distribute_tensor(torch.randn(8, 4), mesh, (Shard(0),))
    tokens = distribute_tensor(torch.arange(8), mesh, (Replicate(),))
    found = torch.nn.functional.embedding(tokens, table)
    assert type(found.placements[0]) is not Partial
    return found


def test_what_does_not_fit_is_refused(workers: WorkerPool) -> None:
    for words in workers.run(refusals, 2):
        assert words[0] == "expected a mesh (tp=2), stride (1,), got (dp=2), stride (1,)"
        assert words[1] == "expected a local torch.float32 shard of shape (2, 8), got torch.float32 of shape (4, 8)"
        assert words[2] == "expected a local torch.float32 shard of shape (2, 8), got torch.float64 of shape (2, 8)"
        assert words[3] == "expected a DTensor, got torch.Tensor: use extract_meta for tensors of either kind"
        assert words[4].endswith("unwrap it to plain tensors first, got torch.distributed.tensor.DTensor")
        assert "MaskPartial: redistribute() the DTensor first" in words[5]
        assert words[6].startswith("this rank holds no shard: it is not in DeviceMesh((1,), 'cpu'")
        assert len(words) == 7


def test_it_is_no_tensor_meta_but_has_one() -> None:
    assert not isinstance(SHARDED, TensorMeta)
    assert SHARDED.local == TensorMeta((2, 8), (8, 1), torch.float32, True)
    assert SHARDED.whole == TensorMeta((4, 8), (8, 1), torch.float32, True)
    assert SHARDED.local != SHARDED
    assert (SHARDED.numel, SHARDED.nbytes) == (16, 64)
    assert not SHARDED.without_grad().requires_grad
    assert SHARDED.without_grad().without_grad() == SHARDED.without_grad()
    assert len({SHARDED, attrs.evolve(SHARDED), attrs.evolve(SHARDED, placements=(Replicate(),))}) == 2
    assert str(SHARDED) == (
        "DTensor of shape (4, 8), (Shard(dim=0),) on mesh (tp=2), stride (1,), "
        "local torch.float32 tensor of shape (2, 8), stride (8, 1), requires_grad"
    )


class Odd(Shard):
    pass


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"placements": ()}, "one placement for each axis of mesh"),
        ({"placements": (Shard(0), Shard(1))}, "one placement for each axis of mesh"),
        ({"placements": (Shard(2),)}, "does not fit a tensor of shape"),
        ({"placements": (Shard(-1),)}, "does not fit a tensor of shape"),
        ({"placements": ("Shard(0)",)}, "got str: redistribute"),
        ({"placements": (Odd(0),)}, "Odd: redistribute"),
        ({"shape": (16,), "stride": (1,)}, "as many dims as the whole"),
        ({"global_stride": (1,)}, "as many strides as sizes"),
        ({"stride": (8, -1)}, "63 bits"),
        ({"dtype": torch.int32}, "has no gradient"),
    ],
)
def test_what_no_dtensor_can_be_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(MetadataError, match=words):
        attrs.evolve(SHARDED, **changes)


def test_an_unknown_placement_is_an_unsupported_value() -> None:
    with pytest.raises(UnsupportedValueError) as caught:
        attrs.evolve(SHARDED, placements=(Odd(0),))
    assert caught.value.type_name.endswith("Odd")
