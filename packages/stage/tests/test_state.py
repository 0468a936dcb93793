"""State under the names of the whole model: saved on four stages, loaded on two, on one, and in another placement."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.nn import functional

from stepwell_meta.testing import WorkerPool
from stepwell_p2p import C10dTransport, Placement, Transport
from stepwell_stage import (
    Action,
    Executor,
    Kind,
    PipelineStage,
    Schedule,
    load_optimizer_state_dict,
    load_state_dict,
    optimizer_state_dict,
    state_dict,
    tie,
)
from stepwell_stage.exceptions import StageUsageError
from stepwell_stage.schedules import gpipe

Threads = Callable[..., list[Any]]
WIDTH = 4


class Layer(nn.Module):
    """A layer with a parameter, a buffer that changes, and one that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.linear(x).tanh()


class Model(nn.Module):
    """The whole model, as one process has it."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.head = nn.Linear(WIDTH, WIDTH)
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -1, 1, generator=generator)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def parts(seed: int) -> tuple[list[nn.Module], list[str]]:
    model = Model(seed)
    return [model.embed, *model.layers, model.head], ["embed", *(f"layers.{i}" for i in range(4)), "head"]


def place(transport: Transport, placement: Placement, seed: int) -> tuple[Executor, torch.optim.Optimizer]:
    """This rank's stages, each a Sequential that says what its pieces are in the whole model."""
    pieces, names = parts(seed)
    count = placement.num_stages
    stages = []
    for s in placement.stages_of(transport.rank):
        own = range(len(pieces) * s // count, len(pieces) * (s + 1) // count)
        known = {str(place): names[index] for place, index in enumerate(own)}
        stages.append(PipelineStage(nn.Sequential(*(pieces[i] for i in own)), s, count, "cpu", names=known))
    executor = Executor(stages, filled(placement), functional.mse_loss, transport=transport)
    return executor, torch.optim.AdamW(executor.parameters(), 0.05, weight_decay=0.1)


def filled(placement: Placement) -> Schedule:
    """All forwards, then all backwards, of two microbatches, on any placement."""
    rows = []
    for rank in range(placement.num_ranks):
        own = placement.stages_of(rank)
        forwards = [Action(stage, Kind.F, m) for stage in own for m in range(2)]
        rows.append((*forwards, *(Action(stage, Kind.B, m) for stage in reversed(own) for m in range(2))))
    return Schedule("filled", placement, 2, tuple(rows))


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(4, WIDTH, generator=generator), torch.randn(4, WIDTH, generator=generator)


def train(executor: Executor, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        x, y = batch(step)
        executor.step(*((x,) if executor.is_first else ()), target=y if executor.is_last else None)
        optimizer.step()
        optimizer.zero_grad()


def train_plain(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        x, y = batch(step)
        for part, target in zip(x.tensor_split(2), y.tensor_split(2), strict=True):
            (functional.mse_loss(model(part), target) * 0.5).backward()
        optimizer.step()
        optimizer.zero_grad()


def resume(transport: Transport, placement: Placement, path: str) -> dict[str, Any]:
    """Load into a model that began otherwise, go on training, and give the parameters."""
    executor, optimizer = place(transport, placement, seed=7)
    state = {"model": state_dict(executor), "optimizer": optimizer_state_dict(executor, optimizer)}
    assert not optimizer.state, "what is there to load into is not the optimizer's"
    with quiet():
        dcp.load(state, checkpoint_id=path)
    load_state_dict(executor, state["model"])
    load_optimizer_state_dict(executor, optimizer, state["optimizer"])
    train(executor, optimizer, range(3, 5))
    return state_dict(executor)


@pytest.fixture
def expected() -> dict[str, torch.Tensor]:
    """Of the one-process model that never stopped."""
    model = Model(0)
    train_plain(model, torch.optim.AdamW(model.parameters(), 0.05, weight_decay=0.1), range(5))
    return model.state_dict()


class quiet(warnings.catch_warnings):
    """DCP says each time that there is no process group, and gloo's collectives that torch may change them."""

    def __enter__(self) -> Any:
        result = super().__enter__()
        warnings.simplefilter("ignore")
        return result


def assert_same(found: dict[str, Any], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.fixture
def saved(workers: WorkerPool, tmp_path: Path) -> str:
    """A checkpoint of four stages on four gloo ranks after three steps."""

    def save(path: str) -> None:
        transport = C10dTransport()
        executor, optimizer = place(transport, Placement.loop(4, 4), seed=0)
        train(executor, optimizer, range(3))
        state = {"model": state_dict(executor), "optimizer": optimizer_state_dict(executor, optimizer)}
        with quiet():
            dcp.save(state, checkpoint_id=path)

    workers.run(save, 4, str(tmp_path), deadline=40)
    return str(tmp_path)


def test_p158_p159_saved_on_four_stages_goes_on_on_two_and_one_and_elsewhere(
    workers: WorkerPool, saved: str, expected: dict[str, torch.Tensor]
) -> None:
    """To the last bit what the one-process model is that never stopped: parameters, buffers and the optimizer."""

    def on_gloo(placement: Placement, path: str) -> dict[str, Any]:
        return resume(C10dTransport(), placement, path)

    for placement in (Placement.loop(2, 2), Placement.v(4, 2), Placement.custom((1, 0, 1))):
        results = workers.run(on_gloo, placement.num_ranks, placement, saved, deadline=40)
        found: dict[str, Any] = {}
        for result in results:
            assert not found.keys() & result.keys()  # P158: disjoint
            found |= result
        assert_same(found, expected)

    model = Model(5)
    with quiet():
        optimizer = torch.optim.AdamW(model.parameters(), 0.05, weight_decay=0.1)
        options = StateDictOptions(flatten_optimizer_state_dict=True)
        state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer, options=options)}
        dcp.load(state, checkpoint_id=saved)
        set_optimizer_state_dict(model, optimizer, state["optimizer"], options=options)
    train_plain(model, optimizer, range(3, 5))
    assert_same(model.state_dict(), expected)


def test_without_process_group_one_rank_saves_and_every_rank_loads(
    threads: Threads, tmp_path: Path, expected: dict[str, torch.Tensor]
) -> None:
    path = str(tmp_path)

    def save(transport: Transport) -> list[str]:
        executor, optimizer = place(transport, Placement.v(4, 2), seed=0)
        train(executor, optimizer, range(3))
        state = {"model": state_dict(executor, to=1), "optimizer": optimizer_state_dict(executor, optimizer, to=1)}
        if transport.rank == 1:
            dcp.save(state, checkpoint_id=path, no_dist=True)
        return sorted(state["model"])

    with quiet():
        elsewhere, names = threads(save, 2)
        assert elsewhere == []
        assert names == sorted(expected)
        results = threads(lambda transport: resume(transport, Placement.loop(3, 3), path), 3)
    assert_same({name: value for result in results for name, value in result.items()}, expected)


def test_a_whole_models_state_is_loaded_by_every_rank(threads: Threads, expected: dict[str, torch.Tensor]) -> None:
    def load(transport: Transport) -> dict[str, Any]:
        executor, _ = place(transport, Placement.loop(3, 3), seed=1)
        load_state_dict(executor, expected)
        return state_dict(executor)

    results = threads(load, 3)
    assert_same({name: value for result in results for name, value in result.items()}, expected)


def test_parameter_groups_and_new_parameters_go_by_name(threads: Threads) -> None:
    """Two optimizers, two groups, a parameter that has had no gradient: loaded, each has its own options and state."""

    def optimizers(executor: Executor) -> list[torch.optim.Optimizer]:
        named = [(n, p) for stage in executor.stages for n, p in stage.submodule.named_parameters()]
        large = [(n, p) for n, p in named if p.shape[0] > 2]
        small = [p for n, p in named if p.shape[0] == 2]
        weights = {"params": [p for n, p in large if n.endswith("weight")], "weight_decay": 0.5}
        biases = {"params": [p for n, p in large if n.endswith("bias")]}
        found: list[torch.optim.Optimizer] = [torch.optim.AdamW([weights, biases], 0.1)] if large else []
        return [*found, torch.optim.SGD(small, 0.2, momentum=0.9)] if small else found

    def build(transport: Transport, count: int) -> tuple[Executor, list[torch.optim.Optimizer]]:
        pieces = [nn.Linear(4, 4), nn.Linear(4, 2)]
        pieces[1].bias.requires_grad_(requires_grad=False)
        own = [i for i in range(2) if i * count // 2 == transport.rank or count == 1]
        stages = (
            [PipelineStage(nn.Sequential(*pieces), 0, 1, "cpu")]
            if count == 1
            else [PipelineStage(pieces[i], i, 2, "cpu", names={"": str(i)}) for i in own]
        )
        executor = Executor(stages, gpipe(count, 1), functional.mse_loss, transport=transport)
        return executor, optimizers(executor)

    def save(transport: Transport) -> tuple[dict[str, Any], dict[str, Any]]:
        executor, both = build(transport, 2)
        if transport.rank == 0:
            both[0].param_groups[0]["lr"] = 0.3
            executor.stages[0].submodule.weight.grad = torch.ones(4, 4)
            both[0].step()
        return state_dict(executor), optimizer_state_dict(executor, both)

    (model_0, state_0), (model_1, state_1) = threads(save, 2)
    state = state_0 | state_1
    assert state_0["state.0.bias.step"] == 0.0
    assert "state.1.bias.momentum_buffer" not in state
    assert not state_0.keys() & state_1.keys()

    def load(transport: Transport) -> dict[str, Any]:
        executor, both = build(transport, 1)
        load_state_dict(executor, model_0 | model_1)
        load_optimizer_state_dict(executor, both, state)
        assert [(group["lr"], group["weight_decay"]) for group in both[0].param_groups] == [(0.3, 0.5), (0.1, 0.01)]
        return optimizer_state_dict(executor, both)

    (found,) = threads(load, 1)
    assert found.keys() == state.keys()
    assert all(torch.equal(torch.as_tensor(found[k]), torch.as_tensor(v)) for k, v in state.items() if v is not None)


def test_a_tied_parameter_is_saved_under_all_its_names(threads: Threads) -> None:
    """As in one process, where the model has it twice; and with one holder's rank or both it loads the same."""

    def place_tied(transport: Transport, placement: Placement) -> tuple[Executor, torch.optim.Optimizer]:
        stages = [
            PipelineStage(nn.Linear(4, 4), s, 2, "cpu", names={"": ("embed", "head")[s]})
            for s in placement.stages_of(transport.rank)
        ]
        executor = Executor(stages, filled(placement), functional.mse_loss, transport=transport)
        tie(executor, {"w": [(0, "weight"), (1, "weight")]})
        return executor, torch.optim.Adam(executor.parameters(), 0.1)

    def save(transport: Transport) -> Any:
        executor, optimizer = place_tied(transport, Placement.loop(2, 2))
        train(executor, optimizer, range(2))
        return state_dict(executor, to=0), optimizer_state_dict(executor, optimizer, to=0)

    (model, state), _ = threads(save, 2)
    assert sorted(model) == ["embed.bias", "embed.weight", "head.bias", "head.weight"]
    assert torch.equal(state["state.embed.weight.exp_avg"], state["state.head.weight.exp_avg"])

    def load(transport: Transport) -> Any:
        executor, optimizer = place_tied(transport, Placement.loop(2, 1))
        load_state_dict(executor, model)
        load_optimizer_state_dict(executor, optimizer, state)
        assert len(optimizer.state) == 3
        with pytest.raises(StageUsageError, match="are tied as 'w', but have different values in the state"):
            load_state_dict(executor, model | {"head.weight": torch.zeros(4, 4)})
        return state_dict(executor), optimizer_state_dict(executor, optimizer)

    ((found, found_state),) = threads(load, 1)
    assert_same(found, model)
    assert found_state.keys() == state.keys()


# Errors, the same on every rank.


def test_p158_names_that_collide_are_refused_on_every_rank(threads: Threads) -> None:
    def run(transport: Transport) -> str:
        stage = PipelineStage(nn.Sequential(nn.Linear(2, 2)), transport.rank, 2, "cpu")
        with pytest.raises(StageUsageError) as failure:
            state_dict(stage, transport=transport)
        return str(failure.value)

    first, second = threads(run, 2)
    assert first == second
    assert first.startswith("stages 0 and 1 both call something '0.weight', and one would replace the other")


def test_what_does_not_fit_is_refused_before_anything_is_loaded(
    threads: Threads, expected: dict[str, torch.Tensor]
) -> None:
    def run(transport: Transport, state: dict[str, Any]) -> str:
        executor, _ = place(transport, Placement.loop(2, 2), seed=1)
        before = {name: value.clone() for name, value in state_dict(executor).items()}
        with pytest.raises(StageUsageError) as failure:
            load_state_dict(executor, state)
        assert_same(state_dict(executor), before)
        load_state_dict(executor, state, strict=False)
        return str(failure.value)

    lacking = {name: value for name, value in expected.items() if name != "layers.3.calls"}
    more = {**expected, "layers.4.linear.weight": torch.zeros(2)}  # P156: a layer that no stage has
    for state, words in (
        (lacking, "rank 1: the state lacks 'layers.3.calls'"),
        (more, "rank 0: no stage has 'layers.4.linear.weight' of the state"),
    ):
        first, second = threads(run, 2, state)
        assert first == second
        assert words in first


def test_another_shape_is_refused_before_anything_is_loaded(
    threads: Threads, expected: dict[str, torch.Tensor]
) -> None:
    """One rank raised torch's error, when the others had loaded their parts."""

    def run(transport: Transport) -> str:
        executor, _ = place(transport, Placement.loop(2, 2), seed=1)
        before = {name: value.clone() for name, value in state_dict(executor).items()}
        with pytest.raises(StageUsageError) as failure:
            load_state_dict(executor, {**expected, "layers.3.linear.weight": torch.zeros(2, 7)}, strict=False)
        assert_same(state_dict(executor), before)
        return str(failure.value)

    first, second = threads(run, 2)
    assert first == second
    assert first.startswith("rank 1: 'layers.3.linear.weight' of stage 1 has shape (4, 4), but (2, 7) in the state")


def test_what_cannot_be_gathered_is_refused_on_every_rank(threads: Threads) -> None:
    """One rank raised, and ended the transport for all of them."""

    class Extra(nn.Linear):
        def get_extra_state(self) -> Any:
            return {"calls": 1}

        def set_extra_state(self, state: Any) -> None: ...

    def run(transport: Transport) -> str:
        module = nn.ModuleList([Extra(2, 2) if transport.rank else nn.Linear(2, 2)])
        stage = PipelineStage(module, transport.rank, 2, "cpu", transport=transport, names={"0": f"{transport.rank}"})
        with pytest.raises(StageUsageError) as failure:
            state_dict(stage, to=0)
        assert len(state_dict(stage)) == 2 + transport.rank  # and the transport lives on
        return str(failure.value)

    first, second = threads(run, 2)
    assert first == second
    assert first.startswith("rank 1: only tensors, numbers, texts and tuples of them can be gathered")


def test_optimizers_that_do_not_fit_are_named() -> None:
    module = nn.Linear(2, 2)
    stage = PipelineStage(module, 0, 1, "cpu")
    other = torch.optim.SGD(nn.Linear(3, 3).parameters(), 0.1)
    with pytest.raises(StageUsageError, match=r"a parameter of shape \(3, 3\) that no stage of this rank has"):
        optimizer_state_dict(stage, other)
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    state = optimizer_state_dict(stage, optimizer)
    with pytest.raises(StageUsageError, match="the state has nothing of 'bias'"):
        load_optimizer_state_dict(stage, optimizer, {k: v for k, v in state.items() if "bias" not in k})
    with pytest.raises(
        StageUsageError, match="'bias' is in one parameter group with others here, but was saved with other"
    ):
        load_optimizer_state_dict(stage, optimizer, state | {"param_groups.bias.lr": 0.2})
    optimizer.param_groups[0]["note"] = [1]
    with pytest.raises(StageUsageError, match="only tensors, numbers, texts and tuples of them can be gathered"):
        optimizer_state_dict(stage, optimizer, to=0)


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.Adam(p, lr=torch.tensor(0.1), weight_decay=0.5),
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.5),
        lambda p: torch.optim.NAdam(p, 0.1, weight_decay=0.5),
        lambda p: torch.optim.Rprop(p, 0.1),
        lambda p: torch.optim.ASGD(p, 0.1, weight_decay=0.5),
    ],
)
def test_the_state_of_an_optimizer_that_took_no_step_is_that_before_its_first(make: Any) -> None:
    """Weight decay got into the averages: training that was saved before its first step went on otherwise. So it did with
    optimizers that keep a step size, which was that of a learning rate of 0.
    """

    def steps(resumes: bool) -> torch.Tensor:
        module = nn.Linear(2, 1, bias=False)
        nn.init.ones_(module.weight)
        stage = PipelineStage(module, 0, 1, "cpu")
        optimizer = make(module.parameters())
        if resumes:
            state = optimizer_state_dict(stage, optimizer)
            assert not optimizer.state
            assert not state.get("state.weight.step", 0)
            load_optimizer_state_dict(stage, optimizer, state)
            assert optimizer.param_groups[0].get("weight_decay", 0.5) == 0.5
        for _ in range(2):
            optimizer.zero_grad()
            module(torch.tensor([[1.0, 2.0]])).sum().backward()
            optimizer.step()
        return module.weight.detach()

    assert torch.equal(steps(True), steps(False))


def test_wrappers_leave_no_trace_in_names() -> None:
    """torch.compile and activation checkpointing wrap modules; names are those of the model."""
    module = nn.Sequential(torch.compile(nn.Linear(2, 2), backend="eager"), nn.Linear(2, 2))
    stage = PipelineStage(module, 0, 1, "cpu")
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    assert sorted(state_dict(stage)) == ["0.bias", "0.weight", "1.bias", "1.weight"]
    assert "param_groups.0.weight.lr" in optimizer_state_dict(stage, optimizer)
    load_state_dict(stage, {name: torch.ones_like(value) for name, value in state_dict(stage).items()})
    assert all((parameter == 1).all() for parameter in module.parameters())
