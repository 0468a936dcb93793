"""Traces, held against the Trace Event Format's description."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from stepwell_stage import Action, Costs, Event, Kind, Timeline, from_perfetto, lower, simulate, to_perfetto
from stepwell_stage.exceptions import StageUsageError
from stepwell_stage.schedules import BY_NAME, one_f_one_b


def _timeline(name: str = "1f1b") -> Timeline:
    schedule = BY_NAME[name](4, 6)
    stages = schedule.placement.num_stages
    plan = lower(schedule, sharded=range(stages), reduced=range(stages))
    costs = Costs(
        (1e-3,) * stages, (2e-3,) * stages, latency=1e-4, unshard=(1e-3,) * stages, reduce_grad=(1e-3,) * stages
    )
    return simulate(plan, costs).timeline


_NUMBER = (int, float)
_FIELDS: dict[str, dict[str, Any]] = {  # of each phase: the fields that it must have, and no others
    "M": {"name": str, "pid": int, "tid": int, "args": dict},
    "X": {"name": str, "cat": str, "ts": _NUMBER, "dur": _NUMBER, "pid": int, "tid": int, "args": dict},
    "s": {"name": str, "cat": str, "id": str, "ts": _NUMBER, "pid": int, "tid": int},
    "f": {"name": str, "cat": str, "id": str, "bp": str, "ts": _NUMBER, "pid": int, "tid": int},
}


def _check_format(trace: dict[str, Any]) -> None:
    """What the document asks of each kind of event that we write: duration events, flow events and metadata."""
    assert set(trace) <= {"traceEvents", "displayTimeUnit", "otherData"}
    assert trace["displayTimeUnit"] in ("ms", "ns")
    starts, ends = {}, {}
    for event in trace["traceEvents"]:
        fields = _FIELDS[event["ph"]]
        assert event.keys() == {"ph", *fields}
        assert all(isinstance(event[name], kind) for name, kind in fields.items())
        assert not any(isinstance(event[name], bool) for name in fields)
        if event["ph"] == "M":
            key = {"process_name": "name", "thread_name": "name", "process_sort_index": "sort_index"}[event["name"]]
            assert set(event["args"]) == {key}
            continue
        assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0
        else:
            assert event["ph"] in "sf"
            arrows = {"s": starts, "f": ends}[event["ph"]]
            assert event["id"] not in arrows
            arrows[event["id"]] = event
            assert event["ph"] == "s" or event["bp"] == "e"
            assert _encloses(trace, event), "an arrow binds to the slice that is there at its time"
    assert set(starts) == set(ends)
    named = {event["pid"] for event in trace["traceEvents"] if event["name"] == "process_name"}
    assert named == {event["pid"] for event in trace["traceEvents"]}
    for key, start in starts.items():
        assert (start["name"], start["cat"]) == (ends[key]["name"], ends[key]["cat"]), (
            "by which, with the id, viewers bind them"
        )
        assert start["ts"] <= ends[key]["ts"]
        assert start["pid"] != ends[key]["pid"]


def _encloses(trace: dict[str, Any], arrow: dict[str, Any]) -> bool:
    """Whether one slice of the arrow's thread is there at its time; the time at which a slice ends is not in it."""
    return (
        sum(
            event["ph"] == "X"
            and (event["pid"], event["tid"]) == (arrow["pid"], arrow["tid"])
            and event["ts"] <= arrow["ts"] < event["ts"] + event["dur"]
            for event in trace["traceEvents"]
        )
        == 1
    )


def _check_nesting(trace: dict[str, Any]) -> None:
    """Slices of one thread must not cross, or viewers drop them."""
    threads: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            threads.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    for slices in threads.values():
        for (_, end), (start, _) in zip(sorted(slices), sorted(slices)[1:], strict=False):
            assert round(end * 1000) <= round(start * 1000)  # in whole nanoseconds, as viewers count


@pytest.mark.parametrize("name", BY_NAME)
def test_the_form_and_the_way_back(name: str, tmp_path: Path) -> None:
    timeline = _timeline(name)
    text = to_perfetto(timeline, path=tmp_path / "step.json")
    assert (tmp_path / "step.json").read_text() == text
    trace = json.loads(text, parse_constant=pytest.fail)  # NaN and Infinity, which are no JSON
    _check_format(trace)
    _check_nesting(trace)
    (back,) = from_perfetto(tmp_path / "step.json")
    assert back.name == timeline.name
    assert [(event.rank, event.action) for event in back.events] == [(e.rank, e.action) for e in timeline.events]
    assert [event.start for event in back.events] == pytest.approx([event.start for event in timeline.events])
    assert back.bubble == pytest.approx(timeline.bubble)


def test_several_timelines_have_processes_of_their_own(tmp_path: Path) -> None:
    first, second = _timeline(), Timeline(_timeline().events, "measured")
    trace = json.loads(to_perfetto(first, second, path=tmp_path / "both.json"))
    _check_format(trace)
    names = [event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"]
    assert names == [f"{name}, rank {rank}" for name in ("1f1b, simulated", "measured") for rank in range(4)]
    assert [timeline.name for timeline in from_perfetto(tmp_path / "both.json")] == ["1f1b, simulated", "measured"]


def test_slices_that_touch_do_not_cross_whatever_their_numbers() -> None:
    """Start and length were rounded each on its own by whoever read them: by a nanosecond a slice ended in the next one."""
    ends = [number / 7e6 for number in range(1, 2000)]
    events = [Event(0, Action(0, Kind.F, n), start, end) for n, (start, end) in enumerate(itertools.pairwise(ends))]
    slices = [event for event in json.loads(to_perfetto(Timeline(events)))["traceEvents"] if event["ph"] == "X"]
    whole = [(round(event["ts"] * 1000), round(event["dur"] * 1000)) for event in slices]
    assert all(event["ts"] == round(event["ts"], 3) and event["dur"] == round(event["dur"], 3) for event in slices)
    assert all(start + length == following for (start, length), (following, _) in itertools.pairwise(whole))


def test_timelines_of_one_name_come_back_apart(tmp_path: Path) -> None:
    """Two steps of one schedule were read back as one, with every rank doing two things at once."""
    first, second = _timeline(), _timeline()
    to_perfetto(first, second, path=tmp_path / "both.json")
    back = from_perfetto(tmp_path / "both.json")
    assert [len(timeline.events) for timeline in back] == [len(first.events), len(second.events)]


def test_arrows_follow_the_microbatches() -> None:
    trace = json.loads(to_perfetto(simulate(lower(one_f_one_b(3, 2)), Costs.uniform(3)).timeline))
    arrows = sorted(event["id"] for event in trace["traceEvents"] if event["ph"] == "s")
    assert arrows == ["0.B1.0", "0.B1.1", "0.B2.0", "0.B2.1", "0.F0.0", "0.F0.1", "0.F1.0", "0.F1.1"]


RANKLESS = to_perfetto(Timeline([Event(0, Action(0, Kind.F, 0), 0.0, 1.0)])).replace('"rank":0', '"rank":"0"')


TRACE = to_perfetto(Timeline([Event(0, Action(0, Kind.F, 0), 0.0, 1.0)]))
CANNOT_BE = [
    TRACE.replace('"ts":0.0', '"ts":NaN'),
    TRACE.replace('"ts":0.0', '"ts":-1.0'),
    TRACE.replace('"dur":1000000.0', '"dur":Infinity'),
    TRACE.replace('"dur":1000000.0', '"dur":-1'),
    TRACE.replace('"rank":0', '"rank":-1'),
    TRACE.replace('"rank":0', '"rank":1000000000'),
    TRACE.replace('"rank":0', '"rank":0.5'),
]


@pytest.mark.parametrize("text", CANNOT_BE)
def test_times_and_ranks_that_cannot_be(text: str, tmp_path: Path) -> None:
    """They ended in errors from within pictures; a billion ranks in none, but in all of the memory."""
    assert text != TRACE
    (tmp_path / "other.json").write_text(text)
    with pytest.raises(
        StageUsageError, match=r"is no trace of a timeline: ValueError: a slice has a time or a rank that"
    ):
        from_perfetto(tmp_path / "other.json")


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", "[" * 100_000, RANKLESS, '{"traceEvents": [{"ph": "X"}]}', '{"traceEvents": [1]}', "\x00"]
)
def test_other_files_are_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text(text)
    with pytest.raises(StageUsageError, match="is no trace of a timeline"):
        from_perfetto(tmp_path / "other.json")
