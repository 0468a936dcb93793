"""A plan's actions as a flat list of calls, with what the caller wants to stand around them.

All is decided here, once for each plan: an action with a handler is bound to the handler, one without to its stage's method. So a
plan without handlers pays nothing for them. A profiler's ranges are put in only for steps during which one is active.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import attrs
import torch

from ..exceptions import StageUsageError
from ..plan._action import Action, Kind

if TYPE_CHECKING:
    from ..plan._lower import Plan
    from ._stage import PipelineStage
    from ._stage_run import StageRun

METHODS = {
    Kind.F: "forward",
    Kind.B: "backward",
    Kind.I: "backward_input",
    Kind.W: "backward_weight",
    Kind.SEND_F: "send_f",
    Kind.RECV_F: "recv_f",
    Kind.SEND_B: "send_b",
    Kind.RECV_B: "recv_b",
    Kind.WAIT_F: "wait_f",
    Kind.WAIT_B: "wait_b",
    Kind.UNSHARD: "unshard",
    Kind.RESHARD: "reshard",
    Kind.REDUCE_GRAD: "reduce_grads",
}
_MAY_BE_LEFT_OUT = (Kind.UNSHARD, Kind.RESHARD, Kind.REDUCE_GRAD)  # a handler may do these its own way


@attrs.frozen
class ActionCall:
    """One action of the step under way, as its handler gets it.

    Attributes:
        action: what the plan says.
        stage: the stage that it is of; of an overlapped pair the stage of its forward.
        run: does what the executor does without a handler; of a custom action nothing. What the action receives from other ranks
            is there already.
        parts: of an overlapped pair its forward and its backward, to be run in any order, also from two threads; else empty.
    """

    action: Action
    stage: PipelineStage
    run: Callable[[], None] = attrs.field(repr=False)
    parts: tuple[ActionCall, ...] = ()


Handler: TypeAlias = Callable[[ActionCall], None]
Handlers: TypeAlias = Mapping[Kind | str, Handler]
Around: TypeAlias = Callable[[Action], contextlib.AbstractContextManager[Any]]
Call: TypeAlias = tuple[Callable[[Any], None], int | None]


@attrs.frozen
class Bound:
    """A rank's calls in order, what each is of, and whether it waits for what the next takes: lists of one length."""

    calls: list[Call]
    actions: list[Action]
    waits: list[bool]

    def up_to(self, count: int) -> Bound:
        """Those of the first microbatches, and those that concern all."""
        keep = [at for at, a in enumerate(self.actions) if a.microbatch is None or a.microbatch < count]
        return Bound(
            [self.calls[at] for at in keep], [self.actions[at] for at in keep], [self.waits[at] for at in keep]
        )

    def in_ranges(self) -> Iterator[Call]:
        """The calls, each in a range that a profiler shows under its name."""
        for (call, microbatch), action, waits in zip(self.calls, self.actions, self.waits, strict=True):
            name = f"stepwell wait {action}" if waits else f"stepwell {action}"
            yield functools.partial(_in_range, name, call), microbatch


def check_handlers(handlers: Handlers, plan: Plan, rank: int) -> None:
    """Refuse handlers that go with no action, and custom actions of this rank that have none.

    Raises:
        StageUsageError: which, and what to change.
    """
    own = {action.name: action for action in plan.actions[rank] if action.name}
    missing = next((action for name, action in own.items() if name not in handlers), None)
    if missing is not None:
        raise StageUsageError(
            f"{plan.schedule.name}: {missing} is a custom action, and nothing says what it does:"
            f" pass handlers={{{missing.name!r}: …}}"
        )
    names = {action.name for row in plan.actions for action in row if action.name}
    for key in handlers:
        if isinstance(key, Kind):
            if key is Kind.CUSTOM:
                raise StageUsageError("custom actions have handlers by name: handlers={'offload': …}")
        elif key not in names:
            raise StageUsageError(
                f"handlers has {key!r}, but {plan.schedule.name} has no such action; its custom actions are {sorted(names)},"
                " and built-in ones are named by Kind, as in handlers={Kind.B: …}"
            )


def bind(
    planned: Iterable[Action], runs: Mapping[int, StageRun], handlers: Handlers, around: Sequence[Around]
) -> Bound:
    """A rank's actions as calls. What a compute action takes from another rank it waits for just before.

    Overlapped pairs have a handler: without one the plan has them apart.
    """
    bound = Bound([], [], [])

    def add(action: Action, call: Callable[[Any], None], *, waits: bool) -> None:
        bound.actions.append(action)
        bound.calls.append((call, action.microbatch))
        bound.waits.append(waits)

    for action in planned:
        handler = handlers.get(action.name or action.kind)
        for leaf in action.leaves:
            for waited, wait in _waits(leaf, runs[leaf.stage]):
                add(waited, wait, waits=True)
        call = _method(action, runs[action.stage]) if handler is None else _handled(handler, action, runs)
        add(action, functools.partial(_within, tuple(around), action, call) if around else call, waits=False)
    return bound


def _waits(leaf: Action, stage_run: StageRun) -> Iterator[tuple[Action, Callable[[Any], None]]]:
    if leaf.kind is Kind.F and any(not link.is_local for link in stage_run.in_links.values()):
        yield Action(leaf.stage, Kind.RECV_F, leaf.microbatch), stage_run.await_f
    if leaf.kind.is_backward and any(not link.is_local for link in stage_run.out_links.values()):
        yield Action(leaf.stage, Kind.RECV_B, leaf.microbatch), stage_run.await_b


def _method(action: Action, stage_run: StageRun) -> Callable[[Any], None]:
    if action.peer is not None:
        return stage_run.recv_from(action.kind, action.peer)
    call: Callable[[Any], None] = getattr(stage_run, METHODS[action.kind])
    return call


class _Counted:
    """What a handler may run, and how often it did in the call under way."""

    def __init__(self, action: Action, call: Callable[[Any], None]) -> None:
        self.times = 0
        self._action = action
        self._call = call

    def __call__(self) -> None:
        self.times += 1
        if self.times > 1:  # what it takes is gone
            raise _not_once(self._action, self.times)
        self._call(self._action.microbatch)


def _handled(handler: Handler, action: Action, runs: Mapping[int, StageRun]) -> Callable[[Any], None]:
    """The call of a handler, and of a check that what other actions build on was done."""
    if action.kind is Kind.CUSTOM:
        return functools.partial(_call_custom, handler, ActionCall(action, runs[action.stage].stage, _nothing))
    counted = [_Counted(leaf, _method(leaf, runs[leaf.stage])) for leaf in action.leaves]
    whole = ActionCall(action, runs[action.stage].stage, counted[0])
    if action.parts:
        parts = tuple(
            ActionCall(leaf, runs[leaf.stage].stage, run) for leaf, run in zip(action.parts, counted, strict=True)
        )
        whole = attrs.evolve(whole, run=functools.partial(_run_all, counted), parts=parts)
    return functools.partial(_call_counted, handler, whole, counted)


def _call_custom(handler: Handler, call: ActionCall, _: int | None) -> None:
    handler(call)


def _call_counted(handler: Handler, call: ActionCall, counted: Sequence[_Counted], _: int | None) -> None:
    for run in counted:
        run.times = 0
    handler(call)
    if call.action.kind not in _MAY_BE_LEFT_OUT:
        for leaf, run in zip(call.action.leaves, counted, strict=True):
            if not run.times:
                raise _not_once(leaf, 0)


def _not_once(action: Action, times: int) -> StageUsageError:
    return StageUsageError(
        f"the handler of {action} must run it once, but ran it {times} times; call run() of what it is given, and put what a"
        " stage computes into a StageProgram"
    )


def _run_all(counted: Sequence[_Counted]) -> None:
    for run in counted:
        run()


def _nothing() -> None:
    pass


def _within(around: Sequence[Around], action: Action, call: Callable[[Any], None], microbatch: int | None) -> None:
    with contextlib.ExitStack() as stack:
        for enter in around:
            stack.enter_context(enter(action))
        call(microbatch)


def _in_range(name: str, call: Callable[[Any], None], microbatch: int | None) -> None:
    with torch.profiler.record_function(name):
        call(microbatch)
