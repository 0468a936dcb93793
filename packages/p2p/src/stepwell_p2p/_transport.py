"""The seam between those who decide what to send and those who carry it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import attrs

from ._op import Op

if TYPE_CHECKING:
    import torch

    from stepwell_meta import TensorMeta


@attrs.frozen
class Rules:
    """What a transport promises about order, for proofs before anything runs.

    Attributes:
        tagged: messages are matched by their :class:`Op`, in any order; otherwise each channel is first in, first out.
        rendezvous: a send completes only once the peer has posted its receive; otherwise it completes when posted.
    """

    tagged: bool
    rendezvous: bool


@attrs.frozen(eq=False)
class Send:
    """Give ``tensor`` to the peer. It must not be written until the batch's handle has been waited for.

    Attributes:
        op: which message.
        tensor: its value, in any strides; values cross in row-major order and take the receiver's layout.
        owned: the sender gives its memory away and never touches it again, so that a transport within one process may
            hand over the tensor itself instead of a copy.
    """

    op: Op
    tensor: torch.Tensor
    owned: bool = False


@attrs.frozen(eq=False)
class Recv:
    """Take a value that looks like ``meta`` from the peer, on the transport's device. It comes without grad.

    Attributes:
        op: which message.
        meta: what the value looks like.
        buffer: where to put it (a tensor of that shape and dtype), or None for new memory. The caller must neither read
            nor write it until the batch's handle has been waited for.
    """

    op: Op
    meta: TensorMeta
    buffer: torch.Tensor | None = None


class Handle(Protocol):
    """A batch under way."""

    def wait(self) -> tuple[torch.Tensor, ...]:
        """Block until every message of the batch is done; the received tensors, in the order of the batch's receives.

        A second call returns the same again. The caller owns what it received: nobody else writes to it.

        Raises:
            PeerFailure: another rank failed or aborted.
            TransportError: the backend failed, timed out, or the peer sent something of another size.
        """
        ...


@runtime_checkable
class Transport(Protocol):
    """Carries tensors between the ranks of one pipeline.

    One object per rank. ``post`` never blocks on the peer: it starts every message of the batch and returns; only
    ``Handle.wait`` blocks. Messages of one batch are started as one, so that a batch with a send and a receive for the
    same pair of ranks cannot block on itself. Messages with equal ops keep their order. Every handle is waited for, those of
    sends too.

    Attributes:
        rank: this rank's number in the pipeline group, from 0.
        size: how many ranks the group has.
        rules: what may be relied on about order.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def rules(self) -> Rules: ...

    def post(self, batch: Sequence[Send | Recv]) -> Handle:
        """Start every message of the batch.

        Raises:
            P2PUsageError: an op does not start (send) or end (receive) at this rank, or names a rank outside the group, or a
                buffer does not fit its meta. Then nothing of the batch was started.
            PeerFailure: another rank has failed or aborted before.
        """
        ...

    def abort(
        self, reason: str, *, stage: int | None = None, microbatch: int | None = None, action: str | None = None
    ) -> None:
        """Make every pending and later wait, on every rank, raise :class:`PeerFailure` with this reason. Never blocks.

        The first call of all ranks wins; later ones change nothing.

        Args:
            reason: the error in words.
            stage: the stage that failed, where there is one.
            microbatch: its microbatch.
            action: what it was doing.
        """
        ...

    def close(self) -> None:
        """Release what the transport holds. Safe to call twice; ``post`` afterwards is refused."""
        ...
