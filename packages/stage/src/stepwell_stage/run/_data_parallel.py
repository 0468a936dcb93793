"""The data-parallel side of a stage's module: DDP and FSDP2 (``fully_shard``, ``replicate``) under a pipeline.

Both are made for a forward followed by its backward, and reduce gradients from hooks in it. In a pipeline several microbatches
are under way, in any order, and a backward may come in two parts. So during microbatches both are held back: gradients gather
in ``.grad`` (or FSDP's unsharded gradient), and parameters stay gathered. What they do to whole parameters and gradients is done
by the plan's actions alone: UNSHARD, RESHARD, and after the last backward, whichever that is, one REDUCE_GRAD.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, UnshardHandle
from torch.nn.parallel import DistributedDataParallel

from .._compat import hold_back_fsdp, is_ddp_replicated, reduce_ddp, reduce_fsdp
from ..exceptions import StageUsageError


class DataParallel:
    """The DDP and FSDP2 modules in a stage's module; mutable: it holds gathers under way.

    FSDP2 modules are set not to reshard after forward or backward and not to reduce in backward, for good: the plan's actions
    do that from here on.

    Args:
        module: the stage's module, or one with such modules inside.

    Attributes:
        parts: those modules.
        is_sharded: whether parameters must be gathered before anything is computed.

    Raises:
        StageUsageError: a module is wrapped in a way that cannot hold its gradients back.
    """

    def __init__(self, module: nn.Module) -> None:
        self._ddp: list[DistributedDataParallel] = []
        self._fsdp: list[FSDPModule] = []
        self._gathering: list[UnshardHandle] = []
        for name, part in module.named_modules():
            where = f"module {name!r}" if name else "the stage's module"
            if isinstance(part, FullyShardedDataParallel):
                raise StageUsageError(
                    f"{where} is a FullyShardedDataParallel, which frees its parameters after each backward and cannot run two"
                    " in a row; use torch.distributed.fsdp.fully_shard"
                )
            if is_ddp_replicated(part):
                raise StageUsageError(
                    f"{where} was given to the composable replicate() of DDP, which reduces in every backward; wrap it in"
                    " DistributedDataParallel, or use torch.distributed._composable.replicate_with_fsdp"
                )
            if isinstance(part, DistributedDataParallel):
                if part.static_graph:
                    raise StageUsageError(
                        f"{where} is a DistributedDataParallel with static_graph=True, which counts the backwards of each"
                        " parameter and fits no microbatches; leave it out"
                    )
                self._ddp.append(part)
            elif isinstance(part, FSDPModule):
                hold_back_fsdp(part)
                self._fsdp.append(part)
        self.parts = (*self._ddp, *self._fsdp)
        self.is_sharded = bool(self._fsdp)

    @contextlib.contextmanager
    def microbatch(self) -> Iterator[None]:
        """Around the forward or backward of a microbatch: parameters are there, and nothing is reduced."""
        while self._gathering:
            self._gathering.pop().wait()
        for part in self._fsdp:
            part.set_is_last_backward(False)
        with contextlib.ExitStack() as stack:
            for ddp in self._ddp:
                stack.enter_context(ddp.no_sync())
            yield

    def unshard(self) -> None:
        """Begin to gather the parameters."""
        handles = [part.unshard(async_op=True) for part in self._fsdp]
        self._gathering += [handle for handle in handles if handle is not None]

    def reshard(self) -> None:
        """Free what was gathered."""
        while self._gathering:
            self._gathering.pop().wait()
        for part in self._fsdp:
            part.reshard()

    def reduce_grads(self) -> None:
        """Average the gradients over the replicas, once; in FSDP2 leave each rank its shard.

        A DDP module under its own ``no_sync()`` is left out: its gradients go on adding up.

        Raises:
            StageUsageError: a parameter of a DDP module has no gradient, and ``find_unused_parameters`` is not set.
        """
        for ddp in self._ddp:
            if ddp.require_backward_grad_sync:
                reduce_ddp(ddp, _reducible(ddp))
        if self._fsdp:
            reduce_fsdp(self._fsdp)


def find_data_parallel(module: nn.Module) -> DataParallel | None:
    """The data-parallel side of a module, or None where it has none."""
    found = DataParallel(module)
    return found if found.parts else None


def _reducible(ddp: DistributedDataParallel) -> list[nn.Parameter]:
    """The parameters whose gradients DDP is to reduce."""
    ignored = ddp.parameters_to_ignore
    parameters = {name: p for name, p in ddp.module.named_parameters() if p.requires_grad and name not in ignored}
    unused = [name for name, parameter in parameters.items() if parameter.grad is None]
    if unused and not ddp.find_unused_parameters:
        raise StageUsageError(
            f"no microbatch gave a gradient to {', '.join(unused)}, and DistributedDataParallel waits for all of its parameters;"
            " freeze what is not used before it is wrapped, or wrap it with find_unused_parameters=True"
        )
    return [parameter for parameter in parameters.values() if parameter.grad is not None]
