"""What a compiler is given: looked at, and refused in words, before anything is made of it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from stepwell_mesh import DataParallelTopology, default_device_type, topology_for_world, topology_from_mesh

from ._config import PassConfig
from ._plan import ParallelPlan
from .exceptions import ConfigError, GraphUsageError, ModelStateError


def check_kinds(**given: tuple[Any, Any, str]) -> None:
    """Refuse arguments of a wrong type.

    Args:
        given: for each argument its value, the types that it may have, and what it should be in words.

    Raises:
        ConfigError: one of them has another type.
    """
    for name, (value, kinds, words) in given.items():
        if not isinstance(value, kinds):
            raise ConfigError(f"{name} must be {words}; got {value!r}", field=name, value=value)


def check_model(model: Any) -> None:
    """Refuse what is no module, and modules around the one that has the parameters.

    Raises:
        ConfigError: it is no module.
        ModelStateError: it is wrapped.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model must be a torch.nn.Module; got {type(model).__name__}", field="model", value=model)
    for name, module in model.named_modules():
        where = f"module {name}" if name else "the model"
        if isinstance(module, DistributedDataParallel | DataParallel):
            raise ModelStateError(
                f"{where} is wrapped in {type(module).__name__}, which would reduce gradients too; give the model within,"
                " its .module"
            )
        if isinstance(module, torch.jit.ScriptModule):
            raise ModelStateError(
                f"{where} is a ScriptModule, which hides its code; give the model that it was made from"
            )
        if isinstance(getattr(module, "_orig_mod", None), nn.Module):
            raise ModelStateError(
                f"{where} was compiled by torch.compile, which captures it already; give the model that it was made from"
            )


def check_dims(given: Mapping[str, Sequence[int]] | None) -> dict[str, tuple[int, ...]]:
    """Dims by the name of their input.

    Raises:
        ConfigError: they are something else.
    """
    check_kinds(dynamic_arg_dims=(given, Mapping | None, "a mapping of input names to lists of dims, or None"))
    found: dict[str, tuple[int, ...]] = {}
    for name, dims in (given or {}).items():
        listed = tuple(dims) if isinstance(dims, Sequence) and not isinstance(dims, str) else ()
        if not listed or any(isinstance(dim, bool) or not isinstance(dim, int) for dim in listed):
            raise ConfigError(
                f"dynamic_arg_dims[{name!r}] must be a list of dims, such as [0]; got {dims!r}",
                field="dynamic_arg_dims",
                value=given,
            )
        found[name] = listed
    return found


def check_device(device: torch.device | str) -> torch.device:
    """The device, if this torch has it here: to capture for one that is not there ends the process.

    Raises:
        ConfigError: it has not.
    """
    try:
        found = torch.device(device)
        there = found.type == "cpu" or torch.get_device_module(found).is_available()
    except (RuntimeError, TypeError):
        there = False
    if not there:
        raise ConfigError(
            f"device {str(device)!r} is not available here; torch sees {_devices()}", field="device", value=device
        )
    return found


def _devices() -> str:
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return "cpu" if accelerator is None else f"cpu and {accelerator.type}"


def resolve_device(
    model: nn.Module, device: torch.device | str | None, topology: DataParallelTopology | None
) -> torch.device:
    """Where to train: as asked, else where the model is, else the default of the mesh or of torch.

    Raises:
        ConfigError: torch has no such device here.
    """
    if device is not None:
        return check_device(device)
    for tensor in (*model.parameters(), *model.buffers()):
        if not tensor.is_meta:
            return tensor.device
    return torch.device(topology.mesh.device_type if topology is not None else default_device_type())


def resolve_topology(config: PassConfig, mesh: Any) -> tuple[DataParallelTopology | None, PassConfig]:
    """The axes in effect (None with one rank), and the configuration with the degrees filled in.

    Raises:
        ConfigError: the mesh has other degrees than the configuration, or ranks that there should be do not know each other.
    """
    pp_size = config.pp_degree or (2 if config.pp_enabled else 1)
    if mesh is not None:
        topology = topology_from_mesh(mesh, config.dp_mode)
    elif (dist.is_available() and dist.is_initialized()) or config.tp_size != 1 or pp_size != 1:
        topology = topology_for_world(
            config.dp_mode,
            shard=config.fsdp_degree,
            replicate=config.dp_replicate_degree,
            tp_size=config.tp_size,
            pp_size=pp_size,
        )
    else:
        _refuse_missing_ranks(config)
        return None, config
    degrees = topology.degrees
    sizes = dict(zip(topology.mesh.mesh_dim_names or (), topology.mesh.shape, strict=False))
    for field, asked, found in (
        ("fsdp_degree", config.fsdp_degree, degrees.shard),
        ("dp_replicate_degree", config.dp_replicate_degree, degrees.replicate),
        # A part of a mesh does not say how large the axes are that it leaves out.
        ("tp_size", config.tp_size if config.tp_size > 1 and "tp" in sizes else None, sizes.get("tp")),
        ("pp_degree", config.pp_degree if "pp" in sizes else None, sizes.get("pp")),
    ):
        if asked is not None and asked != found:
            raise ConfigError(
                f"{field}={asked}, but the mesh has {found}; leave the field out, or pass another mesh",
                field=field,
                value=asked,
            )
    effective = config.evolve(
        dp_mode=topology.mode,
        fsdp_degree=degrees.shard,
        dp_replicate_degree=degrees.replicate,
    )
    return (topology if degrees.total > 1 else None), effective


def _refuse_missing_ranks(config: PassConfig) -> None:
    """Without a process group every rank would train a copy of its own.

    Raises:
        ConfigError: there should be several ranks, by the configuration or by how this one was launched.
    """
    advice = "torch.distributed is not initialised; call torch.distributed.init_process_group first"
    for field in ("fsdp_degree", "dp_replicate_degree"):
        if (asked := getattr(config, field) or 1) > 1:
            raise ConfigError(
                f"{field}={asked}, but {advice}, or leave the field out on one rank", field=field, value=asked
            )
    launched = os.environ.get("WORLD_SIZE", "1")
    if launched not in ("", "1") and config.fsdp_degree is None and config.dp_replicate_degree is None:
        field = "dp_replicate_degree" if config.dp_mode == "ddp" else "fsdp_degree"
        raise ConfigError(
            f"WORLD_SIZE={launched}, but {advice}. If each rank shall train a model of its own, set {field}=1",
            field=field,
            value=None,
        )


def check_config(config: Any, plan: Any) -> None:
    """Refuse a configuration or a plan that is none.

    Raises:
        ConfigError: they are something else.
    """
    check_kinds(
        config=(config, PassConfig | None, "a PassConfig, such as PassConfig(dp_mode='fsdp'), or None"),
        plan=(plan, ParallelPlan | None, "a ParallelPlan, such as shard('layers.*'), or None"),
    )


def check_call(sync: Any) -> None:
    """Refuse a step whose gradients could not be added to later, or that is told otherwise than by True or False.

    Raises:
        GraphUsageError: such a step.
    """
    if not isinstance(sync, bool):
        raise GraphUsageError(f"sync must be True or False; got {type(sync).__name__}: no input may have that name")
    if torch.is_inference_mode_enabled():
        raise GraphUsageError(
            "gradients made under torch.inference_mode() could not be added to later: leave it for forward_backward"
            " (evaluate may stay)"
        )
