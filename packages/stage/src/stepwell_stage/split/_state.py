"""What a forward leaves changed of the model beside its units, which the next one may find."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

_PLAIN = (bool, int, float, str)


class GlueState:
    """The state of glue before a forward.

    Args:
        root: the model.
        units: its units. What is in them is their own matter.
    """

    def __init__(self, root: nn.Module, units: Sequence[nn.Module]) -> None:
        inside = {id(module) for unit in units for module in unit.modules()}
        self._modules = [(name, module) for name, module in root.named_modules() if id(module) not in inside]
        self._before = dict(self._now())

    def changes(self, was_written: Callable[[torch.Tensor], bool]) -> dict[str, tuple[Any, Any]]:
        """What is not as it was, before and after, by name."""
        changed = {}
        after = dict(self._now())
        for name, was in self._before.items():
            now = after.get(name)
            is_other = now is not was if isinstance(was, torch.Tensor) or isinstance(now, torch.Tensor) else now != was
            if is_other or (isinstance(now, torch.Tensor) and was_written(now)):
                changed[name] = (was, now)
        return changed

    def _now(self) -> Iterator[tuple[str, Any]]:
        for path, module in self._modules:
            for name, value in (*vars(module).items(), *module._buffers.items(), *module._parameters.items()):
                if value is None or isinstance(value, (torch.Tensor, *_PLAIN)):
                    yield f"{path}.{name}" if path else name, value
