"""A script for torch's pipelining, run with torch's and with our imports; and what the classes take and refuse."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import schedules as torchs
from torch.nn import functional

import stepwell_stage
from stepwell_meta.testing import WorkerPool
from stepwell_p2p import LoopbackFabric, Transport
from stepwell_stage import (
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
    get_schedule_class,
)
from stepwell_stage.exceptions import ScheduleError, StageUsageError
from stepwell_stage.schedules import from_csv, gpipe, interleaved_1f1b, zbv

Threads = Callable[..., list[Any]]
SCRIPT = Path(__file__).with_name("tutorial.py")
NAMES = ["GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]


def run_script(text: str, function: str, names: list[str]) -> dict[str, Any]:
    """What a function of the script gives for each schedule, on one rank."""
    script: dict[str, Any] = {"__name__": "tutorial"}
    exec(compile(text, str(SCRIPT), "exec"), script)
    return {name: script[function](name, dist.get_rank(), dist.get_world_size()) for name in names}


def with_both_imports(workers: WorkerPool, ranks: int, function: str, names: list[str]) -> tuple[list[Any], list[Any]]:
    """On each rank what the script gives as it stands, and with nothing changed but its imports."""
    text = SCRIPT.read_text()
    changed, count = re.subn(r"from torch\.distributed\.pipelining(\.\w+)? import", "from stepwell_stage import", text)
    assert count == text.count("from torch.distributed.pipelining")
    expected = workers.run(run_script, ranks, text, function, names, deadline=120)
    return expected, workers.run(run_script, ranks, changed, function, names, deadline=120)


@pytest.mark.parametrize(("ranks", "names"), [(2, NAMES), (4, NAMES[:2])])
def test_a_script_for_torch_runs_after_changing_its_imports(workers: WorkerPool, ranks: int, names: list[str]) -> None:
    expected, found = with_both_imports(workers, ranks, "train", names)
    for theirs, ours in zip(expected, found, strict=True):
        for name in names:
            (their_losses, their_grads), (our_losses, our_grads) = theirs[name], ours[name]
            assert our_losses == their_losses, name  # M is a power of 2, so nothing is rounded by when it is divided
            assert our_grads.keys() == their_grads.keys()
            for stage, grads in their_grads.items():
                assert all(map(torch.equal, our_grads[stage], grads)), (name, stage)
    assert any(ours["GPipe"][0] for ours in found)


def test_every_argument_means_what_it_means_there(workers: WorkerPool) -> None:
    """Those of constructors, step and eval: outputs, losses and gradients are torch's, and so is what is not returned."""
    expected, found = with_both_imports(workers, 2, "with_all_arguments", NAMES)
    for theirs, ours in zip(expected, found, strict=True):
        for name in NAMES:
            torch.testing.assert_close(ours[name], theirs[name], rtol=1e-5, atol=1e-5)
    last = next(results for output, results in (rank["GPipe"][0][0] for rank in found) if output is not None)
    assert len(last) == 4


def test_names_and_arguments_are_torchs() -> None:
    for name in (*NAMES, "PipelineScheduleSingle", "PipelineScheduleMulti"):
        ours, theirs = get_schedule_class(name), torchs.get_schedule_class(name)
        assert get_schedule_class(name.upper()) is get_schedule_class(name.lower()) is ours
        assert ours.__name__ == theirs.__name__
        assert getattr(stepwell_stage, ours.__name__) is ours
        kinds = (PipelineScheduleSingle, torchs.PipelineScheduleSingle)
        assert issubclass(ours, kinds[0]) == issubclass(theirs, kinds[1])
        taken, wanted = (inspect.signature(cls.__init__).parameters for cls in (ours, theirs))
        shared = [parameter for parameter in taken if parameter in wanted]
        assert shared == [*wanted], name
        assert all(taken[each].default == wanted[each].default for each in shared if each != "self")
        for method in ("step", "eval"):
            theirs_take = inspect.signature(getattr(theirs, method)).parameters
            assert theirs_take.keys() <= inspect.signature(getattr(ours, method)).parameters.keys()


WIDTH = 6


def layers() -> list[nn.Module]:
    generator = torch.Generator().manual_seed(0)
    made: list[nn.Module] = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)]
    for module in made:
        for parameter in module.parameters():
            nn.init.uniform_(parameter, -0.5, 0.5, generator=generator)
    return made


def batch(rows: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(rows, WIDTH, generator=generator), torch.randn(rows, WIDTH, generator=generator)


def alone(count: int = 4) -> list[PipelineStage]:
    transport = LoopbackFabric(1).transport(0)
    return [
        PipelineStage(module, index, count, "cpu", transport=transport) for index, module in enumerate(layers()[:count])
    ]


def plain(reduction: str, scale: float = 1.0) -> list[torch.Tensor]:
    model, (x, y) = nn.Sequential(*layers()), batch()
    (functional.mse_loss(model(x), y, reduction=reduction) * scale).backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def test_what_would_have_no_effect_is_refused() -> None:
    """Torch reads ``scale_grads`` in each step; here it was an attribute that nobody read. And a tuple cannot hold losses."""
    schedule = ScheduleGPipe(alone(1)[0], 2, functional.mse_loss)
    assert schedule.scale_grads is True
    with pytest.raises(AttributeError, match="scale_grads"):
        schedule.scale_grads = False  # type: ignore[misc]
    x, y = batch()
    with pytest.raises(StageUsageError, match="losses is a list"):
        schedule.step(x, target=y, losses=())  # type: ignore[arg-type]


@pytest.mark.parametrize("cls", [ScheduleLoopedBFS, ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble])
@pytest.mark.parametrize("microbatches", [1, 3, 4])
@pytest.mark.parametrize("averages", [True, False])
def test_scale_grads_goes_with_the_loss(cls: Any, microbatches: int, *, averages: bool) -> None:
    """Also where M does not divide the batch, which torch's classes refuse or get wrong."""
    reduction = "mean" if averages else "sum"

    def loss(output: torch.Tensor, target: torch.Tensor, *, scale: float) -> torch.Tensor:
        return functional.mse_loss(output, target, reduction=reduction) * scale

    schedule = cls(alone(), microbatches, loss_fn=loss, scale_grads=averages)
    x, y = batch()
    losses = [torch.ones(())]
    schedule.step(x, target=y, losses=losses, loss_kwargs={"scale": 0.5}, return_outputs=False)
    assert len(losses) == microbatches
    for mine, grad in zip(schedule.executor.parameters(), plain(reduction, 0.5), strict=True):
        torch.testing.assert_close(mine.grad, grad)


def test_chunk_and_merge_specs_and_evaluation() -> None:
    x, y = batch()
    (stage,) = alone(1)
    spec = stepwell_stage.TensorChunkSpec
    schedule = ScheduleGPipe(stage, 2, functional.mse_loss, (spec(0),), {}, spec(0))
    expected = layers()[0](x)
    torch.testing.assert_close(schedule.step(x, target=y), expected.detach())
    losses: list[torch.Tensor] = []
    torch.testing.assert_close(schedule.eval(x, target=y, losses=losses), expected.detach())
    assert len(losses) == 2
    assert schedule.eval(x, return_outputs=False) is None


def test_without_a_loss_steps_run_forward_only() -> None:
    x, _ = batch()
    for schedule in (Schedule1F1B(alone(1)[0], 2), ScheduleLoopedBFS(alone(), 2)):
        assert schedule.step(x).shape == x.shape
        assert all(parameter.grad is None for parameter in schedule.executor.parameters())


def v_step(transport: Transport, cls: Any, **options: Any) -> list[Any]:
    x, y = batch()
    indices = [transport.rank, 3 - transport.rank]
    stages = [PipelineStage(layers()[index], index, 4, "cpu", transport=transport) for index in indices]
    schedule = cls(stages, 4, functional.mse_loss, **options)
    assert schedule.stage_index_to_group_rank == {0: 0, 1: 1, 2: 1, 3: 0}
    schedule.step(*((x,) if transport.rank == 0 else ()), target=y if transport.rank == 0 else None)
    expected = plain("mean")
    for stage in stages:
        for grad, parameter in zip(expected[2 * stage.stage_index :], stage.submodule.parameters(), strict=False):
            torch.testing.assert_close(parameter.grad, grad)
    return [str(action) for action in schedule.executor.plan.actions[transport.rank]]


@pytest.mark.parametrize("cls", [ScheduleZBVZeroBubble, ScheduleDualPipeV])
def test_defer_pp_recv_posts_receives_just_before_their_use(threads: Threads, cls: Any) -> None:
    for options, ahead in (({}, 2), ({"defer_pp_recv": True}, 0)):
        plan = threads(v_step, 2, cls, **options)[1]
        receive, use = plan.index("1RECV_F1"), next(at for at, text in enumerate(plan) if "1F1" in text)
        between = [text for text in plan[receive:use] if stepwell_stage.Action.parse(text).kind.is_compute]
        assert len(between) == ahead


def test_files(tmp_path: Path) -> None:
    x, y = batch()
    file = tmp_path / "order.csv"
    schedule = ScheduleInterleaved1F1B(alone(), 4, functional.mse_loss)
    schedule._dump_csv(file, format="compute_only")
    assert from_csv(file, name="interleaved-1f1b") == interleaved_1f1b(1, 4, stages_per_rank=4)
    assert schedule.pipeline_order == {0: list(interleaved_1f1b(1, 4, stages_per_rank=4).actions[0])}
    loaded = PipelineScheduleMulti(alone(), 4, functional.mse_loss)
    with pytest.raises(StageUsageError, match=r"PipelineScheduleMulti has no schedule yet: call _load_csv\(\)"):
        loaded.step(x, target=y)
    loaded._load_csv(file)
    loaded.step(x, target=y)
    for mine, grad in zip(loaded.executor.parameters(), plain("mean"), strict=True):
        torch.testing.assert_close(mine.grad, grad)
    with pytest.raises(StageUsageError, match="is compute_only, but format='compute_comms'"):
        loaded._load_csv(file, format="compute_comms")
    with pytest.raises(StageUsageError, match="is for 4 microbatches, but n_microbatches is 3"):
        PipelineScheduleMulti(alone(), 3, functional.mse_loss)._load_csv(file)
    for use in (loaded._load_csv, loaded._dump_csv):
        with pytest.raises(StageUsageError, match="format must be one of compute_only, compute_comms, got 'both'"):
            use(file, format="both")
    file.write_text("0F0,nonsense\n")
    with pytest.raises(ScheduleError, match="line 1, cell 2"):
        loaded._load_csv(file)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: get_schedule_class("Gpip"), "there is no schedule class 'Gpip': choose one of 1F1B, Interleaved1F1B"),
        (lambda: PipelineScheduleSingle(alone(1)[0], 2), "has no order of its own: use ScheduleGPipe or Schedule1F1B"),
        (
            lambda: ScheduleZBVZeroBubble(alone(2), 2, functional.mse_loss, backward_requires_autograd=False),
            "backward_requires_autograd=False is for torch's custom functions",
        ),
        (
            lambda: PipelineScheduleMulti(alone(), 2, use_full_backward=True),
            "use_full_backward has no meaning any more, with torch neither: leave it out",
        ),
        (
            lambda: ScheduleLoopedBFS(alone(), 2, functional.mse_loss).register_custom_function("FORWARD", print),
            r"a custom function for FORWARD reaches into torch's runtime.*handlers=\{Kind.B",
        ),
        (
            lambda: ScheduleGPipe(alone()[0], 2, functional.mse_loss),
            "gpipe runs on 4 ranks, but the transport has 1",
        ),
        (
            lambda: ScheduleDualPipeV(alone(), 4, functional.mse_loss),
            "dualpipe-v places stages .0, 1. on rank 0, but it was given",
        ),
    ],
)
def test_what_is_refused(make: Callable[[], object], sentence: str) -> None:
    with pytest.raises(StageUsageError, match=sentence):
        make()


def test_p100_a_v_over_looped_stages_names_the_placement() -> None:
    def looped(transport: Transport) -> None:
        stages = [PipelineStage(layers()[i], i, 4, "cpu", transport=transport) for i in (0, 2)]
        ScheduleZBVZeroBubble(stages, 4, functional.mse_loss)

    with pytest.raises(StageUsageError, match=r"zbv places stages \[0, 3\] on rank 0, .*placement is \[0, 1, 1, 0\]"):
        looped(LoopbackFabric(2).transport(0))
    assert zbv(2, 4).placement.stages_of(0) == (0, 3)  # the helper that says which stages to build
    assert gpipe(2, 4).placement.stages_of(1) == (1,)


def test_gradients_must_be_enabled() -> None:
    x, y = batch()
    schedule = ScheduleLoopedBFS(alone(), 2, functional.mse_loss)
    with torch.no_grad(), pytest.raises(StageUsageError, match=r"leave torch.no_grad\(\) or call eval\(\)"):
        schedule.step(x, target=y)
    schedule.step(x, target=y)


@pytest.mark.parametrize(
    ("cls", "given"), [(ScheduleLoopedBFS, []), (ScheduleZBVZeroBubble, "stage"), (ScheduleGPipe, "list")]
)
def test_a_stage_where_a_list_is_wanted_and_the_reverse(cls: Any, given: Any) -> None:
    """They were an IndexError, a TypeError and an AttributeError from inside."""
    stages = alone(1)
    with pytest.raises(StageUsageError, match=f"{cls.__name__} takes this rank's PipelineStages"):
        cls(
            {"stage": stages[0], "list": stages}.get(given, given) if isinstance(given, str) else given,
            2,
            functional.mse_loss,
        )
