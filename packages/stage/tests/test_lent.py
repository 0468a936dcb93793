"""Values that share memory, or go to several stages, and stages that write to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from stage_support import Calls, Threads, assert_like, build, grads_of, numbers, step
from torch import nn
from torch.nn import functional

from stepwell_meta.testing import WorkerPool
from stepwell_p2p import C10dTransport, Transport, Wire
from stepwell_stage import Executor, PipelineStage, split_sequential
from stepwell_stage.exceptions import StageUsageError
from stepwell_stage.run._lent import lent_by_wires
from stepwell_stage.schedules import gpipe, interleaved_1f1b, one_f_one_b

M, ROWS, WIDTH = 3, 6, 4
REFUSED = "stage 1 writes in place to its input {}, which shares memory.*clone"
Function = Callable[..., Any]


def train(
    transport: Transport, functions: Sequence[Function], stage_options: Any = None, *, looped: bool = False
) -> dict[int, list[Any]]:
    schedule = interleaved_1f1b(1, M, stages_per_rank=len(functions)) if looped else one_f_one_b(len(functions), M)
    executor = build(transport, [Calls(f) for f in functions], schedule, stage_options=stage_options)
    step(executor, numbers(ROWS, WIDTH), numbers(ROWS, WIDTH, seed=2))
    return grads_of(executor)


def expected(functions: Sequence[Function], run: Callable[..., Any]) -> list[nn.Module]:
    modules: list[nn.Module] = [Calls(f) for f in functions]
    for x, y in zip(numbers(ROWS, WIDTH).tensor_split(M), numbers(ROWS, WIDTH, seed=2).tensor_split(M), strict=True):
        (functional.mse_loss(run(modules, x), y) / M).backward()
    return modules


def in_a_row(modules: Sequence[Any], x: Any) -> Any:
    for module in modules:
        x = module(*x) if isinstance(x, tuple) else module(x)
    return x


def twice(w: Any, x: Any) -> Any:
    h = w * x
    return h, h


def with_view(w: Any, x: Any) -> Any:
    h = w * x
    return h, h[:, :2]


def halves(w: Any, x: Any) -> Any:
    h = w * x
    return h[:, :2], h[:, 2:]


def writes(w: Any, a: Any, b: Any) -> Any:
    a.mul_(2)
    return w * a, b


def writes_second(w: Any, a: Any, b: Any) -> Any:
    b.mul_(2)
    return w * a, b


def reads(w: Any, a: Any, b: Any) -> Any:
    return w * a, w + b


def product(w: Any, a: Any, b: Any) -> Any:
    return w * a * b


def joined(w: Any, a: Any, b: Any) -> Any:
    return w * torch.cat((a, b), 1)


def widened(w: Any, a: Any, b: Any) -> Any:
    return w * a * b.sum(1, keepdim=True)


@pytest.mark.parametrize("looped", [False, True])
@pytest.mark.parametrize(
    ("functions", "number"),
    [((twice, writes, product), 0), ((with_view, writes, widened), 0), ((with_view, writes_second, widened), 1)],
)
def test_writing_to_one_of_several_that_share_memory_is_refused(
    threads: Threads, functions: Sequence[Function], number: int, looped: bool
) -> None:
    """A stage returned one tensor twice, and the next changed one of them in place: in one process both change, here one did,
    so that losses and gradients were others, and nothing said so.
    """
    with pytest.raises(StageUsageError, match=REFUSED.format(number)):
        threads(train, 1 if looped else 3, functions, looped=looped)


def test_evaluation_refuses_it_too(threads: Threads) -> None:
    """Tensors of inference mode do not count what is written to them."""

    def evaluate(transport: Transport, functions: Sequence[Function], mode: Callable[[], Any]) -> Any:
        executor = build(transport, [Calls(f) for f in functions], one_f_one_b(3, M))
        x = numbers(ROWS, WIDTH)
        x[0, 0] = torch.nan
        with mode():
            return executor.eval(*((x,) if executor.is_first else ()))

    for mode in (torch.no_grad, torch.inference_mode):
        with pytest.raises(StageUsageError, match=REFUSED.format(0)):
            threads(evaluate, 3, (twice, writes, product), mode)
        assert threads(evaluate, 3, (twice, reads, product), mode)[-1].shape == (ROWS, WIDTH)


def train_process(functions: Sequence[Function]) -> dict[int, list[Any]]:
    return train(C10dTransport(), functions)


def refused_process() -> str:
    try:
        train_process((twice, writes, product))
    except Exception as error:
        return str(error)
    return "nothing"


def test_it_is_refused_on_gloo(workers: WorkerPool) -> None:
    assert all("writes in place to its input 0" in said for said in workers.run(refused_process, 3, deadline=60))


@pytest.mark.parametrize(
    "functions",
    [(twice, reads, product), (halves, writes, joined), (halves, writes_second, joined), (with_view, reads, widened)],
)
def test_reading_them_and_writing_to_what_only_lies_beside_it_is_as_in_one_process(
    threads: Threads, functions: Sequence[Function]
) -> None:
    assert_like(threads(train, 3, functions), expected(functions, in_a_row), torch.testing.assert_close)


SKIP = [Wire(0, 0, 1, 0), Wire(0, 0, 2, 1), Wire(1, 0, 2, 0)]


def scaled(w: Any, x: Any) -> Any:
    return w * x


def scaled_in_place(w: Any, x: Any) -> Any:
    return w * x.mul_(2)


def last_in_place(w: Any, a: Any, b: Any) -> Any:
    return w * a * b.mul_(2)


def test_writing_to_what_a_later_stage_gets_too_is_refused_and_the_last_may(threads: Threads) -> None:
    """The later stage went on with what it was before."""
    with pytest.raises(StageUsageError, match=REFUSED.format(0)):
        threads(train, 3, (scaled, scaled_in_place, product), {"wires": SKIP})
    functions = (scaled, scaled, last_in_place)

    def skip(modules: Sequence[Any], x: Any) -> Any:
        first = modules[0](x)
        return modules[2](modules[1](first), first.clone())

    assert_like(threads(train, 3, functions, {"wires": SKIP}), expected(functions, skip), torch.testing.assert_close)


def test_values_that_nobody_behind_takes_do_not_count(threads: Threads) -> None:
    """A stage that wrote to what it alone takes was refused, since an output that no stage takes, or only an earlier one, is of
    the same memory.
    """
    no_taker = {"wires": [Wire(0, 0, 1, 0), Wire(1, 0, 2, 0)]}
    functions: Sequence[Function] = (twice, scaled_in_place, scaled)

    def first_only(modules: Sequence[Any], x: Any) -> Any:
        return modules[2](modules[1](modules[0](x)[0]))

    assert_like(threads(train, 3, functions, no_taker), expected(functions, first_only), torch.testing.assert_close)
    apart = {"wires": [Wire(0, 0, 1, 0), Wire(0, 1, 2, 1), Wire(1, 0, 2, 0)]}

    def both(modules: Sequence[Any], x: Any) -> Any:
        first, second = modules[0](x)
        return modules[2](modules[1](first), second.clone())

    functions = (twice, scaled, last_in_place)
    assert_like(threads(train, 3, functions, apart), expected(functions, both), torch.testing.assert_close)
    with pytest.raises(StageUsageError, match=REFUSED.format(0)):
        threads(train, 3, (twice, scaled_in_place, product), apart)


def test_the_input_that_is_written_to_is_named_by_its_place(threads: Threads) -> None:
    """It was named by its place among what came, which with wires is another."""
    crossed = {"wires": [Wire(0, 0, 1, 1), Wire(0, 1, 1, 0), Wire(1, 0, 2, 0), Wire(1, 1, 2, 1)]}
    with pytest.raises(StageUsageError, match=REFUSED.format(1)):
        threads(train, 3, (twice, writes_second, product), crossed)


class Dropped(nn.Module):
    """Returns a tensor and the same with dropout: in evaluation mode one tensor twice."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.linear(x)
        return h, self.dropout(h)


@pytest.mark.parametrize(("function", "last"), [(writes, product), (product, scaled)])
def test_values_that_share_memory_only_later_are_refused(threads: Threads, function: Function, last: Function) -> None:
    """Only the first forward was looked at: in a step in evaluation mode after one in training mode the next stage wrote to one
    of two values which were one by then, and went on with what the other was before.
    """

    def steps(transport: Transport) -> None:
        first = Dropped()
        executor = build(transport, [first, Calls(function), Calls(last)], one_f_one_b(3, M))
        step(executor, numbers(ROWS, WIDTH), numbers(ROWS, WIDTH, seed=2))
        first.eval()
        step(executor, numbers(ROWS, WIDTH), numbers(ROWS, WIDTH, seed=2))

    with pytest.raises(StageUsageError, match=r"outputs of stage 0 share memory in microbatch 0 .*clone"):
        threads(steps, 3)


class Rows(nn.Module):
    """Has two names for what it writes to."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.relu = nn.LeakyReLU(0.5, inplace=True)
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        before = x
        y = self.middle(before * 1)
        x = self.relu(x)
        return self.last(x * y) + before  # type: ignore[no-any-return]


def test_variables_that_share_memory_across_a_cut(threads: Threads) -> None:
    """What was called ``before`` was what it was before, and in one process it is not."""

    def rows(transport: Transport) -> None:
        cut = split_sequential(Rows(), boundaries=["relu"])
        schedule = gpipe(2, M)
        executor = build(transport, [cut.module(0), cut.module(1)], schedule)
        step(executor, numbers(ROWS, WIDTH), numbers(ROWS, WIDTH))

    with pytest.raises(StageUsageError, match=REFUSED.format(r"\d")):
        threads(rows, 2)


def test_stages_that_declare_their_values_warn(threads: Threads) -> None:
    """Nothing is said between them beside values, so the second cannot know."""

    def declared(transport: Transport) -> None:
        x, h = torch.ones(2, WIDTH), torch.ones(2, WIDTH, requires_grad=True)
        examples = [{"input_args": x, "output_args": (h, h)}, {"input_args": (h, h), "output_args": h}]
        stage = PipelineStage(
            Calls((twice, product)[transport.rank]), transport.rank, 2, "cpu", **examples[transport.rank]
        )
        executor = Executor(stage, gpipe(2, M), functional.mse_loss, transport=transport)
        step(executor, numbers(ROWS, WIDTH), numbers(ROWS, WIDTH))
        step(executor, numbers(ROWS, WIDTH), numbers(ROWS, WIDTH))

    with pytest.warns(UserWarning, match=r"outputs of stage 0 share memory \(\[0, 1\] of what stage 1 takes\)") as said:
        threads(declared, 2)
    assert len(said) == 1


def test_lent_by_wires() -> None:
    assert lent_by_wires([SKIP[0]], SKIP) == (0,)
    assert lent_by_wires([SKIP[2], SKIP[1]], SKIP) == ()
    both = [Wire(0, 0, 1, 0), Wire(0, 0, 1, 1)]
    assert lent_by_wires(both, both) == (0, 1)
    assert lent_by_wires(None, None) == ()
