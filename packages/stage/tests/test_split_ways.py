"""Models whose forward goes another way for some batches, with an example for each: as in one process, or refused."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from stage_support import Threads
from torch import Tensor, nn

from stepwell_meta.exceptions import StepwellError
from stepwell_meta.testing import WorkerPool
from stepwell_p2p import C10dTransport, Transport
from stepwell_stage import Executor, Schedule, schedules, split, tie
from stepwell_stage.exceptions import StageUsageError

Inputs = Mapping[str, Any]


def loss_of(output: Any) -> Tensor:
    return output["loss"] if isinstance(output, Mapping) else output.square().mean()


def rows_of(part: Inputs) -> int:
    return len(next(value for value in part.values() if isinstance(value, Tensor)))


def plain(model: nn.Module, steps: Sequence[Sequence[Inputs]]) -> tuple[list[float], dict[str, Tensor | None]]:
    """The loss of each step in one process, microbatch by microbatch, and the gradients of all of them."""
    model, losses = copy.deepcopy(model), []
    for parts in steps:
        total, size = 0.0, sum(map(rows_of, parts))
        for part in parts:
            loss = loss_of(model(**part))
            (loss * (rows_of(part) / size)).backward()
            total += loss.item() * rows_of(part) / size
        losses.append(total)
    return losses, {name: parameter.grad for name, parameter in model.named_parameters(remove_duplicate=False)}


def on_rank(
    transport: Transport,
    model: nn.Module,
    examples: Sequence[Inputs],
    steps: Sequence[Sequence[Inputs]],
    schedule: Schedule,
    options: Mapping[str, Any],
) -> tuple[list[float], dict[str, Tensor | None], str]:
    options = dict(options)
    shapes, stages = options.pop("shapes", "static"), options.pop("stages", schedule.placement.num_stages)
    cut = split(model, stages, example=examples[0], ways=examples[1:], **options)
    parts = cut.stages(schedule.placement, transport.rank, "cpu", transport=transport, shapes=shapes)
    executor = Executor(parts, schedule, loss_of)
    if cut.tied:
        tie(executor, cut.tied)
    given = cut.inputs == "every" or executor.is_first
    losses = []
    for step in steps:
        executor.step(kwarg_mbs=[dict(part) if given else {} for part in step], return_outputs=False)
        if executor.loss is not None:
            losses.append(executor.loss.item())
    grads: dict[str, Tensor | None] = {}
    for stage in executor.stages:
        assert isinstance(stage.submodule, nn.Module)
        for name, parameter in stage.submodule.named_parameters():
            grads[name] = parameter.grad
    return losses, grads, cut.describe(schedule.placement)


def check(
    threads: Callable[..., Any],
    model: nn.Module,
    examples: Sequence[Inputs],
    steps: Sequence[Sequence[Inputs]],
    name: str = "1f1b",
    ranks: int = 2,
    **options: Any,
) -> str:
    """Steps of microbatches on stages, and in one process: losses, every gradient, and which parameters have none."""
    schedule = schedules.BY_NAME[name](ranks, len(steps[0]))
    models = [copy.deepcopy(model) for _ in range(ranks)]
    losses, grads = plain(model, steps)
    found = threads(lambda t: on_rank(t, models[t.rank], examples, steps, schedule, options), ranks)
    assert [mine for mine, _, _ in found if mine] == [[pytest.approx(loss, rel=1e-12) for loss in losses]]
    together = [(key, grad) for _, mine, _ in found for key, grad in mine.items()]
    assert dict(model.named_parameters()).keys() <= {key for key, _ in together}
    for key, grad in together:
        wanted = grads[key]
        if wanted is None:
            assert grad is None, key
        else:
            assert grad is not None, key
            torch.testing.assert_close(grad, wanted, rtol=1e-10, atol=1e-13)
    return str(found[0][2])


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(self.norm(x)).tanh()


class Vision(nn.Module):
    """A tower for images, which not all batches have; the loss inside, where there are labels; a weight used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.tower = nn.ModuleList(Block() for _ in range(3))
        self.join = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, pixels: Tensor | None = None, labels: Tensor | None = None) -> Any:
        x = self.embed(ids)
        if pixels is not None:
            y = pixels
            for block in self.tower:
                y = block(y)
            x = torch.cat([self.join(y), x], 1)
        for block in self.blocks:
            x = block(x)
        scores = self.head(x[:, -ids.shape[1] :])
        if labels is None:
            return {"loss": scores.square().mean(), "scores": scores}
        return {"loss": F.cross_entropy(scores.flatten(0, 1), labels.flatten()), "scores": scores}


def draw(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def words(seed: int, size: int = 2, length: int = 5) -> dict[str, Tensor]:
    return {
        name: torch.randint(11, (size, length), generator=draw(seed + n)) for n, name in enumerate(("ids", "labels"))
    }


def seen(seed: int, size: int = 2, length: int = 5) -> dict[str, Tensor]:
    return {**words(seed, size, length), "pixels": torch.randn(size, 3, 8, generator=draw(seed + 7)).double()}


def make(kind: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return kind().double()


ALL = [name for name, schedule in schedules.BY_NAME.items() if schedule(2, 3).has_backward]


@pytest.mark.parametrize("name", ALL)
def test_a_tower_for_some_batches(threads: Callable[..., Any], name: str) -> None:
    """Steps of one way alone, of the other, and of both within one batch."""
    steps = [
        [seen(1), seen(2), seen(3)],
        [words(4), words(5), words(6)],
        [words(7, 1), seen(8, 3), words(9, 2)],
    ]
    check(threads, make(Vision), [words(0), seen(0)], steps, name)


@pytest.mark.parametrize(("name", "ranks"), [("1f1b", 4), ("interleaved-1f1b", 2), ("zbv", 2), ("1f1b", 1)])
def test_the_second_way_first_and_inputs_on_the_first_rank(threads: Callable[..., Any], name: str, ranks: int) -> None:
    """Stages that are not given the inputs are told of what kind they are."""
    steps = [[words(1, 3), words(2, 3)], [seen(3, 1), words(4, 2)]]
    examples = [seen(0), words(0)]
    check(threads, make(Vision), examples, steps, name, ranks, inputs="first")
    check(threads, make(Vision), examples, [[words(1, 3)], [seen(5)]], "gpipe", ranks)


class Switches(nn.Module):
    """Layers in a row; which of them run, and what joins them, is decided by ``decide`` at each."""

    def __init__(self, decide: Callable[[Any, int, Tensor], bool], layers: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.decide = decide

    def forward(self, x: Tensor, how: Any = None) -> Tensor:
        kept = x
        for number, layer in enumerate(self.layers):
            if self.decide(how, number, x):
                x = layer(x)
                kept = kept + x
            else:
                x = x * 0.5
        return x + kept


def numbers(seed: int, size: int = 2, length: int = 4) -> Tensor:
    return torch.randn(size, length, 8, generator=draw(seed)).double()


def keeps(how: Any, number: int, x: Tensor) -> bool:
    return bool(how[number])


def switched(*keep: int) -> tuple[bool, ...]:
    return tuple(map(bool, keep))


WAYS = {
    "all": switched(1, 1, 1, 1, 1, 1),
    "the first idle": switched(0, 0, 1, 1, 1, 1),
    "the last idle": switched(1, 1, 1, 1, 0, 0),
    "one in the middle idle": switched(1, 1, 0, 0, 1, 1),
    "only the first": switched(1, 0, 0, 0, 0, 0),
    "only the last": switched(0, 0, 0, 0, 0, 1),
    "here and there": switched(0, 1, 0, 1, 0, 1),
}


def of_way(name: str, seed: int, size: int = 2) -> dict[str, Any]:
    return {"x": numbers(seed, size), "how": WAYS[name]}


@pytest.mark.parametrize(
    ("way", "name", "ranks", "inputs"),
    [
        ("all", "1f1b", 3, "every"),
        ("the first idle", "zbv", 2, "every"),
        ("the first idle", "gpipe", 3, "first"),
        ("the last idle", "1f1b", 3, "every"),
        ("the last idle", "zb-h1", 3, "first"),
        ("one in the middle idle", "interleaved-1f1b", 2, "every"),
        ("only the first", "1f1b", 3, "every"),
        ("only the last", "zbv", 2, "first"),
        ("here and there", "gpipe", 4, "every"),
    ],
)
def test_layers_that_are_left_out(threads: Callable[..., Any], way: str, name: str, ranks: int, inputs: str) -> None:
    """What decides is no tensor, so all ways have inputs that look the same; stages without any unit pass on what they must."""
    steps = [[of_way(way, 1), of_way(way, 2)], [of_way("all", 3), of_way(way, 4)]]
    examples = [of_way(one, 0) for one in WAYS]
    check(threads, make(lambda: Switches(keeps)), examples, steps, name, ranks, shapes="dynamic", inputs=inputs)


def test_every_way_in_one_batch(threads: Callable[..., Any]) -> None:
    step = [of_way(name, number, 1 + number % 3) for number, name in enumerate(WAYS)]
    for name in ("1f1b", "zbv"):
        check(
            threads, make(lambda: Switches(keeps)), [of_way(name, 0) for name in WAYS], [step], name, shapes="dynamic"
        )


def any_set(how: Tensor, number: int, x: Tensor) -> bool:
    return bool(how[:, number].any())


def test_a_branch_on_data_that_every_stage_has(threads: Callable[..., Any]) -> None:
    def masked(seed: int, *columns: int) -> dict[str, Tensor]:
        mask = torch.zeros(2, 6, dtype=torch.bool)
        mask[seed % 2, list(columns)] = True
        return {"x": numbers(seed), "how": mask}

    sets = ((0, 1, 2, 3, 4, 5), (2, 3, 4, 5), (0, 1, 5))
    examples = [masked(0, *columns) for columns in sets]
    steps = [[masked(n, *columns) for n, columns in enumerate(sets)], [masked(5, *sets[1])] * 3]
    for options in ({}, {"inputs": "first"}):
        check(threads, make(lambda: Switches(any_set)), examples, steps, "1f1b", 3, shapes="dynamic", **options)


def far_from_zero(how: Any, number: int, x: Tensor) -> bool:
    """Of what the layers before make."""
    return number not in (2, 4) or float(x.detach().mean()) > 0


def test_a_branch_on_data_that_layers_make(threads: Callable[..., Any]) -> None:
    """The value that decides crosses, and stages that are done by then do not care."""
    model = make(lambda: Switches(far_from_zero))
    examples = [{"x": numbers(0).abs() + 5}, {"x": -numbers(0).abs() - 5}]
    parts = [{"x": numbers(n) * 0.1 + 5 * (-1) ** n} for n in range(4)]
    for name, ranks in (("1f1b", 3), ("zbv", 2), ("1f1b", 2)):
        check(threads, model, examples, [parts], name, ranks, shapes="dynamic")


class Tasks(nn.Module):
    """An adapter for one task; a second head that is there if it is asked for; one norm used in two places, by task."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.adapter = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 3)
        self.second = nn.Linear(8, 2)

    def forward(self, x: Tensor, task: str = "a", second: bool = False) -> Any:
        x = self.blocks[0](x)
        if task == "b":
            x = x + self.adapter(self.norm(x))
        for block in list(self.blocks)[1:]:
            x = block(x)
        if task == "a":
            x = self.norm(x)
        loss = self.head(x).square().mean()
        if second:
            loss = loss + self.second(x).tanh().square().mean()
        return {"loss": loss}


def task(seed: int, size: int = 2, **how: Any) -> dict[str, Any]:
    return {"x": numbers(seed, size), **how}


def test_tasks_by_name(threads: Callable[..., Any]) -> None:
    """What crosses differs by the task's name, so shapes may be static; the norm is tied."""
    model = make(Tasks)
    examples = [task(0), task(0, task="b"), task(0, second=True)]
    parts = [task(1), task(2, task="b"), task(3, second=True, task="a")]
    steps = [parts[:2], parts[1:], [parts[1], parts[1]], parts[:2]]
    said = check(threads, model, examples, steps)
    assert "tied: 'norm.weight' on stages 0, 1" in said
    assert "from stage 0: a result of 'blocks.1', 512 bytes in every way" in said
    for name in ("zbv", "interleaved-1f1b"):
        for shapes in ("static", "dynamic"):
            said = check(threads, model, examples, steps, name, shapes=shapes)
            assert "from stage 0: a result of 'norm', 512 bytes in ways[0]" in said
    check(threads, model, examples, [parts, parts[1:] * 2][:1], "gpipe", 3, inputs="first")


def test_one_that_left_out_an_input_may_pass_its_default(threads: Callable[..., Any]) -> None:
    parts = [task(1, task="a", second=False), task(2, task="b", second=False)]
    for options in ({}, {"inputs": "first"}):
        check(threads, make(Tasks), [task(0, task="b"), task(0)], [parts], **options)


class Long(nn.Module):
    """An encoder that short inputs skip, and a unit of which no stage knows beforehand whether the next part takes its result."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.encoder = nn.ModuleList(Block() for _ in range(3))
        self.last = nn.BatchNorm1d(8)
        self.register_buffer("seen", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        if x.shape[1] > 4:
            self.seen += 1
            for block in self.encoder:
                y = block(y) * (1 + self.seen)
        return self.last(y.mean(1) + x[:, 0])


def test_an_encoder_for_long_inputs_only(threads: Callable[..., Any]) -> None:
    """A size decides, and glue counts how often."""
    lengths = [[3, 6, 4], [6, 6, 6], [2, 2, 2], [9, 3, 5]]
    steps = [[{"x": numbers(n, 3, length)} for n, length in enumerate(row)] for row in lengths]
    examples = [{"x": numbers(0, 2, 4)}, {"x": numbers(0, 2, 6)}]
    for name, ranks in (("1f1b", 3), ("zb-h1", 2)):
        check(threads, make(Long), examples, steps, name, ranks)


class Either(nn.Module):
    """The same calls and operations in both ways, on other values."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))

    def forward(self, x: Tensor, left: bool = True) -> Tensor:
        first = self.layers[0](x)
        second = self.layers[1](x)
        third = self.layers[2](second if left else first)
        y = self.layers[3]((first if left else second) * 2 + third)
        return self.layers[5](self.layers[4](y + (third if left else second).sin()) + (x if left else first))


def test_ways_that_cannot_be_told_apart_by_what_runs(threads: Callable[..., Any]) -> None:
    examples = [{"x": numbers(0), "left": True}, {"x": numbers(0), "left": False}]
    steps = [[{"x": numbers(n), "left": n % 3 > 0} for n in range(3)]] * 2
    for name, ranks in (("1f1b", 4), ("1f1b", 6), ("zbv", 2)):
        check(threads, make(Either), examples, steps, name, ranks)


def test_an_example_that_goes_a_way_again(threads: Callable[..., Any]) -> None:
    check(threads, make(Vision), [words(0), words(1, 3, 4), words(2)], [[words(3, 1), words(4)]])


def evaluated(transport: Transport, model: nn.Module, steps: Sequence[Sequence[Inputs]]) -> list[Any]:
    schedule = schedules.one_f_one_b(transport.size, 2)
    cut = split(model, transport.size, example=words(0), ways=[seen(0), {"ids": words(0)["ids"]}])
    executor = Executor(cut.stages(schedule.placement, transport.rank, "cpu", transport=transport), schedule, loss_of)
    tie(executor, cut.tied)
    executor.step(kwarg_mbs=[dict(part) for part in steps[0]], return_outputs=False)
    return [executor.eval(kwarg_mbs=[dict(part) for part in step]) for step in steps]


def test_evaluation_goes_its_own_ways(threads: Callable[..., Any]) -> None:
    """Trained with labels, evaluated with and without; a batch of images and one of words alone."""
    steps = [[words(1), words(2)], [seen(3), seen(4)], [{"ids": words(5)["ids"]}, {"ids": words(6, 1)["ids"]}]]
    model = make(Vision)
    models = [copy.deepcopy(model) for _ in range(3)]
    found = threads(lambda transport: evaluated(transport, models[transport.rank], steps), 3)
    for step, outputs in zip(steps, found[2], strict=True):
        wanted = torch.cat([model(**part)["scores"] for part in step])
        torch.testing.assert_close(outputs["scores"], wanted, rtol=1e-12, atol=1e-12)


def on_gloo(name: str, ranks: int) -> dict[str, float]:
    transport = C10dTransport()
    steps = [[words(1, 3), seen(2, 2), words(3, 1)], [seen(4), seen(5), seen(6)], [words(7), words(8), words(9)]]
    _, wanted = plain(make(Vision), steps)
    schedule = schedules.BY_NAME[name](ranks, 3)
    _, grads, _ = on_rank(transport, make(Vision), [words(0), seen(0)], steps, schedule, {})
    transport.close()
    found = {}
    for key, grad in grads.items():
        expected = wanted[key]
        assert (grad is None) == (expected is None)
        if grad is not None and expected is not None:
            found[key] = float((grad - expected).abs().max())
    return found


def test_on_processes(workers: WorkerPool) -> None:
    for name, ranks in (("1f1b", 4), ("zbv", 2)):
        found = {key: value for one in workers.run(on_gloo, ranks, name, ranks) for key, value in one.items()}
        assert dict(make(Vision).named_parameters()).keys() <= found.keys()
        assert max(found.values()) < 1e-12


def test_a_model_on_the_meta_device(threads: Callable[..., Any]) -> None:
    model = make(Vision)
    steps = [[words(1), seen(2)]]
    losses, grads = plain(model, steps)
    values = model.state_dict()

    def one(transport: Transport) -> tuple[list[float], dict[str, Tensor | None]]:
        with torch.device("meta"):
            empty = Vision().double()
        schedule = schedules.one_f_one_b(transport.size, 2)
        cut = split(empty, transport.size, example=words(0), ways=[seen(0)])

        def init(part: nn.Module) -> None:
            part.load_state_dict({name: values[name] for name in part.state_dict()})

        stages = cut.stages(schedule.placement, transport.rank, "cpu", transport=transport, init_fn=init)
        executor = Executor(stages, schedule, loss_of)
        tie(executor, cut.tied)
        executor.step(kwarg_mbs=steps[0], return_outputs=False)
        assert isinstance(stages[0].submodule, nn.Module)
        mine = {name: parameter.grad for name, parameter in stages[0].submodule.named_parameters()}
        return [] if executor.loss is None else [executor.loss.item()], mine

    found = threads(one, 3)
    assert [mine for mine, _ in found if mine] == [[pytest.approx(loss, rel=1e-12) for loss in losses]]
    for name, grad in {name: grad for _, mine in found for name, grad in mine.items()}.items():
        torch.testing.assert_close(grad, grads[name], rtol=1e-10, atol=1e-13)


def refused(threads: Callable[..., Any], message: str, *args: Any, **options: Any) -> None:
    with pytest.raises(StepwellError, match=message):
        check(threads, *args, **options)


def test_a_way_that_no_example_showed(threads: Callable[..., Any]) -> None:
    model = make(lambda: Switches(keeps))
    examples = [of_way("all", 0), of_way("the last idle", 0), of_way("one in the middle idle", 0)]
    for way in ("the first idle", "only the first", "here and there"):
        refused(
            threads,
            r"another way than with any example: .* came there, and now .* split with an example for this way too \(ways=\)",
            model,
            examples,
            [[of_way("all", 1), of_way(way, 2)]],
            shapes="dynamic",
        )
    unseen = {"ids": words(1)["ids"], "pixels": seen(1)["pixels"]}
    message = (
        r"was given ids, pixels, and no example has these and no others: ids, labels; ids, labels, pixels; split with"
    )
    refused(threads, message, make(Vision), [words(0), seen(0)], [[words(1), unseen]])
    message = r"stage 0 was given task='c', or tensors .*unlike any example.* \(ways=\), or with inputs=\"every\""
    refused(
        threads,
        message,
        make(Tasks),
        [task(0), task(0, task="b")],
        [[task(1), task(2, task="c")]],
        inputs="first",
    )


def test_a_forward_that_ends_early(threads: Callable[..., Any]) -> None:
    """What was to be sent was looked up by name, and was not there."""

    class Early(Switches):
        def forward(self, x: Tensor, how: Any = None) -> Tensor:
            x = self.layers[0](x)
            return x if how else super().forward(x, WAYS["all"])

    message = (
        r"forward ended before 'layers\.0', which came next in the example: split with an example for this way too"
    )
    model, steps = make(lambda: Early(keeps)), [[{"x": numbers(1), "how": True}]]
    refused(threads, message, model, [{"x": numbers(0), "how": False}], steps)
    check(threads, model, [{"x": numbers(0), "how": False}, {"x": numbers(0), "how": True}], steps, ranks=3)


def test_ways_of_inputs_that_look_the_same(threads: Callable[..., Any]) -> None:
    """Static shapes are those of the first microbatch with such inputs; another way has others."""
    model = make(lambda: Switches(keeps))
    examples = [of_way("all", 0), of_way("the last idle", 0), of_way("only the last", 0)]
    steps = [[of_way("all", 1)] * 2, [of_way("all", 1), of_way("only the last", 2)]]
    refused(
        threads,
        r'(?s)stage 0: .*if these depend on the data, build the stages with shapes="dynamic"',
        model,
        examples,
        steps,
    )


def test_ranks_that_do_not_go_the_same_way(threads: Callable[..., Any]) -> None:
    """A stage took what another had made in another way for its own."""
    rank_of = {}

    def differs(how: Any, number: int, x: Tensor) -> bool:
        return number != 1 or rank_of.get(threading.get_ident(), how) == 0

    def one(transport: Transport) -> None:
        schedule = schedules.one_f_one_b(transport.size, 2)
        model = make(lambda: Switches(differs, 3))
        cut = split(model, {"layers.2": 1}, example={"x": numbers(0), "how": 0}, ways=[{"x": numbers(0), "how": 1}])
        executor = Executor(
            cut.stages(schedule.placement, transport.rank, "cpu", transport=transport), schedule, loss_of
        )
        rank_of[threading.get_ident()] = transport.rank
        executor.step(x=numbers(1), how=0, return_outputs=False)

    with pytest.raises(
        StageUsageError, match=r"stage 1 went another way than a stage before it: .* the same on every rank"
    ):
        threads(one, 2)


def test_what_cannot_be_known_is_refused() -> None:
    class Counted(Switches):
        """A layer says to Python by data what comes next."""

        def forward(self, x: Tensor, how: Any = None) -> Tensor:
            for layer in self.layers:
                x, is_large = layer(x)
                x = x * 2 if is_large else x.relu()
            return x

    class Says(Block):
        def forward(self, x: Tensor) -> Any:
            y = super().forward(x)
            return y, bool(y.detach().mean() > 0)

    model = make(lambda: Counted(keeps))
    model.layers = nn.ModuleList(Says().double() for _ in range(3))
    with pytest.raises(
        StageUsageError, match=r"unit 'layers\.0' gives Python another number, or structure, in one way"
    ):
        split(model, 2, example={"x": numbers(0) + 5}, ways=[{"x": numbers(0) - 5}])
    cut = split(make(Tasks), 2, example=task(0, task="b"), ways=[task(0, task="c")])
    with pytest.raises(StageUsageError, match="was given no task, which is another in one example than in the next"):
        cut.module(0)(x=numbers(0))


def test_what_is_said_of_ways() -> None:
    cut = split(make(Vision), 3, example=words(0), ways=[seen(0)])
    said = cut.describe()
    assert cut.parts[0] == ("embed", "tower.0", "tower.1")
    assert "a result of 'blocks.1', 640 bytes in the example; a result of 'blocks.1', 1,024 bytes in ways[0]" in said
    assert "from stage 0: a result of 'tower.1', 384 bytes in ways[0]" in said
    assert split(make(Vision), 2, example=seen(0), ways=[words(0)]).costs.keys() == cut.costs.keys()
    timed = split(make(Vision), 2, example=words(0), ways=[seen(0)], costs="time").costs
    assert min(timed[f"tower.{number}"] for number in range(3)) > 0


def test_a_unit_that_one_way_calls_early_and_another_late(threads: Callable[..., Any]) -> None:
    """Where its stage is given, it is enough that one way can call it there."""
    examples = [task(0), task(0, task="b")]
    where = {"norm": 0, "adapter": 0, "blocks.2": 1}
    said = check(threads, make(Tasks), examples, [[task(1), task(2, task="b")]], stages=where, shapes="dynamic")
    assert "tied: 'norm.weight' on stages 0, 1" in said
    with pytest.raises(StageUsageError, match=r"unit 'norm' is to be on stage 0, but takes what stage 1 makes"):
        split(make(Tasks), {"norm": 0, "blocks.1": 1}, example=task(0), ways=[task(0, second=True)])


class Modes(nn.Module):
    """A head for training alone, which takes an early value, and a norm of results for evaluation alone."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.early, self.polish = nn.Linear(8, 3), nn.LayerNorm(3)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        early = x
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number == 0:
                early = x
        return self.head(x) + self.early(early) if self.training else self.polish(self.head(x) * early.mean())


@pytest.mark.parametrize("inputs", ["every", "first"])
@pytest.mark.parametrize("training", [True, False])
def test_training_and_evaluation_may_go_ways_of_their_own(threads: Threads, training: bool, inputs: Any) -> None:
    """One example shows both: the mode that the model was not in was refused when it came."""
    model, x = make(Modes).train(training), numbers(0, 6)
    whole, schedule = copy.deepcopy(model), schedules.interleaved_1f1b(2, 3)
    cut = split(model, 4, example=x[:2], inputs=inputs)
    assert (" in the example in evaluation" in cut.describe()) == training  # the mean is for evaluation

    def on_rank(transport: Transport) -> tuple[float | None, Tensor | None]:
        stages = cut.stages(schedule.placement, transport.rank, "cpu", transport=transport)
        executor = Executor(stages, schedule, loss_of)
        given = {"x": x} if inputs == "every" or executor.is_first else {}
        for mode in (True, False, True):
            for stage in stages:
                assert isinstance(stage.submodule, nn.Module)
                stage.submodule.train(mode)
            if mode:
                executor.step(**given, return_outputs=False)
            else:
                seen = executor.eval(**given)
        return executor.loss.item() if executor.loss is not None else None, seen

    results = threads(on_rank, 2)
    for _ in range(2):
        losses = [loss_of(whole.train()(part)) for part in x.tensor_split(3)]
        (sum(losses) / 3).backward()
    assert results[1][0] == pytest.approx(sum(loss.item() for loss in losses) / 3, rel=1e-12)
    torch.testing.assert_close(results[1][1], torch.cat([whole.eval()(part) for part in x.tensor_split(3)]).detach())
    for (name, mine), plain_one in zip(model.named_parameters(), whole.parameters(), strict=True):
        assert (mine.grad is None) == (plain_one.grad is None), name
        if mine.grad is not None:
            torch.testing.assert_close(mine.grad, plain_one.grad, rtol=1e-10, atol=1e-12)


def test_a_mode_that_cannot_be_cut_does_not_keep_the_other_from_it(threads: Threads) -> None:
    """In evaluation the layers run backwards, which would send values to earlier stages."""

    class Backwards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks if self.training else reversed(self.blocks):
                x = block(x) * (1 if self.training else torch.ones(()))
            return x

    model, x, schedule = make(Backwards), numbers(0, 4), schedules.one_f_one_b(2, 2)
    cut = split(model, {"blocks.0": 0, "blocks.1": 1}, example=x)

    def on_rank(transport: Transport) -> float | None:
        stages = cut.stages(schedule.placement, transport.rank, "cpu", transport=transport)
        executor = Executor(stages, schedule, loss_of)
        executor.step(x=x, return_outputs=False)
        loss = None if executor.loss is None else executor.loss.item()
        for stage in stages:
            assert isinstance(stage.submodule, nn.Module)
            stage.submodule.eval()
        with pytest.raises(StepwellError, match=r"another way than with the example"):
            executor.eval(x=x)
        return loss

    losses = threads(on_rank, 2)
    assert losses[1] == pytest.approx(sum(loss_of(model(part)).item() for part in x.tensor_split(2)) / 2, rel=1e-12)
