"""The gradient's norm over the whole model, and clipping by it.

Each rank takes the norm of each of its parameters' gradients; rank 0 takes the norm of these norms, in the order of the stages,
and tells every rank. That is what torch does in one process, in the same order if the stages hold the parameters in the order of
``model.parameters()``: then the result is the same to the last bit on the CPU. On accelerators, whose kernels may add in another
order when they take many norms at once, and for sharded parameters, it agrees up to rounding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf

import attrs
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from stepwell_meta import decode, encode
from stepwell_p2p import Transport

from ..exceptions import NonFiniteNormError, StageUsageError
from ._stage import PipelineStage
from ._whole import Stages, Word, decide, find, module_of, stages_of, transport_of


def clip_grad_norm_(
    stages: Stages,
    max_norm: float,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
    transport: Transport | None = None,
) -> torch.Tensor:
    """Scale all gradients of the model down so that their norm is at most ``max_norm``.

    As ``torch.nn.utils.clip_grad_norm_`` on the whole model in one process: over all stages, tied parameters counted once, and
    over the shards of parameters that are DTensors. A collective of all ranks of the pipeline (and of the shards' meshes); a rank
    without gradients takes part too. Call it between the step and the optimizer's. ``max_norm=inf`` only computes the norm.

    With scaled losses, unscale first. The norm is the same on every rank, so a rule that skips the optimizer's step where it is
    not finite skips it on all.

    Example::

        executor.step(inputs, target=target)
        clip_grad_norm_(executor, 1.0)
        optimizer.step()

    Args:
        stages: this rank's executor, stage or stages.
        max_norm: the greatest norm.
        norm_type: p of the p-norm, greater than 0, or ``inf``.
        error_if_nonfinite: whether a norm that is infinite or not a number is an error, before any gradient is changed.
        transport: joins the ranks; by default that of the executor or the stages.

    Returns:
        The norm before clipping, a scalar on this rank's device, the same number on every rank.

    Raises:
        StageUsageError: ``norm_type`` is no order of a norm, or a stage's parameters cannot be listed.
        NonFiniteNormError: see ``error_if_nonfinite``; on every rank.
    """
    order = float(norm_type)
    if not order > 0:
        raise StageUsageError(f"norm_type must be greater than 0, or inf, got {norm_type}")
    own = stages_of(stages)
    device = own[0].device if own else torch.device("cpu")
    problem: str | None = None
    norms: list[_Norm] = []
    parameters: list[nn.Parameter] = []
    try:
        counted, parameters = _listed(own)
        norms = _norms(counted, order)
    except StageUsageError as error:
        problem = str(error)
    values = (
        torch.stack([norm.value.double().to(device) for norm in norms]) if norms else torch.zeros(0, dtype=torch.double)
    )
    word = encode((problem, tuple((norm.stage, norm.value.dtype) for norm in norms))), [values]

    def combine(words: Sequence[Word]) -> Word:
        return _combine(words, order, device)

    payload, (total,) = decide(transport_of(stages, transport), word, combine)
    found = decode(payload)
    if found is not None:
        raise StageUsageError(found)
    total = total.to(device)
    if error_if_nonfinite and not torch.isfinite(total):
        raise NonFiniteNormError(
            f"the gradients' norm of order {order:g} is {total.item()}, so they cannot be clipped by it; skip this step on every"
            " rank, or leave error_if_nonfinite out to scale by it all the same",
            norm=total.item(),
        )
    by_mesh: dict[DeviceMesh | None, list[nn.Parameter]] = {}
    for parameter in parameters:
        by_mesh.setdefault(parameter.device_mesh if isinstance(parameter, DTensor) else None, []).append(parameter)
    for together in by_mesh.values():
        nn.utils.clip_grads_with_norm_(together, max_norm, total)
    return total


@attrs.frozen(eq=False)
class _Norm:
    """The norm of one parameter's gradient."""

    stage: int
    value: torch.Tensor


def _listed(stages: Sequence[PipelineStage]) -> tuple[list[tuple[int, nn.Parameter]], list[nn.Parameter]]:
    """The parameters that this rank counts, with their stages, and all that it scales; each once."""
    scaled: dict[nn.Parameter, None] = {}
    counted: dict[nn.Parameter, int] = {}
    for stage in stages:
        module = module_of(stage)
        copies = {id(find(stage, name)) for name, group in stage.tied.items() if group.owner != stage.stage_index}
        for parameter in module.parameters():
            scaled.setdefault(parameter)
            if id(parameter) not in copies:
                counted.setdefault(parameter, stage.stage_index)
    return [(stage, parameter) for parameter, stage in counted.items()], list(scaled)


def _norms(counted: Sequence[tuple[int, nn.Parameter]], order: float) -> list[_Norm]:
    """The norm of each gradient that there is, over all its shards."""
    sharded = _over_shards([parameter for _, parameter in counted if isinstance(parameter, DTensor)], order)
    found = []
    for stage, parameter in counted:
        if isinstance(parameter, DTensor):
            value = sharded[parameter]
        else:
            value = None if parameter.grad is None else _norm(parameter.grad, order)
        if value is not None:
            found.append(_Norm(stage, value))
    return found


def _over_shards(parameters: Sequence[DTensor], order: float) -> Mapping[torch.Tensor, torch.Tensor | None]:
    """The norms of DTensors' gradients: those of the shards, combined over the dimensions of the mesh that shard them.

    What is reduced together depends on the parameters, which all shards' ranks have, and not on the gradients, which one may
    lack. A row says whose gradient exists.
    """
    together: dict[tuple[DeviceMesh, tuple[int, ...]], list[DTensor]] = {}
    for parameter in parameters:
        dims = tuple(
            dim for dim, kind in enumerate(parameter.placements) if not (kind.is_replicate() or kind.is_partial())
        )
        together.setdefault((parameter.device_mesh, dims), []).append(parameter)
    found: dict[torch.Tensor, torch.Tensor | None] = {}
    for (mesh, dims), group in together.items():
        rows = []
        for parameter in group:
            grad = parameter.grad
            if not isinstance(grad, DTensor):  # None
                rows.append(torch.zeros(2, dtype=torch.double, device=mesh.device_type))
                continue
            local = grad.redistribute(placements=parameter.placements).to_local()
            value = _norm(local, order).double()
            rows.append(torch.stack([value if order == inf else value**order, torch.ones_like(value)]))
        table = torch.stack(rows)
        for dim in dims:
            dist.all_reduce(table, dist.ReduceOp.MAX if order == inf else dist.ReduceOp.SUM, group=mesh.get_group(dim))
        for parameter, (value, exists) in zip(group, table, strict=True):
            norm = value if order == inf else value ** (1 / order)
            found[parameter] = norm.to(parameter.dtype) if exists > 0 else None
    return found


def _norm(grad: torch.Tensor, order: float) -> torch.Tensor:
    """A tensor's norm; that of nothing is 0 in any order."""
    grad = grad.detach()
    values = grad.coalesce().values() if grad.is_sparse else grad
    norm: torch.Tensor = torch.linalg.vector_norm(values, order if values.numel() else 2.0)
    return norm


def _combine(words: Sequence[Word], order: float, device: torch.device) -> Word:
    """The norm of all ranks' norms."""
    entries: list[tuple[int, torch.dtype, torch.Tensor]] = []
    for rank, (payload, (values,)) in enumerate(words):
        problem, places = decode(payload)
        if problem is not None:
            return encode(f"rank {rank}: {problem}"), [torch.zeros(())]
        entries += [(stage, dtype, value) for (stage, dtype), value in zip(places, values.to(device), strict=True)]
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}  # torch takes the norms of one dtype together
    for _, dtype, value in sorted(entries, key=lambda entry: entry[0]):
        by_dtype.setdefault(dtype, []).append(value.to(dtype))
    norms = [value for values in by_dtype.values() for value in values]
    total = torch.linalg.vector_norm(torch.stack(norms), order) if norms else torch.zeros(())
    return encode(None), [total]
