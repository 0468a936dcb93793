"""Every error of stepwell-p2p.

Two families: :class:`P2PUsageError` means that what the caller planned or passed is wrong and says what to change;
:class:`TransportError` means that the network, the peer or the backend failed while the plan was right.
"""

from __future__ import annotations

from typing import Any

from stepwell_meta.exceptions import StepwellError

__all__ = ["DeadlockError", "P2PError", "P2PUsageError", "PeerFailure", "TransportError"]


class P2PError(StepwellError):
    """Base of this layer."""


class P2PUsageError(P2PError, ValueError):
    """A placement, wire, channel policy, batch or argument is wrong."""


class DeadlockError(P2PUsageError):
    """The order of communication can block for ever, or delivers the wrong data.

    Attributes:
        kind: ``"unmatched"`` (a send without its receive, or the reverse), ``"order"`` (the two ends of a channel disagree about
            which message comes next: wrong data) or ``"cycle"`` (ranks wait for each other).
        cycle: for a cycle, who waits for whom, each for the next and the last for the first.
        safe_policy: the name of a channel policy under which the same order is safe, if there is one.
    """

    def __init__(
        self, message: str, *, kind: str = "cycle", cycle: tuple[Any, ...] = (), safe_policy: str | None = None
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.cycle = cycle
        self.safe_policy = safe_policy


class TransportError(P2PError):
    """The backend failed: a connection broke, a wait timed out, a message had another size than was agreed."""


class PeerFailure(TransportError):
    """Another rank failed first, or said so by ``Transport.abort``.

    Attributes:
        reason: the first error in words.
        rank: the rank that failed first, where it is known.
        stage: the stage that it was running, where it said so.
        microbatch: the microbatch that it was running, where it said so.
        action: what it was doing, where it said so.
    """

    def __init__(
        self,
        reason: str,
        *,
        rank: int | None = None,
        stage: int | None = None,
        microbatch: int | None = None,
        action: str | None = None,
    ) -> None:
        where = ["a peer" if rank is None else f"rank {rank}"]
        where += [f"stage {stage}"] if stage is not None else []
        where += [f"microbatch {microbatch}"] if microbatch is not None else []
        where += [f"action {action}"] if action is not None else []
        super().__init__(f"{', '.join(where)} failed: {reason}")
        self.reason = reason
        self.rank = rank
        self.stage = stage
        self.microbatch = microbatch
        self.action = action

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle by values, so that a copy says the same."""
        state = {name: getattr(self, name) for name in ("rank", "stage", "microbatch", "action")}
        return (_rebuild_peer_failure, (self.reason, state))


def _rebuild_peer_failure(reason: str, where: dict[str, Any]) -> PeerFailure:
    return PeerFailure(reason, **where)
