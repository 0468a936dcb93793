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


def check_handlers(handlers: Handlers, around: Sequence[Around], plan: Plan, rank: int) -> None:
    """Refuse handlers that go with no action, custom actions of this rank that have none, and what cannot be called.

    Raises:
        StageUsageError: which, and what to change.
    """
    if not isinstance(handlers, Mapping):
        raise StageUsageError(f"handlers is a dict from a Kind or a name to a function, got {handlers!r}")
    if not isinstance(around, Sequence):
        raise StageUsageError(f"around_action is a list of functions from an action to a context, got {around!r}")
    for what, one in (
        *((f"the handler of {key}", one) for key, one in handlers.items()),
        *(("around_action", one) for one in around),
    ):
        if not callable(one):
            raise StageUsageError(f"{what} must be a function, got {one!r}")
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
    """What a handler may run, how often it did in the call under way, and how that ended."""

    def __init__(self, action: Action, call: Callable[[Any], None]) -> None:
        self.action = action
        self._call = call
        self._times = 0
        self._is_done = False
        self.error: BaseException | None = None

    def __call__(self) -> None:
        self._times += 1
        if self._times > 1:  # what it takes is gone
            raise self._not_once()
        try:
            self._call(self.action.microbatch)
        except BaseException as error:
            self.error = error
            raise
        self._is_done = True

    def begin(self) -> None:
        """Before its handler is called."""
        self._times, self._is_done, self.error = 0, False, None

    def end(self) -> None:
        """After that: other actions build on what it did, so an error is one even where the handler let it pass."""
        if self.error is not None:
            raise self.error
        if self._is_done or (not self._times and self.action.kind in _MAY_BE_LEFT_OUT):
            return
        if self._times:
            raise StageUsageError(f"the handler of {self.action} is back before {self.action} is done: join its thread")
        raise self._not_once()

    def _not_once(self) -> StageUsageError:
        return StageUsageError(
            f"the handler of {self.action} must run it once, but ran it {self._times} times; call run() of what it is given, and"
            " put what a stage computes into a StageProgram"
        )


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
        run.begin()
    try:
        handler(call)
        for run in counted:
            run.end()
    finally:
        for run in counted:
            run.error = None  # whose frames hold the microbatch's tensors


def _run_all(counted: Sequence[_Counted]) -> None:
    for run in counted:
        run()


def _nothing() -> None:
    pass


def _within(around: Sequence[Around], action: Action, call: Callable[[Any], None], microbatch: int | None) -> None:
    failed: BaseException | None = None
    try:
        with contextlib.ExitStack() as stack:
            for enter in around:
                stack.enter_context(enter(action))
            try:
                call(microbatch)
            except BaseException as error:
                failed = error
                raise
        if failed is not None:  # a context let it pass, but what comes next builds on what was not done
            raise failed
    finally:
        del failed  # which holds this frame, and with it the microbatch's tensors


def _in_range(name: str, call: Callable[[Any], None], microbatch: int | None) -> None:
    with torch.profiler.record_function(name):
        call(microbatch)
