"""Private names of torch that this layer uses, and nothing else does."""

from __future__ import annotations

from typing import Any, cast

from torch._C import _distributed_c10d
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

_registry: Any = _distributed_c10d  # newer versions want the names in a type of their own, which older ones do not have


def resolve_group(name: str) -> ProcessGroup | None:
    """The process group registered under a name; None where there is none, or it was freed.

    ``_resolve_process_group``: seen in torch 2.13, whose own DeviceMesh uses it; it raises RuntimeError for a name that is free.
    The registry is where the group argument of ``torch.ops._c10d_functional`` collectives is looked up. Without it no group can
    have a name of ours, and graph passes would have to write torch's own names, which differ from rank to rank, into graphs.
    """
    try:
        return cast(ProcessGroup, _registry._resolve_process_group(name))
    except RuntimeError:
        return None


def register_group(name: str, group: ProcessGroup) -> None:
    """Let the registry know the group under one more name; the registry does not keep it alive.

    ``_register_process_group``: seen in torch 2.13, whose own new_group uses it; it raises RuntimeError for a name in use, also
    where the group was freed. Without it: as :func:`resolve_group`.
    """
    _registry._register_process_group(name, group)


def unregister_group(name: str) -> None:
    """Free a name; nothing happens where it is free.

    ``_unregister_process_group``: seen in torch 2.13, whose own destroy_process_group uses it. Without it: as
    :func:`resolve_group`.
    """
    _registry._unregister_process_group(name)


def root_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh that a sub-mesh was sliced from; a mesh that was not sliced is its own root.

    ``DeviceMesh._get_root_mesh``: seen in torch 2.13. Without it every mesh counts as its own root, and a mesh cache forgets a
    sub-mesh as soon as that object is dropped, although its root lives on.
    """
    get_root = getattr(mesh, "_get_root_mesh", None)
    return mesh if get_root is None else get_root()
