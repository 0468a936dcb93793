from __future__ import annotations

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from stepwell_mesh import adapt_torch_get_mesh
from stepwell_mesh.testing import FakeGetMesh, check_get_mesh
from stepwell_meta import MeshKey, mesh_key


def keeps_its_promises():
    world = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
    parts = [world, world["dp", "tp"], world["tp"], world["pp"]]
    keys = [mesh_key(part) for part in parts]
    fake = FakeGetMesh(*parts)
    check_get_mesh(fake, keys)
    assert fake.asked[:2] == [keys[0], keys[0]]
    check_get_mesh(lambda key: world[key.axis_names], keys)
    check_get_mesh(adapt_torch_get_mesh(lambda names, layout: world[names]), keys)


def test_the_battery_passes_those_that_keep_the_contract(workers) -> None:
    workers.run(keeps_its_promises, 8)


def broken_promises():
    """What the battery says of implementations that break one promise each."""
    rank = dist.get_rank()
    world = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    tp = mesh_key(world["tp"])
    pairs = DeviceMesh("cpu", [0, 1], mesh_dim_names=("tp",)), DeviceMesh("cpu", [2, 3], mesh_dim_names=("tp",))

    def remade(key):  # new groups at each call
        return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))[key.axis_names]

    class Small(DeviceMesh):
        """A mesh whose group is not the one that its shape promises."""

        def get_group(self, mesh_dim=None):
            return alone

    alone = [dist.new_group([one]) for one in range(4)][rank]
    false_group = Small("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
    cases = {
        "none": lambda key: None,
        "not a mesh": lambda key: "tp",
        "other rank": lambda key: pairs[1 - rank // 2],
        "other key": lambda key: world["dp"],
        "remade": remade,
        "wrong group": lambda key: false_group,
        "never unknown": lambda key: world["tp"],
    }
    said = {}
    for name, get_mesh in cases.items():
        key = mesh_key(false_group) if name == "wrong group" else tp
        with pytest.raises(AssertionError) as caught:
            check_get_mesh(get_mesh, [key])
        said[name] = str(caught.value)
    return said


def test_the_battery_catches_each_broken_promise(workers) -> None:
    for rank, said in enumerate(workers.run(broken_promises, 4, deadline=60.0)):
        tp = "GetMesh, key (tp=2), stride (1,): "
        assert said["none"] == tp + "for a known key it must return a DeviceMesh, not None"
        assert said["not a mesh"] == tp + "for a known key it must return a DeviceMesh, not 'tp'"
        assert said["other rank"].startswith(tp + "it must return the mesh that holds this rank, not DeviceMesh(")
        assert said["other key"] == tp + "it must return a mesh with that key, not with the key (dp=2), stride (2,)"
        assert (
            said["remade"] == tp + "asked again it must return a mesh with the same process groups, not make new ones"
        )
        assert said["wrong group"] == (
            "GetMesh, key (dp=2, tp=2), stride (2, 1): 2 ranks must reduce along axis 0, not 1"
        )
        assert said["never unknown"].startswith(
            "GetMesh, key (an_axis_that_nobody_has=1), stride (0,): for an unknown key it must return None or raise, not"
            " return DeviceMesh("
        )
        assert rank < 4


def one_rank():
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
    get_mesh = FakeGetMesh(mesh)
    assert get_mesh(mesh_key(mesh)) is mesh
    assert get_mesh(MeshKey(("dp",), (1,), (0,))) is None
    assert get_mesh.asked == [MeshKey(("tp",), (1,), (0,)), MeshKey(("dp",), (1,), (0,))]


def test_the_fake_knows_its_meshes_and_remembers_questions(workers) -> None:
    workers.run(one_rank, 1)
