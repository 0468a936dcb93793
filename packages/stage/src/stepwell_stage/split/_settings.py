"""What torch keeps for the whole process, and a forward may set for a part of itself.

Ranks that are threads would compute with one another's. (Grad mode and autocast are a thread's own; attention kernels are the
process's, but all compute the same.)
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
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
    "the default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "whether algorithms are deterministic": (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    "the precision of matrix products": (_products, _set_products),
}


class Settings:
    """As they are now. Mutable: it notes which of them are seen to be others."""

    def __init__(self) -> None:
        self.seen: set[str] = set()
        self._kept = {name: get() for name, (get, _) in _KEPT.items()}

    def changed(self) -> set[str]:
        """Which are others now, in words."""
        return {name for name, (get, _) in _KEPT.items() if get() != self._kept[name]}

    def look(self) -> None:
        """Note which are others now."""
        self.seen |= self.changed()

    def check_left(self) -> None:
        """Refuse a forward that does not take back what it set.

        Raises:
            StageUsageError: one is another.
        """
        for name in self.changed():
            raise StageUsageError(
                f"the forward leaves {name} changed, which torch keeps for the whole process: set it back, or set it before the"
                " step"
            )

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Afterwards they are as they were."""
        try:
            yield
        finally:
            for name in self.changed():
                _KEPT[name][1](self._kept[name])
