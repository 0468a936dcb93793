"""How each step begins: the first stage's rank says which, and the word goes from rank to rank.

One message of two numbers per rank and step. It is what lets every step have other shapes than the one before, since each
rank hears whether it knows them; and what turns a rank that evaluates while the others train, or that refuses its batch, into
an error on every rank instead of a wait for something that never comes.
"""

from __future__ import annotations

import enum
from collections.abc import Callable

import torch

from stepwell_meta import TensorMeta
from stepwell_p2p import Edge, Handle, Op, OpKind, Placement, Recv, Send, Transport, receive_values, send_values

from ..exceptions import StageUsageError

_NUMBERS = 256  # how many ways of cutting a batch are remembered; the oldest is forgotten first
_META = TensorMeta((2,), (1,), torch.int64)


class Word(enum.IntEnum):
    """What a step is to be; an evaluation adds ``_EVAL``."""

    KNOWN = 0  # the batch is cut as number n was
    NEW = 1  # it is cut in a new way, which becomes number n: agree on it
    REFUSED = 2  # there will be no step; the reason follows


_EVAL = 16


class Announcer:
    """One rank's place in the chain of ranks; mutable: it counts."""

    def __init__(self, placement: Placement, transport: Transport, *, is_step: bool) -> None:
        order = sorted(range(placement.num_ranks), key=lambda rank: placement.stages_of(rank)[0])
        place = order.index(transport.rank)
        self.is_origin = place == 0
        self._transport = transport
        self._is_step = is_step
        self._count = 0
        self._under_way: Handle | None = None
        self._before = None if place == 0 else Edge(order[place - 1], transport.rank)
        self._after = None if place == len(order) - 1 else Edge(transport.rank, order[place + 1])

    def next_number(self) -> int:
        """A number for a new way of cutting."""
        self._count += 1
        return self._count % _NUMBERS

    def give(self, word: Word, number: int) -> None:
        """Pass the word on to the next rank, if there is one."""
        if self._after is not None:
            code = word if self._is_step else word + _EVAL
            message = torch.tensor([code, number])
            self._let_go()
            self._under_way = self._transport.post([Send(Op(OpKind.SEND_F, self._after, 0, -2), message, owned=True)])

    def explain(self, reason: str) -> None:
        """Pass on why the step is refused."""
        if self._after is not None:
            self._let_go()
            self._under_way = send_values(self._transport, Op(OpKind.SEND_F, self._after, 0, -3), reason.encode())

    def _let_go(self) -> None:
        """Wait for what was sent at the beginning of the step before: done long ago, where all is well."""
        if self._under_way is not None:
            self._under_way.wait()
            self._under_way = None

    def take(self, fail: Callable[[str], None]) -> tuple[bool, int]:
        """Hear the word, pass it on, and say whether the cut is new, and its number.

        Args:
            fail: ends the step on every rank, with a reason.

        Raises:
            StageUsageError: the step is refused, or other ranks evaluate while this one trains, or the reverse.
        """
        assert self._before is not None  # only the origin has nobody before it
        (message,) = self._transport.post([Recv(Op(OpKind.RECV_F, self._before, 0, -2), _META)]).wait()
        code, number = message.tolist()
        if (code < _EVAL) is not self._is_step:
            here, there = ("step()", "eval()") if self._is_step else ("eval()", "step()")
            reason = f"rank {self._transport.rank} is in {here} while rank {self._before.source} is in {there}"
            fail(reason)
            raise StageUsageError(f"{reason}: call the same on every rank")
        word = Word(code % _EVAL)
        self.give(word, number)
        if word is Word.REFUSED:
            payload, _ = receive_values(self._transport, Op(OpKind.RECV_F, self._before, 0, -3))
            reason = payload.decode(errors="replace")
            self.explain(reason)
            raise StageUsageError(f"the first stage's rank refused the step: {reason}")
        return word is Word.NEW, number
