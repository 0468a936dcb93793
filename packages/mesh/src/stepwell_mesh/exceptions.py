"""Every error and warning of stepwell-mesh.

:class:`MeshBuildError` means that the backend or a peer failed while the arguments were right. Every other class means that an
argument, a mesh or a callback is wrong, and its message says what to change.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepwell_meta.exceptions import StepwellError

if TYPE_CHECKING:
    from stepwell_meta import MeshKey

__all__ = [
    "AxisError",
    "DegreesError",
    "DeviceTypeError",
    "ExternalMeshError",
    "MeshBuildError",
    "MeshError",
    "MeshLookupError",
    "ModeError",
    "TopologyError",
    "TopologyWarning",
]


class MeshError(StepwellError):
    """Base of this layer."""


class TopologyError(MeshError, ValueError):
    """The data parallelism that was asked for cannot be had: base of the five classes below it."""


class ModeError(TopologyError):
    """The mode is no data-parallel mode, or contradicts the mesh.

    Attributes:
        mode: what was asked for.
    """

    def __init__(self, message: str, *, mode: object) -> None:
        super().__init__(message)
        self.mode = mode


class DegreesError(TopologyError):
    """Degrees that are not positive, do not divide the world, or do not multiply to it.

    Attributes:
        world_size: number of ranks to divide.
        shard: the shard degree that was asked for; None where it was left open.
        replicate: the replicate degree that was asked for; None where it was left open.
    """

    def __init__(self, message: str, *, world_size: int, shard: int | None, replicate: int | None) -> None:
        super().__init__(message)
        self.world_size = world_size
        self.shard = shard
        self.replicate = replicate


class AxisError(TopologyError):
    """The mesh's axes do not serve the mode: one is missing, left over, or of another size than was declared.

    Attributes:
        axis_names: the names of the mesh's axes.
    """

    def __init__(self, message: str, *, axis_names: tuple[str, ...]) -> None:
        super().__init__(message)
        self.axis_names = axis_names


class ExternalMeshError(TopologyError):
    """An external mesh is needed and missing, or the one that was passed cannot be used."""


class DeviceTypeError(TopologyError):
    """The device type is unknown, or there is no such device here.

    Attributes:
        device_type: what was asked for.
    """

    def __init__(self, message: str, *, device_type: object) -> None:
        super().__init__(message)
        self.device_type = device_type


class MeshLookupError(MeshError, LookupError):
    """No mesh is known for a key, or the one that was given for it is not usable.

    Attributes:
        key: the key that was asked for.
    """

    def __init__(self, message: str, *, key: MeshKey) -> None:
        super().__init__(message)
        self.key = key


class MeshBuildError(MeshError):
    """The process groups of a mesh could not be made: a peer did not come, or the backend failed."""


class TopologyWarning(UserWarning):
    """The mode was changed to fit the mesh; see the message for what and why."""
