"""needs_dynamic: its five cases, each with the neighbours that decide the other way."""

from __future__ import annotations

import attrs
import pytest
import torch
from torch.distributed.tensor import Replicate

from stepwell_meta import DTensorMeta, InferenceMode, MeshKey, StageMeta, TensorMeta, needs_dynamic

PLAIN = TensorMeta((2, 3), (3, 1), torch.float32, True)
WHOLE = DTensorMeta((2, 3), (3, 1), torch.float32, True, (2, 3), (3, 1), (Replicate(),), MeshKey(("tp",), (2,), (1,)))
FROZEN = attrs.evolve(WHOLE, requires_grad=False)


@pytest.mark.parametrize("has_backward", [True, False])
@pytest.mark.parametrize(
    "meta",
    [
        StageMeta(),
        StageMeta(inputs=(PLAIN,)),
        StageMeta(outputs=(PLAIN,)),
        StageMeta(outputs=(WHOLE,), input_grads=(WHOLE,), output_grads=(WHOLE,)),
    ],
)
def test_1_forward_incomplete_is_dynamic(meta: StageMeta, has_backward: bool) -> None:
    assert needs_dynamic(meta, has_backward=has_backward)


@pytest.mark.parametrize("has_backward", [True, False])
@pytest.mark.parametrize("grads", [None, (None,), (PLAIN,)])
def test_2_no_dtensors_is_static(grads: tuple[TensorMeta | None, ...] | None, has_backward: bool) -> None:
    meta = StageMeta((PLAIN,), (PLAIN,), grads, grads)
    assert not needs_dynamic(meta, has_backward=has_backward)


def test_2_a_stage_without_inputs_and_outputs_is_known() -> None:
    assert not needs_dynamic(StageMeta((), ()), has_backward=True)


def test_3_no_backward_is_static() -> None:
    assert not needs_dynamic(StageMeta((WHOLE,), (WHOLE,)), has_backward=False)


@pytest.mark.parametrize(
    ("input_grads", "output_grads"),
    [(None, None), (None, (WHOLE,)), ((WHOLE,), None), ((None,), (WHOLE,)), ((WHOLE,), (None,))],
)
def test_4_dtensors_with_backward_and_any_gradient_missing_is_dynamic(
    input_grads: tuple[DTensorMeta | None, ...] | None, output_grads: tuple[DTensorMeta | None, ...] | None
) -> None:
    assert needs_dynamic(StageMeta((WHOLE,), (WHOLE,), input_grads, output_grads), has_backward=True)


def test_4_one_dtensor_among_plain_tensors_decides() -> None:
    meta = StageMeta((PLAIN,), (PLAIN, WHOLE), (PLAIN,), (PLAIN, None))
    assert needs_dynamic(meta, has_backward=True)


@pytest.mark.parametrize(
    "meta",
    [
        StageMeta((WHOLE,), (WHOLE,), (WHOLE,), (WHOLE,)),
        StageMeta((FROZEN,), (WHOLE,), (None,), (WHOLE,)),
        StageMeta((PLAIN,), (WHOLE,), (None,), (WHOLE,)),
    ],
)
def test_5_dtensors_with_every_gradient_they_need_is_static(meta: StageMeta) -> None:
    assert not needs_dynamic(meta, has_backward=True)


def test_the_two_modes() -> None:
    assert [mode.value for mode in InferenceMode] == ["static", "dynamic"]
