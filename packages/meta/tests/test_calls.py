"""How much work something is."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

import stepwell_meta
from stepwell_meta import extract_meta
from stepwell_meta.testing import count_calls


def twice() -> None:
    once()
    once()


def once() -> None:
    len("")  # not written in Python


def fails() -> None:
    raise ValueError("on purpose")


def test_calls_are_counted() -> None:
    assert count_calls(once) == 1
    assert count_calls(twice) == 3


def test_calls_of_a_package_alone() -> None:
    assert count_calls(twice, within=stepwell_meta) == 0
    assert count_calls(lambda: extract_meta(torch.zeros(2)), within=stepwell_meta) > 0


def test_what_was_looking_goes_on() -> None:
    seen: list[Any] = []
    before = sys.getprofile()
    sys.setprofile(look := lambda *event: seen.append(event))
    try:
        with pytest.raises(ValueError, match="on purpose"):
            count_calls(fails)
        assert sys.getprofile() is look
    finally:
        sys.setprofile(before)
