"""What a capture would get wrong in silence, and so refuses in words."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import fx, nn

from . import _compat as compat
from .exceptions import CaptureError


def refuse_hooks(model: nn.Module) -> None:
    """Hooks of parameters are not run by a graph, and shards have none: what they do would silently be left out."""
    for name, parameter in model.named_parameters():
        if compat.has_gradient_hooks(parameter):
            raise CaptureError(
                f"parameter {name} has a gradient hook (register_hook or register_post_accumulate_grad_hook), which a graph would"
                " leave out; remove it, and do its work in the train step or on .grad after it"
            )


def refuse_inner_backward(name: str) -> Callable[[torch.Tensor], None]:
    def refuse(_: torch.Tensor) -> None:
        raise CaptureError(
            f"the train step calls backward itself (it reached parameter {name}); return the loss, gradients are taken from it"
        )

    return refuse


def refuse_sparse_gradients(gradients: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Ranks have other rows in a sparse gradient, so no collective could sum them; and a graph does not look into them."""
    for name, gradient in gradients:
        if gradient.layout is not torch.strided:
            raise CaptureError(
                f"the gradient of {name} is sparse ({gradient.layout}), which no collective of a graph can reduce; make it"
                " dense: nn.Embedding(…, sparse=False)"
            )


def refuse_foreign_parameters(module: fx.GraphModule) -> None:
    for node in module.graph.find_nodes(op="get_attr"):
        value = getattr(module, str(node.target), None)
        if isinstance(value, torch.Tensor) and value.requires_grad:
            raise CaptureError(
                f"the step (in {node.meta['fqn'] or 'train_fn'}) uses a trainable tensor of shape {tuple(value.shape)} that"
                " is no parameter of the model; make it one, so that it is sharded, reduced and updated"
            )


def refuse_lost_tensors(module: fx.GraphModule, replaced: Sequence[tuple[str, torch.Tensor]]) -> None:
    """A tensor that a step reads, and then puts another in the place of, would stay for ever what it was in the capture."""
    read = [getattr(module, str(node.target), None) for node in module.graph.find_nodes(op="get_attr")]
    held = {value.untyped_storage().data_ptr() for value in read if isinstance(value, torch.Tensor) and value.numel()}
    for name, value in replaced:
        if value.numel() and value.untyped_storage().data_ptr() in held:
            raise CaptureError(
                f"the step reads the tensor {name} of the model, and puts another in its place for the next step, which a graph"
                f" would not see; make it a buffer: register_buffer({name.rpartition('.')[2]!r}, …)"
            )
