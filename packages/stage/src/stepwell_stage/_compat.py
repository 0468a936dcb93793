"""Every name of torch that is not public, in one place.

* ``torch.ops.aten._unsafe_view`` (seen in 2.13): a reshape that autograd does not track as a view. Without it,
  :func:`non_leaf` falls back to a copy, which is right but costs one.
* ``torch.autograd.graph._engine_run_backward`` (seen in 2.13): autograd's engine, with what compiled functions need to know
  around it, and without the checks of ``torch.autograd.backward``, which take as long as a small graph's backward and refuse
  gradients that the engine itself would sum over broadcast dims. Without it :func:`run_backward` takes the engine itself.
* ``_raw_saved_*`` of autograd's nodes and ``unpack_hook`` of what they give (seen in 2.13): whether hooks stand between a
  node and what it saved. Without it, :func:`has_saved_tensor_hooks` says yes, so that no node's backward is split.
* ``hooks_dict_ref`` of what takes a hook off again (seen in 2.13): the other hooks of a node. Without it, :func:`has_post_hooks`
  says yes, likewise.
* ``reducer.prepare_for_backward`` and ``require_forward_param_sync`` of DistributedDataParallel (seen in 2.13): what
  arms its one reduction, and its broadcast of buffers. Without them a DDP stage cannot run in a pipeline.
* ``_get_fsdp_state`` of FSDP2 modules, and of the state ``_fsdp_param_groups``, ``_is_root`` and
  ``_root_post_backward_final_callback`` (seen in 2.13; before, ``_fsdp_param_group``, one or None): what reduces the gradients.
  Without them an FSDP2 stage cannot run in a pipeline.
* ``torch.distributed._composable.replicate_with_fsdp.ReplicateModule`` (seen in 2.13): FSDP2 modules that are not sharded, and
  refuse to be told when to reshard. Without it there are no such modules.
* ``torch.distributed._composable.replicate.DDP`` (seen in 2.13): the class that marks modules under the replicate() made
  of DDP. Without it there are no such modules.
* ``_forward_hooks``, ``_forward_pre_hooks``, ``_backward_hooks`` and ``_backward_pre_hooks`` of modules (seen in 2.13): whether a
  call does more than the forward. Without them :func:`has_hooks` says no.
* ``_orig_mod.`` and ``_checkpoint_wrapped_module.`` in names (seen in 2.13): what torch.compile and the activation
  checkpointing wrapper put there, and torch's own state dicts leave out. Without them :func:`plain_name` changes nothing.
* ``torch.autograd.profiler._is_profiler_enabled`` (seen in 2.13): whether a profiler runs. Without it :func:`is_profiling`
  says no, and profiles show no ranges of a plan.
* ``torch._subclasses.fake_tensor`` (seen in 2.13): tensors without data, and the errors of those who look for it; and the log of
  that name, where torch says with a traceback what operation it could not run on them. Without it there is no
  :func:`stepwell_stage.split`.
* ``_len_torch_function_stack``, ``_pop_torch_function_stack`` and ``_push_on_torch_function_stack`` of ``torch._C`` (seen in
  2.13): which function mode sees an operation first, and what takes it away for the time of a unit. Without them there is no
  :func:`stepwell_stage.split` either.
* ``torch.utils._python_dispatch.TorchDispatchMode`` (seen in 2.13): sees which operations draw random numbers. Likewise, and on
  ranks that are threads no steps.
* ``torch._C._autograd._top_saved_tensors_default_hooks`` (seen in 2.13): whether what is computed is computed again in backward.
  Without it :func:`is_in_checkpoint` does not see checkpoints that are hooks of a module. With ``_pop_`` and ``_push_`` of it,
  :func:`unsaved` keeps absent tensors out of checkpoints; without it they are in them.
* ``torch._C._functorch.is_functorch_wrapped_tensor`` (seen in 2.13): whether a tensor is in a transform such as vmap. Likewise.
* ``_is_param`` of tensors (seen in 2.13): what makes a tensor of another class than torch's own a parameter. Likewise.
* ``torch.utils._pytree`` (seen in 2.13): torch's own flattening of nested containers. Without it there is no fallback:
  torch itself does not work without it either.

The schedules of ``torch.distributed.pipelining`` call private methods of stages: those in ``run/_torch_stage.py`` (seen in 2.13).
:func:`is_torch_stage_name` says whether a name that is not there is one of them, for a message. To let the stages vote, schedules
ask whether they are torch's own; :func:`join_torch_stages` makes ours such. Without it, nothing is voted on, and the first
microbatch always runs through.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import threading
from collections.abc import Iterator, Sequence
from types import FrameType, NoneType
from typing import Any

import torch
import torch.utils.checkpoint
from torch import nn
from torch._C import _len_torch_function_stack, _pop_torch_function_stack, _push_on_torch_function_stack
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
)
from torch.autograd.graph import GradientEdge, Node
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

try:
    from torch.distributed._composable.replicate import DDP as _ReplicatedByDdp
except ImportError:
    _ReplicatedByDdp = None  # type: ignore[assignment,misc]
try:
    from torch.distributed._composable.replicate_with_fsdp import ReplicateModule as _ReplicateModule
except ImportError:
    _ReplicateModule = None  # type: ignore[assignment,misc]

__all__ = [
    "DATA_ERRORS",
    "FakeTensor",
    "FakeTensorMode",
    "TorchDispatchMode",
    "has_hooks",
    "has_post_hooks",
    "has_saved_tensor_hooks",
    "hold_back_fsdp",
    "is_ddp_replicated",
    "is_in_checkpoint",
    "is_own_attribute",
    "is_profiling",
    "is_torch_stage_name",
    "is_transformed",
    "join_torch_stages",
    "mark_as_parameter",
    "non_leaf",
    "plain_name",
    "pop_function_mode",
    "push_function_mode",
    "quiet_fakes",
    "reduce_ddp",
    "reduce_fsdp",
    "run_backward",
    "takes_forward_derivative",
    "tree_flatten",
    "tree_map",
    "tree_unflatten",
]


DATA_ERRORS = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedFakeTensorException)


def is_own_attribute(name: str) -> bool:
    """Whether an attribute of a fake tensor is not torch's but what a model has put there."""
    return not name.startswith("_") and name not in FakeTensor.__annotations__ and not hasattr(FakeTensor, name)


class _NotHere(logging.Filter):
    """Lets pass what other threads say."""

    def __init__(self) -> None:
        super().__init__()
        self._thread = threading.get_ident()

    def filter(self, record: logging.LogRecord) -> bool:
        return record.thread != self._thread


@contextlib.contextmanager
def quiet_fakes() -> Iterator[None]:
    """Meanwhile torch does not log what fails on fake tensors in this thread: whoever tries handles it."""
    log, not_here = logging.getLogger(FakeTensor.__module__), _NotHere()
    log.addFilter(not_here)
    try:
        yield
    finally:
        log.removeFilter(not_here)


def pop_function_mode() -> TorchFunctionMode | None:
    """Take away the function mode that sees the next operation first, if there is any."""
    return _pop_torch_function_stack() if _len_torch_function_stack() else None


def push_function_mode(mode: TorchFunctionMode) -> None:
    """Let a function mode see the next operation first."""
    _push_on_torch_function_stack(mode)


def is_transformed(tensor: torch.Tensor) -> bool:
    """Whether a tensor is within a transform of ``torch.func``, such as vmap."""
    found: bool = is_functorch_wrapped_tensor(tensor)
    return found


def takes_forward_derivative() -> bool:
    """Whether a derivative is being taken in forward mode, on any thread: torch keeps its level for the whole process."""
    return torch.autograd.forward_ad._current_level >= 0


_top_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda _: ())
_REENTRANT = torch.utils.checkpoint.CheckpointFunction.forward.__code__  # what it runs has neither gradients nor hooks


def is_in_checkpoint() -> bool:
    """Whether what is computed now is in an activation checkpoint of torch's, which may compute it again in backward.

    One that is not reentrant never does where it began without gradients: it sets no hooks then.
    """
    hooks = _top_hooks(True)
    if hooks and getattr(hooks[0], "__module__", None) == torch.utils.checkpoint.__name__:
        return True
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not (
        frame.f_code is _REENTRANT if hooks is None else frame.f_code.co_filename == torch.utils.checkpoint.__file__
    ):
        frame = frame.f_back
    return frame is not None


@contextlib.contextmanager
def unsaved() -> Iterator[None]:
    """What is computed meanwhile is not seen by hooks on what is saved for backward, such as those of a checkpoint around it."""
    hooks = []
    while top := _top_hooks(True):
        hooks.append(top)
        torch._C._autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pack, unpack in reversed(hooks):
            torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)


def mark_as_parameter(tensor: torch.Tensor) -> None:
    """Let a tensor of another class than torch's own be an ``nn.Parameter``."""
    tensor._is_param = True


def is_profiling() -> bool:
    """Whether a profiler of torch's is active in this process, on whatever thread."""
    return getattr(torch.autograd.profiler, "_is_profiler_enabled", False)


_unsafe_view = getattr(torch.ops.aten, "_unsafe_view", None)
_FEW = 1024


def non_leaf(leaf: torch.Tensor) -> torch.Tensor:
    """The values of ``leaf`` as a tensor that is no leaf of the autograd graph and no view; in the same memory if they are many.

    In one process a layer may change its input in place, since the input is another layer's result. Leaves and their views
    refuse that, so a stage does not hand the leaf itself to its module. A few values are copied sooner than the operator, which
    torch offers no method for, is looked up.
    """
    if _unsafe_view is None or (type(leaf) is torch.Tensor and leaf.numel() <= _FEW and leaf.is_contiguous()):
        return leaf.clone()
    result: torch.Tensor = _unsafe_view(leaf, leaf.shape)
    return result


_run_engine = getattr(
    torch.autograd.graph, "_engine_run_backward", torch.autograd.Variable._execution_engine.run_backward
)


def run_backward(
    roots: Sequence[torch.Tensor | GradientEdge],
    grads: Sequence[torch.Tensor | None],
    *,
    leaves: Sequence[torch.Tensor | GradientEdge] | None = None,
    keep_graph: bool = False,
) -> None:
    """``torch.autograd.backward`` of roots that require grad; the engine itself compares the gradients with the roots.

    Args:
        roots: where it starts.
        grads: the gradient of each root; None for one, where it is a scalar tensor.
        leaves: which leaves it makes gradients for; None for all.
        keep_graph: whether the graph can be run again.
    """
    if NoneType in map(type, grads):
        torch.autograd.backward(roots, grads, retain_graph=keep_graph, inputs=leaves)  # type: ignore[arg-type]
        return
    wanted = () if leaves is None else tuple(leaves)
    _run_engine(tuple(roots), tuple(grads), keep_graph, False, wanted, allow_unreachable=True, accumulate_grad=True)


def has_post_hooks(node: Node) -> bool:
    """Whether hooks look at, or change, the gradients that a node of the autograd graph makes (``Node.register_hook``).

    Asked by a hook that is taken off again, which leaves the engine an empty list of them to go through: under 1 µs a node.
    """
    mine = node.register_hook(id)
    hooks: Any = getattr(mine, "hooks_dict_ref", lambda: None)()
    mine.remove()
    return hooks is None or len(hooks) > 0


def has_saved_tensor_hooks(node: Node) -> bool:
    """Whether a node of the autograd graph saved tensors under ``torch.autograd.graph.saved_tensors_hooks``."""
    for name in _saved_names(type(node)):
        saved = getattr(node, name)
        for tensor in saved if isinstance(saved, tuple) else (saved,):
            if getattr(tensor, "unpack_hook", node) is not None:
                return True
    return False


def join_torch_stages(kind: type) -> None:
    """Make a class count as one of torch's pipeline stages, where its schedules are in use."""
    module = sys.modules.get("torch.distributed.pipelining")
    if module is not None and not issubclass(kind, module.PipelineStage):
        module.PipelineStage.register(kind)


def is_torch_stage_name(name: str) -> bool:
    """Whether torch's pipeline stages have a method or property of this name."""
    module = sys.modules.get("torch.distributed.pipelining")
    return module is not None and hasattr(module.PipelineStage, name)


@functools.cache
def _saved_names(kind: type) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))


def is_ddp_replicated(module: nn.Module) -> bool:
    """Whether a module was given to the composable ``replicate()`` that is made of DDP."""
    return _ReplicatedByDdp is not None and isinstance(module, _ReplicatedByDdp)


class _Touch(torch.autograd.Function):
    """A scalar that depends on parameters and whose backward gives them nothing: only DDP's hooks on them run."""

    @staticmethod
    def forward(ctx: Any, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.count = len(parameters)
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return (None,) * ctx.count


def reduce_ddp(module: DistributedDataParallel, parameters: Sequence[torch.Tensor]) -> None:
    """Average accumulated gradients over a DDP module's replicas, in its own buckets and with its own hooks.

    Args:
        module: the module; its forwards and backwards ran under ``no_sync()``.
        parameters: those that have a gradient. Of others DDP finds out whether a replica used them.
    """
    with torch.enable_grad():
        touched = _Touch.apply(*parameters)  # type: ignore[no-untyped-call]
    module.reducer.prepare_for_backward([touched])
    touched.backward()
    module.require_forward_param_sync = (
        True  # the next forward brings the replicas' buffers together, as after a plain step
    )


def hold_back_fsdp(module: FSDPModule) -> None:
    """Let an FSDP2 module's hooks neither reshard nor reduce, until :func:`reduce_fsdp`."""
    if _ReplicateModule is None or not isinstance(module, _ReplicateModule):
        module.set_reshard_after_forward(False, recurse=False)
    module.set_reshard_after_backward(False, recurse=False)
    module.set_requires_gradient_sync(False, recurse=False)


def reduce_fsdp(modules: Sequence[FSDPModule]) -> None:
    """Reduce accumulated gradients of FSDP2 modules, and end what FSDP2 takes for one backward.

    Args:
        modules: in the order of ``modules()``; held back, and held back again afterwards.
    """
    for module in modules:
        module.set_is_last_backward(True)
        module.set_requires_gradient_sync(True, recurse=False)
    states = [module._get_fsdp_state() for module in modules]
    for state in reversed(states):
        groups = getattr(state, "_fsdp_param_groups", None)
        for group in [state._fsdp_param_group] if groups is None else reversed(groups):
            if group is not None:
                group.post_backward()
    for state in states:
        if state._is_root:
            state._root_post_backward_final_callback()
    for module in modules:
        module.set_requires_gradient_sync(False, recurse=False)


def plain_name(name: str) -> str:
    """The name of a parameter or buffer without what wrappers put into it."""
    return name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")


def has_hooks(module: nn.Module) -> bool:
    """Whether calling the module runs hooks beside its forward."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(module, kind, None) for kind in kinds)
