from __future__ import annotations

import random
from typing import Any

import graphpasses_support as support
import pytest
import torch
import torch.nn.functional as F
from graphpasses_support import check, run
from torch import nn

from stepwell_graphpasses import trace
from stepwell_graphpasses.exceptions import CaptureError, GuardError
from stepwell_graphpasses.testing import fake_world


def gpt(**options: Any) -> Any:
    return lambda: support.TinyGPT(**options)


TOKENS = {"tokens": support.tokens(rank=0)}
X = {"x": torch.randn(3, 4), "y": torch.randn(3, 4)}


@pytest.mark.parametrize(
    "options", [{}, {"tied": True}, {"frozen": True}, {"unused": True}, {"scalar": True}, {"dropout": 0.3}], ids=str
)
def test_a_transformer_is_captured_bit_for_bit(options: dict[str, Any]) -> None:
    joint = check(gpt(**options), support.gpt_loss, TOKENS)
    assert joint.losses == (("top", None),)


class Norms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.conv(x)).relu()
        self.calls = self.calls + 1  # replaced
        self.mean.lerp_(x.detach().mean((0, 2, 3)), 0.1)  # written in place
        return x.mean((2, 3))


def test_s22_buffers_end_as_in_eager_and_tracing_does_not_touch_them() -> None:
    inputs = {"x": torch.randn(3, 2, 5, 5), "y": torch.randn(3, 4)}
    joint = check(Norms, support.mse_loss, inputs, tolerance=1e-7)
    assert [buffer.name for buffer in joint.buffers] == [
        "calls",
        "mean",
        "norm.running_mean",
        "norm.running_var",
        "norm.num_batches_tracked",
    ]


class Averaged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.register_buffer("weight", torch.zeros(3, 4))
        self.register_buffer("bias", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            torch._foreach_mul_([self.weight, self.bias], 0.9)
            torch._foreach_add_([self.weight, self.bias], list(self.linear.parameters()), alpha=0.1)
        return self.linear(x) + x @ self.weight.t()


def test_s22_an_operator_that_only_writes_writes_as_in_eager() -> None:
    """It has no result, and passes refused the graph: "_foreach_mul_ has no val"."""
    check(Averaged, support.mse_loss, support.pair((4, 3), rank=0))
    with fake_world(2):
        support.compiler(make=Averaged).compile(**support.pair((4, 3), rank=0))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(8, 2, dropout=0.2, batch_first=True)
        self.outer = nn.ModuleDict({"inner": nn.Sequential(nn.Linear(8, 8), nn.ReLU())})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer["inner"](self.attend(x, x, x, need_weights=False)[0])


def test_multihead_attention_and_nested_modules() -> None:
    check(Attention, support.mse_loss, {"x": torch.randn(2, 5, 8), "y": torch.randn(2, 5, 8)}, tolerance=1e-7)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(4, 6, num_layers=2, batch_first=True)
        self.out = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.rnn(x)[0])


def test_an_lstm() -> None:
    check(Recurrent, support.mse_loss, {"x": torch.randn(2, 5, 4), "y": torch.randn(2, 5, 4)}, tolerance=1e-6)


def test_autocast_inside_the_step() -> None:
    def step(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = model(x)
        return F.mse_loss(out.float(), y)

    joint = check(lambda: support.MLP(4, 8, 3), step, support.pair((4, 3), rank=0))
    assert any(
        getattr(node.meta["val"], "dtype", None) == torch.bfloat16 for node in joint.graph.nodes if node.op != "output"
    )


def test_kwargs_trees_and_constants() -> None:
    def step(model: nn.Module, batch: dict[str, Any], power: int, *, names: tuple[str, ...]) -> Any:
        out = model(batch["pair"][0]) if "x" in names else None
        return (out - batch["pair"][1]).abs().pow(power).mean(), {"power": power, "first": out.detach()[0, 0]}

    inputs = {"batch": {"pair": (torch.randn(3, 4), torch.randn(3, 2))}, "power": 2, "names": ("x",)}
    joint = check(lambda: support.MLP(4, 2), step, inputs)
    assert joint.losses == (("power", 2), ("first", None))
    assert joint.guards.tensor_names == ("batch.pair.0", "batch.pair.1")


def test_a_number_that_is_no_number_is_built_in_like_others() -> None:
    """A step with such an input refused its own example: "made for the value nan, got nan"."""
    joint = trace(
        support.MLP(4, 3), lambda model, x, y, fill: support.mse_loss(model, x, y), {**support.XY, "fill": float("nan")}
    )
    assert joint.guards.accepts({**support.XY, "fill": float("nan")})
    assert not joint.guards.accepts({**support.XY, "fill": 0.0})
    joint = trace(
        support.MLP(4, 3), lambda model, x, y, fill: support.mse_loss(model, x, y), {**support.XY, "fill": 0.0}
    )
    assert not joint.guards.accepts({**support.XY, "fill": -0.0})


def test_every_node_has_its_module_and_phase_backward_nodes_too() -> None:
    joint = trace(support.seeded(gpt(layers=2)), support.gpt_loss, TOKENS)
    nodes = [node for node in joint.graph.nodes if node.op == "call_function"]
    phases = [node.meta["phase"] for node in nodes]
    assert phases == sorted(phases, reverse=True)  # forward, then backward
    by_owner = {(node.meta["fqn"], node.meta["phase"]) for node in nodes if "mm" in node.name}
    for layer in range(2):
        for part in ("qkv", "out", "up", "down"):
            assert (f"layers.{layer}.{part}", "forward") in by_owner
            assert (f"layers.{layer}.{part}", "backward") in by_owner
    assert ("", "backward") not in by_owner


def test_backward_nodes_get_their_module_by_data_flow_where_torch_does_not_number_autograd_nodes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from stepwell_graphpasses import _compat

    monkeypatch.setattr(_compat, "next_sequence_number", lambda: None)
    monkeypatch.setattr(_compat, "sequence_number", lambda node: None)
    joint = trace(support.seeded(gpt(layers=2)), support.gpt_loss, TOKENS)
    owners = {node.meta["fqn"] for node in joint.graph.nodes if "mm" in node.name and node.meta["phase"] == "backward"}
    assert {"layers.0.qkv", "layers.1.down", "head"} <= owners


def test_tracing_changes_nothing() -> None:
    class Restless(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(4, 4)
            self.calls = 0
            self.history: dict[str, Any] = {}

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            self.history["last"] = self.last = F.dropout(self.up(x), 0.5) * random.random()
            return self.last

    model = Restless()
    before, torch_state, python_state = dict(model.__dict__), torch.get_rng_state(), random.getstate()
    trace(model, support.mse_loss, X)
    assert (model.calls, model.history) == (0, {})
    assert dict(model.__dict__) == before
    assert not model.up._forward_hooks
    assert not model.up._forward_pre_hooks
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert random.getstate() == python_state


def test_s36_compile_does_not_advance_the_generator() -> None:
    inputs = dict(TOKENS)
    model = support.TinyGPT(dropout=0.5)
    state = torch.get_rng_state()
    trace(model, support.gpt_loss, inputs)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_model_on_the_meta_device_is_traced() -> None:
    with torch.device("meta"):
        model = support.TinyGPT()
    joint = trace(model, support.gpt_loss, TOKENS)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert {node.meta["val"].device.type for node in joint.placeholders} == {"cpu"}


def test_the_evaluation_graph_has_no_gradients() -> None:
    model = support.seeded(gpt())
    joint = trace(model, support.gpt_loss, TOKENS, backward=False)
    assert joint.gradients == ()
    assert {node.meta["phase"] for node in joint.graph.nodes} == {"forward"}
    loss, _ = run(joint, model, TOKENS)
    assert loss.item() == support.gpt_loss(model, **TOKENS)[0].item()


def test_s38_one_symbolic_graph_serves_several_sizes() -> None:
    model = support.seeded(gpt())
    joint = trace(model, support.gpt_loss, TOKENS, dynamic_arg_dims={"tokens": [0, 1]})
    for batch, length in ((2, 5), (3, 9), (7, 4)):
        inputs = {"tokens": support.tokens(rank=0, batch=batch, length=length)}
        outputs = run(joint, model, inputs)
        expected = support.local_gradients(model, support.gpt_loss, inputs)
        assert support.difference(dict(zip(joint.gradients, outputs[2:], strict=True)), expected) <= 1e-7


def test_s39_guards() -> None:
    model = support.MLP(4, 4)
    joint = trace(model, support.mse_loss, X)

    def refuse(message: str, guards: Any = joint.guards, **changes: Any) -> None:
        with pytest.raises(GuardError, match=message) as error:
            guards.flatten({**X, **changes})
        assert error.value.problems

    refuse(r"x: expected shape \(3, 4\), got \(2, 4\)", x=torch.randn(2, 4))
    refuse(r"x: expected shape", x=torch.randn(3, 4, 1))
    refuse(r"x: expected torch.float32, got torch.float64", x=torch.randn(3, 4, dtype=torch.float64))
    refuse(r"x: expected stride \(4, 1\), got \(1, 3\)", x=torch.randn(4, 3).t())
    refuse(r"x: expected device cpu, got meta", x=torch.randn(3, 4, device="meta"))
    refuse(r"x: expected a tensor, got int", x=3)
    refuse(r"expected the inputs x, y; got", z=torch.randn(3))
    refuse(r"share memory", y=X["x"])
    dynamic = trace(model, support.mse_loss, X, dynamic=True).guards
    dynamic.flatten({"x": torch.randn(9, 4), "y": torch.randn(9, 4)})
    refuse(r"relies on.*y.size\(0\)", dynamic, x=torch.randn(9, 4))
    refuse(r"from 2 up, got 1", dynamic, x=torch.randn(1, 4), y=torch.randn(1, 4))
    refuse(r"contiguous", dynamic, x=torch.randn(4, 3).t())
    refuse(r"x.size\(1\)", dynamic, x=torch.randn(3, 5))
    named = trace(model, lambda model, x, y, k: support.mse_loss(model, x, y) * k, {**X, "k": 2}).guards
    refuse(r"made for the value 2, got 3", named, k=3)


@pytest.mark.parametrize(
    ("dims", "inputs", "message"),
    [
        ({"z": [0]}, X, "names the input 'z'; tensor inputs are x, y"),
        ({"x": [2]}, X, "dynamic dim 2 of x does not exist"),
        ({"x": [0], "y": [0]}, {"x": X["x"][:1], "y": X["y"][:1]}, "sizes 0 and 1 need their own graph"),
        ({"x": [0]}, {"x": torch.randn(4, 3).t(), "y": X["y"]}, "not contiguous"),
        ({"x": [1]}, X, r"dim 1 of x was to be dynamic, but the model makes it the constant 4"),
    ],
)
def test_dynamic_dims_that_cannot_be(dims: Any, inputs: Any, message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        trace(support.MLP(4, 4), support.mse_loss, inputs, dynamic_arg_dims=dims)


def test_a_tensor_given_twice_stays_one() -> None:
    def step(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (model(x) - y).square().mean()

    same = torch.randn(3, 4)
    check(lambda: support.MLP(4, 4), step, {"x": same, "y": same})


def test_a_copy_is_independent() -> None:
    joint = trace(support.MLP(4, 4), support.mse_loss, X)
    text = str(joint.graph)
    other = joint.copy()
    assert str(other.graph) == text
    other.set_gradients({})
    other.graph.lint()
    assert str(joint.graph) == text
    assert joint.gradients != other.gradients == ()


def test_nodes_of_a_dynamic_capture_know_their_module_and_phase() -> None:
    """Marks were counted in nodes, of which those that only said a size were taken out again: all later ones were beside it."""

    class Sized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x).tanh() + x * len(x)
            return x

    def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (model(x) - y).square().mean()

    def marks(*, dynamic: bool) -> list[tuple[Any, str, str]]:
        graph = trace(Sized(), loss, {"x": torch.randn(4, 6), "y": torch.randn(4, 6)}, dynamic=dynamic).graph
        calls = [node for node in graph.nodes if node.op == "call_function" and "sym_" not in node.name]
        return [(node.target, node.meta["fqn"], node.meta["phase"]) for node in calls]

    assert marks(dynamic=True) == marks(dynamic=False)
    assert [phase for target, _, phase in marks(dynamic=True) if target is torch.ops.aten.ones_like.default] == [
        "backward"
    ]


class Varied(nn.Module):
    """Operators with several results, written constants, writes in place, draws, views, casts and resizing."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4)
        self.rnn = nn.GRU(6, 4, batch_first=True)
        self.register_buffer("table", torch.arange(4.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.interpolate(self.norm(self.conv(x)), scale_factor=1.7, mode="bicubic").relu_()
        z, _ = self.rnn(x[:, 0])
        scale = torch.tensor([0.5, 2.0, 1.0, 3.0], dtype=torch.float64).float()
        y = y * scale.view(1, 4, 1, 1) + self.table.view(1, 4, 1, 1)
        values, picks = F.dropout(y, 0.3).flatten(2).topk(2)
        return values.mean(2) + picks.float().mean(2) + z.unbind(1)[0] + torch.where(y > 0, y, -1).std((2, 3))


@pytest.mark.parametrize(
    ("make", "step", "inputs"),
    [
        (lambda: Varied(), support.mse_loss, {"x": torch.randn(3, 2, 6, 6), "y": torch.randn(3, 4)}),
        (gpt(tied=True, dropout=0.3), support.gpt_loss, TOKENS),
        (support.Checkpointed, support.mse_loss, {"x": torch.randn(6, 4), "y": torch.randn(6, 4)}),
    ],
    ids=["varied", "gpt", "checkpointed"],
)
def test_the_quick_way_to_write_operators_down_gives_the_graph_of_make_fx_and_the_bits_of_eager(
    make: Any, step: Any, inputs: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Capturing 256 layers took minutes, most of them in what make_fx does around each operator.
    from stepwell_graphpasses import _compat

    quick = check(make, step, inputs) if make is not support.Checkpointed else trace(support.seeded(make), step, inputs)
    monkeypatch.setattr(_compat, "_quickly", lambda function, *flat: function(*flat))
    slow = trace(support.seeded(make), step, inputs)
    assert str(quick.graph) == str(slow.graph)
    for ours, theirs in zip(quick.graph.nodes, slow.graph.nodes, strict=True):
        a, b = ours.meta.get("val"), theirs.meta.get("val")
        assert type(a) is type(b), ours
        if isinstance(a, torch.Tensor):
            assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)
            assert a.untyped_storage().nbytes() == b.untyped_storage().nbytes()


@pytest.mark.filterwarnings("ignore")  # of what torch.compile does within scan
def test_operators_of_higher_order_are_captured() -> None:
    """The quick way refused what make_fx's own way captures, since rules for such operators go by the class of a mode."""
    scan = pytest.importorskip("torch._higher_order_ops.scan").scan

    def sums(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        hidden = model(x)
        return scan(lambda carry, row: (carry + row, (carry * row).clone()), torch.zeros(4), hidden)[1].square().mean()

    graph = trace(nn.Linear(4, 4), sums, {"x": torch.randn(3, 4)}).graph
    assert any("scan" in str(node.target) for node in graph.nodes)
