"""What a capture cannot see: named, with the line; and tensors of the model that are no buffers."""

from __future__ import annotations

import copy
from typing import Any

import graphpasses_support as support
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from stepwell_graphpasses import GraphCompiler, JointGraph, trace
from stepwell_graphpasses.exceptions import CaptureError, ConfigError
from stepwell_graphpasses.testing import fake_world

X = {"x": torch.randn(3, 4), "y": torch.randn(3, 4)}


def run(joint: JointGraph, model: nn.Module, inputs: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    with torch.no_grad():
        buffers = dict(model.named_buffers())
        return joint.module(
            *(dict(model.named_parameters())[name] for name in joint.table.names),
            *(buffers[buffer.name] for buffer in joint.buffers),
            *joint.guards.flatten(inputs),
        )


def line_of(error: pytest.ExceptionInfo[CaptureError]) -> str:
    assert error.value.filename == __file__
    assert error.value.lineno is not None
    with open(__file__) as file:
        return file.read().splitlines()[error.value.lineno - 1].strip()


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    ("body", "line", "message"),
    [
        ("item", "return out * out.sum().item()  # item", "reads a number out of a tensor"),
        ("branch", "if out.sum() > 0:  # branch", "reads a number out of a tensor"),
        ("mask", "return out[out > 0]  # mask", "shape depends on the data"),
        ("backward", "out.sum().backward()  # backward", "calls backward itself"),
        ("bug", 'raise KeyError("mine")  # bug', "KeyError: 'mine'"),
    ],
)
def test_what_cannot_be_captured_is_named_with_its_line(body: str, line: str, message: str, dynamic: bool) -> None:
    def step(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return helper(model(x)).mean()

    def helper(out: torch.Tensor) -> torch.Tensor:
        if body == "item":
            return out * out.sum().item()  # item
        if body == "branch":
            if out.sum() > 0:  # branch
                return out
            return -out
        if body == "mask":
            return out[out > 0]  # mask
        if body == "backward":
            out.sum().backward()  # backward
            return out
        raise KeyError("mine")  # bug

    with pytest.raises(CaptureError, match=message) as error:
        trace(support.MLP(4, 4), step, X, dynamic=dynamic)
    assert line_of(error) == line


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (lambda model, x, y: model(x), r"must return a loss of one .* got torch.float32 of shape \(3, 4\)"),
        (lambda model, x, y: None, "got NoneType"),
        (lambda model, x, y: (model(x).sum(), [1]), "mapping of names"),
        (lambda model, x, y: (model(x).sum(), {"a": "b"}), "'a' must be a tensor or a number"),
        (lambda model, x, y: x.sum(), "does not depend on any trainable parameter"),
    ],
)
def test_what_train_fn_must_return(step: Any, message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        trace(support.MLP(4, 4), step, X)


def test_a_trainable_tensor_from_elsewhere_is_refused() -> None:
    stranger = nn.Parameter(torch.ones(4))
    with pytest.raises(CaptureError, match="no parameter of the model"):
        trace(support.MLP(4, 4), lambda model, x, y: (model(x) * stranger).sum(), X)


def test_a_model_without_trainable_parameters_is_refused() -> None:
    with pytest.raises(CaptureError, match="no parameter of the model is trainable"):
        trace(support.MLP(4, 4).requires_grad_(False), support.mse_loss, X)


class Remembers(nn.Module):
    """Has tensors of its own that are neither parameters nor buffers."""

    def __init__(self, *, in_place: bool) -> None:
        super().__init__()
        self.linear, self.in_place = nn.Linear(4, 3), in_place
        self.count, self.last = torch.zeros(3), torch.zeros(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.in_place:
            self.count += 1
        else:
            self.count = self.count + 1
        self.last = x.detach()  # which nothing reads
        return self.linear(x) * self.count


def test_a_tensor_of_the_model_is_written_as_in_eager_and_capture_does_not_touch_it() -> None:
    """The capture itself counted too."""
    model, inputs = support.seeded(lambda: Remembers(in_place=True)), support.pair((4, 3), rank=0)
    reference = copy.deepcopy(model)
    joint = trace(model, support.mse_loss, inputs)
    assert torch.equal(model.count, torch.zeros(3))
    for _ in range(2):
        loss, *_ = run(joint, model, inputs)
        assert loss == support.mse_loss(reference, **inputs)
    assert torch.equal(model.count, reference.count)


@pytest.mark.parametrize("kind", ["number", "tensor", "part", "out"])
def test_a_tensor_from_elsewhere_is_written_as_in_eager_and_capture_does_not_touch_it(kind: str) -> None:
    """The capture itself counted too, where nothing but a number was added."""
    total, part, model = torch.zeros(3), torch.ones(3), support.seeded(lambda: nn.Linear(4, 3))

    def step(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if kind == "out":
            torch.add(part, 1, out=total)
        else:
            (total[1:] if kind == "part" else total).mul_(3).add_(torch.tensor(2.0) if kind == "tensor" else 2)
        return (model(x) * total - y).square().mean()

    inputs = support.pair((4, 3), rank=0)
    joint = trace(model, step, inputs)
    assert torch.equal(total, torch.zeros(3))
    losses = [run(joint, model, inputs)[0] for _ in range(2)]
    written = total.clone()
    total.zero_()
    assert losses == [step(model, **inputs) for _ in range(2)]
    assert torch.equal(total, written)


def test_a_tensor_of_the_model_that_a_step_replaces_after_reading_it_is_refused() -> None:
    """It stayed what it was in the capture, in every step."""
    model = Remembers(in_place=False)
    with pytest.raises(CaptureError, match=r"reads the tensor count of the model, .*register_buffer\('count', …\)"):
        trace(model, support.mse_loss, support.pair((4, 3), rank=0))
    assert torch.equal(model.count, torch.zeros(3))


def test_a_device_that_is_not_there_is_refused() -> None:
    """It ended the process."""
    with pytest.raises(ConfigError, match="device 'cuda' is not available here"):
        trace(support.MLP(4, 3), support.mse_loss, support.pair((4, 3), rank=0), device="cuda")


@pytest.mark.parametrize("waits", [False, True])
def test_reentrant_checkpoints_are_refused_by_module(waits: bool) -> None:
    """Where their input waits for no gradient of the model's, the parameters within had none, without a word."""

    class Folded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.inner = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.clone().requires_grad_() if waits else self.first(x)
            return checkpoint(self.inner, x, use_reentrant=True)

    def step(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(model.folded(x), y)

    model = nn.ModuleDict({"folded": Folded()})
    with pytest.raises(CaptureError, match=r"checkpointing in folded has use_reentrant=True.* use_reentrant=False"):
        trace(model, step, X)


@pytest.mark.parametrize("ranks", [1, 2])
def test_sparse_gradients_are_refused_by_name(ranks: int) -> None:
    """On several ranks a pass failed with "Cannot access storage of SparseTensorImpl", on one the first step did."""
    model = nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Linear(4, 1))
    with fake_world(ranks), pytest.raises(CaptureError, match=r"the gradient of 0.weight is sparse .* sparse=False"):
        GraphCompiler(model, lambda model, x: model(x).mean()).compile(x=torch.tensor([0, 3]))
