"""Whether a mesh still has its process groups.

A mesh knows its groups by name only, and torch numbers groups anew after ``destroy_process_group``. So a mesh from before that
finds no group, or one that was made since, over other ranks: a collective on it would fail, or wait for ranks that never come.
"""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .exceptions import ExternalMeshError

REMADE = "the mesh is from before torch.distributed was initialised anew"


def ranks_along(mesh: DeviceMesh) -> tuple[list[int], ...]:
    """For each axis of a mesh that holds this rank, the ranks along it through this one, in the mesh's order."""
    place = mesh.get_coordinate() or ()
    lines = []
    for axis in range(len(place)):
        index: list[int | slice] = [*place]
        index[axis] = slice(None)
        lines.append(mesh.mesh[tuple(index)].tolist())
    return tuple(lines)


def group_along(mesh: DeviceMesh, axis: int) -> dist.ProcessGroup:
    """The process group that torch finds for an axis; whether it is over the axis's ranks remains to be seen.

    Raises:
        ExternalMeshError: there is none.
    """
    try:
        group = mesh.get_group(axis)
        dist.get_process_group_ranks(group)
    except (RuntimeError, KeyError) as error:  # KeyError: somebody holds on to a group that was destroyed
        names = mesh.mesh_dim_names
        raise ExternalMeshError(
            f"the axis {names[axis] if names else axis!r} of {mesh} has no process group: the mesh was made without, or its"
            " groups were destroyed; make the mesh after init_process_group, with its groups"
        ) from error
    return group


def has_groups(mesh: DeviceMesh, ranks: tuple[list[int], ...]) -> bool:
    """Whether each axis of a mesh has a group over its ranks, in any order. Takes some microseconds for each axis.

    Args:
        mesh: a mesh that holds this rank.
        ranks: what `ranks_along` said of it.
    """
    try:
        return all(
            dist.get_process_group_ranks(group_along(mesh, axis)) == sorted(along) for axis, along in enumerate(ranks)
        )
    except ExternalMeshError:
        return False
