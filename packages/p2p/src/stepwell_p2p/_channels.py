"""Which messages share a lane, how many groups that takes, and in which order ranks connect."""

from __future__ import annotations

import enum
from collections.abc import Sequence

import attrs

from ._op import Op
from ._placement import Edge, Placement, Wire
from ._require import require, several
from .exceptions import P2PUsageError


class ChannelPolicy(enum.Enum):
    """How messages are spread over channels, which are first-in-first-out lanes.

    Fewer channels cost fewer communicators; with more of them fewer orders can block (see ``prove_order``).
    """

    SHARED = "shared"
    """One channel for everything."""
    PER_DIRECTION = "per-direction"
    """One for values (downstream), one for gradients (upstream)."""
    PER_EDGE = "per-edge"
    """One for each ordered pair of ranks."""

    @classmethod
    def of(cls, value: ChannelPolicy | str) -> ChannelPolicy:
        """The policy itself, or the one of that name.

        Raises:
            P2PUsageError: no policy has this name.
        """
        try:
            return cls(value)
        except ValueError:
            names = ", ".join(repr(policy.value) for policy in cls)
            raise P2PUsageError(f"no channel policy is named {value!r}; there are {names}") from None

    def channel_of(self, op: Op) -> str:
        """The name of the channel that carries this message; the same at both of its ends."""
        if self is ChannelPolicy.SHARED:
            return "shared"
        if self is ChannelPolicy.PER_DIRECTION:
            return "downstream" if op.kind.is_forward else "upstream"
        return f"{op.edge.source}->{op.edge.destination}"


@attrs.frozen
class Channel:
    """One lane.

    Attributes:
        name: what :meth:`ChannelPolicy.channel_of` answers for its messages.
        ranks: who takes part, ascending.
    """

    name: str
    ranks: tuple[int, ...]


@attrs.frozen
class ChannelMap:
    """Every channel of a pipeline, and the plan by which ranks open and connect them.

    Attributes:
        policy: how messages find their channel.
        channels: in the one order in which every rank creates the groups it belongs to.
        rounds: edges to connect together; within a round no rank appears twice, so that every pair of a round
            connects at once and nobody waits for a third.
    """

    policy: ChannelPolicy
    channels: tuple[Channel, ...]
    rounds: tuple[tuple[Edge, ...], ...]

    def of_rank(self, rank: int) -> tuple[Channel, ...]:
        """The channels that this rank belongs to, in creation order: as many groups will it create."""
        return tuple(channel for channel in self.channels if rank in channel.ranks)

    @property
    def edges(self) -> tuple[Edge, ...]:
        """All edges, in the order in which they connect."""
        return tuple(edge for edges in self.rounds for edge in edges)


def edges_of(placement: Placement, wires: Sequence[Wire], *, backward: bool = True) -> tuple[Edge, ...]:
    """The edges that values and gradients cross, ascending; wires within one rank need none.

    Args:
        placement: which rank holds which stage.
        wires: what crosses.
        backward: whether gradients travel back on the reverse edges.

    Raises:
        P2PUsageError: a wire names a stage that the placement does not have.
    """
    require(placement, Placement, "edges are of a placement", "Placement.loop(stages, ranks) is the usual one")
    edges = set()
    for wire in several(wires, "wires are several, for example chain_wires(num_stages)"):
        require(wire, Wire, "edges are of wires", "chain_wires(num_stages) are the usual ones")
        if wire.destination >= placement.num_stages:
            raise P2PUsageError(
                f"{wire} leads to stage {wire.destination}, but the placement has stages 0 to {placement.num_stages - 1}"
            )
        edge = Edge(placement.ranks[wire.source], placement.ranks[wire.destination])
        if edge.source != edge.destination:
            edges.add(edge)
            if backward:
                edges.add(edge.reverse)
    return tuple(sorted(edges))


def channels_for(
    placement: Placement, wires: Sequence[Wire], policy: ChannelPolicy | str = ChannelPolicy.PER_EDGE
) -> ChannelMap:
    """Which channels a pipeline needs.

    Pure: every rank computes the same map from the same placement and wires.

    Example::

        channels = channels_for(Placement.loop(4, 2), chain_wires(4))
        [channel.name for channel in channels.channels]   # ['0->1', '1->0']
        channels.rounds                                   # ((Edge(0, 1),), (Edge(1, 0),))

    Args:
        placement: which rank holds which stage.
        wires: what crosses between stages; a wire may skip stages.
        policy: a :class:`ChannelPolicy` or its name.

    Raises:
        P2PUsageError: unknown policy, or a wire to a stage that does not exist.
    """
    policy = ChannelPolicy.of(policy)
    edges = edges_of(placement, wires)
    rounds = _disjoint_rounds(edges)
    everyone = tuple(sorted({rank for edge in edges for rank in (edge.source, edge.destination)}))
    if not edges:
        names: tuple[Channel, ...] = ()
    elif policy is ChannelPolicy.SHARED:
        names = (Channel("shared", everyone),)
    elif policy is ChannelPolicy.PER_DIRECTION:
        names = (Channel("downstream", everyone), Channel("upstream", everyone))
    else:  # in the order of the rounds, so that members of a round create their groups side by side
        names = tuple(
            Channel(f"{edge.source}->{edge.destination}", tuple(sorted((edge.source, edge.destination))))
            for group in rounds
            for edge in group
        )
    return ChannelMap(policy, names, rounds)


def _disjoint_rounds(edges: Sequence[Edge]) -> tuple[tuple[Edge, ...], ...]:
    """Greedy edge colouring: at most (twice the busiest rank's edges - 1) rounds, and two per neighbour in a chain."""
    rounds: list[list[Edge]] = []
    busy: list[set[int]] = []
    for edge in edges:
        ends = {edge.source, edge.destination}
        for group, ranks in zip(rounds, busy, strict=True):
            if not ends & ranks:
                group.append(edge)
                ranks |= ends
                break
        else:
            rounds.append([edge])
            busy.append(set(ends))
    return tuple(tuple(group) for group in rounds)
