"""Glue that shares memory, keeps state, hooks gradients or runs again: as in one process, or refused.

Each case is a way in which stages once computed another loss or other gradients than the model, without a word.
"""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from stepwell_p2p import Transport
from stepwell_stage import Executor, schedules, split, tie
from stepwell_stage.exceptions import StageUsageError

X = torch.randn(7, 4, generator=torch.Generator().manual_seed(0)).double()
Glue = Callable[["Row", Tensor], Tensor]


class Unit(nn.Module):
    """Linear; ``before`` sees what it takes, and it gives what ``after`` makes of the two."""

    def __init__(
        self,
        before: Callable[[Tensor], Tensor] = lambda x: x,
        after: Callable[[Tensor, Tensor], Any] = lambda x, y: y,
    ) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.before, self.after = before, after

    def forward(self, x: Tensor) -> Any:
        x = self.before(x)
        return self.after(x, self.inner(x * 1))


class Row(nn.Module):
    def __init__(self, glue: Glue, **unit: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Unit(**unit) for _ in range(4))
        self.register_buffer("count", torch.zeros(()), persistent=False)
        self.mean = torch.ones(4).double()
        self.steps = 0
        self.glue = glue

    def forward(self, x: Tensor) -> Tensor:
        y = self.glue(self, x)
        return (y * torch.arange(1.0, 5.0)).square().mean()


def on_rank(transport: Transport, model: nn.Module, name: str) -> tuple[float | None, dict[str, Tensor]]:
    schedule = schedules.BY_NAME[name](transport.size, 3)
    cut = split(model, schedule.placement.num_stages, example=X)
    executor = Executor(
        cut.stages(schedule.placement, transport.rank, "cpu", transport=transport), schedule, lambda y: y
    )
    if cut.tied:
        tie(executor, cut.tied)
    executor.step(x=X.clone(), return_outputs=False)
    modules = [stage.submodule for stage in executor.stages]
    grads = {n: p.grad for module in modules for n, p in module.named_parameters() if p.grad is not None}  # type: ignore[union-attr]
    return None if executor.loss is None else executor.loss.item(), grads


def check(threads: Callable[..., Any], model: nn.Module, name: str = "1f1b", ranks: int = 2) -> None:
    models = [copy.deepcopy(model) for _ in range(ranks)]
    found = threads(lambda transport: on_rank(transport, models[transport.rank], name), ranks)
    total = 0.0
    for part in X.clone().tensor_split(3):
        loss = model(part)
        (loss * (len(part) / len(X))).backward()
        total += loss.item() * len(part) / len(X)
    assert [loss for loss, _ in found if loss is not None] == [pytest.approx(total, rel=1e-12)]
    grads = {name: grad for _, mine in found for name, grad in mine.items()}
    assert grads.keys() == {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    for parameter_name, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(grads[parameter_name], parameter.grad, rtol=1e-9, atol=1e-12)


def row(glue: Glue, **unit: Any) -> Row:
    torch.manual_seed(0)
    return Row(glue, **unit).double()


def a_view_changed_after_its_base_crossed(self: Row, x: Tensor) -> Tensor:
    """The view and its base were received as two tensors, and the change of one was not seen in the other."""
    first = self.layers[0](x)
    view = first.view(-1)
    second = self.layers[1](first * 1)
    view.mul_(2)
    return self.layers[3](self.layers[2](second + first)) + first


def a_small_view_of_a_tensor_that_is_filled(self: Row, x: Tensor) -> Tensor:
    """The view, which is smaller, was received for itself."""
    whole = torch.ones(len(x), 4, dtype=x.dtype)
    for layer in self.layers:
        x = layer(x)
        whole = whole * 1
        view = whole[:, :2]
        whole[:, 1] = x[:, 1]
        x = torch.cat([view * 2, (x * whole)[:, 2:]], 1)
    return x


def data_that_is_replaced(self: Row, x: Tensor) -> Tensor:
    """What was sent had new data by then, and the receiver changed it once more."""
    for layer in self.layers:
        x = layer(x) + 0
        x.data = x.data * 2
    return x


def filled_with_a_value(self: Row, x: Tensor) -> Tensor:
    """The fill value was taken for any number, since only the shape of the first argument counts."""
    for layer in self.layers:
        x = layer(x)
        most = x.detach().abs().max()
        x = x + torch.full_like(x, most) + x.new_full((4,), most)
    return x.tanh()


def a_counter(self: Row, x: Tensor) -> Tensor:
    """The look at the example counted too, and stages that had stopped early did not count at all."""
    x = x * (1 + self.count + self.steps)
    for layer in self.layers:
        x = layer(x).tanh() * (1 + 0.1 * self.count)
    self.count += 1
    self.steps += 1
    return x


def the_input_changed(self: Row, x: Tensor) -> Tensor:
    """Both stages of a rank changed the one tensor that they were given."""
    y = self.layers[0](x * 1)
    for layer in list(self.layers)[1:]:
        x.add_(1)
        y = layer(y) + x
    return y


def hooks(self: Row, x: Tensor) -> Tensor:
    """Absent tensors could have none; what is received must have none, and the sender must not stop before."""
    every = []
    for layer in self.layers:
        x = layer(x)
        x.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
        every.append(x)
        x = x.tanh() * 2
        x.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
    return torch.stack([*every, x]).sum(0)


def transforms(self: Row, x: Tensor) -> Tensor:
    for layer in self.layers:
        x = torch.vmap(lambda one: one * one.sum())(layer(x)).tanh() + torch.func.grad(lambda y: (y**3).sum())(x).tanh()
    return x


class Scaled(torch.autograd.Function):
    """Its second argument is used in backward alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(scale)
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return grad * ctx.saved_tensors[0], None


def functions(self: Row, x: Tensor) -> Tensor:
    """A result received in place of one that a function makes had no part of the function's backward."""
    scale = None
    for layer in self.layers:
        x = layer(x)
        scale = x.detach().abs() if scale is None else scale
        x = Scaled.apply(x, scale)  # type: ignore[no-untyped-call]
    return x


def checkpoints(self: Row, x: Tensor) -> Tensor:
    """What ran again in backward had received something in between, or was cut."""

    def pair(x: Tensor, number: int) -> Tensor:
        return self.layers[number + 1](self.layers[number](x * 2).tanh()).sin() + x

    for number in (0, 2):
        x = checkpoint(pair, x, number, use_reentrant=False)
    return x


ALL: list[Glue] = [
    a_view_changed_after_its_base_crossed,
    a_small_view_of_a_tensor_that_is_filled,
    data_that_is_replaced,
    filled_with_a_value,
    a_counter,
    the_input_changed,
    hooks,
    transforms,
    functions,
]


@pytest.mark.parametrize("glue", ALL)
def test_glue(threads: Callable[..., Any], glue: Glue) -> None:
    check(threads, row(glue), "zbv")


def test_the_example_is_left_as_it_is() -> None:
    """Glue that changes its input in place changed the caller's tensor while `split` looked."""
    before = X.clone()
    split(row(the_input_changed), 2, example=X)
    assert torch.equal(X, before)


def test_units_of_one_checkpoint_are_together(threads: Callable[..., Any]) -> None:
    check(threads, row(checkpoints))


def used_again(self: Row, x: Tensor) -> Tensor:
    """The unit changes ``first``, which is used again."""
    first = x * 1.5
    y = self.layers[1](self.layers[0](first))
    return self.layers[3](self.layers[2](y + y * first)) + first


def changes(x: Tensor) -> Tensor:
    return x.relu_()


def gives_a_view(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return x[:, :2], y


def a_view_is_changed(self: Row, x: Tensor) -> Tensor:
    x = x * 2
    for layer in self.layers:
        view, y = layer(x)
        view.mul_(2)
        x = torch.cat([view, y[:, 2:]], 1) + x
    return x


def test_units_that_change_or_give_what_they_take(threads: Callable[..., Any]) -> None:
    """What a unit did to its input was only seen on the stage that has it."""
    check(
        threads,
        row(lambda self, x: self.layers[3](self.layers[2](self.layers[1](self.layers[0](x * 1)))), before=changes),
    )
    with pytest.raises(
        StageUsageError, match=r"comes from unit 'layers\.0', which is on stage 0, and it is changed in place"
    ):
        split(row(used_again, before=changes), 4, example=X)
    check(threads, row(a_view_is_changed, after=gives_a_view), ranks=4)
    with pytest.raises(
        StageUsageError, match=r"'layers\.0', which is on stage 0, and it shares memory with what is changed"
    ):
        split(row(two_views, after=lambda x, y: (y, y.view(-1))), 2, example=X)


def two_views(self: Row, x: Tensor) -> Tensor:
    """Two results of one unit, one of which is changed through the other when both have crossed."""
    first, flat = self.layers[0](x)
    y = self.layers[2](self.layers[1](x)[0])[0]
    flat.mul_(2)
    return self.layers[3](y + first)[0] + flat.view_as(first)


def a_mean_over_steps(self: Row, x: Tensor) -> Tensor:
    for layer in self.layers:
        x = layer(x) * self.mean
    self.mean = self.mean * 0.9 + x.detach().mean(0) * 0.1
    return x


def reentrant(self: Row, x: Tensor) -> Tensor:
    x = x * torch.ones((), dtype=x.dtype, requires_grad=True)
    for layer in self.layers:
        x = checkpoint(layer, x, use_reentrant=True)
    return x


def in_vmap(self: Row, x: Tensor) -> Tensor:
    for layer in self.layers:
        x = torch.vmap(layer)(x)
    return x


def test_what_would_differ_is_refused(threads: Callable[..., Any]) -> None:
    cases: list[tuple[Glue, str]] = [
        (a_mean_over_steps, r"self\.mean' takes what an earlier forward has made of what units make"),
        (reentrant, r"a checkpoint with use_reentrant=True \(False can be cut\)"),
        (in_vmap, r"unit 'layers\.0' is called within a transform of torch\.func or torch\.vmap"),
    ]
    for glue, message in cases:
        with pytest.raises(StageUsageError, match=message):
            split(row(glue), 2, example=X)
    with pytest.raises(
        StageUsageError, match=r"4 units make 2 groups, too few for 4 stages.*layers\.0, layers\.1; layers\.2"
    ):
        split(row(checkpoints), 4, example=X)
    with pytest.raises(
        StageUsageError, match=r"units layers\.0, layers\.1 are on stages 0, 1, but are in one checkpoint"
    ):
        split(row(checkpoints), {"layers.1": 1}, example=X)
    others: list[nn.Module] = []
    model = row(lambda self, x: self.layers[1](others[0].layers[0](x)) + self.layers[3](self.layers[2](x)))
    others.append(model)
    with pytest.raises(StageUsageError, match=r"reaches 'layers\.0\.inner\.0\.weight' of the model itself"):
        split(model, 2, example=X)
    nested = nn.Sequential(row(lambda self, x: self.layers[1](self.layers[0](x))))
    nested[0].register_full_backward_hook(lambda *_: None)
    with pytest.raises(StageUsageError, match="'0' has backward hooks and is no unit"):
        split(nested, 2, example=X)
    persistent = row(a_counter)
    persistent.register_buffer("count", torch.zeros(()))
    with pytest.raises(
        StageUsageError, match=r"changes the buffer count, .* several stages of one rank would change the same"
    ):
        threads(lambda transport: on_rank(transport, copy.deepcopy(persistent), "zbv"), 2)


def a_number_used_later(self: Row, x: Tensor) -> Tensor:
    """The last stage went on with the number of the example."""
    x, most = self.layers[0](x)
    for layer in list(self.layers)[1:]:
        x, _ = layer(x)
    return x * most


def test_a_unit_that_gives_python_a_number(threads: Callable[..., Any]) -> None:
    model = row(a_number_used_later, after=lambda x, y: (y, float(y.detach().sum())))  # a sum is of all rows
    with pytest.raises(StageUsageError, match=r"unit 'layers\.0' gives Python another number.*return a tensor"):
        threads(lambda transport: on_rank(transport, copy.deepcopy(model), "1f1b"), 2)


def test_a_cut_that_is_no_longer_used_is_freed() -> None:
    """A cache of plans kept every model that was ever cut."""
    model = row(lambda self, x: self.layers[1](self.layers[0](x)))
    cut = split(model, 2, example=X)
    cut.wires()
    gone = weakref.ref(model)
    del model, cut
    gc.collect()
    assert gone() is None
