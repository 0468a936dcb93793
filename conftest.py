"""One pool of worker processes for the whole test session, for the tests of every layer."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from stepwell_meta.testing import WorkerPool


def pytest_collection_finish() -> None:
    """What was imported by now stays for good: tests that collect garbage need not look at half a million objects each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def workers() -> Iterator[WorkerPool]:
    """Real gloo ranks: ``workers.run(function, 4, …)``."""
    from stepwell_meta.testing import WorkerPool

    with WorkerPool() as pool:
        yield pool
