"""What is no batch of messages: looked for where a post stumbles over it, so that a right one pays nothing."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from stepwell_meta import DTensorMeta, TensorMeta

from ._op import Op
from ._transport import Recv, Send
from .exceptions import P2PUsageError


def check_kinds(batch: object, error: Exception) -> None:
    """Say what in a batch is no message; nothing where that is not why the post failed.

    Args:
        batch: what was posted.
        error: what came of it.

    Raises:
        P2PUsageError: it is no sequence of sends and receives, or one of them holds something else than it should.
    """
    if not isinstance(batch, Sequence):
        raise P2PUsageError(f"post takes a list of Send and Recv, got {_kind(batch)}: write post([…])") from error
    for number, item in enumerate(batch):
        if not isinstance(item, Send | Recv):
            raise P2PUsageError(f"item {number} of a batch must be a Send or a Recv, got {_kind(item)}") from error
        what = f"the {type(item).__name__} that is item {number} of a batch"
        if not isinstance(item.op, Op):
            raise P2PUsageError(f"{what} needs an Op that says which message it is, got {_kind(item.op)}") from error
        if isinstance(item, Recv):
            _check_recv(item, what, error)


def _check_recv(recv: Recv, what: str, error: Exception) -> None:
    meta: object = recv.meta
    if not isinstance(meta, TensorMeta):
        if isinstance(meta, DTensorMeta):
            hint = "receive the local shard, meta.local"
        elif isinstance(meta, torch.Tensor):
            hint = "pass TensorMeta.from_tensor(…), and the tensor as buffer where the value shall come there"
        else:
            hint = "both ends agree beforehand what a value looks like"
        raise P2PUsageError(f"{what} ({recv.op}) needs a TensorMeta, got {_kind(meta)}: {hint}") from error
    if recv.buffer is not None and not isinstance(recv.buffer, torch.Tensor):
        raise P2PUsageError(f"{what} ({recv.op}) needs a tensor or None as buffer, got {_kind(recv.buffer)}") from error


def _kind(value: object) -> str:
    return "None" if value is None else type(value).__name__
