"""One thing that one rank does, and its text form.

The text form is that of torch.distributed.pipelining, so that tables interchange: ``0F3`` is the forward of microbatch 3 on
stage 0, ``1I2`` a backward for inputs, ``2SEND_F0`` the send of stage 2's output, ``1UNSHARD`` has no microbatch.
"""

from __future__ import annotations

import enum
import re

import attrs

from ..exceptions import ScheduleError


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

    @property
    def is_compute(self) -> bool:
        """Whether it runs the stage's own code: F, B, I or W."""
        return self in _COMPUTE

    @property
    def has_microbatch(self) -> bool:
        """Whether it concerns one microbatch; the data-parallel actions concern all."""
        return self not in _WHOLE_STAGE


_COMPUTE = frozenset({Kind.F, Kind.B, Kind.I, Kind.W})
_WHOLE_STAGE = frozenset({Kind.UNSHARD, Kind.RESHARD, Kind.REDUCE_GRAD})


@attrs.frozen
class Action:
    """One action of one stage.

    Attributes:
        stage: stage index.
        kind: what is done.
        microbatch: microbatch number, None for the kinds that concern all of them.
    """

    stage: int
    kind: Kind
    microbatch: int | None = None

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{'' if self.microbatch is None else self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """The action that prints as ``text``.

        Raises:
            ScheduleError: the text is no action.
        """
        match = _FORM.fullmatch(text.strip())
        if match is None:
            raise ScheduleError(
                f"{text!r} is no action; expected a stage, a kind and a microbatch, for example 0F3 or 2SEND_F0"
            )
        kind = Kind(match["kind"])
        number = match["microbatch"]
        if kind.has_microbatch != bool(number):
            needs = "needs a microbatch number" if kind.has_microbatch else "takes no microbatch number"
            raise ScheduleError(f"{text!r} is no action: {kind.value} {needs}")
        return cls(int(match["stage"]), kind, int(number) if number else None)


_FORM = re.compile(
    r"(?P<stage>\d+)(?P<kind>"
    + "|".join(sorted((kind.value for kind in Kind), key=len, reverse=True))
    + r")(?P<microbatch>\d*)"
)
