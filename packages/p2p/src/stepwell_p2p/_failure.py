"""The first cause of a failure, in a form that travels to every rank."""

from __future__ import annotations

import json

import attrs

from .exceptions import PeerFailure

_LONGEST_REASON = 4000  # characters: enough for an error with its message, small enough for any store


@attrs.frozen
class Failure:
    """What failed first, where.

    Attributes:
        reason: the error in words.
        rank: the rank that failed, where it is known.
        stage: the stage it was running.
        microbatch: the microbatch it was running.
        action: what it was doing, for example ``"B"``.
    """

    reason: str
    rank: int | None = None
    stage: int | None = None
    microbatch: int | None = None
    action: str | None = None

    def error(self) -> PeerFailure:
        """A fresh exception for one waiting thread."""
        return PeerFailure(
            self.reason, rank=self.rank, stage=self.stage, microbatch=self.microbatch, action=self.action
        )

    def to_bytes(self) -> bytes:
        """For a store; a very long reason is cut."""
        fields = attrs.asdict(attrs.evolve(self, reason=self.reason[:_LONGEST_REASON]))
        return json.dumps(fields).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Failure:
        """Read what :meth:`to_bytes` wrote; anything else becomes the reason as it stands."""
        try:
            return cls(**json.loads(data))
        except (ValueError, TypeError):
            return cls(f"a failure record that cannot be read: {data[:200]!r}")
