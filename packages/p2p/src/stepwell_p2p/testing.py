"""For authors of transports, and for tests of code that uses one.

:func:`check_transport` tries every promise of :class:`stepwell_p2p.Transport`; see the page "Write your own transport".
"""

from __future__ import annotations

from ._battery import TRANSPORT_CHECKS, check_transport
from ._check import Check, TransportCheckError
from ._fabrics import Fabric, PoolFabric, ThreadFabric, die
from ._recording import Fault, FaultyTransport, RecordingTransport

__all__ = [
    "TRANSPORT_CHECKS",
    "Check",
    "Fabric",
    "Fault",
    "FaultyTransport",
    "PoolFabric",
    "RecordingTransport",
    "ThreadFabric",
    "TransportCheckError",
    "check_transport",
    "die",
]
