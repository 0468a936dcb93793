"""Moving tensors between ranks over a transport that you can swap."""

from __future__ import annotations

from stepwell_p2p._batch import PendingOp
from stepwell_p2p._buffers import BufferPool
from stepwell_p2p._channels import Channel, ChannelMap, ChannelPolicy, channels_for, edges_of
from stepwell_p2p._cycle import Blocked
from stepwell_p2p._op import Op, OpKind
from stepwell_p2p._order import OrderProof, prove_order
from stepwell_p2p._pack import Pack, Packing, plan_packs
from stepwell_p2p._placement import Edge, Placement, Wire, chain_wires
from stepwell_p2p._scheduling import giving_way
from stepwell_p2p._step import Post, Step, Wait, Work
from stepwell_p2p._transport import Handle, Recv, Rules, Send, Transport
from stepwell_p2p._values import ExpectedValues, expect_values, receive_values, send_values
from stepwell_p2p.transports._c10d import C10dTransport, Description
from stepwell_p2p.transports._loopback import LoopbackFabric, LoopbackTransport

__all__ = [
    "Blocked",
    "BufferPool",
    "C10dTransport",
    "Channel",
    "ChannelMap",
    "ChannelPolicy",
    "Description",
    "Edge",
    "ExpectedValues",
    "Handle",
    "LoopbackFabric",
    "LoopbackTransport",
    "Op",
    "OpKind",
    "OrderProof",
    "Pack",
    "Packing",
    "PendingOp",
    "Placement",
    "Post",
    "Recv",
    "Rules",
    "Send",
    "Step",
    "Transport",
    "Wait",
    "Wire",
    "Work",
    "chain_wires",
    "channels_for",
    "edges_of",
    "expect_values",
    "giving_way",
    "plan_packs",
    "prove_order",
    "receive_values",
    "send_values",
]
