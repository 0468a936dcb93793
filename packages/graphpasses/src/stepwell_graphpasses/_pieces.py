"""The pieces of one stage, ready to be called, and what microbatches keep between them."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import fx

from . import _compat as compat
from ._codegen import compile_graph
from ._collectives import comm_of
from ._graph import JointGraph, emit, mutated_arguments, phase_of, value_of
from ._memory import give_own_memory, memory_roots
from ._signature import Entry
from .passes._split import Piece, pieces


@attrs.frozen
class MemoryLayout:
    """How an example lies in memory. What travelled may lie otherwise, and views in a graph rely on it.

    Attributes:
        strides: of the example.
        dims: its dims, from the slowest to the fastest.
    """

    strides: tuple[int, ...]
    dims: tuple[int, ...]

    @classmethod
    def of(cls, example: torch.Tensor) -> MemoryLayout:
        """That of an example."""
        strides = tuple(int(stride) for stride in example.stride())
        return cls(strides, tuple(sorted(range(len(strides)), key=lambda dim: -strides[dim])))

    def laid_out(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same values, lying so, or densely in this order of dims, which allows every view that the example does."""
        if tensor.stride() == self.strides or tensor.permute(self.dims).is_contiguous():
            return tensor
        back = sorted(range(len(self.dims)), key=self.dims.__getitem__)
        return tensor.permute(self.dims).contiguous().permute(back)


@attrs.frozen(eq=False)
class Ready:
    """A piece that can be called."""

    piece: Piece
    run: Callable[[list[Any]], tuple[Any, ...]]
    device: str

    def __call__(self, known: dict[str, Any], kept: Container[str] | None) -> None:
        """Add the piece's outputs to the values it takes its inputs from.

        Args:
            known: the values by name.
            kept: names of what is read once more, or given out; the piece forgets other inputs as soon as it has read them. None:
                all are kept.
        """
        names = self.piece.inputs
        inputs = [known[name] if kept is None or name in kept else known.pop(name) for name in names]
        with torch.no_grad(), torch.autocast(self.device, enabled=False), compat.below_autograd():
            found = self.run(inputs)
        known.update(zip(self.piece.outputs, found, strict=True))


@attrs.frozen(eq=False)
class StagePieces:
    """The pieces for microbatches of one kind.

    Attributes:
        key: what they depend on besides the inputs.
        signature: how they communicate.
        joint: the stage's graph, after passes.
        structure: how its outputs are nested.
        differentiable: which of them get a gradient.
        pieces: by kind.
        inputs: names of all inputs: parameters, buffers, tensors, gradients of outputs.
        layouts: how tensors and gradients of outputs lie in memory.
        gathers: what the unshard piece makes of which parameters; pieces with the same can share it.
        out: the nodes of outputs.
        grad: those of gradients of inputs, by index of the input.
        parameter_grad: those of gradients of parameters, by name.
        later: for the forward and each backward the names of what is read, or given out, after it; also after gradients of inputs
            were given out.
    """

    key: tuple[Any, ...]
    signature: tuple[Entry, ...]
    joint: JointGraph
    structure: Any
    differentiable: tuple[int, ...]
    pieces: dict[str, Ready]
    inputs: list[str] = attrs.field(init=False)
    layouts: list[MemoryLayout] = attrs.field(init=False)
    gathers: tuple[Any, ...] = attrs.field(init=False)
    out: tuple[fx.Node, ...] = attrs.field(init=False)
    grad: dict[int, fx.Node] = attrs.field(init=False)
    parameter_grad: dict[str, fx.Node] = attrs.field(init=False)
    later: dict[str, frozenset[str]] = attrs.field(init=False)

    @inputs.default
    def _inputs(self) -> list[str]:
        return [node.name for node in self.joint.placeholders]

    @layouts.default
    def _layouts(self) -> list[MemoryLayout]:
        first = len(self.joint.table) + len(self.joint.buffers)
        return [MemoryLayout.of(value_of(node)) for node in self.joint.placeholders[first:]]

    @gathers.default
    def _gathers(self) -> tuple[Any, ...]:
        if "unshard" not in self.pieces:
            return ()
        (output,) = self.pieces["unshard"].piece.module.graph.find_nodes(op="output")
        return tuple((comm_of(node), value_of(node).dtype) for node in output.args[0])

    @out.default
    def _out(self) -> tuple[fx.Node, ...]:
        return tuple(self._named("out").values())

    @grad.default
    def _grad(self) -> dict[int, fx.Node]:
        return self._named("grad")

    @parameter_grad.default
    def _parameter_grad(self) -> dict[str, fx.Node]:
        return self.joint.gradient_nodes

    @later.default
    def _later(self) -> dict[str, frozenset[str]]:
        given = {node.name for node in self.parameter_grad.values()}
        weight = given.union(self._reads("backward_weight"))
        inward = {node.name for node in self.grad.values()}
        return {
            "forward": frozenset(weight | inward).union(self._reads("backward_input"), self._reads("backward")),
            "backward_input": frozenset(weight | inward),
            "given": frozenset(weight),
            "backward_weight": frozenset(given),
            "backward": frozenset(given | inward),
        }

    def _reads(self, kind: str) -> tuple[str, ...]:
        return self.pieces[kind].piece.inputs if kind in self.pieces else ()

    @property
    def seeds(self) -> list[str]:
        """Names of the inputs that take the gradients of outputs."""
        return self.inputs[len(self.inputs) - len(self.joint.extra_inputs) :]

    def seed(self, number: int, gradient: torch.Tensor) -> torch.Tensor:
        """The gradient of the ``number``-th differentiable output as the graph takes it."""
        return self.layouts[len(self.layouts) - len(self.joint.extra_inputs) + number].laid_out(gradient)

    def run(self, kind: str, known: dict[str, Any]) -> None:
        """Run a piece, where the stage has it; a backward forgets what nothing reads any more."""
        if kind in self.pieces:
            self.pieces[kind](known, self.later[kind] if kind.startswith("backward") else None)

    def kept(self, known: Mapping[str, Any], after: str) -> dict[str, Any]:
        """Those of the values that are read later, or given out; see :attr:`later`."""
        later = self.later[after]
        return {name: value for name, value in known.items() if name in later}

    def _named(self, kind: str) -> dict[int, fx.Node]:
        """The nodes of outputs (``out``) or of gradients of inputs (``grad``), by index."""
        pairs = zip((name for name, _ in self.joint.losses), self.joint.outputs[1:], strict=False)
        return {int(name.partition(".")[2]): node for name, node in pairs if name.startswith(kind)}

    def value(self, node: fx.Node, known: Mapping[str, Any]) -> torch.Tensor:
        """The value of an output node."""
        found = getattr(self.joint.root, str(node.target)) if node.op == "get_attr" else known[node.name]
        assert isinstance(found, torch.Tensor)
        return found


@attrs.define(eq=False)
class Flight:
    """A microbatch between its forward and the end of its backward.

    Attributes:
        pieces: what runs it.
        known: the values that its backward reads.
        outputs: its outputs that require grad.
        places: for each received tensor its index among the tensor inputs; None where it wants no gradient.
    """

    pieces: StagePieces
    known: dict[str, Any]
    outputs: list[torch.Tensor]
    places: Sequence[int | None]


def cut(joint: JointGraph) -> dict[str, Ready]:
    """The pieces of a stage's graph, which is marked on the way."""
    if all(node.op != "call_function" for node in joint.graph.nodes):
        return {}
    _save_written(joint)
    first = 1 + sum(name.startswith("out") for name, _ in joint.losses)
    give_own_memory(joint, range(first, len(joint.outputs)), apart=True)
    inward = {node for (name, _), node in zip(joint.losses, joint.outputs[1:], strict=False) if name.startswith("grad")}
    roots = memory_roots(joint.graph)
    read = {root for node in inward for root in roots[node]}  # by what comes later on the way to gradients of inputs
    for node in reversed(joint.graph.nodes):
        if node.op != "call_function":
            continue
        node.meta["stage"] = 0
        if phase_of(node) == "forward":
            node.meta["piece"] = "forward" if comm_of(node) is None else "unshard"
        elif node in inward or any(read.intersection(roots[written]) for written in mutated_arguments(node)):
            node.meta["piece"] = "backward_input"
            inward.update(node.all_input_nodes)
            read.update(root for source in node.all_input_nodes for root in roots[source])
        else:
            node.meta["piece"] = "backward_weight"
    joint.facts |= {"split"}
    device = next(iter(v.device.type for n in joint.placeholders if isinstance(v := value_of(n), torch.Tensor)), "cpu")
    made = pieces(joint)
    return {
        piece.kind: Ready(piece, compile_graph(piece.module.graph, piece.module), device)
        for piece in (*made.pieces, *made.backwards)
    }


def _save_written(joint: JointGraph) -> None:
    """Let backward read copies of what forward writes into buffers: the forwards of later microbatches write there again."""
    roots = memory_roots(joint.graph)
    nodes = [node for node in joint.graph.nodes if node.op == "call_function"]
    forward = [node for node in nodes if phase_of(node) == "forward"]
    written = {
        root
        for node in forward
        for argument in mutated_arguments(node)
        for root in roots[argument]
        if root.op == "placeholder"
    }
    for value in list(joint.graph.nodes):
        if not written.intersection(roots[value]) or not isinstance(value_of(value), torch.Tensor):
            continue
        readers = [user for user in value.users if user.op == "call_function" and phase_of(user) == "backward"]
        if readers and (value.op == "placeholder" or phase_of(value) == "forward"):
            with joint.graph.inserting_after(forward[-1]):
                saved = emit(
                    joint.graph,
                    torch.ops.aten.clone.default,
                    (value,),
                    like=forward[-1],
                    phase="forward",
                    mode=joint.mode,
                )
            for reader in readers:
                reader.replace_input_with(value, saved)
