"""What happened when: of a simulated or of a measured step, in one form."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from functools import cached_property

import attrs

from ..exceptions import StageUsageError
from ._action import Action, Kind
from ._count import whole
from ._require import require, several


@attrs.frozen
class Event:
    """Something that a rank did for a while.

    Attributes:
        rank: which rank.
        action: what it did; for SEND, RECV and WAIT the time that went into posting or waiting.
        start: seconds from the start of the step.
        end: seconds from the start of the step.
    """

    rank: int
    action: Action
    start: float
    end: float

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end - self.start


def _in_order(events: Iterable[Event]) -> tuple[Event, ...]:
    found = several(events, "a timeline is of several events")
    for event in found:
        require(event, Event, "a timeline is of events", error=StageUsageError)
    return tuple(sorted(found, key=lambda event: (event.rank, event.start, event.end)))


@attrs.frozen
class Timeline:
    """Events of one step, of one rank or of all.

    Attributes:
        events: in order of rank and start.
        name: heading for pictures.

    Raises:
        StageUsageError: something among them is no event.
    """

    events: tuple[Event, ...] = attrs.field(converter=_in_order)
    name: str = ""

    @classmethod
    def merge(cls, timelines: Iterable[Timeline], *, name: str = "") -> Timeline:
        """One timeline from those of several ranks, whose clocks start together.

        Raises:
            StageUsageError: these are no timelines.
        """
        found = several(timelines, "Timeline.merge() takes several timelines")
        for timeline in found:
            require(timeline, Timeline, "Timeline.merge() takes timelines", error=StageUsageError)
        return cls([event for timeline in found for event in timeline.events], name)

    @property
    def num_ranks(self) -> int:
        """Number of ranks, the highest with an event and all below it."""
        return self.events[-1].rank + 1 if self.events else 0

    @cached_property
    def makespan(self) -> float:
        """Seconds from the start of the step to the end of its last event."""
        return max((event.end for event in self.events), default=0.0)

    @property
    def bubble(self) -> float:
        """Share of all ranks' time that is not spent in compute."""
        return self._bubble(self.events, self.num_ranks)

    def bubble_of(self, rank: int) -> float:
        """Share of one rank's time that is not spent in compute."""
        return self._bubble(self.of_rank(rank), 1)

    def of_rank(self, rank: int) -> tuple[Event, ...]:
        """The events of one rank, by start."""
        rank = whole(rank, "rank", StageUsageError)
        first, last = (bisect_left(self.events, number, key=lambda event: event.rank) for number in (rank, rank + 1))
        return self.events[first:last]

    def _bubble(self, events: Iterable[Event], num_ranks: int) -> float:
        busy = sum(event.seconds for event in events if event.action.kind.is_compute)
        return 1 - busy / (num_ranks * self.makespan) if self.makespan else 0.0

    def to_text(self, width: int = 100) -> str:
        """A picture for the terminal, one line a rank: ``F3----`` runs microbatch 3, ``~`` waits for a message, ``.`` idles.

        Where a rank has several stages their numbers stand before the letter: ``5F3``.

        Args:
            width: columns for the whole line, at least 20.

        Raises:
            StageUsageError: that is no number of columns.
        """
        width = whole(width, "width", StageUsageError)
        prefix = len(f"rank {max(self.num_ranks - 1, 0)} ")
        columns = max(width, 20) - prefix - 2
        scale = columns / self.makespan if self.makespan else 0.0
        rows: list[list[Event]] = [[] for _ in range(self.num_ranks)]
        for event in self.events:
            if event.action.kind not in BESIDE:
                rows[event.rank].append(event)
        lines = [f"{self.name + ': ' if self.name else ''}{seconds(self.makespan)}, bubble {self.bubble:.1%}"]
        for rank, events in enumerate(rows):
            many = len({leaf.stage for event in events for leaf in event.action.leaves}) > 1
            cells = ["."] * columns
            for event in events:
                first, last = round(event.start * scale), round(event.end * scale)
                cells[first:last] = _cells(event.action, last - first, with_stage=many)
            lines.append(f"{f'rank {rank}':<{prefix}}|{''.join(cells)}|")
        return "\n".join(lines)


def require_timelines(values: Iterable[object]) -> None:
    """Refuse what is no timeline, a simulation above all.

    Raises:
        StageUsageError: says what has one.
    """
    for value in values:
        require(
            value,
            Timeline,
            "pictures and traces are of timelines",
            "simulation.timeline is a timeline",
            error=StageUsageError,
        )


BESIDE = frozenset({Kind.UNSHARD, Kind.RESHARD, Kind.REDUCE_GRAD})  # run beside compute


def label(action: Action, *, with_stage: bool) -> str:
    """A compute action's short text: ``F3``, ``5F3``, ``5F3 2B1`` for a pair, ``{offload}3`` for one of the user's own."""
    return " ".join(str(leaf) if with_stage else str(leaf)[len(str(leaf.stage)) :] for leaf in action.leaves)


def seconds(value: float) -> str:
    """A time in the unit that suits it."""
    if value >= 1:
        return f"{value:.4g} s"
    return f"{value * 1e3:.4g} ms" if value >= 1e-3 else f"{value * 1e6:.4g} us"


def _cells(action: Action, width: int, *, with_stage: bool) -> str:
    """The longest label that there is room for, else the letter alone. A dash keeps it from a stage's number behind it."""
    if not action.kind.is_compute:
        return "~" * width
    labels = [label(action, with_stage=with_stage), label(action, with_stage=False)]
    letter = "&" if action.parts else "*" if action.name else action.kind.value
    text = next((text.replace(" ", "&") for text in labels if len(text) + with_stage <= width), letter)
    return (text + "-" * width)[:width]
