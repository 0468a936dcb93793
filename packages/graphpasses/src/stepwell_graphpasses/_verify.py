"""Is a compiled step what it claims to be? Rules of the graph, agreement of ranks, and numbers against eager."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from . import _compat as compat
from ._compiler import GraphCompiler
from ._executable import StepOutput
from ._lint import lint
from ._live import LiveModel
from ._signature import Entry, agree, signature
from ._table import Parameter
from ._trace import as_in_model, as_losses, casting
from ._variants import FULL, FULL_AFTER_NONE, FULL_AFTER_SCATTER, NONE, SCATTER
from .exceptions import GraphError, NumericsError

FAILED = "found a fault, so all ranks raise"


@attrs.frozen
class Verification:
    """What was found right.

    Attributes:
        collectives: number of collectives of a step that all ranks agree on.
        loss_error: largest difference of the loss against eager; None where numbers were not checked.
        gradient_errors: for each parameter the largest difference of its gradient, relative to its largest element.
    """

    collectives: int
    loss_error: float | None
    gradient_errors: Mapping[str, float]


def verify(
    compiler: GraphCompiler, inputs: Mapping[str, Any] | None = None, *, tolerance: float | None = None
) -> Verification:
    """Check a compiled step; collective. The model, its gradients, its buffers and the generators stay as they are.

    The graphs of accumulation are checked with it. Numbers are those of loss, named losses, gradients and buffers after one step.

    Args:
        compiler: compiled.
        inputs: this rank's batch for the numeric check; None: structure only (all that fake process groups allow).
        tolerance: largest relative error of a gradient; None: what the coarsest dtype on its way explains.

    Example::

        print(verify(compiler, batch).gradient_errors)

    Raises:
        LintError: the graph breaks a rule.
        PeerMismatchError: ranks have other collectives, or the same in another order, or on other data; or another rank found a
            fault.
        GuardError: there is no graph for the inputs.
        NumericsError: loss, gradients or buffers differ from eager by more than the tolerance.
    """
    carried = (SCATTER, FULL_AFTER_SCATTER) if compiler.config.grad_sync == "scatter" else (NONE, FULL_AFTER_NONE)
    error: Exception | None = None
    signatures: list[tuple[Entry, ...]] = []
    compiler.prepare(*carried)
    try:
        if inputs is not None and not compiler.accepts(inputs):
            compiler.graph().guards.flatten(inputs)
        for variant in (FULL, *carried):
            joint = compiler.graph(variant)
            lint(joint)
            signatures.append(signature(joint))
    except GraphError as problem:
        error = problem
    agree(compiler.topology, error, tuple(itertools.chain(*signatures)), failed=FAILED)
    if inputs is None:
        return Verification(len(signatures[0]), None, {})
    with _restored(compiler) as left:
        got = compiler.run(inputs, FULL)
    with _restored(compiler) as expected_left:
        loss, losses, expected = _eager(compiler, compiler.live, inputs)
    try:
        loss_error, errors = _compare(compiler, got, loss, losses, expected, left, expected_left, tolerance)
    except NumericsError as problem:
        error = problem
    agree(compiler.topology, error, (), failed=FAILED)
    return Verification(len(signatures[0]), loss_error, errors)


def _compare(
    compiler: GraphCompiler,
    got: StepOutput,
    loss: torch.Tensor,
    losses: Mapping[str, Any],
    expected: Mapping[str, torch.Tensor],
    left: Mapping[str, torch.Tensor],
    expected_left: Mapping[str, torch.Tensor],
    tolerance: float | None,
) -> tuple[float, dict[str, float]]:
    """Errors of the loss and of gradients.

    Raises:
        NumericsError: something differs by more than the tolerance.
    """
    live, config, joint = compiler.live, compiler.config, compiler.graph()
    errors = {}
    for name, gradient in got.gradients.items():
        reference = expected.get(name)
        if reference is None:
            reference = torch.zeros(joint.table[name].shape, device=gradient.device)
        if compiler.layouts[name].sharded:
            rows = live.rows(joint.table[name])
            reference, gradient = reference[rows], gradient[: rows.stop - rows.start]
        scale = max(float(expected[name].abs().max()), 1e-12) if name in expected else 1.0
        errors[name] = float((gradient - reference).abs().max()) / scale if gradient.numel() else 0.0
    if missing := sorted(set(expected) - set(errors)):
        raise NumericsError(f"eager has gradients that the graph has not: {', '.join(missing)}", errors=errors)
    loss_error = float((got.loss - loss).abs())
    dtypes = {torch.float32, *(parameter.compute_dtype for parameter in joint.table if parameter.trainable)}
    dtypes |= {config.reduce_dtype} if config.reduce_dtype is not None else set()
    limit = tolerance if tolerance is not None else 64 * max(torch.finfo(dtype).eps for dtype in dtypes)
    others = {f"the named loss {name}": (got.losses.get(name), value) for name, value in losses.items()}
    others |= {f"the buffer {name}": (left.get(name), value) for name, value in expected_left.items()}
    wrong = {name: error for name, error in errors.items() if not error <= limit}
    odd = [what for what, (ours, theirs) in others.items() if not _close(ours, theirs, limit)]
    if wrong or odd or not loss_error <= limit * max(1.0, abs(float(loss))):
        worst = ", ".join(
            f"{name} by {error:.1e}" for name, error in sorted(wrong.items(), key=lambda item: -item[1])[:5]
        )
        also = f"; also {', '.join(odd[:5])}" if odd else ""
        raise NumericsError(
            f"the graph differs from eager by more than {limit:.1e}: loss by {loss_error:.1e}; gradients:"
            f" {worst or 'none'}{also}. If the dtypes on the way explain that, give a larger tolerance; else compile with"
            " passes=[DataParallelPass()] and add the others one by one",
            errors=errors,
        )
    return loss_error, errors


def _close(ours: Any, theirs: Any, limit: float) -> bool:
    if not isinstance(theirs, torch.Tensor) or not isinstance(ours, torch.Tensor):
        return bool(ours == theirs)
    exact = not theirs.is_floating_point() or theirs.element_size() == 1  # nothing is computed in float8
    if ours.shape != theirs.shape or exact:
        return torch.equal(ours, theirs)
    scale = max(1.0, float(theirs.abs().max())) if theirs.numel() else 1.0
    return torch.allclose(ours.to(theirs.dtype), theirs, rtol=0.0, atol=limit * scale, equal_nan=True)


class _Eager(nn.Module):
    def __init__(self, model: nn.Module, train_fn: Any) -> None:
        super().__init__()
        self.model, self.train_fn = model, train_fn

    def forward(self, inputs: Mapping[str, Any]) -> Any:
        return self.train_fn(self.model, **inputs)


def _eager(
    compiler: GraphCompiler, live: LiveModel, inputs: Mapping[str, Any]
) -> tuple[torch.Tensor, Mapping[str, Any], dict[str, torch.Tensor]]:
    """Loss and named losses of this rank's batch, and gradients reduced over all ranks, by autograd on whole parameters."""
    trainable = live.trainable()
    leaves: dict[str, torch.Tensor] = {}
    values: dict[str, torch.Tensor] = {}
    for parameter in live.table:
        whole = _whole(live, parameter)
        leaf = leaves[parameter.name] = (
            whole.detach().to(parameter.compute_dtype).requires_grad_(trainable[parameter.name])
        )
        values |= dict.fromkeys(("model." + name for name in parameter.names), as_in_model(parameter, leaf))
    units = {layout.unit for layout in live.layouts.values()}
    with casting(compiler.model, units, compiler.config.param_dtype):
        result = torch.func.functional_call(
            _Eager(compiler.model, compiler.train_fn), values, (dict(inputs),), strict=False
        )
    loss, losses = as_losses(result)
    wanted = [name for name, on in trainable.items() if on]
    gradients = torch.autograd.grad(loss, [leaves[name] for name in wanted], allow_unused=True)
    found = {}
    for name, gradient in zip(wanted, gradients, strict=True):
        if gradient is not None:
            wide = torch.promote_types(gradient.dtype, torch.float32)  # what float64 or a complex number has is kept
            found[name] = _reduced(compiler, gradient.to(wide)).to(live.table[name].dtype)
    return loss.detach(), losses, found


def _whole(live: LiveModel, parameter: Parameter) -> torch.Tensor:
    """A parameter as it was before data parallelism cut it."""
    tensor = live.parameter(parameter.name)
    local = (compat.local_part(tensor) if isinstance(tensor, DTensor) else tensor).detach()
    layout, topology = live.layouts[parameter.name], live.topology
    if not layout.sharded or topology is None or topology.shard_axis is None:
        return local
    padded = local.new_zeros((layout.padded_rows, *parameter.shape[1:]))
    padded[: local.shape[0]] = local
    parts = [torch.empty_like(padded) for _ in layout.rows]
    as_bytes = [part.view(torch.uint8) for part in (*parts, padded)]  # a backend may not know the dtype
    dist.all_gather(as_bytes[:-1], as_bytes[-1], group=topology.mesh.get_group(topology.shard_axis))
    return torch.cat([part[:rows] for part, rows in zip(parts, layout.rows, strict=True)])


def _reduced(compiler: GraphCompiler, gradient: torch.Tensor) -> torch.Tensor:
    gradient = gradient.contiguous()
    ranks = 1
    if compiler.topology is not None:
        ranks = compiler.topology.degrees.total
        for axis in compiler.topology.axis_names:
            dist.all_reduce(gradient, group=compiler.topology.mesh.get_group(axis))
    reduce = compiler.config.reduce
    return gradient / (ranks if reduce == "avg" else 1 if reduce == "sum" else reduce)


@contextmanager
def _restored(compiler: GraphCompiler) -> Iterator[dict[str, torch.Tensor]]:
    """Buffers and generators are set back at the end; gives what buffers were by then."""
    model, device = compiler.model, compiler.device
    before = [
        (module, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]
    left: dict[str, torch.Tensor] = {}
    own_generator = () if device.type == "cpu" else (device,)
    with torch.random.fork_rng(own_generator, device_type="cuda" if device.type == "cpu" else device.type):
        try:
            yield left
            left |= {name: buffer.clone() for name, buffer in model.named_buffers()}
        finally:
            with torch.no_grad():
                for module, name, buffer, value in before:
                    if not torch.equal(buffer, value):  # one that is expanded could not be written to
                        buffer.copy_(value)
                    setattr(module, name, buffer)  # the model may have put another tensor there
