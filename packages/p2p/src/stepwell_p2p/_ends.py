"""The ends of all messages of a run, numbered, each with its other end."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Hashable, Sequence

from ._channels import ChannelPolicy
from ._op import Op
from ._step import Post, Step, Wait
from .exceptions import DeadlockError, P2PUsageError

Lane = tuple[int, str]
"""One rank's side of one channel: rank and channel."""

_Place = tuple[str, int, int]
_Waiting = dict[Hashable, int | deque[int]]


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
        self._sends: defaultdict[_Place, list[int]] = defaultdict(list)  # by channel and edge
        self._recvs: defaultdict[_Place, list[int]] = defaultdict(list)
        self._open_sends: _Waiting = {}  # by message: those that have not met their other end
        self._open_recvs: _Waiting = {}
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
        self.problem = self._match_tagged() if tagged else self._match_in_order()
        del self._sends, self._recvs, self._open_sends, self._open_recvs

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
        if self._tagged or len(step.ops) == 1:  # where messages match by op, the whole batch goes together
            if step.ops:
                self._add_group(rank, (rank, "") if self._tagged else self._lane(rank, step.ops[0]), batch, step.ops)
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
            end, edge, is_send = len(self.ops), op.edge, op.kind.is_send
            if (edge.source if is_send else edge.destination) != rank:
                raise P2PUsageError(
                    f"rank {rank} posts {op} in {self.label_of(batch)!r}, which is rank {op.rank}'s to post"
                )
            self.ops.append(op)
            self.rank_of.append(rank)
            self.is_send.append(is_send)
            self.group_of.append(group)
            if self._tagged:
                ours, theirs = self._open_sends, self._open_recvs
                self._meet(op.message, end, *((ours, theirs) if is_send else (theirs, ours)))
            else:
                (self._sends if is_send else self._recvs)[lane[1], edge.source, edge.destination].append(end)

    def _meet(self, key: Hashable, end: int, ours: _Waiting, theirs: _Waiting) -> None:
        """Match with the first of the other ends that wait under this key, or wait. A single end stands for itself."""
        waiting = theirs.pop(key, None)
        if waiting is None:
            before = ours.get(key)
            if before is None:
                ours[key] = end
            elif isinstance(before, deque):
                before.append(end)
            else:
                ours[key] = deque((before, end))
            self.other.append(-1)
            return
        if isinstance(waiting, deque):
            first = waiting.popleft()
            if waiting:
                theirs[key] = waiting
        else:
            first = waiting
        self.other[first] = end
        self.other.append(first)

    def _lane(self, rank: int, op: Op) -> Lane:
        key = (rank, op.edge.source, op.edge.destination, op.kind.is_forward)
        lane = self._lanes.get(key)
        if lane is None:
            lane = self._lanes[key] = (rank, self.policy.channel_of(op))
        return lane

    def _match_tagged(self) -> DeadlockError | None:
        """All have met already, but for those that are alone."""
        if not (self._open_sends or self._open_recvs):
            return None
        everyone = range(len(self.ops))
        sends = [end for end in everyone if self.is_send[end]]
        return self._unmatched(sends, [end for end in everyone if not self.is_send[end]])

    def _match_in_order(self) -> DeadlockError | None:
        self.other = [-1] * len(self.ops)
        for key in {**self._sends, **self._recvs}:
            sends, recvs = self._sends[key], self._recvs[key]
            for send, recv in zip(sends, recvs, strict=False):  # the k-th send meets the k-th receive
                ours, theirs = self.ops[send], self.ops[recv]
                if (
                    ours.microbatch != theirs.microbatch
                    or ours.stage != theirs.stage
                    or ours.index != theirs.index
                    or ours.kind.is_forward is not theirs.kind.is_forward
                ):
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
