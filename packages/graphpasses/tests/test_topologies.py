"""The axes of data parallelism: made here, or found in a mesh from outside; and parameters that are parallel otherwise too."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import graphpasses_support as support
import pytest
import torch
from graphpasses_support import XY, compiler, mlp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from stepwell_graphpasses import GraphCompiler, PassConfig
from stepwell_graphpasses.exceptions import (
    ConfigError,
)
from stepwell_graphpasses.testing import fake_world
from stepwell_mesh.exceptions import TopologyError, TopologyWarning
from stepwell_meta.testing import WorkerPool


@pytest.mark.parametrize("config", [{"tp_size": 2}, {"pp_enabled": True, "pp_degree": 2}, {"pp_enabled": True}])
def test_b03_tensor_or_pipeline_parallelism_needs_an_external_mesh(config: dict[str, Any]) -> None:
    with fake_world(4), pytest.raises(TopologyError, match=r"mesh"):
        compiler(PassConfig(**config))
    with pytest.raises(TopologyError, match=r"mesh"):
        compiler(PassConfig(**config))


@pytest.mark.parametrize(
    ("config", "axes", "groups", "degrees"),
    [
        ({"dp_mode": "ddp"}, ("fsdp_replicate",), ("dp_replicate",), (1, 4)),
        ({"dp_mode": "fsdp"}, ("fsdp_shard",), ("fsdp",), (4, 1)),
        ({"dp_mode": "hsdp", "fsdp_degree": 2}, ("fsdp_replicate", "fsdp_shard"), ("dp_replicate", "fsdp"), (2, 2)),
        (
            {"dp_mode": "hsdp", "dp_replicate_degree": 4},
            ("fsdp_replicate", "fsdp_shard"),
            ("dp_replicate", "fsdp"),
            (1, 4),
        ),
    ],
)
def test_b04_own_meshes_groups_and_degrees(config: Any, axes: Any, groups: Any, degrees: Any) -> None:
    with fake_world(4):
        c = compiler(PassConfig(**config))
        assert c.topology.axis_names == axes
        assert c.topology.group_names == groups
        assert (c.config.fsdp_degree, c.config.dp_replicate_degree) == degrees
        assert c.topology.mesh.device_type == "cpu"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "needs a shard degree, a replicate degree, or both"),
        ({"fsdp_degree": 3}, "shard degree must divide"),
        ({"dp_replicate_degree": 3}, "replicate degree must divide"),
        ({"fsdp_degree": 2, "dp_replicate_degree": 4}, "must be the number of ranks"),
    ],
)
def test_b05_hsdp_degrees(config: dict[str, Any], message: str) -> None:
    with fake_world(4), pytest.raises(TopologyError, match=message):
        compiler(PassConfig(dp_mode="hsdp", **config))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"tp_size": 4}, "tp_size=4, but the mesh has 2"),
        ({"pp_enabled": True, "pp_degree": 4}, "pp_degree=4, but the mesh has 2"),
    ],
)
def test_degrees_beside_data_parallelism_must_be_those_of_the_mesh(config: dict[str, Any], message: str) -> None:
    """Only the degrees of data parallelism were compared: another number of stages, or of tensor parallel ranks, went unseen."""
    right = PassConfig(tp_size=2, pp_enabled=True, pp_degree=2)
    with fake_world(8):
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "fsdp", "tp"))
        with pytest.raises(ConfigError, match=message):
            compiler(PassConfig(**config), mesh=mesh)
        assert compiler(right, mesh=mesh).config.fsdp_degree == 2
        assert compiler(PassConfig(**config), mesh=mesh["fsdp"]).config.fsdp_degree == 2  # which does not say


def test_b06_b07_external_meshes_are_found_by_axis_and_reconciled() -> None:
    with fake_world(8):
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp_replicate", "fsdp", "tp"))
        c = compiler(PassConfig(dp_mode="hsdp"), mesh=mesh)
        assert (c.config.fsdp_degree, c.config.dp_replicate_degree) == (2, 2)
        assert c.topology.axis_names == ("dp_replicate", "fsdp")
        with pytest.warns(TopologyWarning, match="hsdp"):
            assert compiler(PassConfig(dp_mode="fsdp"), mesh=mesh).config.dp_mode == "hsdp"
        with pytest.raises(TopologyError, match="ddp"):
            compiler(PassConfig(dp_mode="ddp"), mesh=mesh)
        flat = init_device_mesh("cpu", (8,), mesh_dim_names=("fsdp",))
        alone = init_device_mesh("cpu", (1, 8), mesh_dim_names=("dp_replicate", "fsdp"))
        with pytest.warns(TopologyWarning, match="fsdp"):
            assert compiler(PassConfig(dp_mode="hsdp"), mesh=alone).config.dp_mode == "fsdp"
        context = SimpleNamespace(fsdp_non_moe_mesh=flat, device_mesh=mesh)
        assert compiler(PassConfig(), mesh=context).topology.mesh is flat
        assert compiler(PassConfig(dp_mode="hsdp"), mesh=SimpleNamespace(device_mesh=mesh)).topology.mesh is mesh
        with pytest.raises(TopologyError, match=r"x"):
            compiler(PassConfig(), mesh=init_device_mesh("cpu", (8,), mesh_dim_names=("x",)))
        with pytest.raises(ConfigError, match="fsdp_degree=4, but the mesh has 8"):
            compiler(PassConfig(fsdp_degree=4), mesh=flat)


def test_b09_a_rank_holds_the_rows_of_its_place_in_the_shard_group() -> None:
    whole = support.seeded(mlp).layers[0].weight.detach()
    with fake_world(8, rank=5):
        hsdp = compiler(PassConfig(dp_mode="hsdp", fsdp_degree=4)).compile(**XY)  # ranks 4 to 7 are the second replica
        assert torch.equal(hsdp.model.layers[0].weight.to_local(), whole[2:4])
        fsdp = compiler().compile(**XY)  # the whole world: one row for each of the first seven
        assert torch.equal(fsdp.model.layers[0].weight.to_local(), whole[5:6])
        mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("fsdp", "tp"))
        beside = compiler(mesh=mesh).compile(**XY)
        assert torch.equal(beside.model.layers[0].weight.to_local(), whole[4:6])


def tensor_parallel(shape: tuple[int, ...], names: tuple[str, ...], mode: str) -> float:
    class Feed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down, self.norm = nn.Linear(4, 12), nn.Linear(12, 6), nn.LayerNorm(6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(self.down(self.up(x).relu()))

    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    data = mesh.get_coordinate()[0] if len(shape) == 2 else mesh.get_coordinate()[0] * 2 + mesh.get_coordinate()[1]
    inputs = support.pair((4, 6), rank=data)
    model = support.seeded(Feed)
    reference = copy.deepcopy(model)
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    c = GraphCompiler(model, support.mse_loss, PassConfig(dp_mode=mode), mesh=mesh)
    expected = support.averaged(support.local_gradients(reference, support.mse_loss, inputs))
    c.forward_backward(**inputs)
    torch.nn.utils.clip_grad_norm_([p for n, p in model.named_parameters() if n.startswith("up")], 1e9)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    found = support.gradients(model)
    moved = support.parameters(model)
    stepped = {name: p.detach() - 0.1 * expected[name] for name, p in reference.named_parameters()}
    return max(support.difference(found, expected), support.difference(moved, stepped))


@pytest.mark.parametrize(
    ("shape", "names", "mode"),
    [((2, 2), ("fsdp", "tp"), "fsdp"), ((2, 2, 2), ("dp_replicate", "fsdp", "tp"), "hsdp")],
)
def test_tensor_parallel_parameters_compose(workers: WorkerPool, shape: Any, names: Any, mode: str) -> None:
    ranks = torch.Size(shape).numel()
    assert max(workers.run(tensor_parallel, ranks, shape, names, mode, deadline=110)) <= 3e-7


@pytest.mark.parametrize(
    ("config", "launched", "words"),
    [
        ({"dp_mode": "hsdp", "fsdp_degree": 2}, "1", "fsdp_degree=2, but torch.distributed is not initialised"),
        ({"dp_mode": "ddp", "dp_replicate_degree": 3}, "1", "dp_replicate_degree=3, but .*init_process_group first"),
        ({}, "4", "WORLD_SIZE=4, but .*init_process_group first.* set fsdp_degree=1"),
        ({"dp_mode": "ddp"}, "4", "WORLD_SIZE=4, but .* set dp_replicate_degree=1"),
    ],
)
def test_ranks_that_do_not_know_each_other_are_refused(
    monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], launched: str, words: str
) -> None:
    """Where init_process_group was forgotten each rank trained a copy of its own, without a word."""
    monkeypatch.setenv("WORLD_SIZE", launched)
    with pytest.raises(ConfigError, match=words):
        compiler(PassConfig(**config))
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert compiler(PassConfig(fsdp_degree=1)).topology is None
