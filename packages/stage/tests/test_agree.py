"""Declared metadata, the vote of all stages, and what is refused before the first step."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from stepwell_meta.exceptions import MetadataWarning, PipeliningMetadataError
from stepwell_meta.testing import WorkerPool
from stepwell_p2p import C10dTransport, Post, Transport
from stepwell_p2p.testing import RecordingTransport
from stepwell_stage import Executor, PipelineStage
from stepwell_stage.schedules import one_f_one_b

Threads = Callable[..., list[Any]]
ROWS, MICROBATCHES, WIDTH = 8, 4, 3


def plain(grad: bool, *shape: int) -> torch.Tensor:
    return torch.zeros(*(shape or (ROWS // MICROBATCHES, WIDTH)), requires_grad=grad)


def layers_and_batch(count: int, rows: int) -> tuple[list[nn.Module], torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(count)]
    for layer in layers:
        for parameter in layer.parameters():
            nn.init.normal_(parameter, generator=generator)
    return layers, torch.ones(rows, WIDTH), torch.zeros(rows, WIDTH)


def run(transport: Transport, declared: list[dict[str, Any]], rows: int = ROWS) -> Any:
    """A step whose stages declare these things; gradients, or the error."""
    layers, x, y = layers_and_batch(len(declared), rows)
    rank, size = transport.rank, transport.size
    stage = PipelineStage(layers[rank], rank, size, "cpu", **declared[rank])
    executor = Executor(stage, one_f_one_b(size, MICROBATCHES), functional.mse_loss, transport=transport)
    try:
        executor.step(*((x,) if rank == 0 else ()), target=y if rank == size - 1 else None)
    except PipeliningMetadataError as error:
        return error
    return [parameter.grad for parameter in executor.parameters()]


STATIC = [
    {"input_args": plain(False), "output_args": plain(True)},
    {"input_args": plain(True), "output_args": plain(True)},
    {"input_args": (plain(True),), "output_args": plain(True)},
]


def grads_of_all(results: list[Any]) -> list[torch.Tensor]:
    for result in results:
        assert not isinstance(result, Exception), result
    return [grad for result in results for grad in result]


def test_p144_static_dynamic_and_mixed_declarations_give_the_same_gradients(
    threads: Threads, workers: WorkerPool
) -> None:
    """A27, A28: one stage that declares nothing makes all learn; the vote decides, and no rank waits."""
    expected = grads_of_all(threads(run, 3, [{}, {}, {}]))
    for declared in (
        STATIC,
        [STATIC[0], {}, STATIC[2]],
        [{}, STATIC[1], {}],
        [*STATIC[:2], {"input_args": plain(True)}],
    ):
        assert all(torch.equal(a, b) for a, b in zip(grads_of_all(threads(run, 3, declared)), expected, strict=True))
    on_gloo = workers.run(lambda: run(C10dTransport(), STATIC), 3)
    assert all(torch.equal(a, b) for a, b in zip(grads_of_all(on_gloo), expected, strict=True))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (plain(False), "requires_grad mismatch: expected False, got True"),
        (plain(True, 2, 4), r"shape mismatch: expected \(2, 4\), got \(2, 3\)"),
        (plain(True).double(), r"dtype mismatch: expected torch.float64, got torch.float32"),
        ((plain(True), plain(True)), "input"),
    ],
)
def test_p020_p023_declarations_that_disagree_are_refused_on_every_rank(
    threads: Threads, change: Any, words: str
) -> None:
    """The same sentence on all ranks, before anything computes; it names stage, value and field."""
    declared = [STATIC[0], {**STATIC[1], "input_args": change}, STATIC[2]]
    errors = threads(run, 3, declared)
    assert all(isinstance(error, PipeliningMetadataError) for error in errors)
    assert len({str(error) for error in errors}) == 1
    assert errors[0].stage is None or errors[0].stage == 1
    with pytest.raises(PipeliningMetadataError, match=f"stage 1(.|\n)*{words}"):
        raise errors[0]
    assert "Declare the same in input_args of stage 1 and in output_args of the stages" in str(errors[0])


def test_a_batch_that_is_not_what_the_first_stage_declares(threads: Threads) -> None:
    errors = threads(run, 3, STATIC, rows=12)
    for error in errors:
        assert isinstance(error, PipeliningMetadataError)
        assert (
            "stage 0 declares inputs of torch.float32 (2, 3), but the batch's microbatches are of torch.float32 (3, 3)"
            in str(error)
        )


def test_static_shapes_and_microbatches_of_two_sizes(threads: Threads) -> None:
    declared = [{"output_args": plain(True), "input_args": plain(False, 3, WIDTH)}, *STATIC[1:]]
    errors = threads(run, 3, declared, rows=9)
    assert all(isinstance(error, PipeliningMetadataError) for error in errors)


def test_static_declaration_of_an_output_that_is_another_is_refused_before_it_is_sent(threads: Threads) -> None:
    wrong = {"input_args": plain(True), "output_args": plain(False)}
    declared = [STATIC[0], wrong, {**STATIC[2], "input_args": plain(False)}]
    with pytest.raises(
        PipeliningMetadataError, match=r"stage 1(.|\n)*output 0: requires_grad mismatch: expected False, got True"
    ):
        threads(run_raising, 3, declared)


def run_raising(transport: Transport, declared: list[dict[str, Any]]) -> Any:
    result = run(transport, declared)
    if isinstance(result, Exception):
        raise result
    return result


def test_a_declared_output_that_is_another_warns_and_loses_where_others_declare_nothing(threads: Threads) -> None:
    """A31."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results = threads(run, 3, [{}, {"output_args": plain(True, 2, 9)}, {}])
    assert any(issubclass(w.category, MetadataWarning) and "shape mismatch" in str(w.message) for w in caught)
    assert len(grads_of_all(results)) == 6


def test_a_gradient_that_was_declared_not_to_come_is_an_error_not_lost(threads: Threads) -> None:
    """A10: stage 0 declares None for its output's gradient; dropping the one that comes would leave it untrained in silence."""
    declared = [{**STATIC[0], "output_grads": (None,)}, *STATIC[1:]]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MetadataWarning)
        with pytest.raises(
            PipeliningMetadataError, match="stage 1: value 0 from stage 0 got a gradient, but was declared"
        ):
            threads(run_raising, 3, declared)


def test_a_change_of_mode_agrees_on_nothing_twice(threads: Threads) -> None:
    """Each mode agrees once for each way of cutting a batch; going back and forth between them sends no word about values."""

    def run(transport: Transport) -> list[int]:
        layers, x, y = layers_and_batch(2, 10)
        recorder = RecordingTransport(transport)
        stage = PipelineStage(layers[transport.rank], transport.rank, 2, "cpu")
        executor = Executor(stage, one_f_one_b(2, MICROBATCHES), functional.mse_loss, transport=recorder)
        counts = []
        for kind, rows in (("step", 8), ("eval", 8), ("step", 8), ("eval", 8), ("step", 10), ("eval", 8), ("step", 10)):
            before = len(recorder.steps)
            given = (x[:rows],) if executor.is_first else ()
            getattr(executor, kind)(*given, target=y[:rows] if executor.is_last else None)
            posts = [one for one in recorder.steps[before:] if isinstance(one, Post)]
            counts.append(sum(op.microbatch == -1 for post in posts for op in post.ops))
        return counts

    for counts in threads(run, 2):
        assert [count > 0 for count in counts] == [True, True, False, False, True, False, False]
