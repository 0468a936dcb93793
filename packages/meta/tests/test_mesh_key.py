"""The key of a mesh: equal on every stage, different for every other mesh, and nothing that no mesh can be."""

from __future__ import annotations

import itertools

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepwell_meta import MeshKey, MetadataError


def test_the_grids_of_two_stages_have_one_key() -> None:
    # A world of 8 as (dp=2, pp=2, tp=2): the dp x tp grids of the two pipeline stages.
    first = MeshKey.from_ranks([0, 1, 4, 5], (2, 2), axis_names=("dp", "tp"))
    second = MeshKey.from_ranks([2, 3, 6, 7], (2, 2), axis_names=("dp", "tp"))
    assert first == second == MeshKey(("dp", "tp"), (2, 2), (4, 1))
    assert hash(first) == hash(second)


@pytest.mark.parametrize(
    ("ranks", "shape", "stride"),
    [
        ([5], (1,), (0,)),
        ([5], (), ()),
        ([0, 1, 2, 3], (4,), (1,)),
        ([1, 3, 5], (3,), (2,)),
        ([3, 2, 1, 0], (4,), (-1,)),
        ([0, 2, 1, 3], (2, 2), (1, 2)),
        ([4, 5], (1, 2), (0, 1)),
        ([4, 6], (2, 1), (2, 0)),
        ([0, 3, 2, 5, 4, 7], (3, 2), (2, 3)),
        (list(range(24)), (2, 3, 4), (12, 4, 1)),
    ],
)
def test_strides_of_a_grid(ranks: list[int], shape: tuple[int, ...], stride: tuple[int, ...]) -> None:
    key = MeshKey.from_ranks(ranks, shape)
    assert (key.shape, key.stride, key.offsets) == (shape, stride, None)
    assert key == MeshKey(None, shape, stride)


@pytest.mark.parametrize("ranks", [[0, 1, 4, 5], [2, 3, 6, 7], [10, 11, 14, 15]])
def test_a_grid_without_strides_has_offsets_and_still_one_key(ranks: list[int]) -> None:
    key = MeshKey.from_ranks(ranks, (4,), axis_names=("dp_tp",))
    assert key == MeshKey(("dp_tp",), (4,), (), (0, 1, 4, 5))


def test_names_tell_meshes_apart() -> None:
    keys = {
        MeshKey.from_ranks([0, 1], (2,)),
        MeshKey.from_ranks([0, 1], (2,), axis_names=("tp",)),
        MeshKey.from_ranks([0, 1], (2,), axis_names=("cp",)),
        MeshKey.from_ranks([0, 2], (2,), axis_names=("tp",)),
        MeshKey.from_ranks([0, 1], (2, 1), axis_names=("tp", "cp")),
        MeshKey.from_ranks([0, 1], (1, 2), axis_names=("tp", "cp")),
    }
    assert len(keys) == 6


@settings(deadline=None, derandomize=True, max_examples=60)
@given(
    shape=st.lists(st.integers(1, 4), max_size=3),
    first=st.integers(0, 100),
    data=st.data(),
)
def test_any_grid_has_a_key_that_gives_back_its_offsets(shape: list[int], first: int, data: st.DataObject) -> None:
    size = 1
    for axis in shape:
        size *= axis
    rest = data.draw(st.permutations(range(size)))
    ranks = [first + rank for rank in rest]
    key = MeshKey.from_ranks(ranks, shape)
    offsets = key.offsets
    if offsets is None:
        indices = itertools.product(*(range(n) for n in shape))
        offsets = tuple(sum(i * s for i, s in zip(index, key.stride, strict=True)) for index in indices)
    assert [offset + ranks[0] for offset in offsets] == ranks


def test_printed_forms() -> None:
    assert str(MeshKey(("dp", "tp"), (2, 4), (4, 1))) == "(dp=2, tp=4), stride (4, 1)"
    assert str(MeshKey(None, (2, 4), (4, 1))) == "(2, 4), stride (4, 1)"
    assert str(MeshKey(("x",), (4,), (), (0, 1, 4, 5))) == "(x=4), ranks at offsets (0, 1, 4, 5)"


def test_a_key_is_frozen_and_takes_any_sequence() -> None:
    key = MeshKey(["tp"], [2], [1])  # type: ignore[arg-type]
    assert key == MeshKey(("tp",), (2,), (1,))
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        key.shape = (3,)  # type: ignore[misc]


@pytest.mark.parametrize(
    ("names", "shape", "stride", "offsets", "words"),
    [
        (("a",), (2, 2), (2, 1), None, r"needs 2 axis names, got \('a',\)"),
        (("a", "a"), (2, 2), (2, 1), None, "must differ"),
        ((1,), (2,), (1,), None, "must be strings"),
        (None, (0,), (1,), None, "at least 1, got"),
        (None, (-2,), (1,), None, "at least 1, got"),
        (None, (2.0,), (1,), None, "ints of at least 1"),
        (None, (True,), (0,), None, "ints of at least 1"),
        (None, (2,), (1, 1), None, "as many strides"),
        (None, (2,), (), None, "as many strides"),
        (None, (2,), (0,), None, "must be 0 along axes of size 1"),
        (None, (1,), (1,), None, "must be 0 along axes of size 1"),
        (None, (2,), (2**40,), None, "mesh strides"),
        (None, (2,), (1.0,), None, "mesh strides"),
        (None, (2**20, 2**20), (2**20, 1), None, "more ranks than torch can number"),
        (None, (1,) * 33, (0,) * 33, None, "at most 32 axes, got 33"),
        (None, (4,), (1,), (0, 1, 4, 5), "a stride or offsets, not both"),
        (None, (4,), (), (0, 1, 4), "needs 4 offsets, got 3"),
        (None, (4,), (), (1, 2, 5, 6), "must start with 0"),
        (None, (4,), (), (0, 1, 1, 5), "differ from each other"),
        (None, (4,), (), (0, 1, 4, 2**40), "ints that a rank can hold"),
        (None, (4,), (), (0, 1, 2, 3), "described by strides"),
    ],
)
def test_what_no_mesh_can_be_is_refused(
    names: object, shape: object, stride: object, offsets: object, words: str
) -> None:
    with pytest.raises(MetadataError, match=words):
        MeshKey(names, shape, stride, offsets)  # type: ignore[arg-type]


@pytest.mark.parametrize(("ranks", "shape"), [([0, 1, 2], (4,)), ([0, 0], (2,)), ([], (0,)), ([0, 1], ())])
def test_ranks_that_do_not_fill_the_shape_are_refused(ranks: list[int], shape: tuple[int, ...]) -> None:
    with pytest.raises(MetadataError, match="distinct ranks"):
        MeshKey.from_ranks(ranks, shape)
