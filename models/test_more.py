"""More models, each in one way that asks for everything: several stages on a rank, split backward, uneven microbatches."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from ._entry import Entry
from ._grid import on_threads
from ._more import MORE
from ._oracle import one_process

if TYPE_CHECKING:
    from ._page import Names

torch.set_num_threads(1)


@pytest.mark.parametrize("entry", MORE, ids=lambda entry: entry.name)
def test_it_trains_as_in_one_process(entry: Entry, more: Names) -> None:
    expected = one_process(entry)
    assert expected.difference(on_threads(entry, 4, "ZBV")) <= expected.allowed
    more.add(entry.name)
