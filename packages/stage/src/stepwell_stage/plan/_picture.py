"""Where everything stands in a picture of timelines, whoever draws it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence

import attrs

from ..exceptions import StageUsageError
from ._action import Action, Kind
from ._require import is_cost
from ._timeline import BESIDE, Event, Timeline, label, require_timelines, seconds

LANE, GAP, LEFT, RIGHT = 26.0, 4.0, 64.0, 16.0  # pixels: height of a rank, space between two, margins
HEAD, AXIS = 30.0, 34.0  # title above the lanes, time below
LETTER = 7.0  # width of a letter of a label
LEAST, USUAL, MOST = 300.0, 1000.0, 8000.0  # pixels: width of a picture
LANE_COLOUR, WAIT_COLOUR, INK, FAINT = "#f3f3f1", "#d9d5cc", "#222222", "#777777"
# For each kind the colours of a rank's first, second, … stage; from dark to light. Distinct for colour-blind eyes too.
COLOURS: dict[Kind, tuple[str, ...]] = {
    Kind.F: ("#3f6fa8", "#7ea6d3", "#b9d0ea", "#dde8f5"),
    Kind.B: ("#3d8f5f", "#7dbf98", "#b5dcc4", "#dcefe3"),
    Kind.I: ("#2f8f8c", "#74bdb9", "#b0dbd8", "#d9eeed"),
    Kind.W: ("#d9822b", "#edb072", "#f5d2ab", "#fae8d3"),
    Kind.UNSHARD: ("#8d6bb0",),
    Kind.RESHARD: ("#8d6bb0",),
    Kind.REDUCE_GRAD: ("#b0577d",),
    Kind.CUSTOM: ("#6b6b6b", "#9a9a9a", "#c4c4c4", "#e2e2e2"),
}
NAMES = {
    Kind.F: "F forward",
    Kind.B: "B backward",
    Kind.I: "I backward for inputs",
    Kind.W: "W backward for weights",
    Kind.UNSHARD: "UNSHARD",
    Kind.REDUCE_GRAD: "REDUCE_GRAD",
    Kind.CUSTOM: "custom",
}


@attrs.frozen
class Box:
    """A rectangle: place and size in pixels, colour, whether it is hatched (a wait), text inside, and what to say of it.

    It has a white rim where it says something, unless it is so narrow that little else would be seen of it.
    """

    x: float
    y: float
    width: float
    height: float
    colour: str
    hatched: bool = False
    text: str = ""
    ink: str = INK
    title: str = ""

    @property
    def rim(self) -> float:
        """Width of the rim in pixels."""
        return 0.6 if self.title and self.width >= 4 else 0.0


@attrs.frozen
class Text:
    """Words at a place: baseline, size in pixels, alignment ``start``, ``middle`` or ``end``."""

    x: float
    y: float
    words: str
    size: float = 12.0
    align: str = "start"
    colour: str = INK
    bold: bool = False


@attrs.frozen
class Picture:
    """A picture as boxes and words, in the order of drawing."""

    width: float
    height: float
    boxes: tuple[Box, ...]
    texts: tuple[Text, ...]


def picture(timelines: Sequence[Timeline], width: float | None) -> Picture:
    """Timelines below one another, on one scale, with a legend; without a width as wide as most microbatch numbers need."""
    require_timelines(timelines)
    if not any(timeline.events for timeline in timelines):
        raise StageUsageError("there is nothing to draw: no timeline has an event")
    makespan = max(max(timeline.makespan for timeline in timelines), 1e-12)
    if width is None:
        width = _enough(timelines, makespan)
    elif not is_cost(width) or width < LEAST:
        raise StageUsageError(f"a picture needs a width of at least {LEAST:g} pixels, got {width!r}")
    scale = (width - LEFT - RIGHT) / makespan
    boxes: list[Box] = []
    texts: list[Text] = []
    kinds = {leaf.kind for timeline in timelines for event in timeline.events for leaf in event.action.leaves}
    top = _legend(kinds, width, boxes, texts)
    for timeline in timelines:
        texts.append(Text(LEFT, top + 18, _heading(timeline, width - LEFT - RIGHT), 13.0, bold=True))
        top += HEAD
        for rank in range(timeline.num_ranks):
            texts.append(Text(LEFT - 8, top + LANE / 2 + 4, f"rank {rank}", align="end"))
            boxes.append(Box(LEFT, top, timeline.makespan * scale, LANE, LANE_COLOUR))
            boxes += _lane(timeline.of_rank(rank), top, scale)
            top += LANE + GAP
        texts += _axis(timeline.makespan, top, scale)
        top += AXIS
    return Picture(width, top, tuple(boxes), tuple(texts))


def _enough(timelines: Sequence[Timeline], makespan: float) -> float:
    """A width in which half of the compute actions or more have room for their microbatch's number."""
    events = [event for timeline in timelines for event in timeline.events if event.action.kind.is_compute]
    usual = statistics.median_low([event.seconds for event in events if event.seconds > 0] or [makespan])
    digits = max((len(str(event.action.microbatch)) for event in events), default=1)
    needed = _room(digits) * makespan / usual
    return min(max(math.ceil(LEFT + RIGHT + needed), USUAL), MOST)


def _room(letters: int) -> float:
    return letters * LETTER + 4


def _heading(timeline: Timeline, room: float) -> str:
    """Name, time and bubble; of a name that has no room the beginning."""
    facts = f"{seconds(timeline.makespan)}, bubble {timeline.bubble:.1%}"
    letters = int(room / 8.5) - len(facts) - 2  # the type is larger than that of labels
    name = timeline.name if len(timeline.name) <= letters else f"{timeline.name[: max(letters - 1, 0)]}…"
    return f"{name}: {facts}" if name else facts


def _legend(kinds: set[Kind], width: float, boxes: list[Box], texts: list[Text]) -> float:
    x, y = LEFT, 10.0
    entries = [(NAMES[kind], COLOURS[kind][0], False) for kind in NAMES if kind in kinds]
    for name, colour, hatched in (*entries, ("waits", WAIT_COLOUR, True), ("idle", LANE_COLOUR, False)):
        room = sum(9.0 if letter.isupper() else 6.4 for letter in name)
        if x + 20 + room > width - RIGHT:
            x, y = LEFT, y + 20
        boxes.append(Box(x, y, 14, 12, colour, hatched=hatched))
        texts.append(Text(x + 20, y + 11, name, colour=FAINT))
        x += 36 + room
    return y + 18


def _lane(events: Sequence[Event], top: float, scale: float) -> Iterator[Box]:
    stages = sorted({leaf.stage for event in events for leaf in event.action.leaves if event.action.kind.is_compute})
    for event in events:
        x, width = LEFT + event.start * scale, event.seconds * scale
        action, kind = event.action, event.action.kind
        title = f"{action}: {seconds(event.seconds)} from {seconds(event.start)}"
        if kind in BESIDE:  # a strip below the rank's own
            yield Box(x, top + LANE, width, GAP - 1, COLOURS[kind][0], title=title)
        elif not kind.is_compute:
            yield Box(x, top, width, LANE, WAIT_COLOUR, hatched=True, title=f"waits in {title}")
        else:
            height = LANE / len(action.leaves)
            for number, leaf in enumerate(action.leaves):
                yield _box(leaf, stages, x, top + number * height, width, height, title)


def _box(leaf: Action, stages: list[int], x: float, y: float, width: float, height: float, title: str) -> Box:
    place = stages.index(leaf.stage)
    number = "" if leaf.microbatch is None else str(leaf.microbatch)
    text = next((t for t in (label(leaf, with_stage=False), number) if _room(len(t)) <= width + 1e-6), "")
    ink = "#ffffff" if place == 0 and leaf.kind is not Kind.W else INK
    return Box(x, y, width, height, _shade(COLOURS[leaf.kind], place, len(stages)), text=text, ink=ink, title=title)


def _shade(shades: Sequence[str], place: int, count: int) -> str:
    """The colour of one of a rank's stages; where they are more than the shades, of those between too."""
    if count <= len(shades):
        return shades[place]
    at, part = divmod(place * (len(shades) - 1), count - 1)
    dark, light = (bytes.fromhex(shades[min(number, len(shades) - 1)][1:]) for number in (at, at + 1))
    return "#" + bytes(round(a + (b - a) * part / (count - 1)) for a, b in zip(dark, light, strict=True)).hex()


def _axis(makespan: float, top: float, scale: float) -> Iterator[Text]:
    """Times at round places, about 120 pixels apart."""
    rough = 120 / scale
    step = 10.0 ** math.floor(math.log10(rough))
    step *= next(factor for factor in (1, 2, 5, 10) if step * factor >= rough)
    for number in range(int(makespan / step + 1e-9) + 1):
        yield Text(
            LEFT + number * step * scale, top + 12, seconds(number * step) if number else "0", 11.0, "middle", FAINT
        )
