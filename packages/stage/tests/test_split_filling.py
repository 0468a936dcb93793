"""Objects that units fill, such as a cache: every stage finds in them what one process does, but for the data."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from split_support import Block, check, make, numbers, refused
from torch import Tensor, nn

from stepwell_stage import split
from stepwell_stage.exceptions import StageUsageError
from stepwell_stage.split._filling import Untold, Watched

Threads = Callable[..., Any]
Fill = Callable[[Tensor, "Notes"], Tensor]


class Notes:
    """What units write into, each what it makes."""

    def __init__(self) -> None:
        self.rows: list[Any] = []
        self.last: deque[Any] = deque()


class Writes(Block):
    runs = 0

    def __init__(self, fill: Fill, *, looks: bool = False) -> None:
        super().__init__()
        self.fill = fill
        self.looks = looks

    def forward(self, x: Tensor, notes: Notes | None = None) -> Tensor:
        Writes.runs += 1
        if self.looks and float(x.detach().sum()) == float("inf"):
            return x
        assert notes is not None
        return super().forward(self.fill(x, notes))


class Row(nn.Module):
    """Layers that are given notes which each forward makes anew."""

    def __init__(self, fill: Fill, after: Fill, layers: int = 6, *, looks: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Writes(fill, looks=looks) for _ in range(layers))
        self.after = after

    def forward(self, x: Tensor) -> Tensor:
        notes = Notes()
        for layer in self.layers:
            x = layer(x, notes)
        return self.after(x, notes)


def append(x: Tensor, notes: Notes) -> Tensor:
    notes.rows.append(x * 2)
    return x


def by_number(x: Tensor, notes: Notes) -> Tensor:
    notes.rows.append(x * 2)
    return x * len(notes.rows)


def by_the_first(x: Tensor, notes: Notes) -> Tensor:
    notes.rows.append(torch.cat([x, x], 1))
    return x / notes.rows[0].shape[1]


def another_list(x: Tensor, notes: Notes) -> Tensor:
    notes.rows = [*notes.rows, x.sum()]
    return x * len(notes.rows)


def nested(x: Tensor, notes: Notes) -> Tensor:
    if not notes.rows:
        notes.rows.append({"made": [], "by": Notes()})
    notes.rows[0]["made"].append(x)
    notes.rows[0]["by"].first = x[:, :1]
    return x / (len(notes.rows[0]["made"]) + notes.rows[0]["by"].first.shape[1])


def in_a_deque(x: Tensor, notes: Notes) -> Tensor:
    notes.last.append(x)
    return x / len(notes.last)


def taken_out(x: Tensor, notes: Notes) -> Tensor:
    notes.rows += [x, x]
    if len(notes.rows) > 3:
        del notes.rows[1:]
    return x / len(notes.rows)


def same(x: Tensor, notes: Notes) -> Tensor:
    return x


def by_numbers(x: Tensor, notes: Notes) -> Tensor:
    return x * (1 + len(notes.rows) + len(notes.last))


def by_shapes(x: Tensor, notes: Notes) -> Tensor:
    return x * sum(row.shape[0] * row.shape[1] for row in notes.rows)


def steps(count: int = 2) -> list[list[dict[str, Any]]]:
    return [[{"x": numbers(10 * step + part)} for part in range(3)] for step in range(count)]


@pytest.mark.parametrize("after", [same, by_numbers, by_shapes])
@pytest.mark.parametrize("fill", [append, by_number, by_the_first])
def test_what_units_put_into_an_object_counts_in_every_microbatch(threads: Threads, fill: Fill, after: Fill) -> None:
    """Units of other stages were run on absent tensors for the first microbatch alone, and left the object of each later one
    empty: its length was another one in each stage, and so were the losses, silently.
    """
    check(threads, make(lambda: Row(fill, after)), [{"x": numbers(0)}], steps(), ranks=3)


@pytest.mark.parametrize("fill", [another_list, nested, in_a_deque, taken_out])
def test_objects_are_changed_in_many_ways(threads: Threads, fill: Fill) -> None:
    check(threads, make(lambda: Row(fill, by_numbers)), [{"x": numbers(0)}], steps(), ranks=3)


@pytest.mark.parametrize("fill", [append, by_the_first])
def test_units_that_decide_by_data_fill_objects_too(threads: Threads, fill: Fill) -> None:
    row = make(lambda: Row(fill, by_shapes, looks=True))
    check(threads, row, [{"x": numbers(0)}], [[{"x": numbers(n, 2 + n)} for n in range(3)]], shapes="dynamic")


def test_what_cannot_be_done_again_without_running_the_unit(threads: Threads) -> None:
    row = make(lambda: Row(in_a_deque, by_numbers, looks=True))
    refused(
        threads, r"'layers\.0' decides by data .* changes an object that it is given", row, [steps()[0][0]], steps()
    )


def test_no_unit_of_another_stage_is_run_again() -> None:
    """A model of transformers fills a cache unless it is told not to: every forward of a stage ran all units of the others anew,
    for it found another cache than the one before.
    """
    module = split(make(lambda: Row(append, same)), 2, example=numbers(0)).module(1)
    received = numbers(1).requires_grad_()
    module(received, x=numbers(0))
    Writes.runs = 0
    for _ in range(3):
        module(received, x=numbers(0))
    assert Writes.runs == 3 * 3


class Tells(Block):
    def forward(self, x: Tensor, tell: Callable[[Tensor], Any]) -> Tensor:
        x = super().forward(x)
        tell(x.mean())
        return x


class Scales(Block):
    def forward(self, x: Tensor, scales: Iterator[float]) -> Tensor:
        return super().forward(x) * next(scales)


class Scaled(nn.Module):
    """Layers that take a number each of what they are given."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Scales() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        scales = iter([1.0, 2.0, 3.0])
        for layer in self.layers:
            x = layer(x, scales)
        return x


class Told(nn.Module):
    """Layers that are given a function, which notes something for each of them."""

    def __init__(self, how: Callable[[], tuple[Callable[[Tensor], Any], Callable[[], int]]]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Tells() for _ in range(6))
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        tell, told = self.how()
        for layer in self.layers:
            x = layer(x, tell)
        return x * told()


def by_method() -> tuple[Any, Any]:
    told: list[Tensor] = []
    return told.append, told.__len__


def by_closure() -> tuple[Any, Any]:
    told: list[Tensor] = []
    return lambda one: told.append(one), lambda: len(told)


def by_partial() -> tuple[Any, Any]:
    told: dict[int, Tensor] = {}
    return functools.partial(lambda where, one: where.setdefault(len(where), one), told), told.__len__


def by_variable() -> tuple[Any, Any]:
    count = 0

    def tell(one: Tensor) -> None:
        nonlocal count
        count += 1

    return tell, lambda: count


def by_variables() -> tuple[Any, Any]:
    count, last = 0, None

    def tell(one: Tensor) -> None:
        nonlocal count, last
        count, last = count + 1, one

    return tell, lambda: count


@pytest.mark.parametrize("how", [by_method, by_closure, by_partial, by_variable])
def test_functions_that_units_are_given_note_in_every_microbatch(threads: Threads, how: Any) -> None:
    """What they note for units of other stages was noted in the first microbatch alone, and there for the stage's own twice."""
    check(threads, make(lambda: Told(how)), [{"x": numbers(0)}], steps(), ranks=3)


def test_what_is_given_to_units_and_cannot_be_followed(threads: Threads) -> None:
    """Of an iterator the stages took as many items as they have units: other numbers, silently."""
    refused(threads, "sets a variable around it", make(lambda: Told(by_variables)), [steps()[0][0]], steps())
    refused(threads, r"'layers\.0' is given an iterator", make(Scaled), [steps()[0][0]], steps())


class Shares(nn.Module):
    """As if a layer attended to the keys of an earlier one."""

    def __init__(self, layers: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Writes(self.fourth_takes_third if n == 3 else append) for n in range(layers))

    @staticmethod
    def fourth_takes_third(x: Tensor, notes: Notes) -> Tensor:
        return x + notes.rows[2].sin()

    def forward(self, x: Tensor) -> Tensor:
        notes = Notes()
        for layer in self.layers:
            x = layer(x, notes)
        return x


def test_units_that_find_what_others_put_there_are_on_one_stage(threads: Threads) -> None:
    """They were cut apart, and refused only in the first step, as if they had found a table without data in a class."""
    said = check(threads, make(Shares), [{"x": numbers(0)}], steps(), ranks=4)
    assert any("layers.2, layers.3" in line for line in said.splitlines())
    with pytest.raises(
        StageUsageError, match=r"layers\.2, layers\.3 are on stages 0, 1, but .* return it, and pass it on"
    ):
        split(make(Shares), {"layers.3": 1}, example=numbers(0))
    with pytest.raises(StageUsageError, match=r"4 units make 3 groups.* such as a cache"):
        split(make(lambda: Shares(4)), 4, example=numbers(0))


class Counted(Block):
    """Puts plain values into the notes: as many as it was told to, and as many as it was called."""

    def __init__(self, *, by_itself: bool = False, looks: bool = False) -> None:
        super().__init__()
        self.calls = 0
        self.by_itself, self.looks = by_itself, looks

    def forward(self, x: Tensor, notes: dict[str, Notes]) -> Tensor:
        kept: Any = notes["kept"]
        self.calls += 1
        if not self.looks:
            kept.seen = self.calls if self.by_itself else getattr(kept, "seen", 0) + x.shape[1]
        elif float(x.detach().sum()) > 0:
            kept.rows.append(x)
        return super().forward(x)


class Counts(nn.Module):
    def __init__(self, number: Callable[[Any], int], **options: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Counted(**options) for _ in range(4))
        self.number = number

    def forward(self, x: Tensor) -> Tensor:
        kept = Notes()
        for layer in self.layers:
            x = layer(x, {"kept": kept})
        return x * self.number(kept)


def test_plain_values_that_units_put_into_an_object(threads: Threads) -> None:
    """They were refused, though they are the same on every stage, and so were models whose cache remembers if it is empty."""
    check(threads, make(lambda: Counts(lambda kept: kept.seen)), [{"x": numbers(0)}], steps())


@pytest.mark.parametrize("option", ["by_itself", "looks"])
def test_what_a_unit_leaves_otherwise_than_others_take_it_to(threads: Threads, option: str) -> None:
    """What it put there came of its own counter, or of data: other stages had what it was in the example."""
    x = numbers(0).abs()
    model = make(lambda: Counts(lambda kept: 1 + len(kept.rows), **{option: True}))
    refused(
        threads, r"'layers\.\d' leaves something else in the Notes", model, [{"x": x}], [[{"x": x}, {"x": -20 * x}]]
    )


class Sums(nn.Module):
    """Layers that add to a tensor which is made between them, and is in an object."""

    def __init__(self, add: Fill, after: Fill) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Writes(add) for _ in range(4))
        self.after = after

    def forward(self, x: Tensor) -> Tensor:
        notes = Notes()
        notes.rows = [torch.ones_like(x)]
        view = notes.rows[0][:, :1]
        for layer in self.layers:
            x = layer(x, notes)
        notes.rows.append(view)
        return self.after(x, notes)


def add_in_place(x: Tensor, notes: Notes) -> Tensor:
    notes.rows[0].add_(x)
    return x


def add_to_a_part(x: Tensor, notes: Notes) -> Tensor:
    notes.rows[0][:, :1] += x[:, :1]
    return x


def add_and_take(x: Tensor, notes: Notes) -> Tensor:
    return x + notes.rows[0].add_(x).mean()


@pytest.mark.parametrize("add", [add_in_place, add_to_a_part])
def test_a_tensor_in_an_object_that_units_change_in_place(threads: Threads, add: Fill) -> None:
    """Only what units are given by itself was watched: each stage had what its own units had added, and losses were wrong."""
    check(threads, make(lambda: Sums(add, same)), [{"x": numbers(0)}], steps())
    for number in (0, 1):
        model = make(lambda: Sums(add, lambda x, notes: x + notes.rows[number]))  # noqa: B023
        refused(threads, r"unit 'layers\.0' changes in place but does not return", model, [{"x": numbers(0)}], steps())
    with pytest.raises(StageUsageError, match=r"4 units make 1 groups.* such as a cache"):
        split(make(lambda: Sums(add_and_take, same)), 2, example=numbers(0))


@pytest.mark.parametrize(("kind", "put"), [(deque, deque.append), (set, set.add)])
def test_another_object_at_the_address_of_one_that_was_taken_out(kind: Any, put: Callable[..., Any]) -> None:
    """What was in a set or deque was compared by address, which another object may have after it: nothing seemed changed."""
    held = kind([object()])
    watched = Watched([held])
    held.clear()
    put(held, object())
    with pytest.raises(Untold):
        watched.filling(torch.empty_like)
