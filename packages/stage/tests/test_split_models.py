"""Models of many shapes, cut as they are, train as they do in one process."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, Literal

import attrs
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from stepwell_p2p import Transport
from stepwell_stage import Executor, ModelSplit, Schedule, schedules, split, tie

Batch = Mapping[str, Tensor]
MICROBATCHES = 3


def reference(model: nn.Module, batch: Batch, loss_fn: Callable[..., Tensor]) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients in one process, microbatch by microbatch, as the pipeline weighs them."""
    model = copy.deepcopy(model)
    parts = [
        dict(zip(batch, values, strict=True))
        for values in zip(*(v.tensor_split(MICROBATCHES) for v in batch.values()), strict=True)
    ]
    size = len(next(iter(batch.values())))
    total = 0.0
    for part in parts:
        loss = loss_fn(model(**part))
        weight = len(next(iter(part.values()))) / size
        (loss * weight).backward()
        total += loss.item() * weight
    return total, {name: p.grad for name, p in model.named_parameters(remove_duplicate=False) if p.grad is not None}


def on_rank(
    transport: Transport,
    cut: ModelSplit,
    batch: Batch,
    loss_fn: Callable[..., Tensor],
    schedule: Schedule,
    shapes: Literal["static", "dynamic"] = "static",
) -> tuple[float | None, dict[str, Tensor]]:
    stages = cut.stages(schedule.placement, transport.rank, "cpu", transport=transport, shapes=shapes)
    executor = Executor(stages, schedule, loss_fn)
    if cut.tied:
        tie(executor, cut.tied)
    inputs = batch if cut.inputs == "every" or executor.is_first else {}
    executor.step(**inputs, return_outputs=False)
    grads = {}
    for stage in stages:
        assert isinstance(stage.submodule, nn.Module)
        grads |= {name: p.grad for name, p in stage.submodule.named_parameters() if p.grad is not None}
    return None if executor.loss is None else executor.loss.item(), grads


def check(
    threads: Callable[..., Any],
    model: nn.Module,
    batch: Batch,
    schedule: Schedule,
    loss_fn: Callable[..., Tensor] = lambda output: output,
    *,
    shapes: Literal["static", "dynamic"] = "static",
    stages: int | Mapping[str, int] | None = None,
    **options: Any,
) -> str:
    model = model.double()
    batch = {name: value.double() if value.is_floating_point() else value for name, value in batch.items()}
    loss, grads = reference(model, batch, loss_fn)
    count = schedule.placement.num_stages if stages is None else stages
    cut = split(copy.deepcopy(model), count, example=batch, **options)
    found = threads(
        lambda transport: on_rank(transport, cut, batch, loss_fn, schedule, shapes), schedule.placement.num_ranks
    )
    losses = [one for one, _ in found if one is not None]
    assert losses == [pytest.approx(loss, rel=1e-12)]
    together = {name: grad for _, mine in found for name, grad in mine.items()}
    first_names = {name for name, _ in model.named_parameters()}
    assert first_names & grads.keys() <= together.keys() <= grads.keys()
    for name, grad in ((name, grads[name]) for name in together):
        torch.testing.assert_close(
            together[name], grad, rtol=1e-10, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}"
        )
    return cut.describe(schedule.placement)


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.feed = nn.Sequential(nn.Linear(width, 16), nn.GELU(), nn.Linear(16, width))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y = self.norm(x)
        x = x + self.attention(y, y, y, attn_mask=mask, need_weights=False)[0]
        return x + self.feed(x)


class Gpt(nn.Module):
    """Tied embedding and head, mask and positions made in glue, the loss inside."""

    def __init__(self, layers: int = 4, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, width)
        self.position = nn.Parameter(torch.randn(6, width))
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position[: tokens.shape[1]]
        mask = torch.full((tokens.shape[1],) * 2, float("-inf"), device=x.device, dtype=x.dtype).triu(1)
        for block in self.blocks:
            x = block(x, mask)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


def tokens(size: int = 7, length: int = 6) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randint(11, (size, length), generator=generator) for name in ("tokens", "labels")}


ALL = [
    *(name for name, make in schedules.BY_NAME.items() if make(2, MICROBATCHES).has_backward),
]


@pytest.mark.parametrize("name", ALL)
def test_p151_gpt_on_every_schedule(threads: Callable[..., Any], name: str) -> None:
    check(threads, Gpt(), tokens(), schedules.BY_NAME[name](2, MICROBATCHES))


@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_gpt_on_other_numbers_of_ranks(threads: Callable[..., Any], ranks: int) -> None:
    said = check(threads, Gpt(), tokens(), schedules.BY_NAME["1f1b"](ranks, MICROBATCHES))
    assert ranks == 1 or "tied: 'embed.weight'" in said


def test_inputs_on_the_first_rank_only(threads: Callable[..., Any]) -> None:
    said = check(threads, Gpt(), tokens(), schedules.BY_NAME["1f1b"](4, MICROBATCHES), inputs="first")
    assert "from stage 2: the input 'labels'" in said


def test_shapes_that_are_said_with_each_message(threads: Callable[..., Any]) -> None:
    check(threads, Gpt(), tokens(), schedules.BY_NAME["1f1b"](3, MICROBATCHES), shapes="dynamic")


class EncoderDecoder(nn.Module):
    """One embedding for both sides, the encoder's result in every decoder block, a plain value handed along."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Embedding(11, 8)
        self.encoder = nn.ModuleList(Block() for _ in range(3))
        self.decoder = nn.ModuleList(nn.TransformerDecoderLayer(8, 2, 16, 0.0, batch_first=True) for _ in range(3))
        self.head = nn.Linear(8, 11)

    def forward(self, *, tokens: Tensor, labels: Tensor) -> dict[str, Any]:
        memory = self.shared(tokens)
        for block in self.encoder:
            memory = block(memory)
        x = self.shared(labels)
        for layer in self.decoder:
            x = layer(x, memory)
        scores = self.head(x)
        return {"loss": F.cross_entropy(scores.flatten(0, 1), labels.flatten()), "scores": scores, "kind": "both"}


def test_encoder_and_decoder(threads: Callable[..., Any]) -> None:
    for name, ranks in (("1f1b", 4), ("zbv", 2)):
        schedule = schedules.BY_NAME[name](ranks, MICROBATCHES)
        check(threads, EncoderDecoder(), tokens(), schedule, lambda output: output["loss"])


class Side(nn.Module):
    """An embedding with another module's weight, and blocks."""

    def __init__(self, words: nn.Embedding) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 8)
        self.words.weight = words.weight
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, tokens: Tensor, memory: Tensor | None = None) -> Tensor:
        x = self.words(tokens)
        x = x if memory is None else x + memory.mean(1, keepdim=True)
        for block in self.blocks:
            x = block(x)
        return x


class Sides(nn.Module):
    """The weight that both sides use is kept in a module that nobody calls."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Embedding(11, 8)
        self.encoder, self.decoder = Side(self.shared), Side(self.shared)

    def forward(self, *, tokens: Tensor, labels: Tensor) -> dict[str, Any]:
        return {"loss": self.decoder(labels, self.encoder(tokens)).square().mean()}


def test_a_weight_of_units_that_is_kept_in_a_module_which_is_never_called(threads: Callable[..., Any]) -> None:
    """A stage without the weight looked at units that have it with None in its place: a TypeError in the first step."""
    for name, ranks in (("1f1b", 4), ("zbv", 2)):
        schedule = schedules.BY_NAME[name](ranks, MICROBATCHES)
        check(threads, Sides(), tokens(), schedule, lambda output: output["loss"])


class UNet(nn.Module):
    """Skip connections that join by concatenation and by addition, with buffers that training writes."""

    def __init__(self) -> None:
        super().__init__()

        def level(before: int, after: int) -> nn.Module:
            return nn.Sequential(nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU())

        self.down1, self.down2, self.middle = level(1, 4), level(4, 8), level(8, 8)
        self.up2, self.up1 = level(16, 4), level(4, 4)
        self.head = nn.Conv2d(4, 1, 1)

    def forward(self, image: Tensor) -> Tensor:
        a = self.down1(image)
        b = self.down2(F.max_pool2d(a, 2))
        c = F.interpolate(self.middle(F.max_pool2d(b, 2)), scale_factor=2)
        d = self.up2(torch.cat([b, c], 1))
        e = self.up1(F.interpolate(d, scale_factor=2) + a)
        return self.head(e).square().mean()


def images(size: int = 7) -> dict[str, Tensor]:
    return {"image": torch.randn(size, 1, 8, 8, generator=torch.Generator().manual_seed(0))}


def test_skip_connections(threads: Callable[..., Any]) -> None:
    for name, ranks in (("1f1b", 3), ("gpipe", 6), ("dualpipe-v", 2)):
        check(threads, UNet(), images(), schedules.BY_NAME[name](ranks, MICROBATCHES))


class Shared(nn.Module):
    """One block used over and over, and one that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 8)
        self.block = Block()
        self.spare = nn.Linear(5, 5)
        self.last = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(3):
            x = self.block(x)
        y = self.last(x)
        return self.last(F.pad(y, (0, 6))).square().sum(-1).mean()


def rows(size: int = 7, *shape: int) -> dict[str, Tensor]:
    return {"x": torch.randn(size, *(shape or (4, 3)), generator=torch.Generator().manual_seed(0))}


def test_units_called_several_times_and_never(threads: Callable[..., Any]) -> None:
    check(threads, Shared(), rows(), schedules.BY_NAME["1f1b"](3, MICROBATCHES))


class Loop(nn.Module):
    """The first layer again after the last: its second call is on the last stage, with a tied copy."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in [*self.layers, self.layers[0]]:
            x = layer(x).tanh()
        return x.square().mean()


def test_a_layer_again_after_later_ones(threads: Callable[..., Any]) -> None:
    said = check(threads, Loop(), rows(7, 4), schedules.BY_NAME["1f1b"](2, MICROBATCHES))
    assert "tied: 'layers.0.weight' on stages 0, 1" in said


@attrs.frozen
class State:
    hidden: Tensor
    residual: list[Tensor]
    depth: int


class Layered(nn.Module):
    """Blocks that hand on a structure; glue changes tensors in place and keeps a list of all of them."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, state: State) -> State:
            hidden = self.inner(state.hidden)
            return State(hidden, [*state.residual, hidden.relu()], state.depth + 1)

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.Layer() for _ in range(4))
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> tuple[Tensor, OrderedDict[str, Tensor]]:
        state = State(x, [], 0)
        kept = torch.zeros(x.shape[0], 4, 4, dtype=x.dtype)
        for number, layer in enumerate(self.layers):
            state = layer(state)
            kept[:, number] = state.hidden
            state.hidden.mul_(self.scale)
        assert state.depth == 4
        total = sum(value.square().mean() for value in state.residual) + (kept * torch.arange(4.0)[:, None]).sum()
        return total, OrderedDict(kept=kept)


def test_structures_and_changes_in_place(threads: Callable[..., Any]) -> None:
    for ranks in (2, 4):
        schedule = schedules.BY_NAME["1f1b"](ranks, MICROBATCHES)
        check(threads, Layered(), rows(7, 4), schedule, lambda output: output[0])


class Checkpointed(Gpt):
    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position[: tokens.shape[1]]
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        x = checkpoint(lambda y: (y * 2).tanh(), x, use_reentrant=False)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


def test_checkpoints_around_units_and_glue(threads: Callable[..., Any]) -> None:
    for name in ("1f1b", "zbv"):
        check(threads, Checkpointed(), tokens(), schedules.BY_NAME[name](2, MICROBATCHES))


class Experts(nn.Module):
    """Routing by data within the block."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 3)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.router(x.flatten(0, 1))
        choice = scores.argmax(-1)
        flat, out = x.flatten(0, 1), torch.zeros_like(x.flatten(0, 1))
        for number in choice.unique().tolist():
            chosen = (choice == number).nonzero()[:, 0]
            out = out.index_add(0, chosen, self.experts[number](flat[chosen]) * scores[chosen, number, None].sigmoid())
        return x + out.view_as(x), scores


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.layers = nn.ModuleList(Experts() for _ in range(4))
        self.head = nn.Linear(8, 11)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x, every = self.embed(tokens), []
        for layer in self.layers:
            x, scores = layer(x)
            every.append(scores)
        balance = torch.cat(every).softmax(-1).mean(0).square().sum()
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten()) + balance


def test_experts_chosen_by_data(threads: Callable[..., Any]) -> None:
    for ranks in (2, 4):
        check(threads, Mixture(), tokens(), schedules.BY_NAME["1f1b"](ranks, MICROBATCHES))


class TwoTowers(nn.Module):
    """Two halves that know nothing of each other until the end: a stage that needs nothing of the one before."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.right = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        left, right = x, x.flip(-1)
        for layer in self.left:
            left = layer(left).tanh()
        for layer in self.right:
            right = layer(right).tanh()
        return (left * right * self.scale).sum(-1).square().mean()


def test_a_stage_that_needs_nothing(threads: Callable[..., Any]) -> None:
    said = check(threads, TwoTowers(), rows(7, 4), schedules.BY_NAME["1f1b"](4, MICROBATCHES))
    assert "nothing but its turn" in said


class Quiet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def noise(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x)

    def forward(self, x: Tensor) -> Tensor:
        noise = self.noise(x)
        x = self.layers[0](x) + noise
        for layer in list(self.layers)[1:]:
            x = x + layer(x - noise).tanh()
        return (x - noise).square().mean()


class Noisy(Quiet):
    """Random numbers drawn in glue, which every stage takes away again: the loss is that of the quiet model."""

    def noise(self, x: Tensor) -> Tensor:
        return F.dropout(torch.randn_like(x), 0.5)


def test_random_numbers_are_drawn_once(threads: Callable[..., Any]) -> None:
    """Each stage drew its own, and the loss was that of no model."""
    quiet, noisy = Quiet().double(), Noisy().double()
    noisy.load_state_dict(quiet.state_dict())
    batch = {"x": rows(7, 4)["x"].double()}
    loss, grads = reference(quiet, batch, lambda output: output)
    schedule, cut = schedules.BY_NAME["1f1b"](4, MICROBATCHES), split(noisy, 4, example=batch)
    found = threads(lambda transport: on_rank(transport, cut, batch, lambda output: output, schedule), 4)
    assert [one for one, _ in found if one is not None] == [pytest.approx(loss, rel=1e-12)]
    for name, grad in {name: grad for _, mine in found for name, grad in mine.items()}.items():
        torch.testing.assert_close(grad, grads[name], rtol=1e-9, atol=1e-12)
