"""Cutting a batch and putting results together again."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from stepwell_stage.exceptions import StageUsageError
from stepwell_stage.run._microbatch import batch_size, merge, signature, split


def test_parts_differ_by_one_at_most_and_merge_to_the_whole() -> None:
    x = torch.arange(22).reshape(11, 2)
    parts = split({"x": x, "deep": [x + 1]}, 4, what="inputs")
    assert [len(part["x"]) for part in parts] == [3, 3, 3, 2]
    assert torch.equal(merge([part["deep"][0] for part in parts]), x + 1)
    whole = merge(parts)
    assert torch.equal(whole["x"], x)
    assert torch.equal(whole["deep"][0], x + 1)


@pytest.mark.parametrize("shared", [torch.tensor(3.0), torch.ones(1, 7), torch.ones(1), "text", None, 5])
def test_p043_what_has_no_batch_dimension_goes_to_every_microbatch(shared: Any) -> None:
    """A mask of size 1 in dim 0, a 0-d tensor, anything that is no tensor."""
    parts = split((torch.zeros(4, 2), shared), 2, what="inputs")
    assert all(part[1] is shared for part in parts)


def test_p044_a_mask_of_the_whole_batch_is_cut_like_the_batch() -> None:
    mask = torch.arange(6)
    parts = split((torch.zeros(6, 2), mask), 3, what="inputs")
    assert [part[1].tolist() for part in parts] == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ((torch.zeros(2, 3),), "a batch of 2 cannot be cut into 3 microbatches"),
        ((torch.zeros(1, 3),), "a batch of 1 cannot be cut into 3 microbatches"),
        ((torch.zeros(0, 3),), "a batch of 0 cannot be cut into 3 microbatches"),
        ((torch.zeros(4, 3), torch.zeros(5)), r"got 4 and 5 \(shape \(5,\)\)"),
    ],
)
def test_p031_p043_what_cannot_be_cut_is_refused(value: Any, words: str) -> None:
    with pytest.raises(StageUsageError, match=f"inputs: .*{words}"):
        split(value, 3, what="inputs")


def test_one_microbatch_takes_any_batch() -> None:
    assert split((torch.zeros(1, 3),), 1, what="inputs")[0][0].shape == (1, 3)
    assert split((), 1, what="inputs") == [()]


def test_size_and_signature() -> None:
    part = (torch.zeros(3, 2), {"mask": torch.ones(3, dtype=torch.bool)}, "text")
    assert batch_size(part) == 3
    assert batch_size(("text", torch.tensor(1))) == 1
    assert signature((part, {})) == (((3, 2), torch.float32), ((3,), torch.bool))
    assert signature((part[:1], {"x": part[1]["mask"]}))[:2] == signature((part, {}))
    assert signature(((), {"x": part[0], "scale": 2.0})) == signature(((), {"x": part[0], "scale": 3.0}))
    for other in ({"y": part[0]}, {"x": part[0], "task": "a"}, {"x": part[0], "y": None}):
        assert signature(((), other)) != signature(((), {"x": part[0]}))


def test_scalars_are_stacked_and_other_values_taken_from_the_first() -> None:
    whole = merge([(torch.tensor(1.0), "same"), (torch.tensor(2.0), "same")])
    assert whole[0].tolist() == [1.0, 2.0]
    assert whole[1] == "same"


def test_outputs_of_different_structure_cannot_be_put_together() -> None:
    with pytest.raises(StageUsageError, match=r"microbatch 1 .* cannot be put together; pass return_outputs=False"):
        merge([torch.zeros(1), (torch.zeros(1),)])
