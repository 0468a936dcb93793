"""What a loss function may return, and what each microbatch's loss counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from stepwell_stage import Executor, PipelineStage
from stepwell_stage.exceptions import StageUsageError
from stepwell_stage.run._loss import check_weights, take_apart, weights_of
from stepwell_stage.schedules import one_f_one_b

ONE, TWO = torch.tensor(1.0), torch.tensor([2.0])


@pytest.mark.parametrize(
    ("result", "loss", "named"),
    [
        (ONE, 1.0, {}),
        (TWO, 2.0, {}),
        ((ONE, {"other": TWO}), 1.0, {"other": 2.0}),
        ({"ce": ONE, "aux": TWO}, 3.0, {"ce": 1.0, "aux": 2.0}),
        ((ONE, TWO), 3.0, {"0": 1.0, "1": 2.0}),
        ([ONE, TWO, ONE], 4.0, {"0": 1.0, "1": 2.0, "2": 1.0}),
    ],
)
def test_what_may_be_returned(result: Any, loss: float, named: dict[str, float]) -> None:
    found, parts = take_apart(result)
    assert found.item() == loss
    assert found.dim() == 0
    assert {name: part.item() for name, part in parts.items()} == named


@pytest.mark.parametrize("result", [None, 1.5, torch.zeros(2), {}, (), (ONE, None), {"x": torch.zeros(0)}])
def test_what_may_not(result: Any) -> None:
    with pytest.raises(StageUsageError, match="loss_fn"):
        take_apart(result)


def test_a_complex_loss_is_refused_as_autograd_does() -> None:
    """Its imaginary part was dropped with a warning."""
    with pytest.raises(StageUsageError, match=r"must return a real number, got one of dtype torch.complex64"):
        take_apart(ONE + 0j)


def test_weights() -> None:
    assert weights_of("sum", [3, 2], None) == [1.0, 1.0]
    assert weights_of("mean", [3, 1], None) == [0.75, 0.25]
    assert weights_of([0.5, 2.0], [3, 1], None) == [0.5, 2.0]
    assert weights_of(lambda target: target.sum(), [1, 1], [torch.tensor([1, 0]), torch.tensor([1, 2])]) == [0.25, 0.75]


def test_weights_that_mean_nothing() -> None:
    word: Any = "average"
    with pytest.raises(StageUsageError, match="'mean', 'sum', one number per microbatch or a function"):
        check_weights(word, 2)
    with pytest.raises(StageUsageError, match="for each of 2 microbatches, got 1"):
        check_weights([1.0], 2)
    with pytest.raises(StageUsageError, match=r"a positive sum, but what loss_weights returned are \[0.0, 0.0\]"):
        weights_of(lambda target: 0, [1, 1], [1, 2])
    with pytest.raises(StageUsageError, match="this step has no target"):
        weights_of(len, [1, 1], None)


@pytest.mark.parametrize("weights", [5, None, [1.0, "2"], torch.ones(2), [None, None]])
def test_weights_that_are_no_numbers(weights: Any) -> None:
    """They were an error of Python's own, or one in the midst of a step."""
    with pytest.raises(StageUsageError, match="'mean', 'sum', one number per microbatch or a function"):
        check_weights(weights, 2)


@pytest.mark.parametrize("returned", [None, "one", torch.ones(2)])
def test_a_function_for_weights_that_returns_no_number(returned: Any) -> None:
    with pytest.raises(StageUsageError, match="loss_weights must return a number for each target, got"):
        weights_of(lambda target: returned, [1, 1], [1, 2])


@pytest.mark.parametrize("first", ["positional", "keyword"])
def test_p031_p108_a_value_for_all_samples_that_stands_first_does_not_count(first: str) -> None:
    """With a mask of size 1 before the batch, microbatches of 3, 3 and 2 samples counted a third each: gradients were wrong."""
    torch.manual_seed(0)

    class Added(nn.Linear):
        def forward(self, mask: torch.Tensor, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return super().forward(x + mask)

    mask, x, y = torch.ones(1, 4), torch.randn(8, 4), torch.randn(8, 4)
    module = Added(4, 4)
    executor = Executor(PipelineStage(module, 0, 1, "cpu"), one_f_one_b(1, 3), functional.mse_loss)
    if first == "positional":
        executor.step(mask, x, target=y)
    else:
        executor.step(target=y, mask=mask, x=x)
    found = [parameter.grad for parameter in module.parameters()]
    module.zero_grad()
    functional.mse_loss(module(mask, x), y).backward()
    for grad, parameter in zip(found, module.parameters(), strict=True):
        torch.testing.assert_close(grad, parameter.grad)


def test_p106_p109_p116_masked_tokens_count_as_in_one_process() -> None:
    """The gradient is that of the mean over all tokens, whatever M; a microbatch may be masked wholly."""
    torch.manual_seed(0)
    x = torch.randn(7, 5, 4)
    target = torch.randint(3, (7, 5))
    target[torch.rand(7, 5) < 0.6] = -100

    def loss_fn(scores: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
        flat = functional.cross_entropy(scores.flatten(0, 1), target.flatten(), ignore_index=-100)
        return {"ce": flat, "z": 0.1 * scores.detach().new_zeros(())}

    whole = nn.Linear(4, 3)
    loss_fn(whole(x), target)["ce"].backward()
    for microbatches in (1, 2, 3, 7):
        model = nn.Linear(4, 3)
        model.load_state_dict(whole.state_dict())
        executor = Executor(
            PipelineStage(model, 0, 1, "cpu"),
            one_f_one_b(1, microbatches),
            loss_fn,
            loss_weights=lambda target: (target != -100).sum(),
        )
        executor.step(x, target=target)
        # Two float32 sums of at most 35 terms in another order.
        torch.testing.assert_close(model.weight.grad, whole.weight.grad, rtol=0, atol=35 * 2**-23)
        assert executor.loss is not None
        assert executor.loss.item() == pytest.approx(loss_fn(whole(x), target)["ce"].item(), rel=1e-6)
        assert executor.named_losses["ce"].item() == executor.loss.item()
        assert executor.named_losses["z"].item() == 0
