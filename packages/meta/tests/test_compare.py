"""diff and validate: every difference, in one message that says where, what was expected and what came."""

from __future__ import annotations

import warnings

import attrs
import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from stepwell_meta import (
    DTensorMeta,
    MeshKey,
    MetadataError,
    MetadataWarning,
    PipeliningMetadataError,
    TensorMeta,
    UnsupportedValueError,
    diff,
    validate,
    validate_static_arg_grad_correspondence,
)

TP = MeshKey(("tp",), (2,), (1,))
PLAIN = TensorMeta((4, 8), (8, 1), torch.float32, True)
SHARDED = DTensorMeta((2, 8), (8, 1), torch.float32, True, (4, 8), (8, 1), (Shard(0),), TP)


def lines(*args: object, **kwargs: object) -> list[str]:
    return [str(difference) for difference in diff(*args, **kwargs)]  # type: ignore[arg-type]


def test_what_fits_has_no_difference() -> None:
    assert diff(PLAIN, torch.zeros(4, 8, requires_grad=True)) == ()
    assert diff(torch.zeros(2), torch.ones(2)) == ()
    assert diff(SHARDED, attrs.evolve(SHARDED)) == ()
    assert diff(None, None) == ()


def test_every_field_is_compared_at_once() -> None:
    came = TensorMeta((8, 4), (1, 8), torch.bfloat16, False)
    assert lines(PLAIN, came) == [
        "shape mismatch: expected (4, 8), got (8, 4)",
        "stride mismatch: expected (8, 1), got (1, 8)",
        "dtype mismatch: expected torch.float32, got torch.bfloat16",
        "requires_grad mismatch: expected True, got False",
    ]
    assert lines(PLAIN, came, ignore=("requires_grad", "stride"), where="input 3") == [
        "input 3: shape mismatch: expected (4, 8), got (8, 4)",
        "input 3: dtype mismatch: expected torch.float32, got torch.bfloat16",
    ]


def test_every_field_of_a_dtensor_is_compared_at_once() -> None:
    dp = MeshKey(("dp",), (2,), (2,))
    came = DTensorMeta((4, 4), (1, 4), torch.float16, False, (4, 6), (1, 4), (Shard(1),), dp)
    assert lines(SHARDED, came) == [
        "shape mismatch: expected (2, 8), got (4, 4)",
        "stride mismatch: expected (8, 1), got (1, 4)",
        "dtype mismatch: expected torch.float32, got torch.float16",
        "requires_grad mismatch: expected True, got False",
        "global_shape mismatch: expected (4, 8), got (4, 6)",
        "global_stride mismatch: expected (8, 1), got (1, 4)",
        "placements mismatch: expected (Shard(dim=0),), got (Shard(dim=1),)",
        "mesh_key mismatch: expected (tp=2), stride (1,), got (dp=2), stride (2,)",
    ]


@pytest.mark.parametrize("other", [Replicate(), Partial("sum"), Shard(1)])
def test_placements_that_differ_are_a_difference(other: object) -> None:
    came = attrs.evolve(SHARDED, placements=(other,))
    assert [difference.field for difference in diff(SHARDED, came)] == ["placements"]
    mean, total = (attrs.evolve(SHARDED, placements=(Partial(op),)) for op in ("avg", "sum"))
    assert [difference.field for difference in diff(mean, total)] == ["placements"]


def test_a_dtensor_for_a_plain_tensor_is_named_with_what_else_differs() -> None:
    found = lines(PLAIN, SHARDED)
    assert found[0].startswith("type mismatch: expected torch.float32 tensor of shape (4, 8), stride (8, 1)")
    assert ", got DTensor of shape (4, 8), (Shard(dim=0),) on mesh (tp=2), stride (1,)" in found[0]
    assert found[1:] == ["shape mismatch: expected (4, 8), got (2, 8)"]


def test_a_missing_tensor_and_an_unexpected_one_are_differences() -> None:
    assert lines(PLAIN, None, where="output gradient 1") == [
        f"output gradient 1: presence mismatch: expected {PLAIN}, got None"
    ]
    assert lines(None, PLAIN) == [f"presence mismatch: expected None, got {PLAIN}"]


@pytest.mark.parametrize(
    ("left", "right", "differs"),
    [
        (torch.empty(4, 8), torch.empty(8, 4).t(), True),
        (torch.empty(2, 3, 4, 5), torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last), True),
        (torch.empty(1, 8), torch.empty(8, 1).t(), False),
        (torch.empty(3, 1, 2), torch.empty_strided((3, 1, 2), (2, 77, 1)), False),
        (torch.empty(2, 0), torch.empty_strided((2, 0), (9, 9)), False),
        (torch.empty(2, 7, 5), torch.empty(2, 1, 5).expand(2, 7, 5), False),
        (torch.empty(4, 3), torch.empty(4, 6)[:, ::2], False),
        (torch.empty(4, 3), torch.empty(6, 4).t()[:, ::2], True),
        (torch.empty(2, 1, 4, 5), torch.empty(2, 1, 4, 5).to(memory_format=torch.channels_last), False),
    ],
)
def test_strides_differ_where_the_order_in_memory_does(left: torch.Tensor, right: torch.Tensor, differs: bool) -> None:
    assert [difference.field for difference in diff(left, right)] == ["stride"] * differs
    assert [difference.field for difference in diff(right, left)] == ["stride"] * differs


@pytest.mark.parametrize("shape", [(4, 9), (4, 1), (1, 8), (4, 8, 1), (0, 8)])
def test_another_shape_in_the_same_order_is_one_difference(shape: tuple[int, ...]) -> None:
    assert [difference.field for difference in diff(torch.empty(4, 8), torch.empty(shape))] == ["shape"]


def test_a_field_to_ignore_must_exist() -> None:
    with pytest.raises(MetadataError, match=r"cannot ignore \['strides'\]: the fields of a meta are \['shape', "):
        diff(PLAIN, PLAIN, ignore=("strides",))


def test_validate_says_it_all_in_one_error() -> None:
    with pytest.raises(PipeliningMetadataError) as caught:
        validate(
            [PLAIN, None, PLAIN, PLAIN],
            [torch.zeros(4, 9), torch.zeros(1), PLAIN],
            what="input",
            stage=2,
            hint="Give stage 2 example inputs of this shape.",
        )
    assert str(caught.value) == (
        "stage 2: 4 differences:\n"
        "  inputs: count mismatch: expected 4, got 3\n"
        "  input 0: shape mismatch: expected (4, 8), got (4, 9)\n"
        "  input 0: requires_grad mismatch: expected True, got False\n"
        "  input 1: presence mismatch: expected None, got torch.float32 tensor of shape (1,), stride (1,)\n"
        "  Give stage 2 example inputs of this shape."
    )
    assert caught.value.stage == 2
    assert [(d.where, d.field) for d in caught.value.differences] == [
        ("inputs", "count"),
        ("input 0", "shape"),
        ("input 0", "requires_grad"),
        ("input 1", "presence"),
    ]
    shape = caught.value.differences[1]
    assert (shape.expected, shape.actual) == ((4, 8), (4, 9))


def test_one_difference_takes_one_line() -> None:
    with pytest.raises(
        PipeliningMetadataError,
        match=r"^stage 1: output 0: dtype mismatch: expected torch.float32, got torch.float64\. Cast it\.$",
    ):
        validate([torch.zeros(1)], [torch.zeros(1, dtype=torch.float64)], what="output", stage=1, hint="Cast it.")
    with pytest.raises(PipeliningMetadataError, match=r"^value 0: shape mismatch: .*\(2,\)$"):
        validate([torch.zeros(1)], [torch.zeros(2)], what="value")


def test_validate_says_where_something_is_no_tensor() -> None:
    """A stage that returned a number was told "expected a tensor, got int", without which stage and which output."""
    with pytest.raises(UnsupportedValueError, match=r"^stage 1: output 1: expected a tensor, got int$") as caught:
        validate([PLAIN, PLAIN], [PLAIN, 3], what="output", stage=1)  # type: ignore[list-item]
    assert caught.value.path == "stage 1: output 1"
    with pytest.raises(UnsupportedValueError, match=r"^output 0: expected a tensor, got str$"):
        validate(["loss"], [PLAIN], what="output")  # type: ignore[list-item]


def test_validate_warns_or_returns() -> None:
    expected, actual = (PLAIN,), (attrs.evolve(PLAIN, dtype=torch.float16),)
    with pytest.warns(MetadataWarning, match="stage 0: input 0: dtype mismatch") as caught:
        warned = validate(expected, actual, what="input", stage=0, mode="warn")
    assert caught[0].filename == __file__
    assert validate(expected, actual, what="input", stage=0, mode="return") == warned
    assert validate(expected, actual, what="input", ignore=("dtype",)) == ()
    assert validate((), (), what="input") == ()


def test_an_unknown_mode_is_refused_also_when_all_is_well() -> None:
    with pytest.raises(MetadataError, match="'raise', 'warn' or 'return', got 'ignore'"):
        validate((), (), what="input", mode="ignore")  # type: ignore[arg-type]


FROZEN = PLAIN.without_grad()
GRAD = FROZEN
DGRAD = attrs.evolve(SHARDED, shape=(4, 8), placements=(Partial(),), requires_grad=False)


@pytest.mark.parametrize(
    ("args", "grads"),
    [
        ((), ()),
        ((PLAIN,), (GRAD,)),
        ((FROZEN,), (None,)),
        ((SHARDED,), (DGRAD,)),
        ((SHARDED.without_grad(),), (None,)),
        ((torch.zeros(2, 3, requires_grad=True),), (torch.zeros(2, 3),)),
    ],
)
def test_gradients_that_fit_their_values(args: object, grads: object) -> None:
    validate_static_arg_grad_correspondence(args, grads, stage=0, kind="input")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("args", "grads", "words"),
    [
        ((PLAIN,), (), "input gradients: count mismatch: expected 1, got 0"),
        ((), (None,), "input gradients: count mismatch: expected 0, got 1"),
        (
            (FROZEN,),
            (GRAD,),
            "input gradient 0: presence mismatch: expected None, because input 0 requires no grad, got ",
        ),
        ((SHARDED.without_grad(),), (DGRAD,), ".*because input 0 requires no grad, got DTensor"),
        ((SHARDED,), (GRAD,), "input gradient 0: type mismatch: expected a DTensor or None, got torch.float32 tensor"),
        ((PLAIN,), (DGRAD,), "input gradient 0: type mismatch: expected a plain tensor or None, got DTensor"),
        ((PLAIN,), (torch.zeros(4, 9),), r"input gradient 0: shape mismatch: expected \(4, 8\), got \(4, 9\)"),
        (
            (SHARDED,),
            (attrs.evolve(DGRAD, global_shape=(8, 8)),),
            r"input gradient 0: shape mismatch: expected \(4, 8\), got \(8, 8\)",
        ),
    ],
)
def test_gradients_that_cannot_be_of_their_values(args: object, grads: object, words: str) -> None:
    with pytest.raises(PipeliningMetadataError, match=rf"^stage 3: {words}") as caught:
        validate_static_arg_grad_correspondence(args, grads, stage=3, kind="input")  # type: ignore[arg-type]
    assert caught.value.stage == 3
    assert len(caught.value.differences) == 1


def test_what_is_no_tensor_is_named() -> None:
    with pytest.raises(MetadataError, match=r"^stage 1: output 1: expected a tensor, got NoneType"):
        validate_static_arg_grad_correspondence((PLAIN, None), (GRAD, None), stage=1, kind="output")  # type: ignore[arg-type]
    with pytest.raises(MetadataError, match=r"^stage 1: output gradient 0: expected a tensor, got float"):
        validate_static_arg_grad_correspondence((PLAIN,), (0.0,), stage=1, kind="output")  # type: ignore[arg-type]
    with pytest.raises(MetadataError, match=r"^expected a tensor, got int"):
        diff(PLAIN, 3)  # type: ignore[arg-type]


def test_every_breach_is_listed_and_counts_more_than_a_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(PipeliningMetadataError, match="stage 1: 3 differences") as caught:
            validate_static_arg_grad_correspondence(
                (FROZEN, SHARDED, PLAIN), (GRAD, GRAD, None, None), stage=1, kind="output"
            )
    assert [difference.field for difference in caught.value.differences] == ["count", "presence", "type"]
    assert "Give one gradient for each value" in str(caught.value)


def test_a_missing_gradient_only_warns() -> None:
    with pytest.warns(
        MetadataWarning, match="^stage 1: output gradient 0 is None, but output 0 requires grad"
    ) as caught:
        validate_static_arg_grad_correspondence((PLAIN, FROZEN, SHARDED), (None, None, None), stage=1, kind="output")
    assert len(caught) == 1
    assert "output gradient 2 is None" in str(caught[0].message)
    assert "output gradient 1" not in str(caught[0].message)
    assert caught[0].filename == __file__
