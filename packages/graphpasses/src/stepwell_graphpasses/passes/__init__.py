"""The passes, one file each."""

from __future__ import annotations

from ._data_parallel import DataParallelPass
from ._default import default_passes

__all__ = ["DataParallelPass", "default_passes"]
