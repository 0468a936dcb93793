"""Writes a benchmark's figures into benchmarks/README.md, each benchmark its own section."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

PAGE = Path(__file__).with_name("README.md")
HEAD = """# Benchmarks

`nox -s bench` runs them and writes these figures; `-- --quick` for a short look. Each compares with a peer in the same run.
Ratios are the point: seconds depend on the machine.
"""


class Table:
    """A table with a heading, and below it a note if there is one; mutable: rows are added."""

    def __init__(self, title: str, columns: Sequence[str]) -> None:
        self.title = title
        self.columns = columns
        self.rows: list[tuple[str, ...]] = []
        self.note = ""

    def add(self, *cells: str) -> None:
        self.rows.append(cells)
        print(f"{self.title}: {'  '.join(cells)}", flush=True)

    def lines(self) -> list[str]:
        rule = "|".join(" --- " for _ in self.columns)
        rows = (" | ".join(row) for row in (self.columns, *self.rows))
        head, *body = (f"| {row} |" for row in rows)
        note = [*textwrap.wrap(self.note, 128), ""] if self.note else []
        return [f"**{self.title}**", "", head, f"|{rule}|", *body, "", *note]


def write_section(name: str, title: str, lines: Sequence[str]) -> None:
    """Replace the section between the markers of that name, or append it."""
    start, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    section = "\n".join([start, f"## {title}", "", *lines, end])
    page = PAGE.read_text() if PAGE.exists() else HEAD
    if start in page:
        before, _, rest = page.partition(start)
        page = before + section + rest.partition(end)[2]
    else:
        page = f"{page.rstrip()}\n\n{section}\n"
    PAGE.write_text(page)
