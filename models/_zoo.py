"""All models of the table, in its order."""

from __future__ import annotations

from ._entry import Entry
from ._own import OWN
from ._sight import SIGHT
from ._text import TEXT

ENTRIES: tuple[Entry, ...] = (*TEXT, *SIGHT, *OWN)
BY_NAME = {entry.name: entry for entry in ENTRIES}
