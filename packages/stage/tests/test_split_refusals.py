"""What split cannot cut is refused, with a sentence that says what to change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stepwell_meta import PipeliningMetadataError
from stepwell_p2p import Placement, Transport
from stepwell_stage import Executor, schedules, split
from stepwell_stage.exceptions import StageUsageError


class Row(nn.Module):
    """Layers in a row, with what a test wants between them."""

    def __init__(self, between: Callable[[Tensor, int], Tensor] = lambda x, number: x, layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4)) for _ in range(layers))
        self.between = between

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = self.between(layer(x), number) * scale
        return x.square().mean()


X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


def run(transport: Transport, model: nn.Module, example: Any, x: Any, **inputs: Any) -> float | None:
    cut = split(model, 2, example=example)
    stages = cut.stages(Placement.loop(2, 2), transport.rank, "cpu", transport=transport)
    executor = Executor(stages, schedules.gpipe(2, 2), lambda loss: loss)
    executor.step(**cut.keywords(x, **inputs), return_outputs=False)
    return None if executor.loss is None else executor.loss.item()


def test_a_look_at_data_that_a_stage_has(threads: Callable[..., Any]) -> None:
    """An `if` on a value of an earlier stage is followed: the value crosses, and the one after it goes the same way."""

    def between(x: Tensor, number: int) -> Tensor:
        if number == 3 and x.abs().sum().item() > 0:
            return x * 2
        return x

    found = threads(lambda transport: run(transport, Row(between), X, X), 2)
    assert [loss is None for loss in found] == [True, False]


def test_a_look_at_what_a_later_stage_makes_does_not_matter_to_one_that_is_done(threads: Callable[..., Any]) -> None:
    def between(x: Tensor, number: int) -> Tensor:
        return x * float(x.detach().abs().max()) if number == 1 else x

    assert threads(lambda transport: run(transport, Row(between), X, X), 2)[1] is not None


def test_what_a_stage_could_only_make_after_a_look_at_later_data(threads: Callable[..., Any]) -> None:
    """The product was to be made on stage 0, which would have had to pass a look at what stage 1 makes: the cut was refused."""

    class Late(Row):
        def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
            first = self.layers[0](x)
            x = self.layers[2](self.layers[1](first))
            if x.abs().sum().item() > 0:
                x = x + first * 2
            return self.layers[3](x).square().mean()

    model = Late()
    wanted = sum(model(part).item() / 2 for part in X.chunk(2))
    assert threads(lambda transport: run(transport, model, X, X), 2)[1] == pytest.approx(wanted, rel=1e-6)
    cut = split(model, {"layers.1": 1, "layers.3": 2}, example=X)
    assert "from stage 0: a result of 'layers.0', 96 bytes" in cut.describe()


def test_another_way_than_the_example(threads: Callable[..., Any]) -> None:
    def between(x: Tensor, number: int) -> Tensor:
        return x.relu() if number == 2 and x.sum().item() > 0 else x

    torch.manual_seed(0)
    model = Row(between)
    with torch.no_grad():
        for layer in model.layers:
            layer[0].weight.copy_(torch.eye(4))
            layer[0].bias.zero_()
    with pytest.raises(StageUsageError, match=r"went another way than with the example.*test_split_refusals\.py"):
        threads(lambda transport: run(transport, model, X.abs(), -X.abs()), 2)


def test_a_plain_value_that_decides(threads: Callable[..., Any]) -> None:
    def between(x: Tensor, number: int) -> Tensor:
        return x

    class Deep(Row):
        def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
            for layer in list(self.layers)[: int(scale)]:
                x = layer(x)
            return x.square().mean()

    with pytest.raises(StageUsageError, match="went another way"):
        threads(lambda transport: run(transport, Deep(between), {"x": X, "scale": 4.0}, X, scale=3.0), 2)


def test_a_value_that_would_go_back() -> None:
    with pytest.raises(StageUsageError, match=r"'layers\.1' is to be on stage 0, but takes what stage 1 makes"):
        split(Row(), {"layers.0": 1, "layers.1": 0}, example=X)


def test_too_many_stages() -> None:
    with pytest.raises(
        StageUsageError, match=r"Row has 4 units that the example calls, too few for 5 stages: layers\.0\.0"
    ):
        split(Row(), 5, example=X)


def test_arguments_that_do_not_fit() -> None:
    model = Row()
    cases: list[tuple[dict[str, Any], str]] = [
        ({"stages": 0}, "at least 1 stage, got 0"),
        ({"stages": 2.0}, "stages must be a whole number, got 2.0, a float"),
        ({"stages": {"layers.1": "1"}}, r"the stage of 'layers\.1' must be a whole number, got '1', a str"),
        ({"stages": {"layers.9": 1}}, r"no unit is called 'layers\.9'; there are layers\.0"),
        ({"stages": {"layers.1": -1}}, "stages are numbered from 0"),
        ({"stages": {"layers.3": 2}}, "no unit is left for stage 1"),
        ({"stages": 2, "units": ["layers.7"]}, r"no module with parameters is called 'layers\.7'"),
        ({"stages": 2, "units": ["layers.0", "layers.0.0"]}, "leave out one"),
        ({"stages": 2, "costs": {"layers.0": 1.0}}, "costs must name every unit"),
        ({"stages": 2, "costs": "memory"}, "costs must be 'parameters', 'time' or numbers by unit, got 'memory'"),
        ({"stages": 2, "inputs": "last"}, "inputs must be 'every' or 'first', got 'last'"),
        ({"stages": 2, "example": {"x": X, "y": X}}, r"does not take these inputs: .*'y'"),
    ]
    for options, message in cases:
        with pytest.raises(StageUsageError, match=message):
            split(model, **{"example": X, **options})
    with pytest.raises(StageUsageError, match=r"cut into 2 stages, but the schedule has 3; use split\(model, 3"):
        split(model, 2, example=X).stages(Placement.loop(3, 3), 0, "cpu")


@pytest.mark.parametrize("units", ["layers.*", 3])
def test_one_unit_that_is_not_in_a_list(units: Any) -> None:
    """A text was read letter by letter: no module with parameters was called 'l'."""
    with pytest.raises(StageUsageError, match=rf"units are several names or globs .*'blocks\.\*'.*, got {units!r}"):
        split(Row(), 2, example=X, units=units)


def test_inputs_that_are_missing_or_new(threads: Callable[..., Any]) -> None:
    def lacking(transport: Transport) -> None:
        cut = split(Row(), 2, example=X)
        stages = cut.stages(Placement.loop(2, 2), transport.rank, "cpu", transport=transport)
        executor = Executor(stages, schedules.gpipe(2, 2), lambda loss: loss)
        executor.step(**({"x": X} if transport.rank == 0 else {}), return_outputs=False)

    with pytest.raises(StageUsageError, match=r"stage 1 was given no x: every rank passes the model's inputs by name"):
        threads(lacking, 2)
    with pytest.raises(StageUsageError, match="was given scale, which the example did not have"):
        threads(lambda transport: run(transport, Row(), X, X, scale=2.0), 2)


def test_a_plain_input_that_only_the_first_stage_is_given(threads: Callable[..., Any]) -> None:
    """The others went on with the example's, and the loss was that of no model."""

    def one(transport: Transport, scale: float) -> float | None:
        cut = split(Row(), 2, example={"x": X, "scale": 2.0}, inputs="first")
        stages = cut.stages(Placement.loop(2, 2), transport.rank, "cpu", transport=transport)
        executor = Executor(stages, schedules.gpipe(2, 2), lambda loss: loss)
        executor.step(**({"x": X, "scale": scale} if transport.rank == 0 else {}), return_outputs=False)
        return None if executor.loss is None else executor.loss.item()

    with pytest.raises(StageUsageError, match=r"stage 0 was given scale=3\.0, .*unlike any example.*inputs=\"every\""):
        threads(one, 2, 3.0)
    assert threads(one, 2, 2.0)[1] is not None


def test_a_model_on_the_meta_device_that_decides_by_data() -> None:
    with torch.device("meta"):
        model = Row(lambda x, number: x * x.max().item())
    with pytest.raises(StageUsageError, match=r"decides by data how it goes on: item in test_split_refusals\.py"):
        split(model, 2, example=X)


def test_a_structure_that_cannot_be_copied() -> None:
    model = Row()
    model.made = (number for number in range(3))  # type: ignore[assignment]
    with pytest.raises(StageUsageError, match="its structure cannot be copied: cannot pickle 'generator' object"):
        split(model, 2, example=X)


class Keeping(nn.Sequential):
    """A layer whose result leaves it by another way than its return."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 4))
        self.aux = torch.zeros(())

    def forward(self, x: Tensor, into: list[Tensor] | None = None) -> Tensor:
        y = super().forward(x)
        self.aux = y.square().mean()
        if into is not None:
            into.append(y)
        return y  # type: ignore[no-any-return]


class Held:
    """An object that is none of Python's containers."""

    def __init__(self, value: Tensor) -> None:
        self.value = value


class Opening(nn.Sequential):
    def forward(self, held: Held) -> Any:
        return super().forward(held.value)


class Closing(nn.Sequential):
    def forward(self, held: Held) -> Any:
        return Held(super().forward(held.value))


class Objects(Row):
    def __init__(self, kind: type[nn.Sequential]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(kind(nn.Linear(4, 4)) for _ in range(4))

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        for layer in self.layers:
            x = layer(Held(x.tanh()))
            x = x.value if isinstance(x, Held) else x
        return x.square().mean()


class Collects(Row):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.kept = how, []  # type: ignore[var-annotated]
        self.layers = nn.ModuleList(Keeping() for _ in range(4))
        if how == "hook":
            for layer in self.layers:
                layer.register_forward_hook(self.keep)

    def keep(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        self.kept.append(output)

    def forward(self, x: Tensor, scale: float = 1.0) -> Any:
        self.kept.clear()
        for layer in self.layers:
            x = layer(x, self.kept) if self.how == "list" else layer(x)
        if self.how == "result":
            return x, self.layers[0].aux
        terms = [layer.aux for layer in self.layers] if self.how == "attribute" else [y.mean() for y in self.kept]
        return x.square().mean() + sum(terms)


def test_what_leaves_a_unit_by_another_way_than_its_return() -> None:
    """Cut, it was refused in the first step, with a sentence about other things; all parameters were on every stage by then."""
    returned = r"takes a tensor that unit 'layers\.0' makes but does not return.* return it"
    given = r"unit 'layers\.0' changes a list that it is given, which other stages do not see: return it"
    kept = r"looks at 'kept', which unit 'layers\.0' changes.* return it"
    for how in ("hook", "list", "attribute", "result"):
        with pytest.raises(StageUsageError, match={"list": given, "hook": kept}.get(how, returned)):
            split(Collects(how), 2, example=X)


def test_objects_that_are_not_looked_into(threads: Callable[..., Any]) -> None:
    """A value that glue had put into one did not cross; what a unit returns in one is refused when the model is cut."""
    model = Objects(Opening)
    wanted = sum(model(part).item() / 2 for part in X.chunk(2))
    assert threads(lambda transport: run(transport, model, X[:2], X), 2)[1] == pytest.approx(wanted, rel=1e-6)
    with pytest.raises(StageUsageError, match=r"unit 'layers\.0' .*returns in an object that is not looked into"):
        split(Objects(Closing), 2, example=X)


def test_shapes_that_depend_on_data_need_dynamic_stages(threads: Callable[..., Any]) -> None:
    class Masked(Row):
        def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
            kept = x[:, 0] > 0
            x = self.layers[1](self.layers[0](x)[kept])
            return self.layers[3](self.layers[2](x)).square().sum()

    x = torch.cat([X.abs(), -X.abs()[:4], X.abs()[:2]])
    model = Masked()

    def one(transport: Transport, shapes: Any) -> float | None:
        stages = split(model, 2, example=X).stages(
            Placement.loop(2, 2), transport.rank, "cpu", transport=transport, shapes=shapes
        )
        executor = Executor(stages, schedules.gpipe(2, 2), lambda loss: loss)
        executor.step(x=x, return_outputs=False)
        return None if executor.loss is None else executor.loss.item()

    with pytest.raises(PipeliningMetadataError, match=r'stage 0: output .*build the stages with shapes="dynamic"'):
        threads(one, 2, "static")
    assert threads(one, 2, "dynamic")[1] == pytest.approx(sum(model(part).item() / 2 for part in x.chunk(2)), rel=1e-6)


def test_nothing_is_changed_in_the_model() -> None:
    model = Row()
    before = [(name, id(value)) for name, value in (*model.named_modules(), *model.named_parameters())]
    kinds = [type(module) for module in model.modules()]
    cut = split(model, 2, example=X)
    stage = cut.module(1)
    assert [(name, id(value)) for name, value in (*model.named_modules(), *model.named_parameters())] == before
    assert [type(module) for module in model.modules()] == kinds
    assert dict(stage.named_parameters()).keys() == {
        f"layers.{n}.0.{what}" for n in (2, 3) for what in ("weight", "bias")
    }
    assert stage.layers[2][0].weight is model.layers[2][0].weight  # type: ignore[index, union-attr]
    assert stage.layers[0] is None  # type: ignore[index]
    model(X).backward()
