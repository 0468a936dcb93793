"""Every error of stepwell-p2p.

Two families: :class:`P2PUsageError` means that what the caller planned or passed is wrong and says what to change;
:class:`TransportError` means that the network, the peer or the backend failed while the plan was right.
"""

from __future__ import annotations

from stepwell_meta.exceptions import StepwellError

__all__ = ["DeadlockError", "P2PError", "P2PUsageError", "PeerFailure", "TransportError"]


class P2PError(StepwellError):
    """Base of this layer."""


class P2PUsageError(P2PError, ValueError):
    """A placement, wire, channel policy, batch or argument is wrong."""


class DeadlockError(P2PUsageError):
    """The order of communication can block for ever, or can deliver the wrong data."""


class TransportError(P2PError):
    """The backend failed: a connection broke, a wait timed out, a message had another size than was agreed."""


class PeerFailure(TransportError):
    """Another rank failed first, or said so by ``Transport.abort``.

    Attributes:
        rank: the rank that failed first, where it is known.
        reason: the first error in words.
    """

    def __init__(self, reason: str, *, rank: int | None = None) -> None:
        where = "a peer" if rank is None else f"rank {rank}"
        super().__init__(f"{where} failed: {reason}")
        self.rank = rank
        self.reason = reason
