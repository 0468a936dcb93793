"""Cut: the graph of a whole step becomes one graph for each stage of a pipeline.

A pipeline carries values from a stage to later ones, along *wires*, and one gradient back along each. A step's graph knows
neither; it has values that one stage makes and another reads. They become wires like this::

    forward value of stage s, read by stage t > s      a wire s → t, one for each stage that reads it
    value of t's backward, read by s's backward        comes back on a wire s → t: it is that wire's gradient
    loss, named losses                                 outputs of the last stage; the loss's gradient is an input there

What comes back on a wire looks like what went out, and no more is asked of it: the stage that gets it knows which value of the
step it is. So gradients are summed where, and in the order in which, the whole step sums them. The one exception is a parameter
on several stages: each has its own part of the gradient, and whoever ties its copies adds the parts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import fx, nn

from ._carriers import Carriers, CutWire, NoWayBack
from ._config import PassConfig
from ._cut_stage import Held, StageBuilder
from ._graph import JointGraph, emit, is_random, mutated_arguments, phase_of, positions, remove_dead
from ._inputs import TensorGuard
from ._memory import memory_roots
from ._plan import ParallelPlan, ancestors
from ._program import GraphProgram
from ._stage_graph import CutStage
from ._stages import assign, check_writes
from ._trace import ONE_AT_A_TIME
from .exceptions import GraphUsageError, SplitError

aten = torch.ops.aten
_BY_STRIDE = frozenset({aten.as_strided.default, aten.as_strided_.default})


@attrs.frozen(eq=False)
class GraphStages:
    """A step cut into stages that a pipeline can run.

    Attributes:
        stages: the stages' graphs, in order.
        wires: which output goes into which input of which later stage: ``(source, output, destination, input)``. The outputs of
            the last stage, the loss and the named losses, are the step's.
        tied: parameters and buffers that several stages hold, by name: the stage, and the name there, of each. Their copies are
            to be kept equal, and the stages' gradients added.
    """

    stages: tuple[CutStage, ...]
    wires: tuple[tuple[int, int, int, int], ...]
    tied: Mapping[str, tuple[tuple[int, str], ...]]

    def __len__(self) -> int:
        return len(self.stages)

    def program(
        self,
        stage: int,
        model: nn.Module,
        config: PassConfig | None = None,
        plan: ParallelPlan | None = None,
        *,
        mesh: Any = None,
    ) -> GraphProgram:
        """What runs one stage; its ``module`` holds the stage's parameters and buffers, under their names in the model.

        With ``mesh`` it is called by all ranks of the stage together, and the parameters become their shards at once.

        Args:
            stage: which stage.
            model: the model that the step was captured from.
            config: see :class:`GraphProgram`.
            plan: likewise; its patterns are for the whole model.
            mesh: likewise.

        Raises:
            GraphUsageError: there is no such stage, configuration or plan are wrong, or the model has other parameters.
        """
        if not 0 <= stage < len(self.stages):
            raise GraphUsageError(f"stages are 0 to {len(self.stages) - 1}, got {stage}")
        cut = self.stages[stage]
        return GraphProgram(cut.module(model), config, plan, mesh=mesh, stage=cut)

    @staticmethod
    def loss_fn(outputs: tuple[torch.Tensor, dict[str, Any]], target: Any = None) -> Any:
        """The loss function for an executor: the loss and the named losses that the last stage gives.

        Raises:
            GraphUsageError: there is a target. The loss is within the graph: targets are inputs of the step.
        """
        if target is not None:
            raise GraphUsageError(
                "the loss is computed within the graph, which takes no target: give what it needs as an input of the step"
            )
        loss, named = outputs
        return loss, {
            name: torch.as_tensor(v) for name, v in named.items() if not isinstance(v, torch.Tensor) or v.numel() == 1
        }


def split_stages(joint: JointGraph, owners: Mapping[str, int]) -> GraphStages:
    """Cut one step into stages that a pipeline can run, each with its part of forward and backward.

    The step has its loss within; microbatches look like the example that it was captured with.

    Args:
        joint: a step as :func:`trace` captured it.
        owners: the stage of each module that is not glue (see :func:`automatic_owners` and :func:`planned_owners`).

    Example::

        joint = trace(model, train_fn, microbatch)
        stages = split_stages(joint, automatic_owners(model, 2))
        program = stages.program(0, model)

    Raises:
        SplitError: the graph cannot be cut there, or its stages could not run apart from one another.
    """
    if clash := sorted(joint.facts & {"collectives", "split"}):
        raise SplitError(
            f"passes have been over the graph ({', '.join(clash)}); cut it as trace() gave it: each stage's program runs the"
            " passes of data parallelism itself, from config and mesh"
        )
    if not owners:
        raise SplitError("no module is given to a stage; owners maps the names of modules to stages")
    dynamic = [g.name for g in joint.guards.leaves if isinstance(g, TensorGuard) and None in g.size]
    if dynamic:
        raise SplitError(
            f"the graph was captured with sizes that may change ({', '.join(dynamic)}), but stages of a pipeline have fixed ones:"
            " capture it with dynamic=False, from an example of one microbatch"
        )
    with ONE_AT_A_TIME:
        return _Cut(joint.copy(), owners).run()


class _Cut:
    """One cut. Mutable: it works on a copy of the graph, and fills in what it finds."""

    def __init__(self, joint: JointGraph, owners: Mapping[str, int]) -> None:
        self.joint = joint
        self.owners = owners
        self.last = max(owners.values())
        self.stage = assign(joint, owners)
        self.losses: tuple[fx.Node, ...] = joint.outputs[: len(joint.outputs) - len(joint.gradients)]
        self.seed = self._seed()
        self.gradients: list[dict[str, fx.Node]] = [{} for _ in range(self.last + 1)]

    def run(self) -> GraphStages:
        self._divide_gradients()
        self._check_memory()
        wires = self._wires()
        tensors = self.joint.parameter_nodes
        buffers = self.joint.placeholders[len(tensors) :]
        parameters = [
            self._held(p.names, tensors[p.name], {i for i, own in enumerate(self.gradients) if p.name in own})
            for p in self.joint.table
        ]
        held = [self._held((b.name, *b.aliases), n, set()) for b, n in zip(self.joint.buffers, buffers, strict=False)]
        return GraphStages(
            stages=tuple(self._build(index, wires, parameters, held) for index in range(self.last + 1)),
            wires=tuple((wire.source, wire.output, wire.target, wire.input) for wire in wires),
            tied={
                one.name: tuple((stage, names[0]) for stage, names in one.by_stage.items())
                for one in (*parameters, *held)
                if len(one.by_stage) > 1
            },
        )

    def _build(
        self, index: int, wires: Sequence[CutWire], parameters: Sequence[Held], buffers: Sequence[Held]
    ) -> CutStage:
        is_last = index == self.last
        builder = StageBuilder(
            self.joint,
            index,
            nodes=self.nodes(index),
            wires=wires,
            parameters=parameters,
            buffers=buffers,
            gradients=self.gradients[index],
            losses=self.losses if is_last else (),
            seed=self.seed if is_last else None,
        )
        return builder.build()

    def nodes(self, index: int) -> list[fx.Node]:
        """What a stage computes, in order."""
        return [node for node in self.joint.graph.nodes if self.stage.get(node) == index and node is not self.seed]

    def _seed(self) -> fx.Node | None:
        """The gradient of the loss, a one, from which backward starts: here it is the last stage's input."""
        if not self.joint.gradients:
            return None
        # The train function may have ones of its own.
        ones = [u for u in self.losses[0].users if u.target is aten.ones_like.default and phase_of(u) == "backward"]
        if len(ones) != 1:
            raise SplitError("the graph's backward does not start from its loss; cut the graph that trace() gave")
        self.stage[ones[0]] = self.last
        return ones[0]

    def _divide_gradients(self) -> None:
        """Give each stage its part of each gradient; sums over stages are not made here."""
        joint = self.joint
        for name, node in joint.gradient_nodes.items():
            parts: dict[int, list[fx.Node]] = {}
            for index, part in self._parts(node):
                parts.setdefault(index, []).append(part)
            for index, (total, *others) in parts.items():
                for part in others:
                    with joint.graph.inserting_before(joint.output_node):
                        total = emit(joint.graph, aten.add.Tensor, (total, part), like=node, mode=joint.mode)
                    self.stage[total] = index
                self.gradients[index][name] = total
        joint.output_node.args = ((*self.losses, *(node for own in self.gradients for node in own.values())),)
        remove_dead(joint.graph)
        left = set(joint.graph.nodes)
        self.stage = {node: index for node, index in self.stage.items() if node in left}

    def _parts(self, node: fx.Node) -> list[tuple[int, fx.Node]]:
        """The terms of a sum over stages, each with its stage; the node itself where it is none."""
        if node not in self.stage:
            return [(min(self._readers(node), default=self.last), node)]
        if node.target is aten.add.Tensor and phase_of(node) == "backward" and len(node.all_input_nodes) == 2:
            found = [part for term in node.all_input_nodes for part in self._parts(term)]
            if not node.kwargs and len({index for index, _ in found}) > 1:
                return found
        return [(self.stage[node], node)]

    def _readers(self, node: fx.Node) -> set[int]:
        return {self.stage[user] for user in node.users if user in self.stage}

    def _check_memory(self) -> None:
        """Refuse what works only where stages share memory."""
        roots = memory_roots(self.joint.graph)
        readers: dict[fx.Node, set[int]] = {}
        for node in self.joint.graph.nodes:
            for root in roots[node]:
                readers.setdefault(root, set()).update(self._readers(node))
        for node, index in self.stage.items():
            for written in mutated_arguments(node):
                for root in roots[written]:
                    if root.op == "placeholder" and (others := readers[root] - {index}):
                        raise SplitError(
                            f"{node.target} of stage {index} ({node.meta['fqn']}) writes to {root.meta['input'][2:]}, which stage"
                            f" {min(others)} uses too, and each has its own: keep what uses it in one stage"
                        )
            if node.target in _BY_STRIDE and any(self.stage.get(root, index) != index for root in roots[node.args[0]]):  # type: ignore[index]
                raise SplitError(
                    f"{node.target} of stage {index} ({node.meta['fqn']}) depends on how a value of another stage lies in memory,"
                    " which changes on the way; take slices or views of it instead"
                )
        order = {(index, "forward"): index for index in range(self.last + 1)}
        order |= {(index, "backward"): 2 * self.last + 1 - index for index in range(self.last + 1)}
        check_writes(self.joint, {node: order[index, phase_of(node)] for node, index in self.stage.items()})

    def _wires(self) -> tuple[CutWire, ...]:
        while True:
            try:
                wires = self._carriers().wires()
                break
            except NoWayBack as error:
                # The backward of glue stays with its gradient; that of a view which an earlier stage made belongs there instead.
                if not self._lower(error.value):
                    raise
        for index in range(self.last + 1):
            for others, what in (
                ({w.source for w in wires}, "gives nothing to"),
                ({w.target for w in wires}, "takes nothing from"),
            ):
                edge, side = (self.last, "a later") if "gives" in what else (0, "an earlier")
                if index != edge and index not in others:
                    raise SplitError(f"stage {index} {what} {side} stage; put its modules into another one")
        return wires

    def _carriers(self) -> Carriers:
        """Everything that crosses."""
        carriers = Carriers(self.stage, positions(self.joint.graph))
        for index in range(self.last + 1):
            for node in self.nodes(index):
                for source in node.all_input_nodes:
                    if self.stage.get(source, index) != index:
                        carriers.need(source, index)
        for node in self.losses:
            if self.stage.get(node, self.last) != self.last:
                carriers.need(node, self.last)
        return carriers

    def _lower(self, node: fx.Node) -> bool:
        """Move a node of backward to the latest stage that reads it, if that is an earlier one; whether it was moved."""
        target = max(self._readers(node), default=self.last)
        movable = self._home(node.meta["fqn"]) is None and not is_random(node) and not mutated_arguments(node)
        movable = movable and node not in self.gradients[self.stage[node]].values()
        saved = [self.stage.get(source, 0) for source in node.all_input_nodes if phase_of(source) == "forward"]
        if phase_of(node) == "forward" or target >= self.stage[node] or not movable or max(saved, default=0) > target:
            return False
        self.stage[node] = target
        return True

    def _held(self, names: tuple[str, ...], node: fx.Node, also: set[int]) -> Held:
        """Who holds a tensor: the stages that use it, each under one of its names, and the first under all that are left."""
        homes = {name: self._home(name) for name in names}
        stages = sorted(self._readers(node) | also) or [homes[names[0]] or 0]
        found: dict[int, list[str]] = {index: [] for index in stages}
        for name, home in homes.items():
            fits = home in stages[1:] and not found[home]
            found[home if fits and home is not None else stages[0]].append(name)
        return Held(names[0], node, {index: tuple(own) or names[:1] for index, own in found.items()})

    def _home(self, name: str) -> int | None:
        return next((self.owners[part] for part in ancestors(name) if part in self.owners), None)
