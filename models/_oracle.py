"""The same model in one process, and how far gradients are from its."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ._entry import BATCH, Entry

MICROBATCHES = 4
ROUNDINGS = 64  # units in the last place that a sum in another order may differ by


@attrs.frozen(eq=False)
class Result:
    """What a step came to, on one rank.

    Attributes:
        loss: of the batch; None where this rank does not know it.
        grads: of every parameter that got one, by the model's own name.
        buffers: what modules keep of what they have seen, such as means of batches; by the model's own name.
    """

    loss: float | None
    grads: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor] = attrs.field(factory=dict)


@attrs.frozen(eq=False)
class Reference:
    """The step in one process, the relative difference that its arithmetic allows, and for every name the first of its kind."""

    result: Result
    allowed: float
    first_names: Mapping[str, str]

    def difference(self, parts: Sequence[Result]) -> float:
        """The largest relative difference of the loss, any gradient and any buffer of any rank.

        Relative to the largest element of that gradient. One that is nothing but rounding (a bias of keys, which softmax
        takes out again) is compared with a thousandth of the model's largest gradient.

        Raises:
            AssertionError: a gradient is missing, or there is one too many.
        """
        mine = self.result
        largest = max(float(grad.abs().max()) for grad in mine.grads.values())
        differences = [abs(mine.loss - part.loss) / abs(mine.loss) for part in parts if part.loss is not None]
        assert differences, "no rank has a loss"
        for own, others, least in (
            (mine.grads, [part.grads for part in parts], 1e-3 * largest),
            (mine.buffers, [part.buffers for part in parts], 1e-3),
        ):
            found = [(self.first_names.get(name, name), one) for other in others for name, one in other.items()]
            names = {name for name, _ in found}
            assert own.keys() == names, f"missing {sorted(own.keys() - names)}, surplus {sorted(names - own.keys())}"
            differences += [apart(own[name], one, least) for name, one in found]
        return max(float("inf") if one != one else one for one in differences)


def apart(own: Tensor, other: Tensor, least: float) -> float:
    """The largest difference of two tensors, relative to the largest element, or to `least` where that is smaller."""
    if own.numel() == 0:
        return 0.0
    own, other = own.double(), other.double()
    return float((own - other).abs().max()) / max(float(own.abs().max()), least)


def one_process(entry: Entry, size: int = BATCH) -> Reference:
    """Forward and backward of each microbatch in turn, as a plain loop of PyTorch would."""
    model, batch = entry.model(), entry.example(size)
    loss = 0.0
    with Precision() as precision:
        for part in batch.parts(MICROBATCHES):
            output = model(*part.args, **part.kwargs)
            one = entry.loss_fn(output) if part.target is None else entry.loss_fn(output, part.target)
            share = part.size / batch.size
            (one * share).backward()
            loss += one.item() * share
    return Reference(result_of(model, loss), ROUNDINGS * precision.eps, first_names(model))


def result_of(module: nn.Module, loss: float | None) -> Result:
    """What a step left in a module: the model, or a stage of it."""
    saved = module.state_dict()
    grads = {name: one.grad for name, one in module.named_parameters() if one.grad is not None}
    buffers = {name: one for name, one in module.named_buffers() if name in saved and one.is_floating_point()}
    return Result(loss, grads, buffers)


def first_names(model: nn.Module) -> dict[str, str]:
    """For each name of a parameter or buffer, the first that the same one has."""
    both = (model.named_parameters, model.named_buffers)
    every = [pair for names in both for pair in names(remove_duplicate=False)]
    first: dict[int, str] = {}
    for name, one in every:
        first.setdefault(id(one), name)
    return {name: first[id(one)] for name, one in every}


def words_of(difference: float, allowed: float) -> str:
    """As the table says it."""
    if difference > allowed:
        return f"wrong: {difference:.0e}"
    return f"right: {difference:.0e}" if difference else "right: bitwise"


class Precision(TorchDispatchMode):
    """Sees the coarsest numbers that a model computes with: some cast to float32 whatever their weights are."""

    def __init__(self) -> None:
        super().__init__()
        self.eps = torch.finfo(torch.float64).eps

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for one in result if isinstance(result, tuple | list) else (result,):
            if isinstance(one, Tensor) and one.is_floating_point():
                self.eps = max(self.eps, torch.finfo(one.dtype).eps)
        return result
