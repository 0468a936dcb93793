"""Every schedule that torch.distributed.pipelining has too is torch's, action for action, in every size that torch takes."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.pipelining import schedules as torchs

from stepwell_stage import Action, Kind, Schedule
from stepwell_stage.schedules import (
    dualpipe_v,
    gpipe,
    interleaved_1f1b,
    interleaved_zero_bubble,
    looped_bfs,
    one_f_one_b,
    zbv,
)

RANKS = [1, 2, 3, 4, 5, 7, 8, 16]
MICROBATCHES = [1, 2, 3, 4, 5, 7, 8, 9, 12, 15, 16, 17, 24, 32, 33, 48, 63, 64]
SINGLE = {"ScheduleGPipe": gpipe, "Schedule1F1B": one_f_one_b}
LOOPED = {
    "ScheduleInterleaved1F1B": interleaved_1f1b,
    "ScheduleLoopedBFS": looped_bfs,
    "ScheduleInterleavedZeroBubble": interleaved_zero_bubble,
}
IN_A_V = {"ScheduleZBVZeroBubble": zbv, "ScheduleDualPipeV": dualpipe_v}


def torch_stage(index: int, num_ranks: int, num_stages: int) -> Any:
    """A stage that computes nothing and notes what it is told to compute; torch's schedules ask no more of it than this."""
    noted: list[Action] = []
    return SimpleNamespace(
        stage_index=index,
        num_stages=num_stages,
        group_size=num_ranks,
        group_rank=index % num_ranks,
        group=None,
        has_backward=True,
        is_first=index == 0,
        is_last=index == num_stages - 1,
        submod=torch.nn.Identity(),
        stage_index_to_group_rank={},
        noted=noted,
        get_fwd_recv_ops=lambda number: [],
        get_fwd_send_ops=lambda number: [],
        get_bwd_recv_ops=lambda number: [],
        get_bwd_send_ops=lambda number: [],
        forward_one_chunk=lambda number, *args, **kwargs: noted.append(Action(index, Kind.F, number)),
        backward_one_chunk=lambda number, **kwargs: noted.append(Action(index, Kind.B, number)),
        perform_reduce_grad=lambda factor: None,
    )


def torch_order(name: str, num_ranks: int, num_microbatches: int, depth: int = 1) -> list[list[Action]] | None:
    """What torch's class computes on each rank; None where it refuses the size."""
    make = getattr(torchs, name)
    try:
        if name in SINGLE:  # it has no table that is right for every rank, so it is run
            return [ran(make(torch_stage(rank, num_ranks, num_ranks), num_microbatches)) for rank in range(num_ranks)]
        stages = [torch_stage(number * num_ranks, num_ranks, depth * num_ranks) for number in range(depth)]
        rows = make(stages, num_microbatches, loss_fn=lambda output, target: output).pipeline_order
    except ValueError:
        return None
    return [[Action.parse(str(cell)) for cell in rows[rank] if cell is not None] for rank in range(num_ranks)]


def ran(schedule: Any) -> list[Action]:
    """What a schedule of one stage has it compute in one step."""
    schedule._has_backward = True
    schedule._initialize_stage = lambda *args: None
    schedule._step_microbatches()
    found: list[Action] = schedule._stage.noted
    return found


def agreed(
    name: str, ours: Callable[[int, int], Schedule], depth: int, ranks: list[int] = RANKS
) -> set[tuple[int, int]]:
    """The sizes for which torch has an order; all of them are ours."""
    taken = set()
    for num_ranks in ranks:
        for num_microbatches in MICROBATCHES:
            order = torch_order(name, num_ranks, num_microbatches, depth)
            if order is not None:
                taken.add((num_ranks, num_microbatches))
                assert [list(row) for row in ours(num_ranks, num_microbatches).actions] == order, taken
    return taken


@pytest.mark.parametrize("name", SINGLE)
def test_one_stage_a_rank(name: str) -> None:
    taken = agreed(name, SINGLE[name], 1)
    wanted = {(ranks, count) for ranks in RANKS for count in MICROBATCHES if name == "ScheduleGPipe" or count >= ranks}
    assert taken == wanted  # torch's 1F1B refuses fewer microbatches than stages


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
@pytest.mark.parametrize("name", LOOPED)
def test_looped_stages(name: str, depth: int) -> None:
    ranks = [number for number in RANKS if number * depth <= 16]
    taken = agreed(name, lambda r, m: LOOPED[name](r, m, stages_per_rank=depth), depth, ranks)
    if name == "ScheduleLoopedBFS":
        assert len(taken) == len(ranks) * len(MICROBATCHES)
    else:  # torch refuses an M that its rounds do not divide
        assert {(ranks, count) for ranks, count in taken if count % max(1, count // ranks)} == set()
        assert len(taken) > len(ranks) * len(MICROBATCHES) / 2


@pytest.mark.parametrize("name", IN_A_V)
def test_stages_in_a_v(name: str) -> None:
    ranks = [number for number in RANKS if number <= 8]
    taken = agreed(name, IN_A_V[name], 2, ranks)
    fewest = 1 if name == "ScheduleZBVZeroBubble" else 2
    assert taken == {
        (number, count) for number in ranks for count in MICROBATCHES if count >= number * 2 or fewest == 1
    }
