"""The graph of one stage: of a module that was captured, or of a step that was cut."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import torch
from torch import nn

from . import _compat as compat
from ._config import PassConfig
from ._graph import JointGraph
from ._inputs import TensorGuard, is_same
from ._plan import ParallelPlan
from ._table import Layout, Parameter, ParameterTable, parameter_table, plan_layouts
from .exceptions import ConfigError, GuardError, ModelStateError


@attrs.frozen(eq=False)
class StageGraph:
    """Forward and backward of one stage, and how its outputs are to be read.

    Attributes:
        joint: the graph. The named losses are its outputs (``out.0``, …) and the gradients of what it received (``grad.0``, …, by
            index of the tensor input); extra inputs are the gradients of its outputs (``seed.0``, …).
        structure: how the outputs are nested.
        differentiable: which of them get a gradient.
    """

    joint: JointGraph
    structure: Any
    differentiable: tuple[int, ...]


@attrs.frozen(eq=False)
class CutStage:
    """One stage of a step that was cut.

    Attributes:
        index: which stage.
        graph: its graph.
        received: names of the values that it takes from earlier stages, in order.
        inputs: names of the step's inputs that it takes, after these.
        step_inputs: names of all inputs of the step, in order.
        constants: dotted names of inputs that are built into the graph, with their values.
        canonical: for each parameter's name here its first name in the whole model.
        copied: names of the parameters and buffers of which an earlier stage has the model's own, and this one a copy.
        whole: the parameters of the whole model.
        has_backward: whether the step was captured with its backward.
        device: where it runs.
    """

    index: int
    graph: StageGraph
    received: tuple[str, ...]
    inputs: tuple[str, ...]
    step_inputs: tuple[str, ...]
    constants: Mapping[str, Any]
    canonical: Mapping[str, str]
    copied: frozenset[str]
    whole: ParameterTable
    has_backward: bool
    device: torch.device

    @property
    def joint(self) -> JointGraph:
        """Its graph's record."""
        return self.graph.joint

    def tensors(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
        """The graph's tensor inputs, from a microbatch's arguments: received values, then inputs, by position or by name.

        Inputs of the step that this stage does not take are passed over.

        Raises:
            GuardError: an argument is missing, unknown, or not what the graph was made for.
        """
        names = (*self.received, *self.inputs)
        given = dict(zip(names, args, strict=False))
        problems = []
        if len(args) > len(names):
            problems.append(f"it takes {len(names)} values ({', '.join(names)}), got {len(args)}")
        if twice := sorted(given.keys() & kwargs.keys()):
            problems.append(f"{twice[0]} was given by position and by name")
        if unknown := sorted(kwargs.keys() - {*names, *self.step_inputs}):
            problems.append(f"the step has no input {unknown[0]}; its inputs are {', '.join(self.step_inputs)}")
        leaves = dict(compat.flatten_named({**kwargs, **given})[0])
        found = []
        for guard in self.joint.guards.leaves:
            assert isinstance(guard, TensorGuard)
            if guard.name not in leaves:
                problems.append(f"{guard.name} is missing; this rank has to be given it too, by name")
            else:
                leaf = leaves[guard.name]
                as_it_lies = (
                    attrs.evolve(guard, stride=tuple(leaf.stride())) if isinstance(leaf, torch.Tensor) else guard
                )
                problems += as_it_lies.problems(leaf)
                found.append(leaf)
        problems += [
            f"{name}: the graph was made for the value {value!r}, got {leaves[name]!r}"
            for name, value in self.constants.items()
            if name in leaves and not is_same(leaves[name], value)
        ]
        if problems:
            raise GuardError(
                f"the inputs of stage {self.index} are not those that its step was captured with:\n  "
                + "\n  ".join(problems)
                + "\nEvery microbatch must look like the example that the step was captured with: choose a number of microbatches"
                " that divides the batch, or capture the step with such an example",
                problems=problems,
            )
        return found

    def check(self, config: PassConfig) -> None:
        """Refuse a configuration that asks for another dtype than the step was captured with."""
        for parameter in self.joint.table:
            wanted = config.param_dtype if config.param_dtype and parameter.dtype.is_floating_point else parameter.dtype
            if parameter.compute_dtype != wanted:
                raise ConfigError(
                    f"param_dtype={config.param_dtype}, but the step was captured with {parameter.name} in"
                    f" {parameter.compute_dtype}; give trace() the same param_dtype",
                    field="param_dtype",
                    value=config.param_dtype,
                )

    def layouts(self, plan: ParallelPlan, config: PassConfig, *, degree: int) -> dict[str, Layout]:
        """How its parameters lie on the ranks, by a plan for the whole model."""
        if not len(self.whole):
            return {}
        whole = plan_layouts(self.whole, plan, config, degree=degree, modules=sorted(self.joint.containers))
        return {name: whole[canonical] for name, canonical in self.canonical.items()}

    def module(self, model: nn.Module) -> nn.Module:
        """A module with the parameters and buffers that this stage holds, under their names in the model; most are its own.

        Raises:
            ModelStateError: the model has not the parameters of the one that was captured.
        """
        known = {name: parameter for parameter in parameter_table(model) for name in parameter.names}
        for parameter in self.joint.table:
            for name in parameter.names:
                if name not in known or _look(known[name]) != _look(parameter):
                    found = _look(known[name]) if name in known else "nothing"
                    raise ModelStateError(
                        f"stage {self.index} was cut out of a step of a model with {name} as {_look(parameter)}, and this one has"
                        f" {found}: give the model that was captured, as it was"
                    )
        root = nn.Module()
        root.training = model.training

        def holder(path: str) -> nn.Module:
            made, source = root, model
            for part in path.split(".") if path else ():
                source = source.get_submodule(part)
                if part not in made._modules:
                    made.add_module(part, nn.Module())
                made = made.get_submodule(part)
                made.training = source.training
            return made

        for parameter in self.joint.table:
            for name in parameter.names:
                path, _, attribute = name.rpartition(".")
                own = model.get_parameter(name)
                if name in self.copied:
                    own = nn.Parameter(own.detach().clone(), requires_grad=own.requires_grad)
                holder(path).register_parameter(attribute, own)
        for buffer in self.joint.buffers:
            for name in (buffer.name, *buffer.aliases):
                path, _, attribute = name.rpartition(".")
                source = model.get_submodule(path)
                lasting = attribute not in source._non_persistent_buffers_set
                value = source._buffers[attribute]
                if value is not None and name in self.copied:
                    value = value.clone()
                holder(path).register_buffer(attribute, value, persistent=lasting)
        return root


def _look(parameter: Parameter) -> str:
    layout = "" if parameter.tensor_parallel is None else ", a DTensor"
    return f"{parameter.dtype} of shape {parameter.shape}{layout}"
