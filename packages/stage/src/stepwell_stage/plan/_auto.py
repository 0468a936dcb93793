"""Zero-bubble schedules made for given costs and a given limit of memory.

Ranks are filled in the order of time, each with the best of what is ready when it is free: gradients for inputs come first,
because other ranks wait for them, then forwards while memory allows, and weight steps fill what would be a gap, or make
room. The more memory there is, the earlier forwards run ahead, and the smaller is the bubble.

Source: the heuristic of Qi et al., "Zero Bubble Pipeline Parallelism", 2023, section 3.1, on any placement.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence

import attrs

from stepwell_p2p._placement import Placement

from ..exceptions import ScheduleError
from ._action import Action, Kind
from ._costs import Costs
from ._count import whole_numbers
from ._lower import lower
from ._require import is_cost, require, several
from ._schedule import Schedule
from ._simulate import simulate
from .schedules._zbv import zbv
from .schedules._zero_bubble import interleaved_zero_bubble, zb_h1


@whole_numbers
def zero_bubble(
    placement: Placement, num_microbatches: int, costs: Costs, *, memory_limit: float | Sequence[float] | None = None
) -> Schedule:
    """A zero-bubble schedule for these costs that no rank needs more memory for than it may.

    Several fillings are tried, and the zero-bubble schedules of the literature where they fit; the fastest is taken.

    Example::

        costs = Costs.uniform(4, activation_bytes=1)
        zero_bubble(Placement.loop(4, 4), 8, costs, memory_limit=8)    # no gaps within a rank; with 4 as ZB-H1

    Args:
        placement: the rank of each stage; any.
        num_microbatches: M, at least 1.
        costs: what F, I and W take on each stage, what messages take, and what activations hold.
        memory_limit: bytes of activations that a rank may hold at once, one number for all or one per rank; none by default.

    Raises:
        ScheduleError: a rank cannot hold even one microbatch; or costs or limits are for another number of stages or ranks.
    """
    require(placement, Placement, "zero_bubble() takes a placement", "Placement.loop(stages, ranks) is the usual one")
    require(costs, Costs, "zero_bubble() takes Costs", "Costs.uniform(num_stages) are the simplest")
    if costs.num_stages != placement.num_stages:
        raise ScheduleError(f"{placement.num_stages} stages are placed but costs are given for {costs.num_stages}")
    if num_microbatches < 1:
        raise ScheduleError(f"zero-bubble needs at least 1 microbatch, got {num_microbatches}")
    limits = _limits(placement, costs, memory_limit)
    fillings = (
        _Filling(placement, num_microbatches, costs, limits, patience, inputs_first=inputs_first).rows()
        for inputs_first, patience in itertools.product((True, False), (0.0, 0.5, 1.0))
    )
    best: tuple[float, Schedule] | None = None
    for rows in (*fillings, *_known(placement, num_microbatches)):
        schedule = Schedule("zero-bubble", placement, num_microbatches, rows)
        simulation = simulate(lower(schedule), costs)
        fits = all(peak <= limit for peak, limit in zip(simulation.peak_bytes, limits, strict=True))
        if fits and (best is None or simulation.makespan < best[0]):
            best = simulation.makespan, schedule
    assert best is not None  # every filling fits
    return best[1]


def _known(placement: Placement, num_microbatches: int) -> Iterator[tuple[tuple[Action, ...], ...]]:
    """Zero-bubble schedules of the literature for this placement."""
    size, num_ranks = placement.num_stages, placement.num_ranks
    if placement == Placement.loop(size, num_ranks) and size % num_ranks == 0:
        per_rank = size // num_ranks
        yield interleaved_zero_bubble(num_ranks, num_microbatches, stages_per_rank=per_rank).actions
        if per_rank == 1:
            yield zb_h1(num_ranks, num_microbatches).actions
    if size == 2 * num_ranks and placement == Placement.v(size, num_ranks):
        yield zbv(num_ranks, num_microbatches).actions


def _limits(placement: Placement, costs: Costs, memory_limit: float | Sequence[float] | None) -> list[float]:
    if memory_limit is None:
        return [float("inf")] * placement.num_ranks
    if isinstance(memory_limit, Iterable):
        limits = several(memory_limit, _LIMITS, error=ScheduleError)
    else:
        limits = (memory_limit,) * placement.num_ranks
    if len(limits) != placement.num_ranks:
        raise ScheduleError(f"there are {placement.num_ranks} ranks but memory limits for {len(limits)}")
    for rank, limit in enumerate(limits):
        if not (is_cost(limit) or limit == math.inf):
            raise ScheduleError(f"{_LIMITS}, got {limit!r}")
        need = sum(costs.activation_bytes[stage] for stage in placement.stages_of(rank))
        if need > limit:
            raise ScheduleError(
                f"rank {rank} may hold {limit} bytes of activations but one microbatch takes {need}; raise the limit, use"
                " smaller microbatches, or give it fewer layers"
            )
    return [float(limit) for limit in limits]


_LIMITS = "memory_limit is a number of bytes, at least 0, or one for each rank"


@attrs.define
class _Rank:
    """One rank while it is filled; mutable: time goes on."""

    stages: tuple[int, ...]  # latest first
    limit: float
    row: list[Action] = attrs.Factory(list)
    free_at: float = 0.0
    committed: float = 0.0  # bytes held, and those that the microbatches under way will yet take on later local stages
    forwards: dict[int, deque[tuple[float, int]]] = attrs.Factory(dict)  # by stage: when an input is there, microbatch
    inputs: list[tuple[float, int, int]] = attrs.Factory(list)  # when a gradient is there, minus the stage, microbatch
    weights: deque[tuple[int, int]] = attrs.Factory(deque)


class _Filling:
    """One filling of all ranks."""

    def __init__(
        self,
        placement: Placement,
        num_microbatches: int,
        costs: Costs,
        limits: Sequence[float],
        patience: float,
        *,
        inputs_first: bool,
    ) -> None:
        self.placement = placement
        self.costs = costs
        self.patience = patience
        self.inputs_first = inputs_first
        self.ranks = [_Rank(placement.stages_of(rank)[::-1], limits[rank]) for rank in range(placement.num_ranks)]
        for rank in self.ranks:
            rank.forwards = {stage: deque() for stage in rank.stages}
        self.ranks[placement.ranks[0]].forwards[0].extend((0.0, microbatch) for microbatch in range(num_microbatches))
        self.left = 3 * placement.num_stages * num_microbatches
        self.wakes: list[tuple[float, int]] = [(0.0, rank) for rank in range(placement.num_ranks)]

    def rows(self) -> list[list[Action]]:
        """Fill until everything is placed."""
        while self.left:
            now, number = heapq.heappop(self.wakes)
            rank = self.ranks[number]
            if rank.free_at > now:
                continue
            action = self._choose(rank, now)
            if action is not None:
                self._place(rank, number, action, now)
        return [rank.row for rank in self.ranks]

    def _choose(self, rank: _Rank, now: float) -> Action | None:
        gradient = rank.inputs[0] if rank.inputs and rank.inputs[0][0] <= now else None
        backward = None if gradient is None else Action(-gradient[1], Kind.I, gradient[2])
        forward, blocked = self._forward(rank, now)
        chosen = (backward or forward) if self.inputs_first or len(rank.row) % 2 else (forward or backward)
        if chosen is not None or not rank.weights:
            return chosen
        stage, microbatch = rank.weights[0]
        # Something known to come soon is worth waiting for, rather than keeping it waiting for all of a weight step.
        soon = [rank.inputs[0][0]] if rank.inputs else []
        soon += [queue[0][0] for queue in rank.forwards.values() if queue] if not blocked else []
        if soon and now < min(soon) < now + self.patience * self.costs.weight_costs[stage]:
            return None  # its arrival wakes the rank
        return Action(stage, Kind.W, microbatch)

    def _forward(self, rank: _Rank, now: float) -> tuple[Action | None, bool]:
        """The forward of the latest stage that is ready and that memory allows; and whether memory alone stands in the way."""
        blocked = False
        for stage in rank.stages:
            queue = rank.forwards[stage]
            if queue and queue[0][0] <= now:
                if stage != rank.stages[-1] or rank.committed + self._taken(rank) <= rank.limit:
                    return Action(stage, Kind.F, queue[0][1]), False
                blocked = True
        return None, blocked

    def _taken(self, rank: _Rank) -> float:
        """What a microbatch takes on all of a rank's stages. It is set aside at the first of them, so that none gets stuck."""
        return sum(self.costs.activation_bytes[stage] for stage in rank.stages)

    def _place(self, rank: _Rank, number: int, action: Action, now: float) -> None:
        stage, kind, microbatch = action.stage, action.kind, action.microbatch or 0
        held, kept = self.costs.activation_bytes[stage], self.costs.bytes_for_weights[stage]
        rank.row.append(action)
        self.left -= 1
        if kind is Kind.F:
            rank.forwards[stage].popleft()
            rank.committed += self._taken(rank) if stage == rank.stages[-1] else 0
            end = now + self.costs.forward[stage]
            if stage + 1 < self.placement.num_stages:
                self._arrives(end, stage, stage + 1, microbatch, Kind.F)
            else:
                self._arrives(end, stage, stage, microbatch, Kind.I)
        elif kind is Kind.I:
            heapq.heappop(rank.inputs)
            rank.committed -= held - kept
            rank.weights.append((stage, microbatch))
            end = now + self.costs.input_costs[stage]
            if stage:
                self._arrives(end, stage, stage - 1, microbatch, Kind.I)
        else:
            rank.weights.popleft()
            rank.committed -= kept
            end = now + self.costs.weight_costs[stage]
        rank.free_at = end
        heapq.heappush(self.wakes, (end, number))

    def _arrives(self, end: float, source: int, stage: int, microbatch: int, kind: Kind) -> None:
        here, there = self.placement.ranks[source], self.placement.ranks[stage]
        if here != there:
            latency, bandwidth = self.costs.link(here, there)
            end += latency + self.costs.output_bytes[min(source, stage)] / bandwidth
        if kind is Kind.F:
            self.ranks[there].forwards[stage].append((end, microbatch))
        else:
            heapq.heappush(self.ranks[there].inputs, (end, -stage, microbatch))
        heapq.heappush(self.wakes, (end, there))
