"""Absent tensors: everything of a tensor but its data.

They are torch's own fake tensors: shape, strides, dtype, device and aliasing as of the real one, no storage behind, and every
operation on one gives another. So glue runs on them as it is written, and what depends on a shape alone is real on every stage.
"""

from __future__ import annotations

import linecache
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from .._compat import DATA_ERRORS, FakeTensor, FakeTensorMode
from ._leaves import tensors_in, with_tensors

# Of these only the shape of the tensor counts, so they give real tensors.
_BY_SHAPE = frozenset(
    f"{kind}_like" for kind in ("zeros", "ones", "full", "empty", "rand", "randn", "randint")
) | frozenset(f"new_{kind}" for kind in ("zeros", "ones", "full", "empty", "tensor", "empty_strided"))
# By these Python looks at the data.
_READS = frozenset(
    (
        *("__bool__", "__int__", "__float__", "__complex__", "__index__", "__contains__", "__array__", "__dlpack__"),
        *("item", "tolist", "numpy", "equal", "allclose", "is_nonzero"),
        *("nonzero", "argwhere", "masked_select", "unique", "_unique2", "unique_consecutive", "unique_dim", "bincount"),
    )
)


# What is done with gradients: only the stage that makes the value has all of its gradient.
HOOKS = frozenset(("register_hook", "retain_grad"))


class NeedsDataError(BaseException):
    """Data of an absent tensor was looked at. Not an ``Exception``, which the model's own code might catch."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = what


class Absence:
    """Makes absent tensors and runs operations on them. Mutable: it remembers which real tensors had absent data written into.

    Args:
        device: where a tensor on the meta device is taken to be.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._overwritten: dict[int, torch.Tensor] = {}  # by storage

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """An absent tensor that looks like this one, without grad."""
        device = self.device if tensor.device.type == "meta" else tensor.device
        with self.mode:
            if tensor.layout is not torch.strided:
                return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
            return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)

    def parameter(self, tensor: torch.Tensor) -> torch.Tensor:
        """Likewise for a module: a parameter stays one."""
        absent = self.of(tensor)
        return nn.Parameter(absent, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else absent

    def forget(self) -> None:
        """Of the tensors of a forward that is over."""
        self._overwritten.clear()

    def is_absent(self, tensor: torch.Tensor) -> bool:
        """Whether there is no data behind a tensor, or some of it was overwritten with such."""
        return isinstance(tensor, FakeTensor) or (
            bool(self._overwritten) and not tensor.is_meta and memory_of(tensor) in self._overwritten
        )

    @staticmethod
    def gives_absent(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Whether a function of torch takes absent tensors alone, changes none of them, and gives more of them."""
        if name in _BY_SHAPE or name in _READS or name in HOOKS or writes(name) or "out" in kwargs:
            return False
        given = [*tensors_in(args), *tensors_in(kwargs)]
        return bool(given) and all(isinstance(tensor, FakeTensor) for tensor in given)

    def run(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Call a function of torch; on absent tensors if one of its arguments is.

        Raises:
            NeedsDataError: the function needs an absent tensor's data.
        """
        given = [*tensors_in(args), *tensors_in(kwargs)]
        if not any(map(self.is_absent, given)):
            return func(*args, **kwargs)
        name = func.__name__
        if name in _BY_SHAPE and not any(map(self.is_absent, looked_into(name, args, kwargs))):
            return func(*_stand_ins(args), **_stand_ins(kwargs))
        if name in HOOKS:
            return RemovableHandle(OrderedDict())  # its gradient is not here
        target = kwargs.get("out", args[0] if args and writes(name) else None)
        written = [one for one in tensors_in(target) if not isinstance(one, FakeTensor)]
        for one in written:  # real so far, but not what will be read from it
            self._overwritten[memory_of(one)] = one
        try:
            out = func(
                *with_tensors(args, map(self._as_absent, tensors_in(args))),
                **with_tensors(dict(kwargs), map(self._as_absent, tensors_in(kwargs))),
            )
        except DATA_ERRORS as error:
            raise NeedsDataError(source_line(name)) from error
        return out if not written or out is None else target

    def _as_absent(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if isinstance(tensor, FakeTensor) else self.of(tensor)


def reads(name: str, args: tuple[Any, ...]) -> bool:
    """Whether a function of torch gives Python what is in a tensor, or a result whose shape depends on it."""
    if name in _READS or (name == "where" and len(args) == 1):
        return True
    if name == "__getitem__":
        return any(index.dtype in (torch.bool, torch.uint8) for index in tensors_in(args[1]))
    if name in ("full", "full_like", "new_full") and looked_into(name, args, {}):
        return True
    return name == "repeat_interleave" and any(isinstance(arg, torch.Tensor) for arg in args[1:])


def looked_into(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The tensors whose data a function of torch may use: not the one of which ``zeros_like`` and its kind take the shape."""
    if name in _BY_SHAPE:
        args, kwargs = args[1:], {key: value for key, value in kwargs.items() if args or key != "input"}
    return [*tensors_in(args), *tensors_in(kwargs)]


def memory_of(tensor: torch.Tensor) -> int:
    """The same for tensors that share memory, as long as one of them lives."""
    try:
        found: int = tensor.untyped_storage()._cdata
    except NotImplementedError:  # sparse, or within a transform of torch.func
        return id(tensor)
    return found


def writes(name: str) -> bool:
    """Whether a function of torch changes its first argument, going by its name."""
    if name.startswith("__"):
        return name in ("__setitem__", "__set__") or (
            name.startswith("__i") and name not in ("__index__", "__int__", "__invert__")
        )
    return name.endswith("_")


def source_line(what: str) -> str:
    """Where in the model's own code something happens, for a message."""
    frame = sys._getframe(1)
    here = Path(__file__).parent
    torch_folder = Path(torch.__file__).parent
    while frame.f_back is not None:
        path = Path(frame.f_code.co_filename)
        if here not in path.parents and torch_folder not in path.parents:
            text = linecache.getline(str(path), frame.f_lineno).strip()
            return f"{what} in {path.name}:{frame.f_lineno}: {text!r}"
        frame = frame.f_back
    return what


def _stand_ins(value: Any) -> Any:
    """The same arguments with real tensors, of no particular values, in place of absent ones."""

    def stand_ins() -> Iterator[torch.Tensor]:
        for tensor in tensors_in(value):
            if isinstance(tensor, FakeTensor):
                yield torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device)
            else:
                yield tensor

    return with_tensors(value, stand_ins())
