"""What must hold on a real device; `nox -s gpu` and `nox -s npu` run it there, and the CPU stands in elsewhere."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import stepwell
from stepwell_mesh import default_device_type
from stepwell_meta import TensorMeta

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu), pytest.param("npu", marks=pytest.mark.npu)]


@pytest.mark.parametrize(
    "device", [pytest.param("cuda", marks=pytest.mark.gpu), pytest.param("npu", marks=pytest.mark.npu)]
)
def test_the_accelerator_is_the_default(device: str) -> None:
    assert default_device_type() == device


@pytest.mark.parametrize("device", DEVICES)
def test_a_buffer_is_laid_out_as_its_meta_says(device: str) -> None:
    meta = TensorMeta.from_tensor(torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last))
    buffer = meta.empty(torch.device(device))
    assert buffer.device.type == device
    assert TensorMeta.from_tensor(buffer) == meta


@pytest.mark.parametrize("device", DEVICES)
def test_a_pipeline_has_the_gradients_of_one_process(device: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4))).to(device)
    alone = copy.deepcopy(model)
    batch, target = torch.randn(8, 16, device=device), torch.randn(8, 16, device=device)

    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(output, target.to(output.device))  # each rank has a device of its own, if it can

    def train(world: stepwell.World) -> float | None:
        pipe = stepwell.pipeline(model, world, loss_fn=loss_fn, microbatches=4)
        return pipe.step(batch, target=target).loss

    losses = stepwell.launch(train, ranks=2, device=device)
    loss = nn.functional.mse_loss(alone(batch), target)
    loss.backward()
    assert losses == pytest.approx([loss.item()] * len(losses), rel=1e-5)
    for mine, plain in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, plain.grad, check_device=False)
