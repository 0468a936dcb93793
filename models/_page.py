"""What docs/models.md says of the models, between markers."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import transformers

START, END = "<!-- table -->", "<!-- /table -->"
MORE, MORE_END = "<!-- more -->", "<!-- /more -->"
COLUMNS = ("model", "2 stages", "4 stages", "8 stages", "processes", "torch, 2 ranks", "torch, 4 ranks")


def versions() -> str:
    """What the outcomes depend on."""
    return f"torch {torch.__version__.partition('+')[0]}, transformers {transformers.__version__}"


class Table:
    """Outcomes by model and column; mutable: a run adds to it."""

    def __init__(self, names: Sequence[str]) -> None:
        self.rows: dict[str, dict[str, list[str]]] = {name: {column: [] for column in COLUMNS[1:]} for name in names}
        self.notes: list[str] = []

    def add(self, name: str, column: str, words: str) -> None:
        """One outcome: `right: …`, `wrong: …`, `refused: …`, …"""
        self.rows[name][column].append(words)

    @property
    def is_complete(self) -> bool:
        """Whether every model has run in any number of stages on all three schedules, and torch's outcomes are known."""
        return all(
            len(row[column]) == (1 if column.startswith("torch") else 3)
            for row in self.rows.values()
            for column in COLUMNS[1:]
            if column != "processes"
        )

    def lines(self) -> list[str]:
        """The table and its notes."""
        body = [
            f"| {name} | {' | '.join(self._cell(row[column]) for column in COLUMNS[1:])} |"
            for name, row in self.rows.items()
        ]
        notes = [f"{number}. {note}" for number, note in enumerate(self.notes, 1)]
        head = [f"| {' | '.join(COLUMNS)} |", f"|{'|'.join(' --- ' for _ in COLUMNS)}|"]
        return [self._summary(), "", *head, *body, "", *notes]

    def _summary(self) -> str:
        own = [column for column in COLUMNS[1:] if not column.startswith("torch")]
        counts = [
            sum(all(one.startswith("right") for column in columns for one in row[column]) for row in self.rows.values())
            for columns in (own, COLUMNS[-2:-1], COLUMNS[-1:])
        ]
        return (
            f"With {versions()}, {counts[0]} of {len(self.rows)} models are right everywhere, and the others are refused; with"
            f" torch's `pipeline()`, {counts[1]} are right on 2 ranks and {counts[2]} on 4."
        )

    def write(self, page: Path) -> None:
        """Replace what is between the markers."""
        outcomes = {
            name: {column[7]: row[column][0] for column in COLUMNS if column.startswith("torch")}
            for name, row in self.rows.items()
        }
        kept = f"<!-- {versions()}; {json.dumps(outcomes)} -->"
        _replace(page, START, [*self.lines(), "", kept], END)

    def _cell(self, outcomes: Sequence[str]) -> str:
        """The worst of them, in brief; what is long goes to the notes."""
        kinds = [one.partition(": ")[0] for one in outcomes]
        for kind in ("hangs", "wrong", "refused"):
            said = next((one for one, its in zip(outcomes, kinds, strict=True) if its.startswith(kind)), None)
            if said is not None:
                rest = said.partition(": ")[2]
                return f"**{kind}**" + (f" {rest}" if len(rest) < 8 else f" [{self._note(rest)}]")
        worst = max((float(one.partition(": ")[2].replace("bitwise", "0") or 0) for one in outcomes), default=math.nan)
        return "" if math.isnan(worst) else f"{worst:.0e}" if worst else "bitwise"

    def _note(self, text: str) -> int:
        if text not in self.notes:
            self.notes.append(text)
        return self.notes.index(text) + 1


class Names:
    """Models that are right; mutable: a run adds to it."""

    def __init__(self, count: int) -> None:
        self.names: list[str] = []
        self._count = count

    def add(self, name: str) -> None:
        """One more."""
        self.names.append(name)

    @property
    def is_complete(self) -> bool:
        """Whether every model has run."""
        return len(self.names) == self._count

    def write(self, page: Path) -> None:
        """Replace what is between the markers."""
        text = f"{len(self.names)} more are right in 4 stages on ZBV: {', '.join(self.names)}."
        _replace(page, MORE, textwrap.wrap(text, 130), MORE_END)


def _replace(page: Path, start: str, lines: Sequence[str], end: str) -> None:
    before, _, rest = page.read_text().partition(start)
    page.write_text("\n".join([before + start, *lines, end]) + rest.partition(end)[2])


def known_outcomes(page: Path) -> Mapping[str, Mapping[str, str]]:
    """What torch does with each model, as an earlier run with the same versions found out."""
    section = page.read_text().partition(START)[2].partition(END)[0]
    kept = section.partition(f"<!-- {versions()}; ")[2].partition(" -->")[0]
    return json.loads(kept) if kept else {}
