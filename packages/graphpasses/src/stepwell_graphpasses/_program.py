"""One stage of a pipeline as graphs: what an executor asks of a stage, with graph data parallelism inside.

A stage is captured once for each shape of microbatch, and cut into the pieces that actions name::

    unshard → forward → backward_input (I) → backward_weight (W) → reduce
                        └────────── backward (B) ─────────┘

Gradients stay whole, and in the dtype of reductions, until all microbatches have run; then each is reduced once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import fx, nn

from . import _compat as compat
from ._arguments import check_config, check_model, resolve_topology
from ._codegen import compile_graph
from ._config import PassConfig
from ._graph import JointGraph
from ._inputs import InputGuards
from ._live import LiveModel
from ._pass import GraphPass, PassContext
from ._pieces import Flight, StagePieces, cut
from ._pipeline import PassPipeline
from ._plan import ParallelPlan
from ._signature import agree, first_difference, signature
from ._stage_graph import CutStage, StageGraph
from ._table import parameter_table, plan_layouts
from ._trace import ONE_AT_A_TIME
from ._trace_stage import trace_stage
from ._variants import FULL, NONE, Variant
from .exceptions import CaptureError, GradientError, ModelStateError
from .passes import BucketPass, DataParallelPass, DeadCollectivePass, OverlapPass, RematPass

_Reducer: TypeAlias = tuple[tuple[str, ...], Callable[[list[Any]], tuple[Any, ...]]]
_SPLIT = "_stepwell_split"  # what stepwell_stage.split() leaves on the units of its stages


class GraphProgram:
    """Runs one stage of a pipeline as graphs; give it to a stage in place of its module.

    It has the five methods of stepwell-stage's ``StageProgram``. The module's parameters become this rank's shards at the first
    forward, on all data-parallel ranks together. Mutable: it holds what microbatches under way need.

    It captures the module, once for each shape of microbatch; or it is given the graph of a stage that was cut out of a whole
    step: :meth:`GraphStages.program` makes such a program.

    Example::

        stage = PipelineStage(GraphProgram(module), stage_index, num_stages, "cpu")

    Args:
        module: the stage's module.
        config: how its parameters are sharded and reduced, over the ranks of ``mesh``.
        plan: which parameters to shard; None: all.
        mesh: the axes of data parallelism (a part of the whole mesh: this stage's ranks); None: this rank alone.
        stage: the stage's graph, cut out of a step; None: it is captured from the module. With it, parameters become shards at
            once.

    Raises:
        GraphUsageError: configuration or plan is wrong.
        CaptureError: the module is a stage of ``stepwell_stage.split``.
    """

    def __init__(
        self,
        module: nn.Module,
        config: PassConfig | None = None,
        plan: ParallelPlan | None = None,
        *,
        mesh: Any = None,
        stage: CutStage | None = None,
    ) -> None:
        check_model(module)
        check_config(config, plan)
        if any(_SPLIT in vars(part) for part in module.modules()):
            raise CaptureError(
                "this module is a stage that stepwell_stage.split() made: it runs the whole model's forward and works out what is"
                " absent while it runs, which no capture sees. Cut the graph of the step instead:"
                " split_stages(trace(model, train_fn, microbatch), owners), then its program(stage, model)"
            )
        self.module = module
        config = config or PassConfig()
        self._topology, self.config = (None, config) if mesh is None else resolve_topology(config, mesh)
        if stage is not None:
            stage.check(self.config)
        self.plan = plan if plan is not None else ParallelPlan().shard("**")
        self._stage = stage
        self._live: LiveModel | None = None
        self._captures: list[StagePieces] = []
        self._whole: dict[tuple[Any, ...], list[Any]] = {}
        self._flights: dict[int, Flight] = {}
        self._left: dict[int, Flight | None] = {}
        self._gradients: dict[str, torch.Tensor] = {}
        self._reducers: dict[tuple[str, ...], _Reducer] = {}
        if stage is not None:
            self._add((), lambda _: stage.graph, backward=stage.has_backward)

    def forward(
        self,
        microbatch: int,
        received: Sequence[torch.Tensor],
        call: Callable[[Sequence[torch.Tensor]], tuple[tuple[Any, ...], Mapping[str, Any]]],
    ) -> Any:
        """Run a microbatch forward and keep what its backward needs, if gradients are enabled.

        Args:
            microbatch: its number.
            received: the tensors from earlier stages; gradients of those that require grad are given by :meth:`backward`.
            call: makes the arguments from the received tensors.

        Returns:
            The outputs, in the module's structure.

        Raises:
            CaptureError: the stage cannot be captured; names the line.
        """
        args, kwargs = call(received)
        backward = torch.is_grad_enabled()
        inputs = {"args": args, "kwargs": dict(kwargs)}
        if self._stage is not None:
            tensors = self._stage.tensors(args, kwargs)
        else:
            tensors = [leaf for leaf in compat.pytree.tree_leaves(inputs) if isinstance(leaf, torch.Tensor)]
        where = {id(tensor): index for index, tensor in reversed(list(enumerate(tensors)))}
        places = [where.get(id(tensor)) if backward and tensor.requires_grad else None for tensor in received]
        if self._stage is not None:
            capture = self._cut_out(self._stage, backward=backward)
        else:
            wanted = tuple(place for place in places if place is not None)
            capture = self._captured(inputs, wanted, backward=backward)
        known = self._gather(capture)
        known |= zip(capture.inputs, self._values(capture, tensors), strict=False)
        capture.run("forward", known)
        results = [capture.value(node, known).detach() for node in capture.out]
        if backward:
            outputs = [results[index].requires_grad_() for index in capture.differentiable]
            self._flights[microbatch] = Flight(capture, capture.kept(known, "forward"), outputs, places)
        return capture.structure.rebuild(results)

    def backward(
        self, microbatch: int, kind: Any, roots: Sequence[torch.Tensor], grads: Sequence[torch.Tensor | None]
    ) -> tuple[torch.Tensor | None, ...]:
        """Run the backward of a microbatch, or a part of it.

        Args:
            microbatch: its number; its forward has run.
            kind: B for all of it, I for the gradients of what was received, W for those of parameters.
            roots: what to start from: outputs of :meth:`forward`, or a loss computed from them.
            grads: the gradient of each root.

        Returns:
            For B and I one gradient, or None, for each received tensor; for W nothing. An output that no root depends on counts
            with a gradient of zeros.

        Raises:
            GradientError: the part before has not run, or the kind is no backward.
        """
        name = str(getattr(kind, "value", kind))
        if name == "W":
            if microbatch not in self._left:
                raise GradientError(f"W of microbatch {microbatch} needs its I first")
            left = self._left.pop(microbatch)
            if left is not None:
                left.pieces.run("backward_weight", left.known)
                self._add_gradients(left)
            return ()
        if name not in ("B", "I"):
            raise GradientError(f"a backward is B, I or W, got {name}")
        if microbatch not in self._flights:
            raise GradientError(f"{name} of microbatch {microbatch} needs its F first")
        flight = self._flights.pop(microbatch)
        found: tuple[torch.Tensor | None, ...] = (None,) * len(flight.places)
        started = self._start(flight, roots, grads)
        flight.outputs.clear()
        if started:
            flight.pieces.run("backward" if name == "B" else "backward_input", flight.known)
            found = self._inputs(flight)
        if name == "I":
            self._left[microbatch] = flight if started else None
        elif started:
            self._add_gradients(flight)
        return found

    def unshard(self) -> None:
        """Gather the whole parameters; for shapes of microbatches that are yet unknown, at their first forward."""
        for capture in self._captures:
            if capture.key[0]:
                self._gather(capture)

    def reshard(self) -> None:
        """Let go of the whole parameters."""
        self._whole.clear()

    def reduce_grads(self) -> None:
        """Reduce the gradients of all microbatches since the last time, and add them to the parameters' ``.grad``.

        Replicas reduce the same gradients, also one whose microbatches all had no weight: it adds zeros.
        """
        live = self._live
        if live is None:
            return
        wanted = set(self._gradients)
        if self._topology is not None:
            trainable = live.trainable()
            wanted.update(name for one in self._captures for name in one.joint.gradients if trainable[name])
        names = tuple(name for name in live.table.names if name in wanted)
        if not names:
            return
        if names not in self._reducers:
            self._reducers[names] = self._reducer(live, names)
        given, run = self._reducers[names]
        gradients, self._gradients = self._gradients, {}
        values = [gradients[name] if name in gradients else self._zeros(live, name) for name in names]
        with torch.no_grad(), torch.autocast(live.device.type, enabled=False), compat.below_autograd():
            found = run([*live.values(), *values])
        live.accumulate(dict(zip(given, found[1:], strict=True)))

    def clear(self) -> None:
        """Forget microbatches that were begun, and gradients that were not reduced: after a step that failed."""
        self._flights.clear()
        self._left.clear()
        self._gradients.clear()
        self.reshard()

    def _captured(self, inputs: Mapping[str, Any], received: tuple[int, ...], *, backward: bool) -> StagePieces:
        """The pieces for such inputs; made, by all data-parallel ranks together, where there are none yet."""
        if self._live is not None:
            key = self._key(self._live, received, backward=backward)
            for capture in self._captures:
                if capture.key == key and capture.joint.guards.accepts(inputs):
                    return capture

        def make(live: LiveModel) -> StageGraph:
            return trace_stage(
                self.module,
                inputs["args"],
                inputs["kwargs"],
                received,
                backward=backward,
                table=live.table.with_trainable(live.trainable()),
                param_dtype=self.config.param_dtype,
                cast_inputs_of=[layout.unit for layout in live.layouts.values()],
                device=live.device,
            )

        return self._add(received, make, backward=backward)

    def _cut_out(self, stage: CutStage, *, backward: bool) -> StagePieces:
        """The pieces of a stage that was cut, if they still are what the module would do."""
        live, (capture,) = self._live, self._captures
        assert live is not None
        if backward and not stage.has_backward:
            raise GradientError(
                f"stage {stage.index} was cut out of a step that was captured with backward=False: run it without gradients"
            )
        if self._key(live, (), backward=stage.has_backward) != capture.key:
            raise ModelStateError(
                f"stage {stage.index} was cut out of a step that was captured in another mode: since then modules were put into"
                " training or evaluation mode, or parameters were frozen or unfrozen. Capture the step again, and cut that"
            )
        return capture

    def _key(self, live: LiveModel, received: tuple[int, ...], *, backward: bool) -> tuple[Any, ...]:
        """What pieces depend on besides the look of the inputs."""
        live.check_unchanged()
        training = tuple(module.training for module in live.modules)
        device = live.device.type
        autocast = self._stage is None and torch.is_autocast_enabled(device)
        dtype = torch.get_autocast_dtype(device) if autocast else None
        return (backward, received, training, tuple(live.trainable().values()), dtype)

    def _add(
        self, received: tuple[int, ...], make: Callable[[LiveModel], StageGraph], *, backward: bool
    ) -> StagePieces:
        """Add pieces for another kind of microbatch, on all data-parallel ranks together; the first make parameters shards.

        Only the look of the inputs may be another on one rank alone, and then the ranks must meet as before.
        """
        error: Exception | None = None
        entries: tuple[Any, ...] = ()
        key: tuple[Any, ...] = ()
        try:
            live = self._live or self._lay_out()
            key = self._key(live, received, backward=backward)
            with ONE_AT_A_TIME:
                graph = make(live)
                passes: list[GraphPass] = [DataParallelPass(), DeadCollectivePass(), RematPass()]
                alone = any(one.key == key for one in self._captures)
                joint = self._passed(live, graph.joint, NONE, passes, alone=alone)
                entries = signature(joint)
                capture = StagePieces(key, entries, joint, graph.structure, graph.differentiable, cut(joint))
        except Exception as problem:
            error = problem
        known = next((one for one in self._captures if one.key == key), None)
        if known is None:
            agree(self._topology, error, entries, config=self.config)
        elif error is not None:
            raise error
        elif (difference := first_difference(known.signature, entries)) is not None:
            raise CaptureError(
                f"microbatches that look like this one would communicate otherwise than those before, so replicas could not meet:"
                f" {difference}; let all microbatches look alike"
            )
        if self._live is None:
            live.commit()
            self._live = live
        self._captures.append(capture)
        return capture

    def _lay_out(self) -> LiveModel:
        degree = 1 if self._topology is None else self._topology.degrees.shard
        if self._stage is not None:
            table, device = self._stage.joint.table, self._stage.device
            layouts = self._stage.layouts(self.plan, self.config, degree=degree)
        else:
            table = parameter_table(self.module, param_dtype=self.config.param_dtype)
            modules = [name for name, _ in self.module.named_modules()]
            layouts = plan_layouts(table, self.plan, self.config, degree=degree, modules=modules) if len(table) else {}
            tensors = (*self.module.parameters(), *self.module.buffers())
            device = tensors[0].device if tensors else torch.device("cpu")
        live = LiveModel(self.module, table, layouts, self._topology, device)
        live.check_fresh()
        return live

    def _passed(
        self, live: LiveModel, joint: JointGraph, variant: Variant, passes: Sequence[GraphPass], *, alone: bool = False
    ) -> JointGraph:
        if self.config.bucket_by != "none":
            passes = [*passes, BucketPass(backend=self.config.pass_backend)]
        context = PassContext(self.config, self._topology, dict(live.layouts), variant, alone)
        return PassPipeline([*passes, OverlapPass(backend=self.config.pass_backend)]).run(joint, context)

    def _values(self, capture: StagePieces, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        live = self._live
        assert live is not None
        laid_out = (how.laid_out(tensor.detach()) for how, tensor in zip(capture.layouts, tensors, strict=False))
        return [*live.values(), *live.buffer_values(capture.joint.buffers), *laid_out]

    def _gather(self, capture: StagePieces) -> dict[str, Any]:
        """The whole parameters; gathered once for all pieces that need the same of them."""
        if "unshard" not in capture.pieces:
            return {}
        names = capture.pieces["unshard"].piece.outputs
        if capture.gathers not in self._whole:
            known = dict(zip(capture.inputs, self._values(capture, ()), strict=False))
            capture.run("unshard", known)
            self._whole[capture.gathers] = [known[name] for name in names]
        return dict(zip(names, self._whole[capture.gathers], strict=True))

    def _start(self, flight: Flight, roots: Sequence[torch.Tensor], grads: Sequence[torch.Tensor | None]) -> bool:
        """Fill in the gradients of a microbatch's outputs; False where no root depends on any."""
        if not roots or not flight.outputs:
            return False
        taken = torch.autograd.grad(roots, flight.outputs, grads, allow_unused=True)
        for number, (output, gradient) in enumerate(zip(flight.outputs, taken, strict=True)):
            given = torch.zeros_like(output) if gradient is None else gradient
            flight.known[flight.pieces.seeds[number]] = flight.pieces.seed(number, given)
        return any(gradient is not None for gradient in taken)

    def _inputs(self, flight: Flight) -> tuple[torch.Tensor | None, ...]:
        """The gradients of what was received, after the backward that makes them."""
        capture = flight.pieces
        found = tuple(
            capture.value(capture.grad[place], flight.known) if place is not None and place in capture.grad else None
            for place in flight.places
        )
        flight.known = capture.kept(flight.known, "given")
        return found

    def _add_gradients(self, flight: Flight) -> None:
        """Add a microbatch's gradients of parameters to those of the others; each has memory of its own."""
        for name, node in flight.pieces.parameter_grad.items():
            gradient = flight.pieces.value(node, flight.known)
            if name in self._gradients:
                self._gradients[name].add_(gradient)
            else:
                self._gradients[name] = gradient

    def _zeros(self, live: LiveModel, name: str) -> torch.Tensor:
        parameter = live.table[name]
        dtype = self.config.reduce_dtype or parameter.compute_dtype
        return torch.zeros(parameter.shape, dtype=dtype, device=live.device)

    def _reducer(self, live: LiveModel, names: tuple[str, ...]) -> _Reducer:
        """The graph that reduces whole gradients, which come in as inputs of their own; and whose gradients it gives."""
        mode = compat.ExampleMode()
        graph = fx.Graph()
        table = live.table.with_trainable(live.trainable())

        def entry(name: str, parameter: str, dtype: torch.dtype) -> fx.Node:
            node = graph.placeholder("".join(c if c.isalnum() else "_" for c in name))
            with mode:
                value = torch.empty(table[parameter].shape, dtype=dtype, device=live.device)
            node.meta = {"val": value, "fqn": parameter.rpartition(".")[0], "phase": "backward", "input": name}
            return node

        for parameter in table:
            entry("p_" + parameter.name, parameter.name, parameter.compute_dtype)
        gradients = [entry("g_" + name, name, self.config.reduce_dtype or table[name].compute_dtype) for name in names]
        graph.output((gradients[0], *gradients)).meta = {"fqn": "", "phase": "backward"}
        joint = JointGraph(
            graph=graph,
            root=nn.Module(),
            table=table,
            buffers=(),
            guards=InputGuards(None, (), ()),
            losses=(),
            gradients=names,
            mode=mode,
            extra_inputs=names,
        )
        with ONE_AT_A_TIME:
            joint = self._passed(live, joint, FULL, [DataParallelPass()])
        return joint.gradients, compile_graph(joint.graph, joint.root)
