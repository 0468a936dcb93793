"""What C10dTransport refuses before it talks to anybody."""

from __future__ import annotations

import math

import pytest

from stepwell_p2p import C10dTransport, Placement, chain_wires
from stepwell_p2p.exceptions import P2PUsageError


@pytest.mark.parametrize("timeout", [0, 0.0004, -1.0, math.nan, math.inf])
def test_a_timeout_that_torch_takes_for_none_or_cannot_hold_is_refused(timeout: float) -> None:
    """0 was no limit to torch, so that a wait for a message that never came went on for ever; others failed within torch."""
    with pytest.raises(P2PUsageError, match=r"a wait may take 0\.001 s or more"):
        C10dTransport(timeout=timeout)


def test_wires_without_a_placement_are_refused() -> None:
    """They were ignored without a word: the channels that the caller asked for were never opened."""
    with pytest.raises(P2PUsageError, match="pass that too"):
        C10dTransport(wires=chain_wires(2))


def test_a_closed_transport_opens_nothing() -> None:
    """It did, and nobody closed the channels again."""
    transport = C10dTransport()
    transport.close()
    with pytest.raises(P2PUsageError, match="that it has closed: make a new one"):
        transport.open(Placement.loop(2, 1), chain_wires(2))
