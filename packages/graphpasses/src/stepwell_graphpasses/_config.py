"""What the passes shall do: one frozen record, checked when it is made."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import attrs
import torch

from stepwell_mesh import normalize_dp_mode
from stepwell_mesh.exceptions import ModeError

from ._plan import check_patterns, last_match
from .exceptions import ConfigError, PlanError

Reduce = Literal["avg", "sum"] | float
"""How gradients of W ranks become one: their mean, their sum, or their sum divided by a factor."""


def _mode(value: Any) -> str:
    try:
        return normalize_dp_mode(value)
    except ModeError as error:
        raise ConfigError(str(error), field="dp_mode", value=value) from error


def _dtype(value: Any, field: attrs.Attribute[Any]) -> torch.dtype | None:
    if isinstance(value, str):
        value = getattr(torch, value.removeprefix("torch."), value)
    if value is None or (isinstance(value, torch.dtype) and value.is_floating_point):
        return value
    raise ConfigError(
        f"{field.name} must be a floating-point torch.dtype, its name, or None; got {value!r}",
        field=field.name,
        value=value,
    )


def _reshard(value: Any) -> Any:
    return tuple(value.items()) if isinstance(value, Mapping) else value


def _flag(config: PassConfig, field: attrs.Attribute[Any], value: Any) -> None:
    if not isinstance(value, bool):
        raise ConfigError(f"{field.name} must be True or False; got {value!r}", field=field.name, value=value)


def _count(lowest: int, *, optional: bool) -> Any:
    def check(config: PassConfig, field: attrs.Attribute[Any], value: Any) -> None:
        if optional and value is None:
            return
        if isinstance(value, bool) or not isinstance(value, int) or value < lowest:
            choices = f"a whole number from {lowest} up" + (" or None" if optional else "")
            raise ConfigError(f"{field.name} must be {choices}; got {value!r}", field=field.name, value=value)

    return check


def _choice(*choices: str) -> Any:
    def check(config: PassConfig, field: attrs.Attribute[Any], value: Any) -> None:
        if value not in choices:
            names = ", ".join(map(repr, choices))
            raise ConfigError(f"{field.name} must be one of {names}; got {value!r}", field=field.name, value=value)

    return check


def _check_reshard(config: PassConfig, field: attrs.Attribute[Any], value: Any) -> None:
    if isinstance(value, bool):
        return
    if isinstance(value, tuple) and all(isinstance(k, str) and isinstance(v, bool) for k, v in value):
        try:
            check_patterns(tuple(pattern for pattern, _ in value), field.name)
        except PlanError as error:
            raise ConfigError(str(error), field=field.name, value=value) from error
    else:
        raise ConfigError(
            "reshard_after_forward must be True, False, or a mapping of module patterns to True or False;"
            f" got {dict(value) if isinstance(value, tuple) else value!r}",
            field=field.name,
            value=value,
        )


def _check_reduce(config: PassConfig, field: attrs.Attribute[Any], value: Any) -> None:
    if value in ("avg", "sum"):
        return
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or value <= 0:
        raise ConfigError(
            f"reduce must be 'avg', 'sum', or a positive number to divide the sum by; got {value!r}",
            field=field.name,
            value=value,
        )


def _check_mb(config: PassConfig, field: attrs.Attribute[Any], value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ConfigError(f"bucket_mb must be a positive number of MiB; got {value!r}", field=field.name, value=value)


def _check_schedule(config: PassConfig, field: attrs.Attribute[Any], value: Any) -> None:
    if not isinstance(value, str) or not value.strip():
        raise ConfigError(f"pp_schedule must be the name of a schedule; got {value!r}", field=field.name, value=value)


@attrs.frozen(kw_only=True)
class PassConfig:
    """How one train step is made data parallel. Checked when it is made and on :meth:`evolve`.

    Example::

        PassConfig(dp_mode="hsdp", fsdp_degree=4, param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

    Attributes:
        dp_mode: ``fsdp``, ``ddp`` or ``hsdp``; ``fully_shard``, ``replicate`` and ``hybrid_shard`` are aliases.
        fsdp_degree: ranks that share one copy of the parameters; None: what the world leaves.
        dp_replicate_degree: copies of the parameters; None: what the world leaves.
        tp_size: ranks of tensor parallelism; more than 1 needs an external mesh.
        pp_enabled: whether the step is cut into pipeline stages; needs an external mesh.
        pp_degree: number of stages; None: the size of the mesh's pipeline axis.
        pp_microbatch_size: samples in one microbatch.
        pp_schedule: name of the pipeline schedule.
        reshard_after_forward: whether a gathered parameter is freed after forward and gathered again for backward: for all, or
            per module pattern (the last pattern that covers a parameter decides; where none does it is resharded).
        param_dtype: dtype of parameters (and of floating-point module inputs) inside the step; None: as they are stored.
        reduce_dtype: dtype in which gradients are reduced and accumulated; None: the gradient's own.
        reduce: ``avg``, ``sum``, or a factor f: the sum divided by f, once over both axes of hsdp.
        bucket_by: what one collective carries: the parameters of one ``module`` of the plan, as many as ``bytes`` allow, or
            ``none``: one each.
        bucket_mb: most MiB in one bucket.
        prefetch: how many buckets ahead of their first use gathers are issued; 0: none.
        min_shard_numel: parameters with fewer elements stay whole on every rank, and are reduced.
        unused: gradient of a parameter that the step does not use: ``none`` as in eager, or ``zeros`` on every rank.
        grad_sync: what a microbatch under ``no_sync`` does: ``none`` keeps whole gradients; ``scatter`` reduces them on the
            shard axis each time and keeps shards (hsdp: one all-reduce at the end).
        pass_backend: whose bucketing and overlap: ``stepwell``, or ``torch``: the passes of torch's inductor, which are
            private to it and may be missing from another torch; the compiler then says so before it does anything.

    Raises:
        ConfigError: a field is wrong, alone or together with another.
    """

    dp_mode: str = attrs.field(default="fsdp", converter=_mode)
    fsdp_degree: int | None = attrs.field(default=None, validator=_count(1, optional=True))
    dp_replicate_degree: int | None = attrs.field(default=None, validator=_count(1, optional=True))
    tp_size: int = attrs.field(default=1, validator=_count(1, optional=False))
    pp_enabled: bool = attrs.field(default=False, validator=_flag)
    pp_degree: int | None = attrs.field(default=None, validator=_count(1, optional=True))
    pp_microbatch_size: int = attrs.field(default=1, validator=_count(1, optional=False))
    pp_schedule: str = attrs.field(default="gpipe", validator=_check_schedule)
    reshard_after_forward: bool | tuple[tuple[str, bool], ...] = attrs.field(
        default=True, converter=_reshard, validator=_check_reshard
    )
    param_dtype: torch.dtype | None = attrs.field(
        default=None,
        converter=attrs.Converter(_dtype, takes_field=True),  # type: ignore[misc]
    )
    reduce_dtype: torch.dtype | None = attrs.field(
        default=None,
        converter=attrs.Converter(_dtype, takes_field=True),  # type: ignore[misc]
    )
    reduce: Reduce = attrs.field(default="avg", validator=_check_reduce)
    bucket_by: Literal["module", "bytes", "none"] = attrs.field(
        default="module", validator=_choice("module", "bytes", "none")
    )
    bucket_mb: float = attrs.field(default=25.0, validator=_check_mb)
    prefetch: int = attrs.field(default=1, validator=_count(0, optional=False))
    min_shard_numel: int = attrs.field(default=0, validator=_count(0, optional=False))
    unused: Literal["none", "zeros"] = attrs.field(default="none", validator=_choice("none", "zeros"))
    grad_sync: Literal["none", "scatter"] = attrs.field(default="none", validator=_choice("none", "scatter"))
    pass_backend: Literal["stepwell", "torch"] = attrs.field(default="stepwell", validator=_choice("stepwell", "torch"))

    def __attrs_post_init__(self) -> None:
        if self.dp_mode == "ddp":
            if (self.fsdp_degree or 1) != 1:
                raise ConfigError(
                    f"ddp shards nothing, so fsdp_degree must be None or 1; got {self.fsdp_degree} (hsdp does both)",
                    field="fsdp_degree",
                    value=self.fsdp_degree,
                )
            if self.grad_sync == "scatter":
                raise ConfigError(
                    "grad_sync='scatter' keeps shards of gradients, and ddp has none; use 'none', fsdp or hsdp",
                    field="grad_sync",
                    value=self.grad_sync,
                )
        if self.dp_mode == "fsdp" and (self.dp_replicate_degree or 1) != 1:
            raise ConfigError(
                f"fsdp replicates nothing, so dp_replicate_degree must be None or 1; got {self.dp_replicate_degree} (use hsdp)",
                field="dp_replicate_degree",
                value=self.dp_replicate_degree,
            )
        if not self.pp_enabled and (self.pp_degree or 1) != 1:
            raise ConfigError(
                f"pp_degree={self.pp_degree} without pp_enabled=True; set it, or leave pp_degree out",
                field="pp_degree",
                value=self.pp_degree,
            )

    def evolve(self, **changes: Any) -> PassConfig:
        """A copy with some fields changed, checked again.

        Raises:
            ConfigError: an unknown field, or a wrong value.
        """
        names = {field.name for field in attrs.fields(PassConfig)}
        for name in changes:
            if name not in names:
                raise ConfigError(
                    f"PassConfig has no field {name!r}; it has {', '.join(sorted(names))}",
                    field=name,
                    value=changes[name],
                )
        return attrs.evolve(self, **changes)

    def reshards(self, parameter: str) -> bool:
        """Whether a gathered parameter is freed after forward."""
        if isinstance(self.reshard_after_forward, bool):
            return self.reshard_after_forward
        answer = last_match(self.reshard_after_forward, parameter)
        return True if answer is None else answer
