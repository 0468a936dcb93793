"""The pictures of docs/schedules.md are what the code draws today.

Draw them anew with `python tests/test_schedule_pictures.py`, and look at them before you commit them.
"""

from __future__ import annotations

from pathlib import Path

import attrs
import pytest

from stepwell_p2p import Placement
from stepwell_stage import Costs, Schedule, Timeline, lower, simulate, to_svg
from stepwell_stage.schedules import BY_NAME, forward_only, zero_bubble

FOLDER = Path(__file__).parents[1] / "docs" / "schedules"
RANKS, MICROBATCHES = 4, 8


def _timeline(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    timeline = simulate(lower(schedule), costs or Costs.uniform(schedule.placement.num_stages)).timeline
    return Timeline(timeline.events, schedule.name)


def pictures() -> dict[str, str]:
    """The text of each picture, by the name of its file."""
    drawn = {name: to_svg(_timeline(make(RANKS, MICROBATCHES)), width=900) for name, make in BY_NAME.items()}
    pairs = BY_NAME["dualpipe-v"](RANKS, MICROBATCHES)
    as_one = _timeline(pairs, attrs.evolve(Costs.uniform(2 * RANKS), overlap_gain=0.0))
    drawn["dualpipe-v"] = to_svg(
        Timeline(as_one.events, "dualpipe-v, pairs as one"),
        Timeline(_timeline(pairs).events, "dualpipe-v, pairs apart"),
        width=900,
    )
    drawn["forward-only"] = to_svg(_timeline(forward_only(Placement.v(2 * RANKS, RANKS), MICROBATCHES)), width=900)
    # An I of twice a W: more memory than 1F1B needs lets forwards run further ahead, and closes gaps.
    costs = Costs(
        [1] * RANKS, [3] * RANKS, backward_input=[2] * RANKS, backward_weight=[1] * RANKS, activation_bytes=[1] * RANKS
    )
    made = [zero_bubble(Placement.loop(RANKS, RANKS), MICROBATCHES, costs, memory_limit=n * RANKS) for n in (1, 2)]
    named = [
        Timeline(_timeline(schedule, costs).events, f"zero-bubble, at most {n * RANKS} microbatches held")
        for schedule, n in zip(made, (1, 2), strict=True)
    ]
    drawn["zero-bubble"] = to_svg(*named, width=900)
    return {f"{name}.svg": text for name, text in drawn.items()}


@pytest.mark.parametrize(("name", "text"), pictures().items(), ids=pictures())
def test_pictures_are_up_to_date(name: str, text: str) -> None:
    assert (FOLDER / name).read_text(encoding="utf-8") == text, "draw it anew: python tests/test_schedule_pictures.py"


def test_every_picture_is_on_the_page() -> None:
    page = (FOLDER.parent / "schedules.md").read_text(encoding="utf-8")
    assert sorted(path.name for path in FOLDER.glob("*.svg")) == sorted(pictures())
    for name in pictures():
        assert f"(schedules/{name})" in page


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for file, content in pictures().items():
        (FOLDER / file).write_text(content, encoding="utf-8")
