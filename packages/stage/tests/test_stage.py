"""What a stage is told of itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from stepwell_meta import InferenceMode
from stepwell_p2p import LoopbackFabric
from stepwell_stage import EagerProgram, PipelineStage, StageProgram
from stepwell_stage.exceptions import StageUsageError


@pytest.mark.parametrize("index", [-1, 2, 5])
def test_a_stage_index_outside_the_pipeline_is_refused(index: int) -> None:
    with pytest.raises(StageUsageError, match=f"0 to 1 for 2 stages, got {index}"):
        PipelineStage(nn.Linear(1, 1), index, 2, "cpu")


def test_first_and_last_follow_from_the_index() -> None:
    stages = [PipelineStage(nn.Linear(1, 1), index, 3, "cpu") for index in range(3)]
    assert [stage.is_first for stage in stages] == [True, False, False]
    assert [stage.is_last for stage in stages] == [False, False, True]
    assert repr(stages[1]) == "PipelineStage(1 of 3, Linear, cpu)"


def test_a_module_on_the_meta_device_is_not_moved() -> None:
    stage = PipelineStage(nn.Linear(1, 1, device="meta"), 0, 1, "cpu")
    assert isinstance(stage.submodule, nn.Module)
    assert all(parameter.is_meta for parameter in stage.submodule.parameters())


def test_group_and_transport_together_are_refused() -> None:
    with pytest.raises(StageUsageError, match="a group or a transport, not both"):
        PipelineStage(nn.Linear(1, 1), 0, 1, "cpu", group=object(), transport=LoopbackFabric(1).transport(0))


def test_a_program_of_ones_own_and_something_that_is_none() -> None:
    program = EagerProgram(nn.Linear(1, 1))
    assert isinstance(program, StageProgram)
    assert PipelineStage(program, 0, 1, "cpu").program is program
    wrong: Any = lambda x: x  # noqa: E731
    with pytest.raises(StageUsageError, match=r"an nn.Module or a StageProgram, got function"):
        PipelineStage(wrong, 0, 1, "cpu")


def test_it_votes_for_static_once_inputs_and_outputs_are_declared() -> None:
    def vote(**declared: Any) -> InferenceMode:
        return PipelineStage(nn.Linear(2, 2), 0, 1, "cpu", **declared).vote(has_backward=True)

    x = torch.zeros(3, 2)
    assert vote() is InferenceMode.DYNAMIC
    assert vote(input_args=x) is InferenceMode.DYNAMIC
    assert vote(output_args=x) is InferenceMode.DYNAMIC
    assert vote(input_args=x, output_args=(x, x)) is InferenceMode.STATIC
