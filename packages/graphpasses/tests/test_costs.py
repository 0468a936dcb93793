"""Costs that steer overlap: all ranks agree on them, also where one of them has failed, or names nonsense."""

from __future__ import annotations

from typing import Any

import graphpasses_support as support
import pytest
import torch
from torch import nn

from stepwell_graphpasses import GraphCompiler, PassConfig, PassContract, RooflineCosts
from stepwell_graphpasses.exceptions import PassError, PeerMismatchError
from stepwell_graphpasses.passes import DataParallelPass, OverlapPass, RematPass
from stepwell_graphpasses.testing import fake_world
from stepwell_meta.testing import WorkerPool

BATCH = {"tokens": support.tokens(rank=0)}


def gpt() -> nn.Module:
    return support.seeded(lambda: support.TinyGPT(layers=1))


@pytest.mark.parametrize("cost", [float("nan"), float("inf"), -1.0, None, "1", True])
@pytest.mark.parametrize("what", ["compute", "collective"])
def test_costs_that_are_no_seconds_are_refused(what: str, cost: Any) -> None:
    """Ranks could agree on different maxima of not-a-number."""

    class Costs:
        def compute(self, node: Any) -> Any:
            return cost if what == "compute" else 0.0

        def collective(self, kind: str, size: int, nbytes: int) -> Any:
            return cost if what == "collective" else 0.0

    with fake_world(2), pytest.raises(PassError, match="a cost model must name seconds, from 0 up; it says"):
        GraphCompiler(
            support.MLP(4, 4), support.mse_loss, passes=[DataParallelPass(), OverlapPass(costs=Costs())]
        ).compile(**support.pair((4, 4), rank=0))


def fails_on_one_rank(axes: bool) -> tuple[str, str, bool]:
    nothing = PassContract()

    class FailsOnTheLastRank:
        name = "fails"
        contract = nothing

        def run(self, joint: Any, context: Any) -> None:
            if torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
                raise ValueError("out of luck")

    config = PassConfig(dp_mode="hsdp", fsdp_degree=2) if axes else PassConfig()
    passes = [DataParallelPass(), RematPass(), FailsOnTheLastRank(), OverlapPass(costs=RooflineCosts())]
    c = GraphCompiler(gpt(), support.gpt_loss, config, passes=passes)
    try:
        c.compile(**BATCH)
    except Exception as error:
        again = GraphCompiler(gpt(), support.gpt_loss, config)  # the groups are as before
        again.compile(**BATCH)
        return type(error).__name__, str(error), isinstance(error.__cause__, PeerMismatchError)
    return "", "", False


@pytest.mark.parametrize(("axes", "ranks"), [(False, 2), (True, 4)])
def test_a_rank_that_fails_before_costs_are_agreed_on_takes_the_others_with_it(
    workers: WorkerPool, axes: bool, ranks: int
) -> None:
    """A pass that failed on one rank made it vote, while the others asked for its costs: they waited for it for ever."""
    *others, last = workers.run(fails_on_one_rank, ranks, axes, deadline=60)
    assert last[0] == "PassError"
    assert "out of luck" in last[1]
    for kind, text, joint in others:
        assert kind == "PassError"
        assert f"rank {ranks - 1} could not compile, so no rank does: PassError: pass fails failed" in text
        assert joint


def only_one_has_costs() -> str:
    costs = RooflineCosts() if torch.distributed.get_rank() == 0 else None
    c = GraphCompiler(gpt(), support.gpt_loss, passes=[DataParallelPass(), OverlapPass(costs=costs)])
    with pytest.raises((PeerMismatchError, PassError)) as error:
        c.compile(**BATCH)
    return str(error.value)


def test_costs_on_one_rank_only_are_refused_on_all(workers: WorkerPool) -> None:
    first, second = workers.run(only_one_has_costs, 2, deadline=60)
    assert "not all of them use a cost model" in first
    assert "some ranks agree on costs while others are done" in second
