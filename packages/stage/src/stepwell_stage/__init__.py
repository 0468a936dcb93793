"""Pipeline stages, schedules and the executor that runs them."""

from __future__ import annotations

from stepwell_stage.plan._action import Action, Kind
from stepwell_stage.plan._costs import Costs, CustomCost, EdgeCost
from stepwell_stage.plan._lower import Plan, lower
from stepwell_stage.plan._perfetto import from_perfetto, to_perfetto
from stepwell_stage.plan._png import to_png
from stepwell_stage.plan._prove import PlanProof, prove
from stepwell_stage.plan._schedule import Schedule
from stepwell_stage.plan._search import Layer, PlanChoice, PlanSearch, plan_search
from stepwell_stage.plan._simulate import Simulation, simulate
from stepwell_stage.plan._svg import to_svg
from stepwell_stage.plan._timeline import Event, Timeline
from stepwell_stage.run._backward import stage_backward, stage_backward_input, stage_backward_weight
from stepwell_stage.run._bind import ActionCall
from stepwell_stage.run._chunks import TensorChunkSpec, merge_chunks, split_args_kwargs_into_chunks
from stepwell_stage.run._executor import Executor
from stepwell_stage.run._graph_stage import build_stage
from stepwell_stage.run._loss import LossWeights
from stepwell_stage.run._measure import measure_costs
from stepwell_stage.run._norm import clip_grad_norm_
from stepwell_stage.run._profile import profile_stages
from stepwell_stage.run._program import EagerProgram, StageProgram
from stepwell_stage.run._sequential import SequentialSplit, split_sequential
from stepwell_stage.run._stage import PipelineStage
from stepwell_stage.run._state import load_optimizer_state_dict, load_state_dict, optimizer_state_dict, state_dict
from stepwell_stage.run._tie import Tie, TiedGroup, tie
from stepwell_stage.run._torch_schedules import (
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
    get_schedule_class,
)
from stepwell_stage.split._split import ModelSplit, split

__all__ = [
    "Action",
    "ActionCall",
    "Costs",
    "CustomCost",
    "EagerProgram",
    "EdgeCost",
    "Event",
    "Executor",
    "Kind",
    "Layer",
    "LossWeights",
    "ModelSplit",
    "PipelineScheduleMulti",
    "PipelineScheduleSingle",
    "PipelineStage",
    "Plan",
    "PlanChoice",
    "PlanProof",
    "PlanSearch",
    "Schedule",
    "Schedule1F1B",
    "ScheduleDualPipeV",
    "ScheduleGPipe",
    "ScheduleInterleaved1F1B",
    "ScheduleInterleavedZeroBubble",
    "ScheduleLoopedBFS",
    "ScheduleZBVZeroBubble",
    "SequentialSplit",
    "Simulation",
    "StageProgram",
    "TensorChunkSpec",
    "Tie",
    "TiedGroup",
    "Timeline",
    "build_stage",
    "clip_grad_norm_",
    "from_perfetto",
    "get_schedule_class",
    "load_optimizer_state_dict",
    "load_state_dict",
    "lower",
    "measure_costs",
    "merge_chunks",
    "optimizer_state_dict",
    "plan_search",
    "profile_stages",
    "prove",
    "simulate",
    "split",
    "split_args_kwargs_into_chunks",
    "split_sequential",
    "stage_backward",
    "stage_backward_input",
    "stage_backward_weight",
    "state_dict",
    "tie",
    "to_perfetto",
    "to_png",
    "to_svg",
]
