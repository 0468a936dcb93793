"""Where things stand in a picture."""

from __future__ import annotations

import attrs
import pytest

from stepwell_stage import Action, Costs, Event, Kind, Timeline, lower, simulate
from stepwell_stage.plan._picture import COLOURS, LANE, picture
from stepwell_stage.schedules import dualpipe_v, interleaved_1f1b, one_f_one_b, zbv


def test_shades_tell_the_stages_of_a_rank_apart() -> None:
    drawn = picture([simulate(lower(zbv(2, 3)), Costs.uniform(4)).timeline], 1200)
    for kind in (Kind.F, Kind.I, Kind.W):
        used = {box.colour for box in drawn.boxes if box.title and box.colour in COLOURS[kind]}
        assert used == set(COLOURS[kind][:2])


@pytest.mark.parametrize("count", [5, 8, 16])
def test_shades_tell_many_stages_of_a_rank_apart(count: int) -> None:
    """From the fourth on they all had one colour."""
    plan = lower(interleaved_1f1b(1, 1, stages_per_rank=count))
    boxes = [box for box in picture([simulate(plan, Costs.uniform(count)).timeline], 1200).boxes if box.title]
    for kind, drawn in ((Kind.F, boxes[:count]), (Kind.B, boxes[: -count - 1 : -1])):
        colours = [box.colour for box in drawn]
        assert (colours[0], colours[-1]) == (COLOURS[kind][0], COLOURS[kind][-1])
        light = [sum(bytes.fromhex(colour[1:])) for colour in colours]
        assert light == sorted(set(light))


def test_a_pair_shares_its_lane() -> None:
    costs = attrs.evolve(Costs.uniform(4), overlap_gain=0.0)
    drawn = picture([simulate(lower(dualpipe_v(2, 5)), costs).timeline], 1200)
    halves = [box for box in drawn.boxes if box.height == LANE / 2]
    assert halves
    assert len(halves) % 2 == 0


@pytest.mark.parametrize("makespan", [3e-6, 0.02, 1.0, 7.0, 86400.0])
def test_the_axis_has_a_few_round_times(makespan: float) -> None:
    drawn = picture([Timeline([Event(0, Action(0, Kind.F, 0), 0.0, makespan)])], 1000)
    ticks = [text.words for text in drawn.texts if text.size == 11.0]
    assert ticks[0] == "0"
    assert 3 <= len(ticks) <= 9


def test_a_long_name_leaves_room_for_the_numbers() -> None:
    """The heading ran out of the picture, and its time and bubble with it."""
    events = [Event(0, Action(0, Kind.F, 0), 0.0, 1.0)]
    for name, heading in (("ab", "ab: 1 s, bubble 0.0%"), ("a" * 60, f"{'a' * 6}…: 1 s, bubble 0.0%")):
        assert [text.words for text in picture([Timeline(events, name)], 300).texts if text.bold] == [heading]


def test_narrow_boxes_have_no_rim() -> None:
    """With 64 microbatches on 16 ranks more was seen of the rims than of the actions."""
    events = [Event(0, Action(0, Kind.F, n), n / 1000, (n + 1) / 1000) for n in range(500)]
    boxes = picture([Timeline([*events, Event(0, Action(0, Kind.B, 0), 0.5, 1.0)])], 1000).boxes
    assert {box.rim for box in boxes if box.title and box.width < 4} == {0.0}
    assert [box.rim for box in boxes if box.title][-1] == 0.6


def test_a_picture_is_as_wide_as_its_numbers_need() -> None:
    """With 64 microbatches on 16 ranks it was 1,000 pixels wide, and no number was to be seen."""
    for count, stages, least, most in ((8, 4, 1000, 1000), (64, 16, 3000, 6000), (1000, 4, 8000, 8000)):
        drawn = picture([simulate(lower(one_f_one_b(stages, count)), Costs.uniform(stages)).timeline], None)
        assert least <= drawn.width <= most
        boxes = [box for box in drawn.boxes if box.title and not box.hatched]
        assert all(box.text for box in boxes) is (count < 1000)
    assert picture([Timeline([Event(0, Action(0, Kind.F, 0), 1.0, 1.0)])], None).width == 1000


def test_numbers_appear_where_they_fit() -> None:
    events = [Event(0, Action(0, Kind.F, 123), 0.0, 0.01), Event(0, Action(0, Kind.F, 124), 0.01, 1.0)]
    assert [box.text for box in picture([Timeline(events)], 1000).boxes if box.title] == ["", "F124"]
