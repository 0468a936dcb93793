"""On which wire each value crosses from stage to stage, and which value of backward comes back on it.

A wire leads to a later stage, and what comes back on it, its gradient, looks like what it carried. Usually the two are an
activation and its gradient. A gradient that goes another way than its activation came finds a wire all the same::

    v made by stage 0, read by stages 1 and 2; the sum of v's gradients is made by stage 1, which has two of its three terms
        0 → 1, 0 → 2    would leave the term of stage 2 with no way to stage 1
        0 → 1, 1 → 2    stage 1 hands on the v that it has, and the term comes back that way
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import torch
from torch import fx

from ._graph import is_view, phase_of, value_of
from .exceptions import SplitError


@attrs.frozen(eq=False)
class CutWire:
    """A value that one stage hands to a later one.

    Attributes:
        value: the value, made by ``source`` or by a stage before it.
        source: the stage that gives it.
        output: which of that stage's outputs it is.
        target: the stage that takes it.
        input: which of that stage's inputs it is.
        back: the value that comes back as its gradient; None: nothing does.
    """

    value: fx.Node
    source: int
    output: int
    target: int
    input: int
    back: fx.Node | None


@attrs.define(eq=False)
class _Draft:
    """A wire whose numbers are not known yet. Mutable: it may be led another way, and finds what comes back on it."""

    value: fx.Node
    source: int
    target: int
    back: fx.Node | None = None


class NoWayBack(SplitError):
    """Nothing could bring a value of backward to the earlier stage that reads it.

    Attributes:
        value: the value.
    """

    def __init__(self, message: str, value: fx.Node) -> None:
        super().__init__(message)
        self.value = value


class Carriers:
    """Collects what crosses, then finds the wires. Mutable: it is filled by :meth:`need`.

    Args:
        stage: the stage of each node that computes.
        position: the place of each node in the graph.
    """

    def __init__(self, stage: Mapping[fx.Node, int], position: Mapping[fx.Node, int]) -> None:
        self._stage = stage
        self._position = position
        self._down: dict[tuple[fx.Node, int], _Draft] = {}
        self._up: dict[tuple[fx.Node, int], None] = {}

    def need(self, value: fx.Node, target: int) -> None:
        """A stage reads a value that another makes."""
        made = self._stage[value]
        if made < target and phase_of(value) == "forward":
            self._down.setdefault((value, target), _Draft(value, made, target))
        elif made > target:
            self._up[value, target] = None
        else:
            raise SplitError(
                f"{value} of the backward of stage {made} ({value.meta['fqn']}) is read by stage {target}, which runs before it"
            )

    def wires(self) -> tuple[CutWire, ...]:
        """All wires, each with its place among the outputs of one stage and the inputs of another.

        Raises:
            NoWayBack: a value has none.
            SplitError: what crosses is no tensor.
        """
        drafts = list(self._down.values())
        for value, target in sorted(self._up, key=lambda item: (self._position[item[0]], item[1])):
            self._carry_back(drafts, value, self._stage[value], target)
        for draft in drafts:
            if not isinstance(value_of(draft.value), torch.Tensor):
                raise SplitError(
                    f"{draft.value} of stage {draft.source} ({draft.value.meta['fqn']}) is read by stage {draft.target}, but is"
                    " no tensor, and only tensors travel"
                )
        outputs: dict[int, int] = {}
        inputs: dict[int, int] = {}
        found = []
        for draft in sorted(drafts, key=lambda d: (d.target, self._position[d.value], d.source)):
            output, taken = outputs.get(draft.source, 0), inputs.get(draft.target, 0)
            outputs[draft.source], inputs[draft.target] = output + 1, taken + 1
            found.append(CutWire(draft.value, draft.source, output, draft.target, taken, draft.back))
        return tuple(found)

    def _carry_back(self, drafts: list[_Draft], value: fx.Node, made: int, target: int) -> None:
        """Find the wire on whose way back ``value`` goes from stage ``made`` to the earlier stage ``target``."""
        fitting = [d for d in drafts if _can_come_back(value) and _looks(d.value) == _looks(value)]
        free = [d for d in fitting if d.target == made and d.back is None]
        there = [d for d in free if d.source == target] or [d for d in free if self._has(target, d.value)]
        if there:
            chosen = min(there, key=lambda d: self._order(d, value))
        else:
            # Nothing of this look is read there: what is at hand goes along, only to bring this back.
            known = next((d.value for d in fitting if self._has(target, d.value)), None)
            if known is None:
                raise NoWayBack(
                    f"{value} of stage {made} ({value.meta['fqn']}) is read by the backward of stage {target}, but nothing of"
                    f" its shape and dtype goes from stage {target} to a later one, whose gradient it could be: put both into one"
                    " stage, or cut elsewhere",
                    value,
                )
            chosen = _Draft(known, target, made)
            drafts.append(chosen)
        chosen.source, chosen.back = target, value

    def _order(self, draft: _Draft, value: fx.Node) -> tuple[int, int, int]:
        """By which the wire comes first whose value has this gradient; the graph does not say, but leaves traces.

        The backward of an operator mostly reads the other values that the operator read, or what it read or gave. And backward
        goes through operators in reverse: of several gradients the first is that of the value whose first reader is the last.
        """
        users = [u for u in draft.value.users if self._stage.get(u) == draft.target and phase_of(u) == "forward"]
        if not users:
            return (0, 0, 0)
        partners = {_base(node) for user in users for node in (*user.all_input_nodes, user)} - {_base(draft.value)}
        score = 0
        for term in _terms(value):
            reads = {base for node in term.all_input_nodes if phase_of(base := _base(node)) == "forward"}
            score += 2 * bool(reads & partners) + (_base(draft.value) in reads)
        first = min(users, key=self._position.__getitem__)
        return (-score, -self._position[first], first.all_input_nodes.index(draft.value))

    def _has(self, stage: int, value: fx.Node) -> bool:
        return self._stage[value] == stage or (value, stage) in self._down


def _looks(node: fx.Node) -> Any:
    """What a gradient has in common with its value."""
    value = value_of(node)
    if not isinstance(value, torch.Tensor):
        return None
    return tuple(map(str, value.shape)), value.dtype, value.device


def _can_come_back(node: fx.Node) -> bool:
    value = value_of(node)
    return isinstance(value, torch.Tensor) and (value.dtype.is_floating_point or value.dtype.is_complex)


def _terms(value: fx.Node) -> list[fx.Node]:
    """The terms of a sum of gradients, as operators made them."""
    made = value
    while is_view(made) and phase_of(made) == "backward":
        made = made.all_input_nodes[0]
    if made.target is not torch.ops.aten.add.Tensor or phase_of(made) == "forward":
        return [made]
    return [term for part in made.all_input_nodes for term in _terms(part)]


def _base(node: fx.Node) -> fx.Node:
    """What a view of a view is a view of."""
    while is_view(node):
        node = node.all_input_nodes[0]
    return node
