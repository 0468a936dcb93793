"""Moving tensors between ranks over a transport that you can swap."""

from __future__ import annotations

from stepwell_p2p._op import Op, OpKind
from stepwell_p2p._placement import Edge, Placement, Wire, chain_wires
from stepwell_p2p._transport import Handle, Recv, Rules, Send, Transport

__all__ = ["Edge", "Handle", "Op", "OpKind", "Placement", "Recv", "Rules", "Send", "Transport", "Wire", "chain_wires"]
