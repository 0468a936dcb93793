"""Refuses random numbers within checkpoints, where ranks are threads of one process.

A checkpoint notes the state of torch's generator, and sets it back to draw the same again when it runs again in backward. That
generator is the process's: other ranks that are threads draw from it in between, so it would draw others, and gradients would be
those of other masks. Nothing else shows this, so forwards on such a rank are looked at, operation by operation, which takes time:
the first of a step, and those behind it as long as they draw any. Where no checkpoint was seen, those behind it are only in steps
whose batch is cut in a new way, or whose module was put into another mode, as in the very first; so is the first where nothing
was drawn either. Ranks that are processes need none of it.

Where nothing that a stage returns requires grad, no backward of a step runs a checkpoint again, and it may draw.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from stepwell_p2p import LoopbackTransport, Transport

from .._compat import TorchDispatchMode, is_in_checkpoint
from ..exceptions import StageUsageError

if TYPE_CHECKING:
    from ._stage import PipelineStage

_SHARES = ("dropout_p", "dropout")  # of attention and recurrent layers, which draw nothing where these are 0
# What compilers that keep operators as they are put around one of a checkpoint that draws:
_SAVES = "run_and_save_rng_state"


def are_threads(transport: Transport) -> bool:
    """Whether the ranks are threads of one process."""
    return isinstance(transport, LoopbackTransport) and transport.size > 1


class Draws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Looks at a stage's forwards. Mutable: it knows what it has seen.

    Args:
        stage: the stage.

    Attributes:
        looks: whether the next forward is to be looked at.
    """

    supports_higher_order_operators = True

    def __init__(self, stage: PipelineStage) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.looks = False
        self._stage = stage
        self._has_checkpoints = False
        self._has_draws = False
        self._goes_on = False
        self._drawn = ""  # in a checkpoint, by the last forward
        self._mode: bool | None = None

    def begin(self, *, training: bool | None, is_new: bool) -> None:
        """A step begins, with the module in this mode, and a batch that may be cut in a new way."""
        self._goes_on = is_new or self._has_checkpoints or training is not self._mode
        self.looks = self._goes_on or self._has_draws
        self._mode = training

    def around(
        self, forward: Callable[[int], Any], roots: Mapping[int, Mapping[int, torch.Tensor]]
    ) -> Callable[[int], Any]:
        """A forward that is looked at where it has to be.

        Args:
            forward: of a microbatch.
            roots: what each microbatch's backward starts from, once it has run forward.
        """

        def look(microbatch: int) -> Any:
            if not self.looks:
                return forward(microbatch)
            with self:
                value = forward(microbatch)
            if self._drawn and any(root.requires_grad for root in roots[microbatch].values()):
                self._refuse()
            return value

        return look

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """A compiled stage is looked at as it runs: compiled."""
        return True

    def __enter__(self) -> Draws:
        self.looks = False
        self._drawn = ""
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """One operation."""
        draws = _draws(func, args, kwargs or {})
        self._has_draws = self._has_draws or draws
        self.looks = self.looks or (draws and self._goes_on)
        if (draws or not self._has_checkpoints) and (str(func) == _SAVES or is_in_checkpoint()):
            self._has_checkpoints = True
            if draws:
                self._drawn = str(func)
        return func(*args, **(kwargs or {}))

    def _refuse(self) -> None:
        number, loss = self._stage.stage_index, " or its loss" if self._stage.is_last else ""
        raise StageUsageError(
            f"stage {number}{loss} draws random numbers (torch.ops.{self._drawn}) within a checkpoint, which sets torch's"
            " generator back to draw them again in backward. Ranks that are threads of one process share that generator, so"
            " others would be drawn, and gradients wrong: run each rank in a process of its own, with torchrun"
        )


def _draws(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an operation draws from torch's own generator."""
    tags = getattr(func, "tags", None)
    if tags is None:  # an operator on functions
        return str(func) == _SAVES
    if torch.Tag.nondeterministic_seeded not in tags or kwargs.get("generator") is not None:
        return False
    names = [argument.name for argument in func._schema.arguments]
    given = dict(zip(names, args, strict=False)) | dict(kwargs)
    return all(given.get(name, 0) != 0 for name in _SHARES if name in names)
