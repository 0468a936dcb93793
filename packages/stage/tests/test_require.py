"""Arguments of the wrong kind, above all what stands one step before or behind the right one."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from stepwell_p2p import Placement, Rules
from stepwell_stage import (
    Action,
    Costs,
    Plan,
    Schedule,
    Timeline,
    from_perfetto,
    lower,
    prove,
    simulate,
    to_perfetto,
    to_png,
    to_svg,
)
from stepwell_stage.exceptions import ScheduleError, StageError, StageUsageError
from stepwell_stage.schedules import forward_only, from_csv, gpipe, to_csv, zero_bubble

SCHEDULE = gpipe(2, 2)
PLAN = lower(SCHEDULE)
COSTS = Costs.uniform(2, activation_bytes=1)
SIMULATION = simulate(PLAN, COSTS)
RULES = Rules(tagged=False, rendezvous=True)
PLACEMENT = Placement.loop(2, 2)

CASES: dict[str, tuple[Callable[[], object], str]] = {
    "a plan is lowered": (lambda: lower(PLAN), r"lower() takes a schedule, got a Plan"),
    "a name is lowered": (lambda: lower("gpipe"), r"lower() takes a schedule, got 'gpipe'"),
    "a function is lowered": (lambda: lower(gpipe), r"lower() takes a schedule, got a function"),
    "one link": (lambda: lower(SCHEDULE, (0, 1)), "a link is a pair of stages, for example (0, 1), got 0"),
    "no links": (lambda: lower(SCHEDULE, 1), "links are several pairs of stages, for example [(0, 1), (1, 2)], got 1"),
    "a link of three": (
        lambda: lower(SCHEDULE, [(0, 1, 2)]),
        "a link is a pair of stages, for example (0, 1), got (0, 1, 2)",
    ),
    "a link of texts": (
        lambda: lower(SCHEDULE, [("0", "1")]),
        "a stage of a link must be a whole number, got '0', a str",
    ),
    "links of a plan": (lambda: Plan(SCHEDULE, 3, []), "links are several pairs of stages"),
    "one sharded stage": (
        lambda: lower(SCHEDULE, sharded=0),
        "data-parallel stages are several numbers, for example [0, 1], got 0",
    ),
    "a reduced name": (
        lambda: lower(SCHEDULE, reduced=["0"]),
        "a data-parallel stage must be a whole number, got '0', a str",
    ),
    "half a stage": (
        lambda: lower(SCHEDULE, sharded=[0], max_unsharded=1.5),
        "max_unsharded must be a whole number, got 1.5",
    ),
    "nothing gathered": (
        lambda: lower(SCHEDULE, sharded=[0], max_unsharded=0),
        "max_unsharded must be at least 1, got 0",
    ),
    "no rules": (
        lambda: prove(PLAN, "tagged"),
        "prove() takes the rules of a transport, got 'tagged'; transport.rules are its",
    ),
    "no costs": (
        lambda: simulate(PLAN, 1.0),
        "simulate() takes Costs, got 1.0; Costs.uniform(num_stages) are the simplest",
    ),
    "texts in a schedule": (
        lambda: Schedule("mine", Placement.loop(1, 1), 1, [["0F0"]]),
        "mine: a schedule holds actions, got '0F0'; custom() takes a table of texts",
    ),
    "no placement": (
        lambda: Schedule("mine", [0], 1, [[Action.parse("0F0")]]),
        "mine takes a placement, got [0]; Placement.loop(stages, ranks) is the usual one",
    ),
    "ranks, no placement": (lambda: forward_only(2, 4), "forward_only() takes a placement, got 2; Placement.loop"),
    "zero-bubble of ranks": (lambda: zero_bubble(2, 4, COSTS), "zero_bubble() takes a placement, got 2"),
    "zero-bubble of no costs": (lambda: zero_bubble(PLACEMENT, 4, None), "zero_bubble() takes Costs, got None"),
    "half a microbatch": (
        lambda: zero_bubble(PLACEMENT, 4.5, COSTS),
        "num_microbatches must be a whole number, got 4.5",
    ),
    "a limit in words": (
        lambda: zero_bubble(PLACEMENT, 4, COSTS, memory_limit="4GB"),
        "memory_limit is a number of bytes, at least 0, or one for each rank, got '4GB'",
    ),
    "a limit that is no number": (
        lambda: zero_bubble(PLACEMENT, 4, COSTS, memory_limit=math.nan),
        "memory_limit is a number of bytes, at least 0, or one for each rank, got nan",
    ),
    "one limit in words": (
        lambda: zero_bubble(PLACEMENT, 4, COSTS, memory_limit=[8, "8"]),
        "or one for each rank, got '8'",
    ),
    "a file of a simulation": (
        lambda: to_csv(SIMULATION),
        "to_csv() takes a schedule or a plan, got a Simulation",
    ),
    "a number for an action": (lambda: Action.parse(0), "an action is parsed from text, got 0"),
    "an overlap of texts": (lambda: Action.overlap("0F0", "1B0"), "an overlapped pair is of two actions, got '0F0'"),
    "a stage of a custom action": (
        lambda: Action.custom("0", "offload"),
        "the stage of a custom action must be a whole number, got '0', a str",
    ),
    "no rows": (lambda: Schedule("mine", PLACEMENT, 1, None), "actions are a row for each rank, got None"),
    "no row": (lambda: Schedule("mine", PLACEMENT, 1, [None, []]), "the actions of a rank are several, got None"),
    "a plan of a plan": (lambda: Plan(PLAN, [], []), "a plan is of a schedule, got a Plan"),
    "a plan of one row": (lambda: Plan(SCHEDULE, [(0, 1)], [[]]), "a plan for 2 ranks has actions for 1"),
    "a plan of texts": (
        lambda: Plan(SCHEDULE, [(0, 1)], [["0F0"], []]),
        "a plan holds actions, got '0F0'; Action.parse() takes a text",
    ),
    "peers of a text": (lambda: PLAN.peers("0SEND_F0"), "peers() takes an action, got '0SEND_F0'"),
    "a rank that is not there": (lambda: SIMULATION.bubble_of(2), "the ranks are 0 to 1, got 2"),
    "the last rank, as of a list": (lambda: SIMULATION.bubble_of(-1), "the ranks are 0 to 1, got -1"),
    "a file that is a number": (lambda: from_csv(3), "a file is named by a text or a path, got 3"),
    "a file to write that is a number": (lambda: to_csv(PLAN, 3), "a file is named by a text or a path, got 3"),
    "a number for a name": (lambda: Action.custom(0, 1), "the name of a custom action is a letter followed by"),
}


@pytest.mark.parametrize(("wrong", "sentence"), CASES.values(), ids=CASES)
def test_they_are_refused_with_a_sentence(wrong: Callable[[], object], sentence: str) -> None:
    """They ended in errors of Python's own, from deep inside; some only after all the work."""
    with pytest.raises(ScheduleError) as raised:
        wrong()
    assert sentence in str(raised.value)


OF_TIMELINES: dict[str, tuple[Callable[[], object], str]] = {
    "no events": (lambda: Timeline(3), "a timeline is of several events, got 3"),
    "a text of events": (lambda: Timeline("0F0"), "a timeline is of several events, got '0F0'"),
    "actions": (lambda: Timeline([(0, 1)]), "a timeline is of events, got (0, 1)"),
    "one timeline": (lambda: Timeline.merge(Timeline([])), "Timeline.merge() takes several timelines, got a Timeline"),
    "simulations": (lambda: Timeline.merge([SIMULATION]), "Timeline.merge() takes timelines, got a Simulation"),
    "a width in words": (lambda: SIMULATION.timeline.to_text("wide"), "width must be a whole number, got 'wide'"),
    "half a column": (lambda: SIMULATION.timeline.to_text(80.5), "width must be a whole number, got 80.5"),
    "a rank in words": (lambda: SIMULATION.timeline.of_rank("0"), "rank must be a whole number, got '0'"),
    "no rank": (lambda: SIMULATION.timeline.bubble_of(None), "rank must be a whole number, got None"),
    "no trace": (lambda: from_perfetto(3), "a file is named by a text or a path, got 3"),
    "a picture in a number": (
        lambda: to_svg(SIMULATION.timeline, path=3),
        "a file is named by a text or a path, got 3",
    ),
    "no latency": (
        lambda: Costs((1,), (1,), latency=None),
        "latency must be finite and at least 0, got None",
    ),
}


@pytest.mark.parametrize(("wrong", "sentence"), OF_TIMELINES.values(), ids=OF_TIMELINES)
def test_timelines_and_files_of_other_kinds(wrong: Callable[[], object], sentence: str) -> None:
    """They ended in errors of Python's own; costs without a latency only in the simulation."""
    with pytest.raises(StageUsageError) as raised:
        wrong()
    assert str(raised.value).startswith(sentence)


DRAWN: dict[str, Callable[..., object]] = {
    "svg": to_svg,
    "perfetto": to_perfetto,
    "png": lambda *timelines, **options: to_png(*timelines, path="none.png", **options),
}


@pytest.mark.parametrize("draw", DRAWN.values(), ids=DRAWN)
def test_pictures_of_no_timeline(draw: Callable[..., object]) -> None:
    """A simulation has a timeline, and is none: all ended in AttributeErrors that said that it has no events."""
    for wrong, shown in ((SIMULATION, "a Simulation"), ([SIMULATION.timeline], "a list"), (3, "3")):
        with pytest.raises(StageError) as raised:
            draw(SIMULATION.timeline, wrong)
        assert (
            str(raised.value) == f"pictures and traces are of timelines, got {shown}; simulation.timeline is a timeline"
        )


def test_pictures_of_no_size() -> None:
    """They ended in errors of Python's, or of matplotlib's."""
    for width in ("wide", math.inf, math.nan, 299):
        with pytest.raises(StageUsageError, match="a picture needs a width of at least 300 pixels, got"):
            to_svg(SIMULATION.timeline, width=width)  # type: ignore[arg-type]
    for scale in (0, -1, math.nan, "large"):
        with pytest.raises(StageUsageError, match="the scale of a picture is a number above 0, got"):
            to_png(SIMULATION.timeline, path="none.png", scale=scale)  # type: ignore[arg-type]


def test_links_may_be_of_any_pairs() -> None:
    """Lists, as JSON has them, ended in a TypeError."""
    assert lower(SCHEDULE, [[0, 1]]) == PLAN  # type: ignore[list-item]
