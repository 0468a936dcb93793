"""The whole: pieces of a model, a schedule and a world."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional

import stepwell
import stepwell_stage
from stepwell.exceptions import PipelineError
from stepwell_meta.testing import WorkerPool
from stepwell_p2p import C10dTransport
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


@dataclasses.dataclass
class Normalised:
    h: torch.Tensor

    def __post_init__(self) -> None:
        self.h = self.h / 2


class Makes(nn.Linear):
    def forward(self, x: torch.Tensor) -> Normalised:
        return Normalised(super().forward(x))


class Takes(nn.Linear):
    def forward(self, value: Normalised) -> torch.Tensor:
        return super().forward(value.h)


def test_a_dataclass_that_changes_its_fields_crosses_stages_as_it_is() -> None:
    """Its ``__post_init__`` ran once more on the stage that received it: half the activation, another loss, no error."""
    torch.manual_seed(0)
    layers = [Makes(4, 4), Takes(4, 4)]

    def main(world: stepwell.World) -> Any:
        pipe = stepwell.pipeline(layers, world, loss_fn=functional.mse_loss, microbatches=1)
        return pipe.step(X, target=Y).loss, [parameter.grad.clone() for parameter in pipe.parameters()]

    results = stepwell.launch(main, ranks=2)
    model = nn.Sequential(*layers)
    model.zero_grad()
    loss = functional.mse_loss(model(X), Y)
    loss.backward()
    assert [found for found, _ in results] == [loss.item()] * 2
    grads = [grad for _, part in results for grad in part]
    assert all(map(torch.equal, grads, [parameter.grad for parameter in model.parameters()]))


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


def one_rank(model: Any = None, **options: Any) -> stepwell.Pipeline:
    layers = pieces() if model is None else model
    (pipe,) = stepwell.launch(
        lambda world: stepwell.pipeline(layers, world, **({"loss_fn": functional.mse_loss} | options))
    )
    return pipe


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"schedule": "2f2b"}, "unknown schedule '2f2b'; known are gpipe, 1f1b"),
        ({"schedule": gpipe}, r"a name or a Schedule, such as one_f_one_b\(1, 8\), got a function"),
        ({"schedule": gpipe(1, 2), "microbatches": 3}, "made for 2 microbatches, but microbatches=3"),
        ({"schedule": gpipe(2, 2)}, "made for 2 ranks, but there are 1"),
        ({"init_fn": initialise}, "init_fn is for a whole model; give pieces as functions"),  # nobody called it
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(PipelineError, match=words):
        one_rank(**options)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ([nn.Tanh(), 3], "piece 1 must be a module, or a function that makes one, but it is 3"),
        ([nn.Tanh(), lambda: None], "piece 1 must be a module, or a function that makes one, but it made None"),
        ((nn.Tanh() for _ in range(2)), "must be a module or a list of modules, got generator: make a list of it"),
    ],
)
def test_what_is_no_piece_is_refused(wrong: Any, words: str) -> None:
    """A function that returned None, because it changes its layer in place, was a layer that did nothing."""
    with pytest.raises(PipelineError, match=words):
        one_rank(wrong)


def test_fewer_pieces_than_stages_are_refused() -> None:
    with pytest.raises(PipelineError, match="on 3 ranks has 3 stages, but the model has 2 pieces"):
        stepwell.launch(lambda world: stepwell.pipeline(pieces(2), world, loss_fn=functional.mse_loss), ranks=3)


def test_pieces_of_different_stages_that_share_a_parameter_are_refused() -> None:
    """As threads two ranks wrote one ``.grad`` at a time, and as processes the copies drifted apart, without a word."""
    first, *rest = pieces(4)
    tied = nn.Linear(4, 4)
    tied.weight = first.weight
    for last in (first, nn.Sequential(tied)):
        with pytest.raises(
            PipelineError, match=r"pieces 0 and 4 share a parameter \(weight and (0\.)?weight\), but run on"
        ):
            stepwell.launch(
                lambda world, last=last: stepwell.pipeline([first, *rest, last], world, loss_fn=functional.mse_loss),
                ranks=2,
            )
    # On one stage they are as good as in one process.
    (pipe,) = stepwell.launch(lambda world: stepwell.pipeline([first, *rest, tied], world, loss_fn=functional.mse_loss))
    pipe.step(X, target=Y)
    model = nn.Sequential(first, *rest, tied)
    seen = first.weight.grad.clone()
    first.weight.grad = None
    functional.mse_loss(model(X), Y).backward()
    assert torch.equal(seen, first.weight.grad)


def gather_on_1(world: stepwell.World) -> list[dict[str, torch.Tensor]] | None:
    mine = torch.ones(2) * world.rank
    gathered = stepwell.gather(world.transport, {"mine": mine}, to=1)
    mine += 100  # as the next optimizer step does
    return gathered


def test_what_was_gathered_stays_as_it_was() -> None:
    """The gathering rank's own tensors were the live ones, and changed in the result with the next step."""
    nothing, gathered = stepwell.launch(gather_on_1, ranks=2)
    assert nothing is None
    assert [part["mine"].tolist() for part in gathered] == [[0, 0], [1, 1]]


def test_gathering_on_a_rank_that_is_not_there_is_refused() -> None:
    with pytest.raises(PipelineError, match="there are ranks 0 to 1 to gather on, got to=2"):
        stepwell.launch(lambda world: stepwell.gather(world.transport, {}, to=2), ranks=2)


def test_what_is_no_tensor_is_not_gathered() -> None:
    """A loss as a number ended in an AttributeError."""
    with pytest.raises(PipelineError, match="'loss' is no tensor, but a float"):
        stepwell.launch(lambda world: stepwell.gather(world.transport, {"loss": 0.5}, to=0), ranks=2)  # type: ignore[dict-item]


def gather_shards() -> str:
    mesh = DeviceMesh("cpu", [0, 1])
    transport = C10dTransport()
    shard = DTensor.from_local(torch.ones(2), mesh, [Shard(0)], run_check=False)
    with pytest.raises(PipelineError) as caught:
        stepwell.gather(transport, {"weight": shard}, to=0)
    gathered = stepwell.gather(transport, {"weight": shard.to_local()}, to=0)
    transport.close()
    assert gathered is None or [len(part["weight"]) for part in gathered] == [2, 2]
    return str(caught.value)


def test_gathering_dtensors_says_what_to_gather_instead(workers: WorkerPool) -> None:
    """It failed deep in the transport, without the tensor's name."""
    words = "'weight' is a DTensor, of which each rank holds a part: gather its to_local(), or its full_tensor()"
    assert workers.run(gather_shards, 2) == [words] * 2


def test_a_timeline_needs_a_trace() -> None:
    with pytest.raises(PipelineError, match="pass trace=True"):
        one_rank().timeline()


class Residual(nn.Module):
    """A model that is no row of layers: what the first layer makes is used again after the last."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        kept = x = self.layers[0](x)
        for layer in list(self.layers)[1:]:
            x = layer(x).tanh()
        return x + kept * scale


@pytest.mark.parametrize("inputs", ["every", "first"])
def test_a_model_that_was_cut(inputs: Any) -> None:
    def main(world: stepwell.World) -> Any:
        cut = stepwell_stage.split(models[world.rank], 2, example=x[:2], inputs=inputs)
        pipe = stepwell.pipeline(cut, world, loss_fn=functional.mse_loss, microbatches=3)
        return pipe.step(x, target=y).loss, {n: p.grad for n, p in pipe.named_parameters()}, pipe.eval(x).outputs

    x, y = X.double(), Y.double()
    models = [Residual().double() for _ in range(2)]
    model = Residual().double()
    results = stepwell.launch(main, ranks=2)
    loss = functional.mse_loss(model(x), y)
    loss.backward()
    assert [one for one, _, _ in results] == [pytest.approx(loss.item(), rel=1e-14)] * 2
    grads = {name: grad for _, mine, _ in results for name, grad in mine.items()}
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(grads[name], parameter.grad, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(results[1][2], model(x).detach(), rtol=1e-12, atol=1e-14)


def sums(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return functional.mse_loss(output, target, reduction="sum")


@pytest.mark.parametrize("is_cut", [False, True])
def test_batches_in_microbatches_of_ones_own(is_cut: bool) -> None:
    """A cut model asked for inputs that were given in microbatches."""

    def main(world: stepwell.World) -> Any:
        whole = models[world.rank]
        pieces = stepwell_stage.split(whole, 2, example=x[:2]) if is_cut else nn.Sequential(*whole.layers)
        pipe = stepwell.pipeline(pieces, world, loss_fn=sums, microbatches=3, loss_weights="sum")
        done = pipe.step(arg_mbs=[(part,) for part in parts], target_mbs=targets).loss
        seen = pipe.eval(arg_mbs=[(part,) for part in parts]).outputs
        if is_cut:
            with pytest.raises(PipelineError, match="some inputs are given whole"):
                pipe.step(x, kwarg_mbs=[{}] * 3)
            with pytest.raises(PipelineError, match="arg_mbs has 3 microbatches, kwarg_mbs 2"):
                pipe.step(arg_mbs=[(part,) for part in parts], kwarg_mbs=[{}] * 2)
            named = [{"x": part, "scale": 1.0} for part in parts]
            assert pipe.step(kwarg_mbs=named, target_mbs=targets).loss == done
        return done, seen

    x, y = X.double(), Y.double()
    sizes = [1, len(x) - 3, 2]
    parts, targets = x.split(sizes), y.split(sizes)
    models, model = [Residual().double() for _ in range(2)], Residual().double()
    plain = model if is_cut else nn.Sequential(*model.layers)
    results = stepwell.launch(main, ranks=2)
    assert [one for one, _ in results] == [pytest.approx(sums(plain(x), y).item(), rel=1e-14)] * 2
    torch.testing.assert_close(results[1][1], plain(x).detach(), rtol=1e-12, atol=1e-14)
