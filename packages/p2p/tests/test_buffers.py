"""Receive buffers follow the microbatches in flight, and are never shared with a live graph."""

from __future__ import annotations

import threading
import weakref

import pytest
import torch

from stepwell_meta import TensorMeta
from stepwell_meta.testing import WorkerPool
from stepwell_p2p import (
    BufferPool,
    C10dTransport,
    Edge,
    LoopbackFabric,
    Op,
    OpKind,
    Placement,
    Recv,
    Send,
    Transport,
    _buffers,
)

META = TensorMeta((4,), (1,), torch.float32)


def test_memory_is_used_again_by_a_new_tensor() -> None:
    """P139: hooks and gradients of an earlier value must not show up on a later one."""
    pool = BufferPool("cpu")
    first = pool.take(META)
    where = first.data_ptr()
    first.requires_grad_().register_hook(lambda grad: grad)
    first.grad = torch.ones(4)
    assert pool.in_flight == 1
    del first
    assert pool.in_flight == 0
    second = pool.take(META)
    assert second.data_ptr() == where
    assert (second.requires_grad, second.grad, second._backward_hooks) == (False, None, None)
    assert (pool.allocated, pool.in_flight) == (1, 1)


def test_memory_that_a_graph_or_a_view_still_uses_is_not_handed_out() -> None:
    pool = BufferPool("cpu")
    weight = torch.ones(4, requires_grad=True)
    value = pool.take(META)
    value.fill_(3)
    out = (value * weight).sum()  # keeps value for its backward
    del value
    other = pool.take(META)
    other.fill_(-1)
    out.backward()
    assert torch.equal(weight.grad, torch.full((4,), 3.0))
    view = other[:2]
    detached = other.detach()
    del other
    third = pool.take(META)
    assert third.data_ptr() != view.data_ptr()
    assert pool.allocated == 2  # the graph's was free by then
    del view
    assert pool.take(META).data_ptr() != detached.data_ptr()


def test_layouts_have_their_own_memory() -> None:
    pool = BufferPool("cpu")
    a = pool.take(TensorMeta((2, 3), (1, 2), torch.float32))
    assert a.stride() == (1, 2)
    del a
    assert pool.take(TensorMeta((2, 3), (3, 1), torch.float32)).stride() == (3, 1)
    assert pool.allocated == 2


def test_memory_of_looks_that_do_not_come_any_more_is_freed() -> None:
    """Where each microbatch has its own shape, the pool must not grow with every step."""
    pool = BufferPool("cpu")
    kept = pool.take(META)
    old = []
    for size in range(8):
        buffer = pool.take(TensorMeta((size,), (1,), torch.float32))
        old.append(weakref.ref(buffer.untyped_storage()))
        del buffer
    bases = sum(len(bases) for bases in pool._bases.values())
    assert bases == 2  # the one in use, and the last
    kept.fill_(1)
    pool.clear()
    assert kept.tolist() == [1.0] * 4


def test_without_use_counts_nothing_is_used_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_buffers, "memory_users", lambda tensor: None)
    pool = BufferPool("cpu")
    assert pool.take(META).data_ptr() != 0
    pool.take(META)
    assert (pool.allocated, pool.in_flight) == (2, 0)


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


def run_stage(transport: Transport, microbatches: int, pool: BufferPool, meta: TensorMeta, *, give: bool) -> float:
    """A pipeline by hand: receive, compute, send. The pool's buffers are given by hand, or the transport takes them itself."""
    rank, size, module = transport.rank, transport.size, InPlace()
    kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    sent = []

    def receive(op: Op) -> torch.Tensor:
        return transport.post([Recv(op, meta, pool.take(meta) if give else None)]).wait()[0]

    for action, microbatch in one_f_one_b(rank, size, microbatches):
        if action == "F":
            x = torch.full(meta.shape, float(microbatch))
            if rank > 0:
                x = receive(Op(OpKind.RECV_F, Edge(rank - 1, rank), rank - 1, microbatch))
            x.requires_grad_()
            kept[microbatch] = (x, module(x))
            if rank < size - 1:
                op = Op(OpKind.SEND_F, Edge(rank, rank + 1), rank, microbatch)
                sent.append(transport.post([Send(op, kept[microbatch][1].detach())]))
        else:
            x, out = kept.pop(microbatch)
            grad = torch.ones(meta.shape)
            if rank < size - 1:
                grad = receive(Op(OpKind.RECV_B, Edge(rank + 1, rank), rank + 1, microbatch))
            out.backward(grad)
            if rank > 0:
                op = Op(OpKind.SEND_B, Edge(rank, rank - 1), rank, microbatch)
                sent.append(transport.post([Send(op, x.grad, owned=True)]))
            del x, out, grad
    for handle in sent:
        handle.wait()
    return module.scale.grad.item()


def plain_grads(microbatches: int, meta: TensorMeta) -> list[float]:
    plain = torch.nn.Sequential(*(InPlace() for _ in range(4)))
    for microbatch in range(microbatches):
        plain(torch.full(meta.shape, float(microbatch))).sum().backward()
    return [module.scale.grad.item() for module in plain]


@pytest.mark.parametrize("microbatches", [4, 64])
def test_p135_buffers_are_as_many_as_microbatches_in_flight(microbatches: int) -> None:
    """64 microbatches through 4 stages under 1F1B; the stages work in place; gradients are those of the plain model."""
    fabric, grads, pools = LoopbackFabric(4), [0.0] * 4, [BufferPool("cpu") for _ in range(4)]

    def run(rank: int) -> None:
        grads[rank] = run_stage(fabric.transport(rank), microbatches, pools[rank], META, give=True)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert grads == pytest.approx(plain_grads(microbatches, META))
    for rank, pool in enumerate(pools):
        assert pool.allocated == most_in_flight(rank, microbatches)
        assert pool.in_flight == 0


def most_in_flight(rank: int, microbatches: int) -> int:
    return (min(4 - rank, microbatches) if rank > 0 else 0) + (1 if rank < 3 else 0)


LARGE = TensorMeta((1 << 15,), (1,), torch.float32)


def over_gloo() -> tuple[float, int, int]:
    transport = C10dTransport(placement=Placement.loop(4, 4))
    grad = run_stage(transport, 64, transport.buffers, LARGE, give=False)
    found = grad, transport.buffers.allocated, transport.buffers.in_flight
    transport.close()
    return found


def test_p135_the_transport_does_it_by_itself_for_large_values(workers: WorkerPool) -> None:
    found = workers.run(over_gloo, 4)
    assert [grad for grad, _, _ in found] == pytest.approx(plain_grads(64, LARGE), rel=1e-5)
    for rank, (_, allocated, in_flight) in enumerate(found):
        assert allocated == most_in_flight(rank, 64)
        assert in_flight == 0
