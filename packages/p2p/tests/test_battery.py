"""The battery on our own transports, and on ones that break a promise each."""

from __future__ import annotations

import pytest

from stepwell_meta.testing import WorkerPool
from stepwell_p2p import C10dTransport, ChannelPolicy, LoopbackFabric, Placement, Rules, Wire
from stepwell_p2p.testing import TRANSPORT_CHECKS, Check, PoolFabric, ThreadFabric, check_transport


def names(check: Check) -> str:
    return check.name


@pytest.mark.parametrize("check", TRANSPORT_CHECKS, ids=names)
@pytest.mark.parametrize("policy", ChannelPolicy)
@pytest.mark.parametrize(("tagged", "rendezvous"), [(True, True), (True, False), (False, True), (False, False)])
def test_loopback_keeps_every_promise(check: Check, policy: ChannelPolicy, tagged: bool, rendezvous: bool) -> None:
    if tagged and policy is not ChannelPolicy.PER_EDGE:
        pytest.skip("tagged rules do not look at channels")
    rules = Rules(tagged=tagged, rendezvous=rendezvous)

    def make(size: int) -> ThreadFabric:
        return ThreadFabric(size, lambda: LoopbackFabric(size, rules=rules, channels=policy, timeout=30).transport)

    check_transport(make, checks=[check])


def on_the_group(size: int) -> C10dTransport:
    return C10dTransport(timeout=20)


def on_channels(size: int) -> C10dTransport:
    wires = [Wire(source, 0, later, 0) for source in range(size) for later in range(source + 1, size)]
    return C10dTransport(placement=Placement.loop(size, size), wires=wires, timeout=20)


@pytest.mark.parametrize("connect", [on_the_group, on_channels])
@pytest.mark.parametrize("check", TRANSPORT_CHECKS, ids=names)
def test_gloo_keeps_every_promise(workers: WorkerPool, check: Check, connect: object) -> None:
    check_transport(lambda size: PoolFabric(workers, size, connect), checks=[check])
