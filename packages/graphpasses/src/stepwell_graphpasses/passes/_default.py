"""Which passes a configuration asks for, in which order."""

from __future__ import annotations

from .._config import PassConfig
from .._pass import GraphPass
from ._data_parallel import DataParallelPass


def default_passes(config: PassConfig) -> tuple[GraphPass, ...]:
    """The passes for a configuration, in an order that their contracts allow."""
    return (DataParallelPass(),)
