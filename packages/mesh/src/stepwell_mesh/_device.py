"""Which device type meshes are made for.

torch loads device back ends that are installed as plug-ins when it is imported itself; torch-npu is one. So where torch-npu
is installed, ``import torch`` alone imports it (unless ``TORCH_DEVICE_BACKEND_AUTOLOAD=0`` is set), and an NPU is then the
default here. This module imports it in one case only: when "npu" is asked for by name.
"""

from __future__ import annotations

import importlib
from typing import Final

import torch

from .exceptions import DeviceTypeError

_ACCELERATORS: Final = ("npu", "cuda", "xpu")


def default_device_type() -> str:
    """The accelerator that torch sees on this machine: ``npu``, ``cuda`` or ``xpu``; else ``cpu``.

    Other accelerators (``mps``, ``hpu``, …) count as none: pass their name where a device type is asked for.

    Example::

        init_device_mesh(default_device_type(), (2, 4), mesh_dim_names=("pp", "dp"))
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator.type if accelerator is not None and accelerator.type in _ACCELERATORS else "cpu"


def require_device_type(device_type: str) -> str:
    """The device type that was asked for, once it is certain that this machine has such a device.

    ``npu`` imports torch_npu.

    Args:
        device_type: a name as ``torch.device`` takes it, without an index.

    Raises:
        DeviceTypeError: no such type, it needs a package that is missing, or there is no such device.
    """
    if not isinstance(device_type, str) or not device_type.isalpha():
        raise DeviceTypeError(
            f'expected a device type such as "cpu" or "cuda", without an index, got {device_type!r}',
            device_type=device_type,
        )
    if device_type == "npu" and not hasattr(torch, "npu"):
        _import_torch_npu()
    try:
        torch.device(device_type)
    except RuntimeError as error:
        raise DeviceTypeError(
            f"torch knows no device type {device_type!r}; choose cpu, {', '.join(_ACCELERATORS)}, or import the package"
            " that brings it first",
            device_type=device_type,
        ) from error
    if not _available(device_type):
        raise DeviceTypeError(
            f"device type {device_type!r} was asked for, but torch sees no such device here; pass"
            f" {default_device_type()!r}, or leave it out to take that",
            device_type=device_type,
        )
    return device_type


def _import_torch_npu() -> None:
    try:
        importlib.import_module("torch_npu")
    except (ImportError, OSError) as error:  # OSError: the package is there, the driver's libraries are not
        raise DeviceTypeError(
            "device type 'npu' needs torch-npu (pip install 'stepwell[npu]') and Ascend's CANN libraries; importing"
            f" torch_npu failed: {error}",
            device_type="npu",
        ) from error


def _available(device_type: str) -> bool:
    try:
        return bool(torch.get_device_module(device_type).is_available())
    except (RuntimeError, AttributeError):  # a type without a module, such as "meta", holds no data anywhere
        return False
