"""Which schedules are legal, and what is said of those that are not."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepwell_p2p import Placement
from stepwell_stage import Action, Kind, Schedule
from stepwell_stage.exceptions import ScheduleError
from stepwell_stage.plan._random import random_schedule


def make(*rows: str, num_microbatches: int = 1, ranks: tuple[int, ...] | None = None) -> Schedule:
    placement = Placement.custom(ranks or range(len(rows)))
    return Schedule("mine", placement, num_microbatches, [[Action.parse(cell) for cell in row.split()] for row in rows])


def test_a_legal_one() -> None:
    schedule = make("0F0 0B0", "1F0 1I0 1W0")
    assert schedule.has_backward
    assert schedule.table() == "rank 0: 0F0  .   .  0B0\nrank 1:  .  1F0 1I0 1W0"


def test_forward_only_has_no_backward() -> None:
    assert not make("0F0", "1F0").has_backward


def test_overlapped_pairs_share_a_slot() -> None:
    schedule = make("0F0 1F0 (0F1;1B0)OVERLAP_F_B 0B0 1F1 1B1 0B1", ranks=(0, 0), num_microbatches=2)
    assert "0F1+1B0" in schedule.table()


@pytest.mark.parametrize(
    ("rows", "options", "sentence"),
    [
        (["0F0"], {"num_microbatches": 0}, "mine needs at least 1 microbatch, got 0"),
        (["0F0", "1F0"], {"ranks": (0, 0)}, "mine has 1 ranks but actions for 2"),
        (
            ["0F0 0SEND_F0"],
            {},
            r"mine: 0SEND_F0 on rank 0: a schedule holds compute actions only; lower\(\) adds the rest",
        ),
        (["0F0 0UNSHARD"], {}, "0UNSHARD on rank 0: a schedule holds compute actions only"),
        (["0F0 1F0", "1F0"], {}, r"1F0 on rank 0: that rank holds stages \(0,\)"),
        (["0F0 7F0"], {}, r"7F0 on rank 0: that rank holds stages \(0,\)"),
        (["0F0 0F1"], {}, "0F1 on rank 0: there are microbatches 0 to 0"),
        (["0F0 0F0"], {}, "0F0 on rank 0 appears twice"),
        (["0F0 0B0", "1F0"], {}, "microbatch 0 has F on stage 1, expected F and B, or F, I and W"),
        (["0F0"], {"num_microbatches": 2}, "microbatch 1 has nothing on stage 0, expected F$"),
        (["0F0 0I0"], {}, "microbatch 0 has F and I on stage 0, expected F and B, or F, I and W"),
        (["0F0 0B0 0W0"], {}, "microbatch 0 has F and B and W on stage 0"),
        (["0B0 0F0"], {}, "0B0 on rank 0 can never run: it needs 0F0, which comes later or waits for it"),
        (["0F0 0W0 0I0"], {}, "0W0 on rank 0 can never run: it needs 0I0"),
        (["0F0 0B0", "1B0 1F0"], {}, "0B0 on rank 0 can never run: it needs 1B0"),
        (["1F0 0F0"], {"ranks": (0, 0)}, "1F0 on rank 0 can never run: it needs 0F0"),
        (
            ["0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"],
            {"num_microbatches": 2},
            "0B0 on rank 0 can never run: it needs 1B0, which comes later or waits for it",
        ),
        (
            ["0F0 (0F1;0B0)OVERLAP_F_B 0B1", "1F0 1F1 1B0 1B1"],
            {"num_microbatches": 2},
            r"\(0F1;0B0\)OVERLAP_F_B on rank 0 can never run: it needs 1B0",
        ),
    ],
)
def test_the_first_wrong_action_and_why(rows: list[str], options: dict[str, object], sentence: str) -> None:
    with pytest.raises(ScheduleError, match=sentence):
        make(*rows, **options)  # type: ignore[arg-type]


def test_p103_a_weight_step_without_its_input_step_is_refused() -> None:
    with pytest.raises(ScheduleError, match="0W0 on rank 0 can never run: it needs 0I0"):
        make("0F0 0F1 0W0 0I0 0B1", num_microbatches=2)


@given(seed=st.integers(0, 2**32))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_time_respects_what_every_action_needs(seed: int) -> None:
    schedule = random_schedule(random.Random(seed), custom=True)
    slot = {
        leaf: at
        for row, slots in zip(schedule.actions, schedule.slots, strict=True)
        for action, at in zip(row, slots, strict=True)
        for leaf in action.leaves
    }
    last = schedule.placement.num_stages - 1
    for (stage, kind, microbatch, *_), at in slot.items():
        grads = [slot.get(Action(stage + 1, kind, microbatch)) for kind in (Kind.B, Kind.I)]
        if kind is Kind.F and stage:
            assert slot[Action(stage - 1, Kind.F, microbatch)] < at
        if kind in (Kind.B, Kind.I):
            assert slot[Action(stage, Kind.F, microbatch)] < at
            assert stage == last or max(grad for grad in grads if grad is not None) < at
        if kind is Kind.W:
            assert slot[Action(stage, Kind.I, microbatch)] < at
    for slots in schedule.slots:
        assert list(slots) == sorted(set(slots))


@given(seed=st.integers(0, 2**32))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_any_damage_is_noticed(seed: int) -> None:
    rng = random.Random(seed)
    schedule = random_schedule(rng)
    rows = [list(row) for row in schedule.actions]
    row = rng.choice([row for row in rows if row])
    at = rng.randrange(len(row))
    damage = rng.choice(["drop", "double", "move"])
    if damage == "drop":
        del row[at]
    elif damage == "double":
        row.insert(rng.randrange(len(row) + 1), row[at])
    else:
        row[at] = row[at]._replace(stage=schedule.placement.num_stages, parts=())
    if row or damage != "drop":
        with pytest.raises(ScheduleError):
            Schedule("damaged", schedule.placement, schedule.num_microbatches, rows)
