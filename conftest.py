"""One pool of worker processes for the whole test session, for the tests of every layer."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from stepwell_meta.testing import WorkerPool


POOL = pytest.StashKey["WorkerPool"]()


def pytest_collection_finish(session: pytest.Session) -> None:
    """What was imported by now stays for good: tests that collect garbage need not look at half a million objects each time."""
    gc.collect()
    gc.freeze()
    if any("workers" in getattr(item, "fixturenames", ()) for item in session.items):
        from stepwell_meta.testing import WorkerPool

        session.config.stash[POOL] = WorkerPool()  # its server imports torch while tests run that need no ranks


def pytest_sessionfinish(session: pytest.Session) -> None:
    if (pool := session.config.stash.get(POOL, None)) is not None:
        pool.close()


@pytest.fixture(scope="session")
def workers(request: pytest.FixtureRequest) -> WorkerPool:
    """Real gloo ranks: ``workers.run(function, 4, …)``."""
    return request.config.stash[POOL]
