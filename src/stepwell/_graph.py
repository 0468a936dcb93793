"""Joins the stages of a graph, a schedule and a world into something that trains."""

from __future__ import annotations

from typing import Any

from torch import nn

from stepwell_graphpasses import GraphStages, ParallelPlan, PassConfig
from stepwell_p2p import Wire
from stepwell_stage import Executor, LossWeights, PipelineStage, Schedule, tie

from ._launch import World
from ._pipeline import Pipeline, make_schedule
from .exceptions import PipelineError


def graph_pipeline(
    stages: GraphStages,
    model: nn.Module,
    world: World,
    *,
    schedule: str | Schedule = "1f1b",
    microbatches: int | None = None,
    loss_weights: LossWeights = "mean",
    config: PassConfig | None = None,
    plan: ParallelPlan | None = None,
    mesh: Any = None,
    trace: bool = False,
) -> Pipeline:
    """A pipeline of the stages that a train step's graph was cut into, over the ranks of ``world``.

    Each stage runs as graphs, with data parallelism inside where there is a mesh. The loss is within: all ranks pass the inputs
    of the step to :meth:`Pipeline.step`, by name, and no target.

    Example::

        step = trace(model, train_fn, {"x": x[:2], "y": y[:2]})
        pipe = graph_pipeline(split_stages(step, automatic_owners(model, 2)), model, world, microbatches=4)
        loss = pipe.step(x=x, y=y).loss

    Args:
        stages: as :func:`stepwell_graphpasses.split_stages` made them, as many as the schedule has.
        model: the model that the step was captured from.
        world: which rank of the pipeline this is; see :func:`stepwell.launch`.
        schedule: as in :func:`stepwell.pipeline`.
        microbatches: likewise.
        loss_weights: likewise.
        config: how parameters are sharded and reduced over the ranks of ``mesh``; see :class:`stepwell_graphpasses.GraphProgram`.
        plan: which parameters to shard; None: all.
        mesh: the axes of data parallelism, a part of the whole mesh.
        trace: as in :func:`stepwell.pipeline`.

    Raises:
        PipelineError: the stages, the schedule and the number of ranks do not fit together.
        stepwell_graphpasses.exceptions.GraphUsageError: configuration, plan or model do not fit the stages.
    """
    made = make_schedule(schedule, world.size, microbatches)
    if len(stages) != made.placement.num_stages:
        raise PipelineError(
            f"{made.name} on {world.size} ranks has {made.placement.num_stages} stages, but the step was cut into {len(stages)}"
        )
    wires = [Wire(*wire) for wire in stages.wires]
    own = []
    for index in made.placement.stages_of(world.rank):
        program = stages.program(index, model, config, plan, mesh=mesh)
        stage = PipelineStage(program, index, len(stages), world.device, wires=wires)
        stage.submodule = program.module  # what ties, norms, checkpoints and optimizers go by
        own.append(stage)
    executor = Executor(
        own, made, stages.loss_fn, transport=world.transport, loss_weights=loss_weights, share_loss=True, trace=trace
    )
    if stages.tied:
        tie(executor, stages.tied)
    return Pipeline(executor, world)
