"""One plan bound to one rank's stages, step after step."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence

import attrs
import torch

from stepwell_meta import ForwardMeta, InferenceMode
from stepwell_meta.exceptions import StepwellError
from stepwell_p2p import ChannelPolicy, Edge, Transport
from stepwell_p2p.exceptions import PeerFailure, TransportError

from .._compat import is_profiling
from ..exceptions import ScheduleError, StageExecutionError, StageUsageError
from ..plan._action import Action, Kind
from ..plan._lower import Plan
from ..plan._prove import prove
from ..plan._timeline import Event
from ..plan._wiring import Wiring
from ._agree import Cut, GivenBatch, agree, declared_looks, sweep
from ._announce import Announcer, Word
from ._bind import Around, Handlers, bind
from ._draws import Draws, are_threads
from ._inbox import Inbox
from ._lent import lent_by_wires, taken_from
from ._link import InLink, LinkPlace, OutLink
from ._looks import LinkLooks
from ._opening import Opening
from ._stage import PipelineStage
from ._stage_run import Known, StageRun, StepData


@attrs.frozen
class _Learned:
    """What is known about steps whose batch is cut in one way."""

    cut: Cut
    known: Known


@attrs.frozen
class Trace:
    """When each action of a step ended, and before them when the step began; events are made of it where they are asked for."""

    rank: int = 0
    actions: Sequence[Action] = ()
    times: Sequence[float] = ()

    def events(self) -> tuple[Event, ...]:
        """What was done when; nothing where no times were noted."""
        done = zip(self.actions, self.times, self.times[1:], strict=False)
        return tuple(Event(self.rank, action, start, end) for action, start, end in done)


class Run:
    """Runs one plan; mutable: it learns what crosses, for each way in which batches are cut.

    Args:
        stages: this rank's stages.
        plan: what to run. It is proved under the transport's rules.
        wiring: which output goes where.
        transport: what carries values.
        loss_fn: the loss, on the last stage's rank.
        share_loss: whether :meth:`share` follows each step.
        handlers: what runs instead of actions' own methods, by kind or name.
        around_action: contexts around each action.
    """

    def __init__(
        self,
        stages: Sequence[PipelineStage],
        plan: Plan,
        wiring: Wiring,
        transport: Transport,
        loss_fn: Callable[..., torch.Tensor] | None,
        *,
        share_loss: bool,
        handlers: Handlers,
        around_action: Sequence[Around],
    ) -> None:
        if transport.size > 1:
            # A transport that does not say which messages share a channel gives each edge its own.
            prove(plan, transport.rules, channels=getattr(transport, "policy", ChannelPolicy.PER_EDGE))
            _check_orders(plan)
        self.has_backward = plan.schedule.has_backward
        self._plan = plan
        self._wiring = wiring
        self._stages = stages
        self._transport = transport
        self._announcer = Announcer(plan.schedule, transport, share_loss=share_loss)
        self._learned: dict[int, _Learned] = {}
        self._inboxes = {rank: Inbox(transport) for rank in range(transport.size) if rank != transport.rank}
        self._in_links: dict[tuple[int, int], InLink] = {}
        self._out_links: dict[tuple[int, int], OutLink] = {}
        self._runs = {stage.stage_index: self._stage_run(stage, loss_fn) for stage in stages}
        for place in self._in_links.keys() & self._out_links.keys():
            self._in_links[place].other, self._out_links[place].other = self._out_links[place], self._in_links[place]
        self._now = bind(plan.actions[transport.rank], self._runs, handlers, around_action)
        self._bound = {plan.num_microbatches: self._now}
        self._failed: str | None = None
        self._known: Known | None = None
        self._first: dict[tuple[int, tuple[int, ...], bool], frozenset[int]] = {}
        self._opening: Opening | None = None
        if transport.rules.tagged and stages[0].shapes != "dynamic":
            self._opening = Opening(plan.schedule, self._in_links, self._out_links)
        self._number: int | None = None  # of how the batch of the last step was cut
        self._is_new = False  # whether no earlier one was cut so

    def refuse(self, reason: str) -> None:
        """This rank cannot begin the step that the others begin: tell them."""
        if self._transport.size == 1 or self._failed is not None:
            return
        if self._announcer.is_origin:
            try:
                self._announcer.give(Word.REFUSED, 0)
                self._announcer.explain(reason)
                self._other_step()
            except PeerFailure as error:  # another was quicker; this rank has its own reason to tell its caller
                self._failed = str(error)
        else:
            self.fail(reason)

    def fail(self, reason: str) -> None:
        """This rank cannot go on with the step that has begun: tell the others."""
        self._fail(reason, None)

    def prepare(self, cut: Cut | None, given: GivenBatch | None = None) -> Cut:
        """Get every rank to the beginning of the same step, and to the same knowledge of what will cross.

        Args:
            cut: how the batch is cut, on the first stage's rank; elsewhere None. Where it has fewer microbatches than the plan,
                every rank leaves out the actions of the others.
            given: what this rank is given, where every rank is to be given the same.

        Returns:
            The same on every rank.

        Raises:
            StageUsageError: this rank was given something else than the first stage's, for a batch that is cut in a known way.
            PipeliningMetadataError: likewise in a new way, on every rank.
        """
        if self._failed is not None:
            raise StageUsageError(
                f"an earlier step failed ({self._failed}), which ended the transport on every rank:"
                " make a new transport and a new executor"
            )
        with self._telling():
            if self._opening is not None and self._number is not None:
                self._opening.begin()
            learned = self._knowledge(cut, given)
        count = len(learned.cut.sizes)
        if count not in self._bound:
            self._bound[count] = self._bound[self._plan.num_microbatches].up_to(count)
        self._now = self._bound[count]
        if learned.known is not self._known:  # which most steps share with the one before
            self._known = learned.known
            self._let_know(learned.known)
        return learned.cut

    def _let_know(self, known: Known) -> None:
        for stage_run in self._runs.values():
            stage_run.know(known)
        for links in (self._in_links, self._out_links):
            for (source, destination), link in links.items():
                groups, looks = known.groups, known.links[source, destination]
                link.know(groups, looks, self._firsts(source, groups), self._firsts(destination, groups, backward=True))

    def go(self, data: StepData, *, trace: bool) -> Trace:
        """Run every action in order; with ``trace``, say when each ran."""
        for stage_run in self._runs.values():
            stage_run.begin(data, is_new=self._is_new)
        position = -1
        times = [time.perf_counter()]
        try:
            for call, microbatch in self._now.in_ranges() if is_profiling() else self._now.calls:
                position += 1
                call(microbatch)
                if trace:
                    times.append(time.perf_counter())
        except PeerFailure as error:
            self._failed = str(error)
            raise
        except StepwellError as error:
            self._fail(str(error), self._now.actions[position])
            raise
        except Exception as error:
            raise self._explain(error, position) from error
        except BaseException as error:  # an interrupt: the other ranks must not wait for ever
            self._fail(f"{type(error).__name__} on rank {self._transport.rank}", self._now.actions[position])
            raise
        finally:
            self._clear()
        return Trace(self._transport.rank, self._now.actions, times)

    def _clear(self) -> None:
        for stage_run in self._runs.values():
            stage_run.clear()
        for inbox in self._inboxes.values():
            inbox.clear()

    def output_bytes(self) -> dict[int, int]:
        """Of each stage whose outputs go on, the bytes of one microbatch's, as far as they are known: the most of any."""
        found: dict[int, int] = {}
        for learned in self._learned.values():
            for stage, looks in learned.known.outputs.items():
                sizes = [sum(math.prod(m.shape) * m.dtype.itemsize for m in look.outputs) for look in looks.values()]
                found[stage] = max([found.get(stage, 0), *sizes])
        return found

    def share(self, word: bytes | None) -> bytes:
        """After a step: every rank gets the word of the last stage's rank."""

        def pass_on(stage: PipelineStage, incoming: bytes | None) -> bytes:
            found = word if incoming is None else incoming
            assert found is not None  # the word begins at the last stage
            return found

        with self._telling():
            words = sweep(self._stages, self._plan.placement, self._transport, pass_on, upstream=True)
        return next(iter(words.values()))

    @contextlib.contextmanager
    def _telling(self) -> Iterator[None]:
        """Around what is exchanged outside a step's actions: where it fails, no other rank waits for this one."""
        try:
            yield
        except BaseException as error:
            if isinstance(error, PeerFailure):
                self._failed = str(error)
            elif isinstance(error, TransportError):
                self.fail(str(error))
            elif not isinstance(error, Exception):
                # An interrupt; of other errors every rank hears by what is exchanged.
                self.fail(f"{type(error).__name__} on rank {self._transport.rank}")
            if self._failed is not None:
                self._clear()
            raise

    def _knowledge(self, cut: Cut | None, given: GivenBatch | None) -> _Learned:
        """What is known about the step that begins; agreed on with the other ranks where it is new."""
        problem = None
        if cut is not None:
            number = next((n for n, learned in self._learned.items() if learned.cut == cut), None)
            is_new = number is None
            if number is None:
                number = self._announcer.next_number()
            word = Word.NEW if is_new else Word.KNOWN
            self._announcer.give(word, number, *(() if given is None else (given.numbers(wait=is_new),)))
        else:
            try:
                is_new, number, numbers = self._announcer.take(self.fail)
            except StageUsageError:
                if self._failed is None:  # the step is refused, which ends nothing
                    self._other_step()
                raise
            if given is not None:
                problem = self._other(given.other(numbers, wait=is_new))
        self._is_new = is_new
        if is_new or number != self._number:
            self._other_step()
        if is_new:
            self._learned.pop(number, None)
            self._learned[number] = self._agree(cut, problem)
        elif problem is not None:
            self.fail(problem)
            raise StageUsageError(problem)
        if given is not None:
            given.begin()
        learned, self._number = self._learned[number], number
        return self._fresh(learned.cut) if self._stages[0].shapes == "dynamic" else learned

    def _other_step(self) -> None:
        """The step is not like the last: nothing of what was begun for such a one goes on."""
        if self._opening is not None and self._number is not None:
            self._opening.end()

    def _other(self, what: str | None) -> str | None:
        """Why a step is refused for which this rank was given something else than the first stage's."""
        if what is None:
            return None
        return (
            f"rank {self._transport.rank} was given {what} than rank {self._plan.placement.ranks[0]}, which has the first stage:"
            " give every rank of a pipeline the same batch, cut in the same way, as loaders do that have the same seed and"
            ' sampler; or split with inputs="first", where only that rank is given it'
        )

    def _agree(self, cut: Cut | None, problem: str | None) -> _Learned:
        agreement = agree(
            self._stages,
            self._plan.placement,
            self._wiring,
            self._transport,
            cut=cut,
            has_backward=self.has_backward,
            problem=problem,
        )
        outputs: dict[int, dict[int, ForwardMeta]] = {stage.stage_index: {} for stage in self._stages}
        links = {place: LinkLooks() for place in (*self._in_links, *self._out_links)}
        if agreement.mode is InferenceMode.STATIC:
            links |= agreement.looks
            for stage in self._stages:
                if stage.declared_outputs is not None:
                    outputs[stage.stage_index][0] = stage.declared_outputs
                    for place, link in self._out_links.items():
                        if place[0] == stage.stage_index:
                            links[place] = declared_looks(stage, link.place.wires)
        return _Learned(cut or agreement.cut, Known(agreement.cut.groups, outputs, links))

    def _fresh(self, cut: Cut) -> _Learned:
        """Of dynamic shapes nothing is known beforehand: every microbatch is a group of its own, and every step begins anew."""
        outputs: dict[int, dict[int, ForwardMeta]] = {stage.stage_index: {} for stage in self._stages}
        links = {place: LinkLooks() for place in (*self._in_links, *self._out_links)}
        return _Learned(cut, Known(range(len(cut.sizes)), outputs, links))

    def _stage_run(self, stage: PipelineStage, loss_fn: Callable[..., torch.Tensor] | None) -> StageRun:
        """A stage with its ends of links."""
        index, ranks, wiring = stage.stage_index, self._plan.placement.ranks, self._wiring
        places = [(source, index) for source in wiring.sources(index)] + [
            (index, destination) for destination in wiring.destinations(index)
        ]
        for source, destination in places:
            place = LinkPlace(
                source,
                destination,
                Edge(ranks[source], ranks[destination]),
                wiring.between(source, destination),
                wiring.first_message(source, destination),
                wiring.first_gradient(source, destination),
                # Stages that split() makes run what stands between units each by itself, also what is written there.
                lent=() if stage.parts else lent_by_wires(wiring.between(source, destination), wiring.wires),
                later=taken_from(destination, source, wiring.wires),
            )
            inbox = self._inboxes.get(ranks[source if destination == index else destination])
            if destination == index:
                self._in_links[source, index] = InLink(
                    place, self._transport, inbox, stage.meshes, stage.device, stage.classes
                )
            else:
                self._out_links[index, destination] = OutLink(place, self._transport, inbox, stage.meshes, stage.device)
        return StageRun(
            stage,
            [self._in_links[place] for place in places if place[1] == index],
            [self._out_links[place] for place in places if place[0] == index],
            loss_fn,
            has_backward=self.has_backward,
            draws=Draws(stage) if self.has_backward and are_threads(self._transport) else None,
        )

    def _firsts(self, stage: int, groups: Sequence[int], *, backward: bool = False) -> frozenset[int]:
        """Of each group the microbatch whose values, or gradients, a stage sends first."""
        key = (stage, tuple(groups), backward)
        if key not in self._first:
            if len(self._first) >= _MOST_FIRSTS:  # microbatches of ever other sizes go together in ever other ways
                self._first.clear()
            first: dict[int, int] = {}
            for microbatch in _order(self._plan, stage, Kind.SEND_B if backward else Kind.SEND_F):
                if microbatch < len(groups):
                    first.setdefault(groups[microbatch], microbatch)
            self._first[key] = frozenset(first.values())
        return self._first[key]

    def _fail(self, reason: str, action: Action | None) -> None:
        """Tell every rank; what they wait for from here will not come."""
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
        action = self._now.actions[position]
        reason = f"{type(error).__name__}: {error}"
        if "modified by an inplace operation" in reason and self._plan.num_microbatches > 1:
            reason += (
                "\nOther microbatches run forward before the backward of this one. Where a forward changes a buffer in place, let"
                " it put a new tensor there instead: self.mean = 0.9 * self.mean + 0.1 * mean"
            )
        self._fail(reason, action)
        window = [str(a) for a in self._now.actions[max(0, position - 3) : position + 4]]
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


_MOST_FIRSTS = 4096


def _check_orders(plan: Plan) -> None:
    """Refuse a plan that takes what crosses a link in another order than it is sent: the first that is sent says how all look.

    Raises:
        ScheduleError: which.
    """
    ranks = plan.placement.ranks
    for source, destination in plan.links:
        if ranks[source] == ranks[destination]:
            continue
        for sends, receives, maker, taker in (
            (Kind.SEND_F, Kind.RECV_F, source, destination),
            (Kind.SEND_B, Kind.RECV_B, destination, source),
        ):
            pairs = zip(
                _order(plan, maker, sends), _order(plan, taker, receives, maker), strict=True
            )  # every send meets its receive
            sent, taken = next(((sent, taken) for sent, taken in pairs if sent != taken), (0, 0))
            if sent != taken:
                raise ScheduleError(
                    f"{plan.schedule.name}: rank {ranks[maker]} has {Action(maker, sends, sent)} where rank {ranks[taker]} has"
                    f" {Action(taker, receives, taken)}: take what crosses in the order in which it is sent"
                )


def _order(plan: Plan, stage: int, kind: Kind, peer: int | None = None) -> Sequence[int]:
    """The microbatches of a stage's actions of one kind, in the plan's order; of those that concern a peer, if one is given."""
    return [
        action.microbatch
        for action in plan.actions[plan.placement.ranks[stage]]
        if action.kind is kind
        and action.stage == stage
        and action.peer in (None, peer)
        and action.microbatch is not None
    ]
