"""A step cut into stages: each runs its part of forward and backward alone, and together they are the step, bit for bit."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import graphpasses_support as support
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from stepwell_graphpasses import (
    GraphProgram,
    GraphStages,
    ParallelPlan,
    PassConfig,
    PassContext,
    PassPipeline,
    SplitPass,
    automatic_owners,
    planned_owners,
    split_stages,
    trace,
)
from stepwell_graphpasses.exceptions import (
    ConfigError,
    GradientError,
    GraphUsageError,
    GuardError,
    ModelStateError,
    SplitError,
)
from stepwell_graphpasses.passes import DataParallelPass

Batch = dict[str, Any]


def programs(stages: GraphStages, model: nn.Module) -> list[GraphProgram]:
    """One for each stage, each with a model of its own, as on ranks."""
    return [stages.program(index, copy.deepcopy(model)) for index in range(len(stages))]


def forward(
    stages: GraphStages, made: Sequence[GraphProgram], number: int, batch: Batch
) -> tuple[Any, dict[tuple[int, int], torch.Tensor], list[list[torch.Tensor]]]:
    """What the last stage gave, every stage's outputs by (stage, output), and what each received; values travel as copies."""
    outputs: dict[tuple[int, int], torch.Tensor] = {}
    received: list[list[torch.Tensor]] = []
    for index, program in enumerate(made):
        taken = [wire for wire in sorted(stages.wires, key=lambda wire: wire[3]) if wire[2] == index]
        values = [outputs[wire[:2]] for wire in taken]
        arrived = [value.detach().clone().requires_grad_(value.requires_grad) for value in values]
        received.append(arrived)
        result = program.forward(number, arrived, lambda tensors: (tuple(tensors), batch))
        outputs |= {(index, place): value for place, value in enumerate(result) if isinstance(value, torch.Tensor)}
    return result, outputs, received


def backward(
    stages: GraphStages,
    made: Sequence[GraphProgram],
    number: int,
    outputs: Mapping[tuple[int, int], torch.Tensor],
    received: Sequence[Sequence[torch.Tensor]],
    *,
    weight: float,
    kinds: Sequence[str] = ("B",),
) -> None:
    """The stages' backwards, from the last to the first, each gradient on the wire on which its value came."""
    last = len(made) - 1
    loss = outputs[last, 0]
    grads: dict[tuple[int, int], torch.Tensor] = {(last, 0): torch.tensor(weight, dtype=loss.dtype)}
    for index in reversed(range(last + 1)):
        own = [key for key in outputs if key[0] == index and outputs[key].requires_grad and key in grads]
        found = made[index].backward(number, kinds[0], [outputs[key] for key in own], [grads[key] for key in own])
        assert len(found) == len(received[index])
        for wire in stages.wires:
            if wire[2] == index and (gradient := found[wire[3]]) is not None:
                assert outputs[wire[:2]].requires_grad
                assert gradient.shape == outputs[wire[:2]].shape
                grads[wire[:2]] = gradient.clone()
    for index in range(last + 1) if "W" in kinds else ():
        made[index].backward(number, "W", (), ())


def train(
    stages: GraphStages, made: Sequence[GraphProgram], batches: Sequence[Batch], kinds: Sequence[str]
) -> list[Any]:
    """All forwards, then all backwards; what the last stage gave for each."""
    for program in made:
        program.unshard()
    flights = [forward(stages, made, number, batch) for number, batch in enumerate(batches)]
    for number, (_, outputs, received) in enumerate(flights):
        backward(stages, made, number, outputs, received, weight=1 / len(batches), kinds=kinds)
    for program in made:
        program.reduce_grads()
        program.reshard()
        program.clear()
    return [result for result, _, _ in flights]


def whole(model: nn.Module, train_fn: Any, batches: Sequence[Batch]) -> list[Any]:
    """The same in eager."""
    results = []
    for batch in batches:
        result = train_fn(model, **batch)
        loss = result[0] if isinstance(result, tuple) else result
        (loss / len(batches)).backward()
        results.append(result)
    return results


def gradients(stages: GraphStages, made: Sequence[GraphProgram]) -> dict[str, torch.Tensor | None]:
    """Those of the whole model: parts of parameters on several stages are added."""
    found: dict[str, torch.Tensor | None] = {}
    for stage, program in reversed(list(zip(stages.stages, made, strict=True))):
        for name, parameter in program.module.named_parameters():
            name, gradient = stage.canonical[name], parameter.grad
            before = found.get(name)
            found[name] = gradient if before is None else before if gradient is None else before + gradient
    return found


def is_the_step(
    make: Callable[[], nn.Module],
    train_fn: Any,
    batches: Sequence[Batch],
    owners: Mapping[str, int],
    *,
    kinds: Sequence[str] = ("I", "W"),
    exactly: bool = True,
) -> GraphStages:
    """Losses, named losses, gradients and buffers of the stages are those of eager."""
    model = support.seeded(make)
    reference = copy.deepcopy(model)
    before = copy.deepcopy(model.state_dict())
    stages = split_stages(trace(model, train_fn, batches[0]), owners)
    made = programs(stages, model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    torch.manual_seed(5)
    expected = whole(reference, train_fn, batches)
    torch.manual_seed(5)
    found = train(stages, made, batches, kinds)

    def same(left: torch.Tensor, right: torch.Tensor) -> bool:
        return torch.equal(left, right) if exactly else torch.allclose(left, right, rtol=1e-6, atol=1e-7)

    for (loss, named), result in zip(found, expected, strict=True):
        assert same(loss, result[0] if isinstance(result, tuple) else result)
        if isinstance(result, tuple):
            assert named.keys() == result[1].keys()
            assert all(torch.equal(torch.as_tensor(named[name]), torch.as_tensor(v)) for name, v in result[1].items())
    mine = gradients(stages, made)
    for name, parameter in reference.named_parameters():
        gradient = mine.pop(name)
        assert (gradient is None) == (parameter.grad is None), name
        assert gradient is None or parameter.grad is None or same(gradient, parameter.grad), name
    assert not mine
    buffers = {name: buffer for program in made for name, buffer in program.module.named_buffers()}
    for name, buffer in reference.named_buffers():
        assert torch.equal(buffers.pop(name), buffer), name
    return stages


def batches(*shape: int, count: int = 3) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    return [
        {"x": torch.randn(*shape, generator=generator), "y": torch.randn(*shape, generator=generator)}
        for _ in range(count)
    ]


class Blocks(nn.Module):
    """Three blocks, each a stage; ``run`` is the glue between them."""

    def __init__(
        self, run: Callable[[Blocks, torch.Tensor], torch.Tensor], extra: Callable[[Blocks], None] | None = None
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3))
        self.run = run
        if extra is not None:
            extra(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(self, x)


OWNERS = {"blocks.0": 0, "blocks.1": 1, "blocks.2": 2}


def skips(model: Blocks, x: torch.Tensor) -> torch.Tensor:
    a = model.blocks[0](x)
    b = a + model.blocks[1](a).relu()
    return model.blocks[2](b).view(x.shape[0], -1) * a + x


def three_terms(model: Blocks, x: torch.Tensor) -> torch.Tensor:
    a = model.blocks[0](x)
    b = model.blocks[1](a) + model.blocks[1](a).relu()
    return model.blocks[2](b * a)


def transposed(model: Blocks, x: torch.Tensor) -> torch.Tensor:
    a = model.blocks[0](x).t()  # crosses as it lies
    b = model.blocks[1](a.t().reshape(-1, 6)).view(2, -1, 6).transpose(0, 1)
    return model.blocks[2](b.transpose(0, 1).reshape(-1, 6)) + a.t()


def sliced(model: Blocks, x: torch.Tensor) -> torch.Tensor:
    a, b = model.blocks[0](x).chunk(2, dim=1)
    c = model.blocks[1](torch.cat([b, a], dim=1))
    return model.blocks[2](c[:, ::2].repeat(1, 2)) * a.repeat(1, 2)


def expanded(model: Blocks, x: torch.Tensor) -> torch.Tensor:
    a = model.blocks[0](x).mean(0, keepdim=True).expand(4, 6)
    b = model.blocks[1](a + x)
    return model.blocks[2](b * a.sum(1, keepdim=True).expand(-1, 6))


def in_place(model: Blocks, x: torch.Tensor) -> torch.Tensor:
    a = model.blocks[0](x).mul(2).add_(1).relu_()
    b = model.blocks[1](a)
    b = b + 1
    b += a
    return (model.blocks[2](b) + 1).mul_(3)


def into_a_slice(model: Blocks, x: torch.Tensor) -> torch.Tensor:
    """Backward makes the gradient in memory of its own, and writes to it, with no data flow from the write to who reads."""
    a = model.blocks[1](model.blocks[0](x)) * 1.0
    a[:, :2] = 0.0
    return model.blocks[2](a)


def stopped(model: Blocks, x: torch.Tensor) -> torch.Tensor:
    a = model.blocks[0](x)
    b = model.blocks[1](a.detach()) + a
    return model.blocks[2](b) * a.detach() * (b > 0)


def chosen(model: Blocks, x: torch.Tensor) -> torch.Tensor:
    a = model.blocks[0](x)
    best = a.argmax(1)
    b = model.blocks[1](a)
    c = model.blocks[2](b)
    return c * F.one_hot(best, 6) + torch.where(a > 0, c, b)


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return grad * 3 + x


def with_function(model: Blocks, x: torch.Tensor) -> torch.Tensor:
    return model.blocks[2](Twice.apply(model.blocks[1](Twice.apply(model.blocks[0](x)))))


def checkpointed(model: Blocks, x: torch.Tensor) -> torch.Tensor:
    for block in model.blocks:
        x = checkpoint(block, x, use_reentrant=False)
    return x


def only_passed_on(model: Blocks, x: torch.Tensor) -> torch.Tensor:
    """Stage 1 learns nothing of the loss's way to stage 0."""
    a = model.blocks[0](x)
    return model.blocks[2](a) + model.blocks[1](a.detach()).detach()


@pytest.mark.parametrize("kinds", [("B",), ("I", "W")], ids="".join)
@pytest.mark.parametrize(
    "run",
    [
        skips,
        three_terms,
        transposed,
        sliced,
        expanded,
        in_place,
        into_a_slice,
        stopped,
        chosen,
        with_function,
        checkpointed,
        only_passed_on,
    ],
    ids=lambda run: run.__name__,
)
def test_stages_are_the_step_bit_for_bit(run: Any, kinds: tuple[str, ...]) -> None:
    is_the_step(lambda: Blocks(run), support.mse_loss, batches(4, 6), OWNERS, kinds=kinds)


def test_a_gradient_that_goes_another_way_than_its_activation_finds_a_wire() -> None:
    """Two of the three terms of ``a``'s gradient are stage 1's, so the sum is made there: stage 2 gets ``a`` from stage 1."""
    stages = is_the_step(lambda: Blocks(three_terms), support.mse_loss, batches(4, 6), OWNERS)
    assert {wire[::2] for wire in stages.wires} == {(0, 1), (1, 2)}
    direct = is_the_step(lambda: Blocks(skips), support.mse_loss, batches(4, 6), OWNERS)
    assert sorted(wire[::2] for wire in direct.wires) == [(0, 1), (0, 2), (1, 2)]


class Mixture(nn.Module):
    """Each block adds to a loss of its own; one reports a number, another what is no number."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        extra = []
        for block in self.blocks:
            x = torch.tanh(block(x))
            extra.append(x.square().mean())
        return x, extra


def mixture_loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
    out, extra = model(x)
    loss = F.mse_loss(out, y) + 0.1 * (extra[0] + extra[2]) + 0.2 * sum(extra)
    return loss, {"first": extra[0].detach(), "weight": 0.1, "rows": out.detach().amax(1), "input": x}


@pytest.mark.parametrize("count", [2, 4])
def test_losses_of_every_stage_and_what_is_reported_arrive_at_the_last(count: int) -> None:
    stages = is_the_step(
        Mixture, mixture_loss, batches(4, 6), {f"blocks.{i}": i * count // 4 for i in range(4)}, kinds=("B",)
    )
    loss, named = stages.loss_fn((torch.tensor(1.0), {"first": torch.ones(()), "weight": 0.1, "rows": torch.ones(3)}))
    assert loss == 1
    assert named == {"first": torch.ones(()), "weight": torch.as_tensor(0.1)}  # an executor reports numbers


class Keeps(nn.Module):
    """Buffers: one that all blocks read, statistics of one block, and a count that backward needs as it was in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)) for _ in range(2))
        self.register_buffer("mask", torch.tensor([1.0, 0, 1, 1, 0, 1]), persistent=False)
        self.register_buffer("count", torch.zeros(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](x * self.mask) * self.mask
        self.count += 1
        return self.blocks[1](x * self.count) * self.mask


@pytest.mark.parametrize("kinds", [("B",), ("I", "W")], ids="".join)
def test_buffers_are_written_once_a_microbatch_and_backward_sees_its_own(kinds: tuple[str, ...]) -> None:
    """Three forwards count to 3 before the first backward, which read a count of 3 where its forward had read 1."""
    stages = is_the_step(Keeps, support.mse_loss, batches(4, 6), {"blocks.0": 0, "blocks.1": 1}, kinds=kinds)
    assert stages.tied == {"mask": ((0, "mask"), (1, "mask"))}
    first, last = programs(stages, Keeps())
    assert set(first.module.state_dict()) | set(last.module.state_dict()) == set(Keeps().state_dict())


class Scaled(nn.Module):
    """A parameter that every block's glue uses, a tied head, one that nothing uses, and a frozen block."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 6)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.unused = nn.Linear(2, 2)
        self.head = nn.Linear(6, 9, bias=False)
        self.head.weight = self.embed.weight
        self.blocks[1].requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = torch.tanh(block(x)) * self.scale
        return self.head(x)


def scaled_loss(model: nn.Module, batch: dict[str, Any], smooth: float) -> torch.Tensor:
    logits = model(batch["tokens"][:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), batch["tokens"][:, 1:].flatten(), label_smoothing=smooth)


def scaled_batches() -> list[Batch]:
    generator = torch.Generator().manual_seed(2)
    return [{"batch": {"tokens": torch.randint(9, (2, 5), generator=generator)}, "smooth": 0.1} for _ in range(3)]


def test_parameters_on_several_stages_have_a_part_of_the_gradient_on_each() -> None:
    # Each part is summed over microbatches before the parts are: another order of additions than one process has.
    owners = {"embed": 0, "blocks.0": 0, "blocks.1": 1, "blocks.2": 2, "head": 2}
    stages = is_the_step(Scaled, scaled_loss, scaled_batches(), owners, exactly=False)
    assert stages.tied == {
        "embed.weight": ((0, "embed.weight"), (2, "head.weight")),
        "scale": ((1, "scale"), (2, "scale")),
    }
    assert [stage.inputs for stage in stages.stages] == [("batch",), (), ("batch",)]
    held = [set(program.module.state_dict()) for program in programs(stages, Scaled())]
    assert held[0] == {"embed.weight", "blocks.0.weight", "blocks.0.bias", "unused.weight", "unused.bias"}
    assert held[1] == {"scale", "blocks.1.weight", "blocks.1.bias"}
    assert held[2] == {"scale", "blocks.2.weight", "blocks.2.bias", "head.weight"}


def test_one_microbatch_of_a_tied_model_is_the_step_bit_for_bit() -> None:
    is_the_step(
        Scaled, scaled_loss, scaled_batches()[:1], {"embed": 0, "blocks.0": 0, "blocks.1": 1, "blocks.2": 1, "head": 1}
    )


def test_draws_of_stages_that_run_one_after_the_other_are_those_of_one_process() -> None:
    batch = [{"tokens": support.tokens(rank=0)}]
    make = functools.partial(support.TinyGPT, layers=4, dropout=0.3)
    is_the_step(make, support.gpt_loss, batch, automatic_owners(make(), 4), kinds=("B",))


def test_stages_by_a_plan() -> None:
    plan = ParallelPlan().stage(0, "embed", "layers.0").stage(1, "layers.1-2").stage(2, "layers.3", "norm", "head")
    make = functools.partial(support.TinyGPT, layers=4, scalar=True, unused=True)
    batch = [{"tokens": support.tokens(step, rank=0)} for step in range(2)]
    stages = is_the_step(make, support.gpt_loss, batch, planned_owners(make(), plan))
    assert [wire[::2] for wire in stages.wires] == [(0, 1), (1, 2)]


def test_what_a_program_of_a_stage_takes_and_refuses() -> None:
    model = support.seeded(lambda: Blocks(skips))
    batch = batches(4, 6)[0]
    stages = split_stages(trace(model, support.mse_loss, batch), OWNERS)
    first, middle, last = programs(stages, model)
    assert [stage.received for stage in stages.stages] == [(), ("tanh",), ("tanh", "tanh_1")]
    assert [stage.inputs for stage in stages.stages] == [("x",), (), ("x", "y")]

    def run(program: GraphProgram, *args: Any, **kwargs: Any) -> Any:
        return program.forward(0, (), lambda _: (args, kwargs))

    by_name, by_place = run(first, **batch), run(first, batch["x"])  # a stage passes over what others take
    assert torch.equal(by_name[0], by_place[0])
    assert run(middle, tanh=batch["x"])[0].shape == (4, 6)
    lies_otherwise = run(first, x=batch["x"].t().contiguous().t())
    assert torch.equal(lies_otherwise[0], by_place[0])
    for arguments, named, message in (
        ((), {}, "x is missing; this rank has to be given it too, by name"),
        ((batch["x"],), {"x": batch["x"]}, "x was given by position and by name"),
        ((batch["x"], batch["y"]), {}, r"it takes 1 values \(x\), got 2"),
        ((), {"x": batch["x"], "z": 1}, "the step has no input z; its inputs are x, y"),
        (
            (batch["x"][:3],),
            {},
            r"x: expected shape \(4, 6\), got \(3, 6\)\n.*a number of microbatches that divides the batch",
        ),
        ((batch["x"].double(),), {}, "expected torch.float32, got torch.float64"),
    ):
        with pytest.raises(GuardError, match=message):
            run(first, *arguments, **named)
    with pytest.raises(GraphUsageError, match="the loss is computed within the graph, which takes no target"):
        stages.loss_fn(run(last, batch["x"], batch["x"], **batch), batch["y"])
    with pytest.raises(GraphUsageError, match="stages are 0 to 2, got 3"):
        stages.program(3, model)
    with pytest.raises(
        ConfigError, match=r"param_dtype=torch.bfloat16, but the step was captured with .* in torch.float32"
    ):
        stages.program(0, model, PassConfig(param_dtype=torch.bfloat16))
    for other, found in ((Blocks(skips).double(), r"torch.float64 of shape \(6, 6\)"), (nn.Linear(6, 6), "nothing")):
        with pytest.raises(
            ModelStateError, match=rf"blocks.0.0.weight as torch.float32 of shape \(6, 6\), and this one has {found}"
        ):
            stages.program(0, other)
    with pytest.raises(SplitError, match="no module is given to a stage"):
        split_stages(trace(model, support.mse_loss, batch), {})
    first.module.eval()
    with pytest.raises(ModelStateError, match="stage 0 was cut out of a step that was captured in another mode"):
        run(first, batch["x"])
    middle.module.requires_grad_(False)
    with pytest.raises(ModelStateError, match=r"frozen or unfrozen\. Capture the step again, and cut that"):
        run(middle, batch["x"])


def test_constants_that_are_built_in_are_compared() -> None:
    model = support.seeded(Scaled)
    first = split_stages(trace(model, scaled_loss, scaled_batches()[0]), {"blocks.0": 0, "blocks.1": 1}).program(
        0, model
    )
    with pytest.raises(GuardError, match=r"smooth: the graph was made for the value 0.1, got 0.2"):
        first.forward(0, (), lambda _: ((), scaled_batches()[0] | {"smooth": 0.2}))


def test_stages_of_an_evaluation_have_no_backward() -> None:
    model = support.seeded(lambda: support.TinyGPT(layers=2, dropout=0.5)).eval()
    batch = {"tokens": support.tokens(rank=0)}
    stages = split_stages(trace(model, support.gpt_loss, batch, backward=False), automatic_owners(model, 2))
    made = programs(stages, model)
    with torch.no_grad():
        (loss, _), _, _ = forward(stages, made, 0, batch)
        assert torch.equal(loss, support.gpt_loss(model, **batch)[0])
    with pytest.raises(GradientError, match="captured with backward=False: run it without gradients"):
        forward(stages, made, 0, batch)


class Writes(nn.Module):
    def __init__(self, run: Callable[[Writes, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.register_buffer("count", torch.zeros(6))
        self.run = run

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(self, x)


def counts_twice(model: Writes, x: torch.Tensor) -> torch.Tensor:
    x = model.blocks[0](x * model.count)
    model.count += 1
    return model.blocks[1](x.tanh()) * model.count


def changes_the_input(model: Writes, x: torch.Tensor) -> torch.Tensor:
    a = model.blocks[0](x + 1)
    x.mul_(2)
    return model.blocks[1](a).tanh() + x


def strided(model: Writes, x: torch.Tensor) -> torch.Tensor:
    return model.blocks[1](model.blocks[0](x).as_strided((4, 6), (6, 1)))


def written_too_late(model: Writes, x: torch.Tensor) -> torch.Tensor:
    a = model.blocks[0](x).detach()
    row = a[0]
    b = model.blocks[1](a * 2)
    row.zero_()
    return b


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (
            counts_twice,
            r"writes to count, which stage \d uses too, and each has its own: keep what uses it in one stage",
        ),
        (changes_the_input, r"writes to x, which stage \d uses too"),
        (strided, "depends on how a value of another stage lies in memory, which changes on the way"),
        (written_too_late, "a value must not be written in place"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_steps_that_cannot_be_cut_there_are_refused(run: Any, message: str) -> None:
    joint = trace(support.seeded(lambda: Writes(run)), support.mse_loss, batches(4, 6)[0])
    with pytest.raises(SplitError, match=message):
        split_stages(joint, {"blocks.0": 0, "blocks.1": 1})


def test_stages_beside_one_another_are_refused() -> None:
    model = Blocks(lambda model, x: model.blocks[2](model.blocks[0](x) + model.blocks[1](x)))
    joint = trace(model, support.mse_loss, batches(4, 6)[0])
    with pytest.raises(
        SplitError, match="stage 1 takes nothing from an earlier stage; put its modules into another one"
    ):
        split_stages(joint, OWNERS)


def test_a_loss_of_an_earlier_stage_is_handed_on_to_the_last() -> None:
    is_the_step(lambda: Blocks(skips), support.mse_loss, batches(4, 6), OWNERS | {"nowhere": 3})


def test_graphs_that_are_not_cut_are_refused() -> None:
    model = support.seeded(lambda: Blocks(skips))
    batch = batches(4, 6)[0]
    joint = trace(model, support.mse_loss, batch)
    for item in (SplitPass(OWNERS), DataParallelPass()):
        layouts = split_stages(joint, OWNERS).stages[0].layouts(ParallelPlan().shard("**"), PassConfig(), degree=1)
        everything = {name: next(iter(layouts.values())) for name in joint.table.names}
        done = PassPipeline([item]).run(joint, PassContext(PassConfig(), None, everything))
        with pytest.raises(SplitError, match=r"passes have been over the graph .* cut it as trace"):
            split_stages(done, OWNERS)
    with pytest.raises(
        SplitError, match=r"captured with sizes that may change \(x, y\), but stages of a pipeline have fixed ones"
    ):
        split_stages(trace(model, support.mse_loss, batch, dynamic=True), OWNERS)


@pytest.mark.parametrize("value", [2.0, True, torch.tensor(2), torch.tensor([2, 2])], ids=repr)
def test_what_is_built_into_a_cut_step_may_not_become_another_type(value: Any) -> None:
    """2.0 passed for 2, though it makes another dtype of whole numbers; and a tensor failed with torch's words, or passed too."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def step(model: nn.Module, x: torch.Tensor, scale: Any) -> torch.Tensor:
        return (model(x) * scale).mean()

    x = torch.randn(2, 4)
    first = split_stages(trace(model, step, {"x": x, "scale": 2}), {"0": 0, "1": 1}).stages[0]
    assert first.tensors((x,), {"scale": 2}) == [x]
    with pytest.raises(GuardError, match="scale: the graph was made for the value 2, got"):
        first.tensors((x,), {"scale": value})


def test_a_train_function_may_have_ones_of_its_own_like_the_loss() -> None:
    """They were taken for the gradient that backward starts from, and the graph for another than trace's."""

    def step(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = support.mse_loss(model, x, y)
        return loss * torch.ones_like(loss)

    is_the_step(lambda: Blocks(skips), step, batches(4, 6), OWNERS)


class Turns(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last((x + 1j * self.first(x)).abs())  # type: ignore[no-any-return]


def test_a_product_with_a_complex_number_behind_a_cut() -> None:
    """Its backward has a view of a number, and cutting it was an IndexError."""
    batches = [{"x": torch.randn(3, 4), "y": torch.randn(3, 4)} for _ in range(2)]
    is_the_step(Turns, support.mse_loss, batches, {"first": 0, "last": 1})
