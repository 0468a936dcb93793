"""One promise of a transport, and what the programs that try them are made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import attrs
import torch

from stepwell_meta import TensorMeta

from ._layout import bytes_of
from ._op import Op, OpKind
from ._placement import Edge
from ._transport import Handle, Recv, Send, Transport

_ErrorT = TypeVar("_ErrorT", bound=Exception)
Program = Callable[[Transport], None]


class TransportCheckError(AssertionError):
    """A transport does not do what :class:`stepwell_p2p.Transport` promises."""


@attrs.frozen
class Check:
    """One promise.

    Attributes:
        name: for test reports.
        size: how many ranks it takes.
        program: runs on every rank; its docstring is the promise in words.
        dies: the rank that ends by SIGKILL in it, if one does.
    """

    name: str
    size: int
    program: Program
    dies: int | None = None


def collect(checks: list[Check]) -> Callable[..., Callable[[Program], Program]]:
    """A decorator for programs, from the number of ranks they take, which adds them to a list."""

    def promise(size: int, *, dies: int | None = None) -> Callable[[Program], Program]:
        def register(program: Program) -> Program:
            checks.append(Check(program.__name__, size, program, dies))
            return program

        return register

    return promise


def peers(transport: Transport) -> list[int]:
    """Every other rank, in an order in which both ends of a pair come to each other at the same turn."""
    turns = [(turn - transport.rank) % transport.size for turn in range(transport.size)]
    return [peer for peer in turns if peer != transport.rank]


def message(microbatch: int, index: int = 0) -> Op:
    """A send from rank 0 to rank 1."""
    return Op(OpKind.SEND_F, Edge(0, 1), 0, microbatch, index)


def filled(numel: int, value: float) -> torch.Tensor:
    return torch.full((numel,), float(value))


def exchange(
    transport: Transport,
    peer: int,
    value: torch.Tensor,
    meta: TensorMeta,
    *,
    owned: bool = False,
    buffer: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """Send to and receive from a peer that does the same."""
    mine, theirs = Edge(transport.rank, peer), Edge(peer, transport.rank)
    batch: list[Send | Recv] = [Send(Op(OpKind.SEND_F, mine, 0, 0), value, owned)]
    batch.append(Recv(Op(OpKind.RECV_F, theirs, 0, 0), meta, buffer))
    return transport.post(batch).wait()


def receive(transport: Transport, source: int, meta: TensorMeta) -> None:
    """Wait for a message that does not come; on a slow machine the failure may be there before the post."""
    transport.post([Recv(Op(OpKind.RECV_F, Edge(source, transport.rank), 0, 0), meta)]).wait()


def one_way(transport: Transport, messages: Sequence[tuple[Op, torch.Tensor]]) -> list[tuple[Handle, torch.Tensor]]:
    """From rank 0 to rank 1, all posted before the first is waited for; on rank 1, the handles and what they shall bring."""
    if transport.rank == 0:
        for handle in [transport.post([Send(op, value)]) for op, value in messages]:
            handle.wait()
        return []
    return [(transport.post([Recv(op.mirror, TensorMeta.from_tensor(value))]), value) for op, value in messages]


def expect(condition: object, otherwise: str) -> None:
    if not condition:
        raise TransportCheckError(otherwise)


def equal(got: torch.Tensor, expected: torch.Tensor) -> None:
    same = got.shape == expected.shape and got.dtype == expected.dtype
    same = same and torch.equal(bytes_of(got.contiguous()), bytes_of(expected.contiguous()))
    if not same:
        raise TransportCheckError(f"expected {expected}, got {got}")


def raises(kind: type[_ErrorT], action: Callable[[], object]) -> _ErrorT:
    try:
        action()
    except kind as error:
        return error
    except Exception as error:
        raise TransportCheckError(f"expected {kind.__name__}, got {error!r}") from error
    raise TransportCheckError(f"expected {kind.__name__}, and nothing was raised")
