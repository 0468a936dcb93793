"""UNSHARD, RESHARD and REDUCE_GRAD put among a rank's actions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ..exceptions import ScheduleError
from ._action import Action, Kind


def with_data_parallel(
    rows: Iterable[list[Action]], sharded: set[int], reduced: set[int], max_unsharded: int
) -> Iterator[list[Action]]:
    """Each rank's actions with those of data-parallel stages put in.

    Before each compute action the sharded stages that compute next, as many as may be, are gathered; to make room, those that are
    not among them are freed. A stage is freed after its last action, and its gradients are reduced after its last backward.

    Raises:
        ScheduleError: an action needs more stages gathered at once than ``max_unsharded``.
    """
    for row in rows:
        yield list(_with_gathers(_with_reductions(row, reduced), sharded, max_unsharded))


def _with_reductions(row: list[Action], reduced: set[int]) -> list[Action]:
    last: dict[int, int] = {}
    for position, action in enumerate(row):
        for leaf in action.leaves:
            if leaf.kind in (Kind.B, Kind.W) and leaf.stage in reduced:
                last[leaf.stage] = position
    after: dict[int, list[int]] = {}
    for stage, position in last.items():
        # Behind the SENDs that follow the backward at once: others wait for these.
        while position + 1 < len(row) and row[position + 1].kind in (Kind.SEND_F, Kind.SEND_B):
            position += 1
        after.setdefault(position, []).append(stage)
    out = []
    for position, action in enumerate(row):
        out.append(action)
        out.extend(Action(stage, Kind.REDUCE_GRAD) for stage in after.get(position, ()))
    return out


def _with_gathers(row: list[Action], sharded: set[int], most: int) -> Iterator[Action]:
    ahead = _coming(row, sharded, most)
    gathered: dict[int, None] = {}  # in the order of gathering
    for action, coming in zip(row, ahead, strict=True):
        if action.kind.is_compute and coming != tuple(gathered):
            for stage in [stage for stage in gathered if stage not in coming]:
                del gathered[stage]
                yield Action(stage, Kind.RESHARD)
            for stage in coming:
                if stage not in gathered:
                    gathered[stage] = None
                    yield Action(stage, Kind.UNSHARD)
        yield action
    for stage in gathered:
        yield Action(stage, Kind.RESHARD)


def _coming(row: list[Action], sharded: set[int], most: int) -> list[tuple[int, ...]]:
    """For each action the sharded stages that compute from it on, nearest first, ``most`` of them."""
    ahead: list[tuple[int, ...]] = []
    order: tuple[int, ...] = ()
    for action in reversed(row):
        if action.kind.is_compute:
            now = tuple(dict.fromkeys(leaf.stage for leaf in action.leaves if leaf.stage in sharded))
            if len(now) > most:
                raise ScheduleError(
                    f"{action} needs the parameters of {len(now)} sharded stages, but max_unsharded is {most}"
                )
            if order[: len(now)] != now:
                order = now + tuple(stage for stage in order if stage not in now)
        ahead.append(order[:most])
    ahead.reverse()
    return ahead
