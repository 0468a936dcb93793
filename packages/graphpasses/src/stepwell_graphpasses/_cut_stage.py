"""Writes the graph of one stage of a step that is cut."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import fx

from stepwell_meta import normalize_outputs

from ._carriers import CutWire
from ._graph import Buffer, JointGraph, value_of
from ._inputs import InputGuards, TensorGuard
from ._stage_graph import CutStage, StageGraph
from ._table import Parameter, ParameterTable


@attrs.frozen(eq=False)
class Held:
    """A parameter or buffer, and the stages that hold it, each under names of its own."""

    name: str
    node: fx.Node
    by_stage: Mapping[int, tuple[str, ...]]


class StageBuilder:
    """Writes one stage's graph. Mutable: it knows what each node of the step is called in it.

    Args:
        joint: the step.
        index: which stage.
        nodes: what it computes, in order.
        wires: all wires.
        parameters: all parameters.
        buffers: all buffers.
        gradients: what it makes of the gradients of parameters.
        losses: on the last stage the loss and the named losses; else nothing.
        seed: there the gradient of the loss.
    """

    def __init__(
        self,
        joint: JointGraph,
        index: int,
        *,
        nodes: Sequence[fx.Node],
        wires: Sequence[CutWire],
        parameters: Sequence[Held],
        buffers: Sequence[Held],
        gradients: Mapping[str, fx.Node],
        losses: Sequence[fx.Node],
        seed: fx.Node | None,
    ) -> None:
        self.joint = joint
        self.index = index
        self.nodes = nodes
        self.incoming = sorted((wire for wire in wires if wire.target == index), key=lambda wire: wire.input)
        self.outgoing = sorted((wire for wire in wires if wire.source == index), key=lambda wire: wire.output)
        self.parameters = [one for one in parameters if index in one.by_stage]
        self.buffers = [one for one in buffers if index in one.by_stage]
        self.gradients = gradients
        self.losses = losses
        self.seed = seed
        self.graph = fx.Graph()
        self.copies: dict[fx.Node, fx.Node] = {}

    def build(self) -> CutStage:
        """The stage."""
        joint = self.joint
        read = {source for node in self.nodes for source in node.all_input_nodes}
        read.update(self.gradients.values(), self.losses)
        for prefix, group in (("p_", self.parameters), ("b_", self.buffers)):
            for one in group:
                self.copies[one.node] = self._enter(prefix + self._names(one)[0], one.node)
        guards = {guard.name: guard for guard in joint.guards.leaves if isinstance(guard, TensorGuard)}
        leaves = [leaf.name if isinstance(leaf, TensorGuard) else leaf[0] for leaf in joint.guards.leaves]
        step_inputs = tuple(dict.fromkeys(name.partition(".")[0] for name in leaves))
        received = self._received(step_inputs)
        given: dict[str, TensorGuard] = {}
        for node in joint.placeholders[len(joint.table) + len(joint.buffers) :]:
            if node in read:
                name = node.meta["input"].removeprefix("i_")
                self.copies[node], given[name] = self._enter("i_" + name, node), guards[name]
        seeds = self._seeds()
        constants = [node for node in joint.graph.find_nodes(op="get_attr") if node in read]
        for node in (*constants, *self.nodes):
            self.copies[node] = self.graph.node_copy(node, self.copies.__getitem__)
        outputs = [self.copies[node] for node in (self.losses or [wire.value for wire in self.outgoing])]
        backs = {f"grad.{wire.input}": self.copies[wire.back] for wire in self.incoming if wire.back is not None}
        named = [(self._names(one)[0], self.gradients.get(one.name)) for one in self.parameters]
        gradients = {name: self.copies[node] for name, node in named if node is not None}
        output = self.graph.output((outputs[0], *outputs, *backs.values(), *gradients.values()))
        output.meta = {"fqn": "", "phase": "backward"}
        self.graph.lint()
        graph = attrs.evolve(
            joint,
            graph=self.graph,
            table=ParameterTable(tuple(self._parameter(one) for one in self.parameters)),
            buffers=tuple(self._buffer(one) for one in self.buffers),
            guards=InputGuards(None, (*received.values(), *given.values()), ()),
            losses=tuple((name, None) for name in (*(f"out.{number}" for number in range(len(outputs))), *backs)),
            gradients=tuple(gradients),
            extra_inputs=tuple(f"seed.{number}" for number in seeds),
            units={},
            notes=[],
        )
        tops = {name.partition(".")[0] for name in given}
        return CutStage(
            index=self.index,
            graph=StageGraph(graph, normalize_outputs(self._result(len(outputs))).structure, tuple(seeds)),
            received=tuple(received),
            inputs=tuple(name for name in step_inputs if name in tops),
            step_inputs=step_inputs,
            constants=dict(leaf for leaf in joint.guards.leaves if not isinstance(leaf, TensorGuard)),
            canonical={self._names(one)[0]: one.name for one in self.parameters},
            copied=frozenset(
                self._names(one)[0] for one in (*self.parameters, *self.buffers) if self.index != min(one.by_stage)
            ),
            whole=joint.table,
            has_backward=bool(joint.gradients),
            device=value_of(graph.placeholders[0]).device,
        )

    def _enter(self, name: str, node: fx.Node) -> fx.Node:
        made = self.graph.placeholder("".join(c if c.isalnum() else "_" for c in name))
        made.meta = {**node.meta, "input": name, "phase": "forward"}
        return made

    def _received(self, step_inputs: Sequence[str]) -> dict[str, TensorGuard]:
        """Enter what comes from earlier stages; by name what it looks like."""
        found: dict[str, TensorGuard] = {}
        for wire in self.incoming:
            value, name = value_of(wire.value), wire.value.name
            while name in step_inputs or name in found:
                name += "_again"
            found[name] = TensorGuard(name, value.dtype, value.device, tuple(value.shape), None)
            entered = self._enter("w_" + name, wire.value)
            self.copies.setdefault(wire.value, entered)
        return found

    def _seeds(self) -> dict[int, fx.Node]:
        """Enter the gradients of outputs, by the number of the output."""
        found = {wire.output: wire.back for wire in self.outgoing if wire.back is not None}
        if self.seed is not None:
            found[0] = self.seed
        for number, node in found.items():
            self.copies[node] = self._enter(f"seed.{number}", node)
        return found

    def _result(self, count: int) -> Any:
        """What the stage returns, with some tensor for each of its outputs."""
        tensors = [torch.empty(()) for _ in range(count)]
        if not self.losses:
            return tuple(tensors)
        loss, *named = tensors
        values = iter(named)
        return loss, {name: next(values) if number is None else number for name, number in self.joint.losses}

    def _names(self, one: Held) -> tuple[str, ...]:
        return one.by_stage[self.index]

    def _parameter(self, one: Held) -> Parameter:
        first, *others = self._names(one)
        return attrs.evolve(self.joint.table[one.name], name=first, aliases=tuple(others))

    def _buffer(self, one: Held) -> Buffer:
        first, *others = self._names(one)
        return Buffer(first, tuple(others), value_of(one.node).shape, value_of(one.node).dtype)
