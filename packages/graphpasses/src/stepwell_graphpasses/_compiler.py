"""The compiler: a model, a train function and a configuration in; steps with data parallelism out."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TextIO

import attrs
import torch
import torch.distributed as dist
from torch import nn

from ._arguments import (
    check_call,
    check_config,
    check_device,
    check_dims,
    check_kinds,
    check_model,
    resolve_device,
    resolve_topology,
)
from ._config import PassConfig
from ._executable import Executable, StepOutput
from ._explain import describe, explain
from ._graph import JointGraph
from ._inputs import refuse_gradients
from ._live import LiveModel
from ._pass import GraphPass, PassContext
from ._pipeline import PassPipeline, PassReport
from ._plan import ParallelPlan
from ._signature import agree, first_difference, signature
from ._sizes import ListedSizes, SpecializationStats
from ._table import Layout, ParameterTable, parameter_table, plan_layouts
from ._trace import TrainFn, trace
from ._variants import FULL, FULL_AFTER_NONE, FULL_AFTER_SCATTER, NONE, SCATTER, Variant
from .exceptions import GuardError, ModelStateError
from .passes import default_passes


@attrs.define(eq=False)
class Capture:
    """One trace and the graphs made from it."""

    joint: JointGraph
    key: tuple[Any, ...]
    executables: dict[Variant, Executable] = attrs.field(factory=dict)
    special: dict[Any, Capture] = attrs.field(factory=dict)  # by shapes of inputs


class GraphCompiler:
    """Makes one train step data parallel; every rank of the program constructs it, and calls it, alike.

    Example::

        compiler = GraphCompiler(model, train_fn, PassConfig(dp_mode="fsdp"), shard("layers.*", "embed"))
        optimizer = torch.optim.AdamW(model.parameters())
        for batch in batches:
            loss, named = compiler.forward_backward(**batch)
            optimizer.step()
            optimizer.zero_grad()

    Args:
        model: on a real device, or on the meta device.
        train_fn: ``train_fn(model, **inputs)`` returns the loss, or ``(loss, {name: value})``.
        config: what to do; the default shards everything over all ranks.
        plan: which parameters to shard; None: all.
        device: where to train; None: where the model is, or the default accelerator for a model on the meta device.
        mesh: a device mesh, or an object that carries one, with other kinds of parallelism; None: all ranks are data parallel.
        dynamic: whether sizes of inputs may change from call to call.
        dynamic_arg_dims: dims that may change, by dotted input name.
        compile_sizes: sizes that get a graph of their own.
        compile_size_input: dotted name of the input whose size that is.
        compile_size_dim: the dim of that input.
        max_specializations: most graphs for single sizes.
        init_fn: called with the model, once, when a model from the meta device has got memory for its shards.
        passes: the passes, in order; None: the default ones for the configuration.

    Raises:
        GraphUsageError: configuration, plan or sizes are wrong.
        stepwell_mesh.exceptions.TopologyError: the ranks cannot be divided as asked.
    """

    def __init__(
        self,
        model: nn.Module,
        train_fn: TrainFn,
        config: PassConfig | None = None,
        plan: ParallelPlan | None = None,
        *,
        device: torch.device | str | None = None,
        mesh: Any = None,
        dynamic: bool = False,
        dynamic_arg_dims: Mapping[str, Sequence[int]] | None = None,
        compile_sizes: Sequence[int] | None = None,
        compile_size_input: str | None = None,
        compile_size_dim: int = -1,
        max_specializations: int = 8,
        init_fn: Callable[[nn.Module], Any] | None = None,
        passes: Sequence[GraphPass] | None = None,
    ) -> None:
        check_model(model)
        check_config(config, plan)
        check_kinds(
            train_fn=(train_fn, Callable, "callable as train_fn(model, **inputs)"),
            dynamic=(dynamic, bool, "True or False"),
            init_fn=(init_fn, Callable | None, "callable as init_fn(model), or None"),
            passes=(passes, Sequence | None, "a list of passes, or None"),
        )
        self.model = model
        self.train_fn = train_fn
        self.plan = plan if plan is not None else ParallelPlan().shard("**")
        self.topology, self.config = resolve_topology(config or PassConfig(), mesh)
        self.device = resolve_device(model, device, self.topology)
        self.reports: tuple[PassReport, ...] = ()
        self.specialization_stats = SpecializationStats()
        self._dynamic = dynamic
        self._dynamic_dims = check_dims(dynamic_arg_dims)
        self._sizes = ListedSizes(compile_sizes, compile_size_input, compile_size_dim, max_specializations)
        self._init_fn = init_fn
        self._pipeline = PassPipeline(default_passes(self.config) if passes is None else passes)
        self._live: LiveModel | None = None
        self._captures: list[Capture] = []
        self._met: set[tuple[Any, ...]] = set()  # variants, and in which mode, that all ranks have made together
        self._carried: dict[str, torch.Tensor] = {}
        self._carried_parts: dict[str, torch.Tensor] = {}
        self._sync = True

    @property
    def is_compiled(self) -> bool:
        """Whether there is a graph to run."""
        return bool(self._captures)

    @property
    def layouts(self) -> dict[str, Layout]:
        """How each parameter lies on the ranks; empty before compilation."""
        return {} if self._live is None else dict(self._live.layouts)

    def compile(self, **inputs: Any) -> GraphCompiler:
        """Capture the step from example inputs, run the passes, and make the model's parameters shards.

        Collective: all data-parallel ranks succeed, or all raise and nothing has changed. Called again it adds a graph for
        other inputs, or puts one in the place of that for such inputs: numbers of the model (a dropout's p) are built in.

        Raises:
            GraphUsageError: the step cannot be captured, or plan and model do not fit.
            PassError: a pass failed.
            PeerMismatchError: another rank failed, or would communicate otherwise.
        """
        reports: list[PassReport] = []
        live, capture = self._captured(inputs, backward=True, reports=reports)
        if live is not self._live:
            self._take(live)
        key = capture.key
        self._captures = [old for old in self._captures if old.key != key or not old.joint.guards.accepts(inputs)]
        self._captures.append(capture)
        self.reports = tuple(reports)
        return self

    def forward_backward(self, *, sync: bool = True, **inputs: Any) -> tuple[torch.Tensor, dict[str, Any]]:
        """Run one step: gradients are added to ``param.grad``; compiles first where that was not done.

        Args:
            sync: False: keep this microbatch's gradients back, to be reduced with those of the next synchronised one;
                ``param.grad`` stays as it is.
            inputs: what ``train_fn`` takes, besides the model.

        Returns:
            The loss of this rank's batch, and the named losses.

        Raises:
            GuardError: the inputs are not those that a graph was made for; nothing has run.
            GradientError: the graph's gradients are not those of the model.
        """
        check_call(sync)
        sync = sync and self._sync
        executable = self._executable(inputs, self._variant(sync=sync), backward=True)
        carried = self._carried if executable.variant.carries == "whole" else self._carried_parts
        output = self._run(executable, inputs, carried if executable.variant.carries != "nothing" else {})
        if sync:
            self.live.accumulate(output.gradients)
            self._carried, self._carried_parts = {}, {}
        else:
            kept = self._carried if executable.variant == NONE else self._carried_parts
            for name, gradient in output.gradients.items():
                kept[name] = kept[name] + gradient if name in kept else gradient
        return output.loss, output.losses

    def evaluate(self, **inputs: Any) -> tuple[torch.Tensor, dict[str, Any]]:
        """Run the step without gradients, in the model's present mode (call ``model.eval()`` as you would in eager)."""
        if self._live is None:
            raise ModelStateError(
                "compile the step before evaluating: evaluation runs on the shards that compile makes"
            )
        output = self._run(self._executable(inputs, FULL, backward=False), inputs, {})
        return output.loss, output.losses

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within, :meth:`forward_backward` keeps gradients back; the first one outside reduces all of them once."""
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    def token_weight(self, count: int | torch.Tensor) -> torch.Tensor:
        """What to multiply the *sum* of this rank's losses by, so that the gradient is that of the mean over all ranks' tokens.

        Ranks with fewer tokens would otherwise weigh each of them more. Give the result to the step as an input::

            loss = F.cross_entropy(logits, labels, reduction="sum") * weight

        Args:
            count: this rank's number of tokens (of all microbatches that are reduced together).

        Returns:
            A scalar: ranks / tokens of all ranks under ``reduce="avg"``, else the corresponding factor. Collective.
        """
        total = torch.as_tensor(count, dtype=torch.float64, device=self.device).clone()
        ranks = 1
        if self.topology is not None:
            ranks = self.topology.degrees.total
            for axis in self.topology.axis_names:
                dist.all_reduce(total, group=self.topology.mesh.get_group(axis))
        reduce = self.config.reduce
        factor = {"avg": float(ranks), "sum": 1.0}.get(str(reduce)) or float(reduce)
        return (factor / total).float()

    def to(self, device: torch.device | str) -> GraphCompiler:
        """Move the model, shards and buffers, and gradients; graphs are made anew on the next call.

        Raises:
            ConfigError: torch has no such device here.
            ModelStateError: the shards belong to a mesh of other devices.
        """
        target = check_device(device)
        if self._live is not None:
            self._live.check_move(target)
        self.device = target
        if self._live is not None:
            self._live.move(self.device)
        else:
            self.model.to(self.device)
        self._carried = {name: value.to(self.device) for name, value in self._carried.items()}
        self._carried_parts = {name: value.to(self.device) for name, value in self._carried_parts.items()}
        self._captures.clear()
        self._met.clear()
        return self

    @property
    def live(self) -> LiveModel:
        """The link to the model's parameters.

        Raises:
            ModelStateError: nothing is compiled yet.
        """
        if self._live is None:
            raise ModelStateError("nothing is compiled yet; call compile or forward_backward first")
        return self._live

    def run(self, inputs: Mapping[str, Any], variant: Variant = FULL) -> StepOutput:
        """Run one graph and hand its gradients over, without adding them to ``param.grad``."""
        return self._run(self._executable(inputs, variant, backward=True), inputs, {})

    def graph(self, variant: Variant = FULL) -> JointGraph:
        """The finished graph of the latest capture with gradients; made here alone where no step has run that variant yet.

        Raises:
            ModelStateError: nothing is compiled yet.
        """
        known = self._latest().executables.get(variant)
        return (known or self._build(self._latest(), self._context(self.live, variant, alone=True))).joint

    def prepare(self, *variants: Variant) -> None:
        """Make graphs of the latest capture with gradients before a step needs them. Collective.

        Raises:
            PassError: a pass failed.
            PeerMismatchError: another rank failed, or would communicate otherwise.
        """
        for variant in variants:
            self._get(self.live, self._latest(), variant)

    def accepts(self, inputs: Mapping[str, Any]) -> bool:
        """Whether there is a graph with gradients for such inputs."""
        return any(capture.joint.guards.accepts(inputs) for capture in self._captures if capture.key[0])

    def source_graph(self) -> JointGraph:
        """The latest capture with gradients as it was before any pass."""
        return self._latest().joint

    def build(self, joint: JointGraph, variant: Variant = FULL) -> JointGraph:
        """Run this compiler's passes on another capture of the same model."""
        return self._pipeline.run(joint, self._context(self.live, variant))

    def print_graph(self, variant: Variant = FULL, *, file: TextIO | None = None) -> None:
        """Write the finished graph as code, to standard output by default."""
        (file or sys.stdout).write(self.graph(variant).module.code + "\n")

    def describe(self) -> str:
        """Ranks, parameters, collectives and memory in a few lines."""
        joint = self.graph() if self.is_compiled else None
        return describe(self.config, self.topology, self.layouts, joint, self.reports, self.specialization_stats)

    def explain(self, subject: str | None = None) -> str:
        """Why parameters are sharded, padded, replicated or skipped, and why buckets end where they do.

        Args:
            subject: name of a parameter, or pattern of names; None: everything.
        """
        return explain(self.graph().notes, subject)

    # What follows decides; forward_backward and compile act.

    def _latest(self) -> Capture:
        captures = [capture for capture in self._captures if capture.key[0]]
        if not captures:
            raise ModelStateError("nothing is compiled yet; call compile or forward_backward first")
        return captures[-1]

    def _lay_out(self) -> LiveModel:
        table = parameter_table(self.model, param_dtype=self.config.param_dtype)
        degree = 1 if self.topology is None else self.topology.degrees.shard
        if not len(table):
            raise ModelStateError("the model has no parameters, so there is nothing to train")
        modules = [name for name, _ in self.model.named_modules()]
        layouts = plan_layouts(table, self.plan, self.config, degree=degree, modules=modules)
        live = LiveModel(self.model, table, layouts, self.topology, self.device)
        live.check_fresh()
        return live

    def _key(self, live: LiveModel, *, backward: bool) -> tuple[Any, ...]:
        """What a graph depends on besides its inputs."""
        live.check_unchanged()
        device = self.device.type
        autocast = torch.is_autocast_enabled(device)
        return (
            backward,
            tuple(module.training for module in live.modules),
            tuple(live.trainable().values()),
            torch.get_autocast_dtype(device) if autocast else None,
        )

    def _capture(self, live: LiveModel, inputs: Mapping[str, Any], *, backward: bool, static: bool = False) -> Capture:
        table: ParameterTable = live.table.with_trainable(live.trainable())
        joint = trace(
            self.model,
            self.train_fn,
            inputs,
            backward=backward,
            dynamic=self._dynamic and not static,
            dynamic_arg_dims=None if static else self._dynamic_dims,
            param_dtype=self.config.param_dtype,
            cast_inputs_of={layout.unit for layout in live.layouts.values()},
            device=self.device,
            table=table,
        )
        return Capture(joint, self._key(live, backward=backward))

    def _context(self, live: LiveModel, variant: Variant, *, alone: bool = False) -> PassContext:
        return PassContext(self.config, self.topology, dict(live.layouts), variant, alone)

    def _build(self, capture: Capture, context: PassContext, reports: list[PassReport] | None = None) -> Executable:
        return Executable(self._pipeline.run(capture.joint, context, reports=reports), context.variant)

    def _get(self, live: LiveModel, capture: Capture, variant: Variant) -> Executable:
        """A graph of a capture: the first of a variant is made by all ranks together, those for other sizes by each alone."""
        if variant not in capture.executables:
            first = variant != FULL and (variant, capture.key) not in self._met
            made: Executable | None = None
            error: Exception | None = None
            entries: tuple[Any, ...] = ()
            try:
                made = self._build(capture, self._context(live, variant, alone=not first))
                entries = signature(made.joint) if first else ()
            except Exception as problem:
                error = problem
            if first:
                agree(self.topology, error, entries)
                self._met.add((variant, capture.key))
            elif error is not None:
                raise error
            assert made is not None
            capture.executables[variant] = made
        return capture.executables[variant]

    def _variant(self, *, sync: bool) -> Variant:
        if not sync:
            return SCATTER if self.config.grad_sync == "scatter" else NONE
        if self._carried:
            return FULL_AFTER_NONE
        return FULL_AFTER_SCATTER if self._carried_parts else FULL

    def _executable(self, inputs: Mapping[str, Any], variant: Variant, *, backward: bool) -> Executable:
        if self._live is None or not self._captures:
            self.compile(**inputs)  # also after to(), which drops the graphs
        live = self.live
        key = self._key(live, backward=backward)
        candidates = [capture for capture in self._captures if capture.key == key]
        for capture in candidates:
            if capture.joint.guards.accepts(inputs):
                general = self._get(live, capture, variant)
                return self._specialized(live, capture, inputs, variant) or general
        if candidates:
            try:
                candidates[-1].joint.guards.flatten(inputs)
            except GuardError as error:
                raise GuardError(
                    f"{error}\nCall compile with such inputs to add a graph for them, or let sizes be dynamic",
                    problems=error.problems,
                ) from None
        # Another mode, or parameters were frozen or unfrozen: the same on every rank, or their graphs would differ.
        self._captures.append(self._captured(inputs, backward=backward)[1])
        return self._executable(inputs, variant, backward=backward)

    def _captured(
        self, inputs: Mapping[str, Any], *, backward: bool, reports: list[PassReport] | None = None
    ) -> tuple[LiveModel, Capture]:
        """A capture with its first graph, if all ranks have made one and theirs communicate alike; and whom it is for."""
        live, made = self._live, None
        error: Exception | None = None
        entries: tuple[Any, ...] = ()
        try:
            if backward:
                refuse_gradients(inputs)
            self._sizes.shapes(inputs)
            live = live or self._lay_out()
            made = self._capture(live, inputs, backward=backward)
            made.executables[FULL] = self._build(made, self._context(live, FULL), reports)
            entries = signature(made.executables[FULL].joint)
        except Exception as problem:
            error = problem
        agree(self.topology, error, entries, config=self.config)
        assert live is not None
        assert made is not None
        return live, made

    def _take(self, live: LiveModel) -> None:
        """Put shards in place; on all ranks or, where the values cannot be had on one of them, on none."""
        undo = live.commit()
        if live.is_meta and self._init_fn is not None:
            error: Exception | None = None
            try:
                with torch.no_grad():
                    self._init_fn(self.model)
            except Exception as problem:
                error = problem
            except BaseException:
                undo()
                raise
            try:
                agree(self.topology, error, (), failed="could not initialise the model, so no rank does")
            except Exception:
                undo()
                raise
        self._live = live

    def _specialized(
        self, live: LiveModel, general: Capture, inputs: Mapping[str, Any], variant: Variant
    ) -> Executable | None:
        """The graph for exactly these sizes, where they are listed. Decided by each rank alone, so without communication."""
        shapes = self._sizes.shapes(inputs)
        if shapes is None:
            return None
        stats = self.specialization_stats
        if shapes not in general.special and stats.compiled < self._sizes.most:
            general.special[shapes] = self._capture(live, inputs, backward=bool(general.joint.gradients), static=True)
            stats = attrs.evolve(stats, compiled=stats.compiled + 1)
        special = general.special.get(shapes)
        if special is not None and variant not in special.executables:
            made = self._build(special, self._context(live, variant, alone=True))
            theirs = general.executables[variant]
            alike = first_difference(signature(made.joint), signature(theirs.joint)) is None
            special.executables[variant] = made if alike else theirs
        found = None if special is None else special.executables[variant]
        if found is None or found is general.executables[variant]:
            self.specialization_stats = attrs.evolve(stats, fallbacks=stats.fallbacks + 1)
            return None
        self.specialization_stats = attrs.evolve(stats, hits=stats.hits + 1)
        return found

    def _run(
        self, executable: Executable, inputs: Mapping[str, Any], carried: Mapping[str, torch.Tensor]
    ) -> StepOutput:
        live, joint = self.live, executable.joint
        flat = joint.guards.flatten(inputs)
        if joint.gradients and any(tensor.requires_grad for tensor in flat):
            refuse_gradients(inputs)
        return executable(live.values(), live.buffer_values(joint.buffers), flat, carried)
