"""The word that goes round at the beginning of each step, and the rank that does not come for it."""

from __future__ import annotations

import logging
import time

import pytest
import torch
from torch import nn
from torch.nn import functional

from stepwell_meta.testing import WorkerPool
from stepwell_p2p import C10dTransport
from stepwell_stage import Executor, PipelineStage
from stepwell_stage.schedules import one_f_one_b


def stays_away(silent: int) -> list[str]:
    """Two steps, the second of which one rank begins late; what this rank's transport said meanwhile."""
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("stepwell_p2p").addHandler(handler)
    transport = C10dTransport(stall_after=1.6)  # after every rank has written down what it waits for
    executor = Executor(
        PipelineStage(nn.Linear(4, 4), transport.rank, 3, "cpu"),
        one_f_one_b(3, 4),
        functional.mse_loss,
        transport=transport,
    )
    x = torch.ones(4, 4)
    inputs, target = ((x,) if executor.is_first else ()), (x if executor.is_last else None)
    executor.step(*inputs, target=target)
    if transport.rank == silent:
        time.sleep(3.0)
    executor.step(*inputs, target=target)  # nothing is broken
    transport.close()
    logging.getLogger("stepwell_p2p").removeHandler(handler)
    return records


@pytest.mark.parametrize("silent", [0, 1])
def test_a_rank_that_does_not_call_step_is_named_by_those_that_do(workers: WorkerPool, silent: int) -> None:
    found = workers.run(stays_away, 3, silent)
    assert found[silent] == []
    for rank, records in enumerate(found):
        if rank != silent:
            assert len(records) == 1, records
            assert f"rank {rank} has waited 2 s for RECV_" in records[0]
            assert f"rank {silent} does not say that it waits for anybody" in records[0]
