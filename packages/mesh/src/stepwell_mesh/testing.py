"""For tests of code that takes a :class:`stepwell_mesh.GetMesh`, and of your own implementations of it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from stepwell_meta import MeshKey, mesh_key

from ._cache import GetMesh

__all__ = ["FakeGetMesh", "check_get_mesh"]


class FakeGetMesh:
    """A GetMesh that knows the meshes it was given, and keeps a list of what it was asked.

    Example::

        get_mesh = FakeGetMesh(world["tp"], world["dp", "tp"])
        MeshCache(get_mesh).get(mesh_key(world["tp"]))
        get_mesh.asked   # [MeshKey(axis_names=("tp",), …)]
    """

    def __init__(self, *meshes: DeviceMesh) -> None:
        self.meshes = {mesh_key(mesh): mesh for mesh in meshes}
        self.asked: list[MeshKey] = []

    def __call__(self, key: MeshKey, /) -> DeviceMesh | None:
        """The mesh with this key, or None."""
        self.asked.append(key)
        return self.meshes.get(key)


def check_get_mesh(get_mesh: GetMesh, keys: Iterable[MeshKey]) -> None:
    """Check everything that the contract of :class:`GetMesh` promises, for keys that it should know.

    Call it on every rank: it reduces along every axis of the meshes, to see that their groups work.

    Args:
        get_mesh: what to check.
        keys: keys of meshes that hold this rank; the same on every rank, in the same order.

    Raises:
        AssertionError: a promise is not kept; the message says which, and for which key.
    """
    for key in keys:
        mesh = get_mesh(key)
        if not isinstance(mesh, DeviceMesh):
            raise _broken(f"for a known key it must return a DeviceMesh, not {mesh!r}", key)
        if mesh.get_coordinate() is None:
            raise _broken(f"it must return the mesh that holds this rank, not {mesh}", key)
        if mesh_key(mesh) != key:
            raise _broken(f"it must return a mesh with that key, not with the key {mesh_key(mesh)}", key)
        again = get_mesh(key)
        if not isinstance(again, DeviceMesh) or again.get_all_groups() != mesh.get_all_groups():
            raise _broken("asked again it must return a mesh with the same process groups, not make new ones", key)
        for axis, size in enumerate(mesh.shape):
            total = torch.ones((), device=mesh.device_type)
            dist.all_reduce(total, group=mesh.get_group(axis))
            if total.item() != size:
                raise _broken(f"{size} ranks must reduce along axis {axis}, not {total.item():.0f}", key)
    _check_unknown(get_mesh, MeshKey(("an_axis_that_nobody_has",), (1,), (0,)))


def _check_unknown(get_mesh: GetMesh, key: MeshKey) -> None:
    try:
        mesh = get_mesh(key)
    except Exception:  # refusing by an exception is as good as None: the cache turns either into its error
        return
    if mesh is not None:
        raise _broken(f"for an unknown key it must return None or raise, not return {mesh}", key)


def _broken(promise: str, key: MeshKey) -> AssertionError:
    return AssertionError(f"GetMesh, key {key}: {promise}")
