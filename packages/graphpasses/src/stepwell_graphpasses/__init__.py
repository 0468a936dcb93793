"""A train step as one graph, and passes that make it data parallel."""

from __future__ import annotations

from ._config import PassConfig
from ._plan import ParallelPlan, ResolvedPlan, shard

__all__ = ["ParallelPlan", "PassConfig", "ResolvedPlan", "shard"]
