"""Reports of users about shapes, microbatches, keyword inputs and targets, each under its number, with the right behaviour."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from stage_support import Threads, assert_like, build, grads_of, numbers, seeded
from torch import nn
from torch.nn import functional
from torch.nn.attention.flex_attention import create_block_mask

from stepwell_meta.exceptions import StepwellError
from stepwell_p2p import Transport
from stepwell_stage import Executor, PipelineStage, TensorChunkSpec
from stepwell_stage.exceptions import StageExecutionError, StageUsageError
from stepwell_stage.run._microbatch import split
from stepwell_stage.schedules import BY_NAME, gpipe, one_f_one_b

WIDTH = 4


class Tokens(nn.Module):
    """A layer over (batch, length, width): each token sees the mean over its own sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x) + x.mean(1, keepdim=True))


# Lengths.


@pytest.mark.parametrize("ranks", [1, 2])
def test_p036_p038_p040_every_batch_has_its_own_length_for_one_rank_as_for_two(threads: Threads, ranks: int) -> None:
    """Nothing is declared, reset, padded or cut: what was learned for one length is not used for another."""

    def run(transport: Transport) -> dict[int, list[Any]]:
        executor = build(transport, seeded(*(Tokens() for _ in range(ranks))), one_f_one_b(ranks, 2))
        for length in (5, 9, 5, 2):
            x = numbers(4, length, WIDTH)
            executor.step(*((x,) if executor.is_first else ()), target=x if executor.is_last else None)
        return grads_of(executor)

    modules = seeded(*(Tokens() for _ in range(ranks)))
    for length in (5, 9, 5, 2):
        for part in numbers(4, length, WIDTH).tensor_split(2):
            (functional.mse_loss(nn.Sequential(*modules)(part), part) / 2).backward()
    assert_like(threads(run, ranks), modules)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zbv"])
def test_p034_p040_microbatches_that_the_caller_cut_each_with_its_own_length(threads: Threads, name: str) -> None:
    """Targets say the number of their microbatch, lengths differ, and steps follow each other: none meets another's output."""
    lengths = (3, 7, 1, 4)
    seen: list[tuple[int, int]] = []

    def loss_fn(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        seen.append((int(target[0, 0, 0]), out.shape[1]))
        return functional.mse_loss(out, target)

    def parts(step: int) -> tuple[list[Any], list[Any]]:
        inputs = [numbers(m + 1, length + step, WIDTH) for m, length in enumerate(lengths)]
        return inputs, [torch.full_like(x, 10 * step + m) for m, x in enumerate(inputs)]

    schedule = BY_NAME[name](2, 4)
    count = schedule.placement.num_stages

    def run(transport: Transport) -> dict[int, list[Any]]:
        executor = build(transport, seeded(*(Tokens() for _ in range(count))), schedule, loss_fn)
        for step in range(2):
            inputs, targets = parts(step)
            executor.step(
                arg_mbs=[(x,) for x in inputs] if executor.is_first else None,
                target_mbs=targets if executor.is_last else None,
                return_outputs=False,
            )
        return grads_of(executor)

    results = threads(run, 2)
    assert sorted(seen) == [(10 * step + m, length + step) for step in range(2) for m, length in enumerate(lengths)]
    modules = seeded(*(Tokens() for _ in range(count)))
    for step in range(2):
        for m, (x, target) in enumerate(zip(*parts(step), strict=True)):
            # Sizes are 1, 2, 3 and 4 of 10 samples.
            (functional.mse_loss(nn.Sequential(*modules)(x), target) * ((m + 1) / 10)).backward()
    found = {stage: grads for result in results for stage, grads in result.items()}
    for stage, module in enumerate(modules):
        for grad, parameter in zip(found[stage], module.parameters(), strict=True):
            torch.testing.assert_close(grad, parameter.grad)  # ZBV adds microbatches up in an order of its own


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"arg_mbs": [(1,)]}, "arg_mbs has 1 microbatches, but 2 are wanted"),
        (
            {"arg_mbs": [torch.zeros(1, WIDTH)] * 2},
            "arg_mbs holds a tuple for each microbatch, but microbatch 0 is Tensor",
        ),
        ({"kwarg_mbs": [{}, 1]}, "kwarg_mbs holds a mapping for each microbatch, but microbatch 1 is int"),
        ({"arg_mbs": [(1,), (2,)], "kwarg_mbs": [{}]}, "kwarg_mbs has 1 microbatches, but 2 are wanted"),
        ({"kwarg_mbs": [{"a": 1}, {"a": 2}], "a": 3}, "kwarg_mbs of microbatch 0 has 'a', which was given whole too"),
        ({"target_mbs": [1, 2, 3]}, "target_mbs has 3 microbatches, but 2 are wanted"),
        ({"target_mbs": [1, 2], "target": torch.zeros(2)}, "target and target_mbs were both given"),
        # These were errors of Python's own: that a Tensor is not truthful, a generator has no length, an int no elements.
        ({"arg_mbs": torch.zeros(2, WIDTH)}, "arg_mbs is a list with an entry for each microbatch, got Tensor"),
        ({"kwarg_mbs": ({} for _ in range(2))}, "kwarg_mbs is a list with an entry for each microbatch, got generator"),
        ({"target_mbs": 2}, "target_mbs is a list with an entry for each microbatch, got int"),
    ],
)
def test_microbatches_that_do_not_fit_are_refused(given: dict[str, Any], words: str) -> None:
    executor = Executor(PipelineStage(nn.Linear(WIDTH, WIDTH), 0, 1, "cpu"), gpipe(1, 2), functional.mse_loss)
    with pytest.raises(StageUsageError, match=words):
        executor.step(**given)
    with pytest.raises(StageUsageError, match="both whole and as arg_mbs"):
        executor.step(torch.zeros(2, WIDTH), arg_mbs=[(1,), (2,)])


# Keyword inputs.


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None, scale: Any = 1.0) -> torch.Tensor:
        x = self.linear(x) * scale
        return x if mask is None else x * mask


@pytest.mark.parametrize("at", [0, 1])
def test_p043_a_mask_of_size_1_and_a_scalar_alone_are_shared_on_any_rank(threads: Threads, at: int) -> None:
    """On a rank without a batch of its own they were taken for a batch of 1, too small for four microbatches."""
    given = {"mask": torch.tensor([[1.0, 0, 1, 1]]), "scale": torch.tensor(3.0)}

    def run(transport: Transport) -> dict[int, list[Any]]:
        executor = build(transport, seeded(Masked(), Masked()), one_f_one_b(2, 4))
        x = numbers(8, WIDTH)
        mine = given if transport.rank == at else {}
        executor.step(*((x,) if executor.is_first else ()), target=x if executor.is_last else None, **mine)
        return grads_of(executor)

    modules = seeded(Masked(), Masked())
    for part in numbers(8, WIDTH).tensor_split(4):
        out = part
        for number, module in enumerate(modules):
            out = module(out, **(given if number == at else {}))
        (functional.mse_loss(out, part) / 4).backward()
    assert_like(threads(run, 2), modules)


class Media(nn.Module):
    """Adds to each sample the sum of its patches; a sample may have none, or many."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, *, patches: torch.Tensor, owners: torch.Tensor) -> torch.Tensor:
        return self.linear(x).index_add(0, owners, self.linear(patches))


def test_p046_media_whose_rows_are_no_samples_are_cut_by_the_caller(threads: Threads) -> None:
    """Seven patches of four samples: the first has none, the second four. No piece is lost, none goes elsewhere."""
    x, patches = numbers(4, WIDTH), numbers(7, WIDTH, seed=2)
    flat = [
        {"patches": patches[:4], "owners": torch.tensor([1, 1, 1, 1])},
        {"patches": patches[4:], "owners": torch.tensor([0, 0, 1])},
    ]

    def run(transport: Transport) -> dict[int, list[Any]]:
        executor = build(transport, seeded(Media(), nn.Linear(WIDTH, WIDTH)), one_f_one_b(2, 2))
        if executor.is_first:
            executor.step(x, kwarg_mbs=flat)
        else:
            executor.step(target=x)
        return grads_of(executor)

    modules = seeded(Media(), nn.Linear(WIDTH, WIDTH))
    for part, media in zip(x.tensor_split(2), flat, strict=True):
        (functional.mse_loss(modules[1](modules[0](part, **media)), part) / 2).backward()
    assert_like(threads(run, 2), modules)
    executor = Executor(PipelineStage(seeded(Media())[0], 0, 1, "cpu"), gpipe(1, 2), functional.mse_loss)
    with pytest.raises(StageUsageError, match=r"the same size in dim 0, or size 1 .* got 4 and 7"):
        executor.step(
            x, target=x, patches=patches, owners=torch.tensor([1, 1, 1, 1, 2, 2, 3])
        )  # not cut in silence along a dim that is not the batch


def test_p045_the_offset_of_a_cut_mask_is_a_tensor() -> None:
    """Traced with the first part of a mask, a function gave the first part's rows for the others too."""

    def own_length(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return kv < 10 + 37 * b

    mask = create_block_mask(own_length, 4, None, 128, 128, device="cpu", BLOCK_SIZE=32)
    parts = [part["mask"] for part in split({"x": torch.zeros(4, 1), "mask": mask}, 2, what="inputs")]
    graphs = []

    def count(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    def seen(mask: Any, index: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        return mask.mask_mod(index, index, index, kv)

    compiled = torch.compile(seen, backend=count, fullgraph=True)
    kv = torch.arange(128)
    for number, part in enumerate(parts):
        for row in range(2):
            assert torch.equal(compiled(part, torch.tensor(row), kv), kv < 10 + 37 * (2 * number + row))
    assert len(graphs) == 1  # the offset comes in with the mask


def test_a_spec_says_along_which_dim_inputs_are_cut(threads: Threads) -> None:
    """P043: time before batch, and a table that has as many rows as there are samples, but is none of theirs."""

    class Timed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor, *, table: torch.Tensor) -> torch.Tensor:
            assert table.shape == (6, WIDTH)
            return self.linear(x) + table.sum(0)

    x, table = numbers(3, 6, WIDTH), numbers(6, WIDTH, seed=2)

    def run(transport: Transport) -> dict[int, list[Any]]:
        executor = build(
            transport,
            seeded(Timed(), Tokens()),
            gpipe(2, 3),
            lambda out, y: functional.mse_loss(out, y.transpose(0, 1)),
            args_chunk_spec=(TensorChunkSpec(1),),
            kwargs_chunk_spec={"table": None},
            output_merge_spec=TensorChunkSpec(1),
        )
        if executor.is_first:
            executor.step(x, table=table)
        else:
            assert executor.step(target=x.transpose(0, 1)).shape == x.shape
        return grads_of(executor)

    modules = seeded(Timed(), Tokens())
    for part in x.tensor_split(3, 1):
        (functional.mse_loss(modules[1](modules[0](part, table=table)), part) / 3).backward()
    assert_like(threads(run, 2), modules)


# Targets.


@pytest.mark.parametrize("form", ["tuple", "dict", "nested"])
def test_p061_targets_of_any_structure(threads: Threads, form: str) -> None:
    y, weight = numbers(6, WIDTH, seed=2), numbers(6, 1, seed=3)
    target: Any = {
        "tuple": (y, weight),
        "dict": {"y": y, "weight": weight},
        "nested": [{"y": y}, (weight, None, "text")],
    }[form]

    def loss_fn(out: torch.Tensor, target: Any) -> torch.Tensor:
        values = {
            "tuple": lambda: target,
            "dict": lambda: (target["y"], target["weight"]),
            "nested": lambda: (target[0]["y"], target[1][0]),
        }[form]()
        return ((out - values[0]).pow(2) * values[1]).mean()

    def run(transport: Transport) -> dict[int, list[Any]]:
        executor = build(transport, seeded(Masked(), Masked()), one_f_one_b(2, 3), loss_fn)
        executor.step(*((y,) if executor.is_first else ()), target=target if executor.is_last else None)
        return grads_of(executor)

    modules = seeded(Masked(), Masked())
    for part, scale in zip(y.tensor_split(3), weight.tensor_split(3), strict=True):
        (((nn.Sequential(*modules)(part) - part).pow(2) * scale).mean() / 3).backward()
    assert_like(threads(run, 2), modules)


def test_p061_a_loss_that_takes_no_target(threads: Threads) -> None:
    def run(transport: Transport) -> dict[int, list[Any]]:
        executor = build(transport, seeded(Masked(), Masked()), one_f_one_b(2, 3), lambda out: out.pow(2).mean())
        executor.step(*((numbers(6, WIDTH),) if executor.is_first else ()))
        return grads_of(executor)

    modules = seeded(Masked(), Masked())
    for part in numbers(6, WIDTH).tensor_split(3):
        (nn.Sequential(*modules)(part).pow(2).mean() / 3).backward()
    assert_like(threads(run, 2), modules)


def test_p031_p034_a_target_of_another_batch_does_not_pass_in_silence() -> None:
    executor = Executor(PipelineStage(nn.Linear(WIDTH, WIDTH), 0, 1, "cpu"), gpipe(1, 3), functional.mse_loss)
    with pytest.raises(StageUsageError, match=r"9 rows were cut into 3, 3, 3, which do not go with .* 3, 3, 2 samples"):
        executor.step(numbers(8, WIDTH), target=numbers(9, WIDTH))
    with pytest.raises(StageExecutionError, match="0F0"):
        executor.step(numbers(8, WIDTH), target=numbers(8, WIDTH)[:, :2])


@pytest.mark.parametrize("at", [0, 1])
def test_p034_p044_a_mask_of_the_whole_batch_goes_with_microbatches_that_the_caller_cut_or_is_refused(
    threads: Threads, at: int
) -> None:
    """It was cut evenly, and two rows of it were added to the one sample of the first microbatch: its loss was another's."""
    x, mask = numbers(6, WIDTH), numbers(6, WIDTH, seed=3)

    def run(transport: Transport, sizes: list[int]) -> dict[int, list[Any]]:
        schedule = gpipe(2, len(sizes))
        executor = build(transport, seeded(Masked(), Masked()), schedule, lambda output: output.pow(2).mean())
        parts = [(part,) for part in x.split(sizes)] if executor.is_first else None
        executor.step(arg_mbs=parts, **({"mask": mask} if transport.rank == at else {}))
        return grads_of(executor)

    with pytest.raises(StageUsageError, match=r"6 rows were cut into 2, 2, 2, which do not go with .* 1, 3, 2 samples"):
        threads(run, 2, [1, 3, 2])
    modules = seeded(Masked(), Masked())
    kept = {"mask": mask}
    value = modules[0](x, **(kept if at == 0 else {}))
    modules[1](value, **(kept if at == 1 else {})).pow(2).mean().backward()
    assert_like(threads(run, 2, [2, 2, 2]), modules, torch.testing.assert_close)


def test_parameters_that_are_unfrozen_after_a_step_need_a_new_executor(threads: Threads) -> None:
    """The refusal spoke of shapes that depend on the data. Freezing more of them is fine, and so is a new executor."""

    def run(transport: Transport, *, told: bool) -> Any:
        modules = seeded(*(nn.Linear(WIDTH, WIDTH) for _ in range(2)))
        modules[0].requires_grad_(False)

        def step() -> None:
            x = numbers(4, WIDTH)
            executor.step(*((x,) if executor.is_first else ()), target=x if executor.is_last else None)

        def unfreeze() -> None:
            step()
            modules[0].requires_grad_(True)
            step()

        executor = build(transport, modules, one_f_one_b(2, 2))
        if not told:  # one rank may be told while it is in its first step still
            with pytest.raises(StepwellError, match="make a new executor after each such change"):
                unfreeze()
            return None
        step()
        modules[0].requires_grad_(True)
        executor = build(transport, modules, one_f_one_b(2, 2))
        step()
        modules[0].requires_grad_(False)
        step()
        return grads_of(executor)

    threads(functools.partial(run, told=False), 2)
    modules = seeded(*(nn.Linear(WIDTH, WIDTH) for _ in range(2)))
    for trains in (False, True, False):
        modules[0].requires_grad_(trains)
        for part in numbers(4, WIDTH).tensor_split(2):
            (functional.mse_loss(nn.Sequential(*modules)(part), part) / 2).backward()
    assert_like(threads(functools.partial(run, told=True), 2), modules)
