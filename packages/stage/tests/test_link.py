"""What may cross between stages, and between which, against the plain model."""

from __future__ import annotations

import enum
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import attrs
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn import functional

from stepwell_meta.exceptions import MetadataError, PipeliningMetadataError
from stepwell_meta.testing import WorkerPool
from stepwell_p2p import C10dTransport, Placement, Post, Rules, Transport, Wire
from stepwell_p2p.exceptions import PeerFailure
from stepwell_p2p.testing import RecordingTransport
from stepwell_stage import Action, Executor, Kind, PipelineStage, Schedule
from stepwell_stage.exceptions import ScheduleError, StageUsageError
from stepwell_stage.schedules import gpipe, one_f_one_b

Threads = Callable[..., list[Any]]
WIDTH = 4


def seeded(*modules: nn.Module) -> list[nn.Module]:
    generator = torch.Generator().manual_seed(0)
    for module in modules:
        for parameter in module.parameters():
            nn.init.uniform_(parameter, -0.5, 0.5, generator=generator)
    return list(modules)


def batch(rows: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(rows, WIDTH, generator=generator), torch.randn(rows, WIDTH, generator=generator)


def step(
    transport: Transport, build: Callable[[], Sequence[nn.Module]], schedule: Schedule, **options: Any
) -> tuple[list[Any], float | None]:
    """A step; the gradients of this rank, stage by stage, and the loss."""
    modules = build()
    stages = [
        PipelineStage(modules[index], index, len(modules), "cpu", **options)
        for index in schedule.placement.stages_of(transport.rank)
    ]
    executor = Executor(stages, schedule, functional.mse_loss, transport=transport)
    x, y = batch()
    for _ in range(2):  # the first step learns, the second knows
        executor.step(*((x,) if executor.is_first else ()), target=y if executor.is_last else None)
    grads = [(stage.stage_index, [p.grad for p in stage.submodule.parameters()]) for stage in stages]
    return grads, None if executor.loss is None else executor.loss.item()


def assert_like_plain(
    results: list[Any], build: Callable[[], Sequence[nn.Module]], forward: Callable[..., Any], microbatches: int
) -> None:
    modules = build()
    x, y = batch()
    for _ in range(2):
        for part, target in zip(x.tensor_split(microbatches), y.tensor_split(microbatches), strict=True):
            (functional.mse_loss(forward(modules, part), target) * (len(part) / len(x))).backward()
    found = dict(pair for grads, _ in results for pair in grads)
    for index, module in enumerate(modules):
        for grad, parameter in zip(found[index], module.parameters(), strict=True):
            if parameter.grad is None:
                assert grad is None or not grad.any(), index
            else:
                assert grad is not None, index
                assert torch.equal(grad, parameter.grad), index


def looped(placement: Placement, microbatches: int) -> Schedule:
    """All forwards and then all backwards, on any placement."""
    rows = []
    for rank in range(placement.num_ranks):
        own = placement.stages_of(rank)
        rows.append(
            [Action(stage, Kind.F, m) for stage in own for m in range(microbatches)]
            + [Action(stage, Kind.B, m) for stage in own[::-1] for m in range(microbatches)]
        )
    return Schedule("looped", placement, microbatches, rows)


# Skip connections.


class Down(nn.Module):
    """Gives its result to the next stage and to a later one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.linear(x)
        return h.tanh(), h


class Up(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, h: torch.Tensor, *skipped: torch.Tensor) -> torch.Tensor:
        for skip in skipped:
            h = self.linear(h) + skip
        return h


def build_unet() -> list[nn.Module]:
    return seeded(Down(), Down(), Up(), Up())


def run_unet(m: Sequence[nn.Module], x: torch.Tensor) -> torch.Tensor:
    a, skip_a = m[0](x)
    b, skip_b = m[1](a)
    c = m[2](b, skip_b, a)
    return m[3](c, skip_a, a, skip_b)


UNET = [
    Wire(0, 0, 1, 0),
    Wire(1, 0, 2, 0),
    Wire(1, 1, 2, 1),
    Wire(0, 0, 2, 2),
    Wire(2, 0, 3, 0),
    Wire(0, 1, 3, 1),
    Wire(0, 0, 3, 2),  # a third user of one output
    Wire(1, 1, 3, 3),
]


@pytest.mark.parametrize("rules", [Rules(tagged=True, rendezvous=False), Rules(tagged=False, rendezvous=True)])
@pytest.mark.parametrize(
    "schedule",
    [
        gpipe(4, 3),
        one_f_one_b(4, 5),
        one_f_one_b(4, 2),
        looped(Placement.loop(4, 2), 3),
        looped(Placement.v(4, 2), 3),
        looped(Placement.loop(4, 1), 2),
        looped(Placement.custom([0, 1, 0, 2]), 3),
    ],
    ids=lambda schedule: f"{schedule.name}{schedule.placement.ranks}",
)
def test_p076_p078_p080_skip_connections_and_several_users_of_one_output(
    threads: Threads, schedule: Schedule, rules: Rules
) -> None:
    """Wires between any two stages, forward and backward, without passing through others."""
    results = threads(step, schedule.placement.num_ranks, build_unet, schedule, wires=UNET, rules=rules)
    assert_like_plain(results, build_unet, run_unet, schedule.num_microbatches)


def test_skip_connections_on_gloo(workers: WorkerPool) -> None:
    def run() -> Any:
        return step(C10dTransport(), build_unet, one_f_one_b(4, 5), wires=UNET)

    assert_like_plain(workers.run(run, 4), build_unet, run_unet, 5)


class InPlace(nn.Module):
    """Gives two small values and a large one, and writes to all that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.large = nn.Parameter(torch.ones(1 << 14))

    def forward(
        self, x: torch.Tensor, count: torch.Tensor | None = None, large: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, ...]:
        if count is None or large is None:
            return self.linear(x), torch.ones(3, dtype=torch.int64), x.sum() * self.large.expand(2, -1)
        h = self.linear(x.mul_(0.5).add_(1))
        return h, count.add_(1), large.add_(h.sum()) * self.large


class Ends(InPlace):
    def forward(self, x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        h, count, large = super().forward(x, *others)
        return h + large.mean() * count.sum()


def build_in_place() -> list[nn.Module]:
    return seeded(InPlace(), InPlace(), Ends())


def sent_messages(transport: Transport, *args: Any, **options: Any) -> tuple[Any, dict[tuple[str, int, int], float]]:
    """Two steps, and how many messages this rank sent in each for one microbatch: by kind, stage, and rank that gets them."""
    recorder = RecordingTransport(transport)
    result = step(recorder, *args, **options)
    ops = [op for post in recorder.steps if isinstance(post, Post) for op in post.ops]
    sent = Counter(
        (op.kind.value, op.stage, op.edge.destination) for op in ops if op.kind.is_send and op.microbatch == 2
    )
    return result, {key: count / 2 for key, count in sent.items()}


@pytest.mark.parametrize("rules", [Rules(tagged=True, rendezvous=False), Rules(tagged=False, rendezvous=True)])
def test_small_values_of_a_microbatch_travel_as_one_message(threads: Threads, rules: Rules) -> None:
    """Of several outputs the small ones together and each large one alone; of several wires to one stage likewise."""
    found = threads(sent_messages, 3, build_in_place, one_f_one_b(3, 4), rules=rules)
    assert_like_plain([result for result, _ in found], build_in_place, lambda m, x: m[2](*m[1](*m[0](x))), 4)
    # Gradients: one small, one large.
    assert [counts for _, counts in found] == [
        {("SEND_F", 0, 1): 2},
        {("SEND_F", 1, 2): 2, ("SEND_B", 1, 0): 2},
        {("SEND_B", 2, 1): 2},
    ]
    found = threads(sent_messages, 4, build_unet, one_f_one_b(4, 4), wires=UNET, rules=rules)
    assert_like_plain([result for result, _ in found], build_unet, run_unet, 4)
    assert [counts for _, counts in found] == [
        {("SEND_F", 0, 1): 1, ("SEND_F", 0, 2): 1, ("SEND_F", 0, 3): 1},
        {("SEND_F", 1, 2): 1, ("SEND_F", 1, 3): 1, ("SEND_B", 1, 0): 1},
        {("SEND_F", 2, 3): 1, ("SEND_B", 2, 0): 1, ("SEND_B", 2, 1): 1},
        {("SEND_B", 3, 0): 1, ("SEND_B", 3, 1): 1, ("SEND_B", 3, 2): 1},
    ]


@pytest.mark.parametrize(
    ("wires", "words"),
    [
        ([Wire(0, 0, 1, 0)], "no wire leads to stage 2"),
        (
            [Wire(0, 0, 1, 0), Wire(0, 0, 2, 1)],
            r"inputs of stage 2 must be 0, 1, 2, … .* the wires lead to inputs \[1\]",
        ),
        ([Wire(0, 0, 1, 0), Wire(0, 0, 2, 0), Wire(1, 0, 2, 0)], r"lead to inputs \[0, 0\]"),
        ([Wire(0, 0, 1, 0), Wire(1, 0, 3, 0)], "leads to a stage that is not there: stages are 0 to 2"),
    ],
)
def test_wires_that_do_not_fit_are_refused(wires: list[Wire], words: str) -> None:
    stage = PipelineStage(nn.Linear(1, 1), 0, 3, "cpu", wires=wires)
    with pytest.raises(ScheduleError, match=words):
        Executor(stage, gpipe(3, 2), functional.mse_loss)


def raising(transport: Transport, *args: Any, **options: Any) -> str:
    try:
        step(transport, *args, **options)
    except (PipeliningMetadataError, PeerFailure) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_ranks_with_different_wires_are_told_before_anything_runs(threads: Threads) -> None:
    def run(transport: Transport) -> str:
        wires = UNET if transport.rank else [*UNET[:-2], Wire(0, 1, 3, 2), UNET[-1]]
        return raising(transport, build_unet, gpipe(4, 2), wires=wires)

    assert set(threads(run, 4)) == {
        "PipeliningMetadataError: stage 0 was given other wires than stage 1: give every stage the same"
    }


def test_a_wire_from_an_output_that_is_not_there(threads: Threads) -> None:
    wires = [*UNET[:-1], Wire(1, 5, 3, 3)]
    results = threads(raising, 4, build_unet, gpipe(4, 2), wires=wires)
    assert results[1].startswith("PipeliningMetadataError: ")
    assert "starts at output 5 of stage 1, which returns 2 tensors" in results[1]
    assert all(result.startswith("PeerFailure: rank 1, stage 1") for result in (results[0], *results[2:]))


# Structures.


class Pair(NamedTuple):
    first: torch.Tensor
    second: Any


class Color(enum.Enum):
    RED = 2


@attrs.frozen
class Box:
    content: Any
    label: str


class Wraps(nn.Module):
    """Returns a nested structure with tensors of many kinds."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.kind = kind

    def forward(self, x: torch.Tensor) -> Any:
        h = self.linear(x)
        positions = torch.arange(len(x))
        return {
            "dict": lambda: {"h": h, "positions": positions, "scale": 2.0, "nothing": None},
            "list": lambda: [h, [positions, {"deep": (h * 2, "text")}]],
            "ordered": lambda: OrderedDict(h=h, extra=OrderedDict(half=h.bfloat16())),
            "complex": lambda: (h.to(torch.complex64), positions.bool(), torch.tensor(3.0)),
            "twice": lambda: (h, h, x),
            "transposed": lambda: (h.t(), h[:, ::2], h.sum(dim=1, keepdim=True).expand(-1, WIDTH)),
            "empty": lambda: (h, h[:0], torch.zeros(len(x), 0, dtype=torch.int8)),
            "classes": lambda: Box(Pair(h, [positions, Color.RED]), "label"),
        }[self.kind]()


class Unwraps(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.kind = kind

    def forward(self, *values: Any) -> torch.Tensor:
        v: Any = values
        h = {
            "dict": lambda: v[0]["h"] * v[0]["scale"] + v[0]["positions"][:, None],
            "list": lambda: v[0] + v[1][0][:, None] + v[1][1]["deep"][0],
            "ordered": lambda: v[0]["h"] + v[0]["extra"]["half"].float(),
            "complex": lambda: v[0].real * v[2] + v[1][:, None],
            "twice": lambda: v[0] * v[1] + v[2],
            "transposed": lambda: v[0].t() + v[1].repeat(1, 2) + v[2],
            "empty": lambda: v[0] + v[1].sum() + v[2].sum(),
            "classes": lambda: v[0].content.first + v[0].content.second[0][:, None] * v[0].content.second[1].value,
        }[self.kind]()
        return self.linear(h)


def call_with(value: Any) -> tuple[Any, ...]:
    return tuple(value) if type(value) in (tuple, list) else (value,)


@pytest.mark.parametrize("kind", ["dict", "list", "ordered", "complex", "twice", "transposed", "empty", "classes"])
def test_p048_p049_p053_p054_p063_p064_any_structure_of_any_tensors(threads: Threads, kind: str) -> None:
    """Structures, dtypes, and layouts, also of gradients."""

    def build() -> list[nn.Module]:
        return seeded(Wraps(kind), Unwraps(kind))

    for schedule in (one_f_one_b(2, 4), looped(Placement.loop(2, 1), 4)):
        results = threads(step, schedule.placement.num_ranks, build, schedule)
        assert_like_plain(results, build, lambda m, x: m[1](*call_with(m[0](x))), 4)


def test_classes_that_cannot_be_found_by_name_are_given(threads: Threads) -> None:
    @attrs.frozen
    class Local:
        h: torch.Tensor

    class Makes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> Local:
            return Local(self.linear(x))

    class Takes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, value: Local) -> torch.Tensor:
            return self.linear(value.h)

    def build() -> list[nn.Module]:
        return seeded(Makes(), Takes())

    results = threads(step, 2, build, gpipe(2, 2), classes=[Local])
    assert_like_plain(results, build, lambda m, x: m[1](m[0](x)), 2)
    with pytest.raises(MetadataError, match="Local is not known here: pass it in `classes`"):
        threads(step, 2, build, gpipe(2, 2))


# Shapes that depend on the data.


class Selects(nn.Module):
    """Keeps the rows with a positive first value: how many is known only when it ran."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        kept = x[:, 0] > 0
        return self.linear(x[kept]), kept


class Middle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, rows: torch.Tensor, kept: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.linear(rows).tanh(), kept


class Scatters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, rows: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        whole = torch.zeros(len(kept), WIDTH)
        whole[kept] = self.linear(rows)
        return whole


def build_selecting() -> list[nn.Module]:
    return seeded(Selects(), Middle(), Scatters())


def run_selecting(m: Sequence[nn.Module], x: torch.Tensor) -> torch.Tensor:
    return m[2](*m[1](*m[0](x)))


@pytest.mark.parametrize("rules", [Rules(tagged=True, rendezvous=False), Rules(tagged=False, rendezvous=True)])
@pytest.mark.parametrize("schedule", [gpipe(3, 4), one_f_one_b(3, 4), looped(Placement.custom([0, 1, 0]), 4)])
def test_p009_p010_p030_p033_dynamic_shapes(threads: Threads, schedule: Schedule, rules: Rules) -> None:
    """Every microbatch has its own shape; it depends on the data."""
    ranks = schedule.placement.num_ranks
    results = threads(step, ranks, build_selecting, schedule, shapes="dynamic", rules=rules)
    assert_like_plain(results, build_selecting, run_selecting, 4)


def test_dynamic_shapes_on_gloo(workers: WorkerPool) -> None:
    def run() -> Any:
        return step(C10dTransport(), build_selecting, one_f_one_b(3, 4), shapes="dynamic")

    assert_like_plain(workers.run(run, 3), build_selecting, run_selecting, 4)


def test_static_shapes_refuse_them_with_the_way_out(threads: Threads) -> None:
    results = threads(raising, 3, build_selecting, gpipe(3, 4))
    assert results[0].startswith("PipeliningMetadataError: stage 0: output 0: shape mismatch")
    assert 'build the stages with shapes="dynamic"' in results[0]
    assert all(result.startswith("PeerFailure: rank 0, stage 0") for result in results[1:])


def test_stages_that_disagree_about_shapes_are_told(threads: Threads) -> None:
    def run(transport: Transport) -> str:
        shapes = "dynamic" if transport.rank == 2 else "static"
        return raising(transport, build_selecting, gpipe(3, 4), shapes=shapes)

    assert set(threads(run, 3)) == {
        "PipeliningMetadataError: stage 0 has shapes='static', stage 2 'dynamic': make them equal"
    }


def test_an_unknown_kind_of_shapes_is_refused() -> None:
    shapes: Any = "elastic"
    with pytest.raises(StageUsageError, match="'static' or 'dynamic', got 'elastic'"):
        PipelineStage(nn.Linear(1, 1), 0, 1, "cpu", shapes=shapes)


# DTensors.


class TensorParallel(nn.Module):
    """A layer whose weight is sharded over the ranks of a mesh, and whose output stays so, or partial."""

    def __init__(self, mesh: Any, weight: torch.Tensor, placements: Sequence[Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(distribute_tensor(weight, mesh, placements))
        self.mesh = mesh

    def forward(self, x: Any) -> DTensor:
        if not isinstance(x, DTensor):
            x = DTensor.from_local(x, self.mesh, [Replicate()], run_check=False)
        return x @ self.weight


class Whole(nn.Module):
    """The last layer: makes a plain tensor of what it gets."""

    def __init__(self, weight: torch.Tensor, expected: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.expected = expected

    def forward(self, x: DTensor) -> torch.Tensor:
        assert isinstance(x, DTensor)
        assert x.placements == (self.expected,)
        assert x.shape[1] == WIDTH
        return x.redistribute(placements=[Replicate()]).to_local() @ self.weight


def weights() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(WIDTH, WIDTH, generator=generator) for _ in range(2)]


def dtensor_step(placement: Any) -> tuple[Any, Any]:
    """pp=2 x tp=2; rank r is in pipeline r % 2 with stage r // 2."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    rank = dist.get_rank()
    first, last = weights()
    spread = Shard(1) if placement == Shard(1) else Shard(0)
    transport = C10dTransport(mesh["pp"].get_group())
    module: nn.Module
    if rank // 2 == 0:
        module = TensorParallel(mesh["tp"], first, [spread])
        if spread == Shard(0):
            inner = module

            class Sliced(nn.Module):
                """The weight's rows are sharded, so the input's columns are: the product is a partial sum."""

                def __init__(self) -> None:
                    super().__init__()
                    self.inner = inner

                def forward(self, x: torch.Tensor) -> DTensor:
                    whole = DTensor.from_local(x, mesh["tp"], [Replicate()], run_check=False)
                    return whole.redistribute(placements=[Shard(1)]) @ self.inner.weight

            module = Sliced()
    else:
        module = Whole(last, placement)
    stage = PipelineStage(module, rank // 2, 2, "cpu", get_mesh=lambda key: mesh["tp"])
    executor = Executor(stage, one_f_one_b(2, 4), functional.mse_loss, transport=transport)
    x, y = batch()
    for _ in range(2):
        executor.step(*((x,) if executor.is_first else ()), target=y if executor.is_last else None)
    (parameter,) = executor.parameters()
    grad: Any = parameter.grad
    return (grad.full_tensor() if isinstance(grad, DTensor) else grad), executor.loss


@pytest.mark.parametrize("placement", [Shard(1), Partial()])
def test_a13_p128_p129_p130_dtensors_cross_as_shards_and_are_made_again(workers: WorkerPool, placement: Any) -> None:
    """A13, P128-P130: mesh, placements and global shape come with them; a partial's gradient is replicated, and right."""
    results = workers.run(dtensor_step, 4, placement)
    first, last = (weight.requires_grad_() for weight in weights())
    x, y = batch()
    for _ in range(2):
        for part, target in zip(x.tensor_split(4), y.tensor_split(4), strict=True):
            (functional.mse_loss(part @ first @ last, target) / 4).backward()
    for rank, (grad, _) in enumerate(results):
        expected = (first if rank < 2 else last).grad
        # Two halves are multiplied and then added, so sums of four products are rounded in another order.
        torch.testing.assert_close(grad, expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[2][0], results[3][0])
