"""The live model: parameters become shards in place, or stay as they were; gradients arrive on them."""

from __future__ import annotations

import sys
import threading
from typing import Any

import graphpasses_support as support
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from graphpasses_support import XY, compiler, mlp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.tensor import DTensor, Replicate, Shard

from stepwell_graphpasses import GraphCompiler, PassConfig, shard
from stepwell_graphpasses._collectives import comm_of, starts
from stepwell_graphpasses._live import _optimizers_of, _own_memory
from stepwell_graphpasses.exceptions import (
    ConfigError,
    GradientError,
    ModelStateError,
    PeerMismatchError,
)
from stepwell_graphpasses.testing import fake_world
from stepwell_meta.testing import WorkerPool


def test_other_threads_go_on_while_parameters_become_shards() -> None:
    """The search for optimizers took hold of all objects, also of tuples that other threads were making: these failed there."""
    failures: list[SystemError] = []
    over = threading.Event()

    def make_tuples() -> None:
        while not over.is_set() and not failures:
            try:
                tuple(number for number in range(200))
            except SystemError as error:
                failures.append(error)

    threads = [threading.Thread(target=make_tuples) for _ in range(3)]
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters())
    before = sys.getswitchinterval()
    try:
        sys.setswitchinterval(1e-6)
        for thread in threads:
            thread.start()
        for _ in range(10):
            (found,) = _optimizers_of(model.parameters())
    finally:
        over.set()
        sys.setswitchinterval(before)
        for thread in threads:
            thread.join(timeout=30)
    assert not failures
    assert found is optimizer.param_groups[0]["params"]


def test_b15_parameters_become_shards_in_place_and_ddp_leaves_them() -> None:
    with fake_world(2):
        c = compiler()
        old = dict(c.model.named_parameters())
        old["layers.0.weight"].decay = False
        optimizer = torch.optim.AdamW(c.model.parameters())  # built before: it follows
        c.compile(**XY)
        weight = c.model.layers[0].weight
        assert isinstance(weight, DTensor)
        assert isinstance(weight, nn.Parameter)
        assert weight.placements == (Shard(0),)
        assert weight.decay is False
        assert optimizer.param_groups[0]["params"] == list(c.model.parameters())
        hsdp = compiler(PassConfig(dp_mode="hsdp", fsdp_degree=2), plan=shard("layers.0"))
        hsdp.compile(**XY)
        assert hsdp.model.layers[0].weight.placements == (Replicate(), Shard(0))
        assert hsdp.model.layers[1].weight.placements == (Replicate(), Replicate())
        ddp = compiler(PassConfig(dp_mode="ddp"))
        old = dict(ddp.model.named_parameters())
        ddp.compile(**XY)
        assert all(old[name] is p for name, p in ddp.model.named_parameters())


def test_b15_an_optimizer_that_has_stepped_or_gradients_from_before_are_refused() -> None:
    with fake_world(2):
        c = compiler()
        optimizer = torch.optim.AdamW(c.model.parameters())
        support.mse_loss(c.model, **XY).backward()
        with pytest.raises(ModelStateError, match=r"gradients from before .*step or zero them"):
            c.compile(**XY)
        optimizer.step()
        optimizer.zero_grad()
        with pytest.raises(ModelStateError, match="AdamW has already stepped"):
            c.compile(**XY)
        assert not c.is_compiled
        assert all(type(p) is nn.Parameter for p in c.model.parameters())


def test_b16_gradients_that_do_not_fit_are_refused() -> None:
    c = compiler().compile(**XY)
    before = [p.grad for p in c.model.parameters()]
    with pytest.raises(GradientError, match=r"layers.0.bias has shape \(3,\)"):
        c.live.accumulate({"layers.0.weight": torch.zeros(7, 4), "layers.0.bias": torch.zeros(3)})
    assert [p.grad for p in c.model.parameters()] == before == [None] * 4


def test_a_model_that_changed_after_compilation_is_refused() -> None:
    c = compiler().compile(**XY)
    c.model.layers[0].bias = nn.Parameter(torch.zeros(9))
    with pytest.raises(ModelStateError, match=r"layers.0.bias is no longer what was compiled: expected \(7,\)"):
        c.forward_backward(**XY)
    del c.model.layers[0].bias
    c.model.layers[0].bias = None
    with pytest.raises(ModelStateError, match=r"layers.0.bias was removed"):
        c.forward_backward(**XY)


def test_gradients_never_share_memory() -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.a + self.b) * x

    c = GraphCompiler(Sum(), lambda model, x: model(x).sum()).compile(x=torch.ones(3))
    c.forward_backward(x=torch.ones(3))
    c.model.a.grad.mul_(5)
    assert c.model.b.grad.tolist() == [1, 1, 1]
    c.forward_backward(x=torch.ones(3))
    assert c.model.a.grad.tolist() == [6, 6, 6]


def test_to_moves_the_model_and_compiles_anew() -> None:
    c = compiler().compile(**XY)
    c.forward_backward(**XY)
    grads = support.gradients(c.model)
    assert c.to("cpu") is c
    assert not c.is_compiled
    c.forward_backward(**XY)
    assert support.difference(support.gradients(c.model), {n: 2 * g for n, g in grads.items()}) == 0.0


def meta_model(path: str) -> dict[str, Any]:
    whole = support.seeded(lambda: support.MLP(4, 7, 3))
    dcp.save({"model": whole.state_dict()}, checkpoint_id=path)
    with torch.device("meta"):
        model = support.MLP(4, 7, 3)
        model.register_buffer("table", torch.zeros(3))
    made: list[int] = []

    def init(model: nn.Module) -> None:
        assert all(isinstance(p, DTensor) and not p.is_meta for p in model.parameters())
        made.append(sum(p.to_local().numel() for p in model.parameters()))
        # Whoever forgets to initialise gets no numbers.
        assert all(bool(p.to_local().isnan().all()) for p in model.parameters())
        dcp.load({"model": {name: p for name, p in model.state_dict().items() if name != "table"}}, checkpoint_id=path)
        model.table.fill_(0.0)

    c = GraphCompiler(model, support.mse_loss, device="cpu", init_fn=init)
    inputs = support.pair((4, 3))
    loss, _ = c.forward_backward(**inputs)
    return {
        "loss": float(loss - support.mse_loss(whole, **inputs).detach()),
        "parameters": support.difference(support.parameters(model), support.parameters(whole)),
        "made": sum(made) / sum(p.numel() for p in whole.parameters()),
    }


@pytest.mark.filterwarnings("ignore")
def test_a_model_from_the_meta_device_gets_memory_for_its_shards_only_and_values_from_a_checkpoint(
    workers: WorkerPool, tmp_path: Any
) -> None:
    for found in workers.run(meta_model, 2, str(tmp_path / "checkpoint"), deadline=60):
        assert found["loss"] == found["parameters"] == 0.0
        assert found["made"] < 0.65


def s41_save(path: str) -> Any:
    def make() -> nn.Module:
        model = support.MLP(4, 7, 5, 3)
        model.layers[1].weight = nn.Parameter(model.layers[1].weight.detach().clone())
        return model

    c = compiler(make=make)
    reference = support.seeded(make)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (c.model, reference)]
    for step in range(3):
        inputs = support.pair((4, 3), step)
        c.forward_backward(**inputs)
        found = support.averaged(support.local_gradients(reference, support.mse_loss, inputs))
        for name, p in reference.named_parameters():
            p.grad = found[name]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    dcp.save({"model": c.model.state_dict()}, checkpoint_id=path)
    return support.parameters(c.model), support.difference(support.parameters(c.model), support.parameters(reference))


def s41_load(path: str) -> Any:
    c = compiler(make=lambda: support.MLP(4, 7, 5, 3)).compile(**support.pair((4, 3)))
    state = {"model": c.model.state_dict()}
    dcp.load(state, checkpoint_id=path)
    c.model.load_state_dict(state["model"])
    c.forward_backward(**support.pair((4, 3)))
    return support.parameters(c.model), sorted(state["model"])


@pytest.mark.filterwarnings("ignore")
def test_s41_three_adamw_steps_and_a_checkpoint_on_other_numbers_of_ranks(workers: WorkerPool, tmp_path: Any) -> None:
    saved = workers.run(s41_save, 4, str(tmp_path / "c"), deadline=90)
    for _, difference in saved:
        assert difference <= 1e-6
    for ranks in (2, 1):
        for loaded, names in workers.run(s41_load, ranks, str(tmp_path / "c"), deadline=60):
            assert support.difference(loaded, saved[0][0]) == 0.0
            assert names == sorted(f"layers.{i}.{part}" for i in range(3) for part in ("weight", "bias"))


def tied(path: str, *, save: bool) -> dict[str, Any]:
    def make() -> nn.Module:
        return support.TinyGPT(vocab=9, layers=1, tied=True)

    c = compiler(PassConfig(reshard_after_forward=False), make, support.gpt_loss)
    batch = {"tokens": support.tokens(vocab=9)}
    c.compile(**batch)
    if save:
        optimizer = torch.optim.SGD(c.model.parameters(), lr=0.5)
        c.forward_backward(**batch)
        optimizer.step()
        dcp.save({"model": c.model.state_dict()}, checkpoint_id=path)
    else:
        state = {"model": c.model.state_dict()}
        dcp.load(state, checkpoint_id=path)
        c.model.load_state_dict(state["model"])
    values = support.parameters(c.model)
    c.model.zero_grad()
    c.forward_backward(**batch)
    gathered = [name for node in starts(c.graph().graph, "gather") for name in comm_of(node).params]
    return {
        "values": values,
        "tied": c.model.head.weight is c.model.embed.weight,
        "gathered": gathered.count("embed.weight"),
        "gradient": support.full(c.model.head.weight.grad).clone(),
        "local": support.local_gradients(load(make, values), support.gpt_loss, batch),
    }


def load(make: Any, values: dict[str, torch.Tensor]) -> nn.Module:
    model = support.seeded(make)
    model.load_state_dict(values)
    return model


@pytest.mark.filterwarnings("ignore")
def test_s18_ties_survive_save_and_load_on_other_numbers_of_ranks(workers: WorkerPool, tmp_path: Any) -> None:
    saved = workers.run(tied, 4, str(tmp_path / "c"), save=True, deadline=90)
    for ranks in (2, 1):
        loaded = workers.run(tied, ranks, str(tmp_path / "c"), save=False, deadline=60)
        expected = sum(found["local"]["head.weight"] for found in loaded) / ranks
        for found in loaded:
            assert found["tied"]
            assert found["gathered"] == (ranks > 1)  # once, under both of its names
            assert support.difference(found["values"], saved[0]["values"]) == 0.0
            assert torch.equal(found["values"]["head.weight"], found["values"]["embed.weight"])
            assert torch.allclose(found["gradient"], expected, atol=1e-7)


def whole_state() -> float:
    """A state dict of whole tensors, through torch's own function for it, into a model from the meta device and a live one."""
    torch.manual_seed(5)
    other = mlp()

    def load(model: nn.Module) -> None:
        set_model_state_dict(model, other.state_dict(), options=StateDictOptions(full_state_dict=True))

    with torch.device("meta"):
        empty = mlp()
    c = GraphCompiler(empty, support.mse_loss, device="cpu", init_fn=load).compile(**support.pair((4, 3)))
    live = compiler().compile(**support.pair((4, 3)))
    load(live.model)
    return sum(support.difference(support.parameters(one.model), support.parameters(other)) for one in (c, live))


def test_a_state_dict_of_whole_tensors_is_loaded_into_shards(workers: WorkerPool) -> None:
    assert workers.run(whole_state, 2, deadline=60) == [0.0, 0.0]


def different_starts() -> bool:
    torch.manual_seed(dist.get_rank())
    model = support.MLP(4, 7, 3)
    c = GraphCompiler(model, support.mse_loss, PassConfig(dp_mode="ddp")).compile(**support.pair((4, 3)))
    mine = [p.detach() for p in c.model.parameters()]
    torch.manual_seed(0)
    return all(torch.equal(a, b) for a, b in zip(mine, support.MLP(4, 7, 3).parameters(), strict=True))


def test_ranks_that_start_from_other_values_get_those_of_the_first(workers: WorkerPool) -> None:
    assert workers.run(different_starts, 2, deadline=60) == [True, True]


def test_a_model_with_other_modules_than_when_it_was_compiled_is_refused() -> None:
    """A module in the place of another was not trained, and what it replaced was; a module that was added did not run."""

    def replace(model: nn.Module) -> None:
        model.layers[1] = nn.Linear(7, 3)

    def add(model: nn.Module) -> None:
        model.layers.append(nn.Linear(3, 3))

    def parametrize(model: nn.Module) -> None:
        model.layers[1].scale = nn.Parameter(torch.ones(3))

    for change, where in ((replace, "layers"), (add, "layers"), (parametrize, r"layers\.1")):
        c = compiler().compile(**XY)
        change(c.model)
        with pytest.raises(
            ModelStateError, match=rf"^{where} \(.*other modules or parameters than when it was compiled"
        ):
            c.forward_backward(**XY)
        assert all(parameter.grad is None for parameter in c.model.parameters())


def test_a_weight_that_is_no_longer_tied_is_refused() -> None:
    c = GraphCompiler(support.TinyGPT(tied=True, layers=1), support.gpt_loss).compile(tokens=support.tokens(rank=0))
    c.model.head.weight = nn.Parameter(c.model.head.weight.detach().clone())
    with pytest.raises(ModelStateError, match=r"embed.weight is no longer one with head.weight, to which it was tied"):
        c.forward_backward(tokens=support.tokens(rank=0))


@pytest.mark.parametrize("now", [torch.zeros(1), torch.zeros(3, dtype=torch.float64)], ids=["shape", "dtype"])
def test_a_buffer_that_looks_otherwise_is_refused(now: torch.Tensor) -> None:
    c = compiler(make=lambda: nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))).compile(**XY)
    c.model[1].running_mean = now
    with pytest.raises(
        ModelStateError, match=r"buffer 1\.running_mean is no longer what was compiled: expected \(3,\)"
    ):
        c.forward_backward(**XY)


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_optimizer_goes_on_after_the_model_was_moved(ranks: int) -> None:
    """The parameters became other objects: an optimizer stepped on those of before, and set their gradients to none."""
    with fake_world(ranks):
        c = compiler()
        optimizer = torch.optim.SGD(c.model.parameters(), lr=0.5)
        c.forward_backward(**XY)
        c.to("cpu")
        assert optimizer.param_groups[0]["params"] == list(c.model.parameters())
        assert all(parameter.grad is not None for parameter in c.model.parameters())
        optimizer.zero_grad()
        assert all(parameter.grad is None for parameter in c.model.parameters())


def test_shards_stay_on_the_kind_of_device_that_their_ranks_have(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_world(2):
        c = compiler().compile(**XY)
        with pytest.raises(ConfigError, match="device 'cuda' is not available here"):
            c.to("cuda")
        monkeypatch.setattr("stepwell_graphpasses._compiler.check_device", torch.device)  # as if there were one
        with pytest.raises(
            ModelStateError, match=r"shards on a mesh of cpu ranks, which cannot go to cuda.*device='cuda'"
        ):
            c.to("cuda")
        assert c.is_compiled


def trained_on_one_rank(what: str) -> tuple[str, bool]:
    c = compiler()
    optimizer = torch.optim.SGD(c.model.parameters(), lr=0.1, momentum=0.9)
    if dist.get_rank() == 1:
        support.mse_loss(c.model, **support.pair((4, 3))).backward()
        if what == "steps":
            optimizer.step()
            optimizer.zero_grad()
    with pytest.raises((ModelStateError, PeerMismatchError)) as error:
        c.compile(**support.pair((4, 3)))
    return str(error.value), all(type(parameter) is nn.Parameter for parameter in c.model.parameters())


@pytest.mark.parametrize(("what", "message"), [("steps", "has already stepped"), ("grads", "gradients from before")])
def test_one_rank_whose_model_was_trained_on_is_an_error_on_all(workers: WorkerPool, what: str, message: str) -> None:
    """It was seen after the ranks had agreed: the others went on, and waited for the broadcast of the first rank's values."""
    for found, untouched in workers.run(trained_on_one_rank, 2, what, deadline=30):
        assert message in found
        assert untouched


def values_are_missing_on_one_rank() -> tuple[str, list[bool], bool, float]:
    state = support.seeded(mlp).state_dict()
    with torch.device("meta"):
        model = mlp()
        model.register_buffer("table", torch.zeros(3))
    optimizer = torch.optim.SGD(model.parameters())
    ready = dist.get_rank() == 0

    def init(model: nn.Module) -> None:
        model.table.zero_()
        if not ready:
            raise KeyError("no such checkpoint")
        for name, parameter in model.named_parameters():
            parameter.to_local().copy_(state[name].chunk(2)[dist.get_rank()])

    c = GraphCompiler(model, support.mse_loss, device="cpu", init_fn=init)
    inputs = support.pair((4, 3))
    try:
        c.forward_backward(**inputs)
    except (KeyError, PeerMismatchError) as error:
        message = str(error)
    before = [
        tensor.is_meta for tensor in (*model.parameters(), *model.buffers(), *optimizer.param_groups[0]["params"])
    ]
    compiled, ready = c.is_compiled, True
    loss, _ = c.forward_backward(**inputs)
    return message, before, compiled, float(loss - support.mse_loss(support.seeded(mlp), **inputs).detach())


def test_s40_values_that_one_rank_cannot_load_leave_every_model_as_it_was(workers: WorkerPool) -> None:
    """The shards were in place by then: the next call took not-a-numbers for a model, and the other ranks had gone on."""
    right, wrong = workers.run(values_are_missing_on_one_rank, 2, deadline=30)
    assert "rank 1 could not initialise the model, so no rank does: KeyError: 'no such checkpoint'" in right[0]
    assert "no such checkpoint" in wrong[0]
    for _, before, compiled, difference in (right, wrong):
        assert all(before)
        assert not compiled
        assert difference == 0.0


def test_gradients_of_several_dtypes_in_one_memory() -> None:
    """Where they began was compared in elements, of each its own size: two that lie on one another kept their memory."""
    memory = torch.arange(64, dtype=torch.uint8)
    gradients = {"double": memory[40:56].view(torch.float64), "single": memory[32:48].view(torch.float32)}
    own = _own_memory({**gradients, "beside": memory[56:].view(torch.int16), "none": torch.zeros(0)})
    assert all(torch.equal(own[name].view(torch.uint8), gradients[name].view(torch.uint8)) for name in gradients)
    before = own["double"].clone()
    own["single"].zero_()
    assert torch.equal(own["double"], before)
    assert own["beside"].data_ptr() == memory[56:].data_ptr()
