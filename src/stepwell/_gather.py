"""Brings what each rank has together on one of them, over the pipeline's own transport."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.distributed.tensor import DTensor

from stepwell_meta import decode, encode
from stepwell_p2p import Edge, Op, OpKind, Transport, receive_values, send_values
from stepwell_stage import Action, Event, Executor, Timeline

from .exceptions import PipelineError


def gather(
    transport: Transport, tensors: Mapping[str, torch.Tensor], *, to: int
) -> list[dict[str, torch.Tensor]] | None:
    """Every rank's named tensors, on rank ``to``, as they are now.

    A collective of all ranks of the transport.

    Args:
        transport: carries them.
        tensors: this rank's; plain ones.
        to: the rank that gets them.

    Returns:
        On rank ``to`` one dict for each rank, in order, of tensors that are nobody else's; elsewhere None.

    Raises:
        PipelineError: there is no rank ``to``, or a tensor is a DTensor or none at all.
    """
    if not 0 <= to < transport.size:
        raise PipelineError(f"there are ranks 0 to {transport.size - 1} to gather on, got to={to}")
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise PipelineError(
                f"{name!r} is no tensor, but a {type(tensor).__name__}: gather torch.tensor() of a number"
            )
        if isinstance(tensor, DTensor):
            raise PipelineError(
                f"{name!r} is a DTensor, of which each rank holds a part: gather its to_local(), or its full_tensor()"
            )
    if transport.rank != to:
        op = Op(OpKind.SEND_F, Edge(transport.rank, to), 0, -5)
        payload = encode(tuple(tensors))
        send_values(transport, op, payload, [tensor.detach() for tensor in tensors.values()]).wait()
        return None
    gathered: list[dict[str, torch.Tensor]] = []
    for rank in range(transport.size):
        if rank == to:
            gathered.append({name: tensor.detach().clone() for name, tensor in tensors.items()})
            continue
        names, values = receive_values(transport, Op(OpKind.RECV_F, Edge(rank, to), 0, -5))
        gathered.append(dict(zip(decode(names), values, strict=True)))
    return gathered


def gather_timeline(executor: Executor, *, to: int) -> Timeline | None:
    """What every rank did in the last step, on rank ``to``, with times from the start of the first."""
    times = torch.tensor([[event.start, event.end] for event in executor.events], dtype=torch.float64)
    actions = encode(tuple(str(event.action) for event in executor.events))
    words = {"times": times, "actions": torch.frombuffer(bytearray(actions), dtype=torch.uint8)}
    gathered = gather(executor.transport, words, to=to)
    if gathered is None:
        return None
    start = min(values["times"][0, 0].item() for values in gathered)
    events = []
    for rank, values in enumerate(gathered):
        names = decode(bytes(values["actions"].tolist()))
        for name, (begin, end) in zip(names, (values["times"] - start).tolist(), strict=True):
            events.append(Event(rank, Action.parse(name), begin, end))
    return Timeline(tuple(events), executor.plan.schedule.name)
