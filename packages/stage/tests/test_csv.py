"""Files in torch's form, both ways."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules as torch_schedules

from stepwell_p2p import Placement, Rules
from stepwell_stage import Kind, Plan, lower, prove
from stepwell_stage.exceptions import ScheduleError
from stepwell_stage.plan._random import random_links, random_schedule
from stepwell_stage.schedules import (
    BY_NAME,
    custom,
    dualpipe_v,
    forward_only,
    from_csv,
    interleaved_1f1b,
    interleaved_zero_bubble,
    looped_bfs,
    one_f_one_b,
    to_csv,
    zbv,
)

TAGGED = Rules(tagged=True, rendezvous=True)
WAITS = (Kind.WAIT_F, Kind.WAIT_B)
CASES = [
    ("ScheduleInterleaved1F1B", interleaved_1f1b, 4, 8),
    ("ScheduleInterleaved1F1B", interleaved_1f1b, 3, 2),
    ("ScheduleLoopedBFS", looped_bfs, 4, 6),
    ("ScheduleInterleavedZeroBubble", interleaved_zero_bubble, 4, 8),
    ("ScheduleInterleavedZeroBubble", interleaved_zero_bubble, 2, 6),
    ("ScheduleZBVZeroBubble", zbv, 4, 8),
    ("ScheduleZBVZeroBubble", zbv, 4, 3),
    ("ScheduleDualPipeV", dualpipe_v, 2, 5),
    ("ScheduleDualPipeV", dualpipe_v, 4, 10),
]


def torch_schedule(name: str, num_ranks: int, num_microbatches: int) -> Any:
    """One of torch's schedules over two stages a rank; it looks at no more of its stages than this."""
    stages = [
        SimpleNamespace(
            stage_index=index * num_ranks,
            num_stages=2 * num_ranks,
            group_size=num_ranks,
            group_rank=0,
            group=None,
            has_backward=True,
            is_first=index == 0,
            is_last=False,
            submod=torch.nn.Identity(),
            stage_index_to_group_rank={},
        )
        for index in range(2)
    ]
    return getattr(torch_schedules, name)(stages, num_microbatches, loss_fn=lambda output, target: output.sum())


def torch_cells(path: Path) -> list[list[str]]:
    return [[cell for cell in line.split(",") if cell] for line in path.read_text().split()]


@pytest.mark.parametrize(("name", "ours", "num_ranks", "num_microbatches"), CASES)
def test_p153_torch_schedules_load_here_and_are_ours(
    tmp_path: Path, name: str, ours: Any, num_ranks: int, num_microbatches: int
) -> None:
    file = tmp_path / "schedule.csv"
    torch_schedule(name, num_ranks, num_microbatches)._dump_csv(str(file), format="compute_only")
    schedule = from_csv(file, name=ours(1, 2).name)
    assert schedule == ours(num_ranks, num_microbatches)


@pytest.mark.parametrize(("name", "ours", "num_ranks", "num_microbatches"), CASES)
def test_our_schedules_load_in_torch(
    tmp_path: Path, name: str, ours: Any, num_ranks: int, num_microbatches: int
) -> None:
    file, back = tmp_path / "schedule.csv", tmp_path / "back.csv"
    to_csv(ours(num_ranks, num_microbatches), file)
    theirs = torch_schedule("ScheduleLoopedBFS", num_ranks, num_microbatches)
    theirs._load_csv(str(file), format="compute_only")
    theirs._dump_csv(str(back), format="compute_only")
    assert torch_cells(back) == torch_cells(file)


@pytest.mark.parametrize(("name", "ours", "num_ranks", "num_microbatches"), CASES)
def test_torch_plans_load_here_and_are_proved(
    tmp_path: Path, name: str, ours: Any, num_ranks: int, num_microbatches: int
) -> None:
    file = tmp_path / "plan.csv"
    torch_schedule(name, num_ranks, num_microbatches)._dump_csv(str(file), format="compute_comms")
    plan = from_csv(file)
    assert isinstance(plan, Plan)
    cells = [[str(action) for action in row if action.kind not in WAITS] for row in plan.actions]
    assert cells == torch_cells(file)
    assert plan.links == lower(ours(num_ranks, num_microbatches)).links
    prove(plan, TAGGED)
    prove(plan, Rules(tagged=False, rendezvous=True))


@pytest.mark.parametrize(("name", "ours", "num_ranks", "num_microbatches"), CASES)
def test_our_plans_load_in_torch(tmp_path: Path, name: str, ours: Any, num_ranks: int, num_microbatches: int) -> None:
    file, back = tmp_path / "plan.csv", tmp_path / "back.csv"
    stages = range(2 * num_ranks)
    to_csv(lower(ours(num_ranks, num_microbatches), sharded=stages, reduced=stages), file, for_torch=True)
    theirs = torch_schedule("ScheduleLoopedBFS", num_ranks, num_microbatches)
    theirs._load_csv(str(file), format="compute_comms")
    theirs._dump_csv(str(back), format="compute_comms")
    assert torch_cells(back) == torch_cells(file)


@given(seed=st.integers(0, 2**32))
@settings(max_examples=40, deadline=None, derandomize=True)
def test_p153_round_trip(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    rng = random.Random(seed)
    schedule = random_schedule(rng, custom=True)
    links = random_links(rng, schedule.placement.num_stages)
    file = tmp_path_factory.mktemp("csv") / "random.csv"
    to_csv(schedule, file)
    assert from_csv(file) == schedule
    plan = lower(schedule, links)
    if any(not action.kind.is_compute for row in plan.actions for action in row):
        to_csv(plan, file)
        assert from_csv(file, links=plan.links) == plan


def test_links_follow_from_the_receives(tmp_path: Path) -> None:
    for placement, links in (
        (Placement.loop(4, 4), [(0, 1), (1, 2), (2, 3)]),
        (Placement.loop(4, 4), [(0, 1), (0, 3), (1, 2), (2, 3)]),
        (Placement.loop(4, 4), [(0, 1), (0, 2), (0, 3), (1, 2)]),
        (Placement.v(4, 2), [(0, 1), (0, 2), (1, 2), (2, 3)]),
    ):
        plan = lower(forward_only(placement, 2), links)
        to_csv(plan, tmp_path / "forward-only.csv")
        assert from_csv(tmp_path / "forward-only.csv") == plan


def test_the_text_is_torchs() -> None:
    assert to_csv(custom(["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"])) == "0F0,0F1,0B0,0B1\r\n1F0,1B0,1F1,1B1\r\n"
    assert to_csv(dualpipe_v(1, 2)).startswith("0F0,1F0,0F1,1B0,(1F1;0B0)OVERLAP_F_B")


def test_every_plan_round_trips_with_its_waits(tmp_path: Path) -> None:
    for name, make in BY_NAME.items():
        plan = lower(make(3, 5))
        to_csv(plan, tmp_path / f"{name}.csv")
        assert from_csv(tmp_path / f"{name}.csv") == plan


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("0F0,0B0\n1F0,1X0\n", "bad.csv, line 2, cell 2: '1X0' is no action; expected a stage"),
        ("0F0,,0F\n", "bad.csv, line 1, cell 3: '0F' is no action: F needs a microbatch number"),
        ("0F0,0B0,0B0\n", "bad: 0B0 on rank 0 appears twice"),
        ("0F0,0B0\n2F0,2B0\n", "bad: stage 2 is there, but no rank computes stage 1"),
        ("0B0,0F0\n", "bad: 0B0 on rank 0 can never run: it needs 0F0"),
        ("(0F1;0B0\n", "line 1, cell 1"),
        ("0UNSHARD3\n", "0UNSHARD3' is no action: UNSHARD takes no microbatch number"),
        ("0SEND_F0@1\n", "only RECV_F and RECV_B name a stage after @"),
        ("", "bad: there are no actions"),
        # What follows ended in errors of Python's own: IndexError, ValueError.
        ("0F0,0SEND_F0\n1RECV_F0@7,1F0\n", "link 7 -> 1 must lead from a stage to a later one of the 2 stages"),
        ("0F0,0SEND_F0\n9RECV_F0,1RECV_F0,1F0\n", "link 8 -> 9 must lead from a stage to a later one"),
        ("0F0,0RECV_F0,0SEND_F0\n1RECV_F0,1F0\n", "link -1 -> 0 must lead from a stage to a later one"),
        (f"0F0,0F{'9' * 5000}\n", "cell 2: '0F9*' is no action"),
        # This was a plan in which no value travels, and it was proved.
        (
            "0F0,0REDUCE_GRAD\n1F0,1REDUCE_GRAD\n",
            "bad: there is 0REDUCE_GRAD, so this is a plan, but stage 1 has no RECV_F of what it takes; without 0REDUCE_GRAD and"
            " its like the file is a schedule",
        ),
        ("0F0,0SEND_F0\n1F0\n", "there is 0SEND_F0, so this is a plan, but stage 1 has no RECV_F"),
        ("0F0,0WAIT_F0\n1F0\n", "there is 0WAIT_F0, so this is a plan, but stage 1 has no RECV_F"),
        # So was this, where only some have no part in it.
        ("0F0,0SEND_F0\n1RECV_F0,1F0\n2F0\n", "there is 0SEND_F0, so this is a plan, but stage 2 has no RECV_F"),
        ("0F0,0B0\n\n1F0,1X0\n", "bad.csv, line 3, cell 2: '1X0'"),
    ],
)
def test_p153_an_invalid_file_gives_line_and_reason(tmp_path: Path, text: str, sentence: str) -> None:
    file = tmp_path / "bad.csv"
    file.write_text(text)
    with pytest.raises(ScheduleError, match=sentence):
        from_csv(file)


def test_a_file_from_a_spreadsheet_is_read(tmp_path: Path) -> None:
    """With a mark at its start, which was taken for part of the first action, and lines of nothing, taken for idle ranks."""
    file = tmp_path / "sheet.csv"
    file.write_bytes(b"\xef\xbb\xbf0F0,,,0B0\r\n\r\n,1F0,1B0,\r\n  \r\n,,,\r\n\r\n")
    assert from_csv(file, name="custom") == custom(["0F0 . . 0B0", ". 1F0 1B0"])


@pytest.mark.parametrize("content", [b"\x89PNG\r\n\x1a\n\xff", b"0F0," + b"x" * 140_000])
def test_a_file_that_is_no_text_is_refused(tmp_path: Path, content: bytes) -> None:
    """It ended in a UnicodeDecodeError, or in an error of the module csv."""
    (tmp_path / "picture.csv").write_bytes(content)
    with pytest.raises(ScheduleError, match=r"picture.csv is no comma-separated text: "):
        from_csv(tmp_path / "picture.csv")


def test_a_plan_of_one_rank_needs_no_communication(tmp_path: Path) -> None:
    plan = lower(custom(["0F0 1F0 1B0 0B0"]), sharded=[0], reduced=[0, 1])
    to_csv(plan, tmp_path / "custom.csv")
    assert from_csv(tmp_path / "custom.csv") == plan


def test_torch_has_no_skip_links() -> None:
    plan = lower(one_f_one_b(3, 2), [(0, 1), (1, 2), (0, 2)])
    with pytest.raises(ScheduleError, match="0RECV_B0@1: torch's plans know links from each stage to the next only"):
        to_csv(plan, for_torch=True)
