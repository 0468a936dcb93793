"""How the communicators behind channels are made: split off where the backend can, else made anew."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import stepwell_p2p._groups as groups_module
import stepwell_p2p._link as link_module
import stepwell_p2p.transports._c10d as c10d_module
from stepwell_meta.testing import WorkerPool
from stepwell_p2p import C10dTransport, Placement, chain_wires, channels_for
from stepwell_p2p._channels import Channel
from stepwell_p2p._groups import ChannelGroup, _split, open_registered, rounds_of
from stepwell_p2p.exceptions import PeerFailure

TIMEOUT = timedelta(seconds=20)


def refused_and_made_anew() -> tuple[bool, list[str], str]:
    """torch splits no group on the CPU, bound to a device or not."""
    world = dist.group.WORLD
    parts = [[0, 1], [2]]
    with pytest.raises(RuntimeError, match="No device associated with the default pg"):
        dist.split_group(world, parts)
    world.bound_device_id = torch.device("cpu", 0)  # what init_process_group(device_id=...) does for an accelerator
    with pytest.raises(RuntimeError, match="does not support splitting"):
        dist.split_group(world, parts)
    handled = _split(world, parts, TIMEOUT) is None
    world.bound_device_id = None
    with pytest.MonkeyPatch.context() as patch:  # as if the backend were not gloo, for which we make groups of our own
        for module in (link_module, c10d_module):
            patch.setattr(module, "backend_for", lambda group, device: "other")
        transport = C10dTransport(placement=Placement.loop(3, 3), timeout=20)
    described = transport.describe()
    transport.close()
    return handled, [how for _, _, how in described.groups], str(described)


def test_a_refusal_to_split_is_handled_and_reported(workers: WorkerPool) -> None:
    """The user never sees torch's RuntimeError; describe() says how each group was made."""
    counts = [2, 4, 2]
    for rank, (handled, made_by, text) in enumerate(workers.run(refused_and_made_anew, 3)):
        assert handled
        assert made_by == ["new_group"] * counts[rank]
        assert text.count("(new_group)") == counts[rank]


@pytest.mark.gpu
def test_a_group_is_split_off_where_the_backend_can() -> None:
    """NCCL, in a world of one rank, since NCCL wants a device for each."""
    store = dist.HashStore()
    dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=torch.device("cuda", 0))
    try:
        dist.all_reduce(torch.ones(1, device="cuda"))  # split_group wants a parent that has communicated
        made = open_registered([[Channel("shared", (0,))]], parent=dist.group.WORLD, timeout=TIMEOUT)
        assert [(one.channel.name, one.made_by) for one in made] == [("shared", "split_group")]
        made[0].close()
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(("comes_after", "least", "most"), [(0.3, 0.3, 1.5), (None, 0.5, 1.5)])
def test_a_group_stays_until_all_its_members_are_connected(
    monkeypatch: pytest.MonkeyPatch, comes_after: float | None, least: float, most: float
) -> None:
    """A rank that opened and closed at once looked dead to one that was still connecting; one that never comes is given up."""
    if comes_after is None:
        monkeypatch.setattr(groups_module, "_STILL_CONNECTING", timedelta(seconds=0.5))
    store = dist.HashStore()
    group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, TIMEOUT)
    made = ChannelGroup(Channel("0->1", (0, 1)), group, "gloo", store)
    store.set("up/0", "")
    start = time.monotonic()
    if comes_after is not None:
        threading.Timer(comes_after, lambda: store.set("up/1", "")).start()
    made.close()
    assert least <= time.monotonic() - start < most


def absent_from_a_channel() -> tuple[float, object, str]:
    """Rank 2 comes to the transport and not to the channel that all share; rank 1 is the first to give up."""
    rank = dist.get_rank()
    transport = C10dTransport(timeout=1.0 if rank == 1 else 30.0)
    start = time.monotonic()
    others = [f"done/{other}" for other in (0, 1)]
    if rank == 2:  # lives on until the others have given up
        dist.group.WORLD.get_group_store().wait(others, timedelta(seconds=15))
        transport.close()
        return 0.0, None, ""
    assert transport._link is not None
    with pytest.raises(PeerFailure) as caught:
        transport._link.make(channels_for(Placement.loop(3, 3), chain_wires(3), "shared").channels)
    seconds = time.monotonic() - start
    with pytest.raises(PeerFailure):
        transport.post([])
    transport.close()
    dist.group.WORLD.get_group_store().set(others[rank], "")
    return seconds, caught.value.rank, str(caught.value)


def test_the_first_rank_to_give_up_on_a_member_tells_the_others(workers: WorkerPool) -> None:
    """It told nobody, so the others ran into their own timeouts, one after the other."""
    for seconds, named, text in workers.run(absent_from_a_channel, 3)[:2]:
        assert named == 2
        assert "rank 1 could not open channel shared: rank 2 did not connect within 1 s" in text
        assert seconds < 3


def test_rounds_have_disjoint_members_and_keep_the_order() -> None:
    names = ("0->1", "1->0", "2->3", "1->2")
    channels = [Channel(name, tuple(sorted((int(name[0]), int(name[-1]))))) for name in names]
    rounds = [[channel.name for channel in members] for members in rounds_of(channels)]
    assert rounds == [["0->1", "2->3"], ["1->0"], ["1->2"]]
