"""Every error of stepwell-meta, and the base of every error of stepwell."""

from __future__ import annotations

__all__ = ["MetadataError", "PipeliningMetadataError", "StepwellError"]


class StepwellError(Exception):
    """Base of every error that a stepwell layer raises."""


class MetadataError(StepwellError):
    """Base of this layer: metadata that is malformed, unsupported or contradictory."""


class PipeliningMetadataError(MetadataError):
    """What a stage was told (or inferred) about its values does not fit what it met."""
