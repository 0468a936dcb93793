"""SVG pictures: that they are XML, and that everything is in them."""

from __future__ import annotations

import itertools
from pathlib import Path
from xml.etree import ElementTree

import attrs
import pytest

from stepwell_stage import Action, Costs, Event, Kind, Timeline, lower, simulate, to_svg
from stepwell_stage.exceptions import StageUsageError
from stepwell_stage.schedules import BY_NAME, one_f_one_b

SVG = "{http://www.w3.org/2000/svg}"


def parse(text: str) -> tuple[list[ElementTree.Element], list[str]]:
    root = ElementTree.fromstring(text)
    return list(root.iter(f"{SVG}rect")), [element.text or "" for element in root.iter(f"{SVG}text")]


@pytest.mark.parametrize("name", BY_NAME)
def test_every_action_of_every_schedule_is_drawn(name: str, tmp_path: Path) -> None:
    schedule = BY_NAME[name](4, 8)
    costs = attrs.evolve(Costs.uniform(schedule.placement.num_stages), overlap_gain=0.0)
    timeline = simulate(lower(schedule), costs).timeline
    text = to_svg(timeline, path=tmp_path / "step.svg", width=1600)
    assert (tmp_path / "step.svg").read_text() == text
    rects, words = parse(text)
    titles = [rect[0].text or "" for rect in rects if len(rect)]
    for row in schedule.actions:
        for action in row:
            assert sum(title.startswith(f"{action}: ") for title in titles) == len(action.leaves)
    assert sum(title.startswith("waits in") for title in titles) > 0
    assert [f"rank {rank}" for rank in range(4)] == [word for word in words if word.startswith("rank ")]
    assert f"{name}, simulated: " in " ".join(words)


def test_boxes_lie_within_the_picture_and_do_not_overlap() -> None:
    rects, _ = parse(to_svg(simulate(lower(one_f_one_b(3, 5)), Costs.uniform(3, latency=0.25)).timeline, width=700))
    boxes = [tuple(float(rect.get(key, "0")) for key in ("x", "y", "width", "height")) for rect in rects if len(rect)]
    for x, y, width, height in boxes:
        assert x >= 0
        assert y >= 0
        assert x + width <= 700
        assert height > 0
    for row in {y for _, y, _, _ in boxes}:
        lane = sorted((x, x + width) for x, y, width, _ in boxes if y == row)
        assert all(end <= start + 0.02 for (_, end), (start, _) in itertools.pairwise(lane))


def test_simulated_and_measured_share_one_scale() -> None:
    short, long = (Timeline([Event(0, Action(0, Kind.F, 0), 0.0, end)], name) for end, name in ((1.0, "a"), (4.0, "b")))
    rects, words = parse(to_svg(short, long))
    widths = [float(rect.get("width", "0")) for rect in rects if len(rect)]
    assert widths[1] == pytest.approx(4 * widths[0], rel=1e-3)
    assert "a: 1 s, bubble 0.0%" in words
    assert "b: 4 s, bubble 0.0%" in words


def test_names_are_escaped() -> None:
    _, words = parse(to_svg(Timeline([Event(0, Action(0, Kind.F, 0), 0.0, 1.0)], "<a & b>")))
    assert any(word.startswith("<a & b>") for word in words)


def test_nothing_to_draw() -> None:
    with pytest.raises(StageUsageError, match="there is nothing to draw"):
        to_svg(Timeline([]))
    with pytest.raises(StageUsageError, match="a width of at least 300 pixels, got 100"):
        to_svg(Timeline([Event(0, Action(0, Kind.F, 0), 0.0, 1.0)]), width=100)
