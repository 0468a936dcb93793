"""Capture of one stage of a pipeline: its forward, and its backward from gradients that later stages send."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from stepwell_meta import normalize_outputs

from . import _compat as compat
from ._inputs import DynamicDims
from ._refusals import refuse_sparse_gradients
from ._stage_graph import StageGraph
from ._table import ParameterTable
from ._trace import Step, capture
from .exceptions import CaptureError


class StageStep(Step):
    """Of a stage: its outputs, the gradients of what it received, and those of its parameters.

    The graph's named losses are the outputs (``out.0``, …) and the gradients of inputs (``grad.0``, …, by index of the tensor
    input); its extra inputs are the gradients of the outputs that require grad (``seed.0``, …, by index of the output).
    """

    received: tuple[int, ...] = ()
    structure: Any = None
    differentiable: tuple[int, ...] = ()

    def outputs(
        self, parameters: Sequence[torch.Tensor], inputs: dict[str, Any], values: Mapping[str, torch.Tensor]
    ) -> tuple[Any, ...]:
        """See :meth:`Step.outputs`; the train function returns the stage's outputs."""
        leaves = compat.pytree.tree_leaves(inputs)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        sources = [tensors[index] for index in self.received] if self.backward else []
        for source in sources:
            source.requires_grad_()
        with torch.set_grad_enabled(self.backward):
            # An output that is an input as it came, or is given twice, is a value of its own all the same.
            found = normalize_outputs(self.train_fn(self.model, **inputs))
        self.write_replaced_buffers(values)
        outputs = found.leaves
        if not outputs:
            raise CaptureError(
                "the stage returns no tensor; a stage hands its results to the next one, or to the loss function"
            )
        self.structure = found.structure
        self.differentiable = tuple(index for index, output in enumerate(outputs) if output.requires_grad)
        names = [f"out.{index}" for index in range(len(outputs))]
        results = [output.detach() for output in outputs]
        wanted = [(p.name, t) for p, t in zip(self.table, parameters, strict=True) if t.requires_grad]
        gradients: list[tuple[str, torch.Tensor]] = []
        if self.backward and self.differentiable:
            roots = [outputs[index] for index in self.differentiable]
            seeds = [self._seed(index, outputs[index]) for index in self.differentiable]
            self.scopes.start_backward(roots)
            places = [*sources, *(tensor for _, tensor in wanted)]
            taken = torch.autograd.grad(roots, places, seeds, allow_unused=True)
            for index, gradient in zip(self.received, taken, strict=False):
                if gradient is not None:
                    names.append(f"grad.{index}")
                    results.append(gradient)
            pairs = zip(wanted, taken[len(sources) :], strict=True)
            gradients = [(name, gradient) for (name, _), gradient in pairs if gradient is not None]
            refuse_sparse_gradients(gradients)
        self.losses = tuple((name, None) for name in names)
        self.gradients = tuple(name for name, _ in gradients)
        # The calling convention has a loss; a stage has none, and its first output stands there.
        return (results[0], *results, *(gradient for _, gradient in gradients))

    def finish(self, graph: fx.Graph, mode: compat.ExampleMode) -> None:
        """Make inputs of the gradients of outputs."""
        place = graph.find_nodes(op="placeholder")[-1]
        for name, node in self._seeds:
            with graph.inserting_after(place):
                place = graph.placeholder(name.replace(".", "_"))
            place.meta = {**node.meta, "input": name, "fqn": "", "phase": "forward"}
            node.replace_all_uses_with(place)
            graph.erase_node(node)
        self.extra_inputs = tuple(name for name, _ in self._seeds)

    def _seed(self, index: int, output: torch.Tensor) -> torch.Tensor:
        seed = torch.zeros_like(output, memory_format=torch.contiguous_format)
        graph = compat.current_graph()
        assert graph is not None
        self._seeds.append((f"seed.{index}", next(iter(reversed(graph.nodes)))))
        return seed

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._seeds: list[tuple[str, fx.Node]] = []


def trace_stage(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    received: tuple[int, ...],
    *,
    backward: bool,
    table: ParameterTable,
    param_dtype: torch.dtype | None = None,
    cast_inputs_of: Sequence[str] = (),
    device: torch.device | None = None,
) -> StageGraph:
    """The graph of a stage that its module computes.

    Args:
        module: the stage.
        args: its positional inputs.
        kwargs: its inputs by name.
        received: which of the tensors among them (in order of the flattened inputs) want a gradient.
        backward: whether gradients are taken.
        table: the module's parameters.
        param_dtype: see :func:`trace`.
        cast_inputs_of: see :func:`trace`.
        device: see :func:`trace`.

    Raises:
        CaptureError: the stage cannot be captured.
    """
    made: list[StageStep] = []

    class ThisStep(StageStep):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.received = received
            made.append(self)

    joint = capture(
        module,
        lambda module, args, kwargs: module(*args, **kwargs),
        {"args": args, "kwargs": dict(kwargs)},
        make_step=ThisStep,
        backward=backward,
        dims=DynamicDims(),
        param_dtype=param_dtype,
        cast_inputs_of=cast_inputs_of,
        device=device,
        table=table,
    )
    (step,) = made
    return StageGraph(joint, step.structure, step.differentiable)
