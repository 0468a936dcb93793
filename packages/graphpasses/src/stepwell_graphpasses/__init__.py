"""A train step as one graph, and passes that make it data parallel."""

from __future__ import annotations

from ._compiler import GraphCompiler, SpecializationStats
from ._config import PassConfig
from ._graph import JointGraph
from ._pass import GraphPass, PassContext, PassContract
from ._pipeline import PassPipeline, PassReport
from ._plan import ParallelPlan, ResolvedPlan, shard
from ._table import Layout, Parameter, ParameterTable
from ._trace import trace
from ._variants import FULL, FULL_AFTER_NONE, FULL_AFTER_SCATTER, NONE, SCATTER, Variant
from .passes import DataParallelPass, default_passes

__all__ = [
    "FULL",
    "FULL_AFTER_NONE",
    "FULL_AFTER_SCATTER",
    "NONE",
    "SCATTER",
    "DataParallelPass",
    "GraphCompiler",
    "GraphPass",
    "JointGraph",
    "Layout",
    "ParallelPlan",
    "Parameter",
    "ParameterTable",
    "PassConfig",
    "PassContext",
    "PassContract",
    "PassPipeline",
    "PassReport",
    "ResolvedPlan",
    "SpecializationStats",
    "Variant",
    "default_passes",
    "shard",
    "trace",
]
