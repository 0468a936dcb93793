from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from stepwell_mesh import MeshCache, adapt_torch_get_mesh, topology_from_mesh
from stepwell_mesh.exceptions import ExternalMeshError, MeshLookupError
from stepwell_mesh.testing import FakeGetMesh
from stepwell_meta import DTensorMeta, MeshKey, mesh_key

TP = MeshKey(("tp",), (2,), (1,))


def world_3d():
    return init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))


def on(mesh):
    """A DTensor on a mesh, made without running an operation (torch's caches of operations keep meshes alive)."""
    return DTensor.from_local(torch.zeros(2), mesh, [Replicate()] * mesh.ndim, run_check=False)


def test_a_key_that_nobody_knows_says_what_to_pass() -> None:
    with pytest.raises(MeshLookupError) as caught:
        MeshCache().get(TP)
    assert str(caught.value) == (
        "no mesh is known for the key (tp=2), stride (1,); pass example tensors that are DTensors on that mesh, or get_mesh, a"
        " function from a MeshKey to this rank's DeviceMesh. Known here: none"
    )
    assert caught.value.key == TP


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (
            lambda key: None,
            "get_mesh returned None for the key (tp=2), stride (1,); it must return this rank's mesh with these axes and strides",
        ),
        (
            lambda key: ["tp"],
            "get_mesh returned ['tp'] (list) for the key (tp=2), stride (1,); it must return a torch DeviceMesh",
        ),
        (
            lambda key: {}["world"],
            "get_mesh raised KeyError for the key (tp=2), stride (1,): 'world'; it must return this rank's mesh for it",
        ),
    ],
)
def test_a_callback_that_gives_no_mesh_is_an_error_that_names_the_key(given, sentence) -> None:
    cache = MeshCache(given)
    with pytest.raises(MeshLookupError) as caught:
        cache.get(TP)
    assert str(caught.value) == sentence
    assert caught.value.key == TP
    assert len(cache) == 0


def test_the_callbacks_own_error_is_the_cause() -> None:
    error = RuntimeError("no such mesh")

    def get_mesh(key):
        raise error

    with pytest.raises(MeshLookupError) as caught:
        MeshCache(get_mesh).get(TP)
    assert caught.value.__cause__ is error


def look_up():
    world = world_3d()
    stage, tp, dp = world["dp", "tp"], world["tp"], world["dp"]
    get_mesh = FakeGetMesh(tp, dp)
    cache = MeshCache(get_mesh)

    # From tensors: DTensors' meshes, whatever else is among the values.
    cache.add_tensors([on(stage), torch.zeros(1), None, on(stage), 7])
    assert len(cache) == 1
    assert mesh_key(stage) in cache
    assert mesh_key(tp) not in cache
    assert cache.get(mesh_key(stage)) == stage
    assert get_mesh.asked == []

    # From the callback, once: what it gave is in the cache from then on.
    assert cache.get(mesh_key(tp)) is tp
    assert cache.get(mesh_key(tp)) is tp
    assert get_mesh.asked == [mesh_key(tp)]
    assert len(cache) == 2

    # The cache goes before the callback, also where that would know the key.
    cache.add(dp)
    assert cache.get(mesh_key(dp)) is dp
    assert get_mesh.asked == [mesh_key(tp)]

    # A key the callback does not know; the cache's other entries are in the message of a cache without one.
    with pytest.raises(MeshLookupError, match=r"get_mesh returned None for the key \(pp=2\), stride \(4,\)"):
        cache.get(mesh_key(world["pp"]))
    alone = MeshCache()
    alone.add_tensors([on(stage), on(tp)])
    with pytest.raises(MeshLookupError, match=r"Known here: \(dp=2, tp=2\), stride \(2, 1\); \(tp=2\), stride \(1,\)$"):
        alone.get(mesh_key(world["pp"]))

    # What another stage sends a meta of is rebuilt on this stage's mesh; its groups work.
    meta = DTensorMeta.from_dtensor(on(tp))
    rebuilt = meta.empty("cpu", cache.get(meta.mesh_key))
    total = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(total, group=rebuilt.device_mesh.get_group("tp"))
    return meta, total.item()


def test_cache_then_callback_then_error(workers) -> None:
    answers = workers.run(look_up, 8)
    assert all(meta == answers[0][0] for meta, _ in answers)
    assert [total for _, total in answers] == [1, 1, 5, 5, 9, 9, 13, 13]


def wrong_meshes():
    rank = dist.get_rank()
    world = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dp, tp = mesh_key(world["dp"]), mesh_key(world["tp"])
    cache = MeshCache(lambda key: world["dp"])
    with pytest.raises(MeshLookupError) as caught:
        cache.get(tp)
    assert str(caught.value) == (
        "get_mesh returned a mesh with the key (dp=2), stride (2,) for the key (tp=2), stride (1,); it must return one with"
        " the same axis names, sizes and strides"
    )
    assert len(cache) == 0
    assert cache.get(dp) == world["dp"]

    # A mesh of the right key that this rank is not in.
    pair = DeviceMesh("cpu", [0, 1], mesh_dim_names=("tp",))
    if rank < 2:
        assert MeshCache(lambda key: pair).get(tp) is pair
    else:
        with pytest.raises(
            MeshLookupError, match="but this rank is not in it; it must return the mesh that holds this rank"
        ):
            MeshCache(lambda key: pair).get(tp)
        with pytest.raises(
            ExternalMeshError, match=r"this rank is not in .*; a cache holds meshes of its own rank only"
        ):
            MeshCache().add(pair)

    # Two meshes of one key: the same ranks are the same mesh, made by whom it may be; other ranks are a contradiction.
    cache = MeshCache()
    assert cache.add(world["tp"]) == tp
    low, high = DeviceMesh("cpu", [0, 1], mesh_dim_names=("tp",)), DeviceMesh("cpu", [2, 3], mesh_dim_names=("tp",))
    cache.add(low if rank < 2 else high)
    assert len(cache) == 1
    other = DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("a", "tp"))  # tp over other ranks, with another stride
    cache.add(other["tp"])
    assert len(cache) == 2
    shifted = DeviceMesh("cpu", [1, 2], mesh_dim_names=("tp",))
    if rank in (1, 2):
        with pytest.raises(MeshLookupError) as caught:
            cache.add(shifted)
        mine = [0, 1] if rank == 1 else [2, 3]
        assert str(caught.value) == (
            f"two meshes have the key (tp=2), stride (1,): ranks {mine} on cpu, and now ranks [1, 2] on cpu; a received"
            " DTensor could belong to either. Give their axes different names, or use a cache for each"
        )
    elsewhere = DeviceMesh("cuda", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"), _init_backend=False)
    cache.add(world)
    with pytest.raises(MeshLookupError, match=r"ranks \[\[0, 1\], \[2, 3\]\] on cpu, and now ranks .* on cuda"):
        cache.add(elsewhere)
    return rank


def test_meshes_of_another_key_or_over_other_ranks_are_refused(workers) -> None:
    assert workers.run(wrong_meshes, 4) == [0, 1, 2, 3]


def lifetimes():
    world = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    tp, dp = mesh_key(world["tp"]), mesh_key(world["dp"])
    cache = MeshCache()

    # The example tensor that brought the sub-mesh is gone; its root lives, so the key is still known.
    example = on(world["tp"])
    cache.add_tensors([example])
    brought = weakref.ref(example.device_mesh)
    del example
    gc.collect()
    assert brought() is None
    assert tp in cache
    assert cache.get(tp) == world["tp"]
    assert cache.get(tp).get_group() is world.get_group("tp")

    # A mesh that is taken and used does not go away, also when nobody else holds its root.
    cache.add(world["dp"])
    used = cache.get(dp)
    root = weakref.ref(world)
    del world
    gc.collect()
    assert root() is not None  # by the sub-mesh in use
    assert cache.get(dp) is used
    assert tp in cache

    # Nobody holds any: the entries are gone, and the cache was not what kept them.
    del used
    gc.collect()
    assert root() is None
    assert tp not in cache
    assert dp not in cache
    assert len(cache) == 0
    with pytest.raises(MeshLookupError, match="Known here: none"):
        cache.get(dp)


def test_an_entry_lives_as_long_as_its_mesh_or_the_root_of_it(workers) -> None:
    workers.run(lifetimes, 4)


def lifetimes_of_the_callbacks():
    made = []

    def get_mesh(key):
        made.append(key)
        return init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))

    key = MeshKey(("dp",), (4,), (1,))
    cache = MeshCache(get_mesh)
    first = cache.get(key)  # nobody but this variable holds it
    gc.collect()
    assert cache.get(key) is first
    assert len(made) == 1
    del first
    gc.collect()
    assert len(cache) == 0
    assert mesh_key(cache.get(key)) == key  # asked again
    return len(made)


def test_what_the_callback_gave_lives_while_it_is_used(workers) -> None:
    assert workers.run(lifetimes_of_the_callbacks, 4) == [2] * 4


def several_of_one_key():
    cache = MeshCache()
    first, second = (init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")) for _ in range(2))
    tp = cache.add(first["tp"])
    assert cache.add(second["tp"]) == tp
    del first
    gc.collect()
    assert cache.get(tp).get_group() is second.get_group("tp")  # the other one serves
    del second
    gc.collect()
    assert tp not in cache


def test_an_entry_lives_as_long_as_any_mesh_that_was_added_for_it(workers) -> None:
    workers.run(several_of_one_key, 4)


def added_again_and_again():
    world = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    cache = MeshCache()
    for _ in range(20):  # a step's tensors, say: each slice is another object, and the last one is gone by then
        key = cache.add(world["tp"])
    gc.collect()
    entries = [one for one in gc.get_objects() if type(one).__name__ == "_Entry"]
    assert cache.get(key) == world["tp"]
    return len(entries)


def test_a_mesh_that_is_added_again_and_again_takes_no_more_room(workers) -> None:
    """Each slice of a living mesh left an entry behind, all of which could be sliced again and so counted as alive."""
    assert workers.run(added_again_and_again, 4) == [1] * 4


def turned_around():
    world = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    cache = MeshCache()
    key = cache.add(DeviceMesh._concatenate([world["tp"], world["dp"]]))
    assert key == MeshKey(("tp", "dp"), (2, 2), (1, 2))
    gc.collect()
    return key in cache


def test_a_mesh_whose_axes_torch_would_not_slice_in_that_order_goes_with_its_object(workers) -> None:
    """Looking it up raised torch's KeyError."""
    assert workers.run(turned_around, 4) == [False] * 4


def groups_made_anew(port):
    rank = dist.get_rank()
    old = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    cache, example = MeshCache(), on(old)
    cache.add_tensors([example, example + example])  # torch now remembers the sum of two such tensors
    whole, tp = mesh_key(old), cache.add(old["tp"])
    dist.destroy_process_group()
    assert whole not in cache
    assert len(cache) == 0

    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=4)
    dist.new_group([0, 1, 2, 3])  # so that the old names come to mean other groups
    new = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for add in (lambda: cache.add(old), lambda: cache.add(old["tp"]), lambda: cache.add_tensors([example])):
        with pytest.raises(ExternalMeshError, match=r"has no process groups of its own: .* is from before torch.dist"):
            add()
    with pytest.raises(
        MeshLookupError, match=r"get_mesh was asked for the key \(tp=2\), .* has no process groups of its"
    ):
        MeshCache(lambda key: old["tp"]).get(tp)

    # What an operator gives for tensors on the new mesh bears the old one, until torch is made to forget it.
    with pytest.raises(
        ExternalMeshError, match=r"remember meshes of before until stepwell_meta.forget_meshes\(\) is called"
    ):
        cache.add_tensors([on(new) + on(new)])
    topology_from_mesh(new, "ddp")  # does so
    cache.add_tensors([on(new) + on(new)])
    assert cache.get(whole) is new
    assert cache.get(cache.add(new["tp"])).get_group() is new.get_group("tp")


def test_a_mesh_from_before_a_new_start_of_torch_distributed_is_refused_and_forgotten(workers) -> None:
    """torch keeps such meshes alive. The cache gave one for a received DTensor, and its collective waited for other ranks."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    workers.run(groups_made_anew, 4, store.port)


def without_groups():
    mesh = DeviceMesh("cpu", [0, 1], mesh_dim_names=("tp",), _init_backend=False)
    with pytest.raises(ExternalMeshError, match="it was made without, or the mesh is from before"):
        MeshCache().add(mesh)


def test_a_mesh_that_was_made_without_groups_is_refused(workers) -> None:
    workers.run(without_groups, 2)


def flattened():
    world = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    cache = MeshCache()
    both = cache.add(world._flatten("dp_cp"))
    gc.collect()
    assert cache.get(both).mesh.tolist() == [0, 1, 2, 3]  # torch keeps it with its root
    turned = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "cp"))
    key = cache.add(turned)
    assert cache.get(key) is turned
    root = weakref.ref(world)
    del world, turned
    gc.collect()
    assert root() is None
    return len(cache)


def test_flattened_meshes_are_known_too_and_go_with_their_root(workers) -> None:
    assert workers.run(flattened, 4) == [0] * 4


def reshaped():
    flat = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    cache = MeshCache()
    # Its axis has the name of the root's, but the root's is another mesh: it must not be taken for this one.
    key = cache.add(flat._unflatten(0, (2, 2), ("dp", "tp"))["dp"])
    gc.collect()
    assert key == MeshKey(("dp",), (2,), (2,))
    return key in cache


def test_a_root_with_the_same_axis_name_is_not_mistaken_for_the_mesh(workers) -> None:
    assert workers.run(reshaped, 4) == [False] * 4


def torch_callback():
    world = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    asked = []

    def callback(mesh_dim_names, mesh_layout):
        asked.append((mesh_dim_names, mesh_layout))
        return world[mesh_dim_names]

    cache = MeshCache(adapt_torch_get_mesh(callback))
    assert cache.get(mesh_key(world["tp"])) == world["tp"]
    unnamed = MeshKey(None, (4,), (1,))
    with pytest.raises(MeshLookupError):
        cache.get(unnamed)
    return asked


def test_a_callback_written_for_torch_serves_through_an_adapter(workers) -> None:
    assert workers.run(torch_callback, 4) == [[(("tp",), None), ((), None)]] * 4


def unnamed_mesh():
    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]])
    cache = MeshCache()
    cache.add_tensors([on(mesh)])
    assert cache.get(MeshKey(None, (2, 2), (2, 1))) is mesh
    del mesh
    gc.collect()
    return len(cache)


def test_meshes_without_axis_names_have_keys_too(workers) -> None:
    assert workers.run(unnamed_mesh, 4) == [0] * 4
