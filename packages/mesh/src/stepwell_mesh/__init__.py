"""Where things live: device meshes and data-parallel topologies."""

from __future__ import annotations

from ._build import HasDeviceMesh, HasFsdpMesh, MeshContextLike, topology_for_world, topology_from_mesh
from ._cache import GetMesh, MeshCache, adapt_torch_get_mesh
from ._device import default_device_type, require_device_type
from ._topology import DataParallelTopology, Degrees, normalize_dp_mode, resolve_hsdp_degrees

__all__ = [
    "DataParallelTopology",
    "Degrees",
    "GetMesh",
    "HasDeviceMesh",
    "HasFsdpMesh",
    "MeshCache",
    "MeshContextLike",
    "adapt_torch_get_mesh",
    "default_device_type",
    "normalize_dp_mode",
    "require_device_type",
    "resolve_hsdp_degrees",
    "topology_for_world",
    "topology_from_mesh",
]
