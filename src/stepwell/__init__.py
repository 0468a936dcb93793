"""Pipeline and graph data parallelism for PyTorch, in layers."""

from __future__ import annotations

from stepwell._gather import gather
from stepwell._graph import graph_pipeline
from stepwell._launch import World, launch
from stepwell._pipeline import Pipeline, StepResult, pipeline

__all__ = ["Pipeline", "StepResult", "World", "gather", "graph_pipeline", "launch", "pipeline"]
