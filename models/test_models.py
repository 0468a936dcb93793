"""Every model is cut as it is, and trains with the loss and the gradients of one process; or is refused in words."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import attrs
import cloudpickle
import pytest
import torch

from stepwell_stage.exceptions import StageUsageError

from . import _entry, _grid, _oracle, _own, _sight, _text
from ._entry import Entry
from ._grid import SCHEDULES, STAGES, on_processes, on_threads
from ._oracle import Reference, one_process, words_of
from ._zoo import BY_NAME, ENTRIES

if TYPE_CHECKING:
    from stepwell_meta.testing import WorkerPool

    from ._page import Table

torch.set_num_threads(1)
RIGHT_AT_LEAST = 22
# Over processes: where tied weights, labels and several inputs cross, where data decides, where batches leave statistics.
OVER_GLOO = {"GPT-2": "1F1B", "T5": "ZBV", "Longformer": "Interleaved", "U-Net": "1F1B", "Mixtral": "ZBV"}


@functools.cache
def reference(name: str) -> Reference:
    return one_process(BY_NAME[name])


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
@pytest.mark.parametrize("stages", STAGES)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_model_trains_as_in_one_process(entry: Entry, stages: int, schedule: str, table: Table) -> None:
    expected = reference(entry.name)
    column = f"{stages} stages"
    if stages in entry.refused:
        with pytest.raises(StageUsageError, match=entry.refused[stages]) as refusal:
            on_threads(entry, stages, schedule)
        table.add(entry.name, column, f"refused: {refusal.value}")
        return
    difference = expected.difference(on_threads(entry, stages, schedule))
    table.add(entry.name, column, words_of(difference, expected.allowed))
    assert difference <= expected.allowed


@pytest.mark.parametrize(("name", "schedule"), [*OVER_GLOO.items()])
def test_a_model_trains_over_processes(name: str, schedule: str, table: Table, workers: WorkerPool) -> None:
    expected = reference(name)
    parts = workers.run(on_processes, 4, BY_NAME[name], schedule, deadline=100)
    difference = expected.difference([result for part in parts for result in part])
    table.add(name, "processes", words_of(difference, expected.allowed))
    assert difference <= expected.allowed


@pytest.mark.parametrize("name", ["GPT-2", "Mistral", "Bloom", "T5"])
def test_a_model_that_returns_a_cache(name: str) -> None:
    """As they do unless they are told not to: no stage has all of the cache, and they were refused in the first step."""
    entry = BY_NAME[name]

    def make() -> torch.nn.Module:
        model = entry.make()
        model.config.use_cache = True  # type: ignore[union-attr, assignment]
        return model

    difference = reference(name).difference(on_threads(attrs.evolve(entry, make=make), 4, "1F1B"))
    assert difference <= reference(name).allowed


def test_most_models_are_right_everywhere() -> None:
    assert sum(not entry.refused for entry in ENTRIES) >= RIGHT_AT_LEAST


@pytest.mark.timeout(1300)
def test_what_torch_makes_of_them_is_known(
    torch_outcomes: Callable[[], dict[str, dict[str, str]]], table: Table
) -> None:
    for name, outcomes in torch_outcomes().items():
        for ranks, words in outcomes.items():
            table.add(name, f"torch, {ranks} ranks", words)


@pytest.fixture(autouse=True, scope="module")
def _by_value() -> None:
    """Worker processes cannot import this folder."""
    for module in (_entry, _grid, _oracle, _own, _sight, _text):
        cloudpickle.register_pickle_by_value(module)
