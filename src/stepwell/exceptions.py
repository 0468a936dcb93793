"""Errors of the meta-package itself; those of the layers are in the layers."""

from __future__ import annotations

from stepwell_meta.exceptions import StepwellError

__all__ = ["LaunchError", "PipelineError", "StepwellError"]


class LaunchError(StepwellError):
    """Ranks cannot be started as asked, or did not end."""


class PipelineError(StepwellError, ValueError):
    """The pieces, ranks and options of a pipeline do not fit together."""
