"""A train step as one graph, and passes that make it data parallel."""

from __future__ import annotations

from ._plan import ParallelPlan, ResolvedPlan, shard

__all__ = ["ParallelPlan", "ResolvedPlan", "shard"]
