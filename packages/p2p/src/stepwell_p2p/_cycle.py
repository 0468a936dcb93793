"""Why a run got stuck: the shortest cycle of waits, in words."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import attrs

from ._ends import Lane
from ._op import Op
from ._run import Run
from .exceptions import DeadlockError

_Node = int | Lane
"""Who waits: a rank, blocked in a wait, or a lane, whose first group is not done."""


@attrs.frozen
class Blocked:
    """One link of a cycle of waits.

    Attributes:
        rank: who waits.
        action: the label of the step it waits in; of the post where a channel, not the program, is held up.
        channel: the channel of the message.
        op: the message that it waits for.
        because: why that does not come, which leads to the next link.
    """

    rank: int
    action: str
    channel: str
    op: Op
    because: str

    def __str__(self) -> str:
        action = f" in {self.action}" if self.action else ""
        return f"rank {self.rank}{action} waits on channel {self.channel} for {self.op}: {self.because}"


def explain(run: Run) -> DeadlockError:
    """The error for a run that did not finish."""
    heads = [next((end for end in queue if not run.done[end]), -1) for queue in run.ends.queues]
    arcs = {node: _arcs(run, heads, unfinished) for node, unfinished in _stuck(run).items()}
    cycle = _shortest_cycle({node: tuple(targets) for node, targets in arcs.items()})
    ends = run.ends
    links = []
    for number, node in enumerate(cycle):
        end, because = arcs[node][cycle[(number + 1) % len(cycle)]]
        op = ends.ops[end]
        action = ends.label_of(end)
        if isinstance(node, int):
            action = ends.sequences[node][run.position[node]].label or action
        links.append(Blocked(op.rank, action, ends.policy.channel_of(op), op, because))
    words = "\n".join(f"  {number}. {link}" for number, link in enumerate(links, 1))
    return DeadlockError(f"a cycle of {len(links)} waits:\n{words}\n", kind="cycle", cycle=tuple(links))


def _stuck(run: Run) -> dict[_Node, list[int]]:
    """The unfinished ends that each stuck rank and lane waits for."""
    ends = run.ends
    stuck: dict[_Node, list[int]] = {}
    for rank, batch in enumerate(run.blocked_on):
        if batch >= 0:
            stuck[rank] = [end for end in ends.ends_of_batch(batch) if not run.done[end]]
    for lane, queue, turns in zip(ends.lanes, ends.queues, run.turns, strict=True):
        unfinished = [end for end in queue[:turns] if not run.done[end]]
        if unfinished:
            stuck[lane] = unfinished
    return stuck


def _arcs(run: Run, heads: Sequence[int], unfinished: Iterable[int]) -> dict[_Node, tuple[int, str]]:
    """Where each unfinished end leads, with the end and the reason; one end for each place.

    ``heads`` holds the first unfinished end of each lane.
    """
    arcs: dict[_Node, tuple[int, str]] = {}
    for end in unfinished:
        target, because = _reason(run, heads, end)
        arcs.setdefault(target, (end, because))
    return arcs


def _reason(run: Run, heads: Sequence[int], end: int) -> tuple[_Node, str]:
    ends, other = run.ends, run.ends.other[end]
    op = ends.ops[end]
    if not run.active[end]:
        return _behind(run, heads, end, "it")
    if run.posted[ends.batch_of[other]]:
        return _behind(run, heads, other, f"rank {op.peer} has posted its end, but that")
    verb = "receive" if op.kind.is_send else "send"
    return op.peer, f"rank {op.peer} has not come to {verb} it"


def _behind(run: Run, heads: Sequence[int], end: int, what: str) -> tuple[_Node, str]:
    number = run.ends.lane_of[end]
    lane = run.ends.lanes[number]
    return lane, f"{what} stands in rank {lane[0]}'s channel {lane[1]} behind {run.ends.ops[heads[number]]}"


def _shortest_cycle(arcs: dict[_Node, tuple[_Node, ...]]) -> list[_Node]:
    """Breadth first from every node; a run that is stuck has a cycle, since whatever waits, waits for something stuck."""
    best: list[_Node] = []
    for start in arcs:
        before: dict[_Node, _Node] = {}
        queue = deque([start])
        while queue and start not in before:
            node = queue.popleft()
            for target in arcs.get(node, ()):
                if target not in before:
                    before[target] = node
                    queue.append(target)
        if start in before:
            cycle = [before[start]]
            while cycle[-1] != start:
                cycle.append(before[cycle[-1]])
            cycle.reverse()
            if not best or len(cycle) < len(best):
                best = cycle
    return best
