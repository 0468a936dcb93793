"""Every private torch name that this layer uses, with the versions it was seen in and what happens without it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import placement_types

__all__ = ["AsyncCollectiveTensor", "FakeTensor", "StridedShard", "registered_containers"]

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


# Seen in 2.11 to 2.14. Without it, classes registered with torch's pytree are refused like any unknown class.
try:
    from torch.utils._pytree import SUPPORTED_NODES as _registered
except ImportError:
    _registered = {}

# Seen in 2.11 to 2.14. None without it: such placements then do not exist, and bytes that name one are refused.
StridedShard: Any = getattr(placement_types, "_StridedShard", None)


def registered_containers() -> Mapping[type, Any]:
    """Containers registered with torch's pytree at this moment: class → record with ``flatten_fn`` and ``unflatten_fn``."""
    return _registered
