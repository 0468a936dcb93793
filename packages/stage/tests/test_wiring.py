"""Wires as data."""

from __future__ import annotations

import pytest

from stepwell_p2p import Wire
from stepwell_stage.exceptions import ScheduleError
from stepwell_stage.plan._wiring import Wiring, same_wiring


def test_the_chain() -> None:
    chain = Wiring(3)
    assert chain.links == ((0, 1), (1, 2))
    assert chain.between(0, 1) is None
    assert chain.sources(2) == (1,)
    assert chain.destinations(0) == (1,)
    assert chain.first_message(0, 1) == chain.first_gradient(0, 1) == 0


def test_messages_of_one_stage_have_different_numbers_whatever_their_links() -> None:
    wires = [Wire(0, 0, 1, 0), Wire(0, 1, 1, 1), Wire(0, 0, 2, 1), Wire(1, 0, 2, 0), Wire(0, 2, 3, 0), Wire(2, 0, 3, 1)]
    wiring = Wiring(4, wires)
    assert wiring.links == ((0, 1), (0, 2), (0, 3), (1, 2), (2, 3))
    assert wiring.between(0, 1) == (Wire(0, 0, 1, 0), Wire(0, 1, 1, 1))
    assert [wiring.first_message(0, destination) for destination in (1, 2, 3)] == [0, 2, 3]
    assert [wiring.first_gradient(source, 2) for source in (0, 1)] == [0, 1]
    assert wiring.sources(3) == (0, 2)
    assert wiring.destinations(0) == (1, 2, 3)


def test_the_order_in_which_wires_are_given_does_not_matter() -> None:
    wires = [Wire(0, 0, 1, 0), Wire(1, 0, 2, 0)]
    assert Wiring(3, wires) == Wiring(3, wires[::-1])
    assert same_wiring([wires, tuple(wires[::-1])], 3) == Wiring(3, wires)


def test_stages_with_different_wires_are_refused() -> None:
    with pytest.raises(ScheduleError, match="these stages were given different ones"):
        same_wiring([None, [Wire(0, 0, 1, 0)]], 2)
