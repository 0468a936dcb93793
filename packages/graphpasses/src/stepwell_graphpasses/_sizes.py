"""Sizes that get a graph of their own beside the general one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch

from . import _compat as compat
from .exceptions import CaptureError, ConfigError


@attrs.frozen
class SpecializationStats:
    """How often graphs for single sizes were used.

    Attributes:
        compiled: graphs made for one size.
        hits: steps that ran one of them.
        fallbacks: steps of a listed size that ran the general graph, because ``max_specializations`` was reached or because the
            graph for the size would not have communicated as the general one does.
    """

    compiled: int = 0
    hits: int = 0
    fallbacks: int = 0


def _sizes(value: Any) -> frozenset[Any]:
    return frozenset(() if value is None else value if isinstance(value, Sequence | frozenset | set) else (value,))


@attrs.frozen
class ListedSizes:
    """Which sizes of which dim of which input.

    Raises:
        ConfigError: the sizes are no sizes, the input is not named, or the dim or the limit is no number.
    """

    sizes: frozenset[int] = attrs.field(converter=_sizes)
    input: str | None
    dim: int
    most: int

    def __attrs_post_init__(self) -> None:
        wrong = [size for size in self.sizes if isinstance(size, bool) or not isinstance(size, int) or size < 0]
        for field, fault, words in (
            ("compile_sizes", bool(wrong), "a list of whole numbers"),
            ("compile_size_dim", not isinstance(self.dim, int) or isinstance(self.dim, bool), "a dim"),
            (
                "max_specializations",
                not isinstance(self.most, int) or isinstance(self.most, bool) or self.most < 0,
                "a whole number from 0 up",
            ),
        ):
            if fault:
                value = {"compile_sizes": wrong, "compile_size_dim": self.dim, "max_specializations": self.most}[field]
                raise ConfigError(f"{field} must be {words}; got {value!r}", field=field, value=value)
        if self.sizes and self.input is None:
            raise ConfigError(
                "compile_sizes needs compile_size_input, the name of the input whose size counts",
                field="compile_size_input",
                value=None,
            )

    def shapes(self, inputs: Mapping[str, Any]) -> tuple[Any, ...] | None:
        """All shapes of inputs that have a listed size; else None.

        Raises:
            CaptureError: there is no such input, or no such dim of it.
        """
        if not self.sizes:
            return None
        named, _ = compat.flatten_named(dict(inputs))
        tensor = dict(named).get(self.input or "")
        if not isinstance(tensor, torch.Tensor) or not -tensor.dim() <= self.dim < tensor.dim():
            raise CaptureError(
                f"compile_size_input={self.input!r}, compile_size_dim={self.dim}: there is no such dim of such an input;"
                f" inputs are {', '.join(name for name, _ in named)}"
            )
        if tensor.shape[self.dim] not in self.sizes:
            return None
        return tuple((name, tuple(leaf.shape)) for name, leaf in named if isinstance(leaf, torch.Tensor))
