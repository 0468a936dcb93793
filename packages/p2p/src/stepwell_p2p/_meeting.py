"""How the ranks of a group learn that all of them are there, and hear of one that ends meanwhile.

gloo notices that a peer has ended only where a connection to it breaks under a wait. So each wait of set-up is for a rank whose
end somebody would notice, and who notices tells the others: before there is a :class:`~._board.FailureBoard`, rank 0 does, to
which every rank is joined; afterwards the board.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from stepwell_meta import TensorMeta

from ._op import MEETING, Op, OpKind
from ._placement import Edge
from ._tags import tag_of
from ._transport import Handle, Recv, Send
from .exceptions import PeerFailure

if TYPE_CHECKING:
    from ._channels import Channel
    from ._groups import ChannelGroup
    from ._link import Link

# Which message of the meeting: below these are the turns of `meet`, 60 at most.
_NEVER, _OPENED, _HERE, _NAME = 60, 61, 62, 63
_LATE = 0.95  # a wait that took this share of its timeout ran out; a shorter one ended with its connection
_PAUSE = 0.05  # seconds between two looks for a failure

_Post = Callable[[Sequence[Send | Recv]], Handle]


def agree_on_name(group: dist.ProcessGroup, device: torch.device, timeout: timedelta, *, gloo: bool) -> str:
    """A name that no earlier run in the same store can have used: drawn by rank 0.

    It comes over the group itself, which belongs to this run for certain; a store may outlive many.

    Raises:
        PeerFailure: a rank did not come in time, or has ended.
    """
    store, rank, start = group.get_group_store(), group.rank(), time.monotonic()
    turn = store.add(f"stepwell-p2p/arrived/{rank}", 1)
    missing: int | None = 0 if gloo else None
    try:
        if not gloo:
            answer = torch.tensor([secrets.randbits(62), -1], device=device)
            work = dist.broadcast(answer, group=group, group_src=0, async_op=True)
            if work is not None:
                work.wait(timeout)
        elif rank == 0:
            answer = _answer_all(group, timeout)
        else:
            answer = _ask(group, timeout)
        name, missing = answer.tolist()
        if missing < 0:
            return f"{name:x}"
        error = None
    except RuntimeError as broken:
        error = broken
    if time.monotonic() - start < _LATE * timeout.total_seconds():
        raise PeerFailure("it ended before all ranks had made their transports", rank=missing) from error
    absent = [other for other in range(group.size()) if store.add(f"stepwell-p2p/arrived/{other}", 0) < turn]
    who = f"rank {', '.join(map(str, absent))}" if absent else "a peer"
    raise PeerFailure(
        f"{who} did not come within {timeout.total_seconds():g} s; every rank of the group must make a transport",
        rank=absent[0] if absent else missing,
    ) from error


def _answer_all(group: dist.ProcessGroup, timeout: timedelta) -> torch.Tensor:
    """Wait for all ranks, and tell them the name, and who is missing, if one is.

    A broadcast would not do: it goes on from rank to rank, so those behind a rank that ended would wait for ones that live, and
    have given up.
    """
    end = time.monotonic() + timeout.total_seconds()
    asked = {
        other: _begin(group.recv, torch.empty(1), other, _tag(other, 0, _HERE)) for other in range(1, group.size())
    }
    here = [other for other, work in asked.items() if _ends_well(work, end - time.monotonic())]
    missing = [other for other in asked if other not in here]
    answer = torch.tensor([secrets.randbits(62), missing[0] if missing else -1])
    # Who has ended since is not missed here, but by those that wait for it next.
    for work in [_begin(group.send, answer, other, _tag(0, other, _NAME)) for other in here]:
        _ends_well(work, timeout.total_seconds())
    return answer


def _ask(group: dist.ProcessGroup, timeout: timedelta) -> torch.Tensor:
    """Tell rank 0 that this one is here; what it answers."""
    rank, answer = group.rank(), torch.empty(2, dtype=torch.int64)
    here = group.send([torch.zeros(1)], 0, _tag(rank, 0, _HERE))
    group.recv([answer], 0, _tag(0, rank, _NAME)).wait(timeout)
    here.wait(timeout)
    return answer


def _begin(start: Callable[[list[torch.Tensor], int, int], Any], tensor: torch.Tensor, peer: int, tag: int) -> Any:
    """A message under way; None where its connection is broken already."""
    try:
        return start([tensor], peer, tag)
    except RuntimeError:
        return None


def _ends_well(work: Any, seconds: float) -> bool:
    try:
        return work is not None and bool(
            work.wait(timedelta(seconds=max(seconds, 0.001)))
        )  # torch takes 0 for no limit
    except RuntimeError:
        return False


def meet(post: _Post, rank: int, size: int) -> None:
    """Until every rank of the group is here: a dissemination barrier over the group's own connections.

    Those break when a rank dies. Channels that are about to connect have nothing that would, so ranks that waited there for a
    dead one would wait for the whole timeout.

    Source: Hensgen, Finkel and Manber, Two algorithms for barrier synchronization, 1988.
    """
    for turn in range((size - 1).bit_length()):
        sending = post([Send(_op(rank, (rank + 2**turn) % size, turn), torch.zeros(1))])
        post([_recv((rank - 2**turn) % size, rank, turn)]).wait()
        sending.wait()


def open_together(post: _Post, link: Link, channels: Sequence[Channel]) -> list[ChannelGroup]:
    """Make the channels' groups, and listen meanwhile for the end of the rank before this one.

    While gloo connects two ranks, it waits for the peer as long as the timeout says, whether that lives or not. So another thread
    does that, and this one waits for the neighbour to say, over the group's own connections, that it is done. A rank that is
    killed has a neighbour that lives, or that was killed as well: somebody hears of it, and tells the others.

    Raises:
        PeerFailure: a peer is absent or has ended, or a rank reported a failure meanwhile. What still connects then is given up
            when its timeout is over, at the latest.
    """
    rank, before, after = link.rank, (link.rank - 1) % link.size, (link.rank + 1) % link.size
    done: Future[list[ChannelGroup]] = Future()

    def make() -> None:
        made: list[ChannelGroup] = []
        try:
            made = link.make(channels)
            post([Send(_op(rank, after, _OPENED), torch.zeros(1))]).wait()
            done.set_result(made)
        except BaseException as error:
            for group in made:
                group.drop()
            done.set_exception(error)

    neighbour = post([_recv(before, rank, _OPENED)])
    threading.Thread(target=make, name=f"stepwell-p2p-open-{rank}", daemon=True).start()
    try:
        neighbour.wait()
        while link.failure is None and not wait([done], _PAUSE).done:
            pass
        if link.failure is not None:
            raise link.failure.error()
        return done.result()
    except BaseException:
        done.add_done_callback(_drop)
        raise


def probe_tag(op: Op) -> int:
    """The tag of a message between the same ranks that nobody sends."""
    return _tag(op.edge.source, op.edge.destination, _NEVER)


def _drop(done: Future[list[ChannelGroup]]) -> None:
    for group in done.result() if done.exception() is None else ():
        group.drop()


def _op(source: int, destination: int, number: int) -> Op:
    return Op(OpKind.SEND_F, Edge(source, destination), 0, MEETING, number)


def _recv(source: int, destination: int, number: int) -> Recv:
    return Recv(_op(source, destination, number).mirror, TensorMeta((1,), (1,), torch.float32))


def _tag(source: int, destination: int, number: int) -> int:
    return tag_of(_op(source, destination, number))
