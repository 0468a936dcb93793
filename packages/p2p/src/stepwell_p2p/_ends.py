"""The ends of all messages of a run, numbered, each with its other end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence

from ._channels import ChannelPolicy
from ._op import Op
from ._step import Post, Step, Wait
from .exceptions import DeadlockError, P2PUsageError

Lane = tuple[int, str]
"""One rank's side of one channel: rank and channel."""


class Ends:
    """Flat tables over the numbers of ends, groups (the ends of one batch on one channel) and batches.

    Groups of a batch, and ends of a group, have consecutive numbers: those of group ``g`` are
    ``range(group_first[g], group_first[g + 1])``, and likewise ``batch_first`` for the groups of a batch. Plain lists of numbers,
    because a million messages shall fit in memory and pass in seconds.

    Attributes:
        problem: why the ends do not fit together, or None.
    """

    def __init__(self, sequences: Sequence[Sequence[Step]], policy: ChannelPolicy, *, tagged: bool) -> None:
        self.sequences = sequences
        self.policy = policy
        self.ops: list[Op] = []
        self.rank_of: list[int] = []
        self.other: list[int] = []
        self.is_send = bytearray()
        self.group_of: list[int] = []
        self.group_first: list[int] = []
        self.group_lane: list[Lane] = []
        self.group_batch: list[int] = []
        self.batch_first: list[int] = []
        self.batch_step: list[tuple[int, int]] = []  # rank and step index of the post
        self.batch_at: list[dict[int, int]] = [{} for _ in sequences]  # step index -> batch
        self._tagged = tagged
        self._sends: dict[Hashable, list[int]] = {}
        self._recvs: dict[Hashable, list[int]] = {}
        self._lanes: dict[tuple[int, int, int, bool], Lane] = {}
        for rank, sequence in enumerate(sequences):
            for index, step in enumerate(sequence):
                if isinstance(step, Post):
                    self._add_batch(rank, index, step)
                elif isinstance(step, Wait) and step.post not in self.batch_at[rank]:
                    raise P2PUsageError(
                        f"rank {rank}, step {index} waits for step {step.post}, which is no earlier post"
                    )
        self.group_first.append(len(self.ops))
        self.batch_first.append(len(self.group_lane))
        self.other = [-1] * len(self.ops)
        self.problem = self._match()
        del self._sends, self._recvs

    def label_of(self, batch: int) -> str:
        """The label of a batch's post."""
        rank, index = self.batch_step[batch]
        step = self.sequences[rank][index]
        return step.label

    def ends_of_batch(self, batch: int) -> range:
        """The ends of all its groups."""
        return range(self.group_first[self.batch_first[batch]], self.group_first[self.batch_first[batch + 1]])

    def ends_of_group(self, group: int) -> range:
        """Its ends."""
        return range(self.group_first[group], self.group_first[group + 1])

    def _add_batch(self, rank: int, index: int, step: Post) -> None:
        batch = self.batch_at[rank][index] = len(self.batch_first)
        self.batch_first.append(len(self.group_lane))
        self.batch_step.append((rank, index))
        if len(step.ops) == 1:
            self._add_group(rank, self._lane(rank, step.ops[0]), batch, step.ops)
            return
        groups: dict[Lane, list[Op]] = {}
        for op in step.ops:
            groups.setdefault(self._lane(rank, op), []).append(op)
        for lane, ops in groups.items():
            self._add_group(rank, lane, batch, ops)

    def _add_group(self, rank: int, lane: Lane, batch: int, ops: Sequence[Op]) -> None:
        group = len(self.group_lane)
        self.group_first.append(len(self.ops))
        self.group_lane.append(lane)
        self.group_batch.append(batch)
        for op in ops:
            is_send, edge = op.kind.is_send, op.edge
            if (edge.source if is_send else edge.destination) != rank:
                raise P2PUsageError(
                    f"rank {rank} posts {op} in {self.label_of(batch)!r}, which is rank {op.rank}'s to post"
                )
            key: Hashable = op.message if self._tagged else (lane[1], edge.source, edge.destination)
            meeting = self._sends if is_send else self._recvs
            waiting = meeting.get(key)
            if waiting is None:
                meeting[key] = [len(self.ops)]
            else:
                waiting.append(len(self.ops))
            self.ops.append(op)
            self.rank_of.append(rank)
            self.is_send.append(is_send)
            self.group_of.append(group)

    def _lane(self, rank: int, op: Op) -> Lane:
        key = (rank, op.edge.source, op.edge.destination, op.kind.is_forward)
        lane = self._lanes.get(key)
        if lane is None:
            lane = self._lanes[key] = (rank, self.policy.channel_of(op))
        return lane

    def _match(self) -> DeadlockError | None:
        """The k-th send of each key meets its k-th receive."""
        for key in {**self._sends, **self._recvs}:
            sends, recvs = self._sends.get(key, []), self._recvs.get(key, [])
            for send, recv in zip(sends, recvs, strict=False):
                if not self._tagged and self.ops[send].message != self.ops[recv].message:
                    return self._unmatched(sends, recvs) or self._misordered(send, recv)
                self.other[send], self.other[recv] = recv, send
            if len(sends) != len(recvs):
                return self._unmatched(sends, recvs)
        return None

    def _unmatched(self, sends: list[int], recvs: list[int]) -> DeadlockError | None:
        """The first end whose other end is nowhere, if there is one."""
        for ours, theirs in ((sends, recvs), (recvs, sends)):
            left = Counter(self.ops[end].message for end in theirs)
            for end in ours:
                op = self.ops[end]
                left[op.message] -= 1
                if left[op.message] < 0:
                    label = self.label_of(self.group_batch[self.group_of[end]])
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
