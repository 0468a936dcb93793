"""Every error and warning of stepwell-graphpasses.

Three families. :class:`GraphUsageError`: the plan, the configuration, the model or the arguments are wrong, and the message
says what to change. :class:`PassError`, :class:`LintError`, :class:`GradientError`: a pass, or the graph that it left, is wrong.
:class:`PeerMismatchError`: ranks that should run the same graph do not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from stepwell_meta.exceptions import StepwellError

__all__ = [
    "CaptureError",
    "ConfigError",
    "GradientError",
    "GraphError",
    "GraphUsageError",
    "GraphWarning",
    "GuardError",
    "LintError",
    "ModelStateError",
    "NumericsError",
    "PassError",
    "PeerMismatchError",
    "PipelineOrderError",
    "PlanError",
    "SplitError",
]


class GraphError(StepwellError):
    """Base of this layer."""


class GraphWarning(UserWarning):
    """Something was left as it was, at a price in memory or speed; the message says what and why."""


class GraphUsageError(GraphError, ValueError):
    """What the caller planned, configured or passed is wrong: base of the classes below it."""


class ConfigError(GraphUsageError):
    """A field of :class:`PassConfig` is wrong, alone or together with another.

    Attributes:
        field: name of the field.
        value: what it was set to.
    """

    def __init__(self, message: str, *, field: str, value: object) -> None:
        super().__init__(message)
        self.field = field
        self.value = value


class PlanError(GraphUsageError):
    """A parallel plan names something that is not there, or contradicts itself.

    Attributes:
        pattern: the pattern in question, where there is one.
        near: names that look like it.
    """

    def __init__(self, message: str, *, pattern: str | None = None, near: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.pattern = pattern
        self.near = tuple(near)


class CaptureError(GraphUsageError):
    """The train step cannot be captured as one graph.

    Attributes:
        filename: file of the user's line that cannot be captured, where it is known.
        lineno: its number.
    """

    def __init__(self, message: str, *, filename: str | None = None, lineno: int | None = None) -> None:
        super().__init__(message)
        self.filename = filename
        self.lineno = lineno


class GuardError(GraphUsageError):
    """Inputs that the graph was not made for. Raised before anything ran.

    Attributes:
        problems: one sentence for each input that does not fit.
    """

    def __init__(self, message: str, *, problems: Sequence[str]) -> None:
        super().__init__(message)
        self.problems = tuple(problems)


class PipelineOrderError(GraphUsageError):
    """Passes in an order, or a combination, that cannot work. Raised before any of them ran."""


class SplitError(GraphUsageError):
    """A graph cannot be cut as asked."""


class ModelStateError(GraphUsageError):
    """The live model is no longer what was compiled: parameters were replaced, removed, or are not initialised."""


class GradientError(GraphError):
    """The gradients that a graph gave are not those that the model needs: another number, name, or shape."""


class NumericsError(GraphError):
    """A graph's loss or gradients are not those of eager.

    Attributes:
        errors: the relative error of each parameter's gradient.
    """

    def __init__(self, message: str, *, errors: Mapping[str, float]) -> None:
        super().__init__(message)
        self.errors = dict(errors)


class PassError(GraphError):
    """A pass failed. The model is as it was before compilation.

    Attributes:
        pass_name: name of the pass.
    """

    def __init__(self, message: str, *, pass_name: str) -> None:
        super().__init__(message)
        self.pass_name = pass_name


class LintError(GraphError):
    """A graph breaks a rule that every graph must keep.

    Attributes:
        problems: one sentence for each violation.
    """

    def __init__(self, message: str, *, problems: Sequence[str]) -> None:
        super().__init__(message)
        self.problems = tuple(problems)


class PeerMismatchError(GraphError):
    """Ranks of one group would run different graphs.

    Attributes:
        ranks: the ranks that differ from the first one of their group.
    """

    def __init__(self, message: str, *, ranks: Sequence[int]) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)
