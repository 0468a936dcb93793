"""What torch keeps for the whole process, and a forward may set for a part of itself, or a checkpoint for when it runs again.

Ranks that are threads would compute with one another's. (Grad mode and autocast are a thread's own; attention kernels are the
process's, but all compute the same.)
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from ..exceptions import StageUsageError

_KINDS: tuple[Any, ...] = (torch.backends.mkldnn.matmul, torch.backends.cuda.matmul)  # type: ignore[attr-defined]


def _products() -> str | tuple[str, ...]:
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # there is no word for it: it was set for each kind
        return tuple(kind.fp32_precision for kind in _KINDS)


def _set_products(kept: str | tuple[str, ...]) -> None:
    if isinstance(kept, str):
        torch.set_float32_matmul_precision(kept)
        return
    for kind, precision in zip(_KINDS, kept, strict=True):
        kind.fp32_precision = precision


_KEPT: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {
    "sets the default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "sets whether algorithms are deterministic": (
        torch.get_deterministic_debug_mode,
        torch.set_deterministic_debug_mode,
    ),
    "sets the precision of matrix products": (_products, _set_products),
}


_DRAW = re.compile(
    "drop|rand|bernoulli|normal|uniform|nomial|exponential|poisson|rrelu|geometric|cauchy|lstm|gru|rnn"
    "|gamma|dirichlet|gumbel|fractional|lowrank|lobpcg"
)
_DROPOUT_P = {"scaled_dot_product_attention": 4, "multi_head_attention_forward": 10}  # its place among the arguments


def may_draw(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a function of torch may draw random numbers that matter, by its name and what it is given."""
    if name in _DROPOUT_P:
        dropout_p = dict(enumerate(args)).get(_DROPOUT_P[name], kwargs.get("dropout_p"))
        return bool(dropout_p) and bool(kwargs.get("training", True))
    if "drop" in name and kwargs.get("p", args[1] if len(args) > 1 else None) == 0:
        return False
    return _DRAW.search(name) is not None


class Settings:
    """As they are now. Mutable: it notes what is seen that the whole process has in common."""

    def __init__(self) -> None:
        self.seen: set[str] = set()
        self._kept = {name: get() for name, (get, _) in _KEPT.items()}

    def changed(self) -> set[str]:
        """Which are others now, in words."""
        return {name for name, (get, _) in _KEPT.items() if get() != self._kept[name]}

    def look(self) -> None:
        """Note which are others now."""
        self.seen |= self.changed()

    def drawn(self) -> None:
        """Note that random numbers are drawn within a checkpoint, which sets the generator back to draw them again."""
        self.seen.add("draws random numbers within a checkpoint, for which it sets back the state")

    def check_left(self) -> None:
        """Refuse a forward that does not take back what it set.

        Raises:
            StageUsageError: one is another.
        """
        for name in self.changed():
            raise StageUsageError(
                f"the forward {name} and does not set it back, which torch keeps for the whole process: do so, or set it before"
                " the step"
            )

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Afterwards they are as they were."""
        try:
            yield
        finally:
            for name in self.changed():
                _KEPT[name][1](self._kept[name])
