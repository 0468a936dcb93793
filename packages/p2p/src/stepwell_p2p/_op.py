"""One message between two ranks, as each of its ends names it."""

from __future__ import annotations

import enum

import attrs

from ._placement import Edge

MEETING = -256
"""The microbatch of the messages with which ranks meet, and the lowest that any message may have."""


class OpKind(enum.Enum):
    """Send or receive, of a forward value (F) or of a gradient (B).

    Attributes:
        is_send: whether this end gives the value.
        is_forward: whether the value travels downstream.
        number: 0 to 3, for tables.
    """

    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"

    def __init__(self, name: str) -> None:
        self.is_send = name.startswith("SEND")
        self.is_forward = name.endswith("F")
        self.number = 2 * self.is_send + self.is_forward

    @property
    def other(self) -> OpKind:
        """What the other end calls it."""
        return _OTHER[self]


_OTHER = {
    OpKind.SEND_F: OpKind.RECV_F,
    OpKind.RECV_F: OpKind.SEND_F,
    OpKind.SEND_B: OpKind.RECV_B,
    OpKind.RECV_B: OpKind.SEND_B,
}


@attrs.frozen(cache_hash=True)
class Op:
    """One end of one message.

    Both ends write the same numbers and differ only in :attr:`kind`, so a message is identified by what it is (direction,
    stage, microbatch, index), never by when it arrives.

    Attributes:
        kind: send or receive, forward or backward.
        edge: from which rank to which.
        stage: the *sender's* stage: for F the stage whose output it is, for B the stage whose input's gradient it is.
        microbatch: which microbatch; -1 to -255 are free for traffic outside microbatches (set-up).
        index: which message of that stage and microbatch on this edge.
    """

    kind: OpKind
    edge: Edge
    stage: int
    microbatch: int
    index: int = 0

    @property
    def mirror(self) -> Op:
        """The other end of the same message."""
        return attrs.evolve(self, kind=self.kind.other)

    @property
    def message(self) -> tuple[int, int, bool, int, int, int]:
        """What both ends agree on: source, destination, whether forward, stage, microbatch, index."""
        edge = self.edge
        return (edge.source, edge.destination, self.kind.is_forward, self.stage, self.microbatch, self.index)

    @property
    def rank(self) -> int:
        """The rank at this end."""
        return self.edge.source if self.kind.is_send else self.edge.destination

    @property
    def peer(self) -> int:
        """The rank at the other end."""
        return self.edge.destination if self.kind.is_send else self.edge.source

    def __str__(self) -> str:
        where = f"(rank {self.edge.source} to rank {self.edge.destination})"
        if self.microbatch == MEETING:
            return f"the meeting of all ranks at the opening of channels {where}"
        when = f"microbatch {self.microbatch}" if self.microbatch >= 0 else "outside microbatches"
        return f"{self.kind.value} of stage {self.stage}, {when}, value {self.index} {where}"
