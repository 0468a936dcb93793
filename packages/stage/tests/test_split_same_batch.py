"""Ranks that are each given the batch, and are given other ones: refused on every rank, and no gradient is touched."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stepwell_meta.exceptions import StepwellError
from stepwell_meta.testing import WorkerPool
from stepwell_p2p import C10dTransport, Transport
from stepwell_stage import Executor, schedules, split
from stepwell_stage.run._announce import SLOTS
from stepwell_stage.run._microbatch import Batch
from stepwell_stage.split import _alike
from stepwell_stage.split._alike import Alike
from stepwell_stage.split._inputs import Inputs

Outcome = tuple[list[str], bool]


class Words(nn.Module):
    """A loss inside, a norm with statistics, and an input that says how."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 4)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4))
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 50)

    def forward(self, ids: Tensor, labels: Tensor, scale: float = 1.0, **more: Any) -> Tensor:
        x = self.norm(self.embed(ids).mean(1))
        for layer in self.layers:
            x = layer(x) * scale
        return F.cross_entropy(self.head(x), labels[:, 0])


def batch(seed: int, size: int = 8, **more: Any) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randint(50, (size, 6), generator=generator) for name in ("ids", "labels")} | more


def parts(whole: Mapping[str, Any], count: int = 4) -> list[dict[str, Any]]:
    cut = {name: value.chunk(count) if isinstance(value, Tensor) else [value] * count for name, value in whole.items()}
    return [{name: cut[name][number] for name in whole} for number in range(count)]


def run(
    transport: Transport,
    steps: Sequence[Sequence[dict[str, Any]]],
    *,
    way: str = "step",
    is_cut: bool = False,
    inputs: Any = "every",
    name: str = "1f1b",
) -> Outcome:
    """Steps, each with a batch for every rank; what each said, and whether the last of them left gradients as they were."""
    torch.manual_seed(0)
    schedule = schedules.BY_NAME[name](transport.size, 4)
    cut = split(Words(), schedule.placement.num_stages, example=batch(0, 2, scale=1.0), inputs=inputs)
    stages = cut.stages(schedule.placement, transport.rank, "cpu", transport=transport)
    executor = Executor(stages, schedule, lambda loss: loss)
    said = []
    before: list[Tensor | None] = []
    for given in steps:
        before = [copy.deepcopy(parameter.grad) for parameter in executor.parameters()]
        mine = given[transport.rank] if inputs == "every" or executor.is_first else {}
        try:
            run_one = executor.step if way == "step" else executor.eval
            run_one(return_outputs=False, **({"kwarg_mbs": parts(mine) if mine else [{}] * 4} if is_cut else mine))
            said.append("")
        except StepwellError as error:
            said.append(str(error))
    after = [parameter.grad for parameter in executor.parameters()]
    same = all(
        a is b or (a is not None and b is not None and torch.equal(a, b)) for a, b in zip(before, after, strict=True)
    )
    return said, same


def steps_where(
    rank: int, at: int, other: dict[str, Any], ranks: int = 2, count: int = 3
) -> list[list[dict[str, Any]]]:
    return [[other if (one, step) == (rank, at) else batch(step) for one in range(ranks)] for step in range(count)]


@pytest.mark.parametrize("is_cut", [False, True])
@pytest.mark.parametrize("way", ["step", "eval"])
@pytest.mark.parametrize(("ranks", "at"), [(2, 0), (2, 2), (3, 0), (3, 1)])
def test_another_batch_on_one_rank(threads: Callable[..., Any], ranks: int, at: int, way: str, is_cut: bool) -> None:
    """The loss was that of the labels of one batch with the words of another, step after step, and nothing said so."""
    steps = steps_where(ranks - 1, at, batch(99), ranks, at + 1)
    found = threads(run, ranks, steps, way=way, is_cut=is_cut)
    said = [one[-1] for one, _ in found]
    if way == "eval" and at:  # who has done its part when it is found out hears of it in its next call
        said = said[-1:]
    for one in said:
        assert f"rank {ranks - 1} was given other values for ids = " in one, one
        assert "than rank 0, which has the first stage: give every rank of a pipeline the same batch" in one
    assert all(not any(one[:-1]) for one, _ in found)
    assert all(same for _, same in found)


def test_a_rank_in_between_and_several_stages_on_each(threads: Callable[..., Any]) -> None:
    for name in ("zbv", "looped-bfs"):
        found = threads(run, 3, steps_where(1, 1, batch(99), 3, 2), name=name)
        assert all("rank 1 was given other values for ids" in said[-1] and same for said, same in found)


def test_after_a_refused_first_step_the_next_runs(threads: Callable[..., Any]) -> None:
    """Found out while ranks agree, it leaves everything as it was: what they are connected by, and statistics too."""
    steps = steps_where(1, 0, batch(99), 2, 3)
    for said, _ in threads(run, 2, steps):
        assert [bool(one) for one in said] == [True, False, False]


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (batch(0, scale=2.0), "rank 1 was given another shape, dtype, structure or value for scale = 2.0 than rank 0"),
        (batch(0, 12), r"another shape, .* for ids = a tensor of shape (12, 6) and torch.int64"),
        ({**batch(0), "labels": batch(0)["labels"].flip(0)}, "other values for labels = a tensor of shape (8, 6)"),
    ],
)
def test_what_else_may_differ(threads: Callable[..., Any], other: dict[str, Any], words: str) -> None:
    for said, _ in threads(run, 2, [[batch(0), other]]):
        assert all(one in said[0] for one in words.removeprefix("r").split(".*")), said


def test_what_is_the_same_said_otherwise(threads: Callable[..., Any]) -> None:
    """Another layout in memory, a default that is said, and not a number are what they are."""
    one, nan = batch(0), torch.full((8, 3), float("nan"))
    other = {name: value.t().contiguous().t() for name, value in one.items()} | {"scale": 1.0}
    assert [said for said, _ in threads(run, 2, [[one, other]] * 2)] == [["", ""]] * 2
    alike = Alike(Inputs(Words()), [{**one, "more": nan}])
    given = [alike.look(Batch(kwargs={**one, "more": value})) for value in (nan, nan.clone())]
    numbers = given[0].numbers(wait=True)
    assert given[1].other([*numbers[:SLOTS], *[0] * SLOTS], wait=True) is None


def test_tensors_without_elements_of_their_own_and_devices() -> None:
    """A quantized one ended the process, a nested one was an error inside of torch; a rank's own device is no other batch."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of prototypes
        quantized = torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.quint8)
        nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    kinds = (quantized, nested, torch.device("cuda", 0))
    alike = Alike(Inputs(Words()), [{**batch(0), "more": kinds[0]}])
    looks = []
    for more in (*kinds, torch.device("cuda", 1)):
        looks.append(alike.look(Batch(kwargs={**batch(0), "more": more})).numbers(wait=True)[:SLOTS])
    assert len({tuple(look) for look in looks}) == 3
    assert looks[2] == looks[3]


def test_only_the_first_rank_is_asked_where_it_alone_is_given_the_batch(threads: Callable[..., Any]) -> None:
    assert [said for said, _ in threads(run, 2, [[batch(0), {}]] * 2, inputs="first")] == [["", ""]] * 2


def over_gloo(steps: Any, way: str) -> Outcome:
    transport = C10dTransport()
    try:
        return run(transport, steps, way=way)
    finally:
        transport.close()


@pytest.mark.parametrize("at", [0, 1])
def test_another_batch_on_one_process(workers: WorkerPool, at: int) -> None:
    found = workers.run(over_gloo, 3, steps_where(2, at, batch(99), 3, at + 1), "step", deadline=60)
    assert all("rank 2 was given other values for ids" in said[-1] and same for said, same in found)


def numbers_of(value: Any, other: Any) -> tuple[list[int], list[int]]:
    alike = Alike(Inputs(Words()), [{**batch(0), "more": value}])
    one, two = (alike.look(Batch(kwargs={**batch(0), "more": it})).numbers(wait=True)[:SLOTS] for it in (value, other))
    return one, two


@pytest.mark.parametrize(
    "dtype",
    [
        torch.bool,
        torch.uint8,
        torch.int16,
        torch.int64,
        torch.bfloat16,
        torch.float64,
        torch.complex64,
        torch.complex128,
    ],
)
def test_every_element_of_what_is_small_counts(dtype: torch.dtype) -> None:
    """Signs and ones of large numbers are in their highest bits, which a sum of products alone forgets."""
    value = (torch.randn(7, 9, generator=torch.Generator().manual_seed(0)) > 0).to(dtype)
    for place in range(63):
        other = value.clone()
        other.view(-1)[place] = 1 - other.view(-1)[place].real.int()
        one, two = numbers_of(value, other)
        assert one != two, place
        if dtype.is_floating_point:
            one, two = numbers_of(value + 1, torch.where(torch.arange(63).view(7, 9) == place, -1, 1) * (value + 1))
            assert one != two, place


def test_of_what_is_large_every_row_and_column_is_looked_at() -> None:
    """Borders of pictures are alike: with steps that are as long as rows only these were compared."""
    value = torch.zeros(64, 3, 64, 64)
    for inner in (slice(None), slice(30, 34)):
        for row in range(0, 64):
            other = value.clone()
            other[row, :, :, inner] = 1
            one, two = numbers_of(value, other)
            assert one != two
            assert numbers_of(other.to(memory_format=torch.channels_last), other)[0] == two
    assert numbers_of(value, value.clone())[0] == numbers_of(value, value)[1]


def test_more_inputs_than_there_is_place_for() -> None:
    """The last number stands for all that are left."""
    inputs = Inputs(Words())
    named = {f"more{number:02}": torch.full((2,), float(number)) for number in range(12)} | batch(0)
    alike = Alike(inputs, [named])
    theirs = alike.look(Batch(kwargs=named)).numbers(wait=True)
    assert alike.look(Batch(kwargs=named)).other(theirs[:SLOTS] * 2, wait=True) is None
    for name in named:
        found = alike.look(Batch(kwargs={**named, name: named[name] + 1})).other(
            [*theirs[:SLOTS], *[0] * SLOTS], wait=True
        )
        assert found is not None
        assert f"{name} = a tensor" in found


class Later:
    """As if the batch were on an accelerator: what is in it is known when the next step begins."""

    def __init__(self, contents: Mapping[int, Tensor]) -> None:
        self.contents = {position: int(one) for position, one in contents.items()}

    def read(self) -> Any:
        return self.contents.items()


def test_what_is_on_an_accelerator_is_compared_a_step_later(threads: Callable[..., Any], monkeypatch: Any) -> None:
    """It would have to be waited for, with all that the device has yet to do; and in the first step others are waited for too."""
    monkeypatch.setattr(_alike, "_Late", Later)
    monkeypatch.setattr(_alike, "_is_here", lambda tensor: False)
    found = threads(run, 2, steps_where(1, 1, batch(99), 2, 3))
    for said, _ in found:
        assert [bool(one) for one in said] == [False, False, True]
        assert "rank 1 was given other values in the step before for ids" in said[2]
    assert all("other values for ids" in said[0] for said, _ in threads(run, 2, steps_where(1, 0, batch(99), 2, 1)))
