"""What one run finds out: the table of docs/models.md, and the names below it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from ._page import Names, Table

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "models.md"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--torch", action="store_true", help="measure anew what torch's own pipeline() does")


@pytest.fixture(scope="session")
def table(request: pytest.FixtureRequest) -> Iterator[Table]:
    """Collects; written where everything has run and gone well."""
    from ._page import Table
    from ._zoo import ENTRIES

    table = Table([entry.name for entry in ENTRIES])
    yield table
    if not request.session.testsfailed and table.is_complete:
        table.write(PAGE)


@pytest.fixture(scope="session")
def more() -> Iterator[Names]:
    """Likewise of the models that run in one way only."""
    from ._more import MORE
    from ._page import Names

    names = Names(len(MORE))
    yield names
    if names.is_complete:
        names.write(PAGE)


@pytest.fixture(scope="session")
def torch_outcomes(request: pytest.FixtureRequest) -> Iterator[Callable[[], dict[str, dict[str, str]]]]:
    """Gives what torch's own pipeline() does with each model: as the page has it, if of the same versions and models.

    Otherwise a program finds it out beside the other tests, which takes some minutes, and is waited for when it is asked.
    """
    from ._page import known_outcomes
    from ._zoo import ENTRIES

    known = known_outcomes(PAGE)
    if known.keys() == {entry.name for entry in ENTRIES} and not request.config.getoption("--torch"):
        yield lambda: known
        return
    command = [sys.executable, "-m", f"{__package__}._torch"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)

    def wait() -> dict[str, dict[str, str]]:
        out, _ = process.communicate(timeout=1200)
        assert process.returncode == 0, f"{' '.join(command)} ended with {process.returncode}"
        return {name: words for line in out.splitlines() for name, words in json.loads(line).items()}

    try:
        yield wait
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="session", autouse=True)
def _torch_runs_beside(request: pytest.FixtureRequest) -> None:
    """Begin with it, where it is asked for at all."""
    if any(
        "torch_outcomes" in item.fixturenames for item in request.session.items if isinstance(item, pytest.Function)
    ):
        request.getfixturevalue("torch_outcomes")
