"""What a cut is, and what can be done with its stages."""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import split_support as support
import torch
import torch.distributed as dist
import torch.distributed.pipelining as theirs
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from stepwell_meta.testing import WorkerPool
from stepwell_p2p import C10dTransport, Placement, Transport
from stepwell_stage import Executor, PipelineStage, clip_grad_norm_, load_state_dict, schedules, split, state_dict, tie

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.drop = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.inner(x)).tanh()


class Row(nn.Module):
    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) + x
        return self.norm(x * self.scale)


def loss_of(output: Tensor) -> Tensor:
    return output.square().mean() + output.sum() * 0.1


def make(seed: int = 0) -> Any:
    return support.make(Row, seed)


def plain(model: nn.Module, x: Tensor, microbatches: int = 2) -> dict[str, Tensor]:
    for part in x.chunk(microbatches):
        (loss_of(model(part)) / microbatches).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def executor_of(transport: Transport, model: nn.Module, name: str = "1f1b", **options: Any) -> tuple[Executor, Any]:
    schedule = schedules.BY_NAME[name](transport.size, 2)
    cut = split(model, schedule.placement.num_stages, example=X.double()[:3], **options)
    stages = cut.stages(schedule.placement, transport.rank, "cpu", transport=transport)
    executor = Executor(stages, schedule, loss_of)
    if cut.tied:
        tie(executor, cut.tied)
    return executor, cut


def grads_of(executor: Executor) -> dict[str, Tensor]:
    found = {}
    for stage in executor.stages:
        assert isinstance(stage.submodule, nn.Module)
        found |= {name: p.grad for name, p in stage.submodule.named_parameters() if p.grad is not None}
    return found


def on_gloo(name: str) -> list[tuple[str, float]]:
    transport = C10dTransport()
    model = make()
    executor, cut = executor_of(transport, copy.deepcopy(model), name)
    executor.step(**cut.keywords(X.double()), return_outputs=False)
    wanted = plain(model, X.double())
    found = [(name, float((grad - wanted[name]).abs().max())) for name, grad in grads_of(executor).items()]
    transport.close()
    return found


def test_on_processes(workers: WorkerPool) -> None:
    for name, ranks in (("zbv", 2), ("1f1b", 4)):
        found = dict(pair for one in workers.run(on_gloo, ranks, name) for pair in one)
        assert found.keys() == dict(make().named_parameters()).keys()
        assert max(found.values()) < 1e-12


def test_the_state_has_the_models_names(threads: Callable[..., Any]) -> None:
    """Saved from four stages, loaded into two and into the model itself."""

    def saved(transport: Transport) -> dict[str, Tensor]:
        executor, _ = executor_of(transport, make(1))
        return dict(state_dict(executor))

    whole = {name: value for one in threads(saved, 4) for name, value in one.items()}
    assert whole.keys() == make().state_dict().keys()

    def loaded(transport: Transport) -> dict[str, Tensor]:
        executor, _ = executor_of(transport, make(2))
        load_state_dict(executor, whole)
        return dict(state_dict(executor))

    for one in threads(loaded, 2):
        for name, value in one.items():
            torch.testing.assert_close(value, whole[name])
    make().load_state_dict(whole)


def test_a_model_on_the_meta_device(threads: Callable[..., Any]) -> None:
    values = make().state_dict()
    wanted = plain(make(), X.double())

    def one(transport: Transport) -> tuple[dict[str, Tensor], set[str]]:
        with torch.device("meta"):
            model = Row().double()
        made: set[str] = set()

        def init(part: nn.Module) -> None:
            made.update(part.state_dict())
            part.load_state_dict({name: values[name] for name in part.state_dict()})

        schedule = schedules.one_f_one_b(transport.size, 2)
        cut = split(model, transport.size, example=X.double()[:3])
        with pytest.raises(Exception, match=r"stage 0 has parameters or buffers on the meta device: pass device="):
            cut.module(0)
        stages = cut.stages(schedule.placement, transport.rank, "cpu", transport=transport, init_fn=init)
        executor = Executor(stages, schedule, loss_of)
        if cut.tied:
            tie(executor, cut.tied)
        executor.step(x=X.double(), return_outputs=False)
        assert all(parameter.is_meta for parameter in model.parameters())
        return grads_of(executor), made

    found = threads(one, 2)
    for name, grad in {name: grad for grads, _ in found for name, grad in grads.items()}.items():
        torch.testing.assert_close(grad, wanted[name], rtol=1e-12, atol=1e-12)
    assert found[0][1] & found[1][1] == {"scale"}  # what glue reads everywhere; all else is made once


def test_a_tied_weight_on_the_meta_device() -> None:
    """Another stage's unit held the weight too, on the meta device still, and glue met its result together with real tensors."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.embed(ids) + torch.ones(4))

    model = Tied()
    with torch.device("meta"):
        cut = split(Tied(), 2, example=torch.zeros(3, dtype=torch.long))
    last = cut.module(1, device="cpu", init_fn=lambda part: part.load_state_dict({"head.weight": model.head.weight}))
    ids = torch.tensor([1, 4, 2])
    torch.testing.assert_close(last(model.embed(ids) + 1, ids=ids), model(ids))


def test_evaluation_frozen_layers_clipping_and_buffers(threads: Callable[..., Any]) -> None:
    model = make()
    model.layers[0].requires_grad_(False)
    model.layers[2].requires_grad_(False)
    wanted = plain(reference := copy.deepcopy(model), X.double())
    norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
    models = [copy.deepcopy(model) for _ in range(4)]

    def one(transport: Transport) -> tuple[dict[str, Tensor], Tensor, Tensor, Any]:
        executor, _ = executor_of(transport, models[transport.rank], "zb-h1")
        executor.eval(x=X.double()[:4])
        executor.step(x=X.double(), return_outputs=False)
        total = clip_grad_norm_(executor, 0.1)
        stage = executor.stages[0].submodule
        assert isinstance(stage, nn.Module)
        stage.eval()
        return grads_of(executor), total, models[transport.rank].norm.running_mean, executor.eval(x=X.double())

    found = threads(one, 4)
    together = {name: grad for grads, *_ in found for name, grad in grads.items()}
    assert together.keys() == wanted.keys()
    for name, grad in together.items():
        torch.testing.assert_close(grad, wanted[name], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found[0][1], norm)
    # The forward of eval() in training mode counts too, as it does in one process.
    again = copy.deepcopy(model)
    for part in (*X.double()[:4].chunk(2), *X.double().chunk(2)):
        again(part)
    torch.testing.assert_close(found[3][2], again.norm.running_mean)
    torch.testing.assert_close(found[3][3], again.eval()(X.double()), rtol=1e-12, atol=1e-12)


def test_hooks_autocast_and_dropout(threads: Callable[..., Any]) -> None:
    """Hooks run where the unit is; what autocast makes of absent values has the dtype that it has in one process."""
    model = make().float()
    for layer in model.layers:
        layer.drop.p = 0.5
        layer.register_forward_hook(lambda module, inputs, output: output * 2)
    models = [copy.deepcopy(model) for _ in range(2)]

    def one(transport: Transport) -> Any:
        schedule = schedules.one_f_one_b(2, 2)
        with torch.autocast("cpu", torch.bfloat16):
            cut = split(models[transport.rank], 2, example=X[:3])
            stages = cut.stages(schedule.placement, transport.rank, "cpu", transport=transport)
            executor = Executor(stages, schedule, loss_of)
            tie(executor, cut.tied)
            executor.step(x=X, return_outputs=False)
        return grads_of(executor)

    found = {name: grad for one in threads(one, 2) for name, grad in one.items()}
    assert found.keys() == dict(model.named_parameters()).keys()
    assert all(grad.isfinite().all() for grad in found.values())
    for layer in model.layers:
        layer.drop.p = 0.0
    models = [copy.deepcopy(model) for _ in range(2)]
    with torch.autocast("cpu", torch.bfloat16):
        wanted = plain(model, X)
    for grads in threads(one, 2):
        for name, grad in grads.items():
            torch.testing.assert_close(grad, wanted[name], rtol=1e-5, atol=1e-6)


def changed_on_gloo() -> dict[str, dict[str, float]]:
    """Two pipelines side by side, whose stages were wrapped after the split: how far gradients are from one process."""
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "side"))
    halves = torch.cat([X, X[:2]]).double().chunk(2)
    found: dict[str, dict[str, float]] = {}
    for kind in ("fsdp", "ddp", "tensor parallel", "compiled"):
        transport = C10dTransport(mesh.get_group("pp"))
        schedule = schedules.one_f_one_b(2, 2)
        cut = split(make(), 2, example=X.double()[:3])
        part = cut.module(transport.rank)
        for layer in [one for one in part.layers if one is not None]:  # type: ignore[union-attr]
            if kind == "fsdp":
                fully_shard(layer, mesh=mesh["side"])
            elif kind == "tensor parallel":
                parallelize_module(layer, mesh["side"], {"inner": ColwiseParallel(output_layouts=Replicate())})
            elif kind == "compiled":
                layer.compile(backend="eager")
        module = DistributedDataParallel(part, process_group=mesh.get_group("side")) if kind == "ddp" else part
        stage = PipelineStage(module, transport.rank, 2, "cpu", transport=transport, wires=cut.wires())
        executor = Executor(stage, schedule, loss_of)
        own = [halves[mesh.get_local_rank("side")]] if kind in ("fsdp", "ddp") else halves[:1]
        with warnings.catch_warnings():  # torch.compile looks at inputs that are no leaves
            warnings.filterwarnings("ignore", message=r"The \.grad attribute of a Tensor that is not a leaf")
            executor.step(x=own[0], return_outputs=False)
        parts = halves if kind in ("fsdp", "ddp") else own
        wanted = [plain(make(), half) for half in parts]
        found[kind] = {}
        for name, parameter in module.named_parameters():
            name = name.removeprefix("module.")
            if name.startswith("layers"):
                grad = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
                assert grad is not None
                mean = sum(one[name] for one in wanted) / len(wanted)
                found[kind][name] = float((grad - mean).abs().max())
        transport.close()
    return found


def test_units_that_are_wrapped_after_the_split(workers: WorkerPool) -> None:
    together: dict[str, dict[str, float]] = {}
    for one in workers.run(changed_on_gloo, 4, deadline=100):
        for kind, differences in one.items():
            together.setdefault(kind, {}).update(differences)
    for kind, differences in together.items():
        assert len(differences) == 8, kind
        assert max(differences.values()) < 1e-12, kind


def under_torch() -> dict[str, float]:
    transport, rank = C10dTransport(), dist.get_rank()
    cut = split(make(), 2, example=X.double()[:3], inputs="first")
    (stage,) = cut.stages(Placement.loop(2, 2), rank, "cpu", transport=transport)
    schedule = theirs.ScheduleGPipe(stage, 2, loss_fn=lambda output, target: loss_of(output))  # type: ignore[arg-type]
    target = {} if rank == 0 else {"target": torch.zeros(6)}
    schedule.step(*((X.double(),) if rank == 0 else ()), **target)
    wanted = plain(make(), X.double())
    module = stage.submodule
    assert isinstance(module, nn.Module)
    found = {n: float((p.grad - wanted[n]).abs().max()) for n, p in module.named_parameters() if p.grad is not None}
    transport.close()
    return found


def test_torchs_own_schedules(workers: WorkerPool) -> None:
    found = {name: value for one in workers.run(under_torch, 2) for name, value in one.items()}
    assert len(found) == len(list(make().parameters()))
    assert max(found.values()) < 1e-12


def test_what_is_said_of_a_cut() -> None:
    cut = split(make(), 2, example=X.double(), costs={f"layers.{n}": 1.0 for n in range(4)} | {"norm": 0.5})
    assert cut.parts == (("layers.0", "layers.1"), ("layers.2", "layers.3", "norm"))
    said = cut.describe()
    assert "stage 0: layers.0, layers.1, 44% of the cost" in said
    assert "from stage 0: a result of 'add', 192 bytes in the example" in said  # the sum, not its two parts
    assert split(make(), {"layers.1": 1, "norm": 1}, example=X.double()).parts[0] == ("layers.0",)
    assert split(make(), 2, example=X.double(), units=["layers.*.inner"]).parts[0] == (
        "layers.0.inner",
        "layers.1.inner",
    )
    timed = split(make(), 2, example=X.double(), costs="time").costs
    assert timed.keys() == cut.costs.keys()
    assert min(timed.values()) > 0


def test_one_value_for_several_stages_of_a_rank_is_sent_once() -> None:
    class Memory(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Layer() for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            kept = x = self.layers[0](x)
            for layer in list(self.layers)[1:]:
                x = layer(x) + kept
            return x

    wires = split(Memory(), 4, example=X).wires(Placement.loop(4, 2))
    # Stages 0 and 2 are on one rank, 1 and 3 on the other: what the first makes crosses once.
    crossing = [wire for wire in wires if (wire.source + wire.destination) % 2]
    assert [(wire.source, wire.destination) for wire in crossing] == [(0, 1), (1, 2), (2, 3)]


def test_absent_values_hold_no_memory_and_nothing_grows(threads: Callable[..., Any]) -> None:
    """A stage's forward makes no tensor with the data of another's, and nothing is kept from step to step."""
    width = 1_000_000

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scales = nn.ModuleList(nn.ModuleList([nn.LayerNorm(8)]) for _ in range(2))
            self.last = nn.Linear(1, 1)

        def forward(self, x: Tensor) -> Tensor:
            wide = self.scales[0][0](x).repeat(1, width)
            return self.last(self.scales[1][0](wide[:, :8]).mean(1, keepdim=True))

    with torch.device("meta"):
        model = Wide()
    split(model, 2, example=torch.randn(4, 8))  # 128 MB of nothing

    def alive() -> int:
        gc.collect()
        return sum(issubclass(type(one), torch.Tensor) for one in gc.get_objects())

    def one(transport: Transport) -> list[int]:
        executor, _ = executor_of(transport, make())
        counts = []
        for _ in range(3):
            for _ in range(4):
                executor.step(x=X.double(), return_outputs=False)
            counts.append(alive() if transport.size == 1 else 0)
        return counts

    (counts,) = threads(one, 1)
    assert counts[1] == counts[2]
