"""One pool of worker processes for the whole test session, for the tests of every layer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from stepwell_meta.testing import WorkerPool


@pytest.fixture(scope="session")
def workers() -> Iterator[WorkerPool]:
    """Real gloo ranks: ``workers.run(function, 4, …)``."""
    from stepwell_meta.testing import WorkerPool

    with WorkerPool() as pool:
        yield pool
