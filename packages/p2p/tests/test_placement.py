"""Placements, wires and edges."""

from __future__ import annotations

import pytest

from stepwell_p2p import Edge, Placement, Wire, chain_wires
from stepwell_p2p.exceptions import P2PUsageError


def test_loop_and_v() -> None:
    assert Placement.loop(8, 4).ranks == (0, 1, 2, 3, 0, 1, 2, 3)
    assert Placement.v(8, 4).ranks == (0, 1, 2, 3, 3, 2, 1, 0)
    assert Placement.v(6, 2).ranks == (0, 1, 1, 0, 0, 1)
    assert Placement.loop(5, 2).stages_of(0) == (0, 2, 4)
    assert Placement.custom([1, 0, 1]).num_ranks == 2
    assert Placement.custom(iter((0,))).num_stages == 1


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Placement.custom([]), "at least one stage"),
        (lambda: Placement.custom([0, 2]), "rank 1 has no stage"),
        (lambda: Placement.custom([0, -1]), "a rank is negative"),
        (lambda: Placement.loop(2, 4), "use fewer ranks or cut the model finer"),
        (lambda: Placement.loop(2, 0), "at least 1 rank"),
        (lambda: Placement.v(6, 4), "a multiple of 4"),
        (lambda: Wire(1, 0, 1, 0), "leads to a later stage"),
        (lambda: Wire(0, -1, 1, 0), "start at 0"),
        (lambda: chain_wires(3, [1]), "3 stages have 2 boundaries"),
    ],
)
def test_what_is_refused(make: object, says: str) -> None:
    with pytest.raises(P2PUsageError, match=says):
        make()  # type: ignore[operator]


def test_chain_wires() -> None:
    assert chain_wires(3) == (Wire(0, 0, 1, 0), Wire(1, 0, 2, 0))
    assert chain_wires(3, [2, 0]) == (Wire(0, 0, 1, 0), Wire(0, 1, 1, 1))
    assert chain_wires(1) == ()
    assert Edge(2, 0).reverse == Edge(0, 2)
