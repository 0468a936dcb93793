"""Which channels a pipeline needs, and in which rounds they connect."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepwell_p2p import ChannelPolicy, Edge, Op, OpKind, Placement, Wire, chain_wires, channels_for, edges_of
from stepwell_p2p.exceptions import P2PUsageError


def test_a_chain_has_two_edges_a_boundary_and_connects_in_four_rounds() -> None:
    channels = channels_for(Placement.loop(4, 4), chain_wires(4))
    assert channels.rounds == (
        (Edge(0, 1), Edge(2, 3)),
        (Edge(1, 0), Edge(3, 2)),
        (Edge(1, 2),),
        (Edge(2, 1),),
    )
    assert [channel.name for channel in channels.of_rank(1)] == ["0->1", "1->0", "1->2", "2->1"]


def test_p143_the_number_of_groups_is_known_and_bounded() -> None:
    """Each communicator takes memory: two for each neighbour, however many stages and microbatches there are."""
    for stages in (4, 8, 64):
        channels = channels_for(Placement.loop(stages, 4), chain_wires(stages))
        assert {len(channels.of_rank(rank)) for rank in range(4)} <= {2, 4}
        for policy, most in (("shared", 1), ("per-direction", 2)):
            fewer = channels_for(Placement.loop(stages, 4), chain_wires(stages), policy)
            assert all(len(fewer.of_rank(rank)) <= most for rank in range(4))


def test_placements_and_skip_wires() -> None:
    assert edges_of(Placement.v(8, 4), chain_wires(8)) == edges_of(Placement.loop(4, 4), chain_wires(4))
    assert Edge(3, 0) in edges_of(Placement.loop(8, 4), chain_wires(8))
    skip = edges_of(Placement.loop(4, 4), [Wire(0, 0, 3, 0)])
    assert skip == (Edge(0, 3), Edge(3, 0))
    assert edges_of(Placement.loop(4, 4), [Wire(0, 0, 3, 0)], backward=False) == (Edge(0, 3),)
    assert channels_for(Placement.custom([0, 0]), chain_wires(2)).channels == ()  # an edge to oneself needs none
    assert channels_for(Placement.v(4, 2), chain_wires(4)).edges == (Edge(0, 1), Edge(1, 0))


def test_channels_of_ops() -> None:
    value = Op(OpKind.SEND_F, Edge(0, 1), 0, 0)
    gradient = Op(OpKind.RECV_B, Edge(1, 0), 1, 0)
    names = [(policy.channel_of(value), policy.channel_of(gradient)) for policy in ChannelPolicy]
    assert names == [("shared", "shared"), ("downstream", "upstream"), ("0->1", "1->0")]
    assert all(policy.channel_of(value) == policy.channel_of(value.mirror) for policy in ChannelPolicy)


def test_what_is_refused() -> None:
    with pytest.raises(P2PUsageError, match="'shared', 'per-direction', 'per-edge'"):
        channels_for(Placement.loop(2, 2), chain_wires(2), "both")
    with pytest.raises(P2PUsageError, match="the placement has stages 0 to 1"):
        channels_for(Placement.loop(2, 2), chain_wires(3))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_rounds_are_disjoint_and_complete(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 6))
    extra = data.draw(st.lists(st.integers(0, size - 1), max_size=6))
    placement = Placement.custom(data.draw(st.permutations([*range(size), *extra])))
    stage = st.integers(0, placement.num_stages - 1)
    ends = data.draw(st.lists(st.tuples(stage, stage).filter(lambda pair: pair[0] < pair[1]), max_size=10))
    wires = [Wire(source, 0, destination, 0) for source, destination in ends]
    channels = channels_for(placement, wires)
    assert sorted(channels.edges) == list(edges_of(placement, wires))
    for edges in channels.rounds:
        ranks = [rank for edge in edges for rank in (edge.source, edge.destination)]
        assert len(ranks) == len(set(ranks))
    names = [channel.name for channel in channels.channels]
    assert len(names) == len(set(names)) == len(channels.edges)
    busiest = max(
        (sum(rank in (edge.source, edge.destination) for edge in channels.edges) for rank in range(size)), default=0
    )
    assert len(channels.rounds) <= max(0, 2 * busiest - 1)
