"""Transports that break one rule of the protocol each, made of one that keeps them all."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch

from stepwell_p2p import Edge, LoopbackFabric, LoopbackTransport, Op, OpKind, Recv, Rules, Send
from stepwell_p2p.exceptions import P2PUsageError, PeerFailure, TransportError


class Shared:
    """What the broken transports of one run share beside the fabric."""

    def __init__(self, size: int, rules: Rules) -> None:
        self.fabric = LoopbackFabric(size, rules=rules, timeout=2)
        self.numbers = itertools.count()
        self.closed = threading.Event()


class Kept:
    """A loopback transport behind methods that can be replaced: keeps every promise."""

    inner_rules = Rules(tagged=True, rendezvous=False)

    def __init__(self, shared: Shared, rank: int) -> None:
        self.shared = shared
        self.inner: LoopbackTransport = shared.fabric.transport(rank)
        self.rank, self.size, self.rules = self.inner.rank, self.inner.size, self.inner.rules

    def post(self, batch: Sequence[Send | Recv]) -> Any:
        return self.inner.post(batch)

    def abort(self, reason: str, **where: Any) -> None:
        self.inner.abort(reason, **where)

    def close(self) -> None:
        self.inner.close()


class Answer:
    """A handle around another: what ``wait`` gives goes through a function."""

    def __init__(self, handle: Any, change: Callable[[Any], Any]) -> None:
        self.handle, self.change = handle, change

    def wait(self) -> Any:
        return self.change(self.handle.wait())


class Later:
    """A handle that asks a function at its first wait."""

    def __init__(self, begin: Callable[[], tuple[torch.Tensor, ...]]) -> None:
        self.begin, self.result = begin, None

    def wait(self) -> tuple[torch.Tensor, ...]:
        if self.result is None:
            self.result = self.begin()
        return self.result


# ---- post


def after(seconds: float, transport: LoopbackTransport, batch: Sequence[Send | Recv]) -> None:
    """Post a batch later, if the transport still takes it then."""

    def post() -> None:
        with contextlib.suppress(P2PUsageError, TransportError):
            transport.post(batch)

    threading.Timer(seconds, post).start()


class PostsBlock(Kept):
    def post(self, batch: Sequence[Send | Recv]) -> Any:
        handle = self.inner.post(batch)
        handle.wait()
        return handle


class SendsBlock(Kept):
    inner_rules = Rules(tagged=True, rendezvous=True)

    def post(self, batch: Sequence[Send | Recv]) -> Any:
        handle = self.inner.post(batch)
        if batch and all(isinstance(item, Send) for item in batch):
            handle.wait()
        return handle


class StartsWhenWaitedFor(Kept):
    def post(self, batch: Sequence[Send | Recv]) -> Any:
        for item in batch:  # refuses at once, as it shall
            if item.op.kind.is_send is not isinstance(item, Send) or item.op.rank != self.rank:
                return self.inner.post(batch)
        return Later(lambda: self.inner.post(batch).wait())


class BatchesInTurn(Kept):
    """Each message of a batch starts when the one before it is done: two ranks that send to each other block."""

    inner_rules = Rules(tagged=True, rendezvous=True)

    def post(self, batch: Sequence[Send | Recv]) -> Any:
        if len(batch) < 2:
            return self.inner.post(batch)
        return Later(lambda: tuple(value for item in batch for value in self.inner.post([item]).wait()))


class StartsWhatIsGood(Kept):
    """A batch with one bad message is refused, and what stands before that one is under way."""

    def post(self, batch: Sequence[Send | Recv]) -> Any:
        handles = [self.inner.post([item]) for item in batch]
        return Later(lambda: tuple(value for handle in handles for value in handle.wait()))


class Refuses(Kept):
    """Takes what one rule forbids, without a word."""

    def ignored(self, item: Send | Recv) -> bool:
        raise NotImplementedError

    def post(self, batch: Sequence[Send | Recv]) -> Any:
        return self.inner.post([item for item in batch if not self.ignored(item)])


class AcceptsOtherRanks(Refuses):
    def ignored(self, item: Send | Recv) -> bool:
        return item.op.rank != self.rank


class AcceptsRanksThatAreNone(Refuses):
    def ignored(self, item: Send | Recv) -> bool:
        return not 0 <= item.op.peer < self.size


class AcceptsOtherKinds(Kept):
    def post(self, batch: Sequence[Send | Recv]) -> Any:
        return self.inner.post(
            [item if item.op.kind.is_send is isinstance(item, Send) else attrs.evolve(item, op=item.op.mirror) for item in batch
             if item.op.kind.is_send is isinstance(item, Send) or item.op.mirror.rank == self.rank]
        )  # fmt: skip


class LooksAtOpsOnce(Kept):
    """What was posted once is not looked at again, also not whether as send or as receive."""

    def __init__(self, shared: Shared, rank: int) -> None:
        super().__init__(shared, rank)
        self.seen: set[Op] = set()

    def post(self, batch: Sequence[Send | Recv]) -> Any:
        batch = [item for item in batch if item.op not in self.seen or item.op.kind.is_send is isinstance(item, Send)]
        handle = self.inner.post(batch)
        self.seen |= {item.op for item in batch}
        return handle


class TakesAnyBuffer(Kept):
    def post(self, batch: Sequence[Send | Recv]) -> Any:
        return self.inner.post(
            [
                attrs.evolve(item, buffer=None)
                if isinstance(item, Recv) and item.buffer is not None and item.buffer.shape != item.meta.shape
                else item
                for item in batch
            ]
        )


class PostsAfterFailure(Kept):
    def post(self, batch: Sequence[Send | Recv]) -> Any:
        try:
            return self.inner.post(batch)
        except PeerFailure:
            return Later(tuple)


# ---- matching and order


class MatchesByArrival(Kept):
    """The n-th send of an edge meets its n-th receive, whatever they are."""

    def __init__(self, shared: Shared, rank: int) -> None:
        super().__init__(shared, rank)
        self.counts: dict[tuple[bool, Edge], int] = {}

    def post(self, batch: Sequence[Send | Recv]) -> Any:
        counted: list[Send | Recv] = []
        for item in batch:
            key = (item.op.kind.is_send, item.op.edge)
            number = self.counts[key] = self.counts.get(key, -1) + 1
            kind = OpKind.SEND_F if item.op.kind.is_send else OpKind.RECV_F
            counted.append(attrs.evolve(item, op=Op(kind, item.op.edge, 0, number)))
        return self.inner.post(counted)


class Forgets(Kept):
    """Matches by op, but for one part of it."""

    def same(self, op: Op) -> Op:
        raise NotImplementedError

    def post(self, batch: Sequence[Send | Recv]) -> Any:
        return self.inner.post([attrs.evolve(item, op=self.same(item.op)) for item in batch])


class ForgetsKind(Forgets):
    def same(self, op: Op) -> Op:
        return attrs.evolve(op, kind=OpKind.SEND_F if op.kind.is_send else OpKind.RECV_F)


class ForgetsStage(Forgets):
    def same(self, op: Op) -> Op:
        return attrs.evolve(op, stage=0)


class ForgetsMicrobatch(Forgets):
    def same(self, op: Op) -> Op:
        return attrs.evolve(op, microbatch=0)


class ForgetsIndex(Forgets):
    def same(self, op: Op) -> Op:
        return attrs.evolve(op, index=0)


class TakesFromAnyRank(Kept):
    """What a rank receives is whatever was sent to it first, from any rank."""

    def post(self, batch: Sequence[Send | Recv]) -> Any:
        if len(batch) != 1 or not isinstance(batch[0], Recv):
            return self.inner.post(batch)
        recv, sent = batch[0], self.inner.fabric._sends

        def wait() -> Any:
            while not (here := [key[0] for key in list(sent) if key[1] == self.rank]):  # type: ignore[index]
                time.sleep(0.001)
            return self.inner.post([attrs.evolve(recv, op=attrs.evolve(recv.op, edge=Edge(here[0], self.rank)))]).wait()

        return Later(wait)


class LastComesFirst(Kept):
    """Of messages with equal ops, the latest is given out first."""

    def post(self, batch: Sequence[Send | Recv]) -> Any:
        fabric = self.inner.fabric
        handle = self.inner.post(batch)
        with fabric._lock:
            for item in batch:
                for waiting in (fabric._sends if isinstance(item, Send) else fabric._recvs).values():
                    waiting.rotate(1)
        return handle


class WhoWaitsFirstIsServedFirst(Kept):
    """Of receives with equal ops, the one that is waited for first gets what was sent first."""

    def post(self, batch: Sequence[Send | Recv]) -> Any:
        if len(batch) != 1 or not isinstance(batch[0], Recv):
            return self.inner.post(batch)
        return Later(lambda: self.inner.post(batch).wait())


class SmallOvertakesLarge(Kept):
    """Small messages go at once, large ones a moment later."""

    def post(self, batch: Sequence[Send | Recv]) -> Any:
        if not any(isinstance(item, Send) and item.tensor.nbytes == 1 << 20 for item in batch):
            return self.inner.post(batch)
        copies = [attrs.evolve(item, tensor=item.tensor.clone()) if isinstance(item, Send) else item for item in batch]
        after(0.05, self.inner, copies)
        return Later(tuple)


class NotBuffered(Kept):
    """Says that a send is done when posted; it is done when received."""

    inner_rules = Rules(tagged=True, rendezvous=True)

    def __init__(self, shared: Shared, rank: int) -> None:
        super().__init__(shared, rank)
        self.rules = Rules(tagged=True, rendezvous=False)


class NotTagged(Kept):
    """Says that messages match by op; they come in the order in which they were sent."""

    inner_rules = Rules(tagged=False, rendezvous=False)

    def __init__(self, shared: Shared, rank: int) -> None:
        super().__init__(shared, rank)
        self.rules = Rules(tagged=True, rendezvous=False)


class NoSelfSends(Kept):
    def post(self, batch: Sequence[Send | Recv]) -> Any:
        if any(item.op.peer == self.rank for item in batch):
            raise P2PUsageError("no messages to oneself")
        return self.inner.post(batch)


# ---- what is received


class Changes(Kept):
    """Something is wrong with received tensors."""

    def change(self, tensor: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def post(self, batch: Sequence[Send | Recv]) -> Any:
        values = None
        handle = self.inner.post(batch)

        def wait(got: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            nonlocal values
            values = values or tuple(self.change(tensor) for tensor in got)
            return values

        return Answer(handle, wait)


class IgnoresStrides(Changes):
    def change(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.contiguous()


class RequiresGrad(Changes):
    def change(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.requires_grad_() if tensor.is_floating_point() else tensor


class CarriesFloats(Changes):
    """Values cross as 32-bit floats."""

    def change(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.copy_(tensor.float()) if tensor.dtype is torch.int64 else tensor


class LosesWhatIsNoNumber(Changes):
    def change(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.nan_to_num_() if tensor.dtype is torch.float32 else tensor


class UsesMemoryAgain(Changes):
    """Received values lie in a few buffers, which later values overwrite."""

    buffers: dict[tuple[object, ...], list[torch.Tensor]]

    def __init__(self, shared: Shared, rank: int) -> None:
        super().__init__(shared, rank)
        self.buffers = {}
        self.turns = itertools.count()

    def change(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.shape != (64,):
            return tensor
        ring = self.buffers.setdefault((tensor.shape, tensor.dtype), [torch.empty_like(tensor) for _ in range(8)])
        return ring[next(self.turns) % 8].copy_(tensor)


class ASecondWaitDiffers(Kept):
    def post(self, batch: Sequence[Send | Recv]) -> Any:
        return Answer(self.inner.post(batch), lambda got: tuple(tensor.clone() for tensor in got))


class ASecondWaitIsEmpty(Kept):
    def post(self, batch: Sequence[Send | Recv]) -> Any:
        answers = iter((self.inner.post(batch).wait, tuple))

        class Handle:
            def wait(self) -> Any:
                return next(answers, tuple)()

        return Handle()


class ValuesInAnotherOrder(Kept):
    def post(self, batch: Sequence[Send | Recv]) -> Any:
        return Answer(self.inner.post(batch), lambda got: got[::-1])


class SharesWithTheSender(Kept):
    def post(self, batch: Sequence[Send | Recv]) -> Any:
        return self.inner.post([attrs.evolve(item, owned=True) if isinstance(item, Send) else item for item in batch])


class ReadsAfterTheWait(Kept):
    """A send is done before its tensor has been read."""

    def post(self, batch: Sequence[Send | Recv]) -> Any:
        for item in batch:
            if isinstance(item, Send) and item.op.edge == Edge(0, 1) and item.tensor.shape == (4,):
                after(0.2, self.inner, [item])
                return Later(tuple)
        return self.inner.post(batch)


class ReadsMemoryAsItLies(Kept):
    """The sender's strides are ignored."""

    def post(self, batch: Sequence[Send | Recv]) -> Any:
        def flat(tensor: torch.Tensor) -> torch.Tensor:
            enough = tensor.untyped_storage().nbytes() // tensor.itemsize - tensor.storage_offset() >= tensor.numel()
            return tensor.detach().as_strided(tensor.shape, tensor.contiguous().stride()) if enough else tensor

        return self.inner.post(
            [attrs.evolve(item, tensor=flat(item.tensor)) if isinstance(item, Send) else item for item in batch]
        )


class IgnoresBuffers(Kept):
    def post(self, batch: Sequence[Send | Recv]) -> Any:
        for item in batch:
            if isinstance(item, Recv) and item.buffer is not None and item.buffer.shape != item.meta.shape:
                return self.inner.post(batch)
        return self.inner.post([attrs.evolve(item, buffer=None) if isinstance(item, Recv) else item for item in batch])


class FillsBuffersAsTheyLie(Kept):
    """A buffer's strides are ignored."""

    def post(self, batch: Sequence[Send | Recv]) -> Any:
        buffers = [item.buffer for item in batch if isinstance(item, Recv)]
        if any(
            item.buffer is not None and item.buffer.shape != item.meta.shape for item in batch if isinstance(item, Recv)
        ):
            return self.inner.post(batch)
        plain = [attrs.evolve(item, buffer=None) if isinstance(item, Recv) else item for item in batch]

        def fill(got: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            for buffer, value in zip(buffers, got, strict=True):
                if buffer is not None:
                    buffer.as_strided(value.shape, value.contiguous().stride()).copy_(value)
            return tuple(value if buffer is None else buffer for buffer, value in zip(buffers, got, strict=True))

        return Answer(self.inner.post(plain), fill)


class CutsOff(Kept):
    """A message that is too long is cut to what its receiver expects."""

    longer = True

    def post(self, batch: Sequence[Send | Recv]) -> Any:
        changed: list[Send | Recv] = []
        for item in batch:
            if isinstance(item, Send) and item.tensor.shape == ((9,) if self.longer else (3,)):
                item = attrs.evolve(item, tensor=item.tensor.new_ones(5))
            changed.append(item)
        return self.inner.post(changed)


class MakesUp(CutsOff):
    """Of a message that is too short, the rest is made up."""

    longer = False
