"""What a command has to say, before anybody prints it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import attrs


def _rows(rows: Any) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(map(str, row)) for row in rows)


@attrs.frozen
class Table:
    """A table: heading, names of columns, rows of cells, and how all but the first column stand."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...] = attrs.field(converter=_rows)
    justify: Literal["left", "right"] = "right"


@attrs.frozen
class Report:
    """The result of a command.

    Attributes:
        data: for ``--json``.
        tables: for people.
        texts: for people, below the tables; given the width of the terminal.
        ok: whether all is well.
    """

    data: dict[str, Any]
    tables: tuple[Table, ...] = ()
    texts: Callable[[int], list[str]] = lambda width: []
    ok: bool = True
