"""The ends of all messages of a run, numbered, each with its other end."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Sequence

from ._channels import ChannelPolicy
from ._op import Op
from ._step import Post, Step, Wait, Work
from .exceptions import DeadlockError, P2PUsageError

Lane = tuple[int, str]
"""One rank's side of one channel: rank and channel."""

_Line = tuple[list[int], list[int]]
"""What crosses one edge on one channel: the ends of the sends, and those of the receives, in order."""


class Ends:
    """Flat tables over the numbers of ends, batches and lanes.

    Ends are numbered rank by rank in the order in which they are posted, so those of batch ``b`` are
    ``range(first[b], first[b + 1])``. Plain lists of numbers, because a million messages shall fit in memory and pass in seconds.

    Attributes:
        ops: by end.
        batch_of: by end.
        lane_of: by end; empty where messages match by op, since then no message stands behind another.
        is_send: by end.
        other: by end: the other end of the same message.
        first: by batch: its first end.
        lanes: by lane: rank and channel.
        queues: by lane: its ends in the order in which they are posted.
        programs: by rank and step: the batch that it posts; ``~batch`` for one that it waits for; None for local work.
        problem: why the ends do not fit together, or None.
    """

    def __init__(self, sequences: Sequence[Sequence[Step]], policy: ChannelPolicy, *, tagged: bool) -> None:
        self.sequences = sequences
        self.policy = policy
        self.ops: list[Op] = []
        self.batch_of: list[int] = []
        self.lane_of: list[int] = []
        self.is_send = bytearray()
        self.first: list[int] = []
        self.lanes: list[Lane] = []
        self.queues: list[list[int]] = []
        self.programs: list[list[int | None]] = []
        self._tagged = tagged
        self._lane_numbers: dict[Lane, int] = {}
        self._lines: defaultdict[tuple[str, int, int], _Line] = defaultdict(lambda: ([], []))
        for rank in range(len(sequences)):
            self.programs.append(self._number(rank))
        self.first.append(len(self.ops))
        self.other = [-1] * len(self.ops)
        self.problem = self._match()
        del self._lines

    def label_of(self, end: int) -> str:
        """The label of the post that an end belongs to."""
        rank = self.ops[end].rank
        step = self.sequences[rank][self.programs[rank].index(self.batch_of[end])]
        return step.label

    def ends_of_batch(self, batch: int) -> range:
        """Its ends."""
        return range(self.first[batch], self.first[batch + 1])

    def _number(self, rank: int) -> list[int | None]:
        """Number what one rank posts; the rank's program."""
        ops, batch_of, lane_of, is_sends, first = self.ops, self.batch_of, self.lane_of, self.is_send, self.first
        tagged = self._tagged
        program: list[int | None] = []
        routes: dict[int, tuple[list[int], int, list[int]]] = {}  # by peer and kind
        for index, step in enumerate(self.sequences[rank]):
            if isinstance(step, Post):
                batch = len(first)
                program.append(batch)
                first.append(len(ops))
                for op in step.ops:
                    kind, edge = op.kind, op.edge
                    is_send = kind.is_send
                    mine, peer = (edge.source, edge.destination) if is_send else (edge.destination, edge.source)
                    if mine != rank:
                        raise P2PUsageError(f"rank {rank} posts {op} in {step.label!r}, which is rank {mine}'s to post")
                    route = routes.get(4 * peer + kind.number)
                    if route is None:
                        route = routes[4 * peer + kind.number] = self._route(rank, op)
                    line, lane, queue = route
                    end = len(ops)
                    ops.append(op)
                    batch_of.append(batch)
                    is_sends.append(is_send)
                    line.append(end)
                    if not tagged:
                        lane_of.append(lane)
                        queue.append(end)
            elif isinstance(step, Wait):
                posted = program[step.post] if 0 <= step.post < index else None
                if posted is None or posted < 0:
                    raise P2PUsageError(
                        f"rank {rank}, step {index} waits for step {step.post}, which is no earlier post"
                    )
                program.append(~posted)
            elif isinstance(step, Work):
                program.append(None)
            else:
                raise P2PUsageError(f"rank {rank}, step {index} is no Post, Wait or Work, but {step!r}")
        return program

    def _route(self, rank: int, op: Op) -> tuple[list[int], int, list[int]]:
        """Where ends of the same peer and kind go: the line in which they meet their other ends, and their lane."""
        if not 0 <= op.peer < len(self.sequences):
            raise P2PUsageError(
                f"rank {rank} posts {op}, but there is no rank {op.peer}: the sequences are those of ranks 0 to"
                f" {len(self.sequences) - 1}"
            )
        channel = "" if self._tagged else self.policy.channel_of(op)
        line = self._lines[channel, op.edge.source, op.edge.destination][not op.kind.is_send]
        lane = self._lane_numbers.setdefault((rank, channel), len(self.lanes))
        if lane == len(self.lanes):
            self.lanes.append((rank, channel))
            self.queues.append([])
        return line, lane, self.queues[lane]

    def _match(self) -> DeadlockError | None:
        ops, other = self.ops, self.other
        for sends, recvs in self._lines.values():
            for place, (send, recv) in enumerate(
                zip(sends, recvs, strict=False)
            ):  # the k-th send meets the k-th receive
                ours, theirs = ops[send], ops[recv]
                if (
                    ours.microbatch != theirs.microbatch
                    or ours.stage != theirs.stage
                    or ours.index != theirs.index
                    or ours.kind.is_forward is not theirs.kind.is_forward
                ):
                    problem = self._unmatched(sends, recvs)
                    if problem is not None or not self._tagged:
                        return problem or self._misordered(send, recv)
                    self._match_by_message(sends[place:], recvs[place:])
                    break
                other[send], other[recv] = recv, send
            if len(sends) != len(recvs):
                return self._unmatched(sends, recvs)
        return None

    def _match_by_message(self, sends: list[int], recvs: list[int]) -> None:
        """Every send to the first of the receives of the same message, where their orders differ."""
        waiting: defaultdict[object, deque[int]] = defaultdict(deque)
        for recv in recvs:
            waiting[self.ops[recv].message].append(recv)
        for send in sends:
            recv = waiting[self.ops[send].message].popleft()
            self.other[send], self.other[recv] = recv, send

    def _unmatched(self, sends: list[int], recvs: list[int]) -> DeadlockError | None:
        """The first end whose other end is nowhere, if there is one."""
        for ours, theirs in ((sends, recvs), (recvs, sends)):
            left = Counter(self.ops[end].message for end in theirs)
            for end in ours:
                op = self.ops[end]
                left[op.message] -= 1
                if left[op.message] < 0:
                    label = self.label_of(end)
                    where = f" in {label}" if label else ""
                    verb = "receives" if op.kind.is_send else "sends"
                    return DeadlockError(
                        f"rank {op.rank} posts {op}{where}, but rank {op.peer} never {verb} it:"
                        f" add {op.mirror} there, or leave this out",
                        kind="unmatched",
                    )
        return None

    def _misordered(self, send: int, recv: int) -> DeadlockError:
        ours, theirs = self.ops[send], self.ops[recv]
        return DeadlockError(
            f"on channel {self.policy.channel_of(ours)}, where messages come in the order in which they are sent,"
            f" rank {ours.rank} sends {ours} at the place where rank {theirs.rank} receives {theirs}:"
            " the receiver would get the wrong data.",
            kind="order",
        )
