"""Which rank holds which stage, and which values cross between them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import attrs

from ._require import several, whole
from .exceptions import P2PUsageError


def _to_ints(values: Iterable[int]) -> tuple[int, ...]:
    found = several(values, "a placement is of several ranks, that of each stage")
    return tuple(whole(rank, "the rank of a stage") for rank in found)


@attrs.frozen
class Placement:
    """The map stage → rank of one pipeline.

    Example::

        Placement.loop(8, 4).ranks   # (0, 1, 2, 3, 0, 1, 2, 3)
        Placement.v(8, 4).ranks      # (0, 1, 2, 3, 3, 2, 1, 0)

    Attributes:
        ranks: the rank of each stage, by stage index. Every rank from 0 to the highest holds at least one stage.
    """

    ranks: tuple[int, ...] = attrs.field(converter=_to_ints)

    def __attrs_post_init__(self) -> None:
        if not self.ranks:
            raise P2PUsageError("a placement needs at least one stage, got none")
        missing = set(range(max(self.ranks) + 1)) - set(self.ranks)
        if min(self.ranks) < 0 or missing:
            raise P2PUsageError(
                f"placement {self.ranks} must use every rank from 0 to its highest;"
                f" {'rank ' + str(min(missing)) + ' has no stage' if missing else 'a rank is negative'}"
            )

    @classmethod
    def loop(cls, num_stages: int, num_ranks: int) -> Placement:
        """Stage ``i`` on rank ``i % num_ranks``: 0, 1, 2, 3, 0, 1, 2, 3.

        Args:
            num_stages: number of stages, at least ``num_ranks``.
            num_ranks: number of ranks.
        """
        num_stages, num_ranks = _counts(num_stages, num_ranks)
        return cls(tuple(stage % num_ranks for stage in range(num_stages)))

    @classmethod
    def v(cls, num_stages: int, num_ranks: int) -> Placement:
        """Down and back up again: 0, 1, 2, 3, 3, 2, 1, 0, and so on for more than two stages a rank.

        Args:
            num_stages: number of stages, a multiple of ``num_ranks``.
            num_ranks: number of ranks.
        """
        num_stages, num_ranks = _counts(num_stages, num_ranks)
        if num_stages % num_ranks:
            raise P2PUsageError(
                f"a V placement needs a multiple of {num_ranks} (the number of ranks) stages, got {num_stages}"
            )
        down = tuple(range(num_ranks))
        legs = (down if leg % 2 == 0 else down[::-1] for leg in range(num_stages // num_ranks))
        return cls(tuple(rank for leg in legs for rank in leg))

    @classmethod
    def custom(cls, ranks: Iterable[int]) -> Placement:
        """Any map, given as the rank of each stage in stage order."""
        return cls(ranks)

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.ranks)

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return max(self.ranks) + 1

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages of one rank, ascending."""
        return tuple(stage for stage, owner in enumerate(self.ranks) if owner == rank)


@attrs.frozen(order=True)
class Wire:
    """One value that one stage's output hands to a later stage's input.

    Attributes:
        source: the stage that makes the value.
        output: which of its outputs.
        destination: the stage that takes it, later than ``source``.
        input: which of that stage's inputs.
    """

    source: int
    output: int
    destination: int
    input: int

    def __attrs_post_init__(self) -> None:
        for name in ("source", "output", "destination", "input"):
            whole(getattr(self, name), f"the {name} of a wire")
        if self.source < 0 or self.output < 0 or self.input < 0:
            raise P2PUsageError(f"stage, output and input numbers of a wire start at 0, got {self}")
        if self.destination <= self.source:
            raise P2PUsageError(
                f"a wire leads to a later stage, but this one leads from stage {self.source} to {self.destination}"
            )


@attrs.frozen(order=True)
class Edge:
    """An ordered pair of ranks that some wire crosses: values from ``source`` to ``destination``.

    Gradients travel on the opposite edge, :attr:`reverse`.
    """

    source: int
    destination: int

    @property
    def reverse(self) -> Edge:
        """The edge that leads back."""
        return Edge(self.destination, self.source)


def chain_wires(num_stages: int, num_values: int | Sequence[int] = 1) -> tuple[Wire, ...]:
    """The default wiring: output *i* of stage *k* → input *i* of stage *k + 1*.

    Args:
        num_stages: number of stages.
        num_values: how many values cross each boundary, one number for all or one per boundary.
    """
    num_stages = whole(num_stages, "num_stages")
    if isinstance(num_values, Iterable):
        counts = [whole(count, "a number of values") for count in num_values]
    else:
        counts = [whole(num_values, "num_values")] * (num_stages - 1)
    if len(counts) != num_stages - 1:
        raise P2PUsageError(f"{num_stages} stages have {num_stages - 1} boundaries, got {len(counts)} counts")
    return tuple(Wire(stage, value, stage + 1, value) for stage, count in enumerate(counts) for value in range(count))


def _counts(num_stages: int, num_ranks: int) -> tuple[int, int]:
    num_stages, num_ranks = whole(num_stages, "num_stages"), whole(num_ranks, "num_ranks")
    if num_ranks < 1:
        raise P2PUsageError(f"a pipeline needs at least 1 rank, got {num_ranks}")
    if num_stages < num_ranks:
        raise P2PUsageError(
            f"{num_ranks} ranks need at least {num_ranks} stages, got {num_stages}; use fewer ranks or cut the model finer"
        )
    return num_stages, num_ranks
