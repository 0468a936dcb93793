"""TensorMeta: exact about every tensor that torch can make, and a refusal by name for what it does not describe."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from stepwell_meta import MetadataError, TensorMeta, UnsupportedValueError

QUANTIZED = {"torch.qint8", "torch.qint32", "torch.quint8", "torch.quint4x2", "torch.quint2x4"}
DTYPES = sorted(
    {value for value in vars(torch).values() if isinstance(value, torch.dtype) and str(value) not in QUANTIZED}, key=str
)
# torch says once per process that complex32 is experimental.
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")

DENSE = {
    "contiguous": torch.empty(2, 3, 4),
    "0-d": torch.empty(()),
    "zero-size": torch.empty(2, 0, 3),
    "zero-size with odd strides": torch.empty_strided((0, 3), (7, 2)),
    "transposed": torch.empty(3, 5).t(),
    "permuted": torch.empty(2, 3, 4, 5).permute(3, 0, 2, 1),
    "channels last": torch.empty(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    "channels last 3d": torch.empty(2, 3, 4, 5, 6).contiguous(memory_format=torch.channels_last_3d),
    "channels last, one channel": torch.empty(2, 1, 4, 5).contiguous(memory_format=torch.channels_last),
    "size 1 with odd stride": torch.empty_strided((3, 1, 2), (2, 99, 1)),
    "one row": torch.empty(4, 1).t(),
    "a dense slice": torch.empty(4, 6)[1:3],
}
LOOSE = {
    "expanded": torch.empty(3, 1).expand(3, 4),
    "expanded in the middle": torch.empty(2, 1, 5).expand(2, 7, 5),
    "expanded scalar": torch.empty(()).expand(2, 3),
    "every second column": torch.empty(4, 6)[:, ::2],
    "part of channels last": torch.empty(2, 4, 4, 5).contiguous(memory_format=torch.channels_last)[:, :3],
    "windows": torch.empty(6).unfold(0, 3, 1),
    "diagonal": torch.empty(4, 4).diagonal(),
}


@pytest.mark.parametrize("source", DENSE.values(), ids=DENSE.keys())
def test_dense_layouts_survive_exactly(source: torch.Tensor) -> None:
    meta = TensorMeta.from_tensor(source)
    made = meta.empty("cpu")
    assert (meta.shape, meta.stride) == (tuple(source.shape), source.stride())
    assert meta.is_dense
    assert meta.as_dense() is meta
    assert (made.shape, made.stride(), made.dtype) == (source.shape, source.stride(), source.dtype)


@pytest.mark.parametrize("source", LOOSE.values(), ids=LOOSE.keys())
def test_gaps_and_overlaps_become_dense_in_the_order_that_torch_gives(source: torch.Tensor) -> None:
    meta = TensorMeta.from_tensor(source)
    made = meta.empty("cpu")
    assert meta.stride == source.stride()
    assert not meta.is_dense
    assert meta.as_dense().is_dense
    assert made.stride() == meta.as_dense().stride == torch.empty_like(source).stride()
    made.copy_(torch.zeros(()))  # an overlapping tensor would refuse the write
    assert made.untyped_storage().nbytes() == meta.nbytes


def test_expanded_over_batch_becomes_contiguous() -> None:
    assert TensorMeta((2, 7, 5), (5, 0, 1), torch.float32).as_dense().stride == (35, 5, 1)


@settings(deadline=None, derandomize=True, max_examples=80)
@given(
    sizes=st.lists(st.integers(0, 4), max_size=4),
    steps=st.lists(st.integers(1, 2), min_size=4, max_size=4),
    expand=st.integers(0, 3),
    data=st.data(),
)
def test_any_view_is_described_as_torch_sees_it(
    sizes: list[int], steps: list[int], expand: int, data: st.DataObject
) -> None:
    order = data.draw(st.permutations(range(len(sizes))))
    source = torch.empty([size * step for size, step in zip(sizes, steps, strict=False)])
    source = source[tuple(slice(None, None, step) for step in steps[: len(sizes)])].permute(order)
    if expand and len(sizes) < 4:
        source = source.unsqueeze(0).expand(expand, *source.shape)
    meta = TensorMeta.from_tensor(source)
    indices = itertools.product(*(range(n) for n in source.shape))
    addresses = sorted(sum(i * s for i, s in zip(index, source.stride(), strict=True)) for index in indices)
    assert meta.is_dense == (addresses == list(range(source.numel())))
    assert meta.empty("cpu").stride() == torch.empty_like(source).stride()
    assert TensorMeta.from_tensor(meta.empty("cpu")) == meta.as_dense()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(dtype: torch.dtype) -> None:
    source = torch.empty(2, 3, dtype=dtype)
    meta = TensorMeta.from_tensor(source)
    assert meta == TensorMeta((2, 3), (3, 1), dtype, False)
    assert (meta.numel, meta.nbytes) == (6, source.numel() * source.element_size())
    assert meta.empty("cpu").dtype is dtype
    with_grad = dtype.is_floating_point or dtype.is_complex
    if with_grad:
        assert TensorMeta.from_tensor(source.requires_grad_()).empty("cpu").requires_grad
    else:
        with pytest.raises(MetadataError, match=f"{dtype} tensor has no gradient"):
            TensorMeta((2, 3), (3, 1), dtype, True)


def test_the_device_is_the_callers() -> None:
    made = TensorMeta((2, 3), (1, 2), torch.float32, True).empty("meta")
    assert made.device.type == "meta"
    assert (made.stride(), made.requires_grad, made.is_leaf) == ((1, 2), True, True)


def test_a_result_of_autograd_requires_grad_and_its_copy_is_a_leaf() -> None:
    source = torch.ones(2, requires_grad=True) * 2
    made = TensorMeta.from_tensor(source).empty("cpu")
    assert made.requires_grad
    assert made.is_leaf
    assert not TensorMeta.from_tensor(source).without_grad().empty("cpu").requires_grad


def test_parameters_fakes_and_meta_tensors_count_as_plain() -> None:
    expected = TensorMeta((2, 3), (3, 1), torch.float32, True)
    with FakeTensorMode():
        fake = torch.nn.Parameter(torch.empty(2, 3))
    assert TensorMeta.from_tensor(fake) == expected
    assert TensorMeta.from_tensor(torch.nn.Parameter(torch.empty(2, 3))) == expected
    assert TensorMeta.from_tensor(torch.empty(2, 3, device="meta", requires_grad=True)) == expected
    assert TensorMeta.from_tensor(torch.nn.Buffer(torch.empty(2, 3))) == expected.without_grad()


class Labelled(torch.Tensor):
    pass


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "subclass": (lambda: torch.empty(2).as_subclass(Labelled), "Labelled"),
    "lazy parameter": (torch.nn.UninitializedParameter, "UninitializedParameter"),
    "ragged": (
        lambda: torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged),
        "a nested one: convert it .*to_padded_tensor",
    ),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(2)], layout=torch.strided), "a nested one"),
    "sparse": (lambda: torch.eye(2).to_sparse(), "torch.sparse_coo"),
    "quantized": (lambda: torch.quantize_per_tensor(torch.ones(2), 0.5, 0, torch.qint8), "a quantized one"),
    "list": (lambda: [1.0], "got list"),
    "none": (lambda: None, "got NoneType"),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
@pytest.mark.parametrize(("make", "words"), REFUSED.values(), ids=REFUSED.keys())
def test_what_is_no_plain_tensor_is_refused_by_name(make: Callable[[], torch.Tensor], words: str) -> None:
    value = make()
    with pytest.raises(UnsupportedValueError, match=words) as caught:
        TensorMeta.from_tensor(value)
    assert caught.value.type_name.rpartition(".")[2] == type(value).__name__


def test_symbolic_sizes_are_refused() -> None:
    shapes = ShapeEnv()
    with FakeTensorMode(shape_env=shapes):
        tokens = torch.empty(shapes.create_unbacked_symint(), 5)
    with pytest.raises(MetadataError, match="plain ints"):
        TensorMeta.from_tensor(tokens)


@pytest.mark.parametrize(
    ("shape", "stride", "dtype", "requires_grad", "words"),
    [
        ((2, 3), (1,), torch.float32, False, "as many strides as sizes"),
        ((1,) * 65, (1,) * 65, torch.float32, False, "at most 64"),
        ((-1,), (1,), torch.float32, False, "63 bits"),
        ((2,), (-1,), torch.float32, False, "63 bits"),
        ((2**63,), (1,), torch.uint8, False, "63 bits"),
        ((2**62,), (1,), torch.float32, False, "64-bit addressing"),
        ((2**40, 2**40), (0, 0), torch.float32, False, "64-bit addressing"),
        ((2**62, 2**62, 0), (1, 1, 1), torch.uint8, False, "64-bit addressing"),  # torch multiplies all, also with a 0
        ((2, 2), (2**62, 2**62), torch.float32, False, "64-bit addressing"),
        ((2.0,), (1,), torch.float32, False, "plain ints"),
        ((True,), (1,), torch.float32, False, "plain ints"),
        ((2,), (1,), torch.qint8, False, "not quantized"),
        ((2,), (1,), "float32", False, "expected a torch.dtype"),
        ((2,), (1,), torch.float32, 1, "True or False"),
        ((2,), (1,), torch.int64, True, "has no gradient"),
        ((2,), (1,), torch.bool, True, "has no gradient"),
    ],
)
def test_what_no_tensor_can_be_is_refused(
    shape: object, stride: object, dtype: object, requires_grad: object, words: str
) -> None:
    with pytest.raises(MetadataError, match=words):
        TensorMeta(shape, stride, dtype, requires_grad)  # type: ignore[arg-type]


def test_an_empty_tensor_may_be_as_large_as_torch_lets_it() -> None:
    for shape in ((2**62, 0), (0, 3, 2**61), (2**31, 0, 2**31)):
        source = torch.empty(shape, device="meta")
        assert TensorMeta.from_tensor(source).empty("meta").shape == source.shape


def test_a_meta_is_frozen_hashable_and_made_of_plain_values() -> None:
    meta = TensorMeta.from_tensor(torch.empty(2, 3))
    assert type(meta.shape) is tuple
    assert type(meta.stride) is tuple
    assert {meta: 1}[TensorMeta((2, 3), (3, 1), torch.float32)] == 1
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        meta.shape = (3,)  # type: ignore[misc]
    assert str(meta) == "torch.float32 tensor of shape (2, 3), stride (3, 1)"
    assert str(attrs.evolve(meta, requires_grad=True)).endswith(", requires_grad")


def test_thousands_of_metas_are_cheap() -> None:
    source = torch.empty(8, 128, 512)
    start = time.process_time()
    for _ in range(5000):
        TensorMeta.from_tensor(source)
    assert time.process_time() - start < 1.0  # 0.04 s measured; a run through torch for each would take longer
