"""A train step as one graph, and passes that make it data parallel."""

from __future__ import annotations

from ._compiler import GraphCompiler
from ._config import PassConfig
from ._cut import GraphStages, split_stages
from ._graph import JointGraph
from ._pass import GraphPass, PassContext, PassContract
from ._pipeline import PassPipeline, PassReport
from ._plan import ParallelPlan, ResolvedPlan, shard
from ._program import GraphProgram
from ._sizes import SpecializationStats
from ._stage_graph import CutStage
from ._stages import automatic_owners, planned_owners
from ._table import Layout, Parameter, ParameterTable
from ._trace import trace
from ._variants import FULL, FULL_AFTER_NONE, FULL_AFTER_SCATTER, NONE, SCATTER, Variant
from ._verify import Verification, verify
from .passes import (
    BucketPass,
    CostModel,
    Crossing,
    DataParallelPass,
    DeadCollectivePass,
    OverlapPass,
    Piece,
    RematPass,
    ReshardPass,
    RooflineCosts,
    SplitGraph,
    SplitPass,
    default_passes,
    pieces,
)

__all__ = [
    "FULL",
    "FULL_AFTER_NONE",
    "FULL_AFTER_SCATTER",
    "NONE",
    "SCATTER",
    "BucketPass",
    "CostModel",
    "Crossing",
    "CutStage",
    "DataParallelPass",
    "DeadCollectivePass",
    "GraphCompiler",
    "GraphPass",
    "GraphProgram",
    "GraphStages",
    "JointGraph",
    "Layout",
    "OverlapPass",
    "ParallelPlan",
    "Parameter",
    "ParameterTable",
    "PassConfig",
    "PassContext",
    "PassContract",
    "PassPipeline",
    "PassReport",
    "Piece",
    "RematPass",
    "ReshardPass",
    "ResolvedPlan",
    "RooflineCosts",
    "SpecializationStats",
    "SplitGraph",
    "SplitPass",
    "Variant",
    "Verification",
    "automatic_owners",
    "default_passes",
    "pieces",
    "planned_owners",
    "shard",
    "split_stages",
    "trace",
    "verify",
]
