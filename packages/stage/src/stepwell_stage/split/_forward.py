"""The forward of one stage."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..exceptions import StageUsageError
from ._absent import Absence
from ._demand import StagePlan
from ._entry import Entries, Entry
from ._glue import DoneError, StageGlue
from ._inputs import replaced
from ._leaves import Given, shown_by, tensors_in
from ._look import Look
from ._own import Control
from ._settings import Settings
from ._state import Flags, drawn
from ._templates import Templates
from ._used import marked, taken
from ._values import INPUTS, Origin
from ._ways import Route, routes
from ._withheld import withhold


class StageForward:
    """The forward of one stage. Mutable: it counts what it takes.

    Args:
        stage: which.
        look: what the examples showed.
        plan: the stage's part.
        everywhere: whether this rank is given the model's inputs even if it is not the first.
        control: of the stage's module.
        absence: of the stage's module.

    Attributes:
        forwards: how often it ran, not counting those that found out what other stages' units return.
        seconds: how long that took.
        glue_seconds: of these, how long what is no unit of the stage took.
    """

    def __init__(
        self, stage: int, look: Look, plan: StagePlan, *, everywhere: bool, control: Control, absence: Absence
    ) -> None:
        self.forwards = 0
        self.seconds = 0.0
        self.glue_seconds = 0.0
        self._stage = stage
        self._look = look
        self._plan = plan
        self._is_given = everywhere or stage == 0
        # Where every stage is given the inputs, each has a part of their gradients, and nobody the sum.
        self._shares_inputs = everywhere and not (plan.is_last and stage == 0)
        self._control = control
        self._absence = absence
        self._absence.tracks = any(one.asks for one in look.ways.recordings)
        # What a whole forward sets and takes back, one that stops in between leaves as it set it.
        is_set = any(one.sets for one in look.ways.recordings)
        self._flags = Flags(control.root, control.units) if is_set else None
        self._sets_torch = any(one.settings for one in look.ways.recordings)
        self._draws, self._drawn = any(one.draws for one in look.ways.recordings), 0
        self._withheld = [
            {number for number, units in one.filled if units - control.shadows.keys()} for one in look.ways.recordings
        ]
        self._templates = Templates(absence)
        self._glue = StageGlue(
            [sight.examples for sight in look.sights],
            plan.outputs,
            absence,
            self._templates,
            control.shadows,
            measures=any(one.measures for one in look.ways.recordings),
        )
        self._entries = Entries(stage, look.inputs, look.kinds)
        self._routes = routes(look.ways, plan.parts)
        every = {route.number: route for start in self._routes for route in start.walk()}
        self._ways = {number: route.ways for number, route in every.items()}
        # Several stages of a rank are given the same tensors, and each of them changes these in place.
        writes = [
            {value.key[1] for value in one.values if value.origin is Origin.INPUT and value.is_written}
            for one in look.ways.recordings
        ]
        self._written = {
            number: frozenset().union(*(writes[way] for way in route.ways)) for number, route in every.items()
        }

    @property
    def is_under_way(self) -> bool:
        """Whether the forward is running, so that it calls itself."""
        return self._control.glue is not None

    def __call__(self, forward: Callable[..., Any], received: Sequence[Any], inputs: Mapping[str, Any]) -> Any:
        """Run the model's forward as far as this stage needs it."""
        start, known = time.perf_counter(), self._templates.count
        values = () if self._stage == 0 else self._joined(received)
        self._drawn = drawn() if self._draws else 0
        said = Said([values[slot] for slot in self._plan.said]) if self._plan.said else None
        if self._is_given:
            given = Given(received if self._stage == 0 else (), inputs)
            entry = self._entries.of(given)
            route, named = self._routes[entry.way], entry.named(given)
            if self._shares_inputs:
                self._check_gradients(given.tensors, named)
        else:
            route = self._told(said)
            slots = route.part.takes.get(INPUTS, {})
            example = self._look.kinds.examples[route.ways[0]]
            entry = Entry.of_example(self._look.inputs, route.ways[0], example)
            named = replaced(example, {index: values[slot] for index, slot in slots.items()})
        written = self._written[route.number]
        if written:
            copies = {number: one.clone() for number, one in enumerate(tensors_in(named)) if number in written}
            named = replaced(named, copies)
        glue, sent = self._glue, self._glue.begin(route, values)
        self._give_inputs(route, named, sent)
        args, kwargs = entry.call(named)
        result = None
        enabled = torch.is_grad_enabled()
        kept = self._flags.keep() if self._flags is not None else None
        try:
            with self._control.running(glue), Settings().kept() if self._sets_torch else contextlib.nullcontext():
                result = forward(*args, **kwargs)
            result = self._end(glue, result)
        except DoneError:
            if self._flags is not None and kept is not None:
                self._flags.put_back(kept)
        except Exception:
            self._check_route(glue.route, said)  # what failed may have been made in another way
            raise
        finally:
            glue.end()
            self._absence.forget()
            if torch.is_grad_enabled() != enabled:
                torch.set_grad_enabled(enabled)
        self._check_route(glue.route, said)
        if not self._plan.is_last:
            result = self._outputs(glue.route, sent)
        if self._templates.count == known:
            self.forwards += 1
            seconds = time.perf_counter() - start
            self.seconds += seconds
            self.glue_seconds += seconds - glue.unit_seconds
        return result

    def _check_gradients(self, tensors: Sequence[torch.Tensor], named: Mapping[str, Any]) -> None:
        odd = [one for one in tensors if one.requires_grad]
        if odd and torch.is_grad_enabled():
            name = next(name for name, value in named.items() if any(one is odd[0] for one in tensors_in(value)))
            raise StageUsageError(
                f'the input {name!r} requires a gradient, of which each stage would have a part: split with inputs="first",'
                " where the first stage's rank has all of it, or detach it"
            )

    def _told(self, said: Said | None) -> Route:
        """Of what kind the inputs are that only the first stage was given."""
        number = 0 if said is None else self._ways[said.numbers()[0][0]][0]
        return self._routes[number]

    def _give_inputs(self, route: Route, named: Mapping[str, Any], sent: list[torch.Tensor | None]) -> None:
        """Send what the model is given, as it is before its code may change it."""
        gives = route.part.gives.get(INPUTS, ())
        tensors = list(tensors_in(named)) if gives else []
        for index, output, is_copied in gives:
            sent[output] = tensors[index].clone() if is_copied else tensors[index]

    def _end(self, glue: StageGlue, result: Any) -> Any:
        """The forward has returned; what of its result this stage may give."""
        route = glue.route = glue.route.ended(glue.count)
        if self._plan.is_last:
            withheld = set().union(*(self._withheld[way] for way in route.ways))
            if withheld:
                result = withhold(result, withheld)
            if any(map(self._absence.is_absent, shown_by(result))):
                raise StageUsageError(
                    "the model returned something that it did not return in the example, or that a hook took out of a unit of"
                    " another stage: leave it out of what the model returns, or split with an example for this way too (ways=)"
                )
        elif any(number >= glue.count for number in route.part.gives):
            raise StageUsageError(
                f"the model's forward ended before {route.names[glue.count]!r}, which came next in the example: split with an"
                " example for this way too (ways=), or make what decides part of a unit (units=)"
            )
        return result

    def _check_route(self, route: Route, said: Said | None) -> None:
        """Refuse to go on with what another stage made where it went another way."""
        if said is None:
            return
        for number, drawn_there in said.numbers():
            if drawn_there != self._drawn or not set(self._ways[number]).intersection(route.ways):
                raise StageUsageError(
                    f"stage {self._stage} went another way than a stage before it: the inputs, or what else decides how the"
                    " forward goes on, such as a random number of Python's, must be the same on every rank"
                )

    def _outputs(self, route: Route, sent: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor, ...]:
        """What was made, and emptiness in place of what is not made in this way."""
        device = self._absence.device
        outputs = [torch.empty(0, device=device) if one is None else one for one in sent]
        if self._plan.says is not None:
            outputs[self._plan.says] = torch.tensor([route.number, self._drawn], device=device)
        if self._plan.marks is not None:
            marks, outputs = marked(outputs, device)
            outputs[self._plan.marks] = marks
        return tuple(outputs)

    def _joined(self, received: Sequence[Any]) -> Sequence[Any]:
        """What came, so that those who sent it hear of what has a gradient."""
        joined = list(received)
        for marks, pairs in self._plan.marked:
            values = taken(received[marks], [received[slot] for slot, _ in pairs], [number for _, number in pairs])
            for (slot, _), value in zip(pairs, values, strict=True):
                joined[slot] = value
        return joined if self._plan.marked else received


class Said:
    """Which routes earlier stages took, as they say in a tensor each; read late, so that nothing waits for it.

    Mutable: it reads once.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._here = [tensor.detach().to("cpu", non_blocking=True) for tensor in tensors]
        away = next((tensor for tensor in tensors if tensor.device.type != "cpu"), None)
        self._arrived = None if away is None else torch.Event(away.device)
        if self._arrived is not None:
            self._arrived.record()

    def numbers(self) -> list[tuple[int, int]]:
        """The numbers of the routes, and what stands for the random numbers of Python's that each stage began with."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return [(number, state) for number, state in (tensor.tolist() for tensor in self._here)]
