"""What encloses an operation of glue: a checkpoint, which runs it again in backward, or an autograd function."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType

import attrs
import torch
import torch.utils.checkpoint

from ._leaves import tensors_in

_CHECKPOINT = torch.utils.checkpoint.__file__
_FUNCTION = torch.autograd.function.__file__


@attrs.frozen(eq=False)
class Enclosing:
    """What an operation is in.

    Attributes:
        checkpoint: the outermost checkpoint's frame, if any.
        function: what the outermost autograd function was given; None outside of one.
    """

    checkpoint: FrameType | None
    function: tuple[torch.Tensor, ...] | None


def enclosing(outside: FrameType) -> Enclosing:
    """Look at the calls that are under way.

    Args:
        outside: the frame that called the model; what is above is not looked at.
    """
    checkpoint, function = None, None
    for frame in _inside(outside):
        file = frame.f_code.co_filename
        if file == _CHECKPOINT:
            checkpoint = frame
        elif file == _FUNCTION and frame.f_code.co_name == "apply":
            function = frame
    given = None if function is None else tuple(tensors_in(function.f_locals.get("args", ())))
    return Enclosing(checkpoint, given)


def _inside(outside: FrameType) -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame is not outside:
        yield frame
        frame = frame.f_back
