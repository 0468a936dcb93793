"""Pipeline stages, schedules and the executor that runs them."""

from __future__ import annotations

from stepwell_stage.plan._action import Action, Kind
from stepwell_stage.plan._lower import Plan, lower
from stepwell_stage.plan._schedule import Schedule

__all__ = ["Action", "Kind", "Plan", "Schedule", "lower"]
