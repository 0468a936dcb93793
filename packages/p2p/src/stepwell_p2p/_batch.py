"""What every transport checks of a batch, and how it reports what is under way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import attrs

from ._op import Op
from .exceptions import P2PUsageError

if TYPE_CHECKING:
    from ._transport import Recv, Send


@attrs.frozen
class PendingOp:
    """A message that was posted and is not done.

    Attributes:
        op: which message.
        seconds: how long ago it was posted.
        waiting: whether somebody is blocked in its handle's ``wait`` now.
    """

    op: Op
    seconds: float
    waiting: bool

    def __str__(self) -> str:
        return f"{self.op}, posted {self.seconds:.1f} s ago{', waited for now' if self.waiting else ''}"


def check_op(op: Op, rank: int, size: int, *, is_send: bool) -> None:
    """Refuse an op that this rank cannot post.

    Raises:
        P2PUsageError: the op's kind does not fit, it does not start or end here, or it names a rank outside the group.
    """
    if op.kind.is_send is not is_send:
        raise P2PUsageError(f"a {'Send' if is_send else 'Recv'} needs an op of that kind, got {op}")
    if not (0 <= op.edge.source < size and 0 <= op.edge.destination < size):
        raise P2PUsageError(f"{op} names a rank outside this group of {size} ranks (0 to {size - 1})")
    if op.rank != rank:
        end = "starts" if is_send else "ends"
        raise P2PUsageError(f"{op} {end} at rank {op.rank}, but this is rank {rank}: post it there")


def describe(ops: Sequence[Op], most: int = 8) -> str:
    """A list of ops for a message, cut where it gets long."""
    words = [str(op) for op in ops[:most]]
    if len(ops) > most:
        words.append(f"and {len(ops) - most} more")
    return "; ".join(words)


def out_of_order(send: Op, recv: Op) -> str:
    """Why a send must not have met this receive, which is of another message."""
    return (
        f"messages met in another order than they were sent: {recv} met {send};"
        " post both ends of a channel in one order, or use a channel policy with more channels"
    )


def misfit(send: Send, recv: Recv) -> str | None:
    """Why a send does not fit the receive of the same message, or None where it does."""
    sent, expected = send.tensor, recv.meta
    if sent.shape == expected.shape and sent.dtype == expected.dtype:
        return None
    return (
        f"{recv.op}: expected {expected.dtype} of shape {expected.shape}, but rank {send.op.edge.source} sent"
        f" {sent.dtype} of shape {tuple(sent.shape)}; both ends must agree before they post"
    )
