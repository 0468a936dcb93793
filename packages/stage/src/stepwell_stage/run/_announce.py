"""How each step begins: the first stage's rank says which, and the word goes from rank to rank.

One message of a few numbers per rank and step. It is what lets every step have other shapes than the one before, since each
rank hears whether it knows them; and what turns a rank that evaluates while the others train, that has another schedule, that
refuses its batch, or that was given another one, into an error on every rank instead of a wait for something that never comes, or
a wrong number.
"""

from __future__ import annotations

import enum
import zlib
from collections.abc import Callable, Sequence

import torch

from stepwell_meta import TensorMeta
from stepwell_p2p import Edge, Handle, Op, OpKind, Recv, Send, Transport, receive_values, send_values

from ..exceptions import StageUsageError
from ..plan._csv import to_csv
from ..plan._schedule import Schedule

_NUMBERS = 256  # how many ways of cutting a batch are remembered; the oldest is forgotten first
SLOTS = 8
"""For how many inputs there is a number in each message, for this step, and for the one before."""
_META = TensorMeta((3 + 2 * SLOTS,), (1,), torch.int64)
_NOTHING = (0,) * (2 * SLOTS)


class Word(enum.IntEnum):
    """What a step is to be; an evaluation adds ``_EVAL``, one whose loss every rank gets ``_SHARE_LOSS``."""

    KNOWN = 0  # the batch is cut as number n was
    NEW = 1  # it is cut in a new way, which becomes number n: agree on it
    REFUSED = 2  # there will be no step; the reason follows


_EVAL = 16
_SHARE_LOSS = 32


class Announcer:
    """One rank's place in the chain of ranks; mutable: it counts."""

    def __init__(self, schedule: Schedule, transport: Transport, *, share_loss: bool) -> None:
        placement = schedule.placement
        order = sorted(range(placement.num_ranks), key=lambda rank: placement.stages_of(rank)[0])
        place = order.index(transport.rank)
        self.is_origin = place == 0
        self._transport = transport
        self._schedule = schedule
        self._digest = zlib.crc32(to_csv(schedule).encode()) if transport.size > 1 else 0
        self._is_step = schedule.has_backward
        self._share_loss = share_loss
        self._kind = (0 if self._is_step else _EVAL) + (_SHARE_LOSS if share_loss else 0)
        self._count = 0
        self._under_way: Handle | None = None
        self._last: tuple[list[int], torch.Tensor] = [], torch.empty(0)  # what was said
        self._before = None if place == 0 else Edge(order[place - 1], transport.rank)
        self._after = None if place == len(order) - 1 else Edge(transport.rank, order[place + 1])
        self._hears = [] if self._before is None else [Recv(Op(OpKind.RECV_F, self._before, 0, -2), _META)]
        self._says = None if self._after is None else Op(OpKind.SEND_F, self._after, 0, -2)

    def next_number(self) -> int:
        """A number for a new way of cutting."""
        self._count += 1
        return self._count % _NUMBERS

    def give(self, word: Word, number: int, given: Sequence[int] = _NOTHING) -> None:
        """Pass the word on to the next rank, if there is one, and what stands for what the first was given."""
        if self._says is not None:
            numbers = [word + self._kind, number, self._digest, *given]
            if numbers != self._last[0]:  # most steps begin like the one before
                self._last = numbers, torch.tensor(numbers)
            self._let_go()
            self._under_way = self._transport.post([Send(self._says, self._last[1])])

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

    def take(self, fail: Callable[[str], None]) -> tuple[bool, int, list[int]]:
        """Hear the word, pass it on, and say whether the cut is new, its number, and what stands for what the first was given.

        Args:
            fail: ends the step on every rank, with a reason.

        Raises:
            StageUsageError: the step is refused, or other ranks evaluate while this one trains, or the reverse, or they have
                another schedule, or do not agree whether every rank gets the loss.
        """
        assert self._before is not None  # only the origin has nobody before it
        (message,) = self._transport.post(self._hears).wait()
        code, number, digest, *given = message.tolist()
        here, there = f"rank {self._transport.rank}", f"rank {self._before.source}"
        if bool(code & _EVAL) is self._is_step:
            calls = ("step()", "eval()") if self._is_step else ("eval()", "step()")
            reason = f"{here} is in {calls[0]} while {there} is in {calls[1]}"
            fail(reason)
            raise StageUsageError(f"{reason}: call the same on every rank")
        if digest != self._digest:
            mine = f"{self._schedule.name} with {self._schedule.num_microbatches} microbatches"
            reason = f"{here} runs {mine}, {there} another schedule or another number of microbatches"
            fail(reason)
            raise StageUsageError(f"{reason}: make every rank's executor with the same")
        if bool(code & _SHARE_LOSS) is not self._share_loss:
            reason = f"{here} has share_loss={self._share_loss}, {there} share_loss={not self._share_loss}"
            fail(reason)
            raise StageUsageError(f"{reason}: make every rank's executor with the same")
        word = Word(code % _EVAL)
        self.give(word, number, given)
        if word is Word.REFUSED:
            payload, _ = receive_values(self._transport, Op(OpKind.RECV_F, self._before, 0, -3))
            reason = payload.decode(errors="replace")
            self.explain(reason)
            raise StageUsageError(f"the first stage's rank refused the step: {reason}")
        return word is Word.NEW, number, given
