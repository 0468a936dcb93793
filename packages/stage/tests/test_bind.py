"""Handlers, contexts around actions, and a profiler's ranges; and that a plan without any pays nothing for them."""

from __future__ import annotations

import contextlib
import gc
import itertools
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from stepwell_meta.testing import WorkerPool
from stepwell_p2p import C10dTransport, LoopbackFabric, Placement, Rules, Transport
from stepwell_p2p.exceptions import PeerFailure
from stepwell_stage import (
    Action,
    ActionCall,
    Costs,
    Executor,
    Kind,
    PipelineStage,
    Schedule,
    lower,
    prove,
    simulate,
    to_svg,
)
from stepwell_stage.exceptions import ScheduleError, StageExecutionError, StageUsageError
from stepwell_stage.run import _bind
from stepwell_stage.schedules import custom, dualpipe_v, from_csv, one_f_one_b, to_csv, zb_h1

Threads = Callable[..., list[Any]]
WIDTH = 4


def modules(count: int) -> list[nn.Module]:
    generator = torch.Generator().manual_seed(0)
    made: list[nn.Module] = [nn.Linear(WIDTH, WIDTH) for _ in range(count)]
    for module in made:
        for parameter in module.parameters():
            nn.init.uniform_(parameter, -0.5, 0.5, generator=generator)
    return made


def batch(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(rows, WIDTH, generator=generator), torch.randn(rows, WIDTH, generator=generator)


def executor_of(transport: Transport, schedule: Schedule, **options: Any) -> Executor:
    made, placement = modules(schedule.placement.num_stages), schedule.placement
    stages = [
        PipelineStage(made[index], index, placement.num_stages, "cpu") for index in placement.stages_of(transport.rank)
    ]
    return Executor(stages, schedule, functional.mse_loss, transport=transport, **options)


def step(executor: Executor, rows: int = 8) -> list[torch.Tensor]:
    """The gradients after one step."""
    x, y = batch(rows)
    executor.step(*((x,) if executor.is_first else ()), target=y if executor.is_last else None)
    return [parameter.grad for parameter in executor.parameters() if parameter.grad is not None]


def plain(count: int, rows: int = 8) -> list[torch.Tensor]:
    model, (x, y) = nn.Sequential(*modules(count)), batch(rows)
    functional.mse_loss(model(x), y).backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def assert_trained(results: list[list[torch.Tensor]], count: int) -> None:
    for mine, grad in zip([grad for result in results for grad in result], plain(count), strict=True):
        torch.testing.assert_close(mine, grad)


OFFLOADS = """
    rank 0: 0F0 0F1 0{note}0 0B0 0{note}1 0B1 0{done}
    rank 1: 1F0 1B0 1F1 1B1
"""


def test_custom_actions_run_where_they_stand(threads: Threads) -> None:
    """In the plan, in order, with their stage; the other rank has none and needs no handler."""
    seen: list[str] = []

    def note(call: ActionCall) -> None:
        assert call.stage.stage_index == 0
        call.run()  # does nothing
        grad = next(call.stage.submodule.parameters()).grad
        seen.append(f"{call.action} {'before' if grad is None else 'after'} a backward")

    def run(transport: Transport) -> list[torch.Tensor]:
        handlers = {"note": note, "done": lambda call: seen.append(str(call.action))} if transport.rank == 0 else {}
        executor = executor_of(transport, custom(OFFLOADS), handlers=handlers, trace=True)
        grads = step(executor)
        if transport.rank == 0:
            assert [event.action.name for event in executor.events if event.action.name] == ["note", "note", "done"]
            x, _ = batch(8)
            executor.eval(x)
        else:
            executor.eval()
        return grads

    assert_trained(threads(run, 2), 2)
    assert seen == ["0{note}0 before a backward", "0{note}1 after a backward", "0{done}"]  # none of them in eval


def test_custom_actions_are_data_like_others(tmp_path: Any) -> None:
    schedule = custom(OFFLOADS)
    assert custom(schedule.table()) == schedule
    plan = lower(schedule)
    prove(plan, Rules(tagged=False, rendezvous=True))
    assert [action for action in plan.actions[0] if action.kind.is_compute] == [*schedule.actions[0]]
    simulation = simulate(plan, Costs.uniform(2))
    bare = custom(OFFLOADS.replace("0{note}0", "").replace("0{note}1", "").replace("0{done}", ""))
    assert simulation.makespan == simulate(lower(bare), Costs.uniform(2)).makespan  # no cost of their own is known
    assert "custom" in to_svg(simulation.timeline)
    for item in (schedule, plan):
        to_csv(item, tmp_path / "it.csv")
        assert from_csv(tmp_path / "it.csv", name="custom") == item
    with pytest.raises(ScheduleError, match=r"0\{note\}0: torch's schedules have no actions of the user's own"):
        to_csv(schedule, for_torch=True)
    forwards = Schedule("f", Placement.loop(1, 1), 1, [[Action(0, Kind.F, 0), Action.custom(0, "x")]])
    assert not forwards.has_backward
    with pytest.raises(ScheduleError, match=r"0\{x\}1 on rank 0: there are microbatches 0 to 0"):
        Schedule("f", Placement.loop(1, 1), 1, [[Action(0, Kind.F, 0), Action.custom(0, "x", 1)]])
    with pytest.raises(ScheduleError, match=r"1\{x\} on rank 0: that rank holds stages \(0,\)"):
        Schedule("f", Placement.loop(1, 1), 1, [[Action(0, Kind.F, 0), Action.custom(1, "x")]])


def test_handlers_of_built_in_actions_run_them_once(threads: Threads) -> None:
    """One handler a kind, around what the executor does itself; what was received is there already."""
    seen: Counter[str] = Counter()
    lock = threading.Lock()

    def count(call: ActionCall) -> None:
        call.run()
        with lock:
            seen[call.action.kind.value] += 1

    def run(transport: Transport) -> list[torch.Tensor]:
        return step(executor_of(transport, zb_h1(4, 4), handlers=dict.fromkeys(_SOME, count)))

    assert_trained(threads(run, 4), 4)
    assert seen == {"F": 16, "I": 16, "W": 16, "SEND_F": 12, "RECV_B": 12}


_SOME = (Kind.F, Kind.I, Kind.W, Kind.SEND_F, Kind.RECV_B)


def test_what_the_forward_of_an_overlapped_pair_made_leaves_before_the_backward_begins(threads: Threads) -> None:
    """It left behind the pair, a whole backward later than the stage after it could have had it."""

    def run(transport: Transport) -> int:
        executor = executor_of(transport, dualpipe_v(2, 6), trace=True)
        step(executor)
        done = [event.action for event in executor.events]
        planned = [action for action in lower(dualpipe_v(2, 6)).actions[transport.rank] if action.parts]
        for forward, backward in (pair.parts for pair in planned):
            between = done[done.index(forward) : done.index(backward)]
            assert (Action(forward.stage, Kind.SEND_F, forward.microbatch) in done) is (forward.stage in (0, 2))
            assert [action.kind for action in between if action.kind is Kind.SEND_F] == (
                [Kind.SEND_F] if forward.stage in (0, 2) else []
            )
        return len(planned)

    assert all(threads(run, 2))


def test_p163_a_handler_runs_the_parts_of_an_overlapped_pair_in_threads(threads: Threads) -> None:
    pairs: list[str] = []

    def at_once(call: ActionCall) -> None:
        pairs.append(str(call.action))
        other = threading.Thread(target=call.parts[1].run)
        other.start()
        call.parts[0].run()
        other.join(20)

    def run(transport: Transport) -> list[torch.Tensor]:
        return step(executor_of(transport, dualpipe_v(2, 4), handlers={Kind.OVERLAP: at_once}))

    results = threads(run, 2)
    grads = [results[0][:2], results[1][:2], results[1][2:], results[0][2:]]
    assert_trained(grads, 4)
    planned = [str(action) for row in dualpipe_v(2, 4).actions for action in row if action.parts]
    assert sorted(pairs) == sorted(planned)
    assert planned


@pytest.mark.parametrize(
    ("handlers", "sentence"),
    [
        ({Kind.B: lambda call: None}, "the handler of 1B0 must run it once, but ran it 0 times"),
        ({Kind.F: lambda call: (call.run(), call.run())}, "the handler of 1F0 must run it once, but ran it 2 times"),
    ],
)
def test_a_handler_that_leaves_out_what_others_build_on_ends_every_rank(
    threads: Threads, handlers: dict[Kind, Any], sentence: str
) -> None:
    """On the last rank, whose gradients the first still waits for; one that has all it needs may be through already."""

    def run(transport: Transport) -> None:
        executor = executor_of(transport, one_f_one_b(2, 2), handlers=handlers if transport.rank == 1 else None)
        with pytest.raises((StageUsageError, PeerFailure), match=sentence):
            step(executor)

    threads(run, 2)


@pytest.mark.parametrize(
    ("table", "handlers", "sentence"),
    [
        (
            "0F0 0{offload}0 0B0",
            {},
            r"0\{offload\}0 is a custom action, and nothing says what it does: pass handlers=\{'offload'",
        ),
        (
            "0F0 0{offload}0 0B0",
            {"ofload": print, "offload": print},
            r"handlers has 'ofload', but custom has no such action",
        ),
        ("0F0 0B0", {Kind.CUSTOM: print}, "custom actions have handlers by name"),
        ("0F0 0{offload}0 0B0", {"offload": 5}, "the handler of offload must be a function, got 5"),
        ("0F0 0B0", [print], r"handlers is a dict from a Kind or a name to a function, got \[<built-in"),
    ],
)
def test_handlers_that_fit_nothing_are_refused(
    threads: Threads, table: str, handlers: dict[Any, Any], sentence: str
) -> None:
    with pytest.raises(StageUsageError, match=sentence):
        threads(lambda transport: executor_of(transport, custom(table), handlers=handlers), 1)


@pytest.mark.parametrize(
    ("contexts", "sentence"),
    [
        (contextlib.nullcontext, "around_action is a list of functions from an action to a context, got <class"),
        ([contextlib.nullcontext()], "around_action must be a function, got <contextlib"),
    ],
)
def test_contexts_that_are_none_are_refused(contexts: Any, sentence: str) -> None:
    with pytest.raises(StageUsageError, match=sentence):
        executor_of(LoopbackFabric(1).transport(0), one_f_one_b(1, 2), around_action=contexts)


def nothing_around(action: Action) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


def _quiet(call: ActionCall) -> None:
    with contextlib.suppress(Exception):
        call.run()


def _in_a_thread(call: ActionCall) -> None:
    thread = threading.Thread(target=_quiet, args=(call,))
    thread.start()
    thread.join()


@pytest.mark.parametrize(
    "options",
    [
        {"around_action": [lambda action: contextlib.suppress(Exception)]},
        {"handlers": {Kind.F: _quiet}},
        {"handlers": {Kind.F: _in_a_thread}},
    ],
)
def test_an_error_that_a_tool_lets_pass_is_one_all_the_same(threads: Threads, options: dict[str, Any]) -> None:
    """The step went on without what the action should have made, and every rank waited for a message that nobody sent."""

    def fail(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError("of the loss")

    def run(transport: Transport) -> None:
        stage = PipelineStage(modules(2)[transport.rank], transport.rank, 2, "cpu")
        executor = Executor(stage, one_f_one_b(2, 2), fail, transport=transport, **options)
        with pytest.raises((StageExecutionError, PeerFailure), match=r"action 1F0.*ZeroDivisionError: of the loss"):
            step(executor)

    threads(run, 2)


@pytest.mark.parametrize(
    "tools", [{"handlers": {Kind.F: lambda call: call.run()}}, {"around_action": [nothing_around]}]
)
def test_nothing_of_a_failed_step_is_kept(tools: dict[str, Any]) -> None:
    """The error was, and with it the activations: after one of too little memory there was still too little."""
    kept: list[weakref.ref[torch.Tensor]] = []

    def fail(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        kept.append(weakref.ref(output))
        raise MemoryError

    stage = PipelineStage(modules(1)[0], 0, 1, "cpu")
    executor = Executor(stage, one_f_one_b(1, 2), fail, **tools)
    gc.disable()  # what waits for it is kept too
    try:
        with pytest.raises(StageExecutionError) as caught:
            step(executor)
        del caught
        assert [one() for one in kept] == [None]
    finally:
        gc.enable()


def test_a_handler_that_does_not_wait_for_its_thread_is_told_to(threads: Threads) -> None:
    """What comes next took values that were not there yet."""
    begun, go_on, gone = threading.Event(), threading.Event(), list[threading.Thread]()

    def leave(call: ActionCall) -> None:
        gone.append(threading.Thread(target=_quiet, args=(call,)))
        gone[0].start()
        assert begun.wait(20)

    def stay(*_: Any) -> None:
        begun.set()
        go_on.wait(20)

    executor = executor_of(LoopbackFabric(1).transport(0), one_f_one_b(1, 1), handlers={Kind.F: leave})
    executor.stages[0].submodule.register_forward_pre_hook(stay)
    with pytest.raises(StageUsageError, match="the handler of 0F0 is back before 0F0 is done: join its thread"):
        step(executor)
    go_on.set()
    gone[0].join(20)


def test_without_gradients_around_an_action_its_backward_says_so() -> None:
    """It was ``KeyError: 0``."""

    def forward(call: ActionCall) -> None:
        with torch.no_grad():
            call.run()

    transport = LoopbackFabric(1).transport(0)
    stages = [PipelineStage(module, index, 2, "cpu", transport=transport) for index, module in enumerate(modules(2))]
    schedule = custom("rank 0: 0F0 1F0 1B0 0B0")
    handlers = {Kind.F: lambda call: forward(call) if call.action.stage == 0 else call.run()}
    executor = Executor(stages, schedule, functional.mse_loss, handlers=handlers)
    with pytest.raises(
        StageUsageError, match=r"B of microbatch 0 needs its F first, with gradients enabled: leave torch.no_grad"
    ):
        step(executor, 2)


def test_contexts_are_entered_before_each_action_and_left_after_it(threads: Threads) -> None:
    seen: list[str] = []

    @contextlib.contextmanager
    def outer(action: Action) -> Iterator[None]:
        seen.append(f"<{action}")
        yield
        seen.append(f"{action}>")

    @contextlib.contextmanager
    def inner(action: Action) -> Iterator[None]:
        seen.append("(")
        yield
        seen.append(")")

    def run(transport: Transport) -> list[torch.Tensor]:
        contexts = (outer, inner) if transport.rank == 1 else ()
        return step(executor_of(transport, one_f_one_b(2, 2), around_action=contexts))

    assert_trained(threads(run, 2), 2)
    planned = lower(one_f_one_b(2, 2)).actions[1]
    assert seen == [text for action in planned for text in (f"<{action}", "(", ")", f"{action}>")]


def profiled_step() -> tuple[list[str], list[str]]:
    """The ranges of a step on this rank, without and with a profiler before it."""
    transport = C10dTransport()
    executor = executor_of(transport, one_f_one_b(2, 2))
    step(executor)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step(executor)
    transport.close()
    names = [event.name for event in profile.events() if event.name.startswith("stepwell ")]
    return names, [str(action) for action in executor.plan.actions[transport.rank]]


def test_under_a_profiler_each_action_is_a_range_with_its_name(workers: WorkerPool) -> None:
    """And so is the waiting for what it takes."""
    for names, planned in workers.run(profiled_step, 2, deadline=60):
        assert [name.removeprefix("stepwell ") for name in names if "wait " not in name] == planned
        before = {name: after for name, after in itertools.pairwise(names) if "wait " in name}
        assert before == {name: name.replace("wait ", "").replace("RECV_", "") for name in before}
        assert len(before) == 2


def test_without_any_the_calls_are_the_stages_own_methods() -> None:
    """Decided when a plan is bound: no wrapper stands between the executor's loop and a stage."""
    transport = LoopbackFabric(1).transport(0)
    executor = executor_of(transport, one_f_one_b(1, 2))
    calls = [call for call, _ in executor._train._now.calls]
    assert [call.__name__ for call in calls] == ["forward", "backward", "forward", "backward"]
    assert all(type(call.__self__).__name__ == "StageRun" for call in calls)
    watched = executor_of(transport, one_f_one_b(1, 2), around_action=[lambda action: contextlib.nullcontext()])
    assert not any(hasattr(call, "__self__") for call, _ in watched._train._now.calls)
    assert set(_bind.METHODS) | {Kind.OVERLAP, Kind.CUSTOM} == set(Kind)


def test_an_error_in_a_handler_is_told_with_its_action() -> None:
    def fail(call: ActionCall) -> None:
        raise ZeroDivisionError("the handler's own")

    executor = executor_of(LoopbackFabric(1).transport(0), custom("0F0 0{note}0 0B0"), handlers={"note": fail})
    with pytest.raises(StageExecutionError, match=r"action 0\{note\}0: ZeroDivisionError: the handler's own") as caught:
        step(executor)
    assert (caught.value.stage, caught.value.microbatch, caught.value.action) == (0, 0, "0{note}0")


def test_handlers_of_forwards_run_in_evaluation_too() -> None:
    seen: list[str] = []

    def forward(call: ActionCall) -> None:
        seen.append(str(call.action))
        call.run()

    executor = executor_of(LoopbackFabric(1).transport(0), one_f_one_b(1, 4), handlers={Kind.F: forward})
    executor.eval(batch(2)[0])  # fewer samples than microbatches: so many forwards
    assert seen == ["0F0", "0F1"]
    step(executor)
    assert seen[2:] == ["0F0", "0F1", "0F2", "0F3"]


@pytest.mark.parametrize("way", ["step", "eval"])
@pytest.mark.parametrize("where", ["handler", "around_action", "stage"])
def test_a_step_inside_of_a_step_is_refused_on_every_rank(threads: Threads, where: str, way: str) -> None:
    """It began a step of its own, whose actions began others, until Python had enough of it on every rank."""

    def run(transport: Transport) -> str:
        def again() -> None:
            if transport.rank == 1:
                getattr(executor, way)()

        def handler(call: ActionCall) -> None:
            again()
            call.run()

        @contextlib.contextmanager
        def around(action: Action) -> Iterator[None]:
            again()
            yield

        options: dict[str, Any] = {}
        if where == "handler":
            options["handlers"] = {Kind.F: handler}
        if where == "around_action":
            options["around_action"] = [around]
        executor = executor_of(transport, one_f_one_b(3, 4), **options)
        if where == "stage":
            executor.stages[0].submodule.register_forward_pre_hook(lambda *_: again())
        with pytest.raises((StageUsageError, StageExecutionError, PeerFailure)) as raised:
            step(executor)
        return str(raised.value)

    for said in threads(run, 3, timeout=10.0):
        assert "rank 1 called step() or eval() while a step of the same executor is under way" in said


def test_a_step_from_another_thread_is_refused_and_the_one_under_way_goes_on(threads: Threads) -> None:
    """Two steps at once mixed their microbatches."""

    def run(transport: Transport) -> list[torch.Tensor]:
        said: list[str] = []

        def from_elsewhere() -> None:
            with pytest.raises(StageUsageError) as raised:
                executor.step()
            said.append(str(raised.value))

        def handler(call: ActionCall) -> None:
            call.run()
            thread = threading.Thread(target=from_elsewhere)
            thread.start()
            thread.join()

        executor = executor_of(transport, one_f_one_b(2, 4), handlers={Kind.B: handler})
        found = step(executor)
        assert len(said) == 4
        assert all("is under way" in one and "in another thread" in one for one in said)
        return found

    assert_trained(threads(run, 2), 2)


def test_after_a_refused_step_inside_of_a_step_the_next_runs() -> None:
    inside = True

    def forward(call: ActionCall) -> None:
        if inside:
            executor.step()
        call.run()

    executor = executor_of(LoopbackFabric(1).transport(0), one_f_one_b(1, 4), handlers={Kind.F: forward})
    for _ in range(2):
        with pytest.raises(StageUsageError, match="is under way"):
            step(executor)
    inside = False
    assert_trained([step(executor)], 1)
