"""Capture: one train step, forward and backward, as one FX graph over parameters without data."""

from __future__ import annotations

import gc
import os
import random
import threading
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import attrs
import torch
from torch import fx, nn
from torch.distributed.tensor import DTensor

from . import _compat as compat
from ._arguments import check_device
from ._graph import Buffer, JointGraph, remove_dead
from ._inputs import DynamicDims, FakeInputs, fake_inputs, size_relations
from ._memory import give_own_memory
from ._recompute import fold_recomputed
from ._refusals import (
    refuse_foreign_parameters,
    refuse_hooks,
    refuse_inner_backward,
    refuse_lost_tensors,
    refuse_sparse_gradients,
)
from ._scopes import Scopes, adopt_owners
from ._table import Parameter, ParameterTable, names_by_tensor, parameter_table
from .exceptions import CaptureError, GraphError

# Ranks may be threads of one process. A capture swaps what a model holds, and undoes it; and a graph, its copies and its stages
# share one mode of example values, which bears one thread at a time.
ONE_AT_A_TIME = threading.RLock()

TrainFn = Callable[..., Any]
"""``train_fn(model, **inputs)`` returns the loss, or ``(loss, {name: value})``."""


def trace(
    model: nn.Module,
    train_fn: TrainFn,
    inputs: Mapping[str, Any],
    *,
    backward: bool = True,
    dynamic: bool = False,
    dynamic_arg_dims: Mapping[str, Sequence[int]] | None = None,
    param_dtype: torch.dtype | None = None,
    cast_inputs_of: Collection[str] = (),
    device: torch.device | str | None = None,
    table: ParameterTable | None = None,
) -> JointGraph:
    """Capture ``train_fn(model, **inputs)`` and its gradients; nothing in the model, its buffers or the generators changes.

    Args:
        model: its parameters may be on the meta device, tied, frozen, or DTensors of tensor parallelism.
        train_fn: returns the loss, or the loss and a dict of named losses.
        inputs: example inputs, nested as you like; what is no tensor is built into the graph.
        backward: whether the graph has gradients; without, it is the evaluation graph.
        dynamic: whether every size from 2 up may change from call to call.
        dynamic_arg_dims: dims that may change, by dotted input name (``"batch.tokens": [0, 1]``).
        param_dtype: dtype of floating-point parameters inside the step; None: as stored.
        cast_inputs_of: with ``param_dtype``, the modules whose floating-point inputs are cast, besides the model's own.
        device: where the step will run; None: where the parameters are.
        table: the parameters, where the model's own are already sharded.

    Example::

        joint = trace(model, lambda model, x, y: F.mse_loss(model(x), y), {"x": x, "y": y})
        print(joint.module.code)

    Raises:
        CaptureError: the step cannot be captured; names the user's line where one is to blame.
    """
    dims = DynamicDims(dynamic, tuple((name, tuple(values)) for name, values in (dynamic_arg_dims or {}).items()))
    with ONE_AT_A_TIME:
        return capture(
            model,
            train_fn,
            inputs,
            make_step=Step,
            backward=backward,
            dims=dims,
            param_dtype=param_dtype,
            cast_inputs_of=cast_inputs_of,
            device=device,
            table=table,
        )


def capture(
    model: nn.Module,
    train_fn: TrainFn,
    inputs: Mapping[str, Any],
    *,
    make_step: type[Step],
    backward: bool,
    dims: DynamicDims,
    param_dtype: torch.dtype | None,
    cast_inputs_of: Collection[str],
    device: torch.device | str | None,
    table: ParameterTable | None,
) -> JointGraph:
    """The graph of what ``make_step`` makes of a model and its train function; see :func:`trace`."""
    env = compat.ShapeEnv(
        duck_shape=False, allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False, specialize_zero_one=True
    )
    mode = compat.ExampleMode(allow_non_fake_inputs=True, shape_env=env)
    refuse_hooks(model)
    table = table or parameter_table(model, param_dtype=param_dtype)
    target = check_device(device) if device is not None else _device_of(model)
    faked = fake_inputs(inputs, mode, dims)
    buffers = names_by_tensor(list(model.named_buffers(remove_duplicate=False)))
    step = make_step(model, train_fn, table, [names for _, names in buffers], faked, backward=backward)
    with torch.inference_mode(mode=False), _untouched(model) as replaced, mode:
        parameters = [p.empty(p.compute_dtype, target).requires_grad_(p.trainable and backward) for p in table]
        fake_buffers = [
            torch.empty_strided(b.shape, b.stride(), dtype=b.dtype, device=target if b.is_meta else b.device)
            for b, _ in buffers
        ]
        with casting(model, cast_inputs_of, param_dtype), step.scopes.watch(model):
            module = _run(step, [*parameters, *fake_buffers, *faked.tensors], plain=not faked.symbols)
    _name_placeholders(module, table, buffers, faked)
    step.scopes.annotate(module.graph)
    adopt_owners(module.graph)
    _own_placeholders(module, table, buffers)
    refuse_foreign_parameters(module)
    refuse_lost_tensors(module, replaced)
    _drop_aliases(module.graph)
    fold_recomputed(module, recomputed=step.scopes.recomputed, mode=mode)
    remove_dead(module.graph)
    guards = faked.guards
    if faked.symbols:
        guards = attrs.evolve(guards, relations=size_relations(env, faked.symbols, dims))
    step.finish(module.graph, mode)
    module.graph.lint()
    joint = JointGraph(
        graph=module.graph,
        root=module,
        table=table,
        buffers=tuple(Buffer(names[0], names[1:], buffer.shape, buffer.dtype) for buffer, names in buffers),
        guards=guards,
        losses=step.losses,
        gradients=step.gradients,
        mode=mode,
        extra_inputs=step.extra_inputs,
        containers=frozenset(
            name for name, m in model.named_modules() if isinstance(m, nn.ModuleList | nn.ModuleDict | nn.Sequential)
        ),
    )
    give_own_memory(joint, range(len(joint.outputs) - len(joint.gradients), len(joint.outputs)))
    return joint


class Step(nn.Module):
    """The function that is traced. A module that holds the model, so that parameters and buffers can be swapped for inputs."""

    def __init__(
        self,
        model: nn.Module,
        train_fn: TrainFn,
        table: ParameterTable,
        buffers: Sequence[tuple[str, ...]],
        faked: FakeInputs,
        *,
        backward: bool,
    ) -> None:
        super().__init__()
        self.model = model
        self.train_fn = train_fn
        self.table = table
        self.buffer_names = buffers
        self.faked = faked
        self.backward = backward
        self.scopes = Scopes()
        self.losses: tuple[tuple[str, Any], ...] = ()
        self.gradients: tuple[str, ...] = ()
        self.extra_inputs: tuple[str, ...] = ()

    def run(self, *flat: torch.Tensor) -> tuple[Any, ...]:
        """The step on flat inputs; what is returned becomes the graph's outputs."""
        values: dict[str, torch.Tensor] = {}
        for parameter, tensor in zip(self.table, flat, strict=False):
            values |= dict.fromkeys(("model." + name for name in parameter.names), as_in_model(parameter, tensor))
        for names, tensor in zip(self.buffer_names, flat[len(self.table) :], strict=False):
            values |= dict.fromkeys(("model." + name for name in names), tensor)
        return torch.func.functional_call(self, values, (flat, values))  # type: ignore[no-any-return]

    def forward(self, flat: tuple[torch.Tensor, ...], values: Mapping[str, torch.Tensor]) -> tuple[Any, ...]:
        parameters = flat[: len(self.table)]
        for parameter, tensor in zip(self.table, parameters, strict=True):
            if tensor.requires_grad:
                tensor.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    refuse_inner_backward(parameter.name)
                )
        leaves = iter(flat[len(self.table) + len(self.buffer_names) :])
        inputs = compat.tree_map_tensors(lambda _: next(leaves), self.faked.tree)
        return self.outputs(parameters, inputs, values)

    def outputs(
        self, parameters: Sequence[torch.Tensor], inputs: dict[str, Any], values: Mapping[str, torch.Tensor]
    ) -> tuple[Any, ...]:
        """Run the train function and take gradients."""
        with torch.set_grad_enabled(self.backward):
            loss, named = as_losses(self.train_fn(self.model, **inputs))
        self.write_replaced_buffers(values)
        self.losses = tuple((name, None if isinstance(v, torch.Tensor) else v) for name, v in named.items())
        outputs = (loss.detach(), *(v.detach() for v in named.values() if isinstance(v, torch.Tensor)))
        if not self.backward:
            return outputs
        wanted = [(p, t) for p, t in zip(self.table, parameters, strict=True) if t.requires_grad]
        if not wanted:
            raise CaptureError(
                "no parameter of the model is trainable; set requires_grad, or trace with backward=False"
            )
        if not loss.requires_grad:
            raise CaptureError("the loss does not depend on any trainable parameter")
        self.scopes.start_backward([loss])
        gradients = torch.autograd.grad(loss, [t for _, t in wanted], allow_unused=True)
        found = [(p.name, g) for (p, _), g in zip(wanted, gradients, strict=True) if g is not None]
        refuse_sparse_gradients(found)
        self.gradients = tuple(name for name, _ in found)
        return (*outputs, *(g for _, g in found))

    def finish(self, graph: fx.Graph, mode: compat.ExampleMode) -> None:
        """A last word about the captured graph."""

    def write_replaced_buffers(self, values: Mapping[str, torch.Tensor]) -> None:
        """A buffer that the model replaced (``self.count = self.count + 1``) is written into the one that came in."""
        for names in self.buffer_names:
            module_name, _, attribute = names[0].rpartition(".")
            now = self.model.get_submodule(module_name)._buffers.get(attribute)
            before = values["model." + names[0]]
            if now is not None and now is not before:
                if now.shape != before.shape or now.dtype != before.dtype:
                    raise CaptureError(
                        f"the step replaces buffer {names[0]} ({tuple(before.shape)}, {before.dtype}) by one of"
                        f" {tuple(now.shape)}, {now.dtype}; a graph can only keep its shape and dtype"
                    )
                with torch.no_grad():
                    before.copy_(now)


def as_in_model(parameter: Parameter, tensor: torch.Tensor) -> torch.Tensor:
    """What the model's code sees: with tensor parallelism a DTensor around this rank's part."""
    layout = parameter.tensor_parallel
    if layout is None:
        return tensor
    return DTensor.from_local(
        tensor,
        layout.mesh,
        layout.placements,
        run_check=False,
        shape=torch.Size(layout.shape),
        stride=layout.stride,
    )


def as_losses(result: Any) -> tuple[torch.Tensor, dict[str, Any]]:
    """What a train function returned as the loss and the named losses.

    Raises:
        CaptureError: it is neither a loss nor a loss and named losses.
    """
    named: Any = {}
    loss = result
    if isinstance(result, tuple) and len(result) == 2:
        loss, named = result
    if isinstance(loss, DTensor):
        loss = loss.full_tensor()
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.is_floating_point():
        what = f"{loss.dtype} of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise CaptureError(
            f"train_fn must return a loss of one floating-point element, or (loss, {{name: value}}); got {what}"
        )
    if not isinstance(named, Mapping):
        raise CaptureError(f"named losses must be a mapping of names to values; got {type(named).__name__}")
    for name, value in named.items():
        if not isinstance(value, torch.Tensor | int | float):
            raise CaptureError(f"named loss {name!r} must be a tensor or a number; got {type(value).__name__}")
    named = {str(k): v.full_tensor() if isinstance(v, DTensor) else v for k, v in named.items()}
    return loss.reshape(()), named


def _run(step: Step, flat: Sequence[torch.Tensor], *, plain: bool) -> fx.GraphModule:
    try:
        with nullcontext() if plain else compat.enable_python_dispatcher(), _without_onednn(), _uncollected():
            return compat.record(step.run, flat, plain=plain)
    except GraphError as error:
        line = _user_line(error)
        if isinstance(error, CaptureError) and error.filename is None and line is not None and "backward" in str(error):
            raise CaptureError(f"{error}; at {_shown(line)}", filename=line.filename, lineno=line.lineno) from error
        raise
    except Exception as error:
        line = _user_line(error)
        where = f" at {_shown(line)}" if line is not None else ""
        raise CaptureError(
            f"the train step cannot be captured{where}: {_explain(error)}",
            filename=None if line is None else line.filename,
            lineno=None if line is None else line.lineno,
        ) from error


@contextmanager
def _uncollected() -> Iterator[None]:
    """A capture makes millions of objects and little garbage: looking for cycles again and again costs a quarter of its time."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


@contextmanager
def _without_onednn() -> Iterator[None]:
    """Capture recurrent layers as plain operators: oneDNN's fused one hides the workspace that its backward needs."""
    before = torch.backends.mkldnn.enabled
    torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.backends.mkldnn.enabled = before


_REASONS = {
    "DataDependentOutputException": (
        "it reads a number out of a tensor (a Python branch on its value, .item(), int(), bool()), and a captured step has"
        " no values yet; use torch.where, or move the decision out of the step"
    ),
    "GuardOnDataDependentSymNode": (
        "it branches on a number that depends on the data; use torch.where, or move the decision out of the step"
    ),
    "DynamicOutputShapeException": (
        "it makes a tensor whose shape depends on the data (a boolean mask, nonzero, unique); use a mask of fixed shape"
    ),
}


def _explain(error: Exception) -> str:
    reason = _REASONS.get(type(error).__name__)
    return reason or f"{type(error).__name__}: {error}"


def _user_line(error: BaseException) -> traceback.FrameSummary | None:
    """The innermost line of the traceback that is neither Python's, nor torch's, nor ours."""
    ours = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(__file__) + os.sep, "<")
    library = os.path.dirname(os.__file__) + os.sep
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        standard = frame.filename.startswith(library) and "site-packages" not in frame.filename
        if not standard and not frame.filename.startswith(ours):
            return frame
    return None


def _shown(line: traceback.FrameSummary) -> str:
    return f"{line.filename}:{line.lineno}" + (f" ({line.line})" if line.line else "")


@contextmanager
def _untouched(model: nn.Module) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Whatever the step does to the model's attributes, or draws, is undone.

    Gives, in the end, the tensors that the step put others in the place of, each with its name; buffers are not among them.
    """
    before = [
        (m, dict(m.__dict__), {k: dict(v) for k, v in m.__dict__.items() if type(v) is dict}) for m in model.modules()
    ]
    plain = [
        (f"{path}.{name}" if path else name, m, name, value)
        for path, m in model.named_modules()
        for name, value in m.__dict__.items()
        if type(value) is torch.Tensor
    ]
    python_state = random.getstate()
    replaced: list[tuple[str, torch.Tensor]] = []
    try:
        with torch.random.fork_rng(devices=[]):
            yield replaced
    finally:
        random.setstate(python_state)
        replaced += [(path, value) for path, m, name, value in plain if m.__dict__.get(name) is not value]
        for module, attributes, dicts in before:
            for name, content in dicts.items():
                now = attributes[name]
                if list(now) != list(content) or any(now[key] is not value for key, value in content.items()):
                    attributes[name].clear()
                    attributes[name].update(content)
            module.__dict__.clear()
            module.__dict__.update(attributes)


@contextmanager
def casting(model: nn.Module, names: Collection[str], dtype: torch.dtype | None) -> Iterator[None]:
    """Cast the floating-point inputs of the model and of the named modules, as mixed precision of FSDP2 does."""
    if dtype is None:
        yield
        return

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    def hook(_: nn.Module, args: Any, kwargs: Any) -> Any:
        return compat.tree_map_tensors(cast, args), compat.tree_map_tensors(cast, kwargs)

    modules = [model, *(module for name, module in model.named_modules() if name and name in names)]
    handles = [module.register_forward_pre_hook(hook, with_kwargs=True) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _device_of(model: nn.Module) -> torch.device:
    for tensor in (*model.parameters(), *model.buffers()):
        if not tensor.is_meta:
            return tensor.device
    return torch.device("cpu")


def _name_placeholders(
    module: fx.GraphModule,
    table: ParameterTable,
    buffers: Sequence[tuple[torch.Tensor, tuple[str, ...]]],
    faked: FakeInputs,
) -> None:
    """Give inputs their own names and the graph flat inputs and outputs."""
    names = [
        *("p_" + name for name in table.names),
        *("b_" + names[0] for _, names in buffers),
        *("i_" + name for name in faked.guards.tensor_names),
    ]
    graph = module.graph
    graph.set_codegen(fx.graph.CodeGen())
    for node, name in zip(graph.find_nodes(op="placeholder"), names, strict=True):
        clean = "".join(c if c.isalnum() else "_" for c in name)
        node._rename(clean)
        node.target = node.name
        node.meta["input"] = name
    for node in graph.nodes:
        node.meta.pop("tensor_meta", None)
        if node.op == "call_function":
            node.meta.setdefault("val", None)  # of operators that only write, such as torch._foreach_add_


def _own_placeholders(
    module: fx.GraphModule, table: ParameterTable, buffers: Sequence[tuple[torch.Tensor, tuple[str, ...]]]
) -> None:
    owners = [name.rpartition(".")[0] for name in (*table.names, *(names[0] for _, names in buffers))]
    for node, owner in zip(module.graph.find_nodes(op="placeholder"), owners, strict=False):
        node.meta["fqn"] = owner


def _drop_aliases(graph: fx.Graph) -> None:
    """``detach`` and ``alias`` say nothing in a graph that autograd never sees."""
    for node in list(graph.nodes):
        if node.target in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
