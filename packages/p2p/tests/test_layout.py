"""What may be sent, and received into, is said before anything is under way."""

from __future__ import annotations

import pytest
import torch

from stepwell_meta import TensorMeta
from stepwell_p2p import Edge, LoopbackFabric, Op, OpKind, Recv, Send
from stepwell_p2p.exceptions import P2PUsageError

SELF = Edge(0, 0)


def freed(tensor: torch.Tensor) -> torch.Tensor:
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (torch.eye(3).to_sparse(), "only dense tensors"),
        (torch.empty(3, device="meta"), "has no values to send"),
        (torch.zeros(3, dtype=torch.uint8).view(torch.int4), "torch copies no values of torch.int4: send their bytes"),
        (3.0, "only tensors can be sent, got float"),
        (freed(torch.ones(3)), "the memory of the tensor was freed"),
        (freed(torch.ones(2, 3).t()), "the memory of the tensor was freed"),
        (freed(torch.ones(2, 3)[1]), "the memory of the tensor was freed"),
    ],
)
def test_tensors_without_plain_memory_are_refused_where_they_are_sent(tensor: torch.Tensor, words: str) -> None:
    """A sparse one and numbers of half a byte failed in words of torch's own, one on the meta device at the receiver, and
    what is no tensor for want of an attribute. One whose memory was freed ended the process."""
    transport = LoopbackFabric(1).transport(0)
    with pytest.raises(P2PUsageError, match=words):
        transport.post([Send(Op(OpKind.SEND_F, SELF, 0, 0, 0), tensor)])


@pytest.mark.parametrize(
    ("buffer", "words"),
    [
        (torch.zeros(1).expand(3), "must not be expanded"),
        (torch.zeros(3).to_sparse(), "must be dense memory, got one laid out as torch.sparse_coo"),
        (torch.empty(3, device="meta"), "must be dense memory, got one on the meta device"),
        (freed(torch.ones(3)), "the memory of the receive buffer was freed"),
    ],
)
def test_buffers_that_cannot_hold_a_value_are_refused_before_it_comes(buffer: torch.Tensor, words: str) -> None:
    """It came, and was lost when it was copied."""
    transport = LoopbackFabric(1).transport(0)
    meta = TensorMeta.from_tensor(torch.zeros(3))
    with pytest.raises(P2PUsageError, match=words):
        transport.post([Recv(Op(OpKind.RECV_F, SELF, 0, 0, 0), meta, buffer)])
