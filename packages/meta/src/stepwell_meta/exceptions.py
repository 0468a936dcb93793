"""Every error of stepwell-meta, and the base of every error of stepwell."""

from __future__ import annotations

__all__ = [
    "DecodeError",
    "MetadataError",
    "MetadataWarning",
    "PipeliningMetadataError",
    "StepwellError",
    "UnsupportedValueError",
]


class StepwellError(Exception):
    """Base of every error that a stepwell layer raises."""


class MetadataError(StepwellError):
    """Base of this layer: metadata that is malformed, unsupported or contradictory."""


class PipeliningMetadataError(MetadataError):
    """What a stage was told (or inferred) about its values does not fit what it met.

    Attributes:
        stage: Index of the stage, or None where no stage is concerned.
        differences: Everything that does not fit, in order; each prints as one line.
    """

    def __init__(self, message: str, *, stage: int | None = None, differences: tuple[object, ...] = ()) -> None:
        """Keep the values beside the message."""
        super().__init__(message)
        self.stage = stage
        self.differences = differences


class UnsupportedValueError(MetadataError):
    """A value of the caller's that stepwell-meta does not describe, refused by name.

    Attributes:
        type_name: Qualified name of the value's type.
        path: Where the value sits, such as ``outputs[0]['mask']``; empty where there is no structure.
    """

    def __init__(self, message: str, *, type_name: str, path: str = "") -> None:
        """Keep the values beside the message."""
        super().__init__(message)
        self.type_name = type_name
        self.path = path


class DecodeError(MetadataError):
    """Bytes from a peer that are not an encoding of metadata: cut short, altered or of another version.

    Attributes:
        offset: Position in the bytes at which decoding stopped.
    """

    def __init__(self, message: str, *, offset: int) -> None:
        """Keep the offset beside the message."""
        super().__init__(message)
        self.offset = offset


class MetadataWarning(UserWarning):
    """Metadata that is legal but probably not what was meant."""
