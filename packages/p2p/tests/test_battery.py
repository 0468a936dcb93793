"""The battery on our own transports, and on ones that break a promise each."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import attrs
import pytest

from stepwell_meta.testing import WorkerPool
from stepwell_p2p import (
    C10dTransport,
    ChannelPolicy,
    LoopbackFabric,
    LoopbackTransport,
    Placement,
    Recv,
    Rules,
    Send,
    Transport,
    Wire,
)
from stepwell_p2p.testing import (
    TRANSPORT_CHECKS,
    Check,
    FaultyTransport,
    PoolFabric,
    RecordingTransport,
    ThreadFabric,
    TransportCheckError,
    check_transport,
)

EVERY_WAY = [(ChannelPolicy.PER_EDGE, Rules(tagged=True, rendezvous=wait)) for wait in (True, False)] + [
    (policy, Rules(tagged=False, rendezvous=wait)) for policy in ChannelPolicy for wait in (True, False)
]  # messages that match by op look at no channel, so one policy stands for all
DEFAULT, WEAKEST = (
    (ChannelPolicy.PER_EDGE, Rules(tagged=True, rendezvous=False)),
    (ChannelPolicy.SHARED, Rules(tagged=False, rendezvous=True)),
)
SLOW = {"large", "thousands", "early_and_late", "disagreement", "abort", "death"}
"""What takes long has nothing to do with rules: it runs under two of them."""


def on_loopback(size: int, way: tuple[ChannelPolicy, Rules] = DEFAULT) -> ThreadFabric:
    policy, rules = way
    return ThreadFabric(size, lambda: LoopbackFabric(size, rules=rules, channels=policy, timeout=30).transport)


@pytest.mark.parametrize("way", EVERY_WAY, ids=lambda way: f"{way[0].value}-{way[1]}")
def test_loopback_keeps_every_promise(way: tuple[ChannelPolicy, Rules]) -> None:
    slow = SLOW if way not in (DEFAULT, WEAKEST) else set()
    check_transport(
        lambda size: on_loopback(size, way), checks=[check for check in TRANSPORT_CHECKS if check.name not in slow]
    )


@pytest.mark.parametrize(
    "wrap", [RecordingTransport, lambda inner: FaultyTransport(inner, [])], ids=["recording", "faulty"]
)
def test_transports_around_another_keep_every_promise(wrap: Callable[[Transport], Transport]) -> None:
    def make(size: int) -> ThreadFabric:
        def connect() -> Callable[[int], Transport]:
            fabric = LoopbackFabric(size, timeout=30)
            return lambda rank: wrap(fabric.transport(rank))

        return ThreadFabric(size, connect)

    check_transport(make, checks=[check for check in TRANSPORT_CHECKS if check.name not in SLOW - {"abort"}])


def on_the_group(size: int) -> C10dTransport:
    return C10dTransport(timeout=20)


def on_channels(size: int) -> C10dTransport:
    wires = [Wire(source, 0, later, 0) for source in range(size) for later in range(source + 1, size)]
    return C10dTransport(placement=Placement.loop(size, size), wires=wires, timeout=20)


@pytest.mark.parametrize("check", TRANSPORT_CHECKS, ids=lambda check: check.name)
def test_gloo_keeps_every_promise(workers: WorkerPool, check: Check) -> None:
    check_transport(lambda size: PoolFabric(workers, size, on_channels), checks=[check])


@pytest.mark.parametrize("check", [check for check in TRANSPORT_CHECKS if check.size > 2], ids=lambda check: check.name)
def test_gloo_keeps_promises_without_channels_too(workers: WorkerPool, check: Check) -> None:
    check_transport(lambda size: PoolFabric(workers, size, on_the_group), checks=[check])


# ---- the battery itself: a transport that breaks a promise is found out


class Broken:
    """A loopback transport with one thing wrong."""

    def __init__(self, inner: LoopbackTransport, fault: str) -> None:
        self.inner, self.fault = inner, fault
        self.rank, self.size, self.rules = inner.rank, inner.size, inner.rules

    def post(self, batch: Sequence[Send | Recv]) -> object:
        if self.fault == "waits in post":
            time.sleep(0.5)
        if self.fault == "accepts anything":
            batch = [item for item in batch if item.op.rank == self.rank]
        if self.fault == "shares memory":
            batch = [attrs.evolve(item, owned=True) if isinstance(item, Send) else item for item in batch]
        if self.fault == "loses the buffer":
            batch = [attrs.evolve(item, buffer=None) if isinstance(item, Recv) else item for item in batch]
        return self.inner.post(batch)

    def abort(self, reason: str, **where: object) -> None:
        if self.fault != "tells nobody":
            self.inner.abort(reason, **({} if self.fault == "forgets where" else where))  # type: ignore[arg-type]

    def close(self) -> None:
        self.inner.close()


@pytest.mark.parametrize(
    ("fault", "check"),
    [
        ("waits in post", "early_and_late"),
        ("accepts anything", "refusals"),
        ("shares memory", "ownership"),
        ("loses the buffer", "ownership"),
        ("forgets where", "abort"),
        ("tells nobody", "abort"),
    ],
)
def test_a_broken_promise_is_found_out(fault: str, check: str) -> None:
    def make(size: int) -> ThreadFabric:
        def connect() -> Callable[[int], Broken]:
            fabric = LoopbackFabric(size, timeout=3)
            return lambda rank: Broken(fabric.transport(rank), fault)

        return ThreadFabric(size, connect)

    checks = [one for one in TRANSPORT_CHECKS if one.name == check]
    with pytest.raises(TransportCheckError, match=f"check '{check}' failed"):
        check_transport(make, checks=checks, deadline=10)


def test_a_rank_that_hangs_is_named() -> None:
    def hang(transport: LoopbackTransport) -> None:
        if transport.rank == 1:
            time.sleep(1.0)

    fabric = ThreadFabric(2, lambda: LoopbackFabric(2).transport)
    outcomes = fabric.run(hang, deadline=0.2)
    assert [outcome.hung for outcome in outcomes] == [False, True]


def test_a_transport_that_cannot_be_made_is_reported_with_its_error() -> None:
    """Its rank was reported as one that still runs, after the whole deadline."""

    def connect() -> Callable[[int], Transport]:
        fabric = LoopbackFabric(4, timeout=1)

        def make(rank: int) -> Transport:
            if rank == 1:
                raise RuntimeError("no such device")
            return fabric.transport(rank)

        return make

    start = time.monotonic()
    with pytest.raises(TransportCheckError, match="no such device"):
        check_transport(lambda size: ThreadFabric(size, connect), checks=TRANSPORT_CHECKS[:1], deadline=60)
    assert time.monotonic() - start < 10
