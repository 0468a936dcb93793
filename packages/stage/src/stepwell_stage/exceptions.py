"""Every error of stepwell-stage.

:class:`StageUsageError` and :class:`ScheduleError` mean that an argument or a plan is wrong and are raised before anything
computes or communicates. :class:`StageExecutionError` means that user code inside a stage raised.
Faults of metadata are :class:`stepwell_meta.exceptions.PipeliningMetadataError`, faults of peers and network are
:class:`stepwell_p2p.exceptions.PeerFailure` and :class:`stepwell_p2p.exceptions.TransportError`.
"""

from __future__ import annotations

from stepwell_meta.exceptions import StepwellError

__all__ = [
    "NonFiniteNormError",
    "ScheduleError",
    "SplitBackwardWarning",
    "StageError",
    "StageExecutionError",
    "StageUsageError",
]


class StageError(StepwellError):
    """Base of this layer."""


class StageUsageError(StageError, ValueError):
    """A stage, executor or step was given arguments that do not fit; the message says what to change."""


class ScheduleError(StageError, ValueError):
    """A schedule or plan cannot be carried out; the message names the first wrong action and why."""


class StageExecutionError(StageError, RuntimeError):
    """The code of a stage, or the loss function, raised. The original exception is the ``__cause__``.

    Attributes:
        rank: the rank on which it happened.
        stage: the stage, or None where the error has none.
        microbatch: the microbatch, or None.
        action: the action in text form, for example ``2F5``.
    """

    def __init__(self, message: str, *, rank: int, stage: int | None, microbatch: int | None, action: str) -> None:
        super().__init__(message)
        self.rank = rank
        self.stage = stage
        self.microbatch = microbatch
        self.action = action


class NonFiniteNormError(StageError, RuntimeError):
    """The gradients' norm is infinite or not a number, and the caller asked for an error then. Raised on every rank alike.

    Attributes:
        norm: the norm.
    """

    def __init__(self, message: str, *, norm: float) -> None:
        super().__init__(message)
        self.norm = norm


class SplitBackwardWarning(UserWarning):
    """A stage under a schedule that splits backwards has one that cannot be split; what it computes is right all the same."""
