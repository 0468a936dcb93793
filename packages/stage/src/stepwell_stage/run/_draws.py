"""Refuses random numbers within checkpoints, where ranks are threads of one process.

A checkpoint notes the state of torch's generator, and sets it back to draw the same again when it runs again in backward. That
generator is the process's: other ranks that are threads draw from it in between, so it would draw others, and gradients would be
those of other masks. Nothing else shows this, so a forward on such a rank is looked at, operation by operation: the first of each
step, and those behind it as long as they draw any. That costs time, which ranks that are processes need not spend.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from stepwell_p2p import LoopbackTransport, Transport

from .._compat import TorchDispatchMode, is_in_checkpoint
from ..exceptions import StageUsageError

_SHARES = ("dropout_p", "dropout")  # of attention and recurrent layers, which draw nothing where these are 0
_SAVES = (
    "run_and_save_rng_state"  # what compilers that keep operators as they are put around one of a checkpoint that draws
)


def are_threads(transport: Transport) -> bool:
    """Whether the ranks are threads of one process."""
    return isinstance(transport, LoopbackTransport) and transport.size > 1


class Draws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Around a stage's forwards. Mutable: it knows whether the next is to be looked at.

    Args:
        stage: the stage's number.
    """

    supports_higher_order_operators = True

    def __init__(self, stage: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.looks = True
        self._stage = stage

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """A compiled stage is looked at as it runs: compiled."""
        return True

    def __enter__(self) -> Draws:
        self.looks = False
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """One operation."""
        if _draws(func, args, kwargs or {}):
            self.looks = True
            if str(func) == _SAVES or is_in_checkpoint():
                raise StageUsageError(
                    f"stage {self._stage} draws random numbers (torch.ops.{func}) within a checkpoint, which sets torch's"
                    " generator back to draw them again in backward. Ranks that are threads of one process share that generator,"
                    " so others would be drawn, and gradients wrong: run each rank in a process of its own, with torchrun"
                )
        return func(*args, **(kwargs or {}))


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
