"""What data parallelism is to be had on how many ranks, or on which axes of a mesh: decisions only, nothing is built.

A mode says what happens to parameters. ``fsdp`` cuts each into one shard per rank; ``ddp`` keeps a whole copy on each;
``hsdp`` does both, on two axes: a replica is a group of ranks that shard among themselves. Gradients are reduced along every
axis of the mode, so an axis that the mode forgets would let replicas drift apart with no error. Reconciliation is there
to prevent that: the mode must fit the mesh, or be changed to fit with a warning, or be refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import attrs

from ._layout import (
    CANDIDATES,
    DataParallelMode,
    MeshAxes,
    Role,
    RoleAxes,
    axes_for_mode,
    data_axes,
    dedicated_axes,
)
from .exceptions import AxisError, DegreesError, ExternalMeshError, ModeError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

GROUP_NAMES: Final[dict[Role, str]] = {"replicate": "dp_replicate", "shard": "fsdp"}

_MODES: Final[dict[str, DataParallelMode]] = {
    "fsdp": "fsdp",
    "ddp": "ddp",
    "hsdp": "hsdp",
    "fully_shard": "fsdp",
    "replicate": "ddp",
    "hybrid_shard": "hsdp",
}
_CHOICES: Final = "fsdp (or fully_shard), ddp (or replicate), hsdp (or hybrid_shard)"


@attrs.frozen
class Degrees:
    """How many ranks share one copy of the parameters, and how many copies there are.

    Attributes:
        shard: ranks among which each parameter is cut; 1 under ddp.
        replicate: copies of the parameters; 1 under fsdp.
    """

    shard: int
    replicate: int

    @property
    def total(self) -> int:
        """Ranks that take part in data parallelism, each with its own part of the batch."""
        return self.shard * self.replicate


@attrs.frozen
class DeclaredSizes:
    """What a mesh, or the object that carries it, says about itself; None is "does not say"."""

    replicate: int | None = None
    shard: int | None = None


@attrs.frozen
class AxisPlan:
    """A mode and the axes that serve it; ``warning`` is what the caller should be told, if anything."""

    mode: DataParallelMode
    roles: RoleAxes
    degrees: Degrees
    warning: str | None = None


@attrs.frozen
class DataParallelTopology:
    """Data parallelism on a mesh: what graph passes and trainers need to know of it.

    Attributes:
        mode: ``fsdp``, ``ddp`` or ``hsdp``, as it is in effect (see :func:`topology_from_mesh` for what may change it).
        degrees: the shard and replicate degrees in effect.
        replicate_axis: name of the mesh axis along which gradients are all-reduced; None under fsdp.
        shard_axis: name of the mesh axis along which parameters are sharded; None under ddp.
        replicate_group: name under which the replicate axis's process group is registered; None under fsdp.
        shard_group: name under which the shard axis's process group is registered; None under ddp.
        mesh: the mesh with these axes, and maybe others.
    """

    mode: DataParallelMode
    degrees: Degrees
    replicate_axis: str | None
    shard_axis: str | None
    replicate_group: str | None
    shard_group: str | None
    mesh: DeviceMesh

    @property
    def axis_names(self) -> tuple[str, ...]:
        """The axes of data parallelism, replicate before shard."""
        return tuple(name for name in (self.replicate_axis, self.shard_axis) if name is not None)

    @property
    def group_names(self) -> tuple[str, ...]:
        """The registered names of those axes' process groups, in the same order."""
        return tuple(name for name in (self.replicate_group, self.shard_group) if name is not None)

    @property
    def replicate_mesh(self) -> DeviceMesh | None:
        """The mesh of the replicate axis alone; None under fsdp."""
        return None if self.replicate_axis is None else self.mesh[self.replicate_axis]

    @property
    def shard_mesh(self) -> DeviceMesh | None:
        """The mesh of the shard axis alone; None under ddp."""
        return None if self.shard_axis is None else self.mesh[self.shard_axis]

    @property
    def dp_mesh(self) -> DeviceMesh:
        """The mesh of all axes of data parallelism: what ``fully_shard`` takes, which is replicas outside, shards inside.

        Raises:
            AxisError: the mesh has the shard axis outside, and torch slices axes in the mesh's order only. ``fully_shard`` goes
                by position, so it would shard along the replicate axis.
        """
        names = self.mesh.mesh_dim_names or ()
        if tuple(name for name in names if name in self.axis_names) != self.axis_names:
            raise AxisError(
                f"fully_shard takes replicas as the outer axis of a mesh, but here {self.shard_axis!r} is outside"
                f" {self.replicate_axis!r}: make the mesh with {self.replicate_axis!r} first, or take"
                " replicate_mesh and shard_mesh one by one",
                axis_names=tuple(names),
            )
        return self.mesh[self.axis_names]


def normalize_dp_mode(mode: str) -> DataParallelMode:
    """The mode's own name: aliases are resolved, case and blanks do not matter.

    Example::

        normalize_dp_mode(" Hybrid_Shard ")   # "hsdp"

    Raises:
        ModeError: not a string, or no known mode.
    """
    if not isinstance(mode, str):
        raise ModeError(
            f"the data-parallel mode must be a string, {_CHOICES}; got {mode!r} ({type(mode).__name__})", mode=mode
        )
    known = _MODES.get("".join(mode.split()).lower())
    if known is None:
        raise ModeError(f"unknown data-parallel mode {mode!r}; choose {_CHOICES}", mode=mode)
    return known


def resolve_hsdp_degrees(world_size: int, shard: int | None = None, replicate: int | None = None) -> Degrees:
    """Both hsdp degrees from the world size and one or two of them.

    Args:
        world_size: number of ranks.
        shard: ranks that share one copy of the parameters; None: what ``replicate`` leaves.
        replicate: number of copies; None: what ``shard`` leaves.

    Example::

        resolve_hsdp_degrees(8, shard=4)   # Degrees(shard=4, replicate=2)

    Raises:
        DegreesError: both are missing, one is not positive or does not divide the world, or their product is not the world.
    """
    _check_counts(world_size, shard, replicate)
    for name, degree in (("shard", shard), ("replicate", replicate)):
        if degree is not None and world_size % degree:
            raise DegreesError(
                f"the {name} degree must divide the number of ranks, but {degree} does not divide {world_size}",
                world_size=world_size,
                shard=shard,
                replicate=replicate,
            )
    if shard is not None and replicate is not None:
        if shard * replicate != world_size:
            raise DegreesError(
                f"shard degree times replicate degree must be the number of ranks, but {shard} * {replicate} ="
                f" {shard * replicate}, not {world_size}; leave one out to have it derived",
                world_size=world_size,
                shard=shard,
                replicate=replicate,
            )
        return Degrees(shard=shard, replicate=replicate)
    if shard is not None:
        return Degrees(shard=shard, replicate=world_size // shard)
    if replicate is not None:
        return Degrees(shard=world_size // replicate, replicate=replicate)
    raise DegreesError(
        f"hsdp on {world_size} ranks needs a shard degree, a replicate degree, or both; got neither",
        world_size=world_size,
        shard=shard,
        replicate=replicate,
    )


def resolve_degrees(
    mode: DataParallelMode, world_size: int, *, shard: int | None = None, replicate: int | None = None
) -> Degrees:
    """Both degrees of any mode when data parallelism has all ranks for itself.

    Raises:
        DegreesError: a degree is given that the mode cannot have, or as :func:`resolve_hsdp_degrees`.
    """
    if mode == "hsdp":
        return resolve_hsdp_degrees(world_size, shard, replicate)
    _check_counts(world_size, shard, replicate)
    degrees = Degrees(shard=world_size, replicate=1) if mode == "fsdp" else Degrees(shard=1, replicate=world_size)
    for name, given, needed in (("shard", shard, degrees.shard), ("replicate", replicate, degrees.replicate)):
        if given not in (None, needed):
            raise DegreesError(
                f"mode {mode!r} on {world_size} ranks has {name} degree {needed}, but {given} was asked for;"
                " leave it out, or use mode 'hsdp' to have both shards and replicas",
                world_size=world_size,
                shard=shard,
                replicate=replicate,
            )
    return degrees


def _check_counts(world_size: int, shard: int | None, replicate: int | None) -> None:
    counts = (("number of ranks", world_size), ("shard degree", shard), ("replicate degree", replicate))
    for name, count in counts:
        if count is None and name != "number of ranks":
            continue
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise DegreesError(
                f"the {name} must be a positive integer, got {count!r}",
                world_size=world_size,
                shard=shard,
                replicate=replicate,
            )


def refuse_other_parallelism(*, tp_size: int, pp_size: int) -> None:
    """Refuse to divide all ranks among replicas and shards when tensor or pipeline parallelism has a claim on them.

    Raises:
        ExternalMeshError: a size is not 1.
    """
    if tp_size != 1 or pp_size != 1:
        raise ExternalMeshError(
            "without an external mesh every rank belongs to data parallelism, but tensor-parallel size"
            f" {tp_size} and pipeline-parallel size {pp_size} were asked for. Make a mesh with all the axes (for example"
            ' init_device_mesh(device, (pp, dp, tp), mesh_dim_names=("pp", "dp", "tp"))) and pass it to topology_from_mesh'
        )


def plan_world(mode: DataParallelMode, degrees: Degrees) -> tuple[MeshAxes, AxisPlan]:
    """The mesh to make when data parallelism has all ranks, and the plan on it."""
    names = {role: candidates[0] for role, candidates in CANDIDATES[mode].items()}
    axes = MeshAxes(names=tuple(names.values()), sizes=tuple(getattr(degrees, role) for role in names))
    return axes, AxisPlan(mode=mode, roles=RoleAxes(**names), degrees=degrees)


def declared_by_axes(axes: MeshAxes, *, named: RoleAxes) -> DeclaredSizes:
    """What a bare mesh says about itself by the names of its axes; ``dp`` alone says nothing."""
    roles = dedicated_axes(axes, named=named)
    return DeclaredSizes(replicate=_size(axes, roles.replicate), shard=_size(axes, roles.shard))


def reconcile(mode: DataParallelMode, declared: DeclaredSizes) -> tuple[DataParallelMode, str | None]:
    """The mode that fits the sizes, and what to warn of where it is another than the one asked for.

    Raises:
        ModeError: ddp where parameters are to be sharded.
    """
    replicate, shard = declared.replicate, declared.shard
    if mode == "fsdp" and replicate is not None and replicate > 1:
        return "hsdp", (
            f"mode 'fsdp' on a mesh that holds {replicate} replicas: using 'hsdp', so that gradients are also reduced"
            " across them. Ask for 'hsdp' to say so, or pass a mesh without a replicate axis"
        )
    if mode == "hsdp" and replicate == 1:
        return "fsdp", (
            "mode 'hsdp' on a mesh that holds one replica only: using 'fsdp'. Ask for 'fsdp' to say so, or pass a mesh"
            " with a replicate axis of 2 or more"
        )
    if mode == "ddp" and shard is not None and shard > 1:
        raise ModeError(
            f"mode 'ddp' keeps whole parameters on every rank, but the mesh shards them over {shard} ranks; use mode"
            f" {'hsdp' if replicate is not None and replicate > 1 else 'fsdp'!r}, or pass a mesh whose shard size is 1",
            mode=mode,
        )
    return mode, None


def plan_axes(mode: DataParallelMode, axes: MeshAxes, *, declared: DeclaredSizes | None, named: RoleAxes) -> AxisPlan:
    """The mode, axes and degrees of data parallelism on a mesh that is there already.

    Args:
        mode: the mode that was asked for.
        axes: the mesh's axes.
        declared: what is known about the mesh's replicas and shards; None: nothing, and then the mode stays as it is and
            axes that it does not use are nobody's business.
        named: axes that the caller chose instead of the candidates.

    Raises:
        ModeError: ddp where parameters are to be sharded.
        AxisError: an axis is missing, has another size than was declared, or would be left without a reduction.
    """
    warning = None
    if declared is not None:
        mode, warning = reconcile(mode, declared)
    try:
        roles = axes_for_mode(mode, axes, named=named)
    except AxisError as error:
        if warning is None:
            raise
        raise AxisError(
            f"{warning}. But {error}", axis_names=axes.names
        ) from None  # it is not the mode that was asked for
    _check_nothing_forgotten(mode, axes, roles, named.names + (data_axes(axes) if declared is not None else ()))
    if declared is not None:
        _check_declared(axes, roles, declared)
    degrees = Degrees(shard=_size(axes, roles.shard) or 1, replicate=_size(axes, roles.replicate) or 1)
    return AxisPlan(mode=mode, roles=roles, degrees=degrees, warning=warning)


def _check_declared(axes: MeshAxes, roles: RoleAxes, declared: DeclaredSizes) -> None:
    for role, name, size in (
        ("replicate", roles.replicate, declared.replicate),
        ("shard", roles.shard, declared.shard),
    ):
        if name is not None and size not in (None, axes.size(name)):
            raise AxisError(
                f"dp_{role}_size is {size}, but the mesh's {role} axis {name!r} has {axes.size(name)} ranks (axes {axes});"
                f" correct dp_{role}_size, or pass the mesh that it belongs to",
                axis_names=axes.names,
            )


def _check_nothing_forgotten(
    mode: DataParallelMode, axes: MeshAxes, roles: RoleAxes, candidates: tuple[str, ...]
) -> None:
    for name in candidates:
        if name not in roles.names and axes.size(name) > 1:
            raise AxisError(
                f"mode {mode!r} reduces gradients along {' and '.join(roles.names)} of the mesh {axes} only, so the"
                f" {axes.size(name)} ranks along {name!r} would drift apart. Pass a sub-mesh without that axis, or say which"
                " axes to use with replicate_axis=… and shard_axis=…",
                axis_names=axes.names,
            )


def _size(axes: MeshAxes, name: str | None) -> int | None:
    return None if name is None else axes.size(name)
