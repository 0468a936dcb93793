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
from ._leaves import tensors_in
from ._look import Look
from ._own import Control
from ._templates import Templates
from ._values import INPUTS, TOKEN, Key, Origin


class StageForward:
    """The forward of one stage. Mutable: it counts what it takes.

    Args:
        stage: which.
        look: what the example showed.
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
        self._everywhere = everywhere
        self._control = control
        self._absence = absence
        self._templates = Templates(absence, look.examples, look.singles)
        # Several stages of a rank are given the same tensors, and each of them changes these in place.
        self._written = [
            value.key[1] for value in look.recording.values if value.origin is Origin.INPUT and value.is_written
        ]

    def __call__(self, forward: Callable[..., Any], received: Sequence[Any], inputs: Mapping[str, Any]) -> Any:
        """Run the model's forward as far as this stage needs it."""
        start, known = time.perf_counter(), self._templates.count
        values = {} if self._stage == 0 else dict(zip(self._plan.receives, received, strict=True))
        named = self._named(received, inputs, values)
        if self._written:
            tensors = [one for value in named.values() for one in tensors_in(value)]
            named = replaced(named, {index: tensors[index].clone() for index in self._written})
        passed = self._passed(named, values)
        args, kwargs = self._look.inputs.call(named)
        glue = StageGlue(self._plan, self._look.recording.names, values, self._absence, self._templates)
        result = None
        try:
            with self._control.running(glue):
                result = forward(*args, **kwargs)
        except DoneError:
            pass
        finally:
            self._absence.forget()
        if self._plan.last is not None:
            result = tuple(passed[key] if key in passed else glue.sent[key] for key in self._plan.sends)
        elif any(map(self._absence.is_absent, tensors_in(result))):
            raise StageUsageError(
                "the model returned something that it did not return in the example, or that a hook took out of a unit of another"
                " stage: leave it out of what the model returns"
            )
        if self._templates.count == known:
            self.forwards += 1
            seconds = time.perf_counter() - start
            self.seconds += seconds
            self.glue_seconds += seconds - glue.unit_seconds
        return result

    def _named(
        self, received: Sequence[Any], inputs: Mapping[str, Any], values: Mapping[Key, torch.Tensor]
    ) -> dict[str, Any]:
        """All of the model's inputs, by name."""
        example = self._look.example
        if self._stage == 0:
            named = self._look.inputs.joined(received, inputs)
        elif self._everywhere:
            named = dict(inputs)
        else:
            return replaced(example, {index: one for (number, index), one in values.items() if number == INPUTS})
        odd = named.keys() - example.keys()
        if odd:
            raise StageUsageError(
                f"stage {self._stage} was given {', '.join(sorted(odd))}, which the example did not have: split with an example"
                " that has every input"
            )
        lacking = [name for name in example if name not in named and next(tensors_in(example[name]), None) is not None]
        if lacking:
            raise StageUsageError(
                f"stage {self._stage} was given no {', '.join(lacking)}: every rank passes the model's inputs by name,"
                ' step(**split.keywords(...)); or split with inputs="first"'
            )
        return {**example, **named}

    def _passed(self, named: Mapping[str, Any], values: Mapping[Key, torch.Tensor]) -> dict[Key, torch.Tensor]:
        """What this stage sends without having computed it, as it is before the model's code may change it."""
        passed = {}
        for key in self._plan.sends:
            if key == TOKEN:
                passed[key] = torch.empty(0, device=self._absence.device)
                continue
            tensor = values.get(key)
            if tensor is None and key[0] == INPUTS:
                tensor = [one for value in named.values() for one in tensors_in(value)][key[1]]
            if tensor is not None:
                passed[key] = tensor.clone() if key in self._plan.copies else tensor
        return passed
