"""Schedules: pure functions from sizes to :class:`stepwell_stage.Schedule`.

``BY_NAME`` maps the names that command lines use to those that take ``(num_ranks, num_microbatches)``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from stepwell_stage.plan._auto import zero_bubble
from stepwell_stage.plan._csv import from_csv, to_csv
from stepwell_stage.plan._schedule import Schedule
from stepwell_stage.plan.schedules._custom import custom
from stepwell_stage.plan.schedules._dualpipe_v import dualpipe_v
from stepwell_stage.plan.schedules._forward_only import forward_only
from stepwell_stage.plan.schedules._gpipe import gpipe
from stepwell_stage.plan.schedules._interleaved_1f1b import interleaved_1f1b
from stepwell_stage.plan.schedules._looped_bfs import looped_bfs
from stepwell_stage.plan.schedules._one_f_one_b import one_f_one_b
from stepwell_stage.plan.schedules._zbv import zbv
from stepwell_stage.plan.schedules._zero_bubble import interleaved_zero_bubble, zb_h1

__all__ = [
    "BY_NAME",
    "custom",
    "dualpipe_v",
    "forward_only",
    "from_csv",
    "gpipe",
    "interleaved_1f1b",
    "interleaved_zero_bubble",
    "looped_bfs",
    "one_f_one_b",
    "to_csv",
    "zb_h1",
    "zbv",
    "zero_bubble",
]

BY_NAME: Mapping[str, Callable[[int, int], Schedule]] = MappingProxyType(
    {
        "gpipe": gpipe,
        "1f1b": one_f_one_b,
        "interleaved-1f1b": interleaved_1f1b,
        "looped-bfs": looped_bfs,
        "zb-h1": zb_h1,
        "interleaved-zero-bubble": interleaved_zero_bubble,
        "zbv": zbv,
        "dualpipe-v": dualpipe_v,
    }
)
