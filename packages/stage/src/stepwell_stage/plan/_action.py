"""One thing that one rank does, and its text form.

The text form is that of torch.distributed.pipelining, so that tables interchange: ``0F3`` is the forward of microbatch 3 on
stage 0, ``1I2`` a backward for inputs, ``2SEND_F0`` the send of stage 2's output, ``1UNSHARD`` has no microbatch, and
``(0F4;7B0)OVERLAP_F_B`` runs a forward and a backward as one. Where a stage receives from several others, ``5RECV_F0@2``
names the stage at the other end. ``2{offload}0`` is an action of the user's own, for microbatch 0 on stage 2.
"""

from __future__ import annotations

import enum
import re
from typing import NamedTuple

from ..exceptions import ScheduleError
from ._count import whole
from ._require import require


class Kind(enum.Enum):
    """What an action does; the value is its text form."""

    F = "F"  # forward
    B = "B"  # full backward
    I = "I"  # noqa: E741 - the field's name: backward for inputs
    W = "W"  # backward for weights
    SEND_F = "SEND_F"  # post the send of a stage's outputs
    RECV_F = "RECV_F"  # post the receive of a stage's inputs
    SEND_B = "SEND_B"  # post the send of the gradients of a stage's inputs
    RECV_B = "RECV_B"  # post the receive of the gradients of a stage's outputs
    WAIT_F = "WAIT_F"  # wait until the SEND_F of that stage and microbatch is done, and let go of what it sent
    WAIT_B = "WAIT_B"  # likewise for its SEND_B
    UNSHARD = "UNSHARD"  # gather a data-parallel stage's parameters
    RESHARD = "RESHARD"  # free what UNSHARD gathered
    REDUCE_GRAD = "REDUCE_GRAD"  # reduce a data-parallel stage's gradients
    OVERLAP = "OVERLAP_F_B"  # a forward and a backward as one, see Action.overlap
    CUSTOM = "CUSTOM"  # an action of the user's own, see Action.custom

    # Members are single objects; Enum hashes the name anew each time, and plans hash millions.
    __hash__ = object.__hash__

    @property
    def is_compute(self) -> bool:
        """Whether it takes the rank's own time, and so has a place in a schedule: F, B, I, W, F and B overlapped, custom ones."""
        return self in _COMPUTE

    @property
    def is_backward(self) -> bool:
        """Whether it makes the gradients of a stage's inputs: B or I."""
        return self is Kind.B or self is Kind.I

    @property
    def has_microbatch(self) -> bool:
        """Whether it concerns one microbatch; the data-parallel actions concern all."""
        return self not in _WHOLE_STAGE


_TEXTS = {kind: kind.value for kind in Kind}  # an enum's value is looked up through Python code before 3.12
_COMPUTE = frozenset({Kind.F, Kind.B, Kind.I, Kind.W, Kind.OVERLAP, Kind.CUSTOM})
_WHOLE_STAGE = frozenset({Kind.UNSHARD, Kind.RESHARD, Kind.REDUCE_GRAD})
_WITH_PEER = frozenset({Kind.RECV_F, Kind.RECV_B})


class Action(NamedTuple):
    """One action of one stage.

    A named tuple and not an attrs class, because plans hold millions: it is made five times as fast, compared and hashed in C.

    Attributes:
        stage: stage index; of an overlapped pair that of its forward.
        kind: what is done.
        microbatch: microbatch number, None for the kinds that concern all of them; of an overlapped pair that of its forward.
        peer: for a RECV the stage that sends, where the receiving stage takes values from several; None means from all.
        parts: the forward and the backward of an overlapped pair, else empty.
        name: of an action of the user's own, which one; else empty.
    """

    stage: int
    kind: Kind
    microbatch: int | None = None
    peer: int | None = None
    parts: tuple[Action, ...] = ()
    name: str = ""

    def __str__(self) -> str:
        stage, kind, microbatch, peer, parts, name = self
        if parts:
            return f"({';'.join(map(str, parts))}){kind.value}"
        what = f"{{{name}}}" if name else _TEXTS[kind]
        return f"{stage}{what}{'' if microbatch is None else microbatch}{'' if peer is None else f'@{peer}'}"

    @property
    def leaves(self) -> tuple[Action, ...]:
        """The parts of an overlapped pair, else the action alone."""
        return self.parts or (self,)

    @classmethod
    def overlap(cls, forward: Action, backward: Action) -> Action:
        """A forward of one stage and a backward of another (or of another microbatch), run as one.

        Raises:
            ScheduleError: the two are no forward and backward, or the backward needs that very forward.
        """
        for action in (forward, backward):
            require(action, Action, "an overlapped pair is of two actions")
        if forward.kind is not Kind.F or not backward.kind.is_backward:
            raise ScheduleError(f"an overlapped pair is an F and a B or I, got {forward} and {backward}")
        if (forward.stage, forward.microbatch) == (backward.stage, backward.microbatch):
            raise ScheduleError(f"{backward} needs {forward}, so the two cannot overlap")
        return cls(forward.stage, Kind.OVERLAP, forward.microbatch, parts=(forward, backward))

    @classmethod
    def custom(cls, stage: int, name: str, microbatch: int | None = None) -> Action:
        """An action of the user's own: it needs nothing, gives nothing to other actions, and runs where it stands.

        What it does is said by a handler, see :class:`Executor`.

        Raises:
            ScheduleError: the name is no letter followed by letters, digits, ``_`` and ``-``, or a number is none.
        """
        if not isinstance(name, str) or _NAME.fullmatch(name) is None:
            raise ScheduleError(
                f"the name of a custom action is a letter followed by letters, digits, '_' and '-', got {name!r}"
            )
        stage = whole(stage, "the stage of a custom action")
        microbatch = None if microbatch is None else whole(microbatch, "its microbatch")
        return cls(stage, Kind.CUSTOM, microbatch, name=name)

    @classmethod
    def parse(cls, text: str) -> Action:
        """The action that prints as ``text``.

        Raises:
            ScheduleError: the text is no action.
        """
        require(text, str, "an action is parsed from text")
        text = text.strip()
        pair = _PAIR.fullmatch(text)
        if pair is not None:
            return cls.overlap(cls.parse(pair["forward"]), cls.parse(pair["backward"]))
        match = _FORM.fullmatch(text)
        if match is None:
            raise ScheduleError(
                f"{text!r} is no action; expected a stage, a kind and a microbatch, for example 0F3 or 2SEND_F0"
            )
        kind = Kind(match["kind"]) if match["kind"] else Kind.CUSTOM
        stage, microbatch = int(match["stage"]), int(match["microbatch"]) if match["microbatch"] else None
        peer = int(match["peer"]) if match["peer"] else None
        if peer is not None and kind not in _WITH_PEER:
            raise ScheduleError(f"{text!r} is no action: only RECV_F and RECV_B name a stage after @")
        if kind is Kind.CUSTOM:
            return cls.custom(stage, match["name"], microbatch)
        if kind.has_microbatch != (microbatch is not None):
            needs = "needs a microbatch number" if kind.has_microbatch else "takes no microbatch number"
            raise ScheduleError(f"{text!r} is no action: {kind.value} {needs}")
        return cls(stage, kind, microbatch, peer)


_NAME = re.compile(r"[A-Za-z][\w-]*", re.ASCII)
_KINDS = sorted((kind.value for kind in Kind if kind not in (Kind.OVERLAP, Kind.CUSTOM)), key=len, reverse=True)
_FORM = re.compile(
    rf"(?P<stage>\d{{1,9}})(?:(?P<kind>{'|'.join(_KINDS)})|\{{(?P<name>{_NAME.pattern})\}})(?P<microbatch>\d{{0,9}})"
    r"(?:@(?P<peer>\d{1,9}))?",
    re.ASCII,
)
_PAIR = re.compile(r"\((?P<forward>[^;()]+);(?P<backward>[^;()]+)\)OVERLAP_F_B")
