from __future__ import annotations

from types import SimpleNamespace

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from stepwell_mesh._compat import register_group, resolve_group, root_mesh, unregister_group


def registry():
    assert resolve_group("stepwell_test") is None
    unregister_group("stepwell_test")  # a free name: nothing happens
    group = dist.new_group([0, 1])
    register_group("stepwell_test", group)
    assert resolve_group("stepwell_test") is group
    unregister_group("stepwell_test")
    assert resolve_group("stepwell_test") is None
    register_group("stepwell_test", group)
    dist.destroy_process_group(group)
    del group
    assert resolve_group("stepwell_test") is None  # freed: the registry did not keep it
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    assert root_mesh(mesh) is mesh
    assert root_mesh(mesh["tp"]) is mesh


def test_the_registry_gives_groups_one_more_name(workers) -> None:
    workers.run(registry, 2)


def test_a_mesh_of_a_torch_without_roots_is_its_own() -> None:
    mesh = SimpleNamespace()
    assert root_mesh(mesh) is mesh
