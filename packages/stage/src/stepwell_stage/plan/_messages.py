"""The messages of a plan, numbered, so that proofs and simulations work on integers."""

from __future__ import annotations

import attrs

from stepwell_p2p._placement import Edge, Placement

from ._action import Action, Kind


@attrs.frozen
class Port:
    """One end of a link at one stage.

    Attributes:
        base: the number of the link's message for microbatch 0; microbatch *m* has ``base + m``.
        peer: the stage at the other end.
    """

    base: int
    peer: int


@attrs.frozen
class Messages:
    """Numbers for everything that travels between ranks: link by link, first all values, then all gradients.

    Attributes:
        placement: the rank of each stage.
        links: the pairs of stages (source, destination) on different ranks.
        num_microbatches: M.
        ports: for each of SEND_F, RECV_F, SEND_B and RECV_B and each stage, its ends, by ascending peer.
        local_sources: for each stage the stages on its own rank whose values it takes.
        local_destinations: for each stage the stages on its own rank that take its values.
    """

    placement: Placement
    links: tuple[tuple[int, int], ...]
    num_microbatches: int
    ports: dict[Kind, tuple[tuple[Port, ...], ...]]
    local_sources: tuple[tuple[int, ...], ...]
    local_destinations: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, placement: Placement, links: tuple[tuple[int, int], ...], num_microbatches: int) -> Messages:
        """Number the messages of these links."""
        ranks, stages = placement.ranks, range(placement.num_stages)
        crossing = tuple(link for link in links if ranks[link[0]] != ranks[link[1]])
        kinds = (Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B)
        ports: dict[Kind, list[list[Port]]] = {kind: [[] for _ in stages] for kind in kinds}
        for number, (source, destination) in enumerate(crossing):
            value, gradient = number * num_microbatches, (number + len(crossing)) * num_microbatches
            ports[Kind.SEND_F][source].append(Port(value, destination))
            ports[Kind.RECV_F][destination].append(Port(value, source))
            ports[Kind.SEND_B][destination].append(Port(gradient, source))
            ports[Kind.RECV_B][source].append(Port(gradient, destination))
        sources: list[list[int]] = [[] for _ in stages]
        destinations: list[list[int]] = [[] for _ in stages]
        for source, destination in links:
            if ranks[source] == ranks[destination]:
                sources[destination].append(source)
                destinations[source].append(destination)
        return cls(
            placement,
            crossing,
            num_microbatches,
            {
                kind: tuple(tuple(sorted(row, key=lambda port: port.peer)) for row in rows)
                for kind, rows in ports.items()
            },
            tuple(map(tuple, sources)),
            tuple(map(tuple, destinations)),
        )

    def __len__(self) -> int:
        return 2 * len(self.links) * self.num_microbatches

    def of_action(self, action: Action) -> tuple[int, ...]:
        """The messages that a SEND, RECV or WAIT concerns."""
        ports = self.ports[_WAITED.get(action.kind, action.kind)][action.stage]
        microbatch = action.microbatch or 0
        if action.peer is None and len(ports) == 1:
            return (ports[0].base + microbatch,)
        return tuple(port.base + microbatch for port in ports if action.peer is None or action.peer == port.peer)

    def edge(self, message: int) -> Edge:
        """From which rank to which it travels."""
        source, destination = self.ends(message)
        return Edge(self.placement.ranks[source], self.placement.ranks[destination])

    def describe(self, message: int) -> str:
        """The message in words."""
        source, destination = self.ends(message)
        what = "value" if source < destination else "gradient"
        return f"the {what} of microbatch {message % self.num_microbatches} from stage {source} to stage {destination}"

    def ends(self, message: int) -> tuple[int, int]:
        """From which stage to which it travels: gradients to an earlier one."""
        number = message // self.num_microbatches
        if number < len(self.links):
            return self.links[number]
        source, destination = self.links[number - len(self.links)]
        return destination, source


_WAITED = {Kind.WAIT_F: Kind.SEND_F, Kind.WAIT_B: Kind.SEND_B}
