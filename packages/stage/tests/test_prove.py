"""What is proved of a plan, and what is said of plans that cannot be carried out."""

from __future__ import annotations

import pytest

from stepwell_p2p import Rules
from stepwell_p2p.exceptions import DeadlockError
from stepwell_stage import Action, Kind, Plan, PlanProof, lower, prove
from stepwell_stage.exceptions import ScheduleError
from stepwell_stage.schedules import custom, gpipe, one_f_one_b

FIFO = Rules(tagged=False, rendezvous=True)
TAGGED = Rules(tagged=True, rendezvous=True)
TWO = custom(["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"])


def plan_of(*rows: str) -> Plan:
    """A plan written by hand for two ranks with a stage each."""
    return Plan(TWO, ((0, 1),), [map(Action.parse, row.split()) for row in rows])


GOOD = (
    "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0WAIT_F0 0RECV_B1 0B1 0WAIT_F1",
    "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1 1WAIT_B0 1WAIT_B1",
)


def test_bounds() -> None:
    assert prove(plan_of(*GOOD), FIFO) == PlanProof(
        peak_activations=(2, 1), peak_receives=(1, 1), peak_sends=(2, 2), peak_unsharded=(0, 0), num_messages=(2, 2)
    )
    assert prove(lower(gpipe(1, 4)), FIFO).peak_activations == (4,)


@pytest.mark.parametrize(
    ("rank", "old", "new", "sentence"),
    [
        (
            1,
            "1RECV_F0 1F0",
            "1F0 1RECV_F0",
            "1F0 on rank 1 .action 0 of its plan.: the RECV of the value of microbatch 0",
        ),
        (
            0,
            "0F0 0SEND_F0",
            "0SEND_F0 0F0",
            "0SEND_F0 on rank 0 .action 0.*: the forward of stage 0, microbatch 0 must come before",
        ),
        (
            1,
            "1B0 1SEND_B0",
            "1SEND_B0 1B0",
            "1SEND_B0 on rank 1 .*: the backward of stage 1, microbatch 0 must come before it",
        ),
        (0, "0WAIT_F0 ", "0WAIT_F0 0WAIT_F0 ", "the value of microbatch 0 from stage 0 to stage 1 is waited for twice"),
        (
            0,
            "0F0 0SEND_F0",
            "0F0 0WAIT_F0 0SEND_F0",
            "the SEND of the value of microbatch 0 from stage 0 to stage 1 must come",
        ),
        (0, "0SEND_F0", "0SEND_F0 0SEND_F0", "the value of microbatch 0 from stage 0 to stage 1 is sent twice"),
        (0, "0RECV_B0", "0RECV_B0 0RECV_B0", "the gradient of microbatch 0 from stage 1 to stage 0 is received twice"),
        (0, "0RECV_B0", "0RECV_F0", "0RECV_F0 on rank 0 .*: no other rank is at the other end of it"),
        (0, "0RECV_B0", "1RECV_F0", r"1RECV_F0 on rank 0 .*: that rank holds stages \(0,\)"),
        (0, "0RECV_B0", "0RECV_B2", "there are microbatches 0 to 1"),
        # A second reduction would have averaged the average.
        (1, "1WAIT_B0", "1REDUCE_GRAD 1REDUCE_GRAD 1WAIT_B0", "the gradients of stage 1 are reduced already"),
        (0, "0B0 0WAIT", "0B1 0WAIT", "compute action 2 of rank 0 is 0B1 in the plan but 0B0 in its schedule"),
        (0, "0RECV_B1 0B1", "", "compute action 3 of rank 0 is nothing in the plan but 0B1 in its schedule"),
        (1, "1F0", "1F0 1F1", "compute action 1 of rank 1 is 1F1 in the plan but 1B0"),
        (0, "0F0 ", "0UNSHARD 0UNSHARD 0F0 ", "0UNSHARD on rank 0 .action 1.*: stage 0 is gathered already"),
        (0, "0F0 ", "0RESHARD 0F0 ", "0RESHARD on rank 0 .*: stage 0 is not gathered"),
        (0, "0F0 ", "0UNSHARD 0F0 0RESHARD ", "0F1 on rank 0 .*: 0UNSHARD must come before it, and 0RESHARD after it"),
        (0, "0F0 ", "1UNSHARD 0F0 ", "1UNSHARD on rank 0 .*: that rank holds stages"),
        (1, "1B1 ", "1REDUCE_GRAD 1B1 ", "1REDUCE_GRAD on rank 1 .*: 1 backwards of stage 1 come after it"),
    ],
)
def test_what_is_wrong_on_one_rank(rank: int, old: str, new: str, sentence: str) -> None:
    rows = list(GOOD)
    assert old in rows[rank]
    rows[rank] = rows[rank].replace(old, new, 1)
    with pytest.raises(ScheduleError, match=sentence):
        prove(plan_of(*rows), TAGGED)


def test_a_plan_has_links_to_stages_that_are_there() -> None:
    """A link beyond the last stage ended in an IndexError from within the proof; one from stage -1 was the last stage's."""
    for link in ((0, 2), (-1, 0), (1, 0)):
        with pytest.raises(
            ScheduleError, match=f"link {link[0]} -> {link[1]} must lead from a stage to a later one of the 2"
        ):
            Plan(TWO, (link,), [[], []])
    below = Action(0, Kind.SEND_F, -1)
    with pytest.raises(ScheduleError, match=r"0SEND_F-1 on rank 0 .*: there are microbatches 0 to 1"):
        prove(Plan(TWO, ((0, 1),), [[below, *TWO.actions[0]], TWO.actions[1]]), TAGGED)


def test_local_values_are_handed_over_in_order() -> None:
    schedule = custom(["0F0 1F0 1B0 0B0"])
    for row, sentence in (
        ("1F0 0F0 1B0 0B0", "compute action 0 of rank 0 is 1F0"),
        ("0F0 1F0 0B0 1B0", "compute action 2 of rank 0 is 0B0"),
    ):
        with pytest.raises(ScheduleError, match=sentence):
            prove(Plan(schedule, ((0, 1),), [map(Action.parse, row.split())]), TAGGED)


def test_p018_a_message_with_one_end() -> None:
    rows = GOOD[0].replace("0SEND_F1 ", "").replace(" 0WAIT_F1", ""), GOOD[1]
    with pytest.raises(DeadlockError, match="but rank 0 never sends it") as caught:
        prove(plan_of(*rows), TAGGED)
    assert caught.value.kind == "unmatched"
    # It was called value 1, the number of the stage that takes it, though the stage before makes one value only.
    assert "RECV_F of stage 0, microbatch 1, value 0 (rank 0 to rank 1)" in str(caught.value)


def test_crossed_orders_mix_data_up_only_where_order_counts() -> None:
    rows = GOOD[0].replace("0RECV_B0 0B0", "0RECV_B1 0RECV_B0 0B0").replace("0WAIT_F0 0RECV_B1", "0WAIT_F0"), GOOD[1]
    prove(plan_of(*rows), TAGGED)
    with pytest.raises(DeadlockError, match="the receiver would get the wrong data") as caught:
        prove(plan_of(*rows), FIFO)
    assert caught.value.kind == "order"


def test_p025_two_ranks_that_wait_for_their_sends_before_they_receive() -> None:
    rows = (
        "0F0 0SEND_F0 0WAIT_F0 0F1 0SEND_F1 0WAIT_F1 0RECV_B0 0B0 0RECV_B1 0B1",
        "1RECV_F0 1F0 1B0 1SEND_B0 1WAIT_B0 1RECV_F1 1F1 1B1 1SEND_B1 1WAIT_B1",
    )
    prove(plan_of(*rows), Rules(tagged=True, rendezvous=False))
    with pytest.raises(DeadlockError) as caught:
        prove(plan_of(*rows), TAGGED)
    assert caught.value.kind == "cycle"
    text = str(caught.value)
    assert "rank 0 in 0WAIT_F1 waits" in text
    assert "rank 1 in 1WAIT_B0 waits" in text


def test_p029_one_microbatch_is_proved_like_many() -> None:
    for num_microbatches in (1, 2, 7):
        for num_ranks in (2, 3, 8):
            prove(lower(one_f_one_b(num_ranks, num_microbatches)), FIFO)


def test_a_schedule_is_no_plan_yet() -> None:
    """Proving a schedule that was not lowered ended in an AttributeError."""
    with pytest.raises(ScheduleError, match=r"prove\(\) takes a plan, got a Schedule; lower\(schedule\) makes one"):
        prove(TWO, FIFO)  # type: ignore[arg-type]


def test_unknown_policies_are_refused() -> None:
    with pytest.raises(ValueError, match="no channel policy is named 'mine'"):
        prove(plan_of(*GOOD), FIFO, channels="mine")
