"""The numbers of the wire format: distinct, and true to torch."""

from __future__ import annotations

import pytest
import torch

from stepwell_meta import _format as fmt
from stepwell_meta._reader import _READERS
from stepwell_meta._tree import KINDS
from stepwell_meta._writer import _WRITERS


@pytest.mark.parametrize("shape", [(), (3,), (2, 3, 4), (0,), (2, 0, 3), (0, 5), (5, 0), (1, 1, 7)])
def test_row_major_strides_are_those_of_torch(shape: tuple[int, ...]) -> None:
    assert fmt.row_major(shape) == torch.empty(shape, device="meta").stride()


def test_every_dtype_has_one_name() -> None:
    assert set(fmt.DTYPES.values()) == {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    assert all(str(dtype) == f"torch.{name.decode()}" for name, dtype in fmt.DTYPES.items())
    assert max(map(len, fmt.DTYPES)) < 128


def test_what_is_written_can_be_read() -> None:
    tags = [tag for tag, _ in _WRITERS.values()]
    assert sorted(tags) == list(range(len(_READERS)))


def test_numbers_of_a_released_format_do_not_move() -> None:
    assert fmt.HEADER == b"SW\x01"
    assert {cls.__name__: tag for cls, (tag, _) in _WRITERS.items()} == {
        "NoneType": 0,
        "bool": 1,
        "int": 2,
        "float": 3,
        "complex": 4,
        "str": 5,
        "bytes": 6,
        "dtype": 7,
        "tuple": 8,
        "TensorMeta": 9,
        "DTensorMeta": 10,
        "MeshKey": 11,
        "StageMeta": 12,
        "ForwardMeta": 13,
        "BackwardMeta": 14,
        "Structure": 15,
    }
    assert KINDS == (
        "tuple",
        "list",
        "dict",
        "ordered dict",
        "named tuple",
        "dataclass",
        "attrs class",
        "registered container",
        "enum",
        "torch.Size",
    )
