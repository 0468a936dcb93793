"""Every private torch name that this layer uses, with the versions it was seen in and what happens without it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor, placement_types

__all__ = [
    "LOADED_LATE",
    "AsyncCollectiveTensor",
    "FakeTensor",
    "StridedShard",
    "container_classes",
    "container_rule",
    "forget_meshes",
]

# Seen in 2.11 to 2.14. Without it, fake tensors are refused like any other tensor subclass.
try:
    from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
except ImportError:

    class FakeTensor(torch.Tensor):  # type: ignore[no-redef]
        """Stands for a class that this torch does not have; no tensor is an instance."""


# Seen in 2.11 to 2.14. Without it, un-waited results of collectives (what tensor-parallel modules return) are
# refused like any other tensor subclass.
try:
    from torch.distributed._functional_collectives import AsyncCollectiveTensor as AsyncCollectiveTensor
except ImportError:

    class AsyncCollectiveTensor(torch.Tensor):  # type: ignore[no-redef]
        """Stands for a class that this torch does not have; no tensor is an instance."""


# Seen in 2.11 to 2.14. Without them, classes registered with torch's pytree are refused like any unknown class.
try:
    from torch.utils._pytree import SUPPORTED_NODES as _registered
    from torch.utils._pytree import is_constant_class as _is_constant
except ImportError:
    _registered = {}

# Seen in 2.11 to 2.14. None without it: such placements then do not exist, and bytes that name one are refused.
StridedShard: Any = getattr(placement_types, "_StridedShard", None)


# Modules that torch imports by itself at the first DTensor, DDP or compiled module, which takes seconds: loaded once by the
# server that workers are forked from. Seen in 2.13; one that is not there is passed over.
LOADED_LATE = ("torch._dynamo", "torch.distributed.tensor")


def forget_meshes() -> None:
    """Make DTensor operators forget the meshes they have met. Call it after torch.distributed was initialised anew.

    torch remembers an operator's result by shapes and mesh, and takes two meshes over the same ranks for one. So in a process
    that destroyed its process groups and made them again, a result may bear the mesh, and the groups, of before. What is
    forgotten costs about a millisecond for each operator that runs again.

    ``DTensor._op_dispatcher`` and ``torch._C._clear_DTensor_sharding_propagator_cache``: seen in 2.13, which has a memory in
    Python and one beside it. (``torch.distributed.tensor.debug`` has a function for both, but cannot be imported without NumPy.)
    Without them, a process that makes its groups anew may meet the old ones in results of DTensor operators.
    """
    propagator = getattr(getattr(DTensor, "_op_dispatcher", None), "sharding_propagator", None)
    remembered = getattr(propagator, "propagate_op_sharding", None)
    for clear in (
        getattr(remembered, "cache_clear", None),
        getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", None),
    ):
        if clear is not None:
            clear()


def container_rule(cls: type) -> Any:
    """How torch's pytree handles a container: a record with ``flatten_fn`` and ``unflatten_fn``, or None if it does not.

    A class that is registered as a constant contains nothing as far as pytree knows: it has no rule.
    """
    rule = _registered.get(cls)
    return None if rule is None or _is_constant(cls) else rule


def container_classes(matches: Callable[[type], bool]) -> tuple[type, ...]:
    """Every class that is registered with torch's pytree and matches, oldest first."""
    registered = tuple(_registered)  # another rank's thread may register one meanwhile
    return tuple(cls for cls in registered if isinstance(cls, type) and matches(cls))
