"""Absent tensors: everything of a tensor but its data.

They are torch's own fake tensors: shape, strides, dtype, device and aliasing as of the real one, no storage behind, and every
operation on one gives another. So glue runs on them as it is written, and what depends on a shape alone is real on every stage.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from .._compat import DATA_ERRORS, FakeTensor, FakeTensorMode, is_transformed, mark_as_parameter, unsaved
from ._frames import source_line
from ._leaves import tensors_in, with_tensors
from ._needs import needing

# Of these only the shape of the tensor counts, so they give real tensors.
BY_SHAPE = frozenset(
    f"{kind}_like" for kind in ("zeros", "ones", "full", "empty", "rand", "randn", "randint")
) | frozenset(f"new_{kind}" for kind in ("zeros", "ones", "full", "empty", "tensor", "empty_strided"))
# By these Python looks at the data.
_READS = frozenset(
    (
        *("__bool__", "__int__", "__float__", "__complex__", "__index__", "__contains__", "__array__", "__dlpack__"),
        *(
            "__format__",
            "__repr__",
            "__reduce_ex__",
            "item",
            "tolist",
            "numpy",
            "apply_",
            "map_",
            "equal",
            "allclose",
            "is_nonzero",
        ),
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
        tracks: whether an absent tensor needs a gradient exactly if the real one would; otherwise it may say that it needs none.

    Attributes:
        overwrote: the real tensors that the last operation wrote absent data into.
    """

    def __init__(self, device: torch.device, *, tracks: bool = True) -> None:
        self.device = device
        self.tracks = tracks
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.overwrote: list[torch.Tensor] = []
        self._overwritten: dict[int, tuple[torch.Tensor, bool]] = {}  # by storage; and whether it needs a gradient now

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """An absent tensor that looks like this one, without grad."""
        device = self.device if tensor.device.type == "meta" else tensor.device
        if tensor.layout is torch.strided:
            return look_alike(tensor, self.mode, device)
        with self.mode:
            return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Likewise one that needs a gradient if this one does."""
        absent = self.of(tensor)
        if not self.tracks or not self.needs_grad(tensor):
            return absent
        return absent.requires_grad_() if tensor.is_leaf and tensor.requires_grad else needing(absent)

    def parameter(self, tensor: torch.Tensor) -> torch.Tensor:
        """Likewise for a module: a parameter stays one."""
        absent = self.of(tensor)
        if isinstance(tensor, nn.Parameter):
            absent.requires_grad_(tensor.requires_grad)
            mark_as_parameter(absent)
        return absent

    def forget(self) -> None:
        """Of the tensors of a forward that is over."""
        self._overwritten.clear()

    def is_absent(self, tensor: torch.Tensor) -> bool:
        """Whether there is no data behind a tensor, or some of it was overwritten with such."""
        return isinstance(tensor, FakeTensor) or (
            bool(self._overwritten) and not tensor.is_meta and memory_of(tensor) in self._overwritten
        )

    def needs_grad(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor needs a gradient, also where what needs one was written into it."""
        if tensor.requires_grad or not self._overwritten or isinstance(tensor, FakeTensor) or tensor.is_meta:
            return tensor.requires_grad
        return self._overwritten.get(memory_of(tensor), (None, False))[1]

    @staticmethod
    def gives_absent(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Whether a function of torch takes absent tensors alone, and gives more of them."""
        if name in BY_SHAPE or name in _READS or name in HOOKS or writes(name) or "out" in kwargs:
            return False
        given = [*tensors_in(args), *tensors_in(kwargs)]
        return bool(given) and all(isinstance(tensor, FakeTensor) for tensor in given)

    def run(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Call a function of torch; on absent tensors if one of its arguments is.

        Raises:
            NeedsDataError: the function needs an absent tensor's data.
        """
        given = [*tensors_in(args), *tensors_in(kwargs)]
        self.overwrote = []
        if not any(map(self.is_absent, given)):
            return func(*args, **kwargs)
        name = func.__name__
        if name in BY_SHAPE and not any(map(self.is_absent, looked_into(name, args, kwargs))):
            return func(*_stand_ins(args), **_stand_ins(kwargs))
        if name in HOOKS:
            return RemovableHandle(OrderedDict())  # its gradient is not here
        # What a transform of torch.func wraps is absent or not within, and the two may meet there.
        kept = [isinstance(one, FakeTensor) or is_transformed(one) for one in given]
        absent = {id(one): one if keep else self.like(one) for one, keep in zip(given, kept, strict=True)}
        used = [absent[id(one)] for one in given]
        before, following = versions(used), iter(used)
        absent_args, absent_kwargs = with_tensors(args, following), with_tensors(dict(kwargs), following)
        try:
            with unsaved():
                out = func(*absent_args, **absent_kwargs)
        except DATA_ERRORS as error:
            raise NeedsDataError(source_line(name)) from error
        except Exception as error:
            if name in _READS:
                raise NeedsDataError(source_line(name)) from error
            raise
        for number in written(func, absent_args, absent_kwargs, used, before):
            if not isinstance(given[number], FakeTensor):  # real so far, but not what will be read from it
                self._overwritten[memory_of(given[number])] = (given[number], used[number].requires_grad)
                self.overwrote.append(given[number])
                if used[number].requires_grad and not given[number].requires_grad:  # as Python may ask
                    given[number].mul_(needing(torch.ones((), dtype=used[number].dtype, device=given[number].device)))
        back = {id(stand_in): one for stand_in, one in zip(used, given, strict=True) if stand_in is not one}
        if back and any(id(leaf) in back for leaf in tensors_in(out)):  # what it was given
            return with_tensors(out, (back.get(id(leaf), leaf) for leaf in tensors_in(out)))
        return out


def look_alike(tensor: torch.Tensor, mode: FakeTensorMode, device: torch.device) -> torch.Tensor:
    """An absent tensor of the same shape, strides and dtype, as the mode would make it; not by asking it, for there are many."""
    meta = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")
    if type(meta) is torch.Tensor and not is_transformed(meta):
        return FakeTensor(mode, meta, device)
    with mode:
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)


def reads(name: str, args: tuple[Any, ...]) -> bool:
    """Whether a function of torch gives Python what is in a tensor, or a result whose shape depends on it."""
    if name in _READS or (name == "where" and len(args) == 1):
        return True
    if name == "__getitem__":
        slices = [one for one in (args[1] if isinstance(args[1], tuple) else args[1:]) if type(one) is slice]
        masks = (index.dtype in (torch.bool, torch.uint8) for index in tensors_in(args[1]))
        return next(tensors_in(slices), None) is not None or any(masks)
    if name in ("full", "full_like", "new_full") and looked_into(name, args, {}):
        return True
    return name == "repeat_interleave" and any(isinstance(arg, torch.Tensor) for arg in args[1:])


def looked_into(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The tensors whose data a function of torch may use: not the one of which ``zeros_like`` and its kind take the shape."""
    if name in BY_SHAPE:
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
    """Whether a function of torch says in its name that it changes its first argument."""
    if name.startswith("__"):
        return name in ("__setitem__", "__set__") or (
            name.startswith("__i") and name not in ("__index__", "__int__", "__invert__")
        )
    return name.endswith("_")


def versions(tensors: Sequence[torch.Tensor]) -> list[int]:
    """How often each tensor was changed in place so far, as far as torch counts it."""
    return [-1 if tensor.is_inference() else tensor._version for tensor in tensors]


def written(
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    given: Sequence[torch.Tensor],
    before: Sequence[int],
) -> list[int]:
    """Which of the tensors that a function of torch was given it has changed.

    Args:
        func: the function.
        args: what it was given.
        kwargs: likewise.
        given: the tensors in these.
        before: their versions before the call.
    """
    name = func.__name__
    named = [*tensors_in(kwargs.get("out", args[:1] if writes(name) else ()))]
    if name in ("batch_norm", "native_batch_norm") and (args[5] if len(args) > 5 else kwargs.get("training")):
        # It does not count these.
        first = 1 if func is torch.nn.functional.batch_norm else 3
        named += tensors_in((args[first : first + 2], kwargs.get("running_mean"), kwargs.get("running_var")))
    after = versions(given)
    return [
        number
        for number, one in enumerate(given)
        if after[number] != before[number] or any(one is other for other in named)
    ]


def _stand_ins(value: Any) -> Any:
    """The same arguments with real tensors, of no particular values, in place of absent ones."""

    def stand_ins() -> Iterator[torch.Tensor]:
        for tensor in tensors_in(value):
            if isinstance(tensor, FakeTensor):
                yield torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device)
            else:
                yield tensor

    return with_tensors(value, stand_ins())
