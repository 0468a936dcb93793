"""The forward of one stage."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..exceptions import StageUsageError
from ._absent import Absence
from ._demand import StagePlan
from ._glue import DoneError, StageGlue
from ._inputs import replaced
from ._leaves import shown_by, tensors_in, with_tensors
from ._look import Look
from ._own import Control
from ._state import Flags, drawn
from ._templates import Templates
from ._used import sent, taken
from ._values import INPUTS, Origin
from ._ways import Route, routes


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
        self._everywhere = everywhere
        self._control = control
        self._absence = absence
        self._absence.tracks = any(one.asks for one in look.ways.recordings)
        self._measures = any(one.measures for one in look.ways.recordings)
        # What a whole forward sets and takes back, one that stops in between leaves as it set it.
        is_set = any(one.sets for one in look.ways.recordings)
        self._flags = Flags(control.root, control.units) if is_set else None
        self._draws, self._drawn = any(one.draws for one in look.ways.recordings), 0
        self._templates = Templates(absence)
        self._routes = routes(look.ways, plan.parts)
        self._ways = {route.number: route.ways for start in self._routes for route in start.walk()}
        self._examples = [sight.examples for sight in look.sights]
        # Several stages of a rank are given the same tensors, and each of them changes these in place.
        self._writes = [
            {value.key[1] for value in one.values if value.origin is Origin.INPUT and value.is_written}
            for one in look.ways.recordings
        ]

    def __call__(self, forward: Callable[..., Any], received: Sequence[Any], inputs: Mapping[str, Any]) -> Any:
        """Run the model's forward as far as this stage needs it."""
        start, known = time.perf_counter(), self._templates.count
        values = () if self._stage == 0 else self._joined(received)
        self._drawn = drawn() if self._draws else 0
        said = Said([values[slot] for slot in self._plan.said])
        if self._is_given:
            way, named = self._look.kinds.like(self._stage, self._named(received, inputs))
            route = self._routes[way]
        else:
            route = self._told(said)
            slots = route.part.takes.get(INPUTS, {})
            example = self._look.kinds.examples[route.ways[0]]
            named = replaced(example, {index: values[slot] for index, slot in slots.items()})
        self._check_gradients(named)
        written = set().union(*(self._writes[way] for way in route.ways))
        if written:
            copies = {number: one.clone() for number, one in enumerate(tensors_in(named)) if number in written}
            named = replaced(named, copies)
        glue = StageGlue(
            route,
            self._examples,
            values,
            self._plan.outputs,
            self._absence,
            self._templates,
            self._control.shadows,
            measures=self._measures,
        )
        self._give_inputs(glue, named)
        # Code that takes something out of a list or dict does so in its own, in each stage and microbatch.
        named = {name: with_tensors(value, tensors_in(value), anew=True) for name, value in named.items()}
        args, kwargs = self._look.inputs.call(named)
        result = None
        ambient = torch.is_grad_enabled(), torch.get_default_dtype()
        kept = self._flags.keep() if self._flags is not None else None
        try:
            with self._control.running(glue):
                result = forward(*args, **kwargs)
            self._end(glue, result)
        except DoneError:
            if self._flags is not None and kept is not None:
                self._flags.put_back(kept)
        except Exception:
            self._check_route(glue.route, said)  # what failed may have been made in another way
            raise
        finally:
            self._absence.forget()
            torch.set_grad_enabled(ambient[0])
            torch.set_default_dtype(ambient[1])
        self._check_route(glue.route, said)
        if not self._plan.is_last:
            result = self._outputs(glue)
        if self._templates.count == known:
            self.forwards += 1
            seconds = time.perf_counter() - start
            self.seconds += seconds
            self.glue_seconds += seconds - glue.unit_seconds
        return result

    def _named(self, received: Sequence[Any], inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        """The inputs that this rank was given, by name."""
        return self._look.inputs.joined(received, inputs) if self._stage == 0 else inputs

    def _check_gradients(self, named: Mapping[str, Any]) -> None:
        """Where every stage is given the inputs, each has a part of their gradients, and nobody the sum."""
        if not self._everywhere or (self._plan.is_last and self._stage == 0) or not torch.is_grad_enabled():
            return
        odd = [name for name, value in named.items() if any(one.requires_grad for one in tensors_in(value))]
        if odd:
            raise StageUsageError(
                f'the input {odd[0]!r} requires a gradient, of which each stage would have a part: split with inputs="first",'
                " where the first stage's rank has all of it, or detach it"
            )

    def _told(self, said: Said) -> Route:
        """Of what kind the inputs are that only the first stage was given."""
        ways = [self._ways[number] for number, _ in said.numbers()] or [(0,)]
        return self._routes[ways[0][0]]

    def _give_inputs(self, glue: StageGlue, named: Mapping[str, Any]) -> None:
        """Send what the model is given, as it is before its code may change it."""
        gives = glue.route.part.gives.get(INPUTS, ())
        tensors = list(tensors_in(named)) if gives else []
        for index, output, is_copied in gives:
            glue.sent[output] = tensors[index].clone() if is_copied else tensors[index]

    def _end(self, glue: StageGlue, result: Any) -> None:
        """The forward has returned."""
        route = glue.route = glue.route.ended(glue.count)
        if self._plan.is_last:
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

    def _check_route(self, route: Route, said: Said) -> None:
        """Refuse to go on with what another stage made where it went another way."""
        for number, drawn_there in said.numbers():
            if drawn_there != self._drawn or not set(self._ways[number]).intersection(route.ways):
                raise StageUsageError(
                    f"stage {self._stage} went another way than a stage before it: the inputs, or what else decides how the"
                    " forward goes on, such as a random number of Python's, must be the same on every rank"
                )

    def _outputs(self, glue: StageGlue) -> tuple[torch.Tensor, ...]:
        """What was made, and emptiness in place of what is not made in this way."""
        device = self._absence.device
        outputs = [torch.empty(0, device=device) if one is None else one for one in glue.sent]
        if self._plan.says is not None:
            outputs[self._plan.says] = torch.tensor([glue.route.number, self._drawn], device=device)
        if self._plan.marks is not None:
            marks, outputs = sent(outputs, device)
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
