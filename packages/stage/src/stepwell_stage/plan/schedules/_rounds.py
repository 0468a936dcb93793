"""The order in which looped schedules take their microbatches: in rounds, each through all stages of a rank."""

from __future__ import annotations

from .._action import Action, Kind


def round_sizes(num_ranks: int, num_microbatches: int) -> list[int]:
    """Microbatches per round: as many rounds as have at least ``num_ranks`` each, as equal as can be, larger ones first.

    A round of at least as many microbatches as ranks comes back to the first rank without a gap. The first round is the
    largest, so that the warm-up, which is sized by it, suits every later one.
    """
    rounds = max(1, num_microbatches // num_ranks)
    size, larger = divmod(num_microbatches, rounds)
    return [size + (number < larger) for number in range(rounds)]


def in_rounds(stages: tuple[int, ...], sizes: list[int], kind: Kind) -> list[Action]:
    """Every microbatch through the stages in the order given, round by round."""
    out, start = [], 0
    for size in sizes:
        out += [Action(stage, kind, microbatch) for stage in stages for microbatch in range(start, start + size)]
        start += size
    return out


def warm_up(rank: int, num_ranks: int, stages_per_rank: int, sizes: list[int], per_hop: int) -> int:
    """How many forwards come before the first backward: until the last local stage, and ``per_hop`` for each rank behind."""
    return min((stages_per_rank - 1) * sizes[0] + per_hop * (num_ranks - 1 - rank), stages_per_rank * sum(sizes))
