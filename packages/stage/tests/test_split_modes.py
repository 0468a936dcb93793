"""Forwards that go other ways in training than in evaluation, on processes, or on the meta device."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from split_support import Block, Inputs, Vision, loss_of, make, numbers, on_rank, plain, seen, words
from stage_support import Threads
from torch import Tensor, nn

from stepwell_meta.exceptions import StepwellError
from stepwell_meta.testing import WorkerPool
from stepwell_p2p import C10dTransport, Transport
from stepwell_stage import Executor, schedules, split, tie


def evaluated(transport: Transport, model: nn.Module, steps: Sequence[Sequence[Inputs]]) -> list[Any]:
    schedule = schedules.one_f_one_b(transport.size, 2)
    cut = split(model, transport.size, example=words(0), ways=[seen(0), {"ids": words(0)["ids"]}])
    executor = Executor(cut.stages(schedule.placement, transport.rank, "cpu", transport=transport), schedule, loss_of)
    tie(executor, cut.tied)
    executor.step(kwarg_mbs=[dict(part) for part in steps[0]], return_outputs=False)
    return [executor.eval(kwarg_mbs=[dict(part) for part in step]) for step in steps]


def test_evaluation_goes_its_own_ways(threads: Callable[..., Any]) -> None:
    """Trained with labels, evaluated with and without; a batch of images and one of words alone."""
    steps = [[words(1), words(2)], [seen(3), seen(4)], [{"ids": words(5)["ids"]}, {"ids": words(6, 1)["ids"]}]]
    model = make(Vision)
    models = [copy.deepcopy(model) for _ in range(3)]
    found = threads(lambda transport: evaluated(transport, models[transport.rank], steps), 3)
    for step, outputs in zip(steps, found[2], strict=True):
        wanted = torch.cat([model(**part)["scores"] for part in step])
        torch.testing.assert_close(outputs["scores"], wanted, rtol=1e-12, atol=1e-12)


def on_gloo(name: str, ranks: int) -> dict[str, float]:
    transport = C10dTransport()
    steps = [[words(1, 3), seen(2, 2), words(3, 1)], [seen(4), seen(5), seen(6)], [words(7), words(8), words(9)]]
    _, wanted = plain(make(Vision), steps)
    schedule = schedules.BY_NAME[name](ranks, 3)
    cut = split(make(Vision), schedule.placement.num_stages, example=words(0), ways=[seen(0)])
    _, grads = on_rank(transport, cut, steps, schedule, "static")
    transport.close()
    found = {}
    for key, grad in grads.items():
        expected = wanted[key]
        assert (grad is None) == (expected is None)
        if grad is not None and expected is not None:
            found[key] = float((grad - expected).abs().max())
    return found


def test_on_processes(workers: WorkerPool) -> None:
    for name, ranks in (("1f1b", 4), ("zbv", 2)):
        found = {key: value for one in workers.run(on_gloo, ranks, name, ranks) for key, value in one.items()}
        assert dict(make(Vision).named_parameters()).keys() <= found.keys()
        assert max(found.values()) < 1e-12


def test_a_model_on_the_meta_device(threads: Callable[..., Any]) -> None:
    model = make(Vision)
    steps = [[words(1), seen(2)]]
    losses, grads = plain(model, steps)
    values = model.state_dict()

    def one(transport: Transport) -> tuple[list[float], dict[str, Tensor | None]]:
        with torch.device("meta"):
            empty = Vision().double()
        schedule = schedules.one_f_one_b(transport.size, 2)
        cut = split(empty, transport.size, example=words(0), ways=[seen(0)])

        def init(part: nn.Module) -> None:
            part.load_state_dict({name: values[name] for name in part.state_dict()})

        stages = cut.stages(schedule.placement, transport.rank, "cpu", transport=transport, init_fn=init)
        executor = Executor(stages, schedule, loss_of)
        tie(executor, cut.tied)
        executor.step(kwarg_mbs=steps[0], return_outputs=False)
        assert isinstance(stages[0].submodule, nn.Module)
        mine = {name: parameter.grad for name, parameter in stages[0].submodule.named_parameters()}
        return [] if executor.loss is None else [executor.loss.item()], mine

    found = threads(one, 3)
    assert [mine for mine, _ in found if mine] == [[pytest.approx(loss, rel=1e-12) for loss in losses]]
    for name, grad in {name: grad for _, mine in found for name, grad in mine.items()}.items():
        torch.testing.assert_close(grad, grads[name], rtol=1e-10, atol=1e-13)


class Modes(nn.Module):
    """A head for training alone, which takes an early value; for evaluation alone a norm of results, and another value."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.early, self.polish = nn.Linear(8, 3), nn.LayerNorm(3)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        made = []
        for block in self.blocks:
            x = block(x)
            made.append(x)
        return self.head(x) + self.early(made[0]) if self.training else self.polish(self.head(x) * made[1].mean())


@pytest.mark.parametrize("inputs", ["every", "first"])
@pytest.mark.parametrize("training", [True, False])
def test_training_and_evaluation_may_go_ways_of_their_own(threads: Threads, training: bool, inputs: Any) -> None:
    """One example shows both: the mode that the model was not in was refused when it came."""
    model, x = make(Modes).train(training), numbers(0, 6)
    whole, schedule = copy.deepcopy(model), schedules.interleaved_1f1b(2, 3)
    cut = split(model, 4, example=x[:2], inputs=inputs)
    assert (" in the example in evaluation" in cut.describe()) == training  # the mean is for evaluation

    def on_rank(transport: Transport) -> tuple[float | None, Tensor | None]:
        stages = cut.stages(schedule.placement, transport.rank, "cpu", transport=transport)
        executor = Executor(stages, schedule, loss_of)
        given = {"x": x} if inputs == "every" or executor.is_first else {}
        for mode in (True, False, True):
            for stage in stages:
                assert isinstance(stage.submodule, nn.Module)
                stage.submodule.train(mode)
            if mode:
                executor.step(**given, return_outputs=False)
            else:
                seen = executor.eval(**given)
        return executor.loss.item() if executor.loss is not None else None, seen

    results = threads(on_rank, 2)
    for _ in range(2):
        losses = [loss_of(whole.train()(part)) for part in x.tensor_split(3)]
        (sum(losses) / 3).backward()
    assert results[1][0] == pytest.approx(sum(loss.item() for loss in losses) / 3, rel=1e-12)
    torch.testing.assert_close(results[1][1], torch.cat([whole.eval()(part) for part in x.tensor_split(3)]).detach())
    for (name, mine), plain_one in zip(model.named_parameters(), whole.parameters(), strict=True):
        assert (mine.grad is None) == (plain_one.grad is None), name
        if mine.grad is not None:
            torch.testing.assert_close(mine.grad, plain_one.grad, rtol=1e-10, atol=1e-12)


def test_a_mode_that_cannot_be_cut_does_not_keep_the_other_from_it(threads: Threads) -> None:
    """In evaluation the layers run backwards, which would send values to earlier stages."""

    class Backwards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks if self.training else reversed(self.blocks):
                x = block(x) * (1 if self.training else torch.ones(()))
            return x

    model, x, schedule = make(Backwards), numbers(0, 4), schedules.one_f_one_b(2, 2)
    cut = split(model, {"blocks.0": 0, "blocks.1": 1}, example=x)

    def on_rank(transport: Transport) -> float | None:
        stages = cut.stages(schedule.placement, transport.rank, "cpu", transport=transport)
        executor = Executor(stages, schedule, loss_of)
        executor.step(x=x, return_outputs=False)
        loss = None if executor.loss is None else executor.loss.item()
        for stage in stages:
            assert isinstance(stage.submodule, nn.Module)
            stage.submodule.eval()
        with pytest.raises(StepwellError, match=r"another way than with the example"):
            executor.eval(x=x)
        return loss

    losses = threads(on_rank, 2)
    assert losses[1] == pytest.approx(sum(loss_of(model(part)).item() for part in x.tensor_split(2)) / 2, rel=1e-12)
