"""The numbers of messages."""

from __future__ import annotations

from stepwell_p2p import Edge, Placement
from stepwell_stage import Action
from stepwell_stage.plan._messages import Messages


def test_values_then_gradients_link_by_link() -> None:
    messages = Messages.of(Placement.custom([0, 1, 1, 0]), ((0, 1), (0, 2), (1, 2), (2, 3)), 2)
    assert messages.links == ((0, 1), (0, 2), (2, 3))
    assert len(messages) == 12
    assert [messages.ends(number) for number in range(0, 12, 2)] == [(0, 1), (0, 2), (2, 3), (1, 0), (2, 0), (3, 2)]
    assert messages.edge(4) == Edge(1, 0)
    assert messages.local_sources == ((), (), (1,), ())
    assert messages.local_destinations == ((), (2,), (), ())


def test_what_an_action_moves() -> None:
    messages = Messages.of(Placement.loop(3, 3), ((0, 1), (0, 2), (1, 2)), 2)
    assert messages.of_action(Action.parse("0SEND_F1")) == messages.of_action(Action.parse("0WAIT_F1")) == (1, 3)
    assert messages.of_action(Action.parse("2RECV_F0")) == (2, 4)
    assert messages.of_action(Action.parse("2RECV_F0@1")) == (4,)
    assert messages.of_action(Action.parse("2SEND_B1")) == (9, 11)
    assert messages.of_action(Action.parse("0RECV_B1@2")) == (9,)
    assert messages.of_action(Action.parse("0RECV_F0")) == ()


def test_words() -> None:
    messages = Messages.of(Placement.loop(2, 2), ((0, 1),), 3)
    assert messages.describe(2) == "the value of microbatch 2 from stage 0 to stage 1"
    assert messages.describe(4) == "the gradient of microbatch 1 from stage 1 to stage 0"
