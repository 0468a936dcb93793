"""The parameter table: what each parameter of a model is called, looks like, and how it is laid out over ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ._plan import ParallelPlan, require_match
from .exceptions import ModelStateError

if TYPE_CHECKING:
    from ._config import PassConfig


def shard_rows(rows: int, degree: int) -> tuple[int, ...]:
    """Rows that each of ``degree`` ranks holds: those of ``chunk``, and none past the data.

    Example::

        shard_rows(7, 2)   # (4, 3)
        shard_rows(3, 4)   # (1, 1, 1, 0)
    """
    step = -(-rows // degree)
    return tuple(min(max(rows - rank * step, 0), step) for rank in range(degree))


@attrs.frozen(eq=False)
class TensorParallel:
    """How a parameter is laid out over ranks before data parallelism touches it.

    Attributes:
        mesh: the device mesh of its DTensor.
        placements: one for each axis of that mesh.
        shape: its global shape.
        stride: its global stride.
    """

    mesh: Any
    placements: tuple[Any, ...]
    shape: tuple[int, ...]
    stride: tuple[int, ...]


@attrs.frozen
class Parameter:
    """One parameter, whatever the number of its names.

    Attributes:
        name: its first name.
        aliases: its other names (tied weights).
        shape: its whole shape; with tensor parallelism this rank's part of it.
        dtype: as it is stored, updated and checkpointed.
        compute_dtype: as the step uses it.
        trainable: whether it wants a gradient.
        tensor_parallel: its layout over the other axes, where it has one.
        stride: its stride where it is not contiguous; else None.
    """

    name: str
    aliases: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    compute_dtype: torch.dtype
    trainable: bool
    tensor_parallel: TensorParallel | None = attrs.field(default=None, eq=False)
    stride: tuple[int, ...] | None = None

    def empty(self, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory laid out like the parameter."""
        if self.stride is None:
            return torch.empty(self.shape, dtype=dtype, device=device)
        return torch.empty_strided(self.shape, self.stride, dtype=dtype, device=device)

    @property
    def names(self) -> tuple[str, ...]:
        """All names, the canonical one first."""
        return (self.name, *self.aliases)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return torch.Size(self.shape).numel()


@attrs.frozen
class ParameterTable:
    """All parameters of one model in the order of ``named_parameters``; iterable, and indexed by any name."""

    parameters: tuple[Parameter, ...]
    _by_name: Mapping[str, Parameter] = attrs.field(init=False, eq=False, repr=False)

    def __attrs_post_init__(self) -> None:
        index = {name: parameter for parameter in self.parameters for name in parameter.names}
        object.__setattr__(self, "_by_name", index)

    def __iter__(self) -> Iterator[Parameter]:
        return iter(self.parameters)

    def __len__(self) -> int:
        return len(self.parameters)

    def __getitem__(self, name: str) -> Parameter:
        return self._by_name[name]

    @property
    def names(self) -> tuple[str, ...]:
        """Canonical names."""
        return tuple(parameter.name for parameter in self.parameters)

    def with_trainable(self, trainable: Mapping[str, bool]) -> ParameterTable:
        """The same table after some parameters were frozen or unfrozen."""
        return ParameterTable(tuple(attrs.evolve(p, trainable=trainable.get(p.name, p.trainable)) for p in self))

    def contiguous(self) -> ParameterTable:
        """The same table after every parameter was copied to memory without gaps, as shards are."""
        return ParameterTable(tuple(attrs.evolve(p, stride=None) for p in self))


def names_by_tensor(named: Sequence[tuple[str, torch.Tensor]]) -> list[tuple[torch.Tensor, tuple[str, ...]]]:
    """Each tensor once, with all of its names, in order of first appearance."""
    found: dict[int, tuple[torch.Tensor, list[str]]] = {}
    for name, tensor in named:
        found.setdefault(id(tensor), (tensor, []))[1].append(name)
    return [(tensor, tuple(names)) for tensor, names in found.values()]


def parameter_table(model: nn.Module, *, param_dtype: torch.dtype | None = None) -> ParameterTable:
    """The table of a live model.

    Args:
        model: parameters may be on the meta device, tied, frozen, or DTensors of tensor parallelism.
        param_dtype: dtype in which the step uses floating-point parameters; None: the stored one.

    Raises:
        ModelStateError: a parameter of a lazy module has no shape yet.
    """
    entries = []
    for tensor, names in names_by_tensor(list(model.named_parameters(remove_duplicate=False))):
        if isinstance(tensor, nn.parameter.UninitializedParameter):
            raise ModelStateError(f"parameter {names[0]} has no shape yet; call the lazy module once before compiling")
        parallel, local = None, tensor.detach()
        if isinstance(local, DTensor):
            parallel = TensorParallel(
                local.device_mesh, tuple(local.placements), tuple(local.shape), tuple(local.stride())
            )
            local = local.to_local()
        casts = param_dtype is not None and tensor.is_floating_point()
        entries.append(
            Parameter(
                name=names[0],
                aliases=names[1:],
                shape=tuple(local.shape),
                dtype=tensor.dtype,
                compute_dtype=param_dtype if casts and param_dtype is not None else tensor.dtype,
                trainable=tensor.requires_grad,
                tensor_parallel=parallel,
                stride=None if local.is_contiguous() else tuple(local.stride()),
            )
        )
    return ParameterTable(tuple(entries))


@attrs.frozen
class Layout:
    """How one parameter lies on the ranks of the shard axis.

    Attributes:
        unit: the module (or parameter) that the plan named; itself where the plan leaves it whole.
        rows: rows of dim 0 per rank where it is sharded; empty where every rank holds all of it.
        reason: why, in words.
    """

    unit: str
    rows: tuple[int, ...]
    reason: str

    @property
    def sharded(self) -> bool:
        """Whether ranks hold different rows."""
        return bool(self.rows)

    @property
    def padded_rows(self) -> int:
        """Rows of each rank's part inside a collective."""
        return self.rows[0]

    @property
    def padded(self) -> bool:
        """Whether some rank's part is filled up inside collectives."""
        return len(set(self.rows)) > 1


def plan_layouts(
    table: ParameterTable, plan: ParallelPlan, config: PassConfig, *, degree: int, modules: Sequence[str] = ()
) -> dict[str, Layout]:
    """Decide for every parameter whether and how it is sharded over ``degree`` ranks.

    Raises:
        PlanError: a pattern of the plan, or of ``reshard_after_forward``, names nothing.
    """
    everything = [name for parameter in table for name in parameter.names]
    resolved = plan.resolve(everything, modules=modules)
    if not isinstance(config.reshard_after_forward, bool):
        require_match(config.reshard_after_forward, everything, what="reshard_after_forward pattern")
    layouts = {}
    for parameter in table:
        planned = [name for name in parameter.names if name in resolved.units]
        unit = resolved.units[planned[0]] if planned else parameter.name
        rows: tuple[int, ...] = ()
        if config.dp_mode == "ddp":
            reason = "replicated: ddp keeps every parameter whole"
        elif not planned:
            reason = "replicated: no pattern of the plan covers it"
        elif not parameter.shape:
            reason = "replicated: a scalar has no rows to shard"
        elif parameter.numel == 0:
            reason = "replicated: it has no elements"
        elif parameter.numel < config.min_shard_numel:
            reason = f"replicated: {parameter.numel} elements, below min_shard_numel={config.min_shard_numel}"
        elif degree == 1:
            reason = "whole: the shard degree is 1"
        else:
            rows = shard_rows(parameter.shape[0], degree)
            reason = f"sharded by {unit!r} of the plan"
            if len(set(rows)) > 1:
                reason += (
                    f"; {parameter.shape[0]} rows on {degree} ranks are {rows}, padded to {rows[0]} in collectives"
                )
        layouts[parameter.name] = Layout(unit, rows, reason)
    return layouts
