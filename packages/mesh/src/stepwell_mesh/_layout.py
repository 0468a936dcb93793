"""The axes of a mesh, and which of them data parallelism uses.

Every mode needs an axis for each of its roles. Axes are found by name, in a fixed order of candidates::

    mode    replicate                              shard
    ddp     fsdp_replicate, dp_replicate, dp       (none)
    hsdp    fsdp_replicate, dp_replicate           fsdp_shard, fsdp, dp, dp_shard
    fsdp    (none)                                 fsdp_shard, dp, fsdp, dp_shard

A mesh that this layer makes itself has the first name of each list.
"""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

import attrs

from .exceptions import AxisError

DataParallelMode: TypeAlias = Literal["fsdp", "ddp", "hsdp"]
Role: TypeAlias = Literal["replicate", "shard"]

CANDIDATES: Final[dict[DataParallelMode, dict[Role, tuple[str, ...]]]] = {
    "ddp": {"replicate": ("fsdp_replicate", "dp_replicate", "dp")},
    "hsdp": {
        "replicate": ("fsdp_replicate", "dp_replicate"),
        "shard": ("fsdp_shard", "fsdp", "dp", "dp_shard"),
    },
    "fsdp": {"shard": ("fsdp_shard", "dp", "fsdp", "dp_shard")},
}


@attrs.frozen
class MeshAxes:
    """Names and sizes of a mesh's axes, outermost first.

    Example::

        MeshAxes(("pp", "dp"), (2, 4)).size("dp")   # 4
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]

    def size(self, name: str) -> int:
        """Number of ranks along the axis."""
        return self.sizes[self.names.index(name)]

    def __str__(self) -> str:
        """Short form for messages."""
        return f"({', '.join(f'{name}={size}' for name, size in zip(self.names, self.sizes, strict=True))})"


@attrs.frozen
class RoleAxes:
    """The axis of each role; None where the mesh has none, or the mode does not need one."""

    replicate: str | None = None
    shard: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The axes there are, replicate before shard."""
        return tuple(name for name in (self.replicate, self.shard) if name is not None)


def named_axes(axes: MeshAxes, *, replicate: str | None, shard: str | None) -> RoleAxes:
    """The axes that the caller chose for roles; None leaves the choice to the candidates.

    Raises:
        AxisError: the mesh does not have one of them, or they are the same.
    """
    for role, name in (("replicate", replicate), ("shard", shard)):
        if name is not None and name not in axes.names:
            raise AxisError(f"{role}_axis={name!r} is no axis of the mesh; its axes are {axes}", axis_names=axes.names)
    if replicate is not None and replicate == shard:
        raise AxisError(
            f"replicate_axis and shard_axis must be two axes, got {shard!r} for both (axes {axes})",
            axis_names=axes.names,
        )
    return RoleAxes(replicate=replicate, shard=shard)


def axes_for_mode(mode: DataParallelMode, axes: MeshAxes, *, named: RoleAxes) -> RoleAxes:
    """The axis of each role that the mode needs.

    Args:
        mode: data-parallel mode.
        axes: the mesh's axes.
        named: axes that the caller chose; a role that is None there goes by the candidates.

    Raises:
        AxisError: a role has no axis in this mesh.
    """
    found: dict[Role, str] = {}
    for role, candidates in CANDIDATES[mode].items():
        name = getattr(named, role) or _first(candidates, axes, named)
        if name is None:
            raise AxisError(
                f"mode {mode!r} needs a {role} axis, one of {', '.join(candidates)}; the mesh has {axes}."
                f" Rename an axis, or say which one it is with {role}_axis=…",
                axis_names=axes.names,
            )
        found[role] = name
    return RoleAxes(**found)


def dedicated_axes(axes: MeshAxes, *, named: RoleAxes) -> RoleAxes:
    """What the axes' names say about roles, whatever the mode.

    ``dp`` alone says nothing (it replicates under ddp and shards under fsdp); beside a replicate axis it can only shard.
    """
    replicate = named.replicate or _first(CANDIDATES["hsdp"]["replicate"], axes, named)
    shards = tuple(name for name in CANDIDATES["hsdp"]["shard"] if replicate is not None or name != "dp")
    return RoleAxes(replicate=replicate, shard=named.shard or _first(shards, axes, named))


def data_axes(axes: MeshAxes) -> tuple[str, ...]:
    """Every axis of the mesh that some mode could use."""
    known = {name for roles in CANDIDATES.values() for names in roles.values() for name in names}
    return tuple(name for name in axes.names if name in known)


def _first(candidates: tuple[str, ...], axes: MeshAxes, named: RoleAxes) -> str | None:
    """The first candidate that the mesh has and that the caller has not given to the other role."""
    return next((name for name in candidates if name in axes.names and name not in named.names), None)
