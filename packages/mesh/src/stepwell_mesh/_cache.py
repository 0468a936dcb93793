"""Finds this rank's mesh for a key that came from another stage.

A :class:`~stepwell_meta.MeshKey` crosses stages, a mesh does not: it holds process groups of one process. So each stage keeps a
cache of the meshes it knows, and asks its user for those that it does not.

How long an entry lives. torch makes a new object each time a sub-mesh is sliced (``mesh["tp"]``), which refers to the mesh it was
sliced from; the groups belong to neither. A cache that held meshes would keep them alive after their user let go of them; one
that looked at the sub-mesh object only would forget "the TP mesh" when the example tensor that came with it is dropped. An entry
here lives as long as the mesh that was added, *or the one it was sliced from*: while the latter lives, the sub-mesh is sliced
from it again.

A mesh may also outlive its groups: torch's DTensor operators remember meshes, and a program may destroy its groups and make them
anew. Such a mesh is as good as dead: it is refused, and one that the cache holds is passed over.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from stepwell_meta import MeshKey, mesh_key

from ._compat import root_mesh
from ._groups import REMADE, has_groups, ranks_along
from .exceptions import ExternalMeshError, MeshLookupError


class GetMesh(Protocol):
    """Says which of this rank's meshes a key means. ``lambda key: world[key.axis_names]`` is one.

    A rank asks when it meets a key that it does not know, so one rank may ask while another does not: the callback must not
    make process groups or wait for other ranks. It looks up a mesh that exists and that someone else keeps alive.
    """

    def __call__(self, key: MeshKey, /) -> DeviceMesh | None:
        """The mesh with this key that holds this rank, the same each time; None where there is none."""


def adapt_torch_get_mesh(callback: Callable[[tuple[str, ...], Any], DeviceMesh | None]) -> GetMesh:
    """A :class:`GetMesh` from a callback that was written for torch's own ``PipelineStage(get_mesh=…)``.

    torch calls it with axis names and a layout. The layout it gets here is None, which torch's signature allows too: the cache
    itself checks sizes and strides of what comes back.

    Example::

        MeshCache(adapt_torch_get_mesh(lambda names, layout: world[names]))
    """

    def get_mesh(key: MeshKey, /) -> DeviceMesh | None:
        return callback(key.axis_names or (), None)

    return get_mesh


class MeshCache:
    """The meshes that one stage or pipeline knows, by key. Mutable: it learns meshes, and forgets those that died.

    It does not keep meshes alive (the module's docstring says how long an entry lives): who takes a mesh from it holds
    that mesh while using it.

    Example::

        cache = MeshCache(lambda key: world[key.axis_names])
        cache.add_tensors(example_inputs)      # the meshes of the DTensors among them
        cache.get(meta.mesh_key)

    Args:
        get_mesh: asked for keys that are not in the cache; None: such keys are errors.
    """

    def __init__(self, get_mesh: GetMesh | None = None) -> None:
        self._get_mesh = get_mesh
        self._entries: dict[MeshKey, list[_Entry]] = {}

    def add(self, mesh: DeviceMesh) -> MeshKey:
        """Remember a mesh; returns its key.

        Raises:
            ExternalMeshError: this rank is not in the mesh, or the mesh has no process groups (any more).
            MeshLookupError: another mesh with this key, over other ranks or another device type, is in the cache.
        """
        if mesh.get_coordinate() is None:
            raise ExternalMeshError(f"this rank is not in {mesh}; a cache holds meshes of its own rank only")
        key = mesh_key(mesh)
        known = self._find(key)
        if known is not None and not _same(known, mesh):
            raise MeshLookupError(
                f"two meshes have the key {key}: {_describe(known)}, and now {_describe(mesh)}; a received DTensor could belong"
                " to either. Give their axes different names, or use a cache for each",
                key=key,
            )
        if known is not mesh:
            entry = _Entry(key, mesh)
            if entry.mesh() is None:
                raise ExternalMeshError(_without_groups(mesh))
            self._entries[key] = [*(one for one in self._entries.get(key, []) if one.adds_to(entry)), entry]
        return key

    def add_tensors(self, tensors: Iterable[object]) -> None:
        """Remember the mesh of every DTensor among the values; others are passed over.

        Raises:
            ExternalMeshError: as :meth:`add`.
            MeshLookupError: as :meth:`add`.
        """
        for tensor in tensors:
            if isinstance(tensor, DTensor):
                self.add(tensor.device_mesh)

    def get(self, key: MeshKey) -> DeviceMesh:
        """This rank's mesh for the key: from the cache, else from the callback, which is then remembered.

        Raises:
            MeshLookupError: neither has it, or the callback failed or gave something else.
        """
        known = self._find(key)
        if known is not None:
            return known
        if self._get_mesh is None:
            raise MeshLookupError(
                f"no mesh is known for the key {key}; pass example tensors that are DTensors on that mesh, or get_mesh, a"
                f" function from a MeshKey to this rank's DeviceMesh. Known here: {self._known()}",
                key=key,
            )
        mesh = _ask(self._get_mesh, key)
        self.add(mesh)
        return mesh

    def __contains__(self, key: MeshKey) -> bool:
        """Whether the key is known without asking the callback."""
        return self._find(key) is not None

    def __len__(self) -> int:
        """Number of keys that are known without asking the callback."""
        return sum(self._find(key) is not None for key in list(self._entries))

    def _find(self, key: MeshKey) -> DeviceMesh | None:
        for entry in self._entries.get(key, ()):
            mesh = entry.mesh()
            if mesh is not None:
                return mesh
        self._entries.pop(key, None)
        return None

    def _known(self) -> str:
        return "; ".join(str(key) for key in list(self._entries) if key in self) or "none"


class _Entry:
    """One mesh, weakly, and the mesh that it was sliced from, weakly."""

    def __init__(self, key: MeshKey, mesh: DeviceMesh) -> None:
        self._key = key
        self._ranks = ranks_along(mesh)
        self._added = weakref.ref(mesh)
        self._root = weakref.ref(root_mesh(mesh))
        self._sliced: Callable[[], DeviceMesh | None] = lambda: None

    def mesh(self) -> DeviceMesh | None:
        """The mesh, sliced again if need be; None when it, or its process groups, are gone."""
        if not dist.is_initialized():  # no mesh has groups, and torch cannot even slice one
            return None
        mesh = self._added() or self._sliced()
        if mesh is None and (root := self._root()) is not None:
            mesh = _slice(root, self._key)
            if mesh is not None:
                self._sliced = weakref.ref(mesh)
        return mesh if mesh is not None and has_groups(mesh, self._ranks) else None

    def adds_to(self, other: _Entry) -> bool:
        """Whether this entry may still serve when the other one is dead."""
        return self.mesh() is not None and (self._added() is not None or self._root() is not other._root())


def _slice(root: DeviceMesh, key: MeshKey) -> DeviceMesh | None:
    # What was flattened from a root has other axes, but the root keeps it alive; what was unflattened has no way back.
    names = key.axis_names
    if not names or not set(names) <= set(root.mesh_dim_names or ()):
        return None
    try:
        mesh = root[names]
    except KeyError:  # torch slices axes in the root's order only, but concatenates meshes in any
        return None
    return mesh if mesh_key(mesh) == key else None


def _ask(get_mesh: GetMesh, key: MeshKey) -> DeviceMesh:
    try:
        mesh = get_mesh(key)
    except Exception as error:  # whatever a user's function raises, the key that it was asked for belongs beside it
        raise MeshLookupError(
            f"get_mesh raised {type(error).__name__} for the key {key}: {error}; it must return this rank's mesh for it",
            key=key,
        ) from error
    if mesh is None:
        raise MeshLookupError(
            f"get_mesh returned None for the key {key}; it must return this rank's mesh with these axes and strides",
            key=key,
        )
    if not isinstance(mesh, DeviceMesh):
        raise MeshLookupError(
            f"get_mesh returned {mesh!r} ({type(mesh).__name__}) for the key {key}; it must return a torch DeviceMesh",
            key=key,
        )
    if mesh.get_coordinate() is None:
        raise MeshLookupError(
            f"get_mesh returned {mesh} for the key {key}, but this rank is not in it; it must return the mesh that holds"
            " this rank",
            key=key,
        )
    if not has_groups(mesh, ranks_along(mesh)):
        raise MeshLookupError(f"get_mesh was asked for the key {key}, and {_without_groups(mesh)}", key=key)
    found = mesh_key(mesh)
    if found != key:
        raise MeshLookupError(
            f"get_mesh returned a mesh with the key {found} for the key {key}; it must return one with the same axis names,"
            " sizes and strides",
            key=key,
        )
    return mesh


def _without_groups(mesh: DeviceMesh) -> str:
    return (
        f"{mesh} has no process groups of its own: it was made without, or {REMADE}. Make it after init_process_group, and the"
        " DTensors on it; torch's DTensor operators remember meshes of before until stepwell_meta.forget_meshes() is called"
    )


def _same(one: DeviceMesh, other: DeviceMesh) -> bool:
    return one is other or (one.device_type == other.device_type and bool((one.mesh == other.mesh).all()))


def _describe(mesh: DeviceMesh) -> str:
    return f"ranks {mesh.mesh.tolist()} on {mesh.device_type}"
