"""Messages from a rank to itself, which no network carries."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import attrs

from ._batch import misfit
from ._layout import row_major
from .exceptions import TransportError

if TYPE_CHECKING:
    import torch

    from ._transport import Recv, Send

_Key = tuple[int, int, bool, int, int, int]


@attrs.define(eq=False)
class OwnReceive:
    """A receive from oneself; filled when its send is posted, before or after it.

    What is wrong with the two is said by :meth:`take`: while they are posted, other messages of their batch are under way.
    """

    recv: Recv
    value: torch.Tensor | None = None
    wrong: str | None = None

    def take(self) -> torch.Tensor:
        """The value.

        Raises:
            TransportError: nothing was sent, so nobody could ever send it while this rank waits; or something else was sent.
        """
        if self.wrong is not None:
            raise TransportError(self.wrong)
        if self.value is None:
            raise TransportError(
                f"{self.recv.op} waits for its own rank, which has not posted the send; post that first"
            )
        return self.value


class OwnMessages:
    """Sends and receives of one rank to itself: buffered, matched by op, in order among equal ops."""

    def __init__(self) -> None:
        self._sent: dict[_Key, deque[tuple[Send, torch.Tensor]]] = {}
        self._wanted: dict[_Key, deque[OwnReceive]] = {}

    def send(self, send: Send) -> None:
        """Keep a copy for the receive, or give it to the one that waits."""
        key = send.op.message
        value = row_major(send.tensor)
        if not send.owned and value.data_ptr() == send.tensor.data_ptr():
            value = value.clone()
        wanted = self._wanted.get(key)
        if wanted:
            self._meet(send, value, wanted.popleft())
            if not wanted:
                del self._wanted[key]
        else:
            self._sent.setdefault(key, deque()).append((send, value))

    def recv(self, recv: Recv) -> OwnReceive:
        """Take what was sent, or wait for it."""
        key = recv.op.message
        receive = OwnReceive(recv)
        sent = self._sent.get(key)
        if sent:
            self._meet(*sent.popleft(), receive)
            if not sent:
                del self._sent[key]
        else:
            self._wanted.setdefault(key, deque()).append(receive)
        return receive

    def clear(self) -> None:
        """Forget everything."""
        self._sent.clear()
        self._wanted.clear()

    def _meet(self, send: Send, value: torch.Tensor, receive: OwnReceive) -> None:
        receive.value, receive.wrong = value, misfit(send, receive.recv)
