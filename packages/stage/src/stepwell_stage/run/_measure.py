"""How long a model's layers take."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from stepwell_meta import decode, encode
from stepwell_p2p import Transport

from .._compat import tree_flatten
from ..exceptions import StageUsageError
from ._probe import undisturbed
from ._reader import read_forward
from ._sequential import units_of
from ._whole import decide


def measure_costs(
    model: nn.Module, *args: Any, repeats: int = 3, transport: Transport | None = None, **kwargs: Any
) -> tuple[float, ...]:
    """Seconds that each layer takes for forward and backward, for :func:`split_sequential`'s ``costs``.

    Runs the model layer by layer; gradients, buffers and random numbers are afterwards as before.

    Args:
        model: the model, with values, on the device to measure on.
        args: inputs of one microbatch.
        repeats: how often; the fastest counts.
        transport: if given, a collective of its ranks: rank 0 measures, and all get its numbers. Without, give the numbers of
            one rank to all: ranks that cut differently do not fit together.
        kwargs: keyword inputs.

    Raises:
        StageUsageError: on every rank, the forward cannot be cut, or a parameter is on the meta device.
    """
    if transport is None:
        return _measure(model, args, kwargs, repeats)
    problem: str | None = None
    costs: tuple[float, ...] = ()
    if transport.rank == 0:
        try:
            costs = _measure(model, args, kwargs, repeats)
        except StageUsageError as error:
            problem = str(error)
        except BaseException as error:  # the other ranks wait for the numbers
            transport.abort(f"{type(error).__name__}: {error}")
            raise
    word = encode(problem), [torch.tensor(costs, dtype=torch.double)]
    payload, (shared,) = decide(transport, word, lambda words: words[0])
    found = decode(payload)
    if found is not None:
        raise StageUsageError(found)
    return tuple(shared.tolist())


def _measure(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], repeats: int) -> tuple[float, ...]:
    parameters = list(model.parameters())
    if any(parameter.is_meta for parameter in parameters):
        raise StageUsageError(
            "time is measured on a model that has values, but this one is on the meta device; give costs"
        )
    forward = read_forward(model)
    units = units_of(model, forward)
    bounds = [0, *(unit.start for unit in units[1:]), len(forward.steps)]
    runs = [forward.compile(start, end) for start, end in pairwise(bounds)]
    device = parameters[0].device if parameters else torch.device("cpu")
    grads = [parameter.grad for parameter in parameters]
    best = [float("inf")] * len(units)
    try:
        with undisturbed(model, device), torch.enable_grad():
            for _ in range(repeats):
                values: tuple[Any, ...] = args
                named: Mapping[str, Any] = kwargs
                for index, run in enumerate(runs):
                    values, seconds = _time(run, model, values, named, device)
                    named = {}
                    best[index] = min(best[index], seconds)
    finally:
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad = grad
    return tuple(best)


def _time(
    run: Callable[..., Any], model: nn.Module, values: Sequence[Any], named: Mapping[str, Any], device: torch.device
) -> tuple[Any, float]:
    """The outputs of one unit, apart from its graph, and how long its forward and backward took."""
    for parameter in model.parameters():
        parameter.grad = None
    synchronize(device)
    start = time.perf_counter()
    outputs = run(model, *values, **named)
    leaves, _ = tree_flatten(outputs)
    roots = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    if roots:
        torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])
    synchronize(device)
    seconds = time.perf_counter() - start
    return tuple(_leaf(value) for value in outputs) if isinstance(outputs, tuple) else outputs, seconds


def _leaf(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.requires_grad:
        return value.detach().clone().requires_grad_().view_as(value)
    return value


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what it was given."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
