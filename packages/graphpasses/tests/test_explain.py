from __future__ import annotations

import pytest

from stepwell_graphpasses._explain import explain
from stepwell_graphpasses.exceptions import PlanError

NOTES = [
    ("layers.1.up.weight", "sharded"),
    ("layers.10.up.weight", "sharded"),
    ("bucket 0", "gather in forward of layers.1.up.weight, layers.1.up.bias; it was the last gather"),
    ("bucket 1", "gather in forward of layers.10.up.weight; it was the last gather"),
    ("bucket 2", "gather in forward of old.layers.1.up.weight; it was the last gather"),
    ("bucket 2", "gather in forward of old.layers.1.up.weight; it was the last gather"),
]


def test_a_name_is_found_whole() -> None:
    """``layers.1`` brought the notes about ``layers.10`` with it."""
    assert explain(NOTES, "layers.1").splitlines() == [f"{name}: {text}" for name, text in (NOTES[0], NOTES[2])]
    assert len(explain(NOTES, "layers.*").splitlines()) == 2
    assert len(explain(NOTES, None).splitlines()) == 5  # each note once


def test_nothing_to_say() -> None:
    with pytest.raises(PlanError, match=r"nothing was noted about 'layers\.2'; there are notes about bucket 0"):
        explain(NOTES, "layers.2")
