"""Makes meshes and registers their process groups, as `_topology` has decided."""

from __future__ import annotations

import itertools
import warnings
from typing import Protocol, TypeAlias

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from stepwell_meta import forget_meshes

from ._compat import register_group, resolve_group, unregister_group
from ._device import default_device_type, require_device_type
from ._groups import REMADE, group_along, ranks_along
from ._layout import MeshAxes, Role, named_axes
from ._topology import (
    GROUP_NAMES,
    AxisPlan,
    DataParallelTopology,
    DeclaredSizes,
    declared_by_axes,
    normalize_dp_mode,
    plan_axes,
    plan_world,
    refuse_other_parallelism,
    resolve_degrees,
)
from .exceptions import ExternalMeshError, MeshBuildError, TopologyError, TopologyWarning


class HasDeviceMesh(Protocol):
    """An object that carries the mesh of its parallelism, as trainers' mesh contexts do.

    Two more attributes are read where they are there and not None: ``dp_replicate_size`` and ``dp_shard_size``, the number of
    replicas and of shards. Without both, the mode that was asked for is taken at its word.
    """

    @property
    def device_mesh(self) -> DeviceMesh | None:
        """The mesh to use when there is no ``fsdp_non_moe_mesh``."""


class HasFsdpMesh(Protocol):
    """As :class:`HasDeviceMesh`, with a mesh for the parameters that are not experts'; that one is preferred."""

    @property
    def fsdp_non_moe_mesh(self) -> DeviceMesh | None:
        """The mesh to use."""


MeshContextLike: TypeAlias = HasDeviceMesh | HasFsdpMesh


def topology_for_world(
    mode: str,
    *,
    shard: int | None = None,
    replicate: int | None = None,
    tp_size: int = 1,
    pp_size: int = 1,
    device_type: str | None = None,
) -> DataParallelTopology:
    """Data parallelism over every rank: makes the mesh and registers its process groups.

    The mesh has the axis ``fsdp_replicate`` under ddp, ``fsdp_shard`` under fsdp, and both, in this order, under hsdp. Every rank
    must call this, once, at the same point of the program: making process groups is collective.

    Args:
        mode: ``fsdp``, ``ddp`` or ``hsdp``, or an alias of them.
        shard: ranks that share one copy of the parameters; see :func:`resolve_hsdp_degrees`.
        replicate: number of copies.
        tp_size: tensor-parallel size of the program; anything but 1 needs :func:`topology_from_mesh`.
        pp_size: pipeline-parallel size of the program; likewise.
        device_type: ``cpu``, ``cuda``, ``npu``, …; None: :func:`default_device_type`.

    Example::

        topology = topology_for_world("hsdp", shard=4)   # 8 ranks: 2 replicas of 4 shards
        topology.group_names                             # ("dp_replicate", "fsdp")

    Raises:
        TopologyError: an argument is wrong, contradicts the number of ranks, or torch.distributed is not initialised.
        MeshBuildError: the process groups could not be made.
    """
    known_mode = normalize_dp_mode(mode)
    refuse_other_parallelism(tp_size=tp_size, pp_size=pp_size)
    if not dist.is_initialized():
        raise TopologyError(
            "torch.distributed is not initialised, so there are no ranks to divide; call"
            " torch.distributed.init_process_group first, or train without a topology on one rank"
        )
    degrees = resolve_degrees(known_mode, dist.get_world_size(), shard=shard, replicate=replicate)
    device = default_device_type() if device_type is None else require_device_type(device_type)
    axes, plan = plan_world(known_mode, degrees)
    try:
        mesh = init_device_mesh(device, axes.sizes, mesh_dim_names=axes.names)
    except RuntimeError as error:  # torch.distributed's own errors are RuntimeErrors
        raise MeshBuildError(
            f"could not make the process groups of the mesh {axes} on device type {device!r}: {error}. Every rank must ask"
            " for the same mesh at the same point of the program"
        ) from error
    return _register(plan, mesh)


def topology_from_mesh(
    mesh: DeviceMesh | MeshContextLike,
    mode: str,
    *,
    replicate_axis: str | None = None,
    shard_axis: str | None = None,
) -> DataParallelTopology:
    """Data parallelism on axes of a mesh that is there already, beside tensor or pipeline parallelism maybe.

    Nothing collective happens. The axes are found by their names (see the package's README for the order), or given.

    The mode is reconciled with what the mesh says: with the sizes of its axes, or with ``dp_replicate_size`` and
    ``dp_shard_size`` of the object that carries it. ``fsdp`` on a mesh with replicas becomes ``hsdp``, ``hsdp`` on one without
    becomes ``fsdp``, each with a :class:`TopologyWarning`; ``ddp`` on one that shards is refused. An object without sizes
    leaves the mode as it is.

    Args:
        mesh: a mesh with named axes, or an object with ``fsdp_non_moe_mesh`` or ``device_mesh``.
        mode: ``fsdp``, ``ddp`` or ``hsdp``, or an alias of them.
        replicate_axis: the axis to replicate along, where its name is none of the known ones.
        shard_axis: the axis to shard along, likewise.

    Example::

        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
        topology_from_mesh(mesh, "fsdp").degrees   # Degrees(shard=2, replicate=1)

    Raises:
        TopologyError: mode, mesh and axes do not go together; the sub-class and the message say how.
    """
    known_mode = normalize_dp_mode(mode)
    device_mesh = _mesh_of(mesh)
    axes = _axes_of(device_mesh)
    named = named_axes(axes, replicate=replicate_axis, shard=shard_axis)
    declared = declared_by_axes(axes, named=named) if device_mesh is mesh else _declared_by(mesh)
    plan = plan_axes(known_mode, axes, declared=declared, named=named)
    if plan.warning is not None:
        warnings.warn(plan.warning, TopologyWarning, stacklevel=2)
    return _register(plan, device_mesh)


def _mesh_of(external: object) -> DeviceMesh:
    if isinstance(external, DeviceMesh):
        return external
    for attribute in ("fsdp_non_moe_mesh", "device_mesh"):
        mesh = getattr(external, attribute, None)
        if isinstance(mesh, DeviceMesh):
            return mesh
        if mesh is not None:
            raise ExternalMeshError(
                f"{attribute} of the {type(external).__name__} must be a torch DeviceMesh or None, got"
                f" {mesh!r} ({type(mesh).__name__})"
            )
    raise ExternalMeshError(
        "expected a torch DeviceMesh, or an object that has one as fsdp_non_moe_mesh or device_mesh, got"
        f" {external!r} ({type(external).__name__}); for data parallelism over all ranks use topology_for_world"
    )


def _axes_of(mesh: DeviceMesh) -> MeshAxes:
    if not mesh.mesh_dim_names:
        raise ExternalMeshError(
            f"the axes of {mesh} have no names, so none can be found by its role; pass mesh_dim_names when you make it"
        )
    if len(set(mesh.mesh_dim_names)) < len(mesh.mesh_dim_names):
        raise ExternalMeshError(f"two axes of {mesh} have the same name; give each its own")
    if mesh.get_coordinate() is None:
        raise ExternalMeshError(f"this rank is not in {mesh}; on each rank, pass the mesh that holds that rank")
    return MeshAxes(names=tuple(mesh.mesh_dim_names), sizes=tuple(mesh.shape))


def _declared_by(context: object) -> DeclaredSizes | None:
    sizes = {role: getattr(context, f"dp_{role}_size", None) for role in ("replicate", "shard")}
    for role, size in sizes.items():
        if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
            raise ExternalMeshError(
                f"dp_{role}_size of the {type(context).__name__} must be a positive integer or None, got {size!r}"
            )
    return None if all(size is None for size in sizes.values()) else DeclaredSizes(**sizes)


def _register(plan: AxisPlan, mesh: DeviceMesh) -> DataParallelTopology:
    forget_meshes()  # parameters that are DTensors on this mesh must not meet one that had the same ranks before
    axes: dict[Role, str | None] = {"replicate": plan.roles.replicate, "shard": plan.roles.shard}
    groups = {role: None if axis is None else _group_of(mesh, axis) for role, axis in axes.items()}
    names = {role: None if group is None else _name_group(GROUP_NAMES[role], group) for role, group in groups.items()}
    return DataParallelTopology(
        mode=plan.mode,
        degrees=plan.degrees,
        replicate_axis=axes["replicate"],
        shard_axis=axes["shard"],
        replicate_group=names["replicate"],
        shard_group=names["shard"],
        mesh=mesh,
    )


def _group_of(mesh: DeviceMesh, axis: str) -> dist.ProcessGroup:
    """The process group along an axis, once it is certain that it is that: torch finds it by a name it may have used again."""
    number = (mesh.mesh_dim_names or ()).index(axis)
    group = group_along(mesh, number)
    expected, ranks = ranks_along(mesh)[number], dist.get_process_group_ranks(group)
    if ranks != expected:
        raise ExternalMeshError(
            f"the axis {axis!r} of {mesh} runs over the ranks {expected}, but its process group over {ranks}. Either"
            f" {REMADE}, or ranks do not rise along the axis; make a new mesh"
        )
    return group


def _name_group(base: str, group: dist.ProcessGroup) -> str:
    """Register a group under ``base``, or ``base_2``, … while another group in use holds that name; returns the name.

    A graph that has a name in it must never come to mean another group, so a name is taken over from a group only after
    that was destroyed.
    """
    for number in itertools.count(1):
        name = base if number == 1 else f"{base}_{number}"
        holder = resolve_group(name)
        if holder is group:
            break
        if holder is None or not _in_use(holder):
            unregister_group(name)
            register_group(name, group)
            break
    return name


def _in_use(group: dist.ProcessGroup) -> bool:
    try:
        dist.get_group_rank(group, dist.get_rank())
    except ValueError:  # torch's answer for a group that was destroyed
        return False
    return True
