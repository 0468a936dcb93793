"""Plans that send in another order than they compute."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch
from stage_support import Threads, assert_like, build, grads_of, numbers, seeded, step
from torch import nn
from torch.nn import functional

from stepwell_meta.testing import WorkerPool
from stepwell_p2p import C10dTransport, Rules, Transport
from stepwell_stage import Plan, lower
from stepwell_stage.exceptions import ScheduleError
from stepwell_stage.schedules import gpipe

M, ROWS, WIDTH = 3, 6, 4
AFTER = (("0SEND_F0", "0SEND_F1"), ("1SEND_B0", "1SEND_B1"))  # what is sent only after what
TAKEN = (("1RECV_F0", "1RECV_F1"), ("0RECV_B0", "0RECV_B1"))


def moved(plan: Plan, *moves: tuple[str, str]) -> Plan:
    """Each first one to behind the second."""
    rows = [list(row) for row in plan.actions]
    for what, behind in moves:
        for row in rows:
            names = [str(action) for action in row]
            if what in names:
                action = row.pop(names.index(what))
                row.insert(names.index(behind), action)
    return attrs.evolve(plan, actions=tuple(tuple(row) for row in rows))


def modules() -> list[nn.Module]:
    return seeded(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))


def train(transport: Transport, plan: Plan) -> dict[int, list[Any]]:
    executor = build(transport, modules(), plan)  # type: ignore[arg-type]
    for _ in range(2):
        step(executor, numbers(ROWS, WIDTH), numbers(ROWS, WIDTH, seed=2))
    return grads_of(executor)


def train_process(plan: Plan) -> dict[int, list[Any]]:
    return train(C10dTransport(), plan)


def expected() -> list[nn.Module]:
    found = modules()
    for part, target in 2 * list(
        zip(numbers(ROWS, WIDTH).tensor_split(M), numbers(ROWS, WIDTH, seed=2).tensor_split(M), strict=True)
    ):
        (functional.mse_loss(nn.Sequential(*found)(part), target) / M).backward()
    return found


@pytest.mark.parametrize("rules", [None, Rules(tagged=False, rendezvous=False)])
def test_both_ends_in_another_order(threads: Threads, rules: Rules | None) -> None:
    """What says how values look went with the microbatch that runs first, not with the one that is sent first: a rank took one
    for the other.
    """
    plan = moved(lower(gpipe(2, M), ((0, 1),)), *AFTER, *TAKEN)
    assert [str(a) for a in plan.actions[0] if "SEND" in str(a)] == ["0SEND_F1", "0SEND_F0", "0SEND_F2"]
    assert_like(threads(train, 2, plan, rules=rules), expected(), torch.testing.assert_close)


def test_both_ends_in_another_order_on_gloo(workers: WorkerPool) -> None:
    plan = moved(lower(gpipe(2, M), ((0, 1),)), *AFTER, *TAKEN)
    assert_like(workers.run(train_process, 2, plan, deadline=60), expected(), torch.testing.assert_close)


@pytest.mark.parametrize("move", AFTER)
def test_one_end_in_another_order_is_refused_before_anything_is_sent(threads: Threads, move: tuple[str, str]) -> None:
    with pytest.raises(ScheduleError, match="take what crosses in the order in which it is sent"):
        threads(train, 2, moved(lower(gpipe(2, M), ((0, 1),)), move))
