"""Cutting a batch and putting results together again."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from stepwell_stage import TensorChunkSpec
from stepwell_stage.exceptions import StageUsageError
from stepwell_stage.run._microbatch import Batch, merge, samples, signature, split


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
    assert samples([(part, {})]) == (3,)
    assert samples([(("text", torch.tensor(1)), {})] * 2) == (1, 1)
    assert signature((part, {})) == (((3, 2), torch.float32), ((3,), torch.bool))
    assert signature((part[:1], {"x": part[1]["mask"]}))[:2] == signature((part, {}))
    assert signature(((), {"x": part[0], "scale": 2.0})) == signature(((), {"x": part[0], "scale": 3.0}))
    for other in ({"y": part[0]}, {"x": part[0], "task": "a"}, {"x": part[0], "y": None}):
        assert signature(((), other)) != signature(((), {"x": part[0]}))


def test_samples_are_the_rows_of_what_was_cut() -> None:
    """Of what every microbatch gets whole, if it stood first: then all microbatches counted the same, however large they were."""
    shared, x = torch.zeros(1, 2), torch.zeros(5, 2)
    parts = [((shared, rows), {"mask": shared}) for rows in x.tensor_split(3)]
    assert samples(parts) == (2, 2, 1)
    assert samples([(args[:1], {"x": args[1], "first": shared}) for args, _ in parts]) == (2, 2, 1)
    square = [((torch.zeros(5, 5), *args), kwargs) for args, kwargs in parts]
    assert samples(square, (None, None, TensorChunkSpec(0)), {"mask": None}) == (2, 2, 1)
    assert samples([((torch.zeros(2, n),), {}) for n in (4, 3)], (TensorChunkSpec(1),)) == (4, 3)


@pytest.mark.parametrize(
    ("rows", "sizes", "parts"),
    [
        (8, (3, 3, 2), [3, 3, 2]),
        (12, (2, 2, 2), [4, 4, 4]),  # one for each token of a sample
        (3, (2, 2, 2), [1, 1, 1]),  # one for each pair of samples
        (8, (8,), [8]),
        (7, (8,), [7]),
        (
            6,
            (2, 2, 2, 2),
            "6 rows were cut into 2, 2, 1, 1, which do not go with the inputs' microbatches of 2, 2, 2, 2",
        ),
        (8, (1, 3, 1, 3), r"8 rows .* or cut it yourself \(kwarg_mbs=, target_mbs=\)"),
        (
            16,
            (3, 3, 2),
            "16 rows were cut into 6, 5, 5, which do not go with the inputs' microbatches of 3, 3, 2 samples",
        ),
    ],
)
def test_targets_go_with_their_samples(rows: int, sizes: tuple[int, ...], parts: list[int] | str) -> None:
    """A loss that broadcasts, as mse_loss does, took a target of one row for an output of two: the gradient was another."""
    batch = Batch(target=(torch.zeros(1, 2), torch.zeros(rows, 2)))
    if isinstance(parts, str):
        with pytest.raises(StageUsageError, match=f"target: {parts}"):
            batch.targets(sizes)
    else:
        assert [len(target) for _, target in batch.targets(sizes) or ()] == parts


def test_scalars_are_stacked_and_other_values_taken_from_the_first() -> None:
    whole = merge([(torch.tensor(1.0), "same"), (torch.tensor(2.0), "same")])
    assert whole[0].tolist() == [1.0, 2.0]
    assert whole[1] == "same"


def test_outputs_of_different_structure_cannot_be_put_together() -> None:
    with pytest.raises(StageUsageError, match=r"microbatch 1 .* cannot be put together; pass return_outputs=False"):
        merge([torch.zeros(1), (torch.zeros(1),)])
