"""What units use that they are not given, but find somewhere: refused when the model is cut, by the line that uses it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from split_support import check
from torch import Tensor, nn

from stepwell_stage import split
from stepwell_stage.exceptions import StageUsageError

X = torch.ones(2, 4, dtype=torch.float64)


class Layer(nn.Module):
    """Uses what a function finds, and keeps what it makes."""

    def __init__(self, find: Callable[[Row, int], Any], number: int) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.find, self.number, self.row, self.kept = find, number, [], None  # type: ignore[var-annotated]

    def forward(self, x: Tensor) -> Tensor:
        found = self.find(self.row[0], self.number)
        self.kept = self.inner(x).tanh()
        return self.kept if found is None else self.kept * found


class Row(nn.Module):
    """Layers that know the model that they are in."""

    def __init__(self, find: Callable[[Row, int], Any]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(find, number) for number in range(4))
        self.scale = nn.Parameter(torch.ones(4))
        self.register_buffer("table", torch.arange(4.0))
        self.constant = torch.arange(4.0).double()
        self.cache: Any = None
        self.shared: dict[str, Tensor] = {}
        for layer in self.layers:
            layer.row.append(self)

    def forward(self, x: Tensor) -> Tensor:
        self.cache = x.mean()
        x = x + self.constant
        for layer in self.layers:
            x = layer(x)
        return x


def of_the_layer_before(row: Row, number: int) -> Any:
    return row.layers[number - 1].kept if number else None


def filled_once(row: Row, number: int) -> Any:
    if not row.shared:
        row.shared["table"] = torch.arange(4.0)
    return row.shared["table"]


REFUSED = {
    "made by glue": (
        lambda row, number: row.cache,
        "'layers.0' uses a tensor that is made between units, which it is not",
    ),
    "a parameter": (lambda row, number: row.scale, "'layers.0' uses 'scale', which it is not given"),
    "another unit's": (
        lambda row, number: row.layers[1].inner.bias,
        "'layers.0' uses 'layers.1.inner.bias', which it is not given",
    ),
    "of another unit": (
        of_the_layer_before,
        "'layers.1' uses a tensor that unit 'layers.0' makes, which it is not given",
    ),
    "a cache that they share": (filled_once, "'layers.1' uses a tensor that unit 'layers.0' makes"),
}


@pytest.mark.parametrize("find", REFUSED)
def test_refused(find: str) -> None:
    """In the first step it was a TypeError or AttributeError of an absent tensor or a None, or a sentence about hooks."""
    function, message = REFUSED[find]
    with pytest.raises(StageUsageError, match=rf"{message}.*test_split_taken\.py:\d+.*pass it to the unit"):
        split(Row(function).double(), 2, example={"x": X})


@pytest.mark.parametrize("find", [lambda row, number: row.table, lambda row, number: row.constant])
def test_constants_of_the_model_are_everywhere(threads: Callable[..., Any], find: Any) -> None:
    torch.manual_seed(0)
    check(threads, Row(find).double(), [{"x": X}], [[{"x": torch.randn(2, 4).double()} for _ in range(2)]])


def test_a_table_that_is_there_before_the_split(threads: Callable[..., Any]) -> None:
    model = Row(filled_once).double()
    with torch.no_grad():
        model(X)
    check(threads, model, [{"x": X}], [[{"x": torch.randn(2, 4).double()} for _ in range(2)]])


class Applies(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        return function(self.inner(x))


class Handing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Applies() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        times = x.mul
        for layer in self.layers:
            x = layer(x, times)
        return x


def test_a_method_of_a_tensor_is_given_with_its_tensor(threads: Callable[..., Any]) -> None:
    """It was refused, as if the unit had found the tensor elsewhere."""
    steps = [[{"x": torch.randn(rows, 4).double()} for rows in (2, 3)] for _ in range(2)]
    check(threads, Handing().double(), [{"x": X}], steps)
