from __future__ import annotations

import datetime
import importlib
import warnings
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from stepwell_mesh import Degrees, topology_for_world, topology_from_mesh
from stepwell_mesh.exceptions import (
    AxisError,
    DegreesError,
    DeviceTypeError,
    ExternalMeshError,
    MeshBuildError,
    ModeError,
    TopologyError,
    TopologyWarning,
)
from stepwell_meta import mesh_key


def ranks_by_name(name):
    """The ranks that a collective in a graph reaches by a registered name, found by running one."""
    # Not torch.ops: a function that names it cannot be sent to the workers.
    functional = importlib.import_module("torch.ops")._c10d_functional
    mask = torch.zeros(dist.get_world_size(), dtype=torch.int64)
    mask[dist.get_rank()] = 1
    reduced = functional.wait_tensor(functional.all_reduce(mask, "sum", name))
    return reduced.nonzero().flatten().tolist()


def facts(topology):
    return SimpleNamespace(
        mode=topology.mode,
        degrees=topology.degrees,
        axis_names=topology.axis_names,
        group_names=topology.group_names,
        reached=[ranks_by_name(name) for name in topology.group_names],
        shape=tuple(topology.mesh.shape),
        device_type=topology.mesh.device_type,
    )


# Data parallelism over all ranks


def build_for_world(mode, kwargs):
    return facts(topology_for_world(mode, device_type="cpu", **kwargs))


def test_b04_fsdp_makes_one_shard_axis_over_the_world(workers) -> None:
    for found in workers.run(build_for_world, 4, "fully_shard", {}):
        assert found == SimpleNamespace(
            mode="fsdp",
            degrees=Degrees(shard=4, replicate=1),
            axis_names=("fsdp_shard",),
            group_names=("fsdp",),
            reached=[[0, 1, 2, 3]],
            shape=(4,),
            device_type="cpu",
        )


def test_b04_ddp_makes_one_replicate_axis_over_the_world(workers) -> None:
    for found in workers.run(build_for_world, 4, "ddp", {"replicate": 4}):
        assert found == SimpleNamespace(
            mode="ddp",
            degrees=Degrees(shard=1, replicate=4),
            axis_names=("fsdp_replicate",),
            group_names=("dp_replicate",),
            reached=[[0, 1, 2, 3]],
            shape=(4,),
            device_type="cpu",
        )


def test_b04_hsdp_makes_replicas_of_shards(workers) -> None:
    for rank, found in enumerate(workers.run(build_for_world, 8, "hsdp", {"shard": 4})):
        assert found == SimpleNamespace(
            mode="hsdp",
            degrees=Degrees(shard=4, replicate=2),
            axis_names=("fsdp_replicate", "fsdp_shard"),
            group_names=("dp_replicate", "fsdp"),
            reached=[[rank % 4, rank % 4 + 4], [0, 1, 2, 3] if rank < 4 else [4, 5, 6, 7]],
            shape=(2, 4),
            device_type="cpu",
        )


def default_and_refused():
    topology = topology_for_world("fsdp")
    assert topology.mesh.device_type == "cpu"  # the test machine's processes have no accelerator, or see it as such
    with pytest.raises(ModeError, match="unknown data-parallel mode"):
        topology_for_world("zero")
    with pytest.raises(ExternalMeshError, match="tensor-parallel size 2 and pipeline-parallel size 1"):
        topology_for_world("fsdp", tp_size=2)
    with pytest.raises(ExternalMeshError, match="pass it to topology_from_mesh"):
        topology_for_world("fsdp", pp_size=2)
    with pytest.raises(DegreesError, match="got neither"):
        topology_for_world("hsdp")
    with pytest.raises(DegreesError, match="3 does not divide 4"):
        topology_for_world("hsdp", shard=3)
    with pytest.raises(DeviceTypeError, match="without an index"):
        topology_for_world("fsdp", device_type="cpu:0")


@pytest.mark.skipif(torch.accelerator.is_available(), reason="with an accelerator the default is not cpu")
def test_b03_wrong_arguments_are_refused_on_every_rank_before_anything_is_made(workers) -> None:
    workers.run(default_and_refused, 4)


def without_distributed():
    with pytest.raises(TopologyError) as caught:
        topology_for_world("fsdp")
    return str(caught.value)


def test_a_program_that_did_not_initialise_torch_distributed_is_told_so(workers) -> None:
    assert workers.run(without_distributed, 1, init_group=False) == [
        "torch.distributed is not initialised, so there are no ranks to divide; call"
        " torch.distributed.init_process_group first, or train without a topology on one rank"
    ]


def one_rank():
    return facts(topology_for_world("hsdp", shard=1, device_type="cpu")).reached


def test_one_rank_is_a_world_too(workers) -> None:
    assert workers.run(one_rank, 1) == [[[0], [0]]]


def absent_peer():
    if dist.get_rank() == 3:
        return None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist.distributed_c10d, "default_pg_timeout", datetime.timedelta(seconds=1))  # is 30 minutes
        with pytest.raises(MeshBuildError) as caught:
            topology_for_world("hsdp", shard=2, device_type="cpu")
    assert isinstance(caught.value.__cause__, RuntimeError)
    return str(caught.value)


def test_a_peer_that_never_comes_is_a_build_error(workers) -> None:
    messages = list(filter(None, workers.run(absent_peer, 4)))
    assert len(messages) == 3
    for message in messages:
        assert message.startswith(
            "could not make the process groups of the mesh (fsdp_replicate=2, fsdp_shard=2) on device type 'cpu': "
        )
        assert message.endswith(". Every rank must ask for the same mesh at the same point of the program")


# Meshes that are there already


def mesh_3d():
    return init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))


def survey_3d():
    mesh = mesh_3d()
    rank = dist.get_rank()
    sums = {}
    for axis in mesh.mesh_dim_names:
        total = torch.tensor(float(rank))
        dist.all_reduce(total, group=mesh.get_group(axis))
        sums[axis] = total.item()
    stage = mesh["dp", "tp"]
    keys = [mesh_key(part) for part in (mesh, stage, mesh["pp"], mesh["dp"], mesh["tp"])]
    found = {mode: facts(topology_from_mesh(mesh, mode)) for mode in ("fsdp", "ddp")}
    of_stage = facts(topology_from_mesh(stage, "fsdp"))
    of_axis = facts(topology_from_mesh(mesh["dp"], "fsdp"))
    return SimpleNamespace(
        sums=sums, keys=keys, stage_ranks=stage.mesh.tolist(), found=found, parts=[of_stage, of_axis]
    )


@pytest.fixture(scope="module")
def surveyed(workers):
    return workers.run(survey_3d, 8)


def test_b06_data_parallelism_on_one_axis_of_a_pp_dp_tp_mesh(surveyed) -> None:
    for rank, answer in enumerate(surveyed):
        pp, dp, tp = rank // 4, rank // 2 % 2, rank % 2
        assert answer.sums == {"pp": 2 * rank + 4 - 8 * pp, "dp": 2 * rank + 2 - 4 * dp, "tp": 2 * rank + 1 - 2 * tp}
        dp_ranks = [pp * 4 + tp, pp * 4 + 2 + tp]
        fsdp, ddp = answer.found["fsdp"], answer.found["ddp"]
        assert (fsdp.mode, fsdp.degrees, fsdp.axis_names) == ("fsdp", Degrees(shard=2, replicate=1), ("dp",))
        assert (fsdp.group_names, fsdp.reached) == (("fsdp",), [dp_ranks])
        assert (ddp.mode, ddp.degrees, ddp.axis_names) == ("ddp", Degrees(shard=1, replicate=2), ("dp",))
        assert (ddp.group_names, ddp.reached) == (("dp_replicate",), [dp_ranks])
        for part in answer.parts:  # the same from this stage's sub-mesh, and from the axis alone
            assert (part.degrees, part.group_names, part.reached) == (fsdp.degrees, ("fsdp",), [dp_ranks])


def test_meshes_of_different_stages_have_the_same_key(surveyed) -> None:
    answers = surveyed
    assert answers[0].stage_ranks == [[0, 1], [2, 3]]
    assert answers[7].stage_ranks == [[4, 5], [6, 7]]
    assert all(answer.keys == answers[0].keys for answer in answers)
    assert [str(key) for key in answers[0].keys] == [
        "(pp=2, dp=2, tp=2), stride (4, 2, 1)",
        "(dp=2, tp=2), stride (2, 1)",
        "(pp=2), stride (4,)",
        "(dp=2), stride (2,)",
        "(tp=2), stride (1,)",
    ]


def survey_2d():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp"))
    hsdp = topology_from_mesh(mesh, "hybrid_shard")
    names = [part.mesh_dim_names for part in (hsdp.replicate_mesh, hsdp.shard_mesh, hsdp.dp_mesh)]
    tp = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("fsdp_replicate", "fsdp_shard", "tp"))
    fsdp = topology_from_mesh(tp["fsdp_shard", "tp"], "fsdp")
    ddp = topology_from_mesh(tp["fsdp_shard", "tp"], "ddp", replicate_axis="fsdp_shard")
    inner_replicas = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "dp_replicate"))
    inner = topology_from_mesh(inner_replicas, "hsdp")
    assert inner.axis_names == ("dp_replicate", "dp")
    with pytest.raises(AxisError, match="here 'dp' is outside 'dp_replicate': make the mesh with 'dp_replicate' first"):
        inner.dp_mesh  # noqa: B018 - fully_shard would have sharded along dp_replicate, and kept copies along dp
    assert (inner.replicate_mesh, inner.shard_mesh) == (inner_replicas["dp_replicate"], inner_replicas["dp"])
    flat = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))._flatten("dp_cp")
    assert topology_from_mesh(flat, "fsdp", shard_axis="dp_cp").degrees == Degrees(shard=4, replicate=1)
    assert fsdp.replicate_mesh is None
    assert ddp.shard_mesh is None
    assert ddp.replicate_mesh == fsdp.dp_mesh == fsdp.shard_mesh == tp["fsdp_shard"]
    assert hash(hsdp) == hash(topology_from_mesh(mesh, "hsdp"))
    assert hsdp == topology_from_mesh(mesh, "hsdp")
    return SimpleNamespace(names=names, hsdp=facts(hsdp), fsdp=facts(fsdp), ddp=facts(ddp))


def test_b06_hsdp_on_two_axes_and_fsdp_beside_tensor_parallelism(workers) -> None:
    for rank, answer in enumerate(workers.run(survey_2d, 4)):
        assert answer.names == [("dp_replicate",), ("dp",), ("dp_replicate", "dp")]
        assert answer.hsdp.degrees == Degrees(shard=2, replicate=2)
        assert answer.hsdp.group_names == ("dp_replicate", "fsdp")
        assert answer.hsdp.reached == [[rank % 2, rank % 2 + 2], [rank // 2 * 2, rank // 2 * 2 + 1]]
        # Other ranks than hsdp's shards, so another name: a graph with "fsdp" in it still means what it meant.
        assert answer.fsdp.group_names == ("fsdp_2",)
        assert answer.fsdp.reached == [[rank % 2, rank % 2 + 2]]
        assert answer.ddp.group_names == ("dp_replicate_2",)
        assert answer.ddp.degrees == Degrees(shard=1, replicate=2)


# Objects that carry a mesh


def context_shapes():
    """Every shape of external object; what each comes to."""
    world = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
    dense = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("fsdp_replicate", "fsdp_shard", "tp"))
    sharded = init_device_mesh("cpu", (1, 4, 2), mesh_dim_names=("fsdp_replicate", "fsdp_shard", "tp"))
    replicated = init_device_mesh("cpu", (4, 1, 2), mesh_dim_names=("fsdp_replicate", "fsdp_shard", "tp"))
    cases = {
        "fsdp mesh preferred": ("hsdp", SimpleNamespace(fsdp_non_moe_mesh=dense, device_mesh=world)),
        "fsdp mesh alone": ("hsdp", SimpleNamespace(fsdp_non_moe_mesh=dense)),
        "fsdp mesh None": ("fsdp", SimpleNamespace(fsdp_non_moe_mesh=None, device_mesh=world)),
        "device mesh alone": ("ddp", SimpleNamespace(device_mesh=world)),
        "sizes fit": ("hsdp", SimpleNamespace(device_mesh=dense, dp_replicate_size=2, dp_shard_size=2)),
        "fsdp becomes hsdp": ("fsdp", SimpleNamespace(device_mesh=dense, dp_replicate_size=2, dp_shard_size=2)),
        "one size is enough": ("fsdp", SimpleNamespace(device_mesh=dense, dp_replicate_size=2)),
        "hsdp becomes fsdp": ("hsdp", SimpleNamespace(device_mesh=sharded, dp_replicate_size=1, dp_shard_size=4)),
        "hsdp becomes fsdp on dp": ("hsdp", SimpleNamespace(device_mesh=world, dp_replicate_size=1, dp_shard_size=4)),
        "ddp fits": ("ddp", SimpleNamespace(device_mesh=replicated, dp_replicate_size=4, dp_shard_size=1)),
        "no sizes, fsdp stays": ("fsdp", SimpleNamespace(device_mesh=dense)),
        "no sizes, ddp stays": ("ddp", SimpleNamespace(device_mesh=dense)),
        "sizes None, fsdp stays": (
            "fsdp",
            SimpleNamespace(device_mesh=dense, dp_replicate_size=None, dp_shard_size=None),
        ),
        "bare, fsdp becomes hsdp": ("fsdp", dense),
        "bare, hsdp becomes fsdp": ("hsdp", sharded),
        "bare, ddp fits": ("ddp", replicated),
    }
    found = {}
    for name, (mode, external) in cases.items():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", TopologyWarning)
            topology = topology_from_mesh(external, mode)
        assert not any("stepwell_mesh" in warning.filename for warning in caught)  # they point at the caller
        told = [str(warning.message).partition(":")[0] for warning in caught]
        found[name] = (topology.mode, topology.axis_names, topology.degrees, told)
    for external in (dense, SimpleNamespace(device_mesh=dense, dp_replicate_size=2, dp_shard_size=2)):
        with pytest.raises(
            ModeError, match="'ddp' keeps whole parameters on every rank, but the mesh shards them over 2"
        ):
            topology_from_mesh(external, "ddp")
    with pytest.raises(AxisError, match="dp_shard_size is 8, but the mesh's shard axis 'fsdp_shard' has 4 ranks"):
        topology_from_mesh(SimpleNamespace(device_mesh=sharded, dp_replicate_size=1, dp_shard_size=8), "fsdp")
    with pytest.raises(AxisError, match="the 2 ranks along 'fsdp_replicate' would drift apart"):
        topology_from_mesh(SimpleNamespace(device_mesh=dense, dp_replicate_size=1, dp_shard_size=2), "fsdp")
    with pytest.raises(AxisError, match="shard_axis='data' is no axis of the mesh"):
        topology_from_mesh(world, "fsdp", shard_axis="data")
    with pytest.raises(AxisError, match=r"mode 'fsdp' needs a shard axis, one of .*; the mesh has \(tp=2\)"):
        topology_from_mesh(world["tp"], "fsdp")
    return found


def test_b07_external_objects_of_every_shape(workers) -> None:
    replicas = "mode 'fsdp' on a mesh that holds 2 replicas"
    one_replica = "mode 'hsdp' on a mesh that holds one replica only"
    both = ("fsdp_replicate", "fsdp_shard")
    expected = {
        "fsdp mesh preferred": ("hsdp", both, Degrees(2, 2), []),
        "fsdp mesh alone": ("hsdp", both, Degrees(2, 2), []),
        "fsdp mesh None": ("fsdp", ("dp",), Degrees(4, 1), []),
        "device mesh alone": ("ddp", ("dp",), Degrees(1, 4), []),
        "sizes fit": ("hsdp", both, Degrees(2, 2), []),
        "fsdp becomes hsdp": ("hsdp", both, Degrees(2, 2), [replicas]),
        "one size is enough": ("hsdp", both, Degrees(2, 2), [replicas]),
        "hsdp becomes fsdp": ("fsdp", ("fsdp_shard",), Degrees(4, 1), [one_replica]),
        "hsdp becomes fsdp on dp": ("fsdp", ("dp",), Degrees(4, 1), [one_replica]),
        "ddp fits": ("ddp", ("fsdp_replicate",), Degrees(1, 4), []),
        "no sizes, fsdp stays": ("fsdp", ("fsdp_shard",), Degrees(2, 1), []),
        "no sizes, ddp stays": ("ddp", ("fsdp_replicate",), Degrees(1, 2), []),
        "sizes None, fsdp stays": ("fsdp", ("fsdp_shard",), Degrees(2, 1), []),
        "bare, fsdp becomes hsdp": ("hsdp", both, Degrees(2, 2), [replicas]),
        "bare, hsdp becomes fsdp": ("fsdp", ("fsdp_shard",), Degrees(4, 1), [one_replica]),
        "bare, ddp fits": ("ddp", ("fsdp_replicate",), Degrees(1, 4), []),
    }
    assert workers.run(context_shapes, 8, deadline=60.0) == [expected] * 8


@pytest.mark.parametrize(
    ("external", "sentence"),
    [
        (
            None,
            "expected a torch DeviceMesh, or an object that has one as fsdp_non_moe_mesh or device_mesh, got None (NoneType);"
            " for data parallelism over all ranks use topology_for_world",
        ),
        (
            SimpleNamespace(device_mesh=None, fsdp_non_moe_mesh=None),
            "expected a torch DeviceMesh, or an object that has one as fsdp_non_moe_mesh or device_mesh, got"
            " namespace(device_mesh=None, fsdp_non_moe_mesh=None) (SimpleNamespace); for data parallelism over all ranks use"
            " topology_for_world",
        ),
        (
            SimpleNamespace(device_mesh=[[0, 1]]),
            "device_mesh of the SimpleNamespace must be a torch DeviceMesh or None, got [[0, 1]] (list)",
        ),
        (
            SimpleNamespace(fsdp_non_moe_mesh="dp"),
            "fsdp_non_moe_mesh of the SimpleNamespace must be a torch DeviceMesh or None, got 'dp' (str)",
        ),
    ],
)
def test_an_object_without_a_mesh_is_refused(external, sentence) -> None:
    with pytest.raises(ExternalMeshError) as caught:
        topology_from_mesh(external, "fsdp")
    assert str(caught.value) == sentence


def unusable_meshes():
    rank = dist.get_rank()
    sentences = []

    def refuse(mesh):
        with pytest.raises(ExternalMeshError) as caught:
            topology_from_mesh(mesh, "fsdp")
        sentences.append(str(caught.value))

    refuse(DeviceMesh("cpu", [0, 1, 2, 3]))
    refuse(DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "dp")))
    half = DeviceMesh("cpu", [0, 1], mesh_dim_names=("dp",))
    if rank < 2:
        assert topology_from_mesh(half, "fsdp").degrees == Degrees(shard=2, replicate=1)
        sentences.append("in it")
    else:
        refuse(half)
    refuse(DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"), _init_backend=False))
    refuse(DeviceMesh("cpu", [[1, 3], [0, 2]], mesh_dim_names=("dp", "tp")))
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    for size in (0, "4", True):
        refuse(SimpleNamespace(device_mesh=mesh, dp_replicate_size=1, dp_shard_size=size))
    return sentences


def test_a_mesh_that_cannot_be_used_is_refused_with_the_reason(workers) -> None:
    for rank, sentences in enumerate(workers.run(unusable_meshes, 4)):
        no_names, same_names, outside, no_groups, falling, *sizes = sentences
        assert no_names.startswith("the axes of DeviceMesh((4,), 'cpu'")
        assert no_names.endswith(
            "have no names, so none can be found by its role; pass mesh_dim_names when you make it"
        )
        assert same_names.startswith("two axes of DeviceMesh((dp=2, dp=2), 'cpu'")
        assert same_names.endswith("have the same name; give each its own")
        if rank < 2:
            assert outside == "in it"
        else:
            assert outside.startswith("this rank is not in DeviceMesh((dp=2), 'cpu'")
            assert outside.endswith("; on each rank, pass the mesh that holds that rank")
        assert no_groups.startswith("the axis 'dp' of DeviceMesh((dp=2, tp=2), 'cpu'")
        assert no_groups.endswith(
            "has no process group: the mesh was made without, or its groups were destroyed; make the mesh after"
            " init_process_group, with its groups"
        )
        low = rank // 2 * 2
        assert f"runs over the ranks {[low + 1, low]}, but its process group over {[low, low + 1]}" in falling
        assert "ranks do not rise along the axis" in falling
        assert sizes == [
            f"dp_shard_size of the SimpleNamespace must be a positive integer or None, got {size!r}"
            for size in (0, "4", True)
        ]


def stale_mesh(port):
    rank = dist.get_rank()
    old = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    topology_from_mesh(old, "fsdp")
    dist.destroy_process_group()
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=4)
    with pytest.raises(ExternalMeshError, match="has no process group: the mesh was made without, or its groups"):
        topology_from_mesh(old, "fsdp")
    # torch numbers its groups anew, so the old mesh's names come to mean the new mesh's groups.
    new = DeviceMesh("cpu", [[0, 3], [1, 2]], mesh_dim_names=("tp", "dp"))
    with pytest.raises(ExternalMeshError) as caught:
        topology_from_mesh(old, "fsdp")
    return facts(topology_from_mesh(new, "fsdp")), str(caught.value)


def test_a_mesh_from_before_a_new_start_of_torch_distributed_is_refused(workers) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for rank, (found, sentence) in enumerate(workers.run(stale_mesh, 4, store.port)):
        assert found.group_names == ("fsdp",)  # the old group's name is free again
        assert found.reached == [[0, 3] if rank in (0, 3) else [1, 2]]
        if rank in (0, 2):  # here the name that the old mesh has for its group means another group now
            assert (
                f"runs over the ranks {[rank, rank + 1]}, but its process group over {[[0, 3], [1, 2]][rank // 2]}."
                in sentence
            )
            assert "the mesh is from before torch.distributed was initialised anew" in sentence
        else:
            assert "has no process group" in sentence


# Names of groups


def names_over_time():
    first = topology_for_world("fsdp", device_type="cpu")
    again = topology_for_world("fsdp", device_type="cpu")  # the same group: the world's
    names = [first.group_names, again.group_names]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    on_dp = topology_from_mesh(mesh, "fsdp")
    names += [on_dp.group_names, topology_from_mesh(mesh["tp"], "fsdp", shard_axis="tp").group_names]
    reached = [ranks_by_name(name) for (name,) in names]
    dist.destroy_process_group(mesh.get_group("dp"))
    other = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "dp"))
    names.append(topology_from_mesh(other, "fsdp").group_names)
    reached.append(ranks_by_name(*names[-1]))
    return names, reached


def test_a_name_never_comes_to_mean_another_group_that_is_in_use(workers) -> None:
    for rank, (names, reached) in enumerate(workers.run(names_over_time, 4)):
        # the world's twice, dp's, tp's; then dp's is destroyed, and its name is free for the next
        assert names == [("fsdp",), ("fsdp",), ("fsdp_2",), ("fsdp_3",), ("fsdp_2",)]
        rows, columns = [rank % 2, rank % 2 + 2], [rank // 2 * 2, rank // 2 * 2 + 1]
        assert reached == [[0, 1, 2, 3], [0, 1, 2, 3], rows, columns, columns]
