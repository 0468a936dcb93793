"""Stages of a model that ``torch.distributed.pipelining.pipeline`` has cut.

The cut model is a graph that calls one submodule for each stage. What a stage takes, from whom, and who takes what it makes,
stands in that graph as arguments and users of the calls::

    x ─▶ stage 0 ─▶ getitem 0 ─▶ stage 1 ─▶ stage 2 ─▶ output
                └─▶ getitem 1 ──────────────▶

From it come the wires of the whole pipeline, the same on every rank. Values may skip stages and have several takers.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import attrs
import torch
from torch import fx, nn
from torch.distributed.tensor import DTensor

from stepwell_meta.exceptions import PipeliningMetadataError
from stepwell_p2p import Transport, Wire

from .._compat import tree_flatten, tree_map
from ._program import EagerProgram
from ._stage import PipelineStage


class PipeInfo(Protocol):
    """What ``pipe.info()`` gives: the graph that calls the stages, and how many there are."""

    @property
    def graph(self) -> fx.Graph: ...

    @property
    def num_stages(self) -> int: ...


def build_stage(
    stage_module: nn.Module,
    stage_index: int,
    pipe_info: PipeInfo,
    device: torch.device | str,
    group: Any = None,
    *,
    transport: Transport | None = None,
) -> PipelineStage:
    """A stage of a model that was cut by ``torch.distributed.pipelining.pipeline``.

    Arguments of the model that a later stage needs are given on its rank, as keyword arguments under the model's names for
    them; those that it does not need are passed over, so that all may be given on every rank. Outputs of the model that an
    earlier stage makes travel to the last one, which returns all of them.

    Example::

        pipe = pipeline(model, mb_args=(x,), split_spec={"layers.2": SplitPoint.BEGINNING})
        stage = build_stage(pipe.get_stage_module(rank), rank, pipe.info(), device="cpu")

    Args:
        stage_module: ``pipe.get_stage_module(stage_index)``. It is moved to the device, unless it has parameters on the meta
            device.
        stage_index: which stage.
        pipe_info: ``pipe.info()``.
        device: where the stage computes.
        group: the process group of the pipeline; see :class:`PipelineStage`.
        transport: or what else carries values.

    Raises:
        PipeliningMetadataError: graph and module do not go together, or something crosses that cannot: the message says what.
    """
    calls = [node for node in pipe_info.graph.nodes if node.op == "call_module"]
    if len(calls) != pipe_info.num_stages:
        raise PipeliningMetadataError(
            f"the graph of the pipe calls {len(calls)} submodules, but there are {pipe_info.num_stages} stages",
            stage=stage_index,
        )
    cuts = _Cuts(calls, pipe_info.graph)
    stage = PipelineStage(
        stage_module, stage_index, pipe_info.num_stages, device, group=group, transport=transport, wires=cuts.wires
    )
    inputs = _inputs(stage_module, calls[stage_index], stage_index)
    _check_outputs(stage_module, stage_index, is_last=stage.is_last)
    stage.program = GraphProgram(
        stage_module,
        stage_index,
        inputs,
        received=[list(inputs)[place] for place in cuts.received[stage_index]],
        roots={name: list(inputs)[place] for name, place in cuts.roots[stage_index].items()},
        arguments=cuts.arguments,
        outputs=cuts.outputs if stage.is_last else None,
    )
    return stage


@attrs.frozen
class Own:
    """In place of an output of the model: the last stage's output of this number."""

    number: int


@attrs.frozen
class Passed:
    """In place of an output of the model: an input of the last stage, which an earlier one made."""

    number: int


class GraphProgram(EagerProgram):
    """Runs a submodule of a cut model. Mutable as an :class:`EagerProgram` is.

    Args:
        module: the submodule.
        stage: its number, for messages.
        inputs: its placeholders, by name; what they looked like when the model was traced.
        received: for each value that comes from earlier stages, the placeholder it goes into.
        roots: for each of the model's arguments that this stage takes from the caller, the placeholder it goes into.
        arguments: names of all arguments of the model; those that other stages take may be given here too.
        outputs: what the model returns, with Own and Passed in it; None for the submodule's outputs as they are.
    """

    def __init__(
        self,
        module: nn.Module,
        stage: int,
        inputs: Mapping[str, torch.Tensor],
        *,
        received: Sequence[str],
        roots: Mapping[str, str],
        arguments: frozenset[str],
        outputs: Any,
    ) -> None:
        super().__init__(module)
        self._stage = stage
        self._inputs = inputs
        self._received = received
        self._roots = roots
        self._others = arguments - roots.keys()
        self._outputs = outputs

    def forward(
        self,
        microbatch: int,
        received: Sequence[torch.Tensor],
        call: Callable[[Sequence[torch.Tensor]], tuple[tuple[Any, ...], Mapping[str, Any]]],
    ) -> Any:
        """See :meth:`StageProgram.forward`."""
        arguments: tuple[Any, ...] = ()

        def by_name(tensors: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
            nonlocal arguments
            arguments, given = call(tensors)
            kwargs = {name: value for name, value in given.items() if name not in self._others}
            if self._stage == 0:
                self._check(dict(zip(self._inputs, tree_flatten(arguments)[0], strict=False)) | kwargs)
                return arguments, kwargs
            named = {self._roots.get(name, name): value for name, value in kwargs.items()}
            named.update(zip(self._received, arguments, strict=False))  # beyond them: what is only passed on
            missing = [name for name, inner in self._roots.items() if inner not in named]
            if missing:
                raise PipeliningMetadataError(
                    f"stage {self._stage} takes the model's arguments {missing} from the caller: pass them as keyword arguments"
                    " of step() on its rank",
                    stage=self._stage,
                )
            self._check(named)
            return (), named

        value = super().forward(microbatch, received, by_name)
        if self._outputs is None:
            return value
        own = tree_flatten(value)[0]

        def pick(place: Any) -> Any:
            if isinstance(place, Own):
                return own[place.number]
            return arguments[place.number] if isinstance(place, Passed) else place

        return tree_map(pick, self._outputs)

    def _check(self, given: Mapping[str, Any]) -> None:
        """Refuse what the model was not traced for: sizes are baked into a graph, which might compute something else."""
        for name, value in given.items():
            traced = self._inputs.get(name)
            if traced is None or not isinstance(value, torch.Tensor):
                continue
            fits = value.dtype == traced.dtype and value.dim() == traced.dim()
            fixed = [(i, size) for i, size in enumerate(traced.shape) if type(size) is int]
            if not fits or any(value.shape[i] != size for i, size in fixed):
                raise PipeliningMetadataError(
                    f"stage {self._stage}, input {name!r}: the model was traced with {traced.dtype} of shape"
                    f" {tuple(traced.shape)}, but got {value.dtype} of shape {tuple(value.shape)}; give pipeline() a microbatch"
                    " like those of a step, all of one size",
                    stage=self._stage,
                )


class _Cuts:
    """What the graph of a cut model says of values between stages.

    Attributes:
        wires: of the whole pipeline.
        received: for each stage, the numbers of its placeholders that take values of earlier stages, in the order of its inputs.
        roots: for each stage, the number of the placeholder that takes an argument of the model, by the argument's name.
        arguments: names of the model's arguments.
        outputs: what the model returns, or None for what the last stage returns.
    """

    def __init__(self, calls: Sequence[fx.Node], graph: fx.Graph) -> None:
        self._calls = {call: index for index, call in enumerate(calls)}
        self._owner = graph.owning_module
        self.received: list[list[int]] = []
        self.roots: list[dict[str, int]] = []
        wires: list[Wire] = []
        for index, call in enumerate(calls):
            if call.kwargs:
                raise PipeliningMetadataError(
                    f"stage {index} is called with keyword arguments {list(call.kwargs)}; a cut model passes positional ones",
                    stage=index,
                )
            self.received.append([])
            self.roots.append({})
            for place, argument in enumerate(call.args):
                self._add_input(index, place, argument, wires)
        self.arguments = frozenset(str(node.target) for node in graph.nodes if node.op == "placeholder")
        self.outputs = self._model_outputs(graph, len(calls) - 1, wires)
        self.wires = tuple(wires)

    def _add_input(self, stage: int, place: int, argument: Any, wires: list[Wire]) -> None:
        if isinstance(argument, fx.Node) and argument.op == "placeholder":
            self.roots[stage][str(argument.target)] = place
            return
        source, output = self._origin(argument, stage)
        wires.append(Wire(source, output, stage, len(self.received[stage])))
        self.received[stage].append(place)

    def _origin(self, value: Any, stage: int) -> tuple[int, int]:
        """The stage that makes a value, and the value's number among the tensors that it returns."""
        path: list[Any] = []
        node = value
        while isinstance(node, fx.Node) and node.op == "call_function" and node.target is operator.getitem:
            path.append(node.args[1])
            node = node.args[0]
        if not isinstance(node, fx.Node) or node not in self._calls:
            what = f"{node.op} {node.target}" if isinstance(node, fx.Node) else repr(node)
            raise PipeliningMetadataError(
                f"stage {stage} takes {value}, which comes from {what}: a stage's inputs are arguments of the model or outputs of"
                " earlier stages",
                stage=stage,
            )
        return self._calls[node], self._number(node, path[::-1])

    def _number(self, call: fx.Node, path: Sequence[Any]) -> int:
        """Which tensor of a stage's outputs is at a path of indices."""
        module = None if self._owner is None else self._owner.get_submodule(str(call.target))
        if not isinstance(module, fx.GraphModule):
            if len(path) > 1:
                raise PipeliningMetadataError(
                    f"output {list(path)} of {call.name} is nested, and the graph of the pipe has no submodules to look it up in",
                    stage=self._calls[call],
                )
            return int(path[0]) if path else 0
        value = _returned(module)
        leaves = tree_flatten(value)[0]
        for step in path:
            value = value[step]
        found = next((number for number, leaf in enumerate(leaves) if leaf is value), None)
        if found is None or not _is_tensor(value):
            raise PipeliningMetadataError(
                f"output {list(path)} of {call.name} is {value}, and only tensors cross between stages of a cut model",
                stage=self._calls[call],
            )
        return sum(_is_tensor(leaf) for leaf in leaves[:found])

    def _model_outputs(self, graph: fx.Graph, last: int, wires: list[Wire]) -> Any:
        """What the model returns, or None if that is what the last stage returns; wires for what others make of it."""
        (output,) = (node for node in graph.nodes if node.op == "output")
        passed: dict[Any, Passed] = {}

        def place(value: Any) -> Any:
            if not isinstance(value, fx.Node):
                return value
            if value.op == "placeholder":
                raise PipeliningMetadataError(
                    f"the model returns its argument {value.target} as it is: leave it out, the caller has it",
                    stage=last,
                )
            source, number = self._origin(value, last)
            if source == last:
                return Own(number)
            if value not in passed:
                passed[value] = Passed(len(self.received[last]) + len(passed))
                wires.append(Wire(source, number, last, passed[value].number))
            return passed[value]

        outputs = tree_map(place, output.args[0])
        leaves = tree_flatten(outputs)[0]
        as_it_is = all(leaf == Own(number) for number, leaf in enumerate(leaves))
        users = sum(node.args[0] is list(self._calls)[last] for node in graph.nodes if node.target is operator.getitem)
        return None if as_it_is and len(leaves) == max(1, users) else outputs


def _inputs(module: nn.Module, call: fx.Node, stage: int) -> dict[str, torch.Tensor]:
    """The submodule's placeholders, with what they looked like when the model was traced."""
    if not isinstance(module, fx.GraphModule):
        raise PipeliningMetadataError(
            f"stage {stage}: expected the fx.GraphModule that pipe.get_stage_module({stage}) gives, got"
            f" {type(module).__qualname__}",
            stage=stage,
        )
    nodes = [node for node in module.graph.nodes if node.op == "placeholder"]
    if len(nodes) != len(call.args):
        raise PipeliningMetadataError(
            f"stage {stage}: the graph of the pipe calls it with {len(call.args)} values, but its module takes {len(nodes)}; is"
            f" this the module of stage {stage}?",
            stage=stage,
        )
    found = {}
    for node in nodes:
        value = node.meta.get("val")
        if value is None:
            raise PipeliningMetadataError(
                f"stage {stage}, input {node.name!r}: the graph does not say what it looks like (no meta['val']); trace the model"
                " with torch.export",
                stage=stage,
            )
        _refuse_dtensor(value, f"stage {stage}, input {node.name!r}", stage)
        found[str(node.target)] = value
    return found


def _check_outputs(module: nn.Module, stage: int, *, is_last: bool) -> None:
    assert isinstance(module, fx.GraphModule)  # its inputs were found
    for number, value in enumerate(tree_flatten(_returned(module))[0]):
        where = f"stage {stage}, output {number}"
        if _is_tensor(value):
            _refuse_dtensor(value.meta["val"], where, stage)
        elif not is_last:
            raise PipeliningMetadataError(
                f"{where} is {value}, of which the graph does not say that it is a tensor; only tensors cross between stages of a"
                " cut model",
                stage=stage,
            )


def _returned(module: fx.GraphModule) -> Any:
    nodes = [node for node in module.graph.nodes if node.op == "output"]
    if len(nodes) != 1:
        raise PipeliningMetadataError(f"expected one output node in a stage's graph, got {len(nodes)}")
    return nodes[0].args[0]


def _is_tensor(value: Any) -> bool:
    return isinstance(value, fx.Node) and isinstance(value.meta.get("val"), torch.Tensor)


def _refuse_dtensor(value: Any, where: str, stage: int) -> None:
    if isinstance(value, DTensor):
        raise PipeliningMetadataError(
            f"{where} is a DTensor, of which a cut model's graph does not say enough: build the stages by hand, with"
            " PipelineStage",
            stage=stage,
        )
