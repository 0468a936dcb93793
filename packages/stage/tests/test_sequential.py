"""Models cut by layers: the parts together are the model, to the last bit, and what cannot be cut is named."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.nn import functional

from stepwell_meta.testing import WorkerPool
from stepwell_p2p import C10dTransport, Placement, Transport
from stepwell_p2p.exceptions import PeerFailure
from stepwell_stage import Executor, clip_grad_norm_, load_state_dict, measure_costs, split_sequential, state_dict, tie
from stepwell_stage.exceptions import StageUsageError
from stepwell_stage.schedules import gpipe, one_f_one_b

Threads = Callable[..., list[Any]]
WIDTH, VOCABULARY, LENGTH = 4, 9, 5
OFFSET = 0.5


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(self.norm(x)).tanh()


class Gpt(nn.Module):
    """The field's plainest GPT: a ModuleDict, positions, a tied head, an optional loss."""

    def __init__(self, blocks: int = 3, *, tied: bool = True) -> None:
        super().__init__()
        self.width = WIDTH
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(VOCABULARY, WIDTH),
                "wpe": nn.Embedding(LENGTH, WIDTH),
                "h": nn.ModuleList(Block() for _ in range(blocks)),
                "ln": nn.LayerNorm(WIDTH),
            }
        )
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.transformer.wte.weight

    def forward(self, tokens: torch.Tensor, scale: float = 2.0) -> torch.Tensor:
        """The docstring is no step."""
        device = tokens.device
        _, length = tokens.size()
        assert length <= LENGTH, "too long"
        positions = torch.arange(length, device=device)
        x = self.transformer.wte(tokens) + self.transformer.wpe(positions)
        for block in self.transformer.h:
            x = block(x)
        x = self.transformer.ln(x)
        if scale is not None:  # noqa: SIM108 - the statement is what is tested
            logits = self.head(x) * scale
        else:
            logits = self.head(x[:, -1:])
        return logits


class Masked(nn.Module):
    """Several values cross: a mask, a number, a residual; layers are taken by index, in pairs and by name."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.gates = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("table", torch.linspace(0, 1, WIDTH), persistent=False)
        self.out = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.ReLU(), nn.Linear(WIDTH, VOCABULARY)))
        self.unused = nn.Linear(2, 2)
        self.shift = 0.25

    def gate(self, index: int, x: torch.Tensor) -> torch.Tensor:
        return self.gates[index](x).sigmoid()

    @property
    def offset(self) -> torch.Tensor:
        return self.scale * self.shift

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mask = (tokens > 2)[..., None]
        count = tokens.shape[0]
        x = residual = self.embed(tokens)
        for i in range(len(self.layers) // 2):
            x = self.layers[i](x) * mask + self.table
        for index, (layer, factor) in enumerate(zip(self.layers[2:], (1.0, 2.0), strict=True)):
            if count > 0:
                extra = index * factor
            x = x + functional.relu(layer(x)) * self.scale + extra * OFFSET
        last = self.layers[-1]
        x = torch.where(mask, last(x), x) * self.gate(0, x) + residual + self.offset
        return self.out(x)


def initialise(model: nn.Module) -> nn.Module:
    """Every parameter by its name, so that parts get what the model has."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        generator = torch.Generator().manual_seed(sum(map(ord, name.replace("head", "transformer.wte"))))
        nn.init.uniform_(parameter, -1, 1, generator=generator)
    return model


def sequential() -> nn.Sequential:
    return nn.Sequential(
        nn.Embedding(VOCABULARY, WIDTH),
        nn.Sequential(Block(), nn.ReLU(), Block()),
        nn.Linear(WIDTH, VOCABULARY),
    )


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt": Gpt,
    "untied": lambda: Gpt(tied=False),
    "masked": Masked,
    "sequential": sequential,
}


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return tuple(torch.randint(VOCABULARY, (4, LENGTH), generator=generator) for _ in range(2))  # type: ignore[return-value]


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())


def plain(name: str, microbatches: int) -> tuple[float, dict[str, torch.Tensor | None]]:
    model = initialise(MODELS[name]())
    x, y = batch()
    total = 0.0
    for part, target in zip(x.tensor_split(microbatches), y.tensor_split(microbatches), strict=True):
        found = loss(model(part), target) * (len(part) / len(x))
        found.backward()
        total += found.item()
    return total, {n: p.grad for n, p in model.named_parameters(remove_duplicate=False)}


def piped(
    transport: Transport, name: str, *, meta: bool = False
) -> tuple[float | None, dict[str, torch.Tensor | None]]:
    schedule = one_f_one_b(transport.size, 2)
    if meta:
        with torch.device("meta"):
            model = MODELS[name]()
    else:
        model = initialise(MODELS[name]())
    split = split_sequential(model, transport.size)
    executor = Executor(
        split.stages(schedule.placement, transport.rank, "cpu", init_fn=init_part),
        schedule,
        loss,
        transport=transport,
    )
    if split.tied:
        tie(executor, split.tied)
    x, y = batch()
    executor.step(*((x,) if executor.is_first else ()), target=y if executor.is_last else None)
    grads = {n: p.grad for s in executor.stages for n, p in s.submodule.named_parameters(remove_duplicate=False)}
    return None if executor.loss is None else executor.loss.item(), grads


def init_part(part: nn.Module) -> None:
    initialise(part)
    if "table" in dict(part.named_buffers()):
        part.table.copy_(torch.linspace(0, 1, WIDTH))


def check(name: str, results: list[Any]) -> None:
    expected, grads = plain(name, 2)
    assert results[-1][0] == pytest.approx(expected, rel=1e-6)
    tied = split_sequential(MODELS[name](), len(results)).tied
    several = {n for holders in tied.values() for _, n in holders}  # their uses are added in another order
    assert {n for _, own in results for n in own} == grads.keys()
    for _, own in results:
        for n, found in own.items():
            if n in several:
                torch.testing.assert_close(found, grads[n], msg=n)
            else:
                assert found is grads[n] is None or torch.equal(found, grads[n]), n


@pytest.mark.parametrize(("ranks", "meta"), [(1, False), (2, True), (3, False), (5, True)])
@pytest.mark.parametrize("name", MODELS)
def test_parts_are_the_model(threads: Threads, name: str, ranks: int, meta: bool) -> None:
    """Also cut on the meta device first, with only each rank's part given values."""
    check(name, threads(piped, ranks, name, meta=meta))


def test_on_gloo(workers: WorkerPool) -> None:
    """Workers get this file by its path, since what they get by value has no source to read."""

    def on_gloo(path: str, name: str) -> Any:
        spec = importlib.util.spec_from_file_location("models_to_cut", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module.piped(C10dTransport(), name)

    check("gpt", workers.run(on_gloo, 4, __file__, "gpt", deadline=60))


def test_names_and_layers_are_those_of_the_model() -> None:
    model = initialise(Gpt(4))
    split = split_sequential(model, 3)
    assert [name for part in split.parts for name in part] == [
        "transformer.wte",
        "transformer.wpe",
        *(f"transformer.h.{i}" for i in range(4)),
        "transformer.ln",
        "head",
    ]
    states = [split.module(stage).state_dict() for stage in range(3)]
    merged = {name: value for state in states for name, value in state.items()}
    assert merged.keys() == model.state_dict().keys()
    assert sum(len(state) for state in states) == len(merged)
    assert all(torch.equal(merged[name], value) for name, value in model.state_dict().items())
    assert split.tied == {"transformer.wte.weight": ((0, "transformer.wte.weight"), (2, "head.weight"))}
    last = split.module(2)
    assert isinstance(last, Gpt)
    assert last.head.weight is not model.head.weight  # a copy, for another rank
    assert split.module(1).get_submodule("transformer.h.2") is model.transformer.h[2]


def test_p120_parameters_come_in_the_order_of_the_model(threads: Threads) -> None:
    """So that the norm over the stages adds in the order of one process."""
    model = initialise(Masked())
    split = split_sequential(model, 2)
    order = [name for stage in range(2) for name, _ in split.module(stage).named_parameters()]
    places = {name: place for place, (name, _) in enumerate(model.named_parameters())}
    for stage in range(2):
        own = [places[name] for name, _ in split.module(stage).named_parameters()]
        assert own == sorted(own)
    assert set(order) == set(places)

    def run(transport: Transport) -> torch.Tensor:
        schedule = gpipe(transport.size, 1)
        cut = split_sequential(initialise(Gpt(tied=False)), transport.size)
        executor = Executor(cut.stages(schedule.placement, transport.rank, "cpu"), schedule, loss, transport=transport)
        x, y = batch()
        executor.step(*((x,) if executor.is_first else ()), target=y if executor.is_last else None)
        return clip_grad_norm_(executor, 0.1)

    plain_model = initialise(Gpt(tied=False))
    x, y = batch()
    loss(plain_model(x), y).backward()
    norm = nn.utils.clip_grad_norm_(plain_model.parameters(), 0.1)
    assert all(torch.equal(found, norm) for found in threads(run, 3))


def test_p156_thirty_layers_over_four_stages_stay_thirty() -> None:
    split = split_sequential(Gpt(30), 4)
    layers = [name for part in split.parts for name in part if ".h." in name]
    assert layers == [f"transformer.h.{i}" for i in range(30)]
    assert max(len(part) for part in split.parts) - min(len(part) for part in split.parts) <= 3


def test_what_the_forward_does_not_use_is_kept_on_the_last_stage() -> None:
    split = split_sequential(Masked(), 2)
    assert "unused.weight" in split.module(1).state_dict()
    assert "unused.weight" not in split.module(0).state_dict()


def test_boundaries_and_costs() -> None:
    model = sequential()
    assert split_sequential(model, 3).parts == (("0",), ("1.0", "1.1", "1.2"), ("2",))
    by_name = split_sequential(model, boundaries=["1.1", "2"])
    assert by_name.parts == split_sequential(model, boundaries=[2, 4]).parts == (("0", "1.0"), ("1.1", "1.2"), ("2",))
    costs = {"0": 9, "1.0": 1, "1.1": 1, "1.2": 1, "2": 1}
    assert split_sequential(model, 2, costs=costs).parts == (("0",), ("1.0", "1.1", "1.2", "2"))
    assert split_sequential(model, 2, costs=[0, 0, 0, 1, 1]).parts == (("0", "1.0", "1.1", "1.2"), ("2",))


def test_measured_costs(threads: Threads) -> None:
    class Slow(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(2000):
                x = x + 1
            return x

    model = nn.Sequential(nn.Linear(4, 4), Slow(), nn.Dropout(), nn.BatchNorm1d(4))
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()

    def measure(transport: Transport) -> tuple[float, ...]:
        own = model if transport.rank == 1 else copy.deepcopy(model)
        return measure_costs(own, torch.randn(8, 4), transport=transport)

    x = torch.randn(8, 4)
    state = torch.get_rng_state()
    costs = measure_costs(model, x)
    assert torch.equal(torch.get_rng_state(), state)
    assert len(costs) == 4
    assert costs[1] == max(costs)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    first, second = threads(measure, 2)
    assert first == second


def test_a_model_that_cannot_be_measured_is_an_error_on_every_rank(threads: Threads) -> None:
    """Rank 0 alone heard of it; the others waited for its numbers."""

    def fails(x: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("no number")

    def unmeasurable(transport: Transport) -> str:
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(2, 2))
        with pytest.raises(StageUsageError) as raised:
            measure_costs(model, torch.ones(1, 2), transport=transport)
        return str(raised.value)

    def failing(transport: Transport) -> None:
        model = nn.Sequential(nn.Linear(2, 2))
        model[0].forward = fails
        kind, words = (
            (ArithmeticError, "no number") if transport.rank == 0 else (PeerFailure, "ArithmeticError: no number")
        )
        with pytest.raises(kind, match=words):
            measure_costs(model, torch.ones(1, 2), transport=transport)

    first, second = threads(unmeasurable, 2)
    assert first == second
    assert "this one is on the meta device" in first
    threads(failing, 2)


def test_a_checkpoint_gives_a_part_its_values(tmp_path: Any) -> None:
    model = initialise(Gpt(tied=False))
    with pytest.warns(UserWarning, match="single process"):
        dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path, no_dist=True)
    with torch.device("meta"):
        cut = split_sequential(Gpt(tied=False), 2)

    def load(part: nn.Module) -> None:
        dcp.load({"model": part.state_dict()}, checkpoint_id=tmp_path, no_dist=True)

    for stage in range(2):
        with pytest.warns(UserWarning, match="single process"):
            part = cut.module(stage, device="cpu", init_fn=load)
        assert all(torch.equal(value, model.state_dict()[name]) for name, value in part.state_dict().items())


def test_p085_a_tie_within_a_part_survives_the_meta_device() -> None:
    with torch.device("meta"):
        split = split_sequential(Gpt(), 1)
    part = split.module(0, device="cpu", init_fn=initialise)
    assert part.head.weight is part.transformer.wte.weight
    assert not split.tied


def test_split_stages_save_and_load_without_a_map(threads: Threads) -> None:
    def run(transport: Transport) -> dict[str, Any]:
        schedule = gpipe(transport.size, 1)
        split = split_sequential(initialise(Gpt()), transport.size)
        executor = Executor(
            split.stages(schedule.placement, transport.rank, "cpu"), schedule, loss, transport=transport
        )
        tie(executor, split.tied)
        load_state_dict(executor, initialise(Gpt()).state_dict())
        return state_dict(executor)

    expected = initialise(Gpt()).state_dict()
    found = {name: value for own in threads(run, 3) for name, value in own.items()}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_copies_that_nothing_keeps_equal_are_an_error_on_every_rank(threads: Threads) -> None:
    def run(transport: Transport) -> str:
        schedule = gpipe(transport.size, 1)
        split = split_sequential(initialise(Gpt()), transport.size)
        executor = Executor(
            split.stages(schedule.placement, transport.rank, "cpu"), schedule, loss, transport=transport
        )
        x, y = batch()
        with pytest.raises(StageUsageError) as failure:
            executor.step(*((x,) if executor.is_first else ()), target=y if executor.is_last else None)
        return str(failure.value)

    assert all("call tie(executor, split.tied) before the first step" in words for words in threads(run, 3))


class Long(nn.Module):
    """Has a loop that is not over layers, and longer than any that is."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        count = 0
        for _ in range(100_001):
            count += 1
        return self.second(x) * count


def test_a_long_loop_stays_whole() -> None:
    """It was read up to its hundred-thousandth turn, and the last one was lost."""
    model = initialise(Long())
    first, second = (split_sequential(model, 2).module(stage) for stage in range(2))
    x = torch.ones(1, 2)
    values = first(x)
    assert torch.equal(second(*values) if isinstance(values, tuple) else second(values), model(x))


def test_a_layer_used_twice_is_tied_to_itself() -> None:
    """The head takes the embedding's own weight, and one block runs twice."""
    split = split_sequential(Reused(), boundaries=[2, 4])
    assert [[name.split(" (line")[0] for name in part] for part in split.parts] == [
        ["embed", "shared"],
        ["first", "shared"],
        ["first", "embed.weight"],
    ]
    assert "step 3" in split.parts[1][1]
    assert split.tied["embed.weight"] == ((0, "embed.weight"), (2, "embed.weight"))
    assert split.tied["first.bias"] == ((1, "first.bias"), (2, "first.bias"))
    assert split.module(2).embed.weight is not split.module(0).embed.weight


class Reused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.shared = Block()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for _ in range(2):
            x = self.shared(x)
            x = self.first(x)
        return functional.linear(x, self.embed.weight)


MODELS["reused"] = Reused


# What cannot be cut.


class Refused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(2, 2)
        self.b = nn.Linear(2, 2)
        self.norm = nn.BatchNorm1d(2)
        self.calls = 0


class Early(Refused):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:
            return self.a(x)
        return self.b(x)


class Counts(Refused):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.b(self.a(x))


class HandsOn(Refused):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = run(self, x)
        return self.b(x)


class Whole(Refused):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(next(self.parameters()).dtype)
        return self.b(self.a(x))


class Inherits(Early):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


class Decorated(Refused):
    @torch.no_grad()
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x))


class Remembers(Refused):
    def remember(self, x: torch.Tensor) -> torch.Tensor:
        self.calls = 1
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.remember(self.a(x)))


class Statistics(Refused):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.b(self.norm(self.a(x))))


class NoLayers(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1


def run(model: Refused, x: torch.Tensor) -> torch.Tensor:
    return model.a(x)


@pytest.mark.parametrize(
    ("model", "line", "why"),
    [
        (Early, "return self.a(x)", "it returns before the end"),
        (Counts, "self.calls += 1", "it changes the model, and a stage on another rank would not see that"),
        (HandsOn, "self", "it hands self on as a whole"),
        (Whole, "self.parameters", "it asks about the whole model"),
        (Inherits, "super", "the forward of a base class is not in this source"),
        (Decorated, "torch.no_grad()", "a decorated forward is more than its source says"),
        (Remembers, "self.calls", "it changes the model"),
    ],
)
def test_a_forward_that_cannot_be_cut_is_named_with_its_line(model: type[nn.Module], line: str, why: str) -> None:
    with pytest.raises(StageUsageError) as failure:
        split_sequential(model(), 2)
    message = str(failure.value)
    assert message.startswith(f"{model.__name__} cannot be cut: {__file__}:")
    assert f"{line!r}: {why}" in message
    number = int(message.split(f"{__file__}:")[1].split(":")[0])
    with open(__file__) as file:
        assert line in file.read().splitlines()[number - 1]


def test_what_does_not_fit_is_refused() -> None:
    model = sequential()
    for call, words in (
        (
            lambda: split_sequential(model, 6),
            "Sequential has 5 layers that can be told apart, too few for 6 stages: 0, 1.0, 1.1",
        ),
        (lambda: split_sequential(model), "give either the number of stages or their boundaries"),
        (lambda: split_sequential(model, 2, boundaries=[1]), "give either the number of stages or their boundaries"),
        (
            lambda: split_sequential(model, boundaries=["3"]),
            "no layer is called '3'; a stage can begin at 0, 1.0, 1.1, 1.2, 2",
        ),
        (lambda: split_sequential(model, boundaries=[7]), "must ascend within 1 to 4"),
        (lambda: split_sequential(model, boundaries=[1], costs=[1] * 5), "give one of them"),
        (lambda: split_sequential(model, 2, costs=[1]), "1 costs for 5 layers"),
        (lambda: split_sequential(model, 2, costs={"0": 1}), "costs must name every layer"),
        (lambda: split_sequential(NoLayers(), 2), "uses no layers of its own"),
        (
            lambda: split_sequential(Statistics(), 2),
            r"'norm' of Statistics runs on stages 0, 1 \(lines \d+, \d+\), and its buffer",
        ),
        (
            lambda: split_sequential(model, 2).stages(Placement.loop(3, 3), 0, "cpu"),
            "cut into 2 stages, but the schedule has 3",
        ),
        (
            lambda: split_sequential(torch.compile(model, backend="eager"), 2),
            "cannot be cut|cannot be read|has a forward put",
        ),
    ):
        with pytest.raises(StageUsageError, match=words):
            call()
    model.register_forward_hook(lambda *_: None)
    with pytest.raises(StageUsageError, match="has hooks of its own"):
        split_sequential(model, 2)


def test_parts_on_the_meta_device_need_values() -> None:
    with torch.device("meta"):
        split = split_sequential(Gpt(), 2)
        whole = Gpt()
    with pytest.raises(StageUsageError, match="pass device=, and init_fn="):
        split.module(0)
    with pytest.raises(StageUsageError, match=r"init_fn left transformer.wpe.weight, .* of stage 0 without a value"):
        split.module(0, device="cpu", init_fn=lambda part: nn.init.ones_(part.transformer.wte.weight))
    with pytest.raises(StageUsageError, match="time is measured on a model that has values"):
        measure_costs(whole, batch()[0])


def test_positions_and_complex_numbers_without_a_value_are_seen_too() -> None:
    """A checkpoint has no buffers that are not part of the state: positions stayed zero, and every token stood at the first."""

    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(2, 2)
            self.turn = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
            self.register_buffer("positions", torch.arange(3), persistent=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            return x[self.positions] * self.turn.real

    with torch.device("meta"):
        split = split_sequential(Positions(), 1)

    def load(part: nn.Module) -> None:
        part.load_state_dict({"first.weight": torch.ones(2, 2), "first.bias": torch.ones(2)}, strict=False)

    with pytest.raises(StageUsageError, match="init_fn left turn, positions of stage 0 without a value"):
        split.module(0, device="cpu", init_fn=load)


def test_a_variable_that_a_comprehension_of_its_own_statement_uses_too_crosses() -> None:
    """It was taken for one of the comprehension alone: the last part did not know it."""

    class Out(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.layers[0](x)
            out = [out * 2 for out in x.unbind(0)]
            x = self.layers[1](x)
            return self.layers[2](x) + torch.stack(out)

    model, x = Out(), torch.randn(2, 4)
    split = split_sequential(model, 3)
    value: Any = (x,)
    for index in range(3):
        value = split.module(index)(*value)
    assert torch.equal(value, model(x))
