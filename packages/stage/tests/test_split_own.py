"""What a model is and does beside its forward, on stages that hold a part of it."""

from __future__ import annotations

import pytest
import torch
from stage_support import Threads, numbers, seeded
from torch import Tensor, nn
from torch.nn import functional

from stepwell_meta.testing import WorkerPool
from stepwell_p2p import C10dTransport, Transport
from stepwell_stage import Executor, schedules, split, tie
from stepwell_stage.exceptions import StageUsageError


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.norm(self.linear(x))
        return made


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(seeded(*(Layer() for _ in range(4))))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


class Frozen(Model):
    """Never trains the statistics of its first and its last layer, as detection models do with those of their backbone."""

    def train(self, mode: bool = True) -> Frozen:
        super().train(mode)
        self.layers[0].eval()
        self.layers[3].norm.eval()  # type: ignore[operator, union-attr]
        return self


X = numbers(6, 4)


def test_a_model_that_goes_into_training_its_own_way(threads: Threads) -> None:
    """Its ``train`` named a module of another stage, where there is None: an AttributeError, on the ranks of the other stages."""
    plain = Frozen().train()
    for part in X.chunk(2):
        plain(part).backward()
    plain.eval()
    plain.train()

    def rank(transport: Transport) -> dict[str, Tensor]:
        schedule = schedules.gpipe(2, 2)
        cut = split(Frozen().train(), 2, example=X[:3])
        stages = cut.stages(schedule.placement, transport.rank, "cpu", transport=transport)
        executor = Executor(stages, schedule, lambda loss: loss)
        for mode in (False, True):
            stages[0].submodule.train(mode)
        executor.step(x=X, return_outputs=False)
        return {name: buffer.clone() for name, buffer in stages[0].submodule.named_buffers()}

    found: dict[str, Tensor] = {}
    for buffers in threads(rank, 2):
        found |= buffers
    assert found.keys() == dict(plain.named_buffers()).keys()
    for name, buffer in plain.named_buffers():
        assert torch.equal(found[name], buffer), name
    assert not found["layers.0.norm.running_mean"].any()
    assert found["layers.1.norm.running_mean"].any()


def test_tensors_that_are_to_learn_and_are_no_parameters() -> None:
    """Each stage would have copied them: the caller's tensor got no gradient, and each copy a part of it."""
    model = Model()
    model.scale = torch.ones(4, requires_grad=True)
    with pytest.raises(StageUsageError, match=r"'scale' requires a gradient and is not registered, .* an nn.Parameter"):
        split(model, 2, example=X)
    model = Model()
    model.more = {"late": [nn.Linear(4, 4)]}  # type: ignore[assignment]
    with pytest.raises(StageUsageError, match=r"'more\.late\.0\.weight' requires .* nn.ModuleList"):
        split(model, 2, example=X)
    model.more["late"][0].requires_grad_(False)  # type: ignore[index, operator]
    split(model, 2, example=X)


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_on_the_gradient_of_what_several_stages_use(kind: str) -> None:
    """Each stage has a part of its gradient: a hook that clipped the whole clipped the first stage's part alone."""

    class Tied(Model):
        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return functional.linear(x, self.layers[0].linear.weight).square().mean()  # type: ignore[union-attr, arg-type]

    model = Tied()
    getattr(model.layers[1].linear.weight, kind)(lambda grad: None)  # on one stage: as in one process
    split(model, 2, example=X)
    getattr(model.layers[0].linear.weight, kind)(lambda grad: None)
    with pytest.raises(
        StageUsageError, match=r"'layers\.0\.linear\.weight' is used on stages 0, 1, .* change the gradient"
    ):
        split(model, 2, example=X)


class Head(Model):
    """Its first layer's weight is read once more at its end."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        weight: Tensor = self.layers[0].linear.weight  # type: ignore[union-attr, assignment]
        return functional.linear(x * torch.ones(4), weight).square().mean()


def learn() -> dict[str, Tensor]:
    """What this rank's stage holds after three steps of an optimizer of the model's own parameters."""
    schedule = schedules.one_f_one_b(2, 2)
    model, transport = Head(), C10dTransport()
    cut = split(model, 2, example=X[:3])
    stages = cut.stages(schedule.placement, transport.rank, "cpu", transport=transport)
    executor = Executor(stages, schedule, lambda loss: loss)
    tie(executor, cut.tied)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        executor.step(x=X, return_outputs=False)
        optimizer.step()
        optimizer.zero_grad()
    transport.close()
    return {name: parameter.detach() for name, parameter in stages[0].submodule.named_parameters()}


def test_an_optimizer_of_the_models_own_parameters(workers: WorkerPool) -> None:
    """A rank had a copy of a tied weight, also where no other rank shares its process: none of its optimizer's, so it stayed."""
    plain = Head()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        for part in X.chunk(2):
            (plain(part) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    found = workers.run(learn, 2)
    assert "layers.0.linear.weight" in found[0].keys() & found[1].keys()
    for mine in found:
        for name, value in mine.items():
            torch.testing.assert_close(value, plain.get_parameter(name))
