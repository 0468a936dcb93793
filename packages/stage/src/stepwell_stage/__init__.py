"""Pipeline stages, schedules and the executor that runs them."""

from __future__ import annotations

from stepwell_stage.plan._action import Action, Kind
from stepwell_stage.plan._costs import Costs, EdgeCost
from stepwell_stage.plan._lower import Plan, lower
from stepwell_stage.plan._prove import PlanProof, prove
from stepwell_stage.plan._schedule import Schedule
from stepwell_stage.plan._simulate import Simulation, simulate
from stepwell_stage.plan._timeline import Event, Timeline

__all__ = [
    "Action",
    "Costs",
    "EdgeCost",
    "Event",
    "Kind",
    "Plan",
    "PlanProof",
    "Schedule",
    "Simulation",
    "Timeline",
    "lower",
    "prove",
    "simulate",
]
