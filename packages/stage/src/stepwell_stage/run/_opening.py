"""What each rank receives first in a step, begun before it hears that there is a step and how its batch is cut.

Most steps are like the one before, and a value whose receive is there already needs one message less between the ranks than one
that waits for it. So what a rank's first forward takes is received while the rank waits for the word that begins the step. Where
the word is another one, what was begun must come to an end: those that would have sent these values know by the same schedule
what was begun, and send as much of nothing, which is dropped.
"""

from __future__ import annotations

from collections.abc import Mapping

from stepwell_p2p import Handle

from ..plan._action import Kind
from ..plan._schedule import Schedule
from ._link import InLink, OutLink


class Opening:
    """One rank's part of it; mutable: it remembers what it has sent.

    Only for transports that match messages by op, for it posts these receives out of the plan's order.

    Args:
        schedule: the same on every rank.
        in_links: of this rank's stages.
        out_links: likewise.
    """

    def __init__(
        self,
        schedule: Schedule,
        in_links: Mapping[tuple[int, int], InLink],
        out_links: Mapping[tuple[int, int], OutLink],
    ) -> None:
        first = {}  # by stage: the microbatch with which its rank begins
        for row in schedule.actions:
            leaf = next((leaf for action in row for leaf in action.leaves), None)
            if leaf is not None and leaf.kind is Kind.F and leaf.microbatch is not None:
                first[leaf.stage] = leaf.microbatch
        self._ins = [(link, first[place[1]]) for place, link in in_links.items() if _opens(place, link, first)]
        self._outs = [(link, first[place[1]]) for place, link in out_links.items() if _opens(place, link, first)]
        self._sent: list[Handle] = []

    def begin(self) -> None:
        """Receive what the first forward takes, if the step to come is like the last."""
        for handle in self._sent:
            handle.wait()
        self._sent.clear()
        for link, microbatch in self._ins:
            if microbatch < len(link.groups):
                link.recv(microbatch)

    def end(self) -> None:
        """It is another one: bring to an end what every rank has begun."""
        self._sent += [
            handle
            for link, microbatch in self._outs
            if microbatch < len(link.groups) and (handle := link.send_nothing(microbatch)) is not None
        ]
        for link, microbatch in self._ins:
            if microbatch < len(link.groups):
                link.drop(microbatch)


def _opens(place: tuple[int, int], link: InLink | OutLink, first: Mapping[int, int]) -> bool:
    return place[1] in first and not link.is_local
