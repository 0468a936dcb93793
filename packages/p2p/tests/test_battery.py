"""The battery on our own transports, and on ones that break a promise each."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from stepwell_meta.testing import WorkerPool
from stepwell_p2p import (
    C10dTransport,
    ChannelPolicy,
    LoopbackFabric,
    LoopbackTransport,
    Placement,
    Rules,
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


# ---- the battery itself; see also test_battery_catches.py


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
