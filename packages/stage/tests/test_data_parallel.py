"""Data-parallel stages on real ranks, two pipeline ranks by two replicas, against the plain model."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining
from torch.distributed._composable.replicate import replicate as replicate_with_ddp
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from stepwell_meta.testing import WorkerPool
from stepwell_p2p import C10dTransport, Placement, Post, Wait
from stepwell_p2p.exceptions import PeerFailure
from stepwell_p2p.testing import RecordingTransport
from stepwell_stage import Action, Executor, Kind, PipelineStage, Schedule, lower
from stepwell_stage.exceptions import StageUsageError
from stepwell_stage.run._data_parallel import find_data_parallel
from stepwell_stage.schedules import (
    dualpipe_v,
    gpipe,
    interleaved_1f1b,
    interleaved_zero_bubble,
    looped_bfs,
    one_f_one_b,
    zb_h1,
    zbv,
)

WIDTH, LAYERS, ROWS = 6, 4, 12
DEADLINE = 110  # making the first DistributedDataParallel of a process imports torch's compiler
Wrap = Callable[[nn.Module, Any], nn.Module]


class Layer(nn.Module):
    """What a stage is made of: residual, norm, two linear layers, one of them checkpointed."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.up(self.norm(x)))
        return x + checkpoint(self.down, hidden, use_reentrant=False)


def build_layers() -> list[nn.Module]:
    generator = torch.Generator().manual_seed(0)
    layers = [Layer() for _ in range(LAYERS)]
    for layer in layers:
        for parameter in layer.parameters():
            nn.init.uniform_(parameter, -0.5, 0.5, generator=generator)
    return layers


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2 * ROWS, WIDTH, generator=generator), torch.randn(2 * ROWS, WIDTH, generator=generator)


def backwards_reversed(ranks: int, microbatches: int) -> Schedule:
    """The last forward's backward runs first."""
    rows = [
        [Action(rank, Kind.F, m) for m in range(microbatches)]
        + [Action(rank, Kind.B, m) for m in reversed(range(microbatches))]
        for rank in range(ranks)
    ]
    return Schedule("reversed", Placement.loop(ranks, ranks), microbatches, rows)


def mixed_backwards(ranks: int, microbatches: int) -> Schedule:
    """Whole backwards for even microbatches, split ones for odd, whose W come last and in reverse."""
    rows = []
    for rank in range(ranks):
        row = [Action(rank, Kind.F, m) for m in range(microbatches)]
        row += [Action(rank, Kind.I if m % 2 else Kind.B, m) for m in range(microbatches)]
        rows.append(row + [Action(rank, Kind.W, m) for m in reversed(range(microbatches)) if m % 2])
    return Schedule("mixed", Placement.loop(ranks, ranks), microbatches, rows)


SCHEDULES: list[Callable[[int, int], Schedule]] = [
    gpipe,
    one_f_one_b,
    looped_bfs,
    zb_h1,
    interleaved_1f1b,
    interleaved_zero_bubble,
    zbv,
    dualpipe_v,
    backwards_reversed,
    mixed_backwards,
]
FEW = [one_f_one_b, zbv, mixed_backwards]


def wrap_ddp(module: nn.Module, mesh: Any) -> nn.Module:
    return DistributedDataParallel(module, process_group=mesh.get_group())


def wrap_ddp_buckets(module: nn.Module, mesh: Any) -> nn.Module:
    """Gradients that are views of many small buckets, and parameters that may be unused."""
    return DistributedDataParallel(
        module,
        process_group=mesh.get_group(),
        bucket_cap_mb=0.0002,
        gradient_as_bucket_view=True,
        find_unused_parameters=True,
    )


def wrap_ddp_inside(module: nn.Module, mesh: Any) -> nn.Module:
    return nn.Sequential(*(wrap_ddp(layer, mesh) for layer in module))


def wrap_fsdp(module: nn.Module, mesh: Any) -> nn.Module:
    for layer in module:
        fully_shard(layer, mesh=mesh)
    return fully_shard(module, mesh=mesh)


def wrap_fsdp_layers(module: nn.Module, mesh: Any) -> nn.Module:
    """Each layer a root of its own."""
    for layer in module:
        fully_shard(layer, mesh=mesh)
    return module


def wrap_replicate(module: nn.Module, mesh: Any) -> nn.Module:
    for layer in module:
        replicate(layer, mesh=mesh)
    return replicate(module, mesh=mesh)


def stages_on(
    mesh: Any, wrap: Wrap, placement: Placement, layers: list[nn.Module], **options: Any
) -> list[PipelineStage]:
    count = placement.num_stages
    stages = []
    for s in placement.stages_of(mesh.get_local_rank("pp")):
        part = nn.Sequential(*layers[LAYERS * s // count : LAYERS * (s + 1) // count])
        stages.append(PipelineStage(wrap(part, mesh["dp"]), s, count, "cpu", **options))
    return stages


def executor_on(
    mesh: Any, wrap: Wrap, schedule: Schedule | Any, layers: list[nn.Module], transport: C10dTransport | None = None
) -> Executor:
    stages = stages_on(mesh, wrap, schedule.placement, layers)
    return Executor(stages, schedule, functional.mse_loss, transport=transport or C10dTransport(mesh.get_group("pp")))


def grads_of(stages: Sequence[PipelineStage], layers: list[nn.Module]) -> dict[str, torch.Tensor]:
    """Of the layers that these stages run, under the whole model's names."""
    return {
        f"{number}.{name}": whole(parameter.grad).clone()
        for number, layer in enumerate(layers)
        if any(layer in stage.submodule.modules() for stage in stages)
        for name, parameter in layer.named_parameters()
    }


def own_half(mesh: Any, executor: Executor) -> tuple[tuple[torch.Tensor, ...], torch.Tensor | None]:
    x, y = (part[mesh.get_local_rank("dp") * ROWS :][:ROWS] for part in batch())
    return ((x,) if executor.is_first else ()), (y if executor.is_last else None)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def steps_of(wrap: Wrap, schedules: list[Callable[[int, int], Schedule]]) -> dict[str, list[dict[str, Any]]]:
    """Gradients after one step and after a second on top of it, by schedule and name of the parameter in the plain model."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    found = {}
    for make in schedules:
        transport = C10dTransport(mesh.get_group("pp"))
        layers = build_layers()
        executor = executor_on(mesh, wrap, make(2, 4), layers, transport)
        inputs, target = own_half(mesh, executor)
        steps = []
        for _ in range(2):
            executor.step(*inputs, target=target)
            executor.eval(*inputs, target=target)
            steps.append(grads_of(executor.stages, layers))
        found[executor.plan.schedule.name] = steps
        transport.close()
    return found


def plain_grads() -> dict[str, torch.Tensor]:
    model = nn.Sequential(*build_layers())
    x, y = batch()
    functional.mse_loss(model(x), y).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def steps_of_all(
    cases: list[tuple[Wrap, list[Callable[[int, int], Schedule]]]],
) -> dict[str, dict[str, list[dict[str, Any]]]]:
    return {wrap.__name__: steps_of(wrap, schedules) for wrap, schedules in cases}


@pytest.mark.parametrize(
    "cases",
    [
        [(wrap_ddp, SCHEDULES), (wrap_ddp_buckets, FEW), (wrap_ddp_inside, FEW)],
        [(wrap_fsdp, SCHEDULES), (wrap_fsdp_layers, FEW), (wrap_replicate, FEW)],
    ],
    ids=["ddp", "fsdp"],
)
def test_p095_p108_p113_p125_gradients_equal_the_plain_model_on_every_replica_and_schedule(
    workers: WorkerPool, cases: list[tuple[Wrap, list[Callable[[int, int], Schedule]]]]
) -> None:
    """Split backwards too, and steps that add up."""
    results = workers.run(steps_of_all, 4, cases, deadline=DEADLINE)
    expected = plain_grads()
    for wrap, schedules in results[0].items():
        for name in schedules:
            by_rank = [result[wrap][name] for result in results]
            for step in (0, 1):
                for replica in (0, 1):
                    found = by_rank[replica][step] | by_rank[2 + replica][step]
                    assert found.keys() == expected.keys()
                    for parameter, grad in expected.items():
                        where = f"{wrap}, {name}, {parameter}"
                        torch.testing.assert_close(found[parameter], (step + 1) * grad, msg=where)
                        assert torch.equal(found[parameter], (by_rank[0][step] | by_rank[2][step])[parameter]), where


def torchs_steps(wrap: Wrap) -> dict[str, list[dict[str, Any]]]:
    """Under torch's own schedules: by schedule and step, the gradients of this rank's layers."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    transport = C10dTransport(mesh.get_group("pp"))
    rank = mesh.get_local_rank("pp")
    found: dict[str, list[dict[str, Any]]] = {}
    for kind, placement in (
        (pipelining.Schedule1F1B, Placement.loop(2, 2)),
        (pipelining.ScheduleInterleaved1F1B, Placement.loop(4, 2)),
        (pipelining.ScheduleInterleavedZeroBubble, Placement.loop(4, 2)),
        (pipelining.ScheduleZBVZeroBubble, Placement.v(4, 2)),
    ):
        layers = build_layers()
        stages = stages_on(mesh, wrap, placement, layers, transport=transport)
        schedule = kind(stages if placement.num_stages > 2 else stages[0], 4, functional.mse_loss)
        x, y = (part[mesh.get_local_rank("dp") * ROWS :][:ROWS] for part in batch())
        first, last = rank == 0, any(stage.is_last for stage in stages)
        found[kind.__name__] = []
        for _ in range(2):
            for stage in stages:
                stage.submod.zero_grad()  # torch scales what is there, also what an earlier step left
            schedule.step(*((x,) if first else ()), target=y if last else None)
            found[kind.__name__].append(grads_of(stages, layers))
    transport.close()
    return found


def torchs_steps_of_all() -> dict[tuple[str, str], list[dict[str, Any]]]:
    return {
        (wrap.__name__, schedule): steps
        for wrap in (wrap_ddp, wrap_fsdp, wrap_replicate)
        for schedule, steps in torchs_steps(wrap).items()
    }


def test_a15_a16_p095_p125_under_torchs_schedules(workers: WorkerPool) -> None:
    """Reduced once a step, whichever backward is the last one, and split ones too."""
    results = workers.run(torchs_steps_of_all, 4, deadline=DEADLINE)
    expected = plain_grads()
    for case, steps in results[0].items():
        for step in range(len(steps)):
            for replica in (0, 1):
                found = results[replica][case][step] | results[2 + replica][case][step]
                assert found.keys() == expected.keys()
                for parameter, grad in expected.items():
                    torch.testing.assert_close(found[parameter], grad, msg=f"{case}, {parameter}")


# DDP.


def reductions(schedule: Schedule) -> list[list[str]]:
    """The backwards and reductions of each of three steps, in order."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    layers = build_layers()
    executor = executor_on(mesh, wrap_ddp, schedule, layers)
    (stage,) = executor.stages
    log: list[str] = []

    def reduce(_: None, bucket: Any) -> Any:
        log.append("reduce")
        buffer = bucket.buffer().div_(2)
        work = dist.all_reduce(buffer, group=mesh["dp"].get_group(), async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    reduce.__annotations__ = {"bucket": dist.GradBucket}  # DDP looks
    stage.submodule.register_comm_hook(None, reduce)
    inner = stage.program.backward

    def backward(microbatch: int, kind: Kind, roots: Any, grads: Any) -> Any:
        log.append(kind.value)
        return inner(microbatch, kind, roots, grads)

    stage.program.backward = backward
    inputs, target = own_half(mesh, executor)
    steps = []
    for _ in range(3):
        executor.step(*inputs, target=target)
        steps.append(log.copy())
        log.clear()
    return steps


def test_p099_p125_p126_one_reduction_a_step_after_the_last_backward(workers: WorkerPool) -> None:
    schedules = [make(2, 8) for make in (one_f_one_b, zb_h1, backwards_reversed, mixed_backwards)]

    def all_reductions() -> list[list[list[str]]]:
        return [reductions(schedule) for schedule in schedules]

    for rank, found in enumerate(workers.run(all_reductions, 4, deadline=DEADLINE)):
        for schedule, steps in zip(schedules, found, strict=True):
            own = [action.kind.value for action in schedule.actions[rank // 2] if action.kind is not Kind.F]
            assert steps == [[*own, "reduce"]] * 3, schedule.name


def three_steps_two_without_sync() -> tuple[dict[str, Any], dict[str, Any]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    executor = executor_on(mesh, wrap_ddp, one_f_one_b(2, 3), build_layers())
    inputs, target = own_half(mesh, executor)
    module = executor.stages[0].submodule
    with module.no_sync():
        executor.step(*inputs, target=target)
        executor.step(*inputs, target=target)
    before = {name: parameter.grad.clone() for name, parameter in module.module.named_parameters()}
    executor.step(*inputs, target=target)
    return before, {name: parameter.grad for name, parameter in module.module.named_parameters()}


def test_steps_under_no_sync_add_up_and_are_reduced_by_the_first_after_them(workers: WorkerPool) -> None:
    results = workers.run(three_steps_two_without_sync, 4, deadline=DEADLINE)
    expected = plain_grads()
    for rank in (0, 2):
        (before, after), (other_before, other_after) = results[rank], results[rank + 1]
        assert any(not torch.equal(before[name], other_before[name]) for name in before)
        for name, grad in after.items():
            assert torch.equal(grad, other_after[name])
            number, rest = name.split(".", 1)
            torch.testing.assert_close(grad, 3 * expected[f"{int(number) + rank}.{rest}"])


class Half(nn.Module):
    """Uses one of its layers where the data is positive; with BatchNorm, whose buffers DDP keeps equal."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        return self.a(x) if dist.get_rank() % 2 else self.b(x)


def unused_parameters(*, find: bool) -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    torch.manual_seed(0)
    module = DistributedDataParallel(Half(), process_group=mesh["dp"].get_group(), find_unused_parameters=find)
    stage = PipelineStage(module, mesh.get_local_rank("pp"), 2, "cpu")
    executor = Executor(stage, zb_h1(2, 3), functional.mse_loss, transport=C10dTransport(mesh.get_group("pp")))
    inputs, target = own_half(mesh, executor)
    if not find:
        with pytest.raises((StageUsageError, PeerFailure)) as failure:
            executor.step(*inputs, target=target)
        return str(failure.value)
    executor.step(*inputs, target=target)
    with torch.no_grad():
        module.module.norm.running_mean.fill_(1000 * mesh.get_local_rank("dp"))
    executor.step(*inputs, target=target)
    return {name: p.grad for name, p in module.module.named_parameters()}, module.module.norm.running_mean


def test_parameters_that_some_replicas_do_not_use(workers: WorkerPool) -> None:
    """As in DDP: zero from a replica that does not use it, None where none does; and buffers are the first replica's."""
    results = workers.run(unused_parameters, 4, find=True, deadline=DEADLINE)
    for rank in (0, 2):
        (grads, mean), (others, other_mean) = results[rank], results[rank + 1]
        for name, grad in grads.items():
            if name.startswith("c."):
                assert grad is None
                assert others[name] is None
            else:
                assert torch.equal(grad, others[name]), name
        assert mean.abs().max() < 100
        assert other_mean.abs().max() < 100
    for message in workers.run(unused_parameters, 4, find=False, deadline=DEADLINE):
        assert "no microbatch gave a gradient to" in message
        assert "find_unused_parameters=True" in message


def refusals() -> list[str]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    static = DistributedDataParallel(nn.Linear(1, 1), static_graph=True)
    wrapped = (
        nn.Sequential(FullyShardedDataParallel(nn.Linear(1, 1), device_mesh=mesh, device_id=torch.device("cpu"))),
        static,
        replicate_with_ddp(nn.Linear(1, 1)),
    )
    messages = []
    for module in wrapped:
        with pytest.raises(StageUsageError) as failure:
            find_data_parallel(module)
        messages.append(str(failure.value))
    assert find_data_parallel(nn.Linear(1, 1)) is None
    # A plan that was lowered for plain stages would leave the replicas apart.
    stage = PipelineStage(DistributedDataParallel(nn.Linear(1, 1)), 0, 1, "cpu")
    with pytest.raises(StageUsageError) as failure:
        Executor(stage, lower(gpipe(1, 1)), functional.mse_loss)
    messages.append(str(failure.value))
    Executor(stage, lower(gpipe(1, 1), reduced=[0]), functional.mse_loss)
    return messages


def test_p124_wrappings_that_cannot_be_held_back_are_refused(workers: WorkerPool) -> None:
    messages, _ = workers.run(refusals, 2, deadline=DEADLINE)
    assert "module '0' is a FullyShardedDataParallel" in messages[0]
    assert "use torch.distributed.fsdp.fully_shard" in messages[0]
    assert "the stage's module is a DistributedDataParallel with static_graph=True" in messages[1]
    assert "composable replicate()" in messages[2]
    assert "lowered without 0REDUCE_GRAD" in messages[3]
    assert "reduced=[0]" in messages[3]


# FSDP2.


@contextlib.contextmanager
def collectives(note: Callable[[str], None]) -> Iterator[None]:
    """Within it, every gather and every reduction of shards is noted."""
    kinds = {  # by name in one version of torch or another
        "all_gather_into_tensor": "gather",
        "all_gather_single": "gather",
        "reduce_scatter_tensor": "reduce",
        "reduce_scatter_single": "reduce",
    }
    originals = {name: getattr(dist, name) for name in kinds if hasattr(dist, name)}

    def noted(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            note(kinds[name])
            return originals[name](*args, **kwargs)

        return call

    for name in originals:
        setattr(dist, name, noted(name))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def traffic(make: Callable[[int, int], Schedule]) -> tuple[list[dict[str, int]], tuple[Action, ...], list[bool]]:
    """Collectives of the first and second step and of an evaluation, the rank's plan, and whether anything stays gathered."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    layers = build_layers()
    executor = executor_on(mesh, wrap_fsdp_layers, make(2, 4), layers)
    inputs, target = own_half(mesh, executor)
    log: list[str] = []
    found = []
    with collectives(log.append):
        for run in (executor.step, executor.step, executor.eval):
            run(*inputs, target=target)
            found.append(dict(collections.Counter(log)))
            log.clear()
    gathered = [not isinstance(p, DTensor) for p in executor.parameters()]
    rank = mesh.get_local_rank("pp")
    return found, executor.plan.actions[rank], gathered


def test_p123_parameters_are_gathered_and_gradients_reduced_where_the_plan_says(workers: WorkerPool) -> None:
    """Each of a rank's two layers is gathered once and reduced once a step, and everything is freed at the end."""

    def all_traffic() -> list[Any]:
        return [traffic(make) for make in (one_f_one_b, zb_h1, zbv, looped_bfs)]

    for found in workers.run(all_traffic, 4, deadline=DEADLINE):
        for counts, plan, gathered in found:
            assert counts[0] == counts[1] == {"gather": 2, "reduce": 2}
            assert counts[2] == {"gather": 2}
            assert not any(gathered)
            for stage in {action.stage for action in plan}:
                own = [a.kind for a in plan if a.stage == stage and (a.kind.is_compute or not a.kind.has_microbatch)]
                assert own[0] is Kind.UNSHARD
                assert own[-2:] == [Kind.REDUCE_GRAD, Kind.RESHARD]
                assert all(kind.is_compute for kind in own[1:-2])


def first_steps() -> dict[str, Any]:
    """Two steps of sharded stages, that declare their values or not; what was sent and gathered in which order."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    rank = mesh.get_local_rank("pp")
    inner = C10dTransport(mesh.get_group("pp"))
    x, y = (part[mesh.get_local_rank("dp") * ROWS :][:ROWS] for part in batch())
    value, needs = torch.zeros(ROWS // 4, WIDTH), torch.zeros(ROWS // 4, WIDTH, requires_grad=True)
    found = {}
    for declared in (False, True):
        transport = RecordingTransport(inner)
        options = {"input_args": needs if rank else value, "output_args": needs} if declared else {}
        (stage,) = stages_on(mesh, wrap_fsdp_layers, Placement.loop(2, 2), build_layers(), **options)
        executor = Executor(stage, one_f_one_b(2, 4), functional.mse_loss, transport=transport)
        gathers, forwards = [], []
        stage.submodule.register_forward_pre_hook(lambda *_, log=forwards: log.append(1))
        with collectives(lambda kind, log=gathers, carrier=transport: log.append((kind, len(carrier.steps)))):
            executor.step(*((x,) if stage.is_first else ()), target=y if stage.is_last else None)
            sent = transport.steps[:]
            executor.step(*((x,) if stage.is_first else ()), target=y if stage.is_last else None)
        first = next(position for kind, position in gathers if kind == "gather")
        agreeing = {
            n for n, one in enumerate(sent) if isinstance(one, Post) and any(op.microbatch == -1 for op in one.ops)
        }
        done = {one.post for one in sent[:first] if isinstance(one, Wait)}
        found[declared] = len(forwards), len(gathers), len(agreeing), len(agreeing - done)
    inner.close()
    return found


def test_p015_nothing_is_agreed_on_while_parameters_are_gathered(workers: WorkerPool) -> None:
    """In torch the stages of a first step were probed, and the probe's gathers met the messages about shapes."""
    for found in workers.run(first_steps, 4, deadline=DEADLINE):
        for forwards, collective, agreeing, pending in found.values():
            assert forwards == 2 * 4  # no stage runs to be probed
            assert collective == 2 * (2 + 2)  # two layers, each gathered and reduced once a step
            assert agreeing > 0
            assert pending == 0  # all that is agreed on has arrived when the first gather starts


def wrap_mixed(module: nn.Module, mesh: Any) -> nn.Module:
    """Computes in bfloat16, accumulates and reduces in float32."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)
    for layer in module:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    return fully_shard(module, mesh=mesh, mp_policy=policy)


def wrap_partly_frozen(module: nn.Module, mesh: Any) -> nn.Module:
    for layer in module:
        layer.up.requires_grad_(False)
    return wrap_fsdp(module, mesh)


def some_schedules(wrap: Wrap) -> dict[str, dict[str, Any]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    found = {}
    for make in (one_f_one_b, zb_h1):
        executor = executor_on(mesh, wrap, make(2, 4), build_layers())
        inputs, target = own_half(mesh, executor)
        executor.step(*inputs, target=target)
        (stage,) = executor.stages
        found[make.__name__] = {
            f"{int(name[0]) + 2 * stage.stage_index}{name[1:]}": None if p.grad is None else whole(p.grad)
            for name, p in stage.submodule.named_parameters()
        }
        executor.transport.close()
    return found


def test_mixed_precision_and_frozen_parameters(workers: WorkerPool) -> None:
    expected = plain_grads()

    def both() -> tuple[Any, Any]:
        return some_schedules(wrap_mixed), some_schedules(wrap_partly_frozen)

    for mixed, frozen in workers.run(both, 4, deadline=DEADLINE):
        for grads in mixed.values():
            for parameter, grad in grads.items():
                assert grad.dtype == torch.float32
                torch.testing.assert_close(grad, expected[parameter], rtol=0.1, atol=0.02)
        for grads in frozen.values():
            for parameter, grad in grads.items():
                assert (grad is None) == (".up." in parameter)
                if grad is not None:
                    torch.testing.assert_close(grad, expected[parameter])


def hybrid() -> list[Any]:
    """One pipeline rank, two by two replicas: sharded over one axis and replicated over the other."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    module = wrap_fsdp(nn.Sequential(*build_layers()), mesh)
    rows = [[Action(0, kind, m) for m in range(3) for kind in (Kind.F, Kind.I, Kind.W)]]
    schedule = Schedule("split", Placement.loop(1, 1), 3, rows)
    executor = Executor(PipelineStage(module, 0, 1, "cpu"), schedule, functional.mse_loss, transport=None)
    x, y = (part[dist.get_rank() * 6 :][:6] for part in batch())
    executor.step(x, target=y)
    return [whole(parameter.grad) for parameter in module.parameters()]


def test_hybrid_sharding(workers: WorkerPool) -> None:
    for grads in workers.run(hybrid, 4, deadline=DEADLINE):
        for grad, expected in zip(grads, plain_grads().values(), strict=True):
            torch.testing.assert_close(grad, expected)
