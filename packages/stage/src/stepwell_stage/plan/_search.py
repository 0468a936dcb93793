"""Which plan is fastest: where to cut the model, how many stages a rank, which schedule, how many microbatches.

For each schedule and number of microbatches the plan is lowered once, and simulated for cuts: for all of them where these are
few, so that the answer is exact; else starting from equal and from balanced cuts, moving one cut by one layer as long as that
helps. What cannot beat the best so far, because a rank has that much work, is not simulated.
"""

from __future__ import annotations

import itertools
import math
import numbers
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType

import attrs

from stepwell_p2p._placement import Placement

from ..exceptions import ScheduleError, StageUsageError
from ._auto import zero_bubble
from ._balance import balance
from ._costs import Costs
from ._count import whole
from ._lower import Plan, lower
from ._require import is_cost, require, several
from ._schedule import Schedule
from ._simulate import simulate
from .schedules._dualpipe_v import dualpipe_v
from .schedules._gpipe import gpipe
from .schedules._interleaved_1f1b import interleaved_1f1b
from .schedules._looped_bfs import looped_bfs
from .schedules._one_f_one_b import one_f_one_b
from .schedules._zbv import zbv
from .schedules._zero_bubble import interleaved_zero_bubble, zb_h1


@attrs.frozen
class Layer:
    """What one layer, which is never cut, costs.

    Attributes:
        forward: seconds for one sample.
        backward: seconds for one sample.
        activation_bytes: what one sample holds from forward to backward.
        output_bytes: what one sample hands to the next layer.
        parameter_bytes: parameters, gradients and optimizer state.
        overhead: seconds for every call, whatever the number of samples; of the forward, and again of the backward.

    Raises:
        StageUsageError: one of them is no number, or negative or not finite.
    """

    forward: float
    backward: float
    activation_bytes: int = 0
    output_bytes: int = 0
    parameter_bytes: int = 0
    overhead: float = 0.0

    def __attrs_post_init__(self) -> None:
        for name, value in attrs.asdict(self).items():
            if not isinstance(value, numbers.Real) or not 0 <= float(value) < math.inf:
                raise StageUsageError(f"{name} of a layer must be a number, finite and at least 0, got {value!r}")


@attrs.frozen
class PlanChoice:
    """One way to run the model.

    Attributes:
        schedule: who computes what, in which order.
        cuts: the first layer of each stage.
        costs: of its stages, for microbatches of its size; see ``num_microbatches`` of :func:`plan_search`.
        makespan: seconds for one step.
        bubble: share of all ranks' time in which they do not compute.
        peak_bytes: for each rank, activations and parameters at most.
    """

    schedule: Schedule
    cuts: tuple[int, ...]
    costs: Costs
    makespan: float
    bubble: float
    peak_bytes: tuple[int, ...]

    @property
    def plan(self) -> Plan:
        """The schedule lowered."""
        return lower(self.schedule)


@attrs.frozen
class PlanSearch:
    """What :func:`plan_search` found.

    Attributes:
        best: the fastest that fits.
        choices: the fastest of each schedule that fits, fastest first; ``best`` is the first.
    """

    best: PlanChoice
    choices: tuple[PlanChoice, ...]


def plan_search(
    layers: Sequence[Layer],
    num_ranks: int,
    *,
    batch_size: int,
    memory_limit: float | None = None,
    network: Costs | None = None,
    num_microbatches: Iterable[int] | None = None,
    stages_per_rank: Iterable[int] = (1, 2, 3, 4),
    schedules: Iterable[str] | None = None,
    most_simulations: int = 256,
) -> PlanSearch:
    """The fastest plan for a model, given what its layers cost.

    Never slower than the best of the named schedules with as many layers on each stage. Exact, for the cuts, where a schedule has
    no more than ``most_simulations`` of them; ``zero-bubble`` is made for the cuts that suit the others best.

    Example::

        found = plan_search([Layer(1e-3, 2e-3, activation_bytes=2**20)] * 12, 4, batch_size=32, memory_limit=2**28)
        found.best.schedule.name, found.best.cuts

    Args:
        layers: in the order of the data.
        num_ranks: number of ranks.
        batch_size: samples of one step.
        memory_limit: bytes of activations and parameters that a rank may hold; none by default.
        network: latency, bandwidth, edges, overlap, overlap_gain and per_action are taken from here; by default messages are free
            and overlapped pairs run one after the other.
        num_microbatches: which M to try; by default the divisors of ``batch_size`` up to 8 times ``num_ranks``, and 1, 2, 4 and 8
            times ``num_ranks``. Where M is no divisor, microbatches differ by one sample, as those of the executor do: they are
            priced by the mean of their times, and by the bytes of the largest.
        stages_per_rank: how many stages a rank may have, for schedules that leave the choice.
        schedules: names out of ``SEARCHED``; all by default.
        most_simulations: how many cuts to try for each schedule and M.

    Raises:
        StageUsageError: there are fewer layers than ranks, or an argument is out of range.
        ScheduleError: nothing fits into the memory; says what would be needed.
    """
    layers = several(layers, "plan_search() takes several layers")
    names = several(SEARCHED if schedules is None else schedules, "schedules are several names, for example ['1f1b']")
    num_ranks, batch_size = (
        whole(value, name, StageUsageError) for name, value in (("num_ranks", num_ranks), ("batch_size", batch_size))
    )
    _check(layers, num_ranks, batch_size, names)
    if whole(most_simulations, "most_simulations", StageUsageError) < 1:
        raise StageUsageError(f"most_simulations must be at least 1, for equal cuts, got {most_simulations}")
    if memory_limit is not None and not (is_cost(memory_limit) or memory_limit == math.inf):
        raise StageUsageError(f"memory_limit is a number of bytes, at least 0, got {memory_limit!r}")
    if network is not None:
        require(
            network,
            Costs,
            "network is given as Costs",
            "Costs.uniform(1, latency=1e-5) for example",
            error=StageUsageError,
        )
    counts = _to_try(
        _usual(batch_size, num_ranks) if num_microbatches is None else num_microbatches, "num_microbatches"
    )
    if max(counts) > batch_size:
        raise StageUsageError(f"a batch of {batch_size} makes 1 to {batch_size} microbatches, got {max(counts)}")
    depths = [depth for depth in _to_try(stages_per_rank, "stages_per_rank") if depth * num_ranks <= len(layers)]
    search = _Model(layers, memory_limit, network or Costs.uniform(1), batch_size, most_simulations)
    tried = [(name, depth) for name in names for depth in depths if depth in (SEARCHED[name].depths or depths)]
    if not tried:
        raise ScheduleError(
            f"{len(layers)} layers on {num_ranks} ranks are too few for {', '.join(names)}, with as many stages a rank as were"
            " asked for"
        )
    found: dict[str, PlanChoice] = {}
    for name, depth in tried:
        for count in reversed(counts):  # more are mostly faster: fewer are then ruled out
            below = found[name].makespan if name in found else math.inf
            choice = _Sizes(search, SEARCHED[name], num_ranks, count, depth).best(below)
            if choice is not None:
                found[name] = choice
    if not found:
        raise ScheduleError(search.explain())
    choices = tuple(sorted(found.values(), key=lambda choice: choice.makespan))
    return PlanSearch(choices[0], choices)


@attrs.frozen
class _Family:
    """Schedules of one name.

    Attributes:
        make: from ranks, microbatches and stages per rank to the schedule; None for the one that is made for given costs.
        depths: which numbers of stages per rank it can have; None for any.
        placed_in_v: which numbers of stages per rank are placed in a V.
    """

    make: Callable[[int, int, int], Schedule] | None
    depths: tuple[int, ...] | None = None
    placed_in_v: tuple[int, ...] = ()

    def placement(self, num_ranks: int, depth: int) -> Placement:
        """Where its stages are."""
        place = Placement.v if depth in self.placed_in_v else Placement.loop
        return place(num_ranks * depth, num_ranks)


SEARCHED: Mapping[str, _Family] = MappingProxyType(
    {
        "gpipe": _Family(lambda ranks, count, depth: gpipe(ranks, count), (1,)),
        "1f1b": _Family(lambda ranks, count, depth: one_f_one_b(ranks, count), (1,)),
        "interleaved-1f1b": _Family(lambda ranks, count, depth: interleaved_1f1b(ranks, count, stages_per_rank=depth)),
        "looped-bfs": _Family(lambda ranks, count, depth: looped_bfs(ranks, count, stages_per_rank=depth)),
        "zb-h1": _Family(lambda ranks, count, depth: zb_h1(ranks, count), (1,)),
        "interleaved-zero-bubble": _Family(
            lambda ranks, count, depth: interleaved_zero_bubble(ranks, count, stages_per_rank=depth)
        ),
        "zbv": _Family(lambda ranks, count, depth: zbv(ranks, count), (2,), (2,)),
        "dualpipe-v": _Family(lambda ranks, count, depth: dualpipe_v(ranks, count), (2,), (2,)),
        "zero-bubble": _Family(None, (1, 2), (2,)),
    }
)
"""The schedules that :func:`plan_search` tries, by name."""


def _check(layers: Sequence[Layer], num_ranks: int, batch_size: int, names: Sequence[str]) -> None:
    for layer in layers:
        require(layer, Layer, "plan_search() takes layers", error=StageUsageError)
    if not names:
        raise StageUsageError("no schedule was named to try")
    if num_ranks < 1 or batch_size < 1:
        raise StageUsageError(f"ranks and samples must be at least 1, got {num_ranks} and {batch_size}")
    if len(layers) < num_ranks:
        raise StageUsageError(f"{num_ranks} ranks need at least {num_ranks} layers, got {len(layers)}")
    for name in names:
        if name not in SEARCHED:
            raise StageUsageError(f"no schedule is named {name!r}; there are {', '.join(SEARCHED)}")


def _to_try(values: Iterable[int], name: str) -> list[int]:
    """Numbers that are to be tried, ascending."""
    found = sorted(
        {whole(value, name, StageUsageError) for value in several(values, f"{name} are several numbers to try")}
    )
    if not found:
        raise StageUsageError(f"{name} are the numbers to try, but there is none")
    if found[0] < 1:
        raise StageUsageError(f"{name} must be at least 1, got {found[0]}")
    return found


def _usual(batch_size: int, num_ranks: int) -> Iterator[int]:
    """Numbers of microbatches worth a try: those that leave no rest, and, as some batches have few, multiples of the ranks."""
    most = min(batch_size, 8 * num_ranks)
    multiples = {num_ranks, 2 * num_ranks, 4 * num_ranks, 8 * num_ranks}
    return (count for count in range(1, most + 1) if batch_size % count == 0 or count in multiples)


class _Model:
    """What is searched for. Keeps what the leanest of the plans that did not fit would have needed."""

    def __init__(
        self, layers: tuple[Layer, ...], limit: float | None, network: Costs, batch_size: int, most: int
    ) -> None:
        self.layers = layers
        self.limit = math.inf if limit is None else limit
        self.network = network
        self.batch_size = batch_size
        self.most = most
        self.leanest: tuple[int, str] | None = None
        self.balanced: dict[int, tuple[int, ...]] = {}  # by number of stages: as even as can be

    def parts(self, cuts: tuple[int, ...]) -> list[tuple[Layer, ...]]:
        """The layers of each stage."""
        return [self.layers[a:b] for a, b in itertools.pairwise((*cuts, len(self.layers)))]

    def costs(self, cuts: tuple[int, ...], count: int) -> Costs:
        """Of the stages, for this many microbatches: times are for the mean of their samples, bytes for the most."""
        parts = self.parts(cuts)
        samples, most = self.batch_size / count, -(-self.batch_size // count)
        return attrs.evolve(
            self.network,
            forward=[sum(layer.overhead + samples * layer.forward for layer in part) for part in parts],
            backward=[sum(layer.overhead + samples * layer.backward for layer in part) for part in parts],
            backward_input=None,
            backward_weight=None,
            activation_bytes=[most * sum(layer.activation_bytes for layer in part) for part in parts],
            kept_bytes=None,
            output_bytes=[most * part[-1].output_bytes for part in parts],
            unshard=(),
            reduce_grad=(),
        )

    def starts(self, size: int) -> list[tuple[int, ...]]:
        """Equal cuts, and balanced ones."""
        equal = tuple(stage * len(self.layers) // size for stage in range(size))
        if size not in self.balanced:
            self.balanced[size] = balance([layer.forward + layer.backward for layer in self.layers], size)
        return list(dict.fromkeys((equal, self.balanced[size])))

    def explain(self) -> str:
        """Why nothing was found."""
        if self.leanest is None:
            return f"nothing fits into {self.limit} bytes a rank: the parameters alone, or one microbatch, take more"
        need, how = self.leanest
        return (
            f"nothing fits into {self.limit} bytes a rank; the leanest plan, {how}, needs {need}: use more ranks, smaller"
            " microbatches (more of them), or recompute activations"
        )


@attrs.frozen
class _Sizes:
    """One schedule with one number of microbatches and of stages per rank, to be cut."""

    model: _Model
    family: _Family
    num_ranks: int
    count: int
    depth: int

    def best(self, below: float) -> PlanChoice | None:
        """The fastest cuts, if faster than ``below``."""
        size, model = self.num_ranks * self.depth, self.model
        starts = model.starts(size)
        if self.family.make is None:
            return self._first_to_last(starts, None, below)
        plan = lower(self.family.make(self.num_ranks, self.count, self.depth))
        if math.comb(len(model.layers) - 1, size - 1) > model.most:
            return self._climb(starts, plan, below)
        every = itertools.combinations(range(1, len(model.layers)), size - 1)
        return self._first_to_last(itertools.chain(starts, ((0, *rest) for rest in every)), plan, below)

    def _first_to_last(self, many: Iterable[tuple[int, ...]], plan: Plan | None, below: float) -> PlanChoice | None:
        best: PlanChoice | None = None
        for cuts in many:
            choice = self._choice(cuts, plan, below)
            if choice is not None:
                best, below = choice, choice.makespan
        return best

    def _climb(self, starts: list[tuple[int, ...]], plan: Plan, below: float) -> PlanChoice | None:
        """From each start on, move one cut by one layer as long as that helps."""
        best: PlanChoice | None = None
        tried: set[tuple[int, ...]] = set()
        for start in starts:
            # A start may be slow and yet lead to something faster than the best so far.
            frontier, here = [start], math.inf
            while frontier and len(tried) < self.model.most:
                better: PlanChoice | None = None
                for cuts in frontier:
                    choice = None if cuts in tried else self._choice(cuts, plan, here)
                    tried.add(cuts)
                    if choice is not None:
                        better, here = choice, choice.makespan
                frontier = [] if better is None else list(_neighbours(better.cuts, len(self.model.layers)))
                if better is not None and better.makespan < below:
                    best, below = better, better.makespan
        return best

    def _choice(self, cuts: tuple[int, ...], plan: Plan | None, below: float) -> PlanChoice | None:
        """These cuts, if they fit and take less than ``below`` seconds."""
        costs = self.model.costs(cuts, self.count)
        placement = self.family.placement(self.num_ranks, self.depth)
        if self._least(costs, placement) >= below:
            return None
        held = [0] * self.num_ranks
        for rank, part in zip(placement.ranks, self.model.parts(cuts), strict=True):
            held[rank] += sum(layer.parameter_bytes for layer in part)
        if plan is None:
            room = None if self.model.limit == math.inf else [int(self.model.limit) - parameters for parameters in held]
            try:
                plan = lower(zero_bubble(placement, self.count, costs, memory_limit=room))
            except ScheduleError:  # not even one microbatch fits
                return None
        simulation = simulate(plan, costs)
        peaks = tuple(peak + parameters for peak, parameters in zip(simulation.peak_bytes, held, strict=True))
        if max(peaks) > self.model.limit:
            need = (
                max(peaks),
                f"{plan.schedule.name} with M = {self.count} and {self.depth} stage{'s' * (self.depth > 1)} a rank",
            )
            self.model.leanest = min(self.model.leanest or need, need)
            return None
        if simulation.makespan >= below:
            return None
        return PlanChoice(plan.schedule, cuts, costs, simulation.makespan, simulation.bubble, peaks)

    def _least(self, costs: Costs, placement: Placement) -> float:
        """What no schedule can go below: a rank's first input has to get there, and then there is all its work."""
        least = reached = 0.0
        forwards, backwards, lean = ([0.0] * self.num_ranks for _ in range(3))
        for stage, rank in enumerate(placement.ranks):
            forwards[rank] += self.count * costs.forward[stage]
            backwards[rank] += self.count * costs.backward[stage]
            split = costs.input_costs[stage] + costs.weight_costs[stage]
            lean[rank] += self.count * min(costs.backward[stage], split)
        for stage, rank in enumerate(placement.ranks):
            if stage == placement.ranks.index(rank):
                gain = (costs.overlap_gain or 0.0) * min(forwards[rank], backwards[rank])  # pairs may be of any stages
                least = max(least, reached + max(forwards[rank] + lean[rank] - gain, 0.0))
            reached += costs.forward[stage]
        return least


def _neighbours(cuts: tuple[int, ...], num_layers: int) -> Iterator[tuple[int, ...]]:
    for number in range(1, len(cuts)):
        end = cuts[number + 1] if number + 1 < len(cuts) else num_layers
        for moved in (cuts[number] - 1, cuts[number] + 1):
            if cuts[number - 1] < moved < end:
                yield (*cuts[:number], moved, *cuts[number + 1 :])
