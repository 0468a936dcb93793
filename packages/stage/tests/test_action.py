"""Actions and their text form."""

from __future__ import annotations

import pickle
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepwell_stage import Action, Kind, lower
from stepwell_stage.exceptions import ScheduleError
from stepwell_stage.plan._random import random_links, random_schedule


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("0F3", Action(0, Kind.F, 3)),
        ("12B34", Action(12, Kind.B, 34)),
        ("1I2", Action(1, Kind.I, 2)),
        ("1W2", Action(1, Kind.W, 2)),
        ("2SEND_F0", Action(2, Kind.SEND_F, 0)),
        ("5RECV_B1@2", Action(5, Kind.RECV_B, 1, 2)),
        ("0WAIT_F7", Action(0, Kind.WAIT_F, 7)),
        ("1UNSHARD", Action(1, Kind.UNSHARD)),
        ("3REDUCE_GRAD", Action(3, Kind.REDUCE_GRAD)),
        ("2{offload}5", Action.custom(2, "offload", 5)),
        ("2{off-load_2}", Action.custom(2, "off-load_2")),
        ("(0F4;7B0)OVERLAP_F_B", Action.overlap(Action(0, Kind.F, 4), Action(7, Kind.B, 0))),
    ],
)
def test_text_both_ways(text: str, action: Action) -> None:
    assert str(action) == text
    assert Action.parse(f" {text} ") == action


@given(seed=st.integers(0, 2**32))
@settings(max_examples=30, deadline=None, derandomize=True)
def test_every_action_of_any_plan_is_read_back(seed: int) -> None:
    rng = random.Random(seed)
    schedule = random_schedule(rng, custom=True)
    stages = range(schedule.placement.num_stages)
    for row in lower(schedule, random_links(rng, len(stages)), sharded=stages).actions:
        for action in row:
            assert Action.parse(str(action)) == action
            assert pickle.loads(pickle.dumps(action)) == action


@given(text=st.text(alphabet="0123456789FBIWSENDRCV_AUH@(){};. -", max_size=12))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_other_text_is_refused_or_means_what_it_says(text: str) -> None:
    try:
        action = Action.parse(text)
    except ScheduleError:
        return
    assert Action.parse(str(action)) == action


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "'' is no action; expected a stage, a kind and a microbatch, for example 0F3"),
        ("F0", "'F0' is no action; expected a stage"),
        ("0G0", "is no action"),
        ("0F", "F needs a microbatch number"),
        ("0RESHARD1", "RESHARD takes no microbatch number"),
        ("0SEND_F0@1", "only RECV_F and RECV_B name a stage after @"),
        ("(0F0;0B0)OVERLAP_F_B", "0B0 needs 0F0, so the two cannot overlap"),
        ("(0B0;1F0)OVERLAP_F_B", "an overlapped pair is an F and a B or I, got 0B0 and 1F0"),
        ("0OVERLAP_F_B0", "is no action"),
        ("0CUSTOM0", "is no action"),
        ("0{}0", "is no action"),
        ("0{2}0", "is no action"),
        ("0{offload}1@2", "only RECV_F and RECV_B name a stage after @"),
        ("٣F0", "is no action"),
    ],
)
def test_what_is_no_action(text: str, sentence: str) -> None:
    with pytest.raises(ScheduleError, match=sentence):
        Action.parse(text)


def test_the_name_of_a_custom_action_is_a_word() -> None:
    with pytest.raises(ScheduleError, match="a letter followed by letters, digits, '_' and '-', got 'off load'"):
        Action.custom(0, "off load")


def test_leaves() -> None:
    forward, backward = Action(0, Kind.F, 1), Action(1, Kind.B, 0)
    assert forward.leaves == (forward,)
    pair = Action.overlap(forward, backward)
    assert pair.leaves == (forward, backward)
    assert (pair.stage, pair.microbatch) == (0, 1)


def test_kinds_know_what_they_are() -> None:
    assert [kind.value for kind in Kind if kind.is_compute] == ["F", "B", "I", "W", "OVERLAP_F_B", "CUSTOM"]
    assert [kind.value for kind in Kind if kind.is_backward] == ["B", "I"]
    assert [kind.value for kind in Kind if not kind.has_microbatch] == ["UNSHARD", "RESHARD", "REDUCE_GRAD"]
