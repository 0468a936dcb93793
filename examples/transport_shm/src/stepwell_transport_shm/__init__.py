"""A stepwell transport between processes of one host, through shared memory."""

from __future__ import annotations

from ._transport import SharedMemoryTransport

__all__ = ["SharedMemoryTransport"]
