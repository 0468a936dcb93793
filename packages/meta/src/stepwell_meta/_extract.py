"""From tensors to metas, from metas to the metas of their gradients, and from DTensors to what crosses a wire."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, overload

import torch
from torch.distributed.tensor import DTensor

from ._compat import AsyncCollectiveTensor
from ._dtensor import DTensorMeta
from ._stage import AnyMeta
from ._tensor import TensorMeta, type_name
from .exceptions import MetadataError, UnsupportedValueError

__all__ = ["derive_grad_metas", "extract_meta", "extract_metas", "to_local_if_dtensor"]


def extract_meta(tensor: torch.Tensor | AnyMeta) -> AnyMeta:
    """The meta of a plain tensor or DTensor; a meta stays as it is.

    Raises:
        UnsupportedValueError: ``tensor`` is neither; see `TensorMeta.from_tensor`.

    Example:
        >>> extract_meta(torch.zeros(2)).shape
        (2,)
    """
    if isinstance(tensor, TensorMeta | DTensorMeta):
        return tensor
    if isinstance(tensor, DTensor):
        return DTensorMeta.from_dtensor(tensor)
    return TensorMeta.from_tensor(tensor)


@overload
def extract_metas(
    tensors: Iterable[torch.Tensor | AnyMeta], *, allow_none: Literal[False] = ..., what: str = ...
) -> tuple[AnyMeta, ...]: ...


@overload
def extract_metas(
    tensors: Iterable[torch.Tensor | AnyMeta | None], *, allow_none: Literal[True], what: str = ...
) -> tuple[AnyMeta | None, ...]: ...


def extract_metas(
    tensors: Iterable[torch.Tensor | AnyMeta | None], *, allow_none: bool = False, what: str = "value"
) -> tuple[AnyMeta | None, ...]:
    """The meta of each tensor.

    Args:
        tensors: Plain tensors and DTensors, or metas, which stay as they are.
        allow_none: Whether None stays None, as for gradients, or is an error.
        what: What the tensors are, for messages, such as "stage 2: output".

    Raises:
        UnsupportedValueError: A value is no plain tensor or DTensor, or is None without ``allow_none``. The message says
            which one.
    """
    metas: list[AnyMeta | None] = []
    for index, tensor in enumerate(tensors):
        if tensor is None and allow_none:
            metas.append(None)
            continue
        try:
            metas.append(extract_meta(tensor))  # type: ignore[arg-type]  # None is refused there, by name
        except MetadataError as error:
            raise UnsupportedValueError(
                f"{what} {index}: {error}", type_name=type_name(tensor), path=f"{what} {index}"
            ) from error
    return tuple(metas)


def derive_grad_metas(metas: Sequence[AnyMeta]) -> tuple[AnyMeta | None, ...]:
    """The metas of values' gradients, as far as they follow from the values' own.

    The gradient of a plain tensor has its layout and dtype. None stands for two things, told apart by the value's
    ``requires_grad``: False, there is no gradient; True, it is a DTensor, whose gradient may have other placements and must
    be inferred.
    """
    return tuple(meta.without_grad() if isinstance(meta, TensorMeta) and meta.requires_grad else None for meta in metas)


def to_local_if_dtensor(tensor: torch.Tensor, *, detach: bool = False) -> torch.Tensor:
    """The local shard of a DTensor; any other tensor as it is.

    Args:
        tensor: A plain tensor or DTensor.
        detach: Take it out of the autograd graph, so that no backward redistributes anything, and make it fit to be sent:
            a collective that its values come from is waited for, and a conjugation or negation that torch put off is done.
    """
    if not detach:
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor
    with torch.no_grad():
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if isinstance(local, AsyncCollectiveTensor):
            local = local.wait()
        return local.detach().resolve_conj().resolve_neg()
