"""For tests of stepwell's layers, and of yours: real ranks without the cost of starting them, and work counted in calls.

Needs cloudpickle (``pip install stepwell-meta[test]``). It stands in the lowest layer so that each layer's tests have it in
an environment with only that layer's declared dependencies.
"""

from __future__ import annotations

from stepwell_meta._calls import count_calls
from stepwell_meta._pool import Outcome, WorkerFailure, WorkerPool

__all__ = ["Outcome", "WorkerFailure", "WorkerPool", "count_calls"]
