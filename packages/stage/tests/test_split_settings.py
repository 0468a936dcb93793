"""What torch keeps for the whole process, and a forward sets for a part of itself."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from split_support import Block, check, draw, make, on_rank, plain, refused
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from stepwell_meta.testing import WorkerPool
from stepwell_p2p import C10dTransport
from stepwell_stage import schedules, split
from stepwell_stage.exceptions import StageUsageError


class Sets(nn.Module):
    """Sets something around a part of its forward, between units or in one; with ``finally``, or as one writes it first."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(8, 8)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            before = torch.get_default_dtype(), torch.get_float32_matmul_precision()
            if self.how == "dtype":
                torch.set_default_dtype(torch.float64)
            elif self.how == "products":
                torch.set_float32_matmul_precision("medium")
            else:
                torch.use_deterministic_algorithms(mode=True)
            x = block(x) * torch.full((), 1 / 3)
            torch.set_default_dtype(before[0])
            torch.set_float32_matmul_precision(before[1])
            torch.use_deterministic_algorithms(mode=False)
        return self.head(x)  # type: ignore[no-any-return]


class _SetsWithin(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        torch.set_default_dtype(torch.float64)
        try:
            return self.inner(x) * torch.full((), 1 / 3)
        finally:
            torch.set_default_dtype(torch.float32)


class Within(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_SetsWithin() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Drops(Block):
    """A checkpoint around a dropout, or a dropout around a checkpoint."""

    def __init__(self, p: float, *, within: bool) -> None:
        super().__init__()
        self.p, self.within = p, within

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self.inside if self.within else super().forward, x, use_reentrant=False)
        return y if self.within else nn.functional.dropout(y, self.p, self.training)

    def inside(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(super().forward(x), self.p, self.training)


class Row(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        for block in self:
            x = block(x)
        return x


class Around(Row):
    """The same between units."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self:
            x = checkpoint(lambda y, block=block: block(nn.functional.dropout(y, 0.5)), x, use_reentrant=False)
        return x


class Leaves(Within):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        torch.set_default_dtype(torch.float64)
        return y


def inputs(seed: int) -> dict[str, Tensor]:
    return {"x": torch.randn(2, 8, generator=draw(seed)).double()}


MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "dtype": (lambda: Sets("dtype"), "sets the default dtype"),
    "products": (lambda: Sets("products"), "sets the precision of matrix products"),
    "algorithms": (lambda: Sets("algorithms"), "sets whether algorithms are deterministic"),
    "within": (Within, "sets the default dtype"),
}


@pytest.mark.parametrize("name", MODELS)
def test_ranks_that_are_threads(threads: Callable[..., Any], name: str) -> None:
    """One rank computed with the default dtype that another's forward had set: 1/3 was of the other dtype."""
    kind, what = MODELS[name]
    steps = [[inputs(1), inputs(2), inputs(3), inputs(4)]]
    refused(threads, f"{what}, which torch keeps for the whole process.*torchrun", make(kind), [inputs(0)], steps)
    check(threads, make(kind), [inputs(0)], steps, ranks=1, stages=1)


@pytest.mark.parametrize(
    "kind", [lambda: Row(*(Drops(0.5, within=True) for _ in range(3))), lambda: Around(*map(Block, [8] * 3))]
)
def test_dropout_in_a_checkpoint(threads: Callable[..., Any], kind: Callable[[], nn.Module]) -> None:
    """A checkpoint sets the generator back to draw the same again, but ranks that are threads have one generator: gradients were
    of other masks than the loss.
    """
    steps = [[inputs(1), inputs(2), inputs(3), inputs(4)]]
    refused(threads, "draws random numbers within a checkpoint.*torchrun", make(kind), [inputs(0)], steps)


@pytest.mark.parametrize("within", [True, False])
def test_other_dropouts_and_checkpoints(threads: Callable[..., Any], within: bool) -> None:
    """Those that draw nothing, and those that are not drawn again."""
    model = make(lambda: Row(*(Drops(0.0, within=within) for _ in range(3))))
    check(threads, model, [inputs(0)], [[inputs(1), inputs(2), inputs(3), inputs(4)]])
    outside = split(make(lambda: Row(*(Drops(0.5, within=False) for _ in range(3)))), 2, example=inputs(0))
    placement = schedules.one_f_one_b(2, 2).placement
    assert not any(stage.needs_process for rank in (0, 1) for stage in outside.stages(placement, rank, "cpu"))


functional = nn.functional
DRAWS: dict[str, Callable[[nn.MultiheadAttention, Tensor], Tensor]] = {
    "attention layer": lambda layer, x: layer(x, x, x, need_weights=False)[0],  # type: ignore[no-any-return]
    "attention": lambda _, x: functional.scaled_dot_product_attention(x, x, x, None, 0.5),
    "attention, named": lambda _, x: functional.scaled_dot_product_attention(x, x, x, dropout_p=0.5),
    "gumbel": lambda _, x: functional.gumbel_softmax(x),
    "binomial": lambda _, x: x * torch.binomial(torch.ones_like(x), torch.full_like(x, 0.5)),
    "gamma": lambda _, x: x * torch.distributions.Gamma(x.exp(), 1.0).sample(),  # type: ignore[no-untyped-call]
    "pool": lambda _, x: x * functional.fractional_max_pool2d(x[None], 1, output_size=(1, 1)).mean(),
    "attention without": lambda _, x: functional.scaled_dot_product_attention(x, x, x, None, 0.0),
}


class Draws(Block):
    def __init__(self, draws: Callable[[nn.MultiheadAttention, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = nn.MultiheadAttention(8, 2, dropout=0.5)
        self.draws = draws

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(lambda y: self.draws(self.layer, super(Draws, self).forward(y)), x, use_reentrant=False)  # type: ignore[no-any-return]


@pytest.mark.parametrize("draws", DRAWS)
def test_draws_by_other_names_than_dropout(draws: str) -> None:
    """The dropout of attention in a checkpoint was not seen, for its function bears another name: gradients on ranks that are
    threads were of other masks than the loss.
    """
    cut = split(make(lambda: Row(*(Draws(DRAWS[draws]) for _ in range(3)))), 2, example=inputs(0))
    (stage,) = cut.stages(schedules.one_f_one_b(2, 2).placement, 0, "cpu")
    assert ("draws random numbers within a checkpoint" in stage.needs_process) is (draws != "attention without")


def on_gloo(name: str, ranks: int) -> dict[str, float]:
    transport = C10dTransport()
    model = make(MODELS[name][0])
    steps = [[inputs(1), inputs(2), inputs(3)]]
    _, wanted = plain(model, steps)
    schedule = schedules.one_f_one_b(ranks, 3)
    cut = split(copy.deepcopy(model), ranks, example=inputs(0))
    _, grads = on_rank(transport, cut, steps, schedule, "static")
    transport.close()
    assert torch.get_default_dtype() == torch.float32
    assert not torch.are_deterministic_algorithms_enabled()
    return {key: float((grad - wanted[key]).abs().max()) for key, grad in grads.items() if grad is not None}  # type: ignore[operator]


def test_ranks_that_are_processes(workers: WorkerPool) -> None:
    """A stage that stops behind its last unit leaves a forward that has not yet set back what it has set."""
    for name in MODELS:
        found = {key: value for one in workers.run(on_gloo, 2, name, 2) for key, value in one.items()}
        assert dict(make(MODELS[name][0]).named_parameters()).keys() == found.keys()
        assert max(found.values()) < 1e-12


def test_what_is_not_set_back() -> None:
    with pytest.raises(StageUsageError, match="sets the default dtype and does not set it back"):
        split(make(Leaves), 2, example=inputs(0))
    assert torch.get_default_dtype() == torch.float32
