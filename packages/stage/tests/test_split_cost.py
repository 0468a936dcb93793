"""What glue costs, counted in calls of Python's: the same on every machine."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import stepwell_stage
from stepwell_meta.testing import count_calls
from stepwell_stage import split


class Layers(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def calls_of_a_forward(count: int, forwards: int = 3) -> int:
    """In a forward of the last of two stages after some others."""
    module = split(Layers(count), 2, example=torch.ones(2, 4)).module(1)
    received, x = torch.ones(2, 4, requires_grad=True), torch.ones(2, 4)
    for _ in range(forwards):
        module(received, x=x)
    return count_calls(lambda: module(received, x=x), within=stepwell_stage)


def test_a_forward_does_little_beside_its_units() -> None:
    """Checks that were added one by one had doubled the time of glue: each looked through the same arguments again."""
    few, many = calls_of_a_forward(8), calls_of_a_forward(16)
    assert (many - few) / 8 <= 14
    assert few <= 150


def test_no_forward_does_more_than_the_one_before() -> None:
    assert calls_of_a_forward(8, forwards=40) == calls_of_a_forward(8)


def calls_of_a_split(count: int) -> int:
    """In cutting a model into two."""
    model, x = Layers(count), torch.ones(2, 4)
    return count_calls(lambda: split(model, 2, example=x), within=stepwell_stage)


def test_a_split_grows_with_the_number_of_units() -> None:
    few, more, most = (calls_of_a_split(count) for count in (20, 40, 80))
    assert (most - more) / 40 <= 1.1 * (more - few) / 20


class Notes:
    """What units of one forward write into, each in a place of its own."""

    def __init__(self) -> None:
        self.full = [False] * 4


class Writes(nn.Linear):
    def forward(self, x: Tensor, notes: Notes, number: int) -> Tensor:  # type: ignore[override]
        notes.full[number] = True
        return super().forward(x)


class Noted(nn.Module):
    looks = 0

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Writes(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        Noted.looks += 1
        notes = Notes()
        for number, layer in enumerate(self.layers):
            x = layer(x, notes, number)
        return x


def test_an_example_is_looked_at_once_in_each_mode() -> None:
    """Models of transformers make a cache in each forward, which units fill; that was taken for what the next forward finds, and
    each of them was looked at four times.
    """
    Noted.looks = 0
    split(Noted(), 2, example=torch.ones(2, 4))
    assert Noted.looks == 2
