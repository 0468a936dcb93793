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
    lower,
    prove,
    simulate,
    to_perfetto,
    to_png,
    to_svg,
)
from stepwell_stage.exceptions import ScheduleError, StageError, StageUsageError
from stepwell_stage.schedules import forward_only, gpipe, to_csv, zero_bubble

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
    "a number for a name": (lambda: Action.custom(0, 1), "the name of a custom action is a letter followed by"),
}


@pytest.mark.parametrize(("wrong", "sentence"), CASES.values(), ids=CASES)
def test_they_are_refused_with_a_sentence(wrong: Callable[[], object], sentence: str) -> None:
    """They ended in errors of Python's own, from deep inside; some only after all the work."""
    with pytest.raises(ScheduleError) as raised:
        wrong()
    assert sentence in str(raised.value)


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
