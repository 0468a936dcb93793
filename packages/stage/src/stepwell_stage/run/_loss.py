"""What a loss function returns, and what each microbatch's loss counts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any, Literal, TypeAlias

import torch
from torch.distributed.tensor import DTensor

from stepwell_meta import decode, encode

from ..exceptions import StageUsageError

LossWeights: TypeAlias = Literal["mean", "sum"] | Sequence[float] | Callable[[Any], "float | torch.Tensor"]


def check_weights(weights: LossWeights, num_microbatches: int) -> None:
    """Refuse weights that mean nothing.

    Raises:
        StageUsageError: an unknown word, what is no number, or another number of numbers than there are microbatches.
    """
    if callable(weights) or (isinstance(weights, str) and weights in ("mean", "sum")):
        return
    if (
        isinstance(weights, str)
        or not isinstance(weights, Sequence)
        or not all(isinstance(one, Real) for one in weights)
    ):
        raise StageUsageError(
            f"loss_weights must be 'mean', 'sum', one number per microbatch or a function of the target, got {weights!r}"
        )
    if len(weights) != num_microbatches:
        raise StageUsageError(
            f"loss_weights must have one number for each of {num_microbatches} microbatches, got {len(weights)}"
        )


def weights_of(weights: LossWeights, sizes: Sequence[int], targets: Sequence[Any] | None) -> Sequence[float]:
    """What each microbatch's loss counts in this step.

    Args:
        weights: as the user gave them.
        sizes: samples of each microbatch.
        targets: target of each microbatch, where this rank has them.

    Raises:
        StageUsageError: a function's numbers do not have a positive sum, or it needs targets and there are none.
    """
    if weights == "sum":
        return [1.0] * len(sizes)
    if weights == "mean":
        return _shares(list(sizes), "microbatch sizes")
    if callable(weights):
        if targets is None:
            raise StageUsageError("loss_weights is a function of the target, but this step has no target")
        return _shares([_number(weights(target)) for target in targets], "what loss_weights returned")
    return weights


def _number(found: Any) -> float:
    try:
        return float(found)
    except (TypeError, ValueError):
        raise StageUsageError(f"loss_weights must return a number for each target, got {found!r}") from None


def _shares(numbers: Sequence[float], what: str) -> list[float]:
    total = sum(numbers)
    if not total > 0:
        raise StageUsageError(f"the shares of the microbatches need a positive sum, but {what} are {list(numbers)}")
    return [number / total for number in numbers]


def take_apart(result: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss to differentiate, and the named parts to report, of what a loss function returned.

    A tensor is the loss. Of a pair of a tensor and a dict the tensor is the loss and the dict is reported. Of a dict, or of a
    tuple or list of tensors, the loss is their sum, and each is reported (of a tuple, under its number).

    Raises:
        StageUsageError: something else, or a tensor with more than one element, or a complex one.
    """
    if isinstance(result, tuple | list) and len(result) == 2 and isinstance(result[1], Mapping):
        return _scalar(result[0]), {str(name): _scalar(part).detach() for name, part in result[1].items()}
    if isinstance(result, Mapping):
        parts = {str(name): _scalar(part) for name, part in result.items()}
    elif isinstance(result, tuple | list):
        parts = {str(number): _scalar(part) for number, part in enumerate(result)}
    else:
        return _scalar(result), {}
    if not parts:
        raise StageUsageError("loss_fn returned no loss")
    values = list(parts.values())
    return sum(values[1:], start=values[0]), {name: part.detach() for name, part in parts.items()}


def pack_losses(loss: torch.Tensor | None, named: Mapping[str, torch.Tensor]) -> bytes:
    """The losses of a step, for other ranks."""
    whole = None if loss is None else loss.item()
    return encode((whole, tuple((name, part.item()) for name, part in named.items())))


def unpack_losses(word: bytes) -> tuple[torch.Tensor | None, dict[str, torch.Tensor]]:
    """What :func:`pack_losses` was given, on the CPU."""
    whole, named = decode(word)
    loss = None if whole is None else torch.tensor(whole, dtype=torch.float64)
    return loss, {name: torch.tensor(part, dtype=torch.float64) for name, part in named}


def _scalar(loss: Any) -> torch.Tensor:
    if isinstance(loss, DTensor):
        loss = loss.full_tensor()
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else repr(loss)
        raise StageUsageError(f"loss_fn must return a tensor with one element, or named ones, got {got}")
    if loss.dtype.is_complex:
        raise StageUsageError(
            f"loss_fn must return a real number, got one of dtype {loss.dtype}: take its .real or .abs()"
        )
    return loss if loss.dim() == 0 else loss.reshape(())
