"""Whether a stage's metadata is known before the first step or must be inferred by running the stage once."""

from __future__ import annotations

from enum import Enum

from ._dtensor import DTensorMeta
from ._stage import StageMeta

__all__ = ["InferenceMode", "needs_dynamic"]


class InferenceMode(Enum):
    """How a pipeline gets its metadata. One for all stages: they vote, and one vote for DYNAMIC decides."""

    STATIC = "static"
    DYNAMIC = "dynamic"


def needs_dynamic(meta: StageMeta, *, has_backward: bool) -> bool:
    """Whether what the user told of a stage is too little to run it without inference.

    ======================================================================  =======
    inputs or outputs not known                                             dynamic
    no DTensors: gradients look like their values                           static
    DTensors, no backward                                                   static
    DTensors, backward, a gradient not known                                dynamic
    DTensors, backward, all gradients known                                 static
    ======================================================================  =======

    A gradient is not known if its whole field is None, or if the value is a DTensor that requires grad and the entry is None.
    That entry may also mean that nobody needs the gradient, but only inference can tell, and it loses nothing.
    """
    if meta.inputs is None or meta.outputs is None:
        return True
    if not meta.has_dtensors:
        return False
    if not has_backward:
        return False
    for values, grads in ((meta.inputs, meta.input_grads), (meta.outputs, meta.output_grads)):
        if grads is None:
            return True
        for value, grad in zip(values, grads, strict=True):
            if grad is None and isinstance(value, DTensorMeta) and value.requires_grad:
                return True
    return False
