"""Where in the code an operation of glue is: its line, and what encloses it: a checkpoint, which runs it again, or a function."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import attrs
import torch
import torch.utils.checkpoint

from ..exceptions import StageUsageError
from ._leaves import tensors_in

_HERE = Path(__file__).parent
_TORCH = Path(torch.__file__).parent
_ROUTERS = frozenset(
    (torch.Tensor.backward.__code__.co_filename, torch.overrides.__file__)
)  # through these others call
_CHECKPOINT = torch.utils.checkpoint.__file__
_FUNCTION = torch.autograd.function.__file__
# What torch.compile puts around a function (seen in 2.13; by another name such a function is not refused, but compiled).
_COMPILED = (str(_TORCH / "_dynamo" / "eval_frame.py"), "compile_wrapper")


@attrs.frozen(eq=False)
class Enclosing:
    """What an operation is in.

    Attributes:
        checkpoint: the outermost checkpoint's frame, if any.
        function: what the outermost autograd function was given; None outside of one.
    """

    checkpoint: FrameType | None
    function: tuple[torch.Tensor, ...] | None

    @property
    def stays(self) -> str:
        """Why what is made there stays on its stage; "" if it need not."""
        if self.function is None:
            return ""
        return "it is made in an autograd function, such as a checkpoint with use_reentrant=True (False can be cut)"


def enclosing(outside: FrameType) -> Enclosing:
    """Look at the calls that are under way.

    Args:
        outside: the frame that called the model; what is above is not looked at.

    Raises:
        StageUsageError: a function that torch.compile has made is under way.
    """
    checkpoint, function = None, None
    for frame in _inside(outside):
        file = frame.f_code.co_filename
        if file == _CHECKPOINT and frame.f_code.co_name == "checkpoint":  # not what calls it for each of several parts
            checkpoint = frame
        elif file == _FUNCTION and frame.f_code.co_name == "apply":
            function = frame
        elif file == _COMPILED[0] and frame.f_code.co_name == _COMPILED[1]:
            raise StageUsageError(
                f"{source_line('the forward')} is in a function that torch.compile has made, between units, where it would"
                " compile what stages do around each operation: leave torch.compile out there, or make the module that calls it a"
                " unit (units=)"
            )
    given = None if function is None else tuple(tensors_in(function.f_locals.get("args", ())))
    return Enclosing(checkpoint, given)


def source_line(what: str) -> str:
    """Where in the model's own code something happens, for a message."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_back is not None:
        path = Path(frame.f_code.co_filename)
        if _HERE not in path.parents and _TORCH not in path.parents:
            text = linecache.getline(str(path), frame.f_lineno).strip()
            return f"{what} in {path.name}:{frame.f_lineno}: {text!r}"
        frame = frame.f_back
    return what


def is_asked_by_model() -> bool:
    """Whether the model's code, and not torch's own or this package, is what a function mode is called for."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "__torch_function__":
        frame = frame.f_back
    frame = frame and frame.f_back
    while frame is not None and frame.f_code.co_filename in _ROUTERS:
        frame = frame.f_back
    parents = [] if frame is None else Path(frame.f_code.co_filename).parents
    return frame is not None and _HERE not in parents and _TORCH not in parents


def _inside(outside: FrameType) -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame is not outside:
        yield frame
        frame = frame.f_back
