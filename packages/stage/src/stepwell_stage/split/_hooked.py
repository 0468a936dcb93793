"""Forward hooks of the model itself: they are glue, and see what the model takes and returns, not what a stage does."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from torch import nn

_HOOKS = (
    *("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"),
    *("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
)


def with_hooks(module: nn.Module) -> Callable[..., Any]:
    """A module's forward with its hooks around it, which are taken from the module: those that it gets later are not within.

    Args:
        module: the module. While what is returned runs, it has its hooks back, and is called as a module is.
    """
    inside, plain = vars(module), module.forward
    hooks = {name: inside[name] for name in _HOOKS}
    if not any(hooks.values()):
        return plain
    later: dict[str, Any] = {name: OrderedDict() for name in _HOOKS}
    inside.update(later)

    def call(*args: Any, **kwargs: Any) -> Any:
        running = inside["forward"]
        inside.update(hooks, forward=plain)
        try:
            return module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]
        finally:
            inside.update(later, forward=running)

    return call
