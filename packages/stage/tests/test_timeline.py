"""Timelines, as numbers and as text."""

from __future__ import annotations

import sys

import attrs
import pytest

from stepwell_stage import Action, Costs, Event, Kind, Timeline, lower, simulate
from stepwell_stage.plan._timeline import label, seconds
from stepwell_stage.schedules import BY_NAME, custom, dualpipe_v, one_f_one_b, zbv

F, B = Kind.F, Kind.B


def test_numbers() -> None:
    timeline = Timeline(
        [
            Event(1, Action(1, F, 0), 1.0, 2.0),
            Event(0, Action(0, B, 0), 4.0, 6.0),
            Event(0, Action(0, F, 0), 0.0, 1.0),
            Event(0, Action(0, Kind.RECV_B, 0), 1.0, 4.0),
            Event(1, Action(1, B, 0), 2.0, 4.0),
        ]
    )
    assert [str(event.action) for event in timeline.events] == ["0F0", "0RECV_B0", "0B0", "1F0", "1B0"]
    assert (timeline.num_ranks, timeline.makespan) == (2, 6.0)
    assert timeline.bubble == timeline.bubble_of(0) == timeline.bubble_of(1) == 0.5
    assert timeline.events[1].seconds == 3.0


def test_the_bubble_of_every_rank_takes_one_look_at_the_events() -> None:
    """Each rank went through the events of all, so that the time grew with the square of the ranks."""
    size = 4096
    events = [Event(rank, Action(rank, F, n), float(n), n + 0.5) for rank in range(size) for n in range(8)]
    timeline = Timeline(events)
    looks = [0]
    sys.setprofile(lambda frame, event, argument: looks.__setitem__(0, looks[0] + 1))
    try:
        bubbles = {timeline.bubble_of(rank) for rank in range(size)}
    finally:
        sys.setprofile(None)
    assert bubbles == {1 - 4 / 7.5}
    assert looks[0] < 20 * len(events)


def test_an_empty_one() -> None:
    timeline = Timeline([])
    assert (timeline.num_ranks, timeline.makespan, timeline.bubble) == (0, 0.0, 0.0)
    assert timeline.to_text() == "0 us, bubble 0.0%"


def test_ranks_are_merged() -> None:
    parts = [Timeline([Event(rank, Action(rank, F, 0), 0.0, 1.0)]) for rank in (1, 0)]
    whole = Timeline.merge(parts, name="step")
    assert whole.num_ranks == 2
    assert whole.name == "step"
    assert whole.bubble == 0.0


def test_p154_text_shows_who_waits() -> None:
    text = simulate(lower(one_f_one_b(2, 3)), Costs.uniform(2)).timeline.to_text(53)
    assert text.splitlines()[0] == "1f1b, simulated: 12 s, bubble 25.0%"
    first, second = (line.split("|")[1] for line in text.splitlines()[1:])
    assert len(first) == len(second) == 44
    assert first.startswith("F0--F1-~")
    assert second.startswith("~~~~F0-B0")
    assert second.endswith("....")


@pytest.mark.parametrize("gain", [None, 0.25])
@pytest.mark.parametrize("name", BY_NAME)
def test_p154_nothing_starts_before_what_it_needs_has_ended(name: str, gain: float | None) -> None:
    schedule = BY_NAME[name](4, 8)
    last = schedule.placement.num_stages - 1
    costs = attrs.evolve(Costs.uniform(last + 1, latency=0.25), overlap_gain=gain)
    found: dict[tuple[str, int, int | None], Event] = {}
    for event in simulate(lower(schedule), costs).timeline.events:
        if event.action.kind.is_compute:
            for leaf in event.action.leaves:
                kind = "B" if leaf.kind.is_backward else leaf.kind.value
                found[kind, leaf.stage, leaf.microbatch] = event
    for (kind, stage, number), event in found.items():
        needs = {"F": [("F", stage - 1)], "B": [("F", stage), ("B", stage + 1)], "W": [("B", stage)]}[kind]
        for need, other in needs:
            if 0 <= other <= last:
                before = found[need, other, number]
                message = 0.25 if before.rank != event.rank else 0.0
                assert before.end + message <= event.start + 1e-9, (kind, stage, number)


def test_several_stages_have_their_numbers_where_there_is_room() -> None:
    wide = simulate(lower(zbv(2, 3)), Costs.uniform(4)).timeline.to_text(160)
    assert "|0F0---" in wide
    assert "3I0---" in wide
    narrow = simulate(lower(zbv(2, 3)), Costs.uniform(4)).timeline.to_text(30)
    assert all(len(line) <= 30 for line in narrow.splitlines()[1:])
    costs = attrs.evolve(Costs.uniform(4), overlap_gain=0.0)
    pairs = simulate(lower(dualpipe_v(2, 6)), costs).timeline.to_text(300)
    assert "0F3&3B1" in pairs


def test_a_number_that_just_fits_is_shown() -> None:
    """Of every other microbatch the number was missing: where two columns were left for it, one of them went to a dash."""
    text = simulate(lower(one_f_one_b(4, 8)), Costs.uniform(4, latency=0.2)).timeline.to_text(100)
    assert text.splitlines()[1].startswith("rank 0 |F0-F1F2-F3~~~")


def test_a_table_of_one_rank() -> None:
    assert simulate(lower(custom(["0F0 0B0"])), Costs.uniform(1)).timeline.to_text(27) == (
        "custom, simulated: 3 s, bubble 0.0%\nrank 0 |F0----B0----------|"
    )


@pytest.mark.parametrize(
    ("value", "text"), [(0.0, "0 us"), (3.5e-6, "3.5 us"), (0.00125, "1.25 ms"), (1.0, "1 s"), (75.0, "75 s")]
)
def test_times_in_their_units(value: float, text: str) -> None:
    assert seconds(value) == text


def test_labels() -> None:
    pair = Action.overlap(Action(5, F, 3), Action(2, B, 1))
    assert label(pair, with_stage=True) == "5F3 2B1"
    assert label(pair, with_stage=False) == "F3 B1"
    assert label(Action(12, F, 3), with_stage=False) == "F3"
