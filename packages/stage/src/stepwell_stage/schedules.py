"""Schedules: pure functions from sizes to :class:`stepwell_stage.Schedule`.

``BY_NAME`` maps the names that command lines use to those that take ``(num_ranks, num_microbatches)``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from stepwell_stage.plan._schedule import Schedule
from stepwell_stage.plan.schedules._forward_only import forward_only
from stepwell_stage.plan.schedules._gpipe import gpipe
from stepwell_stage.plan.schedules._one_f_one_b import one_f_one_b

__all__ = ["BY_NAME", "forward_only", "gpipe", "one_f_one_b"]

BY_NAME: Mapping[str, Callable[[int, int], Schedule]] = MappingProxyType({"gpipe": gpipe, "1f1b": one_f_one_b})
