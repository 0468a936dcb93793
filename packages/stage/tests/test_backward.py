"""Split backward: I and W together give what one backward gives, each thing once."""

from __future__ import annotations

import collections
import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from stepwell_meta.testing import WorkerPool
from stepwell_stage import stage_backward, stage_backward_input, stage_backward_weight
from stepwell_stage.exceptions import StageUsageError

WIDTH = 8


class Scale(torch.autograd.Function):
    """x · w elementwise; counts its backwards."""

    calls = 0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        Scale.calls += 1
        x, w = ctx.saved_tensors
        return grad * w, (grad * x).sum(0)


class WithScale(nn.Module):
    """A custom function between two linear layers, its weight used by one more operation."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.weight = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(Scale.apply(self.before(x), self.weight) * self.weight)


class Block(nn.Module):
    """Linear, nonlinearity, linear; its forwards are counted."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.down(functional.gelu(self.up(x)))


class Checkpointed(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.first, self.block, self.last = nn.Linear(WIDTH, WIDTH), Block(), nn.Linear(WIDTH, WIDTH)
        self.options = options

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(checkpoint(self.block, self.first(x), **self.options))


class SwiGLU(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, value = self.up(x).chunk(2, dim=-1)
        return self.down(functional.silu(gate) * value)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm(x)
        return x + self.attention(normed, normed, normed, need_weights=False)[0]


class LearnedQueries(nn.Module):
    """Queries that are parameters meet keys and values that come from the input, in one fused node."""

    def __init__(self) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.randn(1, 2, 3, 4))
        self.key, self.value = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        key, value = (f(x).view(*x.shape[:2], 2, 4).transpose(1, 2) for f in (self.key, self.value))
        queries = self.queries.expand(len(x), -1, -1, -1)
        return functional.scaled_dot_product_attention(queries, key, value)


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.layer = kind(WIDTH, WIDTH, num_layers=2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)[0]


class Lambda(nn.Module):
    """Parameters by name, and a function of them and the inputs."""

    def __init__(self, function: Callable[..., Any], *modules: nn.Module, **shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.inner = nn.ModuleList(modules)
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(torch.randn(shape)))
        self.function = function

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.function(self, *inputs)


def in_place(m: Any, x: torch.Tensor) -> torch.Tensor:
    h = m.inner[0](x)
    h[:, 0] = m.p
    h[:, 1:3].mul_(m.q)
    h.add_(m.p).relu_()
    return m.inner[1](h)


def twice(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.inner[0](torch.tanh(m.inner[0](x)) * m.w) * m.w


def several_outputs(m: Any, x: torch.Tensor) -> Any:
    h = m.inner[0](x)
    return h, h.argmax(-1), h.detach(), torch.arange(len(x)), torch.tanh(m.w).expand(len(x), -1)


def custom_off_the_path(m: Any, x: torch.Tensor) -> torch.Tensor:
    """A function of two weights alone, each of which is used once more: one in a linear layer and one in a custom function."""
    made = Scale.apply(m.u.expand(WIDTH, -1), m.w)
    return functional.linear(Scale.apply(functional.linear(x, made), m.w), m.v * m.u)


def with_hooks(m: Any, x: torch.Tensor) -> torch.Tensor:
    """Hooks that change gradients, on a value between, and on a weight."""
    h = m.inner[0](x)
    h.register_hook(lambda grad: 3 * grad)
    return m.inner[1](h)


def with_node_hooks(m: Any, x: torch.Tensor) -> torch.Tensor:
    """Hooks on what a node makes, the weights' gradients too: calling the node by itself calls none."""
    h = m.inner[0](x)
    h.grad_fn.register_hook(lambda made, _: tuple(None if grad is None else 3 * grad for grad in made))
    h = m.inner[1](torch.tanh(h))
    h.grad_fn.register_prehook(lambda grads: tuple(2 * grad for grad in grads))
    return h


def experts(m: Any, x: torch.Tensor) -> torch.Tensor:
    ends = torch.tensor([1, 4], dtype=torch.int32)
    hidden = functional.grouped_mm(m.inner[0](x).bfloat16(), m.w.bfloat16(), offs=ends)
    return m.inner[1](torch.tanh(hidden).float())


def low_rank(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.inner[0](x) + x @ m.a @ m.b


def under_autocast(m: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return m.inner[1](m.inner[0](torch.tanh(m.inner[0](x)))).float()


def hooked_weight() -> nn.Module:
    layer = nn.Linear(WIDTH, WIDTH)
    layer.weight.register_hook(lambda grad: 2 * grad)
    layer.bias.register_hook(lambda grad: 5 * grad)
    return layer


def save_matmuls(context: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
    from torch.utils.checkpoint import CheckpointPolicy

    keep = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


def linear(*, bias: bool = True) -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH, bias=bias)


MODULES: dict[str, Callable[[], nn.Module]] = {
    "linear": linear,
    "mlp": lambda: nn.Sequential(linear(), nn.Tanh(), linear(bias=False), nn.GELU(), linear()),
    "custom function": WithScale,
    "custom function of weights": lambda: Lambda(custom_off_the_path, u=(WIDTH,), v=(WIDTH, WIDTH), w=(WIDTH,)),
    "checkpoint": lambda: Checkpointed(use_reentrant=False),
    "reentrant checkpoint": lambda: Checkpointed(use_reentrant=True),
    "selective checkpoint": lambda: Checkpointed(
        use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts(save_matmuls)
    ),
    "outputs of every kind": lambda: Lambda(several_outputs, linear(), w=(WIDTH,)),
    "the same layer twice": lambda: Lambda(twice, linear(), w=(WIDTH,)),
    "x @ w @ w": lambda: Lambda(lambda m, x: x @ m.w @ m.w, w=(WIDTH, WIDTH)),
    "a weight and its transpose": lambda: Lambda(lambda m, x: torch.tanh(x @ m.w) @ m.w.t(), w=(WIDTH, WIDTH)),
    "a weight made of two": lambda: Lambda(
        lambda m, x: functional.linear(x, m.w + m.b @ m.a), w=(WIDTH, WIDTH), b=(WIDTH, 2), a=(2, WIDTH)
    ),
    "a weight cut in two": lambda: Lambda(lambda m, x: (x @ m.w[0]) * m.v @ m.w[1], w=(2, WIDTH, WIDTH), v=(WIDTH,)),
    "weights joined": lambda: Lambda(
        lambda m, x: torch.tanh(x @ torch.cat([m.u, m.v]).t()) @ m.v.repeat(2, 1), u=(WIDTH, WIDTH), v=(WIDTH, WIDTH)
    ),
    "unused parameter": lambda: Lambda(lambda m, x: m.inner[0](x), linear(), linear()),
    "frozen parts": lambda: nn.Sequential(linear().requires_grad_(False), nn.ReLU(), linear(), nn.ReLU(), linear()),
    "no parameters": lambda: nn.Sequential(nn.Tanh(), nn.Softmax(-1)),
    "in place": lambda: Lambda(in_place, linear(), linear(), p=(1,), q=(2,)),
    "inplace modules": lambda: nn.Sequential(linear(), nn.ReLU(inplace=True), linear(), nn.LeakyReLU(inplace=True)),
    "input twice": lambda: Lambda(lambda m, x: m.inner[0](x) * x + m.inner[1](x), linear(), linear()),
    "input returned": lambda: Lambda(lambda m, x: (x, m.inner[0](x), x.view(-1)), linear()),
    "the same output twice": lambda: Lambda(lambda m, x: (h := m.inner[0](x), h, h[:1]), linear()),
    "SwiGLU": SwiGLU,
    "parameter as output": lambda: Lambda(lambda m, x: (m.inner[0](x), m.w), linear(), w=(3,)),
    "LayerNorm": lambda: nn.Sequential(linear(), nn.LayerNorm(WIDTH), linear()),
    "RMSNorm": lambda: nn.Sequential(linear(), nn.RMSNorm(WIDTH), linear()),
    "BatchNorm": lambda: nn.Sequential(linear(), nn.BatchNorm1d(WIDTH), linear()),
    "PReLU": lambda: nn.Sequential(linear(), nn.PReLU(), linear()),
    "experts": lambda: Lambda(experts, linear(), linear(), w=(2, WIDTH, WIDTH)),
    "low rank": lambda: Lambda(low_rank, linear().requires_grad_(False), a=(WIDTH, 2), b=(2, WIDTH)),
    "autocast": lambda: Lambda(under_autocast, linear(), linear()),
    "weight norm": lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(linear()), nn.Tanh(), linear()),
    "hooks": lambda: Lambda(with_hooks, linear(), linear()),
    "hooks on nodes": lambda: Lambda(with_node_hooks, linear(), linear()),
    "hooks on weights": lambda: nn.Sequential(hooked_weight(), nn.ReLU(), hooked_weight()),
    "hooks on a shared weight": lambda: Lambda(lambda m, x: m.inner[0](m.inner[0](x)), hooked_weight()),
}
SEQUENCES: dict[str, Callable[[], nn.Module]] = {
    "3-D linear": lambda: nn.Sequential(linear(), nn.Tanh(), linear()),
    "attention": Attention,
    "learned queries": LearnedQueries,
    "transformer layer": lambda: nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0, batch_first=True),
    "LSTM": lambda: Recurrent(nn.LSTM),
    "GRU": lambda: Recurrent(nn.GRU),
    "position embedding": lambda: Lambda(
        lambda m, x: m.inner[1](x + m.inner[0](torch.arange(x.shape[1]))), nn.Embedding(5, WIDTH), linear()
    ),
    "Conv1d, GroupNorm": lambda: nn.Sequential(nn.Conv1d(5, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.Conv1d(4, 5, 1)),
}
CASES = [(name, make, (4, WIDTH)) for name, make in MODULES.items()]
CASES += [(name, make, (4, 5, WIDTH)) for name, make in SEQUENCES.items()]
every_construct = pytest.mark.parametrize(("make", "shape"), [pytest.param(m, s, id=n) for n, m, s in CASES])


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return make()


def example(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def forward(module: nn.Module, x: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The outputs that require grad, and gradients for them. The module gets no leaf, as in a pipeline."""
    outputs = module(torch.ops.aten._unsafe_view(x, x.shape))
    roots, grads = [], []
    for index, y in enumerate(outputs if isinstance(outputs, tuple) else (outputs,)):
        if y.requires_grad:
            roots.append(y)
            grads.append(example(tuple(y.shape), seed=7 + index).detach())
    return roots, grads


def grads_of(module: nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: parameter.grad for name, parameter in module.named_parameters()}


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        assert (found[name] is None) == (grad is None), name
        if grad is not None:
            torch.testing.assert_close(found[name], grad, msg=lambda text, name=name: f"{name}: {text}")


@every_construct
def test_input_then_weight_equals_full(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    """P066, P075, P089, P090, P091, P104 and the constructs beside them; also microbatches under way at once, in any order."""
    plain, split = seeded(make), seeded(make)
    expected = {}
    for seed in (1, 2, 3):
        x = example(shape, seed)
        torch.autograd.backward(*forward(plain, x))
        expected[seed] = x.grad
    found, under_way = {}, {}
    for seed in (1, 2, 3):
        x = example(shape, seed)
        (found[seed],), under_way[seed] = stage_backward_input(*forward(split, x), [x], split.parameters())
        assert x.grad is None
    for seed in (2, 3, 1):
        grads = stage_backward_weight(split.parameters(), under_way[seed])
        assert under_way[seed] == []
        assert [id(grad) for grad in grads] == [id(p.grad) for p in split.parameters()]
    assert_equal(found, expected)
    assert_equal(grads_of(split), grads_of(plain))


@every_construct
def test_full_equals_autograd_and_an_input_without_grad_leaves_all_to_weight(
    make: Callable[[], nn.Module], shape: tuple[int, ...]
) -> None:
    """P071, P073: where no input needs a gradient, I does nothing and W all."""
    plain, whole, split = seeded(make), seeded(make), seeded(make)
    x = example(shape, 1)
    torch.autograd.backward(*forward(plain, x))
    again = example(shape, 1)
    (found,) = stage_backward(*forward(whole, again), [again])
    torch.testing.assert_close(found, x.grad, rtol=0, atol=0)
    assert_equal(grads_of(whole), grads_of(plain))
    roots, grads = forward(split, example(shape, 1).detach())
    nothing, rest = stage_backward_input(roots, grads, [example(shape, 1).detach(), None, 3])
    assert nothing == (None, None, None)
    assert all(grad is None for grad in grads_of(split).values())
    stage_backward_weight(split.parameters(), rest)
    if not any(isinstance(m, Checkpointed) and m.options["use_reentrant"] for m in split.modules()):
        # There the checkpointed block computes nothing that requires grad; torch warns.
        assert_equal(grads_of(split), grads_of(plain))


# What runs, and when.


class Counter(TorchDispatchMode):
    """Counts operations."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: collections.Counter[str] = collections.Counter()
        self.masks: list[list[bool]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops[func.overloadpacket.__name__] += 1
        if func.overloadpacket is torch.ops.aten.convolution_backward:
            self.masks.append(args[-1])
        return func(*args, **(kwargs or {}))


# Work; the rest are views, sums and accumulation.
HEAVY = (
    *("_grouped_mm", "native_batch_norm_backward", "native_group_norm_backward", "_weight_norm_interface_backward"),
    *(
        "mm",
        "bmm",
        "addmm",
        "baddbmm",
        "gelu",
        "gelu_backward",
        "tanh",
        "tanh_backward",
        "silu",
        "silu_backward",
        "exp",
    ),
    *("_softmax", "_softmax_backward_data", "_prelu_kernel_backward", "embedding_dense_backward"),
    *("mkldnn_rnn_layer", "mkldnn_rnn_layer_backward", "_scaled_dot_product_flash_attention_for_cpu_backward"),
)


@every_construct
def test_no_work_is_done_twice(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    """P093: also checkpointed parts are computed once more, not twice."""
    counts = []
    for split in (False, True):
        module, x = seeded(make), example(shape, 1)
        roots, grads = forward(module, x)
        with Counter() as counter:
            if split:
                _, rest = stage_backward_input(roots, grads, [x])
                stage_backward_weight([], rest)
            else:
                torch.autograd.backward(roots, grads)
        counts.append({op: counter.ops[op] for op in HEAVY if counter.ops[op]})
    assert counts[1] == counts[0]


def test_the_products_of_linear_layers_are_computed_one_in_each_part() -> None:
    module = seeded(MODULES["mlp"])
    x = example((4, WIDTH), 1)
    roots, grads = forward(module, x)
    with Counter() as first:
        _, rest = stage_backward_input(roots, grads, [x])
    assert all(grad is None for grad in grads_of(module).values())
    with Counter() as second:
        stage_backward_weight([], rest)
    assert (first.ops["mm"], second.ops["mm"]) == (3, 3)
    assert second.ops["tanh_backward"] == second.ops["gelu_backward"] == 0


def test_the_products_of_convolutions_are_computed_one_in_each_part() -> None:
    module = nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Conv2d(3, 2, 3))
    x = example((2, 2, 8, 8), 1)
    roots, grads = forward(module, x)
    with Counter() as first:
        _, rest = stage_backward_input(roots, grads, [x])
    with Counter() as second:
        stage_backward_weight([], rest)
    assert first.masks == [[True, False, False]] * 2
    assert second.masks == [[False, True, True]] * 2


def test_a_custom_backward_runs_once_and_its_weights_get_their_gradients_with_it() -> None:
    module = seeded(WithScale)
    x = example((4, WIDTH), 1)
    roots, grads = forward(module, x)
    Scale.calls = 0
    _, rest = stage_backward_input(roots, grads, [x])
    assert Scale.calls == 1
    assert [name for name, grad in grads_of(module).items() if grad is not None] == ["weight"]
    stage_backward_weight([], rest)
    assert Scale.calls == 1
    assert all(grad is not None for grad in grads_of(module).values())


@pytest.mark.parametrize("kind", ["checkpoint", "reentrant checkpoint", "selective checkpoint"])
def test_a_checkpointed_block_is_recomputed_once(kind: str) -> None:
    """P074, P093, P104."""
    module: Any = seeded(MODULES[kind])
    x = example((4, WIDTH), 1)
    roots, grads = forward(module, x)
    assert module.block.calls == 1
    _, rest = stage_backward_input(roots, grads, [x])
    assert module.block.calls == 2
    stage_backward_weight([], rest)
    assert module.block.calls == 2


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"
)  # torch.compile looks at its inputs
def test_p094_a_compiled_stage_runs_whole_in_the_first_part() -> None:
    plain, module = seeded(SwiGLU), seeded(SwiGLU)
    compiled: Any = torch.compile(module, backend="aot_eager")
    x, again = example((4, WIDTH), 1), example((4, WIDTH), 1)
    torch.autograd.backward(*forward(plain, x))
    (grad,), rest = stage_backward_input(*forward(compiled, again), [again])
    assert rest == []
    torch.testing.assert_close(grad, x.grad)
    assert_equal(grads_of(module), grads_of(plain))


def test_hooks_run_as_in_one_backward() -> None:
    """Once a microbatch: hooks on weights before and after accumulation, and those on modules."""
    module = nn.Sequential(linear(), nn.LayerNorm(WIDTH), nn.PReLU(), linear())
    calls: collections.Counter[str] = collections.Counter()
    for name, part in module.named_modules():
        part.register_full_backward_pre_hook(lambda *_, name=name: calls.update([name]))
        part.register_full_backward_hook(lambda *_, name=name: calls.update([name]))
    for name, parameter in module.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: calls.update([name]))
        parameter.register_hook(lambda _, name=name: calls.update([name]))
    x = example((4, WIDTH), 1)
    roots, grads = forward(module, x)
    _, rest = stage_backward_input(roots, grads, [x])
    stage_backward_weight([], rest)
    assert calls == {name: 2 for name, _ in [*module.named_parameters(), *module.named_modules()]}


def test_a_second_input_that_nothing_depends_on_gets_none() -> None:
    x, unused = example((4, WIDTH), 1), example((4, WIDTH), 2)
    found, rest = stage_backward_input((2 * x).sum(), None, [unused, x, torch.ones(1)])
    assert found[0] is None
    assert torch.equal(found[1], torch.full_like(x, 2))
    assert found[2] is None
    stage_backward_weight([], rest)


def test_outputs_may_be_nested_and_gradients_must_match_them() -> None:
    x = example((4, WIDTH), 1)
    outputs = {"a": 2 * x, "b": [torch.arange(3), (3 * x).sum()]}
    (grad,) = stage_backward(outputs, {"a": torch.ones_like(x), "b": [None, None]}, [x])
    assert torch.equal(grad, torch.full_like(x, 5))
    assert stage_backward([torch.ones(1)], None, [x]) == (None,)
    assert stage_backward_input([torch.ones(1)], None, [x]) == ((None,), [])
    with pytest.raises(StageUsageError, match="each of 2 outputs, got 1"):
        stage_backward([x, x], [x], [x])


def tensor_parallel() -> tuple[list[torch.Tensor], list[torch.Tensor], list[int]]:
    mesh = init_device_mesh("cpu", (2,))
    plan = {"norm": SequenceParallel(), "up": ColwiseParallel(input_layouts=Shard(0)), "down": RowwiseParallel()}
    found = []
    for split in (False, True):
        module = seeded(lambda: nn.ModuleDict({"norm": nn.LayerNorm(WIDTH), "up": linear(), "down": linear()}))
        parallelize_module(module, mesh, plan)
        x = distribute_tensor(example((4, WIDTH), 1).detach(), mesh, [Shard(0)]).requires_grad_()
        y = module["down"](torch.tanh(module["up"](module["norm"](x))))
        grad = torch.ones_like(y)
        counts = []
        if split:
            (found_x,), rest = stage_backward_input([y], [grad], [x])
            counts = [sum(parameter.grad is None for parameter in module.parameters())]
            stage_backward_weight([], rest)
        else:
            (found_x,) = stage_backward([y], [grad], [x])
        found.append([found_x.full_tensor(), *(parameter.grad.full_tensor() for parameter in module.parameters())])
    return found[0], found[1], counts


def test_tensor_parallel_stages(workers: WorkerPool) -> None:
    for whole, split, (left,) in workers.run(tensor_parallel, 2):
        assert left == 6
        for a, b in zip(whole, split, strict=True):
            torch.testing.assert_close(a, b)


# Memory.


class Marked(torch.autograd.Function):
    """Identity whose graph node holds a marker, so that a test sees when it dies."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, marker: Any) -> torch.Tensor:
        ctx.marker = marker
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad, None


class Marker:
    pass


class Watched(nn.Module):
    """A module between two marked nodes."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.markers: list[weakref.ref[Marker]] = []

    def mark(self, x: torch.Tensor) -> torch.Tensor:
        marker = Marker()
        self.markers.append(weakref.ref(marker))
        return Marked.apply(x, marker)

    def forward(self, x: torch.Tensor) -> Any:
        result = self.inner(self.mark(x))
        return (
            tuple(self.mark(y) if y.requires_grad else y for y in result)
            if type(result) is tuple
            else self.mark(result)
        )


@contextmanager
def no_collector() -> Iterator[None]:
    """Circles would live on here."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@every_construct
def test_nothing_of_the_graph_is_left_after_weight(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    """P096, P140; nor when W never comes, because the step failed."""
    with no_collector():
        for finish in (True, False):
            module = Watched(seeded(make))
            x = example(shape, 1)
            roots, grads = forward(module, x)
            _, rest = stage_backward_input(roots, grads, [x])
            del roots
            if finish:
                stage_backward_weight([], rest)
            else:
                del rest
            assert module.markers
            assert not [marker for marker in module.markers if marker() is not None]


def test_what_weight_does_not_need_is_freed_by_input() -> None:
    """The loss, and all between it and the topmost node with a weight left."""
    module, top = nn.Sequential(linear(), nn.ReLU(), linear()), Watched(nn.Tanh())
    with no_collector():
        x = example((4, WIDTH), 1)
        loss = top(module(x)).pow(2).sum()
        _, rest = stage_backward_input(loss, None, [x])
        del loss
        assert rest
        assert not [marker for marker in top.markers if marker() is not None]
