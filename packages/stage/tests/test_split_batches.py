"""Batches in containers of one's own."""

from __future__ import annotations

import dataclasses
from collections import UserDict
from typing import Any

import pytest
import torch

from stepwell_stage.exceptions import StageUsageError
from stepwell_stage.run._microbatch import Batch


@dataclasses.dataclass
class Both:
    x: Any
    scale: float = 1.0


def test_containers_that_are_not_cut() -> None:
    """A dataclass, or a dict of a class of its own, went to every microbatch as a whole, with all samples in it."""
    x = torch.arange(6.0)
    for batch in (Both(x), UserDict(x=x)):
        with pytest.raises(
            StageUsageError, match=r"a (Both|UserDict) holds tensors, .*pass a dict or tuple of its tensors"
        ):
            Batch(kwargs={"batch": batch}).inputs(3, None, None)
        shared = Batch(kwargs={"batch": batch, "x": x}).inputs(3, None, {"batch": None, "x": None})
        assert [kwargs["batch"] is batch for _, kwargs in shared] == [True] * 3
    assert len(Batch(kwargs={"batch": Both(2), "x": x}).inputs(3, None, None)) == 3
