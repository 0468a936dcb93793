"""Timelines as trace files that ui.perfetto.dev and chrome://tracing open."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from typing import Any

from ..exceptions import StageUsageError
from ._action import Action, Kind
from ._require import path_of
from ._timeline import BESIDE, Event, Timeline, label, require_timelines


def to_perfetto(*timelines: Timeline, path: str | os.PathLike[str] | None = None) -> str:
    """Timelines as one trace in Chrome's JSON form: a process per rank, arrows along each microbatch.

    Args:
        timelines: what to write.
        path: the file to write, if one is wanted.

    Returns:
        The text of the trace.

    Raises:
        StageUsageError: something is no timeline.

    Source: "Trace Event Format", the document of the Chromium project.
    """
    require_timelines(timelines)
    events: list[dict[str, Any]] = []
    first = 0
    for number, timeline in enumerate(timelines):
        for rank in range(timeline.num_ranks):
            name = f"{timeline.name}, rank {rank}" if timeline.name else f"rank {rank}"
            events.append(_meta("process_name", first + rank, 0, name=name))
            events.append(_meta("process_sort_index", first + rank, 0, sort_index=first + rank))
            events.append(_meta("thread_name", first + rank, 0, name="compute"))
            events.append(_meta("thread_name", first + rank, 1, name="collectives"))
        events += [_slice(event, first, timeline.name) for event in timeline.events]
        events += _arrows(timeline, first, number)
        first += timeline.num_ranks
    text = json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, separators=(",", ":"))
    if path is not None:
        path_of(path).write_text(text, encoding="utf-8")
    return text


def from_perfetto(path: str | os.PathLike[str]) -> tuple[Timeline, ...]:
    """The timelines in a file that :func:`to_perfetto` wrote.

    Raises:
        StageUsageError: the file is no such trace.
    """
    file = path_of(path)
    found: dict[tuple[str, int], list[Event]] = {}  # by name and process of rank 0: several may have one name
    try:
        trace = json.loads(file.read_text(encoding="utf-8"))["traceEvents"]
        for event in trace:
            if event["ph"] == "X":
                args, start, length = event["args"], event["ts"] / 1e6, event["dur"] / 1e6
                if not (0 <= start < math.inf and 0 <= length < math.inf and args["rank"] in range(len(trace))):
                    raise ValueError(f"a slice has a time or a rank that cannot be: {event}")
                key = args["timeline"], event["pid"] - args["rank"]
                found.setdefault(key, []).append(
                    Event(args["rank"], Action.parse(args["action"]), start, start + length)
                )
        return tuple(Timeline(events, name) for (name, _), events in found.items())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise StageUsageError(f"{path} is no trace of a timeline: {type(error).__name__}: {error}") from None


def _meta(kind: str, process: int, thread: int, **args: object) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": args}


def _slice(event: Event, first: int, timeline: str) -> dict[str, Any]:
    action = event.action
    start, end = _microseconds(event.start), _microseconds(event.end)
    waits = not action.kind.is_compute and action.kind not in BESIDE
    return {
        "ph": "X",
        "name": f"wait {action}" if waits else label(action, with_stage=True),
        "cat": "wait" if waits else action.kind.value,
        "ts": start,
        "dur": round(end - start, 3),
        "pid": first + event.rank,
        "tid": 1 if action.kind in BESIDE else 0,
        "args": {
            "timeline": timeline,
            "rank": event.rank,
            "action": str(action),
            "stage": action.stage,
            "microbatch": action.microbatch,
        },
    }


def _microseconds(value: float) -> float:
    """Whole nanoseconds, in which viewers count: else a slice could end after the next one begins."""
    return round(value * 1e6, 3)


def _arrows(timeline: Timeline, first: int, number: int) -> Iterator[dict[str, Any]]:
    """From each compute action to the one that takes what it made, where that is on another rank."""
    forwards, backwards = {}, {}
    for event in timeline.events:
        for leaf in event.action.leaves:
            if leaf.kind is Kind.F:
                forwards[leaf.stage, leaf.microbatch] = event
            elif leaf.kind.is_backward:
                backwards[leaf.stage, leaf.microbatch] = event
    for kind, events, step in (("F", forwards, 1), ("B", backwards, -1)):
        for (stage, microbatch), event in events.items():
            taker = events.get((stage + step, microbatch))
            if taker is not None and taker.rank != event.rank:
                common = {"name": "message", "cat": "message", "id": f"{number}.{kind}{stage}.{microbatch}"}
                # Within the slices that they join: where one ends and the next begins, either could be taken for it.
                start, end = (_microseconds((one.start + one.end) / 2) for one in (event, taker))
                yield {**common, "ph": "s", "pid": first + event.rank, "tid": 0, "ts": start}
                yield {**common, "ph": "f", "bp": "e", "pid": first + taker.rank, "tid": 0, "ts": end}
