"""What a stage's actions and messages cost."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable
from typing import Any

import attrs

from ..exceptions import StageUsageError
from ._action import Kind
from ._count import whole
from ._require import is_cost, require, several
from ._timeline import Event, Timeline


@attrs.frozen
class EdgeCost:
    """What one ordered pair of ranks costs, where it differs from the rest.

    Attributes:
        source: sending rank.
        destination: receiving rank.
        latency: seconds from the start of a message to its arrival, its bytes apart.
        bandwidth: bytes a second.
    """

    source: int
    destination: int
    latency: float
    bandwidth: float


@attrs.frozen
class CustomCost:
    """What an action of the user's own takes.

    Attributes:
        name: of the action, see :meth:`Action.custom`.
        seconds: of the rank's own time.
        stage: on which stage; None for every stage.
    """

    name: str
    seconds: float
    stage: int | None = None


def _numbers(values: Iterable[float]) -> tuple[float, ...]:
    # What has no __float__ is refused below, where its name is known.
    return tuple(float(value) if hasattr(value, "__float__") else value for value in _sizes(values))


def _sizes(values: Iterable[Any]) -> tuple[Any, ...]:
    return several(values, "costs of stages are several numbers, one for each stage")


def _edges(values: Iterable[EdgeCost]) -> tuple[EdgeCost, ...]:
    found = several(values, "edges are several EdgeCosts")
    for edge in found:
        require(edge, EdgeCost, "edges are EdgeCosts", error=StageUsageError)
    return found


def _customs(values: Iterable[CustomCost]) -> tuple[CustomCost, ...]:
    found = several(values, "costs of custom actions are several CustomCosts")
    for cost in found:
        require(cost, CustomCost, "costs of custom actions are CustomCosts", error=StageUsageError)
    return found


def _gain(events: Iterable[Event], medians: Callable[[Kind], list[float]]) -> float | None:
    """What overlapped pairs saved; None if there was none, and 0 if their parts were never seen alone."""
    pairs = [event for event in events if event.action.parts]
    alone = {kind: medians(kind) for kind in {leaf.kind for pair in pairs for leaf in pair.action.parts}}
    gains = []
    for pair in pairs:
        each = [alone[leaf.kind][leaf.stage] for leaf in pair.action.parts]
        if min(each) > 0:
            gains.append(min(max((sum(each) - pair.seconds) / min(each), 0.0), 1.0))
    return statistics.median(gains or [0.0]) if pairs else None


@attrs.frozen
class Costs:
    """What everything takes. Sequences hold one number per stage; times are seconds.

    Example::

        Costs.uniform(4)                                             # F takes 1, B takes 2, messages take nothing
        Costs.uniform(4, output_bytes=8_388_608, bandwidth=12e9)     # 8 MiB over 12 GB/s

    Attributes:
        forward: of an F.
        backward: of a B.
        backward_input: of an I; half of ``backward`` where not given.
        backward_weight: of a W; the rest of ``backward`` where not given.
        overlap_gain: what an overlapped F and B save where a handler runs them as one, as a share of the shorter of the two, 0
            to 1; None where no handler does, and they run one after the other, see :meth:`Plan.with_pairs_apart`.
        activation_bytes: what one microbatch holds from its F to its B (or W); nothing in a plan that runs forward only.
        kept_bytes: how much of that stays from I to W; all of it where not given.
        output_bytes: size of the message that carries the stage's value, and of that which carries its gradient back.
        latency: seconds from the start of a message to its arrival, its bytes apart.
        bandwidth: bytes a second of each edge.
        edges: edges that differ.
        overlap: whether messages travel beside compute; otherwise both ends stop for each.
        eager: whether a message may leave before its receive is posted.
        per_action: seconds that the executor itself takes before every action.
        unshard: of gathering a stage's parameters.
        reduce_grad: of reducing a stage's gradients.
        custom: of actions of the user's own; the first that fits counts, and one that is not there takes nothing.

    Raises:
        StageUsageError: something is no cost, or not one number is there for each stage; says what.
    """

    forward: tuple[float, ...] = attrs.field(converter=_numbers)
    backward: tuple[float, ...] = attrs.field(converter=_numbers)
    backward_input: tuple[float, ...] | None = attrs.field(default=None, converter=attrs.converters.optional(_numbers))
    backward_weight: tuple[float, ...] | None = attrs.field(default=None, converter=attrs.converters.optional(_numbers))
    overlap_gain: float | None = None
    activation_bytes: tuple[int, ...] = attrs.field(default=(), converter=_sizes)
    kept_bytes: tuple[int, ...] | None = attrs.field(default=None, converter=attrs.converters.optional(_sizes))
    output_bytes: tuple[int, ...] = attrs.field(default=(), converter=_sizes)
    latency: float = 0.0
    bandwidth: float = math.inf
    edges: tuple[EdgeCost, ...] = attrs.field(default=(), converter=_edges)
    overlap: bool = True
    eager: bool = False
    per_action: float = 0.0
    unshard: tuple[float, ...] = attrs.field(default=(), converter=_numbers)
    reduce_grad: tuple[float, ...] = attrs.field(default=(), converter=_numbers)
    custom: tuple[CustomCost, ...] = attrs.field(default=(), converter=_customs)

    def __attrs_post_init__(self) -> None:
        for name in ("activation_bytes", "output_bytes", "unshard", "reduce_grad"):
            if not getattr(self, name):
                object.__setattr__(self, name, (0,) * len(self.forward))
        if not self.forward:
            raise StageUsageError("costs need at least one stage")
        for field in attrs.fields(Costs):
            value = getattr(self, field.name)
            if field.name in ("bandwidth", "edges", "overlap", "eager", "custom"):
                continue
            if value is None and field.default is None:
                continue
            if isinstance(value, tuple) and len(value) != len(self.forward):
                raise StageUsageError(f"{field.name} has {len(value)} numbers but forward has {len(self.forward)}")
            if not all(map(is_cost, value if isinstance(value, tuple) else (value,))):
                raise StageUsageError(f"{field.name} must be finite and at least 0, got {value!r}")
        for bandwidth, latency in ((self.bandwidth, 0), *((edge.bandwidth, edge.latency) for edge in self.edges)):
            if not (bandwidth == math.inf or (is_cost(bandwidth) and bandwidth > 0)):
                raise StageUsageError(f"a bandwidth must be above 0 bytes a second, got {bandwidth!r}")
            if not is_cost(latency):
                raise StageUsageError(f"the latency of an edge must be finite and at least 0, got {latency!r}")
        if self.overlap_gain is not None and self.overlap_gain > 1:
            raise StageUsageError(f"overlap_gain is a share from 0 to 1, got {self.overlap_gain}")
        if any(kept > held for kept, held in zip(self.bytes_for_weights, self.activation_bytes, strict=True)):
            raise StageUsageError(
                f"kept_bytes are the part of activation_bytes that stays from I to W, got {self.kept_bytes} of"
                f" {self.activation_bytes}"
            )
        wrong = next((cost for cost in self.custom if not is_cost(cost.seconds)), None)
        if wrong is not None:
            raise StageUsageError(f"seconds must be finite and at least 0, got {wrong}")

    @classmethod
    def uniform(
        cls,
        num_stages: int,
        *,
        forward: float = 1.0,
        backward: float = 2.0,
        activation_bytes: int = 0,
        output_bytes: int = 0,
        latency: float = 0.0,
        bandwidth: float = math.inf,
    ) -> Costs:
        """The same for every stage; I and W take half a B each. Use ``attrs.evolve`` for the rest."""
        num_stages = whole(num_stages, "num_stages", StageUsageError)
        return cls(
            (forward,) * num_stages,
            (backward,) * num_stages,
            activation_bytes=(activation_bytes,) * num_stages,
            output_bytes=(output_bytes,) * num_stages,
            latency=latency,
            bandwidth=bandwidth,
        )

    @classmethod
    def measured(cls, timeline: Timeline, num_stages: int) -> Costs:
        """What a traced step took: for each stage the median of its F, of its B or I and W, and of each action of your own.

        Messages take nothing. Where pairs ran as one, what they saved is the median too.

        Use ``attrs.evolve`` for latency, bandwidth and bytes.

        Args:
            timeline: of all ranks, see :meth:`Timeline.merge`.
            num_stages: how many stages the pipeline has.

        Raises:
            StageUsageError: of some stage nothing was measured.
        """
        require(timeline, Timeline, "Costs.measured() takes a timeline", error=StageUsageError)
        num_stages = whole(num_stages, "num_stages", StageUsageError)
        times: dict[tuple[int, Kind], list[float]] = {}
        own: dict[tuple[str, int], list[float]] = {}
        for event in timeline.events:
            action = event.action
            times.setdefault((action.stage, action.kind), []).append(event.seconds)
            if action.name:
                own.setdefault((action.name, action.stage), []).append(event.seconds)

        def medians(kind: Kind) -> list[float]:
            return [statistics.median(times.get((stage, kind), [0.0])) for stage in range(num_stages)]

        unseen = next((stage for stage in range(num_stages) if (stage, Kind.F) not in times), None)
        if unseen is not None:
            raise StageUsageError(f"no F of stage {unseen} was measured; merge the timelines of all ranks")
        full, inputs, weights = medians(Kind.B), medians(Kind.I), medians(Kind.W)
        is_split = [any(pair) for pair in zip(inputs, weights, strict=True)]
        halves = list(zip(full, inputs, weights, is_split, strict=True))
        return cls(
            medians(Kind.F),
            [first + second if split and not b else b for b, first, second, split in halves],
            [first if split else b / 2 for b, first, second, split in halves],
            [second if split else b / 2 for b, first, second, split in halves],
            overlap_gain=_gain(timeline.events, medians),
            custom=[CustomCost(name, statistics.median(seconds), stage) for (name, stage), seconds in own.items()],
        )

    @property
    def num_stages(self) -> int:
        """How many stages the numbers are for."""
        return len(self.forward)

    @property
    def input_costs(self) -> tuple[float, ...]:
        """Of each stage's I."""
        if self.backward_input is not None:
            return self.backward_input
        return tuple(backward / 2 for backward in self.backward)

    @property
    def weight_costs(self) -> tuple[float, ...]:
        """Of each stage's W."""
        if self.backward_weight is not None:
            return self.backward_weight
        return tuple(max(0.0, whole - part) for whole, part in zip(self.backward, self.input_costs, strict=True))

    @property
    def bytes_for_weights(self) -> tuple[int, ...]:
        """Of each stage, what I leaves for W."""
        return self.activation_bytes if self.kept_bytes is None else self.kept_bytes

    def custom_cost(self, name: str, stage: int) -> float:
        """Of an action of the user's own on a stage."""
        for cost in self.custom:
            if cost.name == name and cost.stage in (None, stage):
                return cost.seconds
        return 0.0

    def link(self, source: int, destination: int) -> tuple[float, float]:
        """Latency and bandwidth from one rank to another."""
        for edge in self.edges:
            if (edge.source, edge.destination) == (source, destination):
                return edge.latency, edge.bandwidth
        return self.latency, self.bandwidth
