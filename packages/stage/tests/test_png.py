"""PNG pictures."""

from __future__ import annotations

import struct
import sys
from pathlib import Path

import attrs
import pytest

from stepwell_stage import Costs, Timeline, lower, simulate, to_png
from stepwell_stage.exceptions import StageUsageError
from stepwell_stage.schedules import dualpipe_v


def _timeline() -> Timeline:
    costs = attrs.evolve(Costs.uniform(4, latency=0.5), overlap_gain=0.0)
    return simulate(lower(dualpipe_v(2, 4)), costs).timeline


def test_a_picture_of_the_size_asked_for(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    to_png(_timeline(), _timeline(), path=tmp_path / "step.png", width=600, scale=1.5)
    data = (tmp_path / "step.png").read_bytes()
    assert data.startswith(b"\x89PNG")
    assert struct.unpack(">I", data[16:20])[0] == 900


def test_without_matplotlib_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    with pytest.raises(StageUsageError, match=r"pip install 'stepwell\[plot\]', or use to_svg\(\)"):
        to_png(_timeline(), path=tmp_path / "step.png")
