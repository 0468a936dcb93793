"""Which rank holds a model's own tensor, where several ranks of one process hold it: the others have copies."""

from __future__ import annotations

import threading

import torch
from torch.utils.weak import WeakIdKeyDictionary

_ranks: WeakIdKeyDictionary = WeakIdKeyDictionary()
_lock = threading.Lock()


def claim(tensor: torch.Tensor, rank: int) -> bool:
    """Whether a rank holds this tensor itself: the first one of the process that asks for it, and no other."""
    with _lock:
        return bool(_ranks.setdefault(tensor, rank) == rank)  # type: ignore[no-untyped-call]
