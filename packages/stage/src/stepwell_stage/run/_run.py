"""One plan bound to one rank's stages, step after step."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import attrs
import torch

from stepwell_meta import InferenceMode
from stepwell_meta.exceptions import StepwellError
from stepwell_p2p import Transport
from stepwell_p2p.exceptions import PeerFailure

from ..exceptions import StageExecutionError, StageUsageError
from ..plan._action import Action, Kind
from ..plan._lower import Plan
from ..plan._prove import prove
from ..plan._timeline import Event
from ._agree import Cut, agree
from ._announce import Announcer, Word
from ._inbox import Inbox
from ._stage import PipelineStage
from ._stage_run import Known, StageRun, StepData

METHODS = {
    Kind.F: "forward",
    Kind.B: "backward",
    Kind.SEND_F: "send_f",
    Kind.RECV_F: "recv_f",
    Kind.SEND_B: "send_b",
    Kind.RECV_B: "recv_b",
    Kind.WAIT_F: "wait_f",
    Kind.WAIT_B: "wait_b",
}


@attrs.frozen
class _Learned:
    """What is known about steps whose batch is cut in one way."""

    cut: Cut
    stages: Mapping[int, Known]


class Run:
    """Runs one plan; mutable: it learns what crosses, for each way in which batches are cut.

    Args:
        stages: this rank's stages.
        plan: what to run. It is proved under the transport's rules.
        transport: what carries values.
        loss_fn: the loss, on the last stage's rank.
    """

    def __init__(
        self,
        stages: Sequence[PipelineStage],
        plan: Plan,
        transport: Transport,
        loss_fn: Callable[..., torch.Tensor] | None,
    ) -> None:
        if transport.size > 1:
            prove(plan, transport.rules)
        self.has_backward = plan.schedule.has_backward
        self._plan = plan
        self._stages = stages
        self._transport = transport
        self._announcer = Announcer(plan.placement, transport, is_step=self.has_backward)
        self._learned: dict[int, _Learned] = {}
        self._inboxes = {rank: Inbox(transport) for rank in range(transport.size) if rank != transport.rank}
        self._runs = {
            stage.stage_index: StageRun(
                stage, plan.placement, transport, self._inboxes, loss_fn, has_backward=self.has_backward
            )
            for stage in stages
        }
        for index, stage_run in self._runs.items():
            stage_run.previous = self._runs.get(index - 1)
            stage_run.following = self._runs.get(index + 1)
        self._actions, self._calls = self._bind()
        self._failed: str | None = None

    def refuse(self, reason: str) -> None:
        """This rank cannot begin the step that the others begin: tell them."""
        if self._transport.size == 1 or self._failed is not None:
            return
        if self._announcer.is_origin:
            self._announcer.give(Word.REFUSED, 0)
            self._announcer.explain(reason)
        else:
            self._fail(reason, None)

    def prepare(self, cut: Cut | None) -> Cut:
        """Get every rank to the beginning of the same step, and to the same knowledge of what will cross.

        Args:
            cut: how the batch is cut, on the first stage's rank; elsewhere None.

        Returns:
            The same on every rank.
        """
        if self._failed is not None:
            raise StageUsageError(
                f"an earlier step failed ({self._failed}), which ended the transport on every rank:"
                " make a new transport and a new executor"
            )
        try:
            learned = self._knowledge(cut)
        except PeerFailure as error:
            self._failed = str(error)
            raise
        for index, stage_run in self._runs.items():
            before = frozenset() if index == 0 else self._unknown(index - 1, learned, learned.stages[index].inputs)
            stage_run.know(learned.stages[index], before, self._unknown(index, learned, learned.stages[index].outputs))
        return learned.cut

    def go(self, data: StepData, *, trace: bool) -> tuple[Event, ...]:
        """Run every action in order; with ``trace``, say when each ran."""
        for stage_run in self._runs.values():
            stage_run.data = data
        position = -1
        times = [time.perf_counter()]
        try:
            for call, microbatch in self._calls:
                position += 1
                call(microbatch)
                if trace:
                    times.append(time.perf_counter())
        except PeerFailure as error:
            self._failed = str(error)
            raise
        except StepwellError as error:
            self._fail(str(error), self._actions[position])
            raise
        except Exception as error:
            raise self._explain(error, position) from error
        except BaseException as error:  # an interrupt: the other ranks must not wait for ever
            self._fail(f"{type(error).__name__} on rank {self._transport.rank}", self._actions[position])
            raise
        finally:
            for stage_run in self._runs.values():
                stage_run.clear()
        if not trace:
            return ()
        rank = self._transport.rank
        return tuple(
            Event(rank, action, start, end)
            for action, start, end in zip(self._actions, times[:-1], times[1:], strict=True)
        )

    def _knowledge(self, cut: Cut | None) -> _Learned:
        """What is known about the step that begins; agreed on with the other ranks where it is new."""
        if cut is not None:
            number = next((n for n, learned in self._learned.items() if learned.cut == cut), None)
            is_new = number is None
            if number is None:
                number = self._announcer.next_number()
            self._announcer.give(Word.NEW if is_new else Word.KNOWN, number)
        else:
            is_new, number = self._announcer.take(self._fail_plainly)
        if is_new:
            self._learned.pop(number, None)
            self._learned[number] = self._agree(cut)
        return self._learned[number]

    def _agree(self, cut: Cut | None) -> _Learned:
        agreement = agree(self._stages, self._plan.placement, self._transport, cut=cut, has_backward=self.has_backward)
        known = {}
        for stage in self._stages:
            here = known[stage.stage_index] = Known(agreement.cut.groups)
            if agreement.mode is InferenceMode.STATIC:
                if stage.declared_outputs is not None:
                    here.outputs[0] = stage.declared_outputs
                if stage.stage_index in agreement.inputs:
                    here.inputs[0] = agreement.inputs[stage.stage_index]
        return _Learned(cut or agreement.cut, known)

    def _unknown(self, source: int, learned: _Learned, known: Mapping[int, object]) -> frozenset[int]:
        """The microbatches of a stage whose output goes behind a header: of each group not known yet, the first it makes."""
        groups = learned.cut.groups
        if len(known) == len(set(groups)):
            return frozenset()
        first: dict[int, int] = {}
        for action in self._plan.schedule.actions[self._plan.placement.ranks[source]]:
            if action.stage == source and action.kind is Kind.F and action.microbatch is not None:
                first.setdefault(groups[action.microbatch], action.microbatch)
        return frozenset(microbatch for group, microbatch in first.items() if group not in known)

    def _bind(self) -> tuple[list[Action], list[tuple[Callable[[int], None], int]]]:
        """The plan's actions of this rank as calls. What a compute action takes from another rank it waits for just before."""
        rank, ranks = self._transport.rank, self._plan.placement.ranks
        actions: list[Action] = []
        calls: list[tuple[Callable[[int], None], int]] = []
        for action in self._plan.actions[rank]:
            stage_run, microbatch = self._runs[action.stage], action.microbatch
            assert microbatch is not None  # the kinds in METHODS have one, and others were refused
            before, after = action.stage - 1, action.stage + 1
            if action.kind is Kind.F and before >= 0 and ranks[before] != rank:
                actions.append(action._replace(kind=Kind.RECV_F))
                calls.append((stage_run.await_f, microbatch))
            if action.kind is Kind.B and after < len(ranks) and ranks[after] != rank:
                actions.append(action._replace(kind=Kind.RECV_B))
                calls.append((stage_run.await_b, microbatch))
            actions.append(action)
            calls.append((getattr(stage_run, METHODS[action.kind]), microbatch))
        return actions, calls

    def _fail_plainly(self, reason: str) -> None:
        self._fail(reason, None)

    def _fail(self, reason: str, action: Action | None) -> None:
        """Tell every rank; what they wait for from here will not come."""
        for inbox in self._inboxes.values():
            inbox.clear()
        if self._transport.size == 1:
            return  # nobody waits, and the next step starts clean
        self._failed = reason
        self._transport.abort(
            reason,
            stage=action.stage if action else None,
            microbatch=action.microbatch if action else None,
            action=str(action) if action else None,
        )

    def _explain(self, error: Exception, position: int) -> StageExecutionError:
        """An error of user code, with the place in the plan where it happened."""
        action = self._actions[position]
        reason = f"{type(error).__name__}: {error}"
        self._fail(reason, action)
        window = [str(a) for a in self._actions[max(0, position - 3) : position + 4]]
        window[min(position, 3)] = f">>{action}<<"
        rank = self._transport.rank
        return StageExecutionError(
            f"rank {rank}, stage {action.stage}, microbatch {action.microbatch}, action {action}: {reason}"
            f" (plan: {' '.join(window)})",
            rank=rank,
            stage=action.stage,
            microbatch=action.microbatch,
            action=str(action),
        )
