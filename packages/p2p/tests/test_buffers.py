"""Receive buffers follow the microbatches in flight, and are never shared with a live graph."""

from __future__ import annotations

import threading

import pytest
import torch

from stepwell_meta import TensorMeta
from stepwell_p2p import BufferPool, Edge, LoopbackFabric, Op, OpKind, Recv, Send, Transport
from stepwell_p2p.exceptions import P2PUsageError

META = TensorMeta((4,), (1,), torch.float32)


def test_memory_is_used_again_by_a_new_tensor() -> None:
    """P139: hooks and gradients of an earlier value must not show up on a later one."""
    pool = BufferPool("cpu")
    first = pool.take(META)
    where = first.data_ptr()
    first.requires_grad_().register_hook(lambda grad: grad)
    first.grad = torch.ones(4)
    pool.give(first)
    del first
    second = pool.take(META)
    assert second.data_ptr() == where
    assert (second.requires_grad, second.grad, second._backward_hooks) == (False, None, None)
    assert (pool.allocated, pool.in_flight, pool.most_in_flight) == (1, 1, 1)


def test_memory_that_a_graph_or_a_view_still_uses_is_not_handed_out() -> None:
    pool = BufferPool("cpu")
    weight = torch.ones(4, requires_grad=True)
    value = pool.take(META)
    value.fill_(3)
    out = (value * weight).sum()  # keeps value for its backward
    pool.give(value)
    del value
    other = pool.take(META)
    other.fill_(-1)
    out.backward()
    assert torch.equal(weight.grad, torch.full((4,), 3.0))
    view = other[:2]
    pool.give(other)
    del other
    assert pool.take(META).data_ptr() != view.data_ptr()
    assert pool.allocated == 3


def test_layouts_have_their_own_memory() -> None:
    pool = BufferPool("cpu")
    a = pool.take(TensorMeta((2, 3), (1, 2), torch.float32))
    assert a.stride() == (1, 2)
    pool.give(a)
    del a
    assert pool.take(TensorMeta((2, 3), (3, 1), torch.float32)).stride() == (3, 1)
    assert pool.allocated == 2
    pool.clear()


def test_what_is_not_out_cannot_come_back() -> None:
    pool = BufferPool("cpu")
    buffer = pool.take(META)
    pool.give(buffer)
    with pytest.raises(P2PUsageError, match="still out"):
        pool.give(buffer)
    with pytest.raises(P2PUsageError):
        pool.give(torch.ones(4))


class InPlace(torch.nn.Module):
    """Writes to its input, which autograd allows where nothing saved it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.scale).add_(1).relu_()


def one_f_one_b(stage: int, stages: int, microbatches: int) -> list[tuple[str, int]]:
    warm = min(stages - stage - 1, microbatches)
    order = [("F", microbatch) for microbatch in range(warm)]
    for microbatch in range(microbatches - warm):
        order += [("F", warm + microbatch), ("B", microbatch)]
    return order + [("B", microbatch) for microbatch in range(microbatches - warm, microbatches)]


def run_stage(transport: Transport, microbatches: int, result: dict[int, tuple[BufferPool, torch.Tensor]]) -> None:
    """A pipeline by hand: receive into a buffer, compute, send; give the buffer back after the backward."""
    rank, size, module, pool = transport.rank, transport.size, InPlace(), BufferPool("cpu")
    kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    sent = []
    for action, microbatch in one_f_one_b(rank, size, microbatches):
        if action == "F":
            x = torch.full((4,), float(microbatch))
            if rank > 0:
                recv = Op(OpKind.RECV_F, Edge(rank - 1, rank), rank - 1, microbatch)
                (x,) = transport.post([Recv(recv, META, pool.take(META))]).wait()
            x.requires_grad_()
            kept[microbatch] = (x, module(x))
            if rank < size - 1:
                op = Op(OpKind.SEND_F, Edge(rank, rank + 1), rank, microbatch)
                sent.append(transport.post([Send(op, kept[microbatch][1].detach())]))
        else:
            x, out = kept.pop(microbatch)
            grad = torch.ones(4)
            if rank < size - 1:
                recv = Op(OpKind.RECV_B, Edge(rank + 1, rank), rank + 1, microbatch)
                (grad,) = transport.post([Recv(recv, META, pool.take(META))]).wait()
            out.backward(grad)
            if rank > 0:
                op = Op(OpKind.SEND_B, Edge(rank, rank - 1), rank, microbatch)
                sent.append(transport.post([Send(op, x.grad, owned=True)]))
                pool.give(x)
            if rank < size - 1:
                pool.give(grad)
            del x, out, grad
    for handle in sent:
        handle.wait()
    result[rank] = (pool, module.scale.grad)


@pytest.mark.parametrize("microbatches", [4, 64])
def test_p135_buffers_are_as_many_as_microbatches_in_flight(microbatches: int) -> None:
    """64 microbatches through 4 stages under 1F1B; the stages work in place; gradients are those of the plain model."""
    fabric, result = LoopbackFabric(4), {}
    threads = [
        threading.Thread(target=run_stage, args=(fabric.transport(rank), microbatches, result)) for rank in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    plain = torch.nn.Sequential(*(InPlace() for _ in range(4)))
    for microbatch in range(microbatches):
        plain(torch.full((4,), float(microbatch))).sum().backward()
    for rank, module in enumerate(plain):
        pool, grad = result[rank]
        assert torch.allclose(grad, module.scale.grad)
        activations = min(4 - rank, microbatches) if rank > 0 else 0
        gradients = 1 if rank < 3 else 0
        assert pool.most_in_flight == activations + gradients
        assert pool.in_flight == 0
        assert pool.allocated <= activations + gradients
