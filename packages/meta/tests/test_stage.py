"""StageMeta, ForwardMeta, BackwardMeta: records that refuse what no stage can have."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import Shard

from stepwell_meta import (
    BackwardMeta,
    DTensorMeta,
    ForwardMeta,
    MeshKey,
    MetadataError,
    StageMeta,
    TensorMeta,
    normalize_outputs,
)

PLAIN = TensorMeta((2, 3), (3, 1), torch.float32, True)
SHARDED = DTensorMeta((2, 3), (3, 1), torch.float32, True, (4, 3), (3, 1), (Shard(0),), MeshKey(("tp",), (2,), (1,)))


def test_fields_are_tuples_or_unknown() -> None:
    meta = StageMeta(inputs=[PLAIN], outputs=[PLAIN, SHARDED], input_grads=[None])  # type: ignore[arg-type]
    assert (meta.inputs, meta.outputs) == ((PLAIN,), (PLAIN, SHARDED))
    assert (meta.input_grads, meta.output_grads) == ((None,), None)
    assert StageMeta() == StageMeta(None, None, None, None)
    assert hash(meta) == hash(StageMeta((PLAIN,), (PLAIN, SHARDED), (None,)))


@pytest.mark.parametrize(
    ("meta", "expected"),
    [
        (StageMeta(), False),
        (StageMeta(inputs=(PLAIN,), outputs=(PLAIN,), output_grads=(SHARDED,)), False),
        (StageMeta(inputs=(SHARDED,)), True),
        (StageMeta(inputs=(PLAIN,), outputs=(PLAIN, SHARDED)), True),
    ],
)
def test_has_dtensors_looks_at_the_values(meta: StageMeta, expected: bool) -> None:
    assert meta.has_dtensors is expected


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"inputs": (PLAIN, None)}, r"inputs\[1\]: expected a TensorMeta or a DTensorMeta, got NoneType"),
        ({"outputs": (torch.zeros(1),)}, r"outputs\[0\]: expected .*, got torch.Tensor"),
        ({"input_grads": ("none",)}, r"input_grads\[0\]: expected .* or None, got str"),
        (
            {"inputs": (PLAIN,), "input_grads": (PLAIN, None)},
            "one input gradient, or None, for each of 1 inputs, got 2",
        ),
        ({"outputs": (PLAIN, PLAIN), "output_grads": ()}, "one output gradient, or None, for each of 2 outputs, got 0"),
    ],
)
def test_what_no_stage_has_is_refused(fields: dict[str, object], words: str) -> None:
    with pytest.raises(MetadataError, match=words):
        StageMeta(**fields)  # type: ignore[arg-type]


def test_forward_meta_has_a_meta_for_each_tensor_of_its_structure() -> None:
    structure = normalize_outputs({"h": torch.zeros(1), "aux": [torch.zeros(1), None]}).structure
    assert ForwardMeta([PLAIN, SHARDED], structure).outputs == (PLAIN, SHARDED)  # type: ignore[arg-type]
    with pytest.raises(MetadataError, match=r"each of the 2 tensors of \{'h': \*, 'aux': \[\*, None\]\}, got 1"):
        ForwardMeta((PLAIN,), structure)
    with pytest.raises(MetadataError, match=r"outputs\[1\]"):
        ForwardMeta((PLAIN, None), structure)  # type: ignore[arg-type]


def test_backward_meta_may_have_gaps() -> None:
    assert BackwardMeta([PLAIN, None, SHARDED]).input_grads == (PLAIN, None, SHARDED)  # type: ignore[arg-type]
    with pytest.raises(MetadataError, match=r"input_grads\[0\]"):
        BackwardMeta((3,))  # type: ignore[arg-type]
