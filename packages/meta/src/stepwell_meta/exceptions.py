"""Every error of stepwell-meta, and the base of every error of stepwell."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # this module is pure: at runtime it knows no torch
    from ._compare import Difference

__all__ = [
    "DecodeError",
    "MetadataError",
    "MetadataWarning",
    "PipeliningMetadataError",
    "StepwellError",
    "UnsupportedValueError",
]


class StepwellError(Exception):
    """Base of every error that a stepwell layer raises.

    Errors survive pickling with all their attributes, whatever arguments their constructors need: launchers and process
    pools send them from one process to another.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        """How pickle takes the error apart."""
        return _remake, (type(self), self.args, self.__dict__)


def _remake(cls: type[StepwellError], args: tuple[Any, ...], values: dict[str, Any]) -> StepwellError:
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(values)
    return error


class MetadataError(StepwellError):
    """Base of this layer: metadata that is malformed, unsupported or contradictory."""


class PipeliningMetadataError(MetadataError):
    """What a stage was told (or inferred) about its values does not fit what it met.

    Attributes:
        stage: Index of the stage, or None where no stage is concerned.
        differences: Everything that does not fit, in order; each prints as one line.
    """

    def __init__(self, message: str, *, stage: int | None = None, differences: tuple[Difference, ...] = ()) -> None:
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
        super().__init__(message)
        self.type_name = type_name
        self.path = path


class DecodeError(MetadataError):
    """Bytes from a peer that are not an encoding of metadata: cut short, altered or of another version.

    Attributes:
        offset: Position in the bytes at which decoding stopped.
    """

    def __init__(self, message: str, *, offset: int) -> None:
        super().__init__(message)
        self.offset = offset


class MetadataWarning(UserWarning):
    """Metadata that is legal but probably not what was meant."""
