"""The whole: pieces of a model, a schedule and a world."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import stepwell
from stepwell.exceptions import PipelineError
from stepwell_stage.schedules import gpipe


def pieces(count: int = 5) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(4, 4) for _ in range(count)]


X, Y = torch.linspace(-1, 1, 36).reshape(9, 4), torch.linspace(1, 0, 36).reshape(9, 4)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_pieces_are_spread_and_the_loss_is_known_everywhere(ranks: int, schedule: str) -> None:
    def main(world: stepwell.World) -> Any:
        pipe = stepwell.pipeline(
            layers, world, loss_fn=functional.mse_loss, schedule=schedule, microbatches=4, trace=True
        )
        trained = pipe.step(X, target=Y)
        timeline = pipe.timeline()
        judged = pipe.eval(X, target=Y)
        return trained, judged, pipe.eval(X), {n: p.grad for n, p in pipe.named_parameters()}, timeline

    layers = pieces()
    results = stepwell.launch(main, ranks=ranks)
    model = nn.Sequential(*pieces())
    losses = []
    for part, target in zip(X.tensor_split(4), Y.tensor_split(4), strict=True):
        loss = functional.mse_loss(model(part), target)
        losses.append(loss.double().item() * (len(part) / 9))
        (loss * (len(part) / 9)).backward()
    for rank, (trained, judged, plain, _, timeline) in enumerate(results):
        assert trained.loss == pytest.approx(sum(losses), rel=1e-15)
        assert judged.loss == trained.loss
        assert plain.loss is None
        assert trained.outputs is None
        assert (judged.outputs is not None) == (timeline is not None) == (rank == ranks - 1)
    grads = {name: grad for result in results for name, grad in result[3].items()}
    assert list(grads) == [name for name, _ in model.named_parameters()]
    assert all(torch.equal(grads[name], p.grad) for name, p in model.named_parameters())
    with torch.no_grad():
        assert torch.equal(results[-1][1].outputs, torch.cat([model(part) for part in X.tensor_split(4)]))
    timeline = results[-1][4]
    assert timeline.num_ranks == ranks
    assert sum(event.action.kind.is_compute for event in timeline.events) == 2 * 4 * ranks
    assert 0 <= timeline.bubble < 1


class Tied(nn.Module):
    """A model whose forward is cut: its last layer's weight is its first one's."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.last = nn.Linear(4, 4)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x).tanh()
        return self.last(x)


def initialise(model: nn.Module) -> None:
    for name, parameter in model.named_parameters(remove_duplicate=False):
        generator = torch.Generator().manual_seed(sum(map(ord, name.replace("last.w", "first.w"))))
        nn.init.uniform_(parameter, -1, 1, generator=generator)


def test_a_whole_model_is_cut_and_stays_tied() -> None:
    def main(world: stepwell.World) -> Any:
        with torch.device("meta"):
            model = Tied()
        pipe = stepwell.pipeline(model, world, loss_fn=functional.mse_loss, microbatches=3, init_fn=initialise)
        loss = pipe.step(X, target=Y).loss
        return loss, {name: parameter.grad for name, parameter in pipe.named_parameters()}

    results = stepwell.launch(main, ranks=3)
    model = Tied()
    initialise(model)
    loss = functional.mse_loss(model(X), Y)
    loss.backward()
    for found, grads in results:
        assert found == pytest.approx(loss.item())
        for name, grad in grads.items():
            torch.testing.assert_close(grad, model.get_parameter(name).grad)
    assert {name for _, grads in results for name in grads} >= {name for name, _ in model.named_parameters()}


def test_a_piece_may_be_a_function_called_only_where_it_runs() -> None:
    made: list[tuple[int, int]] = []

    def main(world: stepwell.World) -> float | None:
        def make(number: int) -> Callable[[], nn.Module]:
            def piece() -> nn.Module:
                made.append((world.rank, number))
                return nn.Linear(4, 4)

            return piece

        pipe = stepwell.pipeline([make(number) for number in range(4)], world, loss_fn=functional.mse_loss)
        return pipe.step(X[:8], target=Y[:8]).loss

    losses = stepwell.launch(main, ranks=2)
    assert losses[0] == losses[1]
    assert sorted(made) == [(0, 0), (0, 1), (1, 2), (1, 3)]


def test_modes_of_modules() -> None:
    def main(world: stepwell.World) -> list[bool]:
        pipe = stepwell.pipeline([nn.Dropout(), nn.Dropout()], world, loss_fn=functional.mse_loss)
        pipe.train(mode=False)
        off = [module.training for stage in pipe.executor.stages for module in stage.submodule.modules()]
        pipe.train()
        return [any(off), *(stage.submodule.training for stage in pipe.executor.stages)]

    assert stepwell.launch(main, ranks=2) == [[False, True]] * 2


def one_rank(**options: Any) -> stepwell.Pipeline:
    (pipe,) = stepwell.launch(
        lambda world: stepwell.pipeline(pieces(), world, **({"loss_fn": functional.mse_loss} | options))
    )
    return pipe


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"schedule": "2f2b"}, "unknown schedule '2f2b'; known are gpipe, 1f1b"),
        ({"schedule": gpipe(1, 2), "microbatches": 3}, "made for 2 microbatches, but microbatches=3"),
        ({"schedule": gpipe(2, 2)}, "made for 2 ranks, but there are 1"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(PipelineError, match=words):
        one_rank(**options)


def test_fewer_pieces_than_stages_are_refused() -> None:
    with pytest.raises(PipelineError, match="on 3 ranks has 3 stages, but the model has 2 pieces"):
        stepwell.launch(lambda world: stepwell.pipeline(pieces(2), world, loss_fn=functional.mse_loss), ranks=3)


def test_a_timeline_needs_a_trace() -> None:
    with pytest.raises(PipelineError, match="pass trace=True"):
        one_rank().timeline()
