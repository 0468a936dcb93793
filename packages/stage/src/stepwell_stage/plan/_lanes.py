"""When a message is done, under the rules of a transport."""

from __future__ import annotations

from collections import deque

from stepwell_p2p._channels import ChannelPolicy
from stepwell_p2p._placement import Edge
from stepwell_p2p.exceptions import DeadlockError

from ._messages import Messages


class Lanes:
    """Messages posted and done so far.

    A message is *met* when both ends have started. Where messages are matched by what they are, posting starts them. Else each
    rank works through each channel in the order of posting: the messages of one post start together, once those of the post
    before are done. A send that needs no receiver (no rendezvous) is done when it starts.

    Attributes:
        send_posted: for each message, whether its sender has posted it.
        recv_posted: for each message, whether its receiver has.
        send_done: for each message, whether a wait of its sender would return.
        recv_done: for each message, whether it has arrived.
        finished: messages that became done at an end since the list was last cleared.
    """

    def __init__(self, messages: Messages, *, tagged: bool, rendezvous: bool, policy: ChannelPolicy) -> None:
        self.messages = messages
        self.rendezvous = rendezvous
        self.tagged = tagged
        self.policy = policy
        # On a channel of one edge the order of posting is all there is to it: nothing else can stand in front.
        self.queued = not tagged and policy is not ChannelPolicy.PER_EDGE
        self.send_posted, self.recv_posted, self.send_done, self.recv_done, self._sends, self._recvs = (
            bytearray(len(messages)) for _ in range(6)
        )
        self.finished: list[int] = []
        self._channels = messages.channels(policy)
        self._edges = [messages.edge(link * messages.num_microbatches) for link in range(2 * len(messages.links))]
        self._orders: dict[tuple[Edge, str], tuple[list[int], list[int]]] = {}
        self._lane_of: dict[tuple[int, str], deque[_Group]] = {}

    def post(self, rank: int, numbers: tuple[int, ...], *, is_send: bool) -> None:
        """One post of one rank: these messages, all sends or all receives."""
        posted = self.send_posted if is_send else self.recv_posted
        for message in numbers:
            posted[message] = 1
        if not self.tagged:
            for message in numbers:
                link = message // self.messages.num_microbatches
                orders = self._orders.setdefault((self._edges[link], self._channels[link]), ([], []))
                orders[not is_send].append(message)
        if not self.queued:
            for message in numbers:
                self._start(message, is_send=is_send)
            return
        by_channel: dict[str, list[int]] = {}
        for message in numbers:
            by_channel.setdefault(self._channels[message // self.messages.num_microbatches], []).append(message)
        moved = []
        for channel, members in by_channel.items():
            lane = self._lane_of.setdefault((rank, channel), deque())
            lane.append(_Group(members, is_send=is_send))
            if len(lane) == 1:
                moved.append((rank, channel))
        self._advance(moved)

    def check_order(self, name: str) -> None:
        """Refuse channels whose two ends were posted in different orders."""
        for (edge, channel), (sends, recvs) in self._orders.items():
            for place, (sent, received) in enumerate(zip(sends, recvs, strict=False)):
                if sent != received:
                    raise DeadlockError(
                        f"{name}: message {place} on channel {channel!r} from rank {edge.source}"
                        f" to rank {edge.destination} is sent as {self.messages.describe(sent)}"
                        f" but received as {self.messages.describe(received)}; both ends must use one order"
                    )

    def culprit(self, rank: int, message: int) -> tuple[str, int]:
        """What stands in front of a message that is not done, in words ("" if nothing does), and the rank that must act."""
        edge = self.messages.edge(message)
        other = edge.source if rank == edge.destination else edge.destination
        if not self.queued:
            return "", other
        for end in (rank, other):
            posted, started = (self.send_posted, self._sends) if end == edge.source else (self.recv_posted, self._recvs)
            if posted[message] and not started[message]:
                channel = self._channels[message // self.messages.num_microbatches]
                head = self._lane_of[end, channel][0]
                first = next(m for m in head.members if not self._done(m, is_send=head.is_send))
                verb = "sends" if head.is_send else "receives"
                head_edge = self.messages.edge(first)
                culprit = head_edge.destination if head.is_send else head_edge.source
                text = (
                    f"which stands on rank {end} in channel {channel!r} behind {self.messages.describe(first)}"
                    f" that rank {end} {verb}"
                )
                return text, culprit
        return "", other

    def _done(self, message: int, *, is_send: bool) -> bool:
        return bool((self.send_done if is_send else self.recv_done)[message])

    def _start(self, message: int, *, is_send: bool) -> None:
        ours, theirs = (self._sends, self._recvs) if is_send else (self._recvs, self._sends)
        ours[message] = 1
        if theirs[message]:
            self.send_done[message] = self.recv_done[message] = 1
            self.finished.append(message)
        elif is_send and not self.rendezvous:
            self.send_done[message] = 1
            self.finished.append(message)

    def _advance(self, moved: list[tuple[int, str]]) -> None:
        """Start the head of each of these lanes; where that finishes a head, here or at the other end, the next in its lane."""
        while moved:
            key = moved.pop()
            lane = self._lane_of.get(key)
            while lane:
                head = lane[0]
                if not head.started:
                    head.started = True
                    for message in head.members:
                        self._start(message, is_send=head.is_send)
                        edge = self.messages.edge(message)
                        moved.append((edge.destination if head.is_send else edge.source, key[1]))
                if not all(self._done(message, is_send=head.is_send) for message in head.members):
                    break
                lane.popleft()


class _Group:
    """The messages of one post on one channel."""

    __slots__ = ("is_send", "members", "started")

    def __init__(self, members: list[int], *, is_send: bool) -> None:
        self.is_send = is_send
        self.members = members
        self.started = False
