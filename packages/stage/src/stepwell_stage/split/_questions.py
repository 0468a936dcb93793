"""What Python may ask of a tensor beside its data, and stages that do not have it must answer alike.

Shape, dtype and device are as of the real one, and so are strides, but those of slices that were received. Whether it needs a
gradient is followed, where a model's forward asks for it at all. The rest is of the tensor that the stage has, or of the memory
that it is in, and nobody else can tell.
"""

from __future__ import annotations

FOLLOWED = frozenset(("requires_grad", "is_leaf", "grad_fn", "_grad_fn"))
"""As in one process; but no ``grad_fn`` itself, only that there is none."""

UNTOLD = frozenset(
    (
        *(
            "_version",
            "_base",
            "_is_view",
            "output_nr",
            "_cdata",
            "data_ptr",
            "storage",
            "untyped_storage",
            "_typed_storage",
        ),
        *("storage_offset", "storage_type", "is_set_to", "is_shared", "is_pinned", "retains_grad"),
        *("_backward_hooks", "_post_accumulate_grad_hooks", "__cuda_array_interface__", "backward"),
    )
)
"""What is refused, if the model's own code asks for it."""

MEASURES = frozenset(
    (
        *(
            "shape",
            "ndim",
            "nbytes",
            "size",
            "dim",
            "ndimension",
            "numel",
            "nelement",
            "stride",
            "is_contiguous",
            "__len__",
        ),
        *("__iter__", "unbind", "split", "tensor_split", "chunk", "is_same_size"),
    )
)
"""What asks for a shape, beside the functions that make a tensor of one."""
